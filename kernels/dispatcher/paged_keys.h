// Keys in pages: which pages a sequence has, and its keys gathered from them.

namespace {

bool count_fits(const Tensor& tensor, int64_t batch) {
  return tensor.dim() == 1 && tensor.size(0) == batch && Integers::fit(tensor);
}

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

// The numbers of latents `[count, .]`, each in an element of its own.
Tensor one_by_one(const Tensor& latent) {
  if (latent.scalar_type() != at::kByte) return latent;
  const Tensor numbers = at::empty({latent.size(0), 2 * latent.size(1)}, at::kChar);
  const Tensor dense = latent.contiguous();
  const uint8_t* from = dense.const_data_ptr<uint8_t>();
  int8_t* to = numbers.mutable_data_ptr<int8_t>();
  for (int64_t i = 0; i < latent.numel(); ++i) {
    to[2 * i] = (from[i] & 15) - 8;
    to[2 * i + 1] = (from[i] >> 4) - 8;
  }
  return numbers;
}

// The keys of one sequence in pages; `table` is the sequence's row of page numbers.
struct PagedKeys {
  const Tensor &latent, &k_rope;
  Tensor scales;  // none, or `[pages, page_size, groups]`
  const int64_t* table;

  std::pair<Tensor, Tensor> load(int64_t first, int64_t count, at::ScalarType dtype) const {
    const int64_t page_size = latent.size(1);
    const Tensor page = at::empty({count}, at::kLong), row = at::empty({count}, at::kLong);
    for (int64_t i = 0; i < count; ++i) {
      page.mutable_data_ptr<int64_t>()[i] = table[(first + i) / page_size];
      row.mutable_data_ptr<int64_t>()[i] = (first + i) % page_size;
    }
    // Indexing does not support FP8, so the same memory is indexed as bytes.
    const auto some = [&](const Tensor& pages) {
      const bool fp8 = pages.scalar_type() == at::kFloat8_e4m3fn;
      const Tensor taken = at::index(fp8 ? pages.view(at::kByte) : pages, {page, row});
      return fp8 ? taken.view(at::kFloat8_e4m3fn) : taken;
    };
    if (!scales.defined()) return {some(latent).to(dtype), some(k_rope).to(dtype)};
    // Scales are float32; multiplying in float32 rounds the result only once.
    const Tensor by = some(scales), rope = some(k_rope).to(at::kFloat);
    const Tensor numbers = one_by_one(some(latent)).to(at::kFloat);
    const Tensor grouped = numbers.view({count, by.size(1), -1}) * by.unsqueeze(2);
    return {grouped.view(numbers.sizes()).to(dtype),
            (k_rope.scalar_type() == latent.scalar_type() ? rope * by : rope).to(dtype)};
  }

  Load loaded() const {
    return [*this](Heads, int64_t first, int64_t count, at::ScalarType dtype) { return load(first, count, dtype); };
  }
};

}  // namespace
