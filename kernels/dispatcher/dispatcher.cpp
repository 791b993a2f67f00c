// Registers the ops with torch's dispatcher on CPU: generated code calls kernels directly, with no Python in between.
//
// The most frequent cases run here, if a kernel for their dtypes was provided. Everything else, including invalid
// arguments, goes to the op's general implementation in Python, which is an op of its own.

extern "C" void provide_latent_attention(int64_t number, int64_t latent, int64_t rope, void* kernel) {
  latent_attention_kernels[(number * DTYPES + latent) * DTYPES + rope] =
      reinterpret_cast<LatentAttentionKernel*>(kernel);
}

extern "C" void provide_expanded_attention(int64_t number, int64_t keys, void* kernel) {
  expanded_attention_kernels[number * DTYPES + keys] = reinterpret_cast<ExpandedAttentionKernel*>(kernel);
}

extern "C" void provide_per_head_matmul(int64_t number, void* kernel) {
  per_head_matmul_kernels[number] = reinterpret_cast<PerHeadMatmulKernel*>(kernel);
}

extern "C" void provide_widened_matmul(int64_t number, void* kernel) {
  widened_matmul_kernels[number] = reinterpret_cast<WidenedMatmulKernel*>(kernel);
}

namespace {

// Whether another library like this one has registered the ops already.
bool taken(c10::DispatchKey key) {
  const auto op = c10::Dispatcher::singleton().findSchema({"mla::latent_attention", ""});
  return op && op->hasKernelForDispatchKey(key);
}

}  // namespace

TORCH_LIBRARY_IMPL(mla, CPU, m) {
  if (taken(c10::DispatchKey::CPU)) return;
  m.impl("latent_attention", latent_attention);
  m.impl("paged_latent_attention", paged_latent_attention);
  m.impl("sparse_latent_attention", sparse_latent_attention);
  m.impl("expanded_attention", expanded_attention);
  m.impl("paged_expanded_attention", paged_expanded_attention);
  m.impl("per_head_matmul", per_head_matmul);
  m.impl("merge_states", merge_states);
  m.impl("append_latents", append_latents);
  m.impl("widened_matmul", widened_matmul);
  m.impl("grow_cache", grow_cache);
}

// These take precedence over the formulas of `mla_compile.ops`. Ops that mutate have no formula.
TORCH_LIBRARY_IMPL(mla, AutogradCPU, m) {
  if (taken(c10::DispatchKey::AutogradCPU)) return;
  for (const char* op : {"latent_attention", "paged_latent_attention", "sparse_latent_attention", "expanded_attention",
                         "paged_expanded_attention", "per_head_matmul", "merge_states",
                         "widened_matmul", "grow_cache"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<differentiate_if_asked>());
}
