// Products of floats: of narrower numbers, the weight is widened.

namespace {

// out [R, columns] += x [R, S] weight [S, columns]
template <int64_t R, int64_t S>
inline void add_lines(const Task<float>& t, int64_t i) {
  const Number* weight = t.weight + i * t.line;
  int64_t c = 0;
  for (; c + WIDTH <= t.columns; c += WIDTH) {
    vec lines[S];
    for (int64_t s = 0; s < S; ++s) lines[s] = widened(weight + s * t.line + c);
    for (int64_t row = 0; row < R; ++row) {
      vec sum = load(t.out + row * t.out_row + c);
      for (int64_t s = 0; s < S; ++s) sum += t.x[row * t.x_row + i + s] * lines[s];
      store(t.out + row * t.out_row + c, sum);
    }
  }
  for (; c < t.columns; ++c)
    for (int64_t row = 0; row < R; ++row)
      for (int64_t s = 0; s < S; ++s)
        t.out[row * t.out_row + c] += t.x[row * t.x_row + i + s] * widened_one(weight[s * t.line + c]);
}

template <int64_t R>
void sum_some_lines(const Task<float>& t) {
  for (int64_t row = 0; row < R; ++row) std::fill_n(t.out + row * t.out_row, t.columns, 0.0f);
  int64_t i = 0;
  for (; i + STREAMS <= t.inner; i += STREAMS) {
    ask_for(t, i + STREAMS, std::min(STREAMS, t.inner - i - STREAMS));
    add_lines<R, STREAMS>(t, i);
  }
  for (; i < t.inner; ++i) add_lines<R, 1>(t, i);
}

// All outputs of `rows` rows, each a dot product.
inline void dot_lines(const Task<float>& t, int64_t rows) {
  LineProducts<Number>{t.x, t.weight, t.out, rows, t.inner, t.x_row, t.line, t.out_row}.multiply(0, t.columns);
}

}  // namespace
