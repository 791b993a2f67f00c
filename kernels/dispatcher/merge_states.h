// `mla::merge_states`, computed as in `merge_states/aten.py`.

namespace {

Attended merge_states(const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b, const Tensor& lse_b) {
  const bool fits = o_a.dim() == lse_a.dim() + 1 && o_a.sizes().slice(0, lse_a.dim()) == lse_a.sizes() &&
                    o_b.sizes() == o_a.sizes() && lse_b.sizes() == lse_a.sizes() && o_a.is_floating_point() &&
                    alike(o_a, {o_b}) && lse_a.scalar_type() == at::kFloat && lse_a.device().is_cpu() &&
                    alike(lse_a, {lse_b});
  if (!fits) {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>("mla::merge_states_general");
    return op.call(o_a, lse_a, o_b, lse_b);
  }
  const at::ScalarType dtype = c10::promoteTypes(o_a.scalar_type(), at::kFloat);
  const Tensor share = at::sigmoid(lse_b - lse_a).masked_fill_(lse_b == -INFINITY, 0.0).to(dtype).unsqueeze(-1);
  const Tensor o = at::empty(o_a.sizes(), o_a.options());
  o.copy_(at::lerp(o_a.to(dtype), o_b.to(dtype), share));
  return {o, at::logaddexp(lse_a, lse_b)};
}

}  // namespace
