// Gradients of ops that have none are refused when they are asked for.

namespace {

// The backward of ops that have none.
struct NoBackward : torch::autograd::Node {
  const std::string op;

  explicit NoBackward(std::string name) : op(std::move(name)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, op,
        " has no backward: expected inputs that need no gradient, found one that does. Run under torch.no_grad(), or "
        "compile this part of the model with another backend.");
  }
};

// torch 2.13 counts references to nodes in another way than those before it.
template <typename Pointer>
Pointer node_of(std::string op) {
  Pointer node;
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    node = std::make_shared<NoBackward>(std::move(op));
  else
    node = c10::make_intrusive<NoBackward>(std::move(op));
  return node;
}

void refuse_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<Tensor> tensors;
  bool needs_gradient = false;
  if (at::GradMode::is_enabled()) {
    for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      if (argument.isTensor()) tensors.push_back(argument.toTensor());
    for (const Tensor& tensor : tensors) needs_gradient |= tensor.defined() && tensor.requires_grad();
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (!needs_gradient) return;
  const auto node = node_of<decltype(torch::autograd::Edge::function)>(op.schema().name());
  node->set_next_edges(torch::autograd::collect_next_edges(tensors));
  for (const c10::IValue& result : torch::jit::last(*stack, op.schema().returns().size())) {
    Tensor tensor = result.toTensor();
    torch::autograd::set_history(tensor, node);
  }
}

}  // namespace
