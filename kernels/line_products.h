// Rows of floats times lines of a weight, as in a Linear: lines are widened in registers. Sums are float32.
//
//     x      [rows, inner]    any stride of rows, 1 in the last dim
//     weight [lines, inner]   the same
//     out    [rows, lines]    the same

namespace {

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

template <typename Number>
struct LineProducts {
  const float* x;
  const Number* weight;
  float* out;
  int64_t rows, inner, x_row, weight_line, out_row;

  // The lines [begin, end): TERMS numbers of each of LINES lines at a time, with all rows.
  void multiply(int64_t begin, int64_t end) const {
    for (int64_t term = 0; term < std::max(inner, int64_t{1}); term += TERMS) {
      const int64_t terms = std::min(TERMS, inner - term);
      int64_t line = begin;
      for (; line + LINES <= end; line += LINES) multiply_lines<LINES>(line, term, terms);
      for (; line < end; ++line) multiply_lines<1>(line, term, terms);
    }
  }

 private:
#if defined(__AVX512F__)
  static constexpr int64_t LINES = 4, ROWS = 6;  // of a tile: 24 of 32 registers accumulate, 4 hold lines, 1 a row
#else
  static constexpr int64_t LINES = 3, ROWS = 4;  // 12 of 16 registers accumulate
#endif
  static constexpr int64_t TERMS = 2048;  // 64 KiB of 8 rows stay in a second-level cache
  static constexpr int64_t NUMBERS_OF_A_CACHE_LINE = 64 / sizeof(Number);

  // Rows are shared out evenly, as tiles of few rows take longer for each.
  template <int64_t L>
  void multiply_lines(int64_t line, int64_t term, int64_t terms) const {
    for (int64_t row = 0, tiles = (rows + ROWS - 1) / ROWS; tiles > 0; --tiles) {
      const int64_t some = (rows - row + tiles - 1) / tiles;
      multiply_rows<ROWS, L>(some, row, line, term, terms);
      row += some;
    }
  }

  // Calls the tile of as many rows as are given, at most R.
  template <int64_t R, int64_t L>
  void multiply_rows(int64_t count, int64_t row, int64_t line, int64_t term, int64_t terms) const {
    if constexpr (R > 0) {
      if (count == R) return multiply_tile<R, L>(row, line, term, terms);
      multiply_rows<R - 1, L>(count, row, line, term, terms);
    }
  }

  // out [R, L] = x [R, terms] weight [L, terms], from `row`, `line` and `term` on; added to the result of earlier terms.
  template <int64_t R, int64_t L>
  void multiply_tile(int64_t row, int64_t line, int64_t term, int64_t terms) const {
    const float* some_x = x + row * x_row + term;
    const Number* some_weight = weight + line * weight_line + term;
    vec sums[R][L] = {};
    const auto add = [&](auto of_row, auto of_line) {
      vec lines[L];
#pragma GCC unroll 4
      for (int64_t l = 0; l < L; ++l) lines[l] = of_line(l);
#pragma GCC unroll 8
      for (int64_t r = 0; r < R; ++r) {
        const vec numbers = of_row(r);
#pragma GCC unroll 4
        for (int64_t l = 0; l < L; ++l) sums[r][l] += numbers * lines[l];
      }
    };
    // The first rows ask for the next lines: a CPU's own prefetchers stop where a page ends, as each line may.
    const int64_t ahead = row == 0 ? L * weight_line : 0;
    int64_t i = 0;
    for (; i + WIDTH <= terms; i += WIDTH) {
      if (ahead && i % NUMBERS_OF_A_CACHE_LINE == 0)
#pragma GCC unroll 4
        for (int64_t l = 0; l < L; ++l) __builtin_prefetch(some_weight + l * weight_line + i + ahead, 0, 2);
      add([&](int64_t r) { return load(some_x + r * x_row + i); },
          [&](int64_t l) { return widened(some_weight + l * weight_line + i); });
    }
    if (i < terms)
      add([&](int64_t r) { return rest_of(some_x + r * x_row + i, terms - i); },
          [&](int64_t l) { return rest_of(some_weight + l * weight_line + i, terms - i); });
    for (int64_t r = 0; r < R; ++r)
      for (int64_t l = 0; l < L; ++l) {
        float& to = out[(row + r) * out_row + line + l];
        to = sum_of(sums[r][l]) + (term == 0 ? 0.0f : to);
      }
  }
};

}  // namespace
