// `mla::sparse_latent_attention`: each query is a sequence whose keys lie in pages of one key.

namespace {

// Writes the existing keys among those that queries name, `[B, Sq, topk]`, up to i + offset for query i and if a mask
// `[B, 1, Sq, T]` leaves them, to the start of the query's row of a table `[B * Sq, topk]`, and their number to
// `lengths`.
void table_of_named(const Tensor& indices, const Tensor& mask, int64_t tokens, std::optional<int64_t> offset,
                    std::vector<int64_t>& table, std::vector<int64_t>& lengths) {
  const Integers named(indices);
  const int64_t batch = indices.size(0), queries = indices.size(1), count = indices.size(2);
  table.resize(batch * queries * count);
  for (int64_t row = 0; row < batch * queries; ++row) {
    const int64_t b = row / queries, i = row % queries;
    const int64_t stop = offset ? std::min(tokens, i + *offset + 1) : tokens;
    const int64_t from = b * indices.stride(0) + i * indices.stride(1);
    const bool* seen = mask.defined() ? mask.const_data_ptr<bool>() + b * mask.stride(0) + i * mask.stride(2) : nullptr;
    int64_t* to = table.data() + row * count;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t key = named[from + k * indices.stride(2)];
      if (key >= 0 && key < stop && (!seen || seen[key * mask.stride(3)])) *to++ = key;
    }
    lengths.push_back(to - table.data() - row * count);
  }
}

Attended sparse_latent_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& given_latent,
                                 const Tensor& given_k_rope, const Tensor& indices, const std::optional<Tensor>& mask,
                                 std::optional<int64_t> causal_offset, double scale, bool uniform_when_empty,
                                 const std::optional<Tensor>& latent_scales) {
  const Tensor latent = readable(given_latent), k_rope = readable(given_k_rope);
  const auto otherwise = [&] {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const std::optional<Tensor>&, std::optional<int64_t>, double, bool,
                         const std::optional<Tensor>&)>("mla::sparse_latent_attention_general");
    return op.call(q_latent, q_rope, latent, k_rope, indices, mask, causal_offset, scale, uniform_when_empty,
                   latent_scales);
  };
  const bool ranks = q_latent.dim() == 4 && q_rope.dim() == 4 && latent.dim() == 3 && k_rope.dim() == 3 &&
                     indices.dim() == 3;
  if (!ranks || !alike(q_latent, {q_rope})) return otherwise();
  LatentAttentionKernel* kernel = attention_kernel(q_latent, latent, k_rope);
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), tokens = latent.size(1);
  const bool fits = latent.size(0) == batch && indices.sizes().slice(0, 2) == q_latent.sizes().slice(0, 2) &&
                    Integers::fit(indices) && batch * queries > 0 && tokens > 0 &&
                    queries_fit(q_latent, q_rope) && are_few(q_latent.size(2)) &&
                    keys_fit(latent, k_rope, q_latent.size(3), q_rope.size(3)) &&
                    dtypes_fit(q_latent, latent, k_rope, latent_scales) &&
                    (!is_given(mask) ||
                     (mask->scalar_type() == at::kBool && mask_fits(*mask, batch, 1, queries, tokens)));
  if (!kernel || !fits) return otherwise();

  std::vector<int64_t> table, lengths;
  const Tensor seen = is_given(mask) ? mask->expand({batch, 1, queries, tokens}) : Tensor();
  table_of_named(indices, seen, tokens, causal_offset, table, lengths);
  const Tensor scales = scales_of(latent_scales, latent);
  const Call call(kernel, q_latent, q_rope, 1, scale);
  const CachedKeys cached{latent,
                          k_rope,
                          {latent.stride(0), latent.stride(1), 0},
                          {k_rope.stride(0), k_rope.stride(1), 0},
                          queries,
                          1,
                          table.data(),
                          indices.size(2),
                          scales.defined() ? scales.unsqueeze(2) : scales};
  call.run(cached, 0, batch * queries, 0, lengths, {});
  // Then rows that saw no key are the mean of all latents, which the general implementation computes.
  const float* lse = call.lse.const_data_ptr<float>();
  if (uniform_when_empty && std::find(lse, lse + call.lse.numel(), -INFINITY) != lse + call.lse.numel())
    return otherwise();
  return {call.o, call.lse};
}

}  // namespace
