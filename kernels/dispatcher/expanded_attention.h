// `mla::expanded_attention` without a mask, computed as in `expanded_attention/chunks.py`.

namespace {

std::array<std::atomic<ExpandedAttentionKernel*>, DTYPES * DTYPES> expanded_attention_kernels;

// The kernel for queries of a dtype, and the dtype of the keys that it takes.
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

// Pads rows `[., L]` with a 0 where L is odd in half precision: a library that multiplies pairs of numbers would read
// on into the next row.
Tensor even(const Tensor& rows) {
  return rows.element_size() < 4 && rows.size(1) % 2 ? at::constant_pad_nd(rows, {0, 1}) : rows;
}

// Rows in a piece of memory, with a gap of one cache line between them.
Tensor rows_in(const Tensor& memory, int64_t rows, int64_t columns) {
  return memory.as_strided({rows, columns}, {columns + CACHE_LINE / memory.element_size(), 1});
}

Tensor room_for(const Tensor& like, int64_t rows, int64_t columns) {
  return at::empty({rows * (columns + CACHE_LINE / like.element_size())}, like.options());
}

// A group of heads.
struct Heads {
  int64_t first, count;
};

// Loads some of the keys of one sequence: latents `[C, L]` and the rope keys of a group of heads, `[C, R]` if all heads
// share them, else `[C, H, R]`, in a dtype.
typedef std::function<std::pair<Tensor, Tensor>(Heads heads, int64_t first, int64_t count, at::ScalarType dtype)> Load;

// Of latents `[T, L]` and rope keys `[T, R]` or `[T, N, R]`.
Load loaded(const Tensor& latent, const Tensor& k_rope) {
  return [latent, k_rope](Heads heads, int64_t first, int64_t count, at::ScalarType dtype) {
    const Tensor rope = k_rope.narrow(0, first, count);
    return std::pair(latent.narrow(0, first, count).to(dtype),
                     (rope.dim() == 3 ? rope.narrow(1, heads.first, heads.count) : rope).to(dtype));
  };
}

// What the queries of one sequence see: keys before `stop`, and of those query i sees keys up to i + offset.
struct Seen {
  int64_t stop, offset, cut;

  // Without a causal limit, all queries see all keys. Chunks are cut where a limit starts to hide keys.
  Seen(int64_t queries, int64_t tokens, std::optional<int64_t> causal_offset)
      : stop(tokens), offset(causal_offset.value_or(tokens)), cut(causal_offset ? std::max(offset, int64_t{0}) : 0) {
    stop = std::min(std::max(queries + offset, int64_t{0}), tokens);
    cut = std::min(cut, stop);
  }

  // Of a chunk of up to `size` keys that begins at `start`.
  int64_t end_of_chunk(int64_t start, int64_t size) const { return std::min(start + size, start < cut ? cut : stop); }
};

// Where the kernel sums up: in o, if that is float32 or there is one chunk; else in float32, from which o is rounded.
struct Sums {
  bool whole;  // o is not float32: the kernel divides by the totals and rounds
  Tensor o, of_chunks;

  Sums(const Tensor& output, bool one_chunk) : whole(one_chunk && output.scalar_type() != at::kFloat), o(output) {
    of_chunks = whole || o.scalar_type() == at::kFloat ? o : at::zeros(o.sizes(), o.options().dtype(at::kFloat));
  }
  void finish() const {
    if (!of_chunks.is_same(o)) o.copy_(of_chunks);
  }
};

// Latents `[C, L]` for keys, the first columns, and for values, the last ones. Most often both are all columns.
struct Latents {
  Tensor of_keys, of_values;

  Latents(const Tensor& latent, int64_t rank_of_keys, int64_t rank_of_values)
      : of_keys(even(latent.narrow(1, 0, rank_of_keys))), of_values(of_keys) {
    if (rank_of_values != latent.size(1) || rank_of_keys != latent.size(1))
      of_values = even(latent.narrow(1, rank_of_keys, rank_of_values));
  }
};

// The weights of a group of heads: `[H P, L]` and `[H V, L]`, padded by `even`, and the widths of their latents.
struct Weights {
  Tensor of_keys, of_values;
  int64_t rank_of_keys, rank_of_values;

