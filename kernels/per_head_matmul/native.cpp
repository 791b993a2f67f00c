// A product with one matrix per head, for a few rows: all cores stream the weight from memory once. Sums are float32.
//
//     x      [rows, heads, inner]     any strides, but 1 in the last dim
//     weight [heads, inner, outer]    any strides, but 1 in the inner or the outer dim
//     out    [rows, heads, outer]     contiguous
//
// NUMBER is the type of all three. A task is a slice of a head's outer columns. It takes ROWS rows at a time; after the
// first of them, the weight is in the core's own cache. Where the outer dim is contiguous, STREAMS lines of the weight
// are added to the output at a time; where the inner dim is contiguous, each output is a dot product with one line.

namespace {

typedef NUMBER Number;

// The fewest numbers of the weight per thread: waking a thread takes as long as reading 256 KiB.
constexpr int64_t NUMBERS_OF_A_THREAD = (1 << 18) / sizeof(Number);
constexpr int64_t ROWS = 4;
constexpr int64_t STREAMS = 4;  // lines read together: outputs are loaded and stored once for this many products
// The most numbers of the weight that are asked for ahead: 8 KiB. Asking for more is no faster, or slower.
constexpr int64_t MOST_AHEAD = (1 << 13) / sizeof(Number);

// One head and `columns` of its outputs: x [rows, inner] and out [rows, columns] contiguous.
struct Task {
  const float* x;
  const Number* weight;
  float* out;
  int64_t line, inner, columns;  // line: the stride of the weight's dim that is not contiguous

  Task from(int64_t row) const { return {x + row * inner, weight, out + row * columns, line, inner, columns}; }
};

// out [R, columns] += x [R, S] weight [S, columns]
template <int64_t R, int64_t S>
inline void add_lines(const Task& t, int64_t i) {
  const Number* weight = t.weight + i * t.line;
  int64_t c = 0;
  for (; c + WIDTH <= t.columns; c += WIDTH) {
    vec lines[S];
    for (int64_t s = 0; s < S; ++s) lines[s] = widened(weight + s * t.line + c);
    for (int64_t row = 0; row < R; ++row) {
      vec sum = load(t.out + row * t.columns + c);
      for (int64_t s = 0; s < S; ++s) sum += t.x[row * t.inner + i + s] * lines[s];
      store(t.out + row * t.columns + c, sum);
    }
  }
  for (; c < t.columns; ++c)
    for (int64_t row = 0; row < R; ++row)
      for (int64_t s = 0; s < S; ++s)
        t.out[row * t.columns + c] += t.x[row * t.inner + i + s] * widened_one(weight[s * t.line + c]);
}

// Asks for lines from `i` on, all at once, so that they come from memory while those before them are added. This is one
// loop because nested loops gain nothing, and is always inlined because GCC removes calls of functions that only prefetch.
__attribute__((always_inline)) inline void ask_for(const Task& t, int64_t i, int64_t lines) {
  constexpr int64_t STEP = 64 / sizeof(Number);  // a line of the CPU's cache
  const int64_t steps = (t.columns + STEP - 1) / STEP;
  if (lines * steps * STEP > MOST_AHEAD) return;
  const Number* line = t.weight + i * t.line;
  for (int64_t left = lines * steps, step = 0; left > 0; --left) {
    __builtin_prefetch(line + step * STEP);
    const bool ends = ++step == steps;
    line += ends ? t.line : 0;
    step = ends ? 0 : step;
  }
}

template <int64_t R>
void sum_lines(const Task& t) {
  for (int64_t row = 0; row < R; ++row) std::fill_n(t.out + row * t.columns, t.columns, 0.0f);
  int64_t i = 0;
  for (; i + STREAMS <= t.inner; i += STREAMS) {
    ask_for(t, i + STREAMS, std::min(STREAMS, t.inner - i - STREAMS));
    add_lines<R, STREAMS>(t, i);
  }
  for (; i < t.inner; ++i) add_lines<R, 1>(t, i);
}

template <int64_t R>
void dot_lines(const Task& t) {
  constexpr int64_t CHAINS = 2;  // independent chains of additions per row
  for (int64_t c = 0; c < t.columns; ++c) {
    const Number* weight = t.weight + c * t.line;
    vec sums[R][CHAINS] = {};
    int64_t i = 0;
    for (; i + CHAINS * WIDTH <= t.inner; i += CHAINS * WIDTH)
      for (int64_t chain = 0; chain < CHAINS; ++chain) {
        const vec line = widened(weight + i + chain * WIDTH);
        for (int64_t row = 0; row < R; ++row)
          sums[row][chain] += load(t.x + row * t.inner + i + chain * WIDTH) * line;
      }
    for (int64_t row = 0; row < R; ++row) {
      const vec sum = sums[row][0] + sums[row][1];
      float dot = 0.0f;
      for (int64_t lane = 0; lane < WIDTH; ++lane) dot += sum[lane];
      for (int64_t rest = i; rest < t.inner; ++rest) dot += t.x[row * t.inner + rest] * widened_one(weight[rest]);
      t.out[row * t.columns + c] = dot;
    }
  }
}

template <int64_t R>
void run_task(const Task& task, bool inner_is_contiguous) {
  inner_is_contiguous ? dot_lines<R>(task) : sum_lines<R>(task);
}

void run_rows(const Task& task, int64_t rows, bool inner_is_contiguous) {
  static_assert(ROWS == 4);
  switch (rows) {
    case 1: return run_task<1>(task, inner_is_contiguous);
    case 2: return run_task<2>(task, inner_is_contiguous);
    case 3: return run_task<3>(task, inner_is_contiguous);
    case 4: return run_task<4>(task, inner_is_contiguous);
  }
}

}  // namespace

extern "C" void kernel(const void* x, const void* weight, void* out, int64_t rows, int64_t heads, int64_t inner,
                       int64_t outer, int64_t x_row, int64_t x_head, int64_t weight_head, int64_t weight_inner,
                       int64_t weight_outer, int64_t most_threads) {
  const int64_t threads = std::min(most_threads, heads * inner * outer / NUMBERS_OF_A_THREAD + 1);
  const bool inner_is_contiguous = weight_outer != 1;
  const int64_t slices = std::max((threads + heads - 1) / heads, int64_t{1});
  const int64_t slice = (outer + slices - 1) / slices;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Buffer x_of_head(rows * inner), sums(rows * slice);
#pragma omp for schedule(static)
    for (int64_t index = 0; index < heads * slices; ++index) {
      const int64_t head = index / slices, begin = std::min(index % slices * slice, outer);
      const Task task{x_of_head.data(),
                      static_cast<const Number*>(weight) + head * weight_head + begin * weight_outer,
                      sums.data(),
                      inner_is_contiguous ? weight_outer : weight_inner,
                      inner,
                      std::min(slice, outer - begin)};
      for (int64_t row = 0; row < rows; ++row)
        convert(static_cast<const Number*>(x) + row * x_row + head * x_head, inner, 1.0f,
                x_of_head.data() + row * inner);
      for (int64_t row = 0; row < rows; row += ROWS)
        run_rows(task.from(row), std::min(rows - row, ROWS), inner_is_contiguous);
      for (int64_t row = 0; row < rows; ++row)
        convert(sums.data() + row * task.columns, task.columns, 1.0f,
                static_cast<Number*>(out) + (row * heads + head) * outer + begin);
    }
  }
}

static_assert(std::is_same_v<decltype(kernel), PerHeadMatmulKernel>);
