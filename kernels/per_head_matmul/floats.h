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
void sum_lines(const Task<float>& t) {
  for (int64_t row = 0; row < R; ++row) std::fill_n(t.out + row * t.out_row, t.columns, 0.0f);
  int64_t i = 0;
  for (; i + STREAMS <= t.inner; i += STREAMS) {
    ask_for(t, i + STREAMS, std::min(STREAMS, t.inner - i - STREAMS));
    add_lines<R, STREAMS>(t, i);
  }
  for (; i < t.inner; ++i) add_lines<R, 1>(t, i);
}

template <int64_t R>
void dot_lines(const Task<float>& t) {
  constexpr int64_t CHAINS = 2;  // independent chains of additions per row
  for (int64_t c = 0; c < t.columns; ++c) {
    const Number* weight = t.weight + c * t.line;
    vec sums[R][CHAINS] = {};
    int64_t i = 0;
    for (; i + CHAINS * WIDTH <= t.inner; i += CHAINS * WIDTH)
      for (int64_t chain = 0; chain < CHAINS; ++chain) {
        const vec line = widened(weight + i + chain * WIDTH);
        for (int64_t row = 0; row < R; ++row)
          sums[row][chain] += load(t.x + row * t.x_row + i + chain * WIDTH) * line;
      }
    for (int64_t row = 0; row < R; ++row) {
      const vec sum = sums[row][0] + sums[row][1];
      float dot = 0.0f;
      for (int64_t lane = 0; lane < WIDTH; ++lane) dot += sum[lane];
      for (int64_t rest = i; rest < t.inner; ++rest) dot += t.x[row * t.x_row + rest] * widened_one(weight[rest]);
      t.out[row * t.out_row + c] = dot;
    }
  }
}

}  // namespace
