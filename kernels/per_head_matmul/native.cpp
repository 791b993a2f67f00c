// A product with one matrix per head, for a few rows: all cores stream the weight from memory once. Sums are float32.
//
//     x      [rows, heads, inner]     any strides, but 1 in the last dim
//     weight [heads, inner, outer]    any strides, but 1 in the inner or the outer dim
//     out    [rows, heads, outer]     contiguous
//
// NUMBER is the type of all three. A task is a slice of a head's outer columns. It takes some rows at a time; after the
// first of them, the weight is in the core's own cache. Where the outer dim is contiguous, STREAMS lines of the weight
// are added to the output at a time; where the inner dim is contiguous, each output is a dot product with one line.

namespace {

// The fewest numbers of the weight per thread: waking a thread takes as long as reading 256 KiB.
constexpr int64_t NUMBERS_OF_A_THREAD = (1 << 18) / sizeof(Number);

void sum_lines(const Task<Factor>& task, int64_t rows) {
  by_rows(task, rows, [](auto count, const Task<Factor>& some) { sum_some_lines<count>(some); });
}

}  // namespace

extern "C" void kernel(const void* x, const void* weight, void* out, int64_t rows, int64_t heads, int64_t inner,
                       int64_t outer, int64_t x_stride, int64_t x_head, int64_t weight_head, int64_t weight_inner,
                       int64_t weight_outer, int64_t most_threads) {
  const int64_t threads = std::min(most_threads, heads * inner * outer / NUMBERS_OF_A_THREAD + 1);
  const bool inner_is_contiguous = weight_outer != 1;
  const int64_t slices = std::max((threads + heads - 1) / heads, int64_t{1});
  const int64_t slice = (outer + slices - 1) / slices;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t x_row = round_up(inner, 2), out_row = round_up(slice, BLOCK);
    const Buffer memory(rows * x_row), sums(rows * out_row);
    Factor* const x_of_head = reinterpret_cast<Factor*>(memory.data());
#pragma omp for schedule(static)
    for (int64_t index = 0; index < heads * slices; ++index) {
      const int64_t head = index / slices, begin = std::min(index % slices * slice, outer);
      const Task<Factor> task{x_of_head,
                      static_cast<const Number*>(weight) + head * weight_head + begin * weight_outer,
                      sums.data(),
                      inner_is_contiguous ? weight_outer : weight_inner,
                      inner,
                      std::min(slice, outer - begin),
                      x_row,
                      out_row};
      for (int64_t row = 0; row < rows; ++row) {
        Factor* const own = x_of_head + row * x_row;
        convert(static_cast<const Number*>(x) + row * x_stride + head * x_head, inner, 1.0f, own);
        std::fill(own + inner, own + x_row, Factor{});
      }
      inner_is_contiguous ? dot_lines(task, rows) : sum_lines(task, rows);
      for (int64_t row = 0; row < rows; ++row)
        convert(sums.data() + row * out_row, task.columns, 1.0f,
                static_cast<Number*>(out) + (row * heads + head) * outer + begin);
    }
  }
}

static_assert(std::is_same_v<decltype(kernel), PerHeadMatmulKernel>);
