// `mla::latent_attention` for a few rows, or for many without a mask.

namespace {

Attended latent_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& given_latent,
                          const Tensor& given_k_rope, const std::optional<Tensor>& mask,
                          std::optional<int64_t> causal_offset, double scale) {
  const Tensor latent = readable(given_latent), k_rope = readable(given_k_rope);
  const auto otherwise = [&] {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         std::optional<int64_t>, double)>("mla::latent_attention_general");
    return op.call(q_latent, q_rope, latent, k_rope, mask, causal_offset, scale);
  };
  const bool ranks = q_latent.dim() == 4 && q_rope.dim() == 4 && latent.dim() == 3 && k_rope.dim() == 3;
  if (!ranks || !alike(q_latent, {q_rope, latent, k_rope})) return otherwise();
  LatentAttentionKernel* kernel = attention_kernel(q_latent, latent, k_rope);
  const OfChunks chunks(q_latent.scalar_type());
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), tokens = latent.size(1);
  const bool fits = latent.size(0) == batch && queries_fit(q_latent, q_rope) &&
                    keys_fit(latent, k_rope, q_latent.size(3), q_rope.size(3)) &&
                    (!is_given(mask) || mask_fits(*mask, batch, q_latent.size(2), queries, tokens));
  if (fits && !is_given(mask) && are_many(q_latent, tokens, causal_offset.has_value(), chunks)) {
    std::vector<Sequence> sequences;
    for (int64_t b = 0; b < batch; ++b)
      sequences.push_back({b, queries, Seen(queries, tokens, causal_offset), loaded(latent[b], k_rope[b])});
    return attend_many_queries(chunks, q_latent, q_rope, sequences, scale);
  }
  if (!kernel || !fits || !are_few(queries * q_latent.size(2))) return otherwise();

  const Visible visible = visible_to(mask, {{causal_offset, tokens}}, batch, queries);
  const Call call(kernel, q_latent, q_rope, queries, scale);
  const bool named = !visible.named.empty();  // as pages of one key; otherwise each sequence is one page
  const auto strides = [&](const Tensor& t) {
    return std::array<int64_t, 3>{t.stride(0), named ? t.stride(1) : 0, named ? 0 : t.stride(1)};
  };
  const CachedKeys cached{latent,
                          k_rope,
                          strides(latent),
                          strides(k_rope),
                          1,
                          named ? 1 : std::max(tokens, int64_t{1}),
                          named ? visible.named.data() : nullptr,
                          named && !visible.counts.empty() ? visible.keys : 0};
  call.run(cached, 0, batch, visible.keys, visible.counts, visible.offsets, bias_of(visible.bias),
           visible.first_key * latent.stride(1), visible.first_key * k_rope.stride(1));
  return {call.o, call.lse};
}

}  // namespace
