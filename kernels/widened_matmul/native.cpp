// A few rows times a weight whose columns are contiguous, like that of a Linear: all cores stream the weight from
// memory once.
//
//     x      [rows, inner]    any stride of rows, 1 in the last dim
//     weight [outer, inner]   the same
//     out    [rows, outer]    the same
//
// NUMBER is the type of the weight. A thread has a slice of outer columns.

namespace {

typedef NUMBER Number;

// The fewest numbers of the weight per thread: waking a thread takes as long as reading 256 KiB.
constexpr int64_t NUMBERS_OF_A_THREAD = (1 << 18) / sizeof(Number);

}  // namespace

extern "C" void kernel(const float* x, const void* weight, float* out, int64_t rows, int64_t inner, int64_t outer,
                       int64_t x_row, int64_t weight_outer, int64_t out_row, int64_t most_threads) {
  const LineProducts<Number> products{x, static_cast<const Number*>(weight), out, rows, inner, x_row, weight_outer,
                                      out_row};
  const int64_t threads = std::min(most_threads, outer * inner / NUMBERS_OF_A_THREAD + 1);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread)
    products.multiply(outer * thread / threads, outer * (thread + 1) / threads);
}

static_assert(std::is_same_v<decltype(kernel), WidenedMatmulKernel>);
