// A few rows times a weight whose columns are contiguous, like that of a Linear: all cores stream the weight from
// memory once, and widen it in registers. Sums are float32.
//
//     x      [rows, inner]    any stride of rows, 1 in the last dim
//     weight [outer, inner]   the same
//     out    [rows, outer]    the same
//
// NUMBER is the type of the weight. A thread has a slice of outer columns. It takes TERMS numbers of each of LINES
// columns at a time, and multiplies them with all rows, ROWS at a time.

namespace {

typedef NUMBER Number;

// The fewest numbers of the weight per thread: waking a thread takes as long as reading 256 KiB.
constexpr int64_t NUMBERS_OF_A_THREAD = (1 << 18) / sizeof(Number);
constexpr int64_t LINES = 3, ROWS = 4;  // per tile: 12 of 16 registers accumulate, 3 hold lines, 1 a row
constexpr int64_t TERMS = 2048;         // numbers of a line at a time: 64 KiB of 8 rows stay in a second-level cache

struct Problem {
  const float* x;
  const Number* weight;
  float* out;
  int64_t rows, inner, outer, x_row, weight_outer, out_row;
};

inline float sum_of(vec numbers) {
  float sum = 0.0f;
  for (int64_t lane = 0; lane < WIDTH; ++lane) sum += numbers[lane];
  return sum;
}

// The last numbers of a row, fewer than a vector holds.
template <typename From>
inline vec rest_of(const From* from, int64_t count) {
  From rest[WIDTH] = {};
  std::copy_n(from, count, rest);
  return widened(rest);
}

// out [R, L] = x [R, terms] weight [L, terms], from `row`, `line` and `term` on; added to the result of earlier terms.
template <int64_t R, int64_t L>
inline void multiply_tile(const Problem& p, int64_t row, int64_t line, int64_t term, int64_t terms) {
  const float* x = p.x + row * p.x_row + term;
  const Number* weight = p.weight + line * p.weight_outer + term;
  vec sums[R][L] = {};
  const auto add = [&](auto of_row, auto of_line) {
    vec lines[L];
#pragma GCC unroll 4
    for (int64_t l = 0; l < L; ++l) lines[l] = of_line(l);
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
      const vec numbers = of_row(r);
#pragma GCC unroll 4
      for (int64_t l = 0; l < L; ++l) sums[r][l] += numbers * lines[l];
    }
  };
  int64_t i = 0;
  for (; i + WIDTH <= terms; i += WIDTH)
    add([&](int64_t r) { return load(x + r * p.x_row + i); },
        [&](int64_t l) { return widened(weight + l * p.weight_outer + i); });
  if (i < terms)
    add([&](int64_t r) { return rest_of(x + r * p.x_row + i, terms - i); },
        [&](int64_t l) { return rest_of(weight + l * p.weight_outer + i, terms - i); });
  for (int64_t r = 0; r < R; ++r)
    for (int64_t l = 0; l < L; ++l) {
      float& to = p.out[(row + r) * p.out_row + line + l];
      to = sum_of(sums[r][l]) + (term == 0 ? 0.0f : to);
    }
}

template <int64_t L>
void multiply_lines(const Problem& p, int64_t line, int64_t term, int64_t terms) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) multiply_tile<ROWS, L>(p, row, line, term, terms);
  switch (p.rows - row) {
    case 1: return multiply_tile<1, L>(p, row, line, term, terms);
    case 2: return multiply_tile<2, L>(p, row, line, term, terms);
    case 3: return multiply_tile<3, L>(p, row, line, term, terms);
  }
}

void multiply_slice(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t term = 0; term < std::max(p.inner, int64_t{1}); term += TERMS) {
    const int64_t terms = std::min(TERMS, p.inner - term);
    int64_t line = begin;
    for (; line + LINES <= end; line += LINES) multiply_lines<LINES>(p, line, term, terms);
    for (; line < end; ++line) multiply_lines<1>(p, line, term, terms);
  }
}

}  // namespace

extern "C" void kernel(const float* x, const void* weight, float* out, int64_t rows, int64_t inner, int64_t outer,
                       int64_t x_row, int64_t weight_outer, int64_t out_row, int64_t most_threads) {
  const Problem p{x, static_cast<const Number*>(weight), out, rows, inner, outer, x_row, weight_outer, out_row};
  const int64_t threads = std::min(most_threads, outer * inner / NUMBERS_OF_A_THREAD + 1);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread)
    multiply_slice(p, outer * thread / threads, outer * (thread + 1) / threads);
}

static_assert(std::is_same_v<decltype(kernel), WidenedMatmulKernel>);
