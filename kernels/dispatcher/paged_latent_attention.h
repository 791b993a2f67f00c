// `mla::paged_latent_attention` for a few rows, or for many without a mask.

namespace {

// The stride of keys in pages `[pages, page_size, .]`, of all keys if they can be numbered throughout; else none.
std::optional<int64_t> stride_of_keys(const Tensor& pages) {
  if (pages.size(1) == 1) return pages.stride(0);
  const bool throughout = pages.size(0) < 2 || pages.stride(0) == pages.size(1) * pages.stride(1);
  return throughout ? std::optional(pages.stride(1)) : std::nullopt;
}

// Pages, copied if a kernel could not read them and there is no general implementation that could.
Tensor readable_pages(const Tensor& pages) {
  return alone() && pages.dim() == 3 && !stride_of_keys(pages) ? pages.contiguous() : readable(pages);
}

// The numbers of the visible keys in all pages, `[sequences, keys]`; table `[sequences, columns]`.
std::vector<int64_t> numbers_of(const Visible& visible, const int64_t* table, int64_t columns, int64_t page_size,
                                int64_t sequences) {
  std::vector<int64_t> numbers;
  numbers.reserve(sequences * visible.keys);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = visible.counts.empty() ? visible.keys : visible.counts[s];
    for (int64_t k = 0; k < count; ++k) {
      const int64_t key = visible.named.empty() ? visible.first_key + k : visible.named[s * visible.keys + k];
      numbers.push_back(table[s * columns + key / page_size] * page_size + key % page_size);
    }
    numbers.resize((s + 1) * visible.keys);
  }
  return numbers;
}

Attended paged_latent_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& given_latent_pages,
                                const Tensor& given_rope_pages, const Tensor& block_table, const Tensor& seq_lens,
                                bool causal, double scale, const std::optional<Tensor>& latent_scales,
                                std::optional<int64_t> split_tokens, const std::optional<Tensor>& mask,
                                const std::optional<Tensor>& first_positions) {
  const Tensor latent_pages = readable_pages(given_latent_pages), rope_pages = readable_pages(given_rope_pages);
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
  if (!ranks || !alike(q_latent, {q_rope})) return otherwise();
  LatentAttentionKernel* kernel = attention_kernel(q_latent, latent_pages, rope_pages);
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), page_size = latent_pages.size(1);
  const bool counts = count_fits(seq_lens, batch) && block_table.size(0) == batch && Integers::fit(block_table) &&
                      (!is_given(first_positions) || count_fits(*first_positions, batch)) &&
                      split_tokens.value_or(1) > 0;
  const bool fits = counts && batch > 0 && page_size > 0 &&
                    queries_fit(q_latent, q_rope) &&
                    keys_fit(latent_pages, rope_pages, q_latent.size(3), q_rope.size(3)) &&
                    dtypes_fit(q_latent, latent_pages, rope_pages, latent_scales);
  std::vector<int64_t> lengths, table;
  int64_t columns;
  if (!fits || !table_of(block_table, seq_lens, page_size, latent_pages.size(0), lengths, table, columns))
    return otherwise();
  const Tensor scales = scales_of(latent_scales, latent_pages);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const auto limit_of = [&](int64_t b) -> std::optional<int64_t> {
    if (!causal) return std::nullopt;
    if (!is_given(first_positions)) return lengths[b] - queries;
    return Integers(*first_positions)[b * first_positions->stride(0)];
  };
  if (const OfChunks chunks(q_latent.scalar_type()); !is_given(mask) && are_many(q_latent, longest, causal, chunks)) {
    std::vector<Sequence> sequences;
    for (int64_t b = 0; b < batch; ++b) {
      const PagedKeys keys{latent_pages, rope_pages, scales, table.data() + b * columns};
      sequences.push_back({b, queries, Seen(queries, lengths[b], limit_of(b)), keys.loaded()});
    }
    return attend_many_queries(chunks, q_latent, q_rope, sequences, scale);
  }
  if (!kernel || !are_few(queries * q_latent.size(2))) return otherwise();
  const auto of_latents = stride_of_keys(latent_pages), of_ropes = stride_of_keys(rope_pages);
  const auto of_scales = scales.defined() ? stride_of_keys(scales) : 0;
  if (is_given(mask)) {
    const bool covers = mask->dim() == 4 && (mask->size(3) == 1 || mask->size(3) >= longest) &&
                        mask_fits(*mask, batch, q_latent.size(2), queries, mask->size(3));
    if (!covers || !of_latents || !of_ropes || !of_scales) return otherwise();
  }

  const Call call(kernel, q_latent, q_rope, queries, scale);
  // How keys are distributed over threads depends on all sequences of a call.
  const int64_t together = split_tokens ? 1 : batch;
  for (int64_t first = 0; first < batch; first += together) {
    Limits limits;
    for (int64_t b = first; b < first + together; ++b) limits.push_back({limit_of(b), lengths[b]});
    const Tensor own = !is_given(mask) || mask->size(0) == 1 ? mask.value_or(Tensor())
                                                             : mask->narrow(0, first, together);
    const Visible visible = visible_to(own, limits, together, queries);
    CachedKeys cached{latent_pages,
                      rope_pages,
                      {0, latent_pages.stride(0), latent_pages.stride(1)},
                      {0, rope_pages.stride(0), rope_pages.stride(1)},
                      together,
                      page_size,
                      table.data() + first * columns,
                      columns,
                      scales.defined() ? scales.unsqueeze(0) : scales};
    std::vector<int64_t> numbers;
    if (!visible.named.empty() || visible.first_key > 0) {  // as pages of one key
      numbers = numbers_of(visible, cached.table, columns, page_size, together);
      cached.latent_strides = {0, *of_latents, 0}, cached.rope_strides = {0, *of_ropes, 0};
      cached.page_size = 1, cached.table = numbers.data(), cached.table_row = visible.keys;
      if (scales.defined())
        cached.scales = scales.as_strided({1, scales.size(0) * page_size, 1, scales.size(2)},
                                          {0, *of_scales, 0, scales.stride(2)});
    }
    call.run(cached, first, together, visible.keys, visible.counts, visible.offsets, bias_of(visible.bias));
  }
  return {call.o, call.lse};
}

}  // namespace
