// Keeps gradient formulas in Python, and skips them for calls that need no gradient.

namespace {

void differentiate_if_asked(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  bool needs_gradient = false;
  if (at::GradMode::is_enabled())
    for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      needs_gradient |= argument.isTensor() && argument.toTensor().defined() && argument.toTensor().requires_grad();
  const c10::DispatchKeySet further = keys & c10::after_autograd_keyset;
  if (needs_gradient) {
    // The formula is registered for all backends at once. This function shadows it on CPU; AutogradOther reaches it.
    op.redispatchBoxed(further.add(c10::DispatchKey::AutogradOther), stack);
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(further, stack);
}

}  // namespace
