// The signature of the kernel in `native.cpp`, shared with its callers, and the rows that they give it.

#include <cstdint>

typedef void WidenedMatmulKernel(const float* x, const void* weight, float* out, int64_t rows, int64_t inner,
                                 int64_t outer, int64_t x_row, int64_t weight_outer, int64_t out_row, int64_t threads);

// Rows up to which the kernel is faster than the library's product with a weight that is widened first.
#if defined(__AVX512F__)
constexpr int64_t MOST_ROWS_TO_STREAM = 64;
#else
constexpr int64_t MOST_ROWS_TO_STREAM = 32;
#endif
