// Shared by the ops that torch calls in C++: dtypes, and calls of the general implementations in Python.

// Without this, the headers below include every op's header, which takes the compiler seconds.
#ifndef AT_PER_OPERATOR_HEADERS
#define AT_PER_OPERATOR_HEADERS
#endif

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t DTYPES = 6;

// A dtype's place in a table, -1 if it has none.
int64_t place(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kHalf: return 2;
    case at::kFloat8_e4m3fn: return 3;
    case at::kChar: return 4;
    case at::kByte: return 5;  // INT4, two numbers in each element
    default: return -1;
  }
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> general(const char* name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(found, name, ": expected arguments that a kernel in C++ takes, or mla_compile imported; found neither. "
              "A library by build_library has kernels for the dtypes that it was given, codes of caches too");
  return found->typed<Signature>();
}

// Whether oneDNN takes bfloat16 only to widen it in its inner loop.
bool widens_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && !__builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether one of torch's libraries multiplies matrices of a dtype on this CPU as fast as float32: see
// `mla_compile/cpu_products.py`.
bool has_products(at::ScalarType dtype) {
  const auto ask = [](const char* name) {
    const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    return !found || found->typed<bool()>().call();
  };
  static const bool of_bf16 = ask("mkldnn::_is_mkldnn_bf16_supported") && !widens_bfloat16();
  static const bool of_fp16 = ask("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == at::kBFloat16 ? of_bf16 : dtype == at::kHalf ? of_fp16 : true;
}

// Whether there are no general implementations: then a kernel takes everything that it can.
bool alone() {
  static const bool found = c10::Dispatcher::singleton().findSchema({"mla::latent_attention_general", ""}).has_value();
  return !found;
}

bool is_given(const std::optional<Tensor>& tensor) { return tensor && tensor->defined(); }

bool alike(const Tensor& first, std::initializer_list<Tensor> others) {
  for (const Tensor& other : others)
    if (other.scalar_type() != first.scalar_type() || !other.device().is_cpu()) return false;
  return true;
}

// Whether a tensor has these sizes, or 1 where it broadcasts.
bool broadcasts(const Tensor& mask, std::initializer_list<int64_t> sizes) {
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (mask.size(dim) != 1 && mask.size(dim) != size) return false;
    ++dim;
  }
  return true;
}

}  // namespace