  Weights(const Tensor& w_uk, const Tensor& w_uv, Heads group, at::ScalarType dtype)
      : rank_of_keys(w_uk.size(2)), rank_of_values(w_uv.size(2)) {
    const auto rows = [&](const Tensor& weight) {
      return even(weight.narrow(0, group.first, group.count).to(dtype).flatten(0, 1));
    };
    of_keys = rows(w_uk), of_values = rows(w_uv);
  }
};

// Attention of a group of heads of one sequence: q `[Sq, H, P + R]`. Fills the output `[Sq, H, V]`, zeros at first,
// and lse `[Sq, H]`, -inf at first.
void attend_heads(const OfChunks& chunks, const Tensor& q, Heads group, const Load& load, const Weights& weights,
                  const Seen& seen, int64_t size, float scale, const Tensor& output, const Tensor& lse) {
  const Tensor &w_uk = weights.of_keys, &w_uv = weights.of_values;
  const int64_t queries = q.size(0), heads = group.count, value = output.size(2), most = std::min(size, seen.stop);
  const Sums sums(output, seen.end_of_chunk(0, size) == seen.stop);
  const Tensor& o = sums.of_chunks;
  const Tensor memory = room_for(w_uk, most, w_uk.size(0)), other_memory = room_for(w_uv, w_uv.size(0), most);
  for (int64_t start = 0, end; start < seen.stop; start = end) {
    end = seen.end_of_chunk(start, size);
    const int64_t count = end - start;
    auto [here, rope] = load(group, start, count, chunks.dtype);
    const Latents latents(here, weights.rank_of_keys, weights.rank_of_values);
    if (rope.size(-1) > 1 && rope.stride(-1) != 1) rope = rope.contiguous();
    Tensor k = rows_in(memory, count, w_uk.size(0)), v = rows_in(other_memory, w_uv.size(0), count);
    at::mm_out(k, latents.of_keys, w_uk.t());
    at::mm_out(v, w_uv, latents.of_values.t());
    const int64_t nope = w_uk.size(0) / heads;
    const char* q_rope = static_cast<char*>(q.data_ptr()) + nope * q.element_size();
    chunks.kernel(q.data_ptr(), q_rope, k.data_ptr(), rope.data_ptr(), v.data_ptr(), 0, o.data_ptr(),
                  lse.data_ptr<float>(), heads, queries, 1, count, nope, rope.size(-1), value, q.stride(1),
                  q.stride(0), 0, q.stride(1), q.stride(0), 0, nope, k.stride(0),
                  rope.dim() == 3 ? rope.stride(1) : 0, rope.stride(0), value * v.stride(0), v.stride(0), 0, 0, 0,
                  o.stride(1), o.stride(0), lse.stride(1), lse.stride(0), seen.offset - start, sums.whole, scale,
                  at::get_num_threads());
  }
  sums.finish();
}

// One sequence: the number of its queries that are not padding, and what those see.
struct Sequence {
  int64_t b, queries;
  Seen seen;
  Load load;
};

// o and lse of q `[B, Sq, N, P + R]`, a group of heads at a time; 0 and -inf for queries that are padding.
Attended attend_in_chunks(const OfChunks& chunks, const Tensor& q, const std::vector<Sequence>& sequences,
                          const Tensor& w_uk, const Tensor& w_uv, double scale, int64_t workspace_tokens) {
  const int64_t heads = q.size(2);
  const Tensor dense = q.size(3) > 1 && q.stride(3) != 1 ? q.contiguous() : q;
  const Tensor o = at::zeros({q.size(0), q.size(1), heads, w_uv.size(1)}, q.options());
  const Tensor lse = at::full({q.size(0), q.size(1), heads}, -INFINITY, q.options().dtype(at::kFloat));
  for (int64_t head = 0; head < heads; head += HEADS_AT_A_TIME) {
    const int64_t some = std::min(HEADS_AT_A_TIME, heads - head);
    const Weights weights(w_uk, w_uv, {head, some}, chunks.dtype);
    for (const Sequence& sequence : sequences) {
      if (!sequence.queries || !sequence.seen.stop) continue;
      const auto own = [&](const Tensor& of_all) {
        return of_all[sequence.b].narrow(0, 0, sequence.queries).narrow(1, head, some);
      };
      attend_heads(chunks, own(dense), {head, some}, sequence.load, weights, sequence.seen, workspace_tokens,
                   static_cast<float>(scale), own(o), own(lse));
    }
  }
  return {o, lse};
}

// Whether queries `[B, Sq, N, P + R]` and weights `[N, P, L]`, `[N, V, L]` fit latents and rope keys of these widths.
bool weights_fit(const Tensor& q, const Tensor& w_uk, const Tensor& w_uv, int64_t rank, int64_t rope) {
  const int64_t of_keys = w_uk.size(2), of_values = w_uv.size(2);
  const bool ranks_fit = (of_keys == rank && of_values == rank) || of_keys + of_values == rank;
  return w_uk.size(0) == q.size(2) && w_uv.size(0) == q.size(2) && ranks_fit && w_uk.size(1) + rope == q.size(3);
}

Attended expanded_attention(const Tensor& q, const Tensor& latent, const Tensor& k_rope, const Tensor& w_uk,
                            const Tensor& w_uv, const std::optional<Tensor>& mask,
                            std::optional<int64_t> causal_offset, double scale, int64_t workspace_tokens,
                            std::optional<c10::string_view> kernels, bool measure) {
  const bool own_ropes = k_rope.dim() == 4;  // [B, T, N, R] instead of [B, T, R]
  const bool ranks = q.dim() == 4 && latent.dim() == 3 && (k_rope.dim() == 3 || own_ropes) && w_uk.dim() == 3 &&
                     w_uv.dim() == 3;
  const OfChunks chunks(q.scalar_type());
  const bool fits = ranks && latent.size(0) == q.size(0) && k_rope.sizes().slice(0, 2) == latent.sizes().slice(0, 2) &&
                    weights_fit(q, w_uk, w_uv, latent.size(2), k_rope.size(-1)) && workspace_tokens > 0 &&
                    (!own_ropes || k_rope.size(2) == q.size(2)) && alike(q, {latent, k_rope, w_uk, w_uv});
  if (!chunks.kernel || !fits || is_given(mask)) {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const std::optional<Tensor>&, std::optional<int64_t>, double, int64_t,
                         std::optional<c10::string_view>, bool)>("mla::expanded_attention_general");
    return op.call(q, latent, k_rope, w_uk, w_uv, mask, causal_offset, scale, workspace_tokens, kernels,
                   measure);
  }
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < q.size(0); ++b) {
    sequences.push_back(
        {b, q.size(1), Seen(q.size(1), latent.size(1), causal_offset), loaded(latent[b], k_rope[b])});
  }
  return attend_in_chunks(chunks, q, sequences, w_uk, w_uv, scale, workspace_tokens);
}

}  // namespace
