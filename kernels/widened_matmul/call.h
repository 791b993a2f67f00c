// The signature of the kernel in `native.cpp`, shared with its callers.

#include <cstdint>

typedef void WidenedMatmulKernel(const float* x, const void* weight, float* out, int64_t rows, int64_t inner,
                                 int64_t outer, int64_t x_row, int64_t weight_outer, int64_t out_row, int64_t threads);
