// The one place that chooses among products of blocks of keys.

namespace {

// Calls `run` with a null pointer to the fastest products that this CPU has for queries of a type.
template <typename Number, typename Run>
void with_best_products(Run run) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Number, bf16>) {
#if defined(AMX)
    if (amx::allowed()) return run(static_cast<Tiles*>(nullptr));
#endif
    return run(static_cast<Dots*>(nullptr));
  }
#endif
  run(static_cast<Floats*>(nullptr));
}

}  // namespace
