// `mla::per_head_matmul` for a few rows.

namespace {

constexpr int64_t MOST_ROWS_OF_MATMUL = 16, MOST_ROWS_ALONE = 32;

std::array<std::atomic<PerHeadMatmulKernel*>, DTYPES> per_head_matmul_kernels;

Tensor per_head_matmul(const Tensor& x, const Tensor& weight) {
  const bool fits = x.dim() == 4 && weight.dim() == 3 && alike(x, {weight}) && x.size(2) == weight.size(0) &&
                    x.size(3) == weight.size(1);
  const int64_t rows = fits ? x.size(0) * x.size(1) : 0, dtype = place(x.scalar_type());
  PerHeadMatmulKernel* kernel = dtype < 0 ? nullptr : per_head_matmul_kernels[dtype].load();
  const int64_t most = has_products(x.scalar_type()) ? MOST_ROWS_OF_MATMUL : MOST_ROWS_ALONE;
  const bool suits = 0 < rows && rows <= most && weight.numel() > 0 &&
                     (weight.stride(1) == 1 || weight.stride(2) == 1);
  if (fits && alone() && !(kernel && suits)) {
    if (!has_products(x.scalar_type()))
      return per_head_matmul(x.to(at::kFloat), weight.to(at::kFloat)).to(x.scalar_type());
    const Tensor by_head = x.reshape({rows, x.size(2), x.size(3)}).transpose(0, 1);
    const bool may_have_gaps = x.element_size() == 2 && weight.stride(1) == 1;  // see kernels/per_head_matmul/aten.py
    const Tensor dense = may_have_gaps ? weight.mT().contiguous().mT() : weight;
    return at::bmm(by_head, dense).transpose(0, 1).contiguous().view({x.size(0), x.size(1), x.size(2), -1});
  }
  if (!kernel || !suits) {
    static const auto op = general<Tensor(const Tensor&, const Tensor&)>("mla::per_head_matmul_general");
    return op.call(x, weight);
  }
  Tensor by_row = x.reshape({rows, x.size(2), x.size(3)});
  if (by_row.stride(2) != 1) by_row = by_row.contiguous();
  const Tensor out = at::empty({x.size(0), x.size(1), x.size(2), weight.size(2)}, x.options());
  kernel(by_row.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, weight.size(0), weight.size(1), weight.size(2),
         by_row.stride(0), by_row.stride(1), weight.stride(0), weight.stride(1), weight.stride(2),
         at::get_num_threads());
  return out;
}

}  // namespace
