// `mla::latent_attention` for a few rows whose keys are a range.

namespace {

// Consecutive keys of some sequences.
struct Span {
  int64_t first_sequence, sequences, first_key, keys;
};

// The spans of the first `stop` keys that a mask with one row per sequence leaves. False if one is not a range.
bool spans_of(const Tensor& mask, int64_t sequences, int64_t stop, std::vector<Span>& spans) {
  const int64_t rows = mask.size(0), step = mask.stride(3);
  for (int64_t row = 0; row < rows; ++row) {
    const bool* seen = mask.const_data_ptr<bool>() + row * mask.stride(0);
    int64_t count = 0, first = 0, end = stop;
    for (int64_t j = 0; j < stop; ++j) count += seen[j * step];
    while (first < end && !seen[first * step]) ++first;
    while (end > first && !seen[(end - 1) * step]) --end;
    if (count != end - first) return false;
    spans.push_back({row, rows == 1 ? sequences : 1, first, count});
  }
  return true;
}

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
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), tokens = latent.size(1);
  const bool fits = latent.size(0) == batch && queries_fit(q_latent, q_rope, queries * q_latent.size(2)) &&
                    keys_fit(latent, k_rope, q_latent.size(3), q_rope.size(3));
  if (!kernel || !fits) return otherwise();

  const int64_t offset = causal_offset.value_or(tokens);
  const int64_t stop = std::min(std::max(queries + offset, int64_t{0}), tokens);
  std::vector<Span> spans;
  if (is_given(mask)) {
    const bool row_a_sequence = mask->dim() == 4 && mask->scalar_type() == at::kBool && mask->device().is_cpu() &&
                                mask->size(3) == tokens && broadcasts(*mask, {batch, 1, 1, tokens});
    if (!row_a_sequence || !spans_of(*mask, batch, stop, spans)) return otherwise();
  } else {
    spans.push_back({0, batch, 0, stop});
  }
  const Call call(kernel, q_latent, q_rope, queries, scale);
  const CachedKeys cached{latent,
                          k_rope,
                          {latent.stride(0), 0, latent.stride(1)},
                          {k_rope.stride(0), 0, k_rope.stride(1)},
                          1,
                          std::max(tokens, int64_t{1})};
  for (const Span& span : spans) {
    const int64_t b = span.first_sequence, key = span.first_key;
    std::vector<int64_t> offsets;
    if (key + span.keys - 1 > offset) offsets.assign(b + span.sequences, offset - key);
    call.run(cached, b, span.sequences, span.keys, nullptr, offsets.empty() ? nullptr : offsets.data(),
             b * latent.stride(0) + key * latent.stride(1), b * k_rope.stride(0) + key * k_rope.stride(1));
  }
  return {call.o, call.lse};
}

}  // namespace
