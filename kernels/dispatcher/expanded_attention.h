// `mla::expanded_attention` without a mask, as `expanded_attention/chunks.py` goes about it.

namespace {

std::array<std::atomic<ExpandedAttentionKernel*>, DTYPES * DTYPES> expanded_attention_kernels;

// A kernel, and the dtype of the keys that it takes.
struct OfChunks {
  ExpandedAttentionKernel* kernel = nullptr;
  at::ScalarType dtype = at::kFloat;

  explicit OfChunks(at::ScalarType number) {
    const int64_t queries = place(number);
    if (queries < 0) return;
    for (const at::ScalarType keys : {number, at::kFloat}) {
      if (kernel) return;
      kernel = expanded_attention_kernels[queries * DTYPES + place(keys)].load();
      dtype = keys;
    }
  }
};

constexpr int64_t HEADS_AT_A_TIME = 16;
constexpr int64_t CACHE_LINE = 64;

// `[., L]`; in half precision a 0 makes L even, as a library that multiplies pairs reads on into the next row.
Tensor even(const Tensor& rows) {
  return rows.element_size() < 4 && rows.size(1) % 2 ? at::constant_pad_nd(rows, {0, 1}) : rows;
}

// Rows in a piece of memory, with a cache line left out between them.
Tensor rows_in(const Tensor& memory, int64_t rows, int64_t columns) {
  return memory.as_strided({rows, columns}, {columns + CACHE_LINE / memory.element_size(), 1});
}

Tensor room_for(const Tensor& like, int64_t rows, int64_t columns) {
  return at::empty({rows * (columns + CACHE_LINE / like.element_size())}, like.options());
}

// A group of heads of one sequence: q `[Sq, H, P + R]`, latent `[T, L]`, k_rope `[T, R]`, weights `[H P, L]` and
// `[H V, L]`; o `[Sq, H, V]` of zeros and lse `[Sq, H]` of -inf are filled.
void attend_heads(const OfChunks& chunks, const Tensor& q, const Tensor& latent, const Tensor& k_rope,
                  const Tensor& w_uk, const Tensor& w_uv, int64_t stop, int64_t cut, int64_t offset, int64_t size,
                  float scale, const Tensor& o, const Tensor& lse) {
  const int64_t queries = q.size(0), heads = q.size(1), value = o.size(2), rope_width = k_rope.size(1);
  const int64_t most = std::min(size, stop);
  const Tensor memory = room_for(w_uk, most, w_uk.size(0)), other_memory = room_for(w_uv, w_uv.size(0), most);
  for (int64_t start = 0, end; start < stop; start = end) {
    end = std::min(start + size, start < cut ? std::min(cut, stop) : stop);
    const int64_t count = end - start;
    const Tensor here = even(latent.narrow(0, start, count).to(chunks.dtype));
    Tensor rope = k_rope.narrow(0, start, count).to(chunks.dtype);
    if (rope_width > 1 && rope.stride(1) != 1) rope = rope.contiguous();
    Tensor k = rows_in(memory, count, w_uk.size(0)), v = rows_in(other_memory, w_uv.size(0), count);
    at::mm_out(k, here, w_uk.t());
    at::mm_out(v, w_uv, here.t());
    const int64_t nope = w_uk.size(0) / heads;
    chunks.kernel(q.data_ptr(), k.data_ptr(), rope.data_ptr(), v.data_ptr(), 0, o.data_ptr<float>(),
                  lse.data_ptr<float>(), heads, queries, count, nope, rope_width, value, q.stride(1), q.stride(0), nope,
                  k.stride(0), rope.stride(0), value * v.stride(0), v.stride(0), 0, 0, 0, o.stride(1), o.stride(0),
                  lse.stride(1), lse.stride(0), offset - start, scale, at::get_num_threads());
  }
}

Attended expanded_attention(const Tensor& q, const Tensor& latent, const Tensor& k_rope, const Tensor& w_uk,
                            const Tensor& w_uv, const std::optional<Tensor>& mask,
                            std::optional<int64_t> causal_offset, double scale, int64_t workspace_tokens) {
  const bool ranks =
      q.dim() == 4 && latent.dim() == 3 && k_rope.dim() == 3 && w_uk.dim() == 3 && w_uv.dim() == 3;
  const OfChunks chunks(q.scalar_type());
  const bool fits = ranks && latent.size(0) == q.size(0) && k_rope.sizes().slice(0, 2) == latent.sizes().slice(0, 2) &&
                    w_uk.size(0) == q.size(2) && w_uv.size(0) == q.size(2) && w_uk.size(2) == latent.size(2) &&
                    w_uv.size(2) == latent.size(2) && w_uk.size(1) + k_rope.size(2) == q.size(3) &&
                    workspace_tokens > 0 && alike(q, {latent, k_rope, w_uk, w_uv});
  if (!chunks.kernel || !fits || is_given(mask)) {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const std::optional<Tensor>&, std::optional<int64_t>, double, int64_t)>(
            "mla::expanded_attention_general");
    return op.call(q, latent, k_rope, w_uk, w_uv, mask, causal_offset, scale, workspace_tokens);
  }
  const int64_t batch = q.size(0), queries = q.size(1), heads = q.size(2), tokens = latent.size(1);
  // Without a limit all queries see the last key of all.
  const int64_t offset = causal_offset.value_or(tokens), stop = std::min(std::max(queries + offset, int64_t{0}), tokens);
  const int64_t cut = causal_offset ? std::max(offset, int64_t{0}) : 0;
  const Tensor dense = q.size(3) > 1 && q.stride(3) != 1 ? q.contiguous() : q;
  const Tensor o = at::zeros({batch, queries, heads, w_uv.size(1)}, q.options());
  const Tensor lse = at::full({batch, queries, heads}, -INFINITY, q.options().dtype(at::kFloat));
  for (int64_t head = 0; queries && stop && head < heads; head += HEADS_AT_A_TIME) {
    const int64_t some = std::min(HEADS_AT_A_TIME, heads - head);
    const auto rows = [&](const Tensor& weight) {
      return even(weight.narrow(0, head, some).to(chunks.dtype).reshape({-1, weight.size(2)}));
    };
    const Tensor of_keys = rows(w_uk), of_values = rows(w_uv);
    for (int64_t b = 0; b < batch; ++b) {
      const Tensor out = o[b].narrow(1, head, some);
      const Tensor state = o.scalar_type() == at::kFloat ? out : at::zeros(out.sizes(), lse.options());
      attend_heads(chunks, dense[b].narrow(1, head, some), latent[b], k_rope[b], of_keys, of_values, stop, cut, offset,
                   workspace_tokens, static_cast<float>(scale), state, lse[b].narrow(1, head, some));
      if (!state.is_same(out)) out.copy_(state);
    }
  }
  return {o, lse};
}

}  // namespace
