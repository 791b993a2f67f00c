// `mla::grow_cache`: concatenates a cache and new tokens in memory that is used again.

namespace {

constexpr size_t LEAST_TO_USE_AGAIN = size_t{1} << 20;  // less is not returned to the system

Tensor grow_cache(const Tensor& past, const Tensor& new_part, int64_t dim) {
  const int64_t dims = past.dim(), along = dim < 0 ? dim + dims : dim;
  bool fits = 0 <= along && along < dims && new_part.dim() == dims && past.scalar_type() == new_part.scalar_type() &&
              past.device().is_cpu() && new_part.device().is_cpu();
  for (int64_t d = 0; fits && d < dims; ++d) fits = d == along || past.size(d) == new_part.size(d);
  if (!fits) {
    static const auto op = general<Tensor(const Tensor&, const Tensor&, int64_t)>("mla::grow_cache_general");
    return op.call(past, new_part, dim);
  }
  std::vector<int64_t> sizes = past.sizes().vec();
  sizes[along] += new_part.size(along);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, past.element_size());
  if (bytes < LEAST_TO_USE_AGAIN) return at::cat({past, new_part}, along).contiguous();
  const Tensor out(at::detail::empty_generic(sizes, &UsedAgain::memory(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                             past.scalar_type(), std::nullopt));
  out.narrow(along, 0, past.size(along)).copy_(past);
  out.narrow(along, past.size(along), new_part.size(along)).copy_(new_part);
  return out;
}

}  // namespace
