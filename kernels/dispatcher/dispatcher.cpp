// Ops as torch's dispatcher calls them on CPU: from generated code straight to a kernel, no Python in between.
//
// What a decode step asks for runs here, if a kernel for its dtypes was provided. All else, wrong arguments too, goes on
// to the op's general implementation in Python, an op of its own.

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t MOST_ROWS_OF_ATTENTION = 256;  // queries times heads up to which this beats matrix products
constexpr int64_t MOST_ROWS_OF_MATMUL = 4;

constexpr int64_t DTYPES = 4;
typedef std::atomic<LatentAttentionKernel*> LatentAttentionEntry;
std::array<LatentAttentionEntry, DTYPES * DTYPES * DTYPES> latent_attention_kernels;
std::array<std::atomic<PerHeadMatmulKernel*>, DTYPES> per_head_matmul_kernels;

// A dtype's place in a table, -1 of none.
int64_t place(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kHalf: return 2;
    case at::kFloat8_e4m3fn: return 3;
    default: return -1;
  }
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> general(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

bool alike(const Tensor& first, std::initializer_list<Tensor> others) {
  for (const Tensor& other : others)
    if (other.scalar_type() != first.scalar_type() || !other.device().is_cpu()) return false;
  return true;
}

Tensor per_head_matmul(const Tensor& x, const Tensor& weight) {
  const bool fits = x.dim() == 4 && weight.dim() == 3 && alike(x, {weight}) && x.size(2) == weight.size(0) &&
                    x.size(3) == weight.size(1);
  const int64_t rows = fits ? x.size(0) * x.size(1) : 0, dtype = place(x.scalar_type());
  PerHeadMatmulKernel* kernel = dtype < 0 ? nullptr : per_head_matmul_kernels[dtype].load();
  const bool suits = 0 < rows && rows <= MOST_ROWS_OF_MATMUL && weight.numel() > 0 &&
                     (weight.stride(1) == 1 || weight.stride(2) == 1);
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

// Consecutive keys of some sequences.
struct Span {
  int64_t first_sequence, sequences, first_key, keys;
};

// Whether a tensor is of these sizes, or of 1 where it broadcasts.
bool broadcasts(const Tensor& mask, std::initializer_list<int64_t> sizes) {
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (mask.size(dim) != 1 && mask.size(dim) != size) return false;
    ++dim;
  }
  return true;
}

// What a mask of one row a sequence lets its queries see of the first `stop` keys. False if that is no range.
bool spans_of(const Tensor& mask, int64_t sequences, int64_t stop, std::vector<Span>& spans) {
  const int64_t rows = mask.size(0), step = mask.stride(3);
  for (int64_t row = 0; row < rows; ++row) {
    const bool* seen = mask.const_data_ptr<bool>() + row * mask.stride(0);
    int64_t count = 0, first = 0, end = stop;
    for (int64_t j = 0; j < stop; ++j) count += seen[j * step];
    while (first < end && !seen[first * step]) ++first;
    while (end > first && !seen[(end - 1) * step]) --end;
    if (count != end - first) return false;
    spans.push_back({row, rows == 1 ? sequences : 1, first, count});
  }
  return true;
}

typedef std::tuple<Tensor, Tensor> Attended;

Attended latent_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latent, const Tensor& k_rope,
                          const std::optional<Tensor>& mask, std::optional<int64_t> causal_offset, double scale) {
  const auto otherwise = [&] {
    static const auto op =
        general<Attended(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         std::optional<int64_t>, double)>("mla::latent_attention_general");
    return op.call(q_latent, q_rope, latent, k_rope, mask, causal_offset, scale);
  };
  const int64_t dtype = place(q_latent.scalar_type());
  LatentAttentionKernel* kernel =
      dtype < 0 ? nullptr : latent_attention_kernels[(dtype * DTYPES + dtype) * DTYPES + dtype].load();
  const bool ranks = q_latent.dim() == 4 && q_rope.dim() == 4 && latent.dim() == 3 && k_rope.dim() == 3;
  if (!kernel || !ranks || !alike(q_latent, {q_rope, latent, k_rope})) return otherwise();
  const int64_t batch = q_latent.size(0), queries = q_latent.size(1), heads = q_latent.size(2);
  const int64_t rank = q_latent.size(3), tokens = latent.size(1), rope = q_rope.size(3), rows = queries * heads;
  const bool fits = q_rope.sizes().slice(0, 3) == q_latent.sizes().slice(0, 3) && latent.size(0) == batch &&
                    latent.size(2) == rank && k_rope.size(0) == batch && k_rope.size(1) == tokens &&
                    k_rope.size(2) == rope;
  const bool readable = (rank < 2 || latent.stride(2) == 1) && (rope < 2 || k_rope.stride(2) == 1);
  if (!fits || !readable || rows < 1 || rows > MOST_ROWS_OF_ATTENTION) return otherwise();

  const int64_t offset = causal_offset.value_or(tokens);
  const int64_t stop = std::min(std::max(queries + offset, int64_t{0}), tokens);
  std::vector<Span> spans;
  if (mask && mask->defined()) {
    const bool row_a_sequence = mask->dim() == 4 && mask->scalar_type() == at::kBool && mask->device().is_cpu() &&
                                mask->size(3) == tokens && broadcasts(*mask, {batch, 1, 1, tokens});
    if (!row_a_sequence || !spans_of(*mask, batch, stop, spans)) return otherwise();
  } else {
    spans.push_back({0, batch, 0, stop});
  }
  const Tensor ql = q_latent.contiguous(), qr = q_rope.contiguous();
  const Tensor o = at::empty(q_latent.sizes(), q_latent.options());
  const Tensor lse = at::empty({batch, queries, heads}, q_latent.options().dtype(at::kFloat));
  const int64_t size = q_latent.element_size(), threads = at::get_num_threads();
  const auto at = [](const Tensor& tensor, int64_t bytes) { return static_cast<char*>(tensor.data_ptr()) + bytes; };
  for (const Span& span : spans) {
    const int64_t first_row = span.first_sequence * rows, b = span.first_sequence, key = span.first_key;
    std::vector<int64_t> offsets;
    if (key + span.keys - 1 > offset) offsets.assign(span.sequences, offset - key);
    kernel(at(ql, first_row * rank * size), at(qr, first_row * rope * size),
           at(latent, (b * latent.stride(0) + key * latent.stride(1)) * size),
           at(k_rope, (b * k_rope.stride(0) + key * k_rope.stride(1)) * size), at(o, first_row * rank * size),
           at(lse, first_row * sizeof(float)), 0, 0, 0,
           offsets.empty() ? 0 : reinterpret_cast<uintptr_t>(offsets.data()), 0, span.sequences, heads, rows, span.keys,
           rank, rope, 1, std::max(tokens, int64_t{1}), 0, 1, latent.stride(0), 0, latent.stride(1), k_rope.stride(0),
           0, k_rope.stride(1), 0, 0, 0, 0, 0, 0, 0, static_cast<float>(scale), threads);
  }
  return {o, lse};
}

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

extern "C" void provide_latent_attention(int64_t number, int64_t latent, int64_t rope, void* kernel) {
  latent_attention_kernels[(number * DTYPES + latent) * DTYPES + rope] =
      reinterpret_cast<LatentAttentionKernel*>(kernel);
}

extern "C" void provide_per_head_matmul(int64_t number, void* kernel) {
  per_head_matmul_kernels[number] = reinterpret_cast<PerHeadMatmulKernel*>(kernel);
}

TORCH_LIBRARY_IMPL(mla, CPU, m) {
  m.impl("latent_attention", latent_attention);
  m.impl("per_head_matmul", per_head_matmul);
}

// Of the ops above alone: what is registered here comes before a formula of `mla_compile.ops`.
TORCH_LIBRARY_IMPL(mla, AutogradCPU, m) {
  for (const char* op : {"latent_attention", "per_head_matmul"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<refuse_backward>());
}
