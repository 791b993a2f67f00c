// What a thread computes at a time, and the lines of the weight that it is to find in its cache.

namespace {

typedef NUMBER Number;

#if defined(__AVX512BF16__)
typedef std::conditional_t<std::is_same_v<Number, bf16>, bf16, float> Factor;  // what is multiplied
#else
typedef float Factor;
#endif

constexpr int64_t BLOCK = 2 * WIDTH;  // columns: a multiple of those that are computed together
constexpr int64_t STREAMS = 4;  // lines read together: outputs are loaded and stored once for this many products
// The most numbers of the weight that are asked for ahead: 8 KiB. Asking for more is no faster, or slower.
constexpr int64_t MOST_AHEAD = (1 << 13) / sizeof(Number);

// One head and `columns` of its outputs. There is room for a BLOCK in each row of out, and for a pair in each of x.
template <typename X>
struct Task {
  const X* x;            // [rows, x_row]
  const Number* weight;  // its dim that is not contiguous has the stride `line`
  float* out;            // [rows, out_row]
  int64_t line, inner, columns, x_row, out_row;

  Task from(int64_t row) const {
    return {x + row * x_row, weight, out + row * out_row, line, inner, columns, x_row, out_row};
  }
};

constexpr int64_t ROWS = 4;  // at a time

// Calls `run` with the number of rows, as a constant, and the task of ROWS rows at a time.
template <typename X, typename Run>
void by_rows(const Task<X>& t, int64_t rows, Run run) {
  for (int64_t row = 0; row < rows; row += ROWS) {
    const Task<X> some = t.from(row);
    static_assert(ROWS == 4);
    switch (std::min(rows - row, ROWS)) {
      case 1: run(std::integral_constant<int64_t, 1>{}, some); break;
      case 2: run(std::integral_constant<int64_t, 2>{}, some); break;
      case 3: run(std::integral_constant<int64_t, 3>{}, some); break;
      case 4: run(std::integral_constant<int64_t, 4>{}, some); break;
    }
  }
}

// Asks for lines from `i` on, all at once, so that they come from memory while those before them are added. This is one
// loop without branches because nested loops gain nothing, and is always inlined because GCC removes calls of functions
// that only prefetch.
template <typename X>
__attribute__((always_inline)) inline void ask_for(const Task<X>& t, int64_t i, int64_t lines) {
  constexpr int64_t STEP = 64 / sizeof(Number);  // a line of the CPU's cache
  const int64_t steps = (t.columns + STEP - 1) / STEP;
  if (lines * steps * STEP > MOST_AHEAD) return;
  const Number* line = t.weight + i * t.line;
  for (int64_t left = lines * steps, step = 0; left > 0; --left) {
    __builtin_prefetch(line + step * STEP);
    const int64_t ends = -int64_t{++step == steps};  // all ones or zeros
    line += t.line & ends;
    step &= ~ends;
  }
}

}  // namespace
