// `mla::paged_latent_attention` for a few rows, without a mask.

namespace {

// The pages in use by each sequence, int64 `[B, columns]`, and the lengths. False if a length or a page is invalid.
bool table_of(const Tensor& block_table, const Tensor& seq_lens, int64_t page_size, int64_t pages,
              std::vector<int64_t>& lengths, std::vector<int64_t>& table, int64_t& columns) {
  const Integers given(block_table), counts(seq_lens);
  const int64_t batch = block_table.size(0);
  columns = 1;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = counts[b * seq_lens.stride(0)], used = (length + page_size - 1) / page_size;
    if (length < 0 || used > block_table.size(1)) return false;
    lengths.push_back(length);
    columns = std::max(columns, used);
  }
  table.resize(batch * columns);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < (lengths[b] + page_size - 1) / page_size; ++i) {
      const int64_t page = given[b * block_table.stride(0) + i * block_table.stride(1)];
      if (page < 0 || page >= pages) return false;
      table[b * columns + i] = page;
    }
  return true;
}

bool count_fits(const Tensor& tensor, int64_t batch) {
  return tensor.dim() == 1 && tensor.size(0) == batch && Integers::fit(tensor);
}

Attended paged_latent_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latent_pages,
                                const Tensor& rope_pages, const Tensor& block_table, const Tensor& seq_lens,
                                bool causal, double scale, const std::optional<Tensor>& latent_scales,
                                std::optional<int64_t> split_tokens, const std::optional<Tensor>& mask,
                                const std::optional<Tensor>& first_positions) {
  const auto otherwise = [&] {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                         double, const std::optional<Tensor>&, std::optional<int64_t>, const std::optional<Tensor>&,
                         const std::optional<Tensor>&)>("mla::paged_latent_attention_general");
    return op.call(q_latent, q_rope, latent_pages, rope_pages, block_table, seq_lens, causal, scale, latent_scales,
                   split_tokens, mask, first_positions);
  };
  const bool ranks = q_latent.dim() == 4 && q_rope.dim() == 4 && latent_pages.dim() == 3 && rope_pages.dim() == 3 &&
                     block_table.dim() == 2;
  if (!ranks || is_given(mask) || !alike(q_latent, {q_rope})) return otherwise();
  LatentAttentionKernel* kernel = attention_kernel(q_latent, latent_pages, rope_pages);
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), page_size = latent_pages.size(1);
  const bool counts = count_fits(seq_lens, batch) && block_table.size(0) == batch && Integers::fit(block_table) &&
                      (!is_given(first_positions) || count_fits(*first_positions, batch)) &&
                      split_tokens.value_or(1) > 0;
  const bool fits = counts && batch > 0 && page_size > 0 &&
                    queries_fit(q_latent, q_rope, queries * q_latent.size(2)) &&
                    keys_fit(latent_pages, rope_pages, q_latent.size(3), q_rope.size(3)) &&
                    dtypes_fit(q_latent, latent_pages, rope_pages, latent_scales);
  std::vector<int64_t> lengths, offsets, table;
  int64_t columns;
  if (!kernel || !fits ||
      !table_of(block_table, seq_lens, page_size, latent_pages.size(0), lengths, table, columns))
    return otherwise();

  for (int64_t b = 0; causal && b < batch; ++b) {
    offsets.push_back(is_given(first_positions) ? Integers(*first_positions)[b * first_positions->stride(0)]
                                                : lengths[b] - queries);
    // Keys after the last query may hold anything.
    lengths[b] = std::max(std::min(lengths[b], offsets[b] + queries), int64_t{0});
  }
  const Tensor scales = scales_of(latent_scales, latent_pages);
  const Call call(kernel, q_latent, q_rope, queries, scale);
  const CachedKeys cached{latent_pages,
                          rope_pages,
                          {0, latent_pages.stride(0), latent_pages.stride(1)},
                          {0, rope_pages.stride(0), rope_pages.stride(1)},
                          batch,
                          page_size,
                          table.data(),
                          columns,
                          scales.defined() ? scales.unsqueeze(0) : scales};
  // How keys are distributed over threads depends on all sequences of a call.
  const int64_t together = split_tokens ? 1 : batch;
  for (int64_t b = 0; b < batch; b += together)
    call.run(cached, b, together, 0, lengths.data(), causal ? offsets.data() : nullptr);
  return {call.o, call.lse};
}

}  // namespace
