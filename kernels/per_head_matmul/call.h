// The signature of the kernel in `native.cpp`, shared with its callers.

#include <cstdint>

typedef void PerHeadMatmulKernel(const void* x, const void* weight, void* out, int64_t rows, int64_t heads,
                                 int64_t inner, int64_t outer, int64_t x_row, int64_t x_head, int64_t weight_head,
                                 int64_t weight_inner, int64_t weight_outer, int64_t threads);
