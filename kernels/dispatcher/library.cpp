// A library that works without Python: the ops of `dispatcher.cpp` with their schemas, and kernels that are linked in.
//
// `kernels/library.py` defines the macros: SCHEMAS (`{name, schema}` each), TAGS, KERNELS_DECLARED and
// KERNELS_PROVIDED.

KERNELS_DECLARED

// Where `mla_compile` is imported, these are already defined, by the same text.
TORCH_LIBRARY_FRAGMENT(mla, m) {
  const std::pair<const char*, const char*> schemas[] = {SCHEMAS};
  for (const auto& [name, schema] : schemas)
    if (!c10::Dispatcher::singleton().findSchema({name, ""})) m.def(schema, {TAGS});
}

namespace {

template <typename Kernel>
void* code_of(Kernel* kernel) { return reinterpret_cast<void*>(kernel); }

const bool provided = [] {
  KERNELS_PROVIDED
  return true;
}();

}  // namespace
