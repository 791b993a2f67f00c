// `mla::paged_expanded_attention` without a mask, computed as in `paged_expanded_attention/aten.py`.

namespace {

Attended paged_expanded_attention(const Tensor& q, const Tensor& latent_pages, const Tensor& rope_pages,
                                  const Tensor& block_table, const Tensor& seq_lens, const Tensor& w_uk,
                                  const Tensor& w_uv, bool causal, double scale, int64_t workspace_tokens,
                                  const std::optional<Tensor>& latent_scales, const std::optional<Tensor>& mask,
                                  const std::optional<Tensor>& first_positions,
                                  const std::optional<Tensor>& query_lens) {
  const bool ranks = q.dim() == 4 && latent_pages.dim() == 3 && rope_pages.dim() == 3 && block_table.dim() == 2 &&
                     w_uk.dim() == 3 && w_uv.dim() == 3;
  const OfChunks chunks(q.scalar_type());
  const int64_t batch = ranks ? q.size(0) : 0, page_size = ranks ? latent_pages.size(1) : 0;
  const auto counts_fit = [&](const std::optional<Tensor>& counts) {
    return !is_given(counts) || count_fits(*counts, batch);
  };
  bool fits = ranks && page_size > 0 && workspace_tokens > 0 && !is_given(mask) && alike(q, {w_uk, w_uv}) &&
              rope_pages.sizes().slice(0, 2) == latent_pages.sizes().slice(0, 2) &&
              latent_pages.device().is_cpu() && rope_pages.device().is_cpu() &&
              weights_fit(q, w_uk, w_uv, rank_of(latent_pages), rope_pages.size(2)) && latent_pages.size(2) > 0 &&
              dtypes_fit(q, latent_pages, rope_pages, latent_scales) && count_fits(seq_lens, batch) &&
              block_table.size(0) == batch && Integers::fit(block_table) && counts_fit(first_positions) &&
              counts_fit(query_lens);
  std::vector<int64_t> lengths, table, queries;
  int64_t columns;
  fits = fits && chunks.kernel &&
         table_of(block_table, seq_lens, page_size, latent_pages.size(0), lengths, table, columns);
  for (int64_t b = 0; fits && b < batch; ++b) {
    queries.push_back(is_given(query_lens) ? Integers(*query_lens)[b * query_lens->stride(0)] : q.size(1));
    fits = 0 <= queries[b] && queries[b] <= q.size(1);
  }
  if (!fits) {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const Tensor&, bool, double, int64_t, const std::optional<Tensor>&,
                         const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&)>(
            "mla::paged_expanded_attention_general");
    return op.call(q, latent_pages, rope_pages, block_table, seq_lens, w_uk, w_uv, causal, scale, workspace_tokens,
                   latent_scales, mask, first_positions, query_lens);
  }
  const Tensor scales = scales_of(latent_scales, latent_pages);
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    const PagedKeys keys{latent_pages, rope_pages, scales, table.data() + b * columns};
    std::optional<int64_t> offset;
    if (causal)
      offset = is_given(first_positions) ? Integers(*first_positions)[b * first_positions->stride(0)]
                                         : lengths[b] - queries[b];
    sequences.push_back({b, queries[b], Seen(queries[b], lengths[b], offset), keys.loaded()});
  }
  return attend_in_chunks(chunks, q, sequences, w_uk, w_uv, scale, workspace_tokens);
}

}  // namespace
