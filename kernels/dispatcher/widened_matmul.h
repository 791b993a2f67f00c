// `mla::widened_matmul`, computed as in `widened_matmul/native.py` and `aten.py`.

namespace {

constexpr int64_t PANEL_BYTES = 2 << 20, FEWEST_COLUMNS = 64;

std::array<std::atomic<WidenedMatmulKernel*>, DTYPES> widened_matmul_kernels;

// Sets out `[S, M]` to x `[S, K]` times weight `[K, M]`, one panel of the weight in float32 at a time. Panels have the
// weight's memory layout.
void multiply_by_panels(const Tensor& x, const Tensor& weight, const Tensor& out) {
  const int64_t inner = weight.size(0), outer = weight.size(1);
  const int64_t bytes = std::max(inner * static_cast<int64_t>(x.element_size()), int64_t{1});
  const int64_t most = std::max(PANEL_BYTES / bytes, FEWEST_COLUMNS);
  const Tensor memory = at::empty({std::min(most, outer) * inner}, x.options());
  for (int64_t start = 0; start < outer; start += most) {
    const int64_t columns = std::min(most, outer - start);
    const Tensor flat = memory.narrow(0, 0, columns * inner);
    const Tensor panel = weight.stride(1) == 1 ? flat.view({inner, columns}) : flat.view({columns, inner}).t();
    panel.copy_(weight.narrow(1, start, columns));
    Tensor of_panel = out.narrow(1, start, columns);
    at::mm_out(of_panel, x, panel);
  }
}

Tensor widened_matmul(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& ends) {
  const bool grouped = is_given(ends);
  const bool fits = x.dim() == 2 && weight.dim() == (grouped ? 3 : 2) && alike(x, {weight}) &&
                    x.size(1) == weight.size(-2) && (!grouped || (ends->dim() == 1 && ends->size(0) == weight.size(0)));
  const int64_t dtype = place(x.scalar_type());
  WidenedMatmulKernel* kernel = fits && dtype >= 0 ? widened_matmul_kernels[dtype].load() : nullptr;
  if (!kernel) {
    static const auto op =
        general<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>("mla::widened_matmul_general");
    return op.call(x, weight, ends);
  }
  Tensor rows = x.to(at::kFloat);
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const Tensor out = at::empty({x.size(0), weight.size(-1)}, rows.options());
  const auto multiply = [&](int64_t start, int64_t end, const Tensor& by) {
    if (start == end) return;
    const Tensor some = rows.narrow(0, start, end - start), of_them = out.narrow(0, start, end - start);
    if (end - start > MOST_ROWS_TO_STREAM || by.stride(0) != 1) return multiply_by_panels(some, by, of_them);
    kernel(some.const_data_ptr<float>(), by.const_data_ptr(), of_them.data_ptr<float>(), end - start, by.size(0),
           by.size(1), some.stride(0), by.stride(1), of_them.stride(0), at::get_num_threads());
  };
  if (!grouped) {
    multiply(0, x.size(0), weight);
    return out;
  }
  const Tensor where = ends->to(at::kLong).contiguous();
  int64_t start = 0;
  for (int64_t group = 0; group < where.size(0); ++group) {
    const int64_t end = where.const_data_ptr<int64_t>()[group];
    TORCH_CHECK_VALUE(start <= end && end <= x.size(0), "mla::widened_matmul: expected ends that ascend to at most ",
                      x.size(0), ", found ", end, " after ", start);
    multiply(start, end, weight[group]);
    start = end;
  }
  return out;
}

}  // namespace
