// Attention of rows of queries to a block of keys, in registers: flash attention's inner step (Dao et al., 2022).
//
//     query  [panel, width, PANEL]    packed and scaled; a panel is PANEL rows
//     scores [keys, rows]             rows lie in vector lanes: the softmax is lane by lane, no sum across a vector
//     o      [rows, columns]          unnormalised; lanes are columns of the values
//     m, total [rows]                 each row's greatest score so far, and the sum of its weights relative to that

namespace {

#if defined(__AVX512F__)
constexpr int64_t ROWS = 8, COLUMNS = 2;  // of a tile of values: 16 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int64_t ROWS = 4, COLUMNS = 2;  // 8 of 16
#else
constexpr int64_t ROWS = 4, COLUMNS = 4;  // 16 of 32
#endif

constexpr int64_t LINE = 16;  // floats of a cache line

// Rows of numbers, `stride` apart.
struct Lines {
  const float* data;
  int64_t stride;

  const float* operator[](int64_t i) const { return data + i * stride; }
  Lines from(int64_t column) const { return {data + column, stride}; }
};

// Rows of numbers at arbitrary addresses.
struct Scattered {
  const float* const* rows;
  int64_t column = 0;

  const float* operator[](int64_t i) const { return rows[i] + column; }
  Scattered from(int64_t later) const { return {rows, column + later}; }
};

template <int64_t KEYS, int64_t VECTORS>
struct Tile {
  vec sum[KEYS][VECTORS] = {};

  // Adds the products of KEYS keys [width] and a panel of rows [width, PANEL], accumulating TERMS terms at a time, and
  // prefetches the KEYS keys `ahead`, if any, into the second-level cache. Not inlined: callers keep so much else in
  // registers that pointers to keys would be loaded from the stack for each number, which takes a third of the time.
  template <int64_t TERMS, typename Next>
  __attribute__((noinline)) void add(const float* const (&keys)[KEYS], const float* panel, int64_t width,
                                     const Next* const* ahead) {
    constexpr int64_t NUMBERS = 64 * IN_ONE<Next> / sizeof(Next);  // of a cache line
    for (int64_t begin = 0; begin < width; begin += TERMS) {
      const int64_t end = std::min(begin + TERMS, width);
      if (ahead)
        for (int64_t k = 0; k < KEYS; ++k)
          for (int64_t i = begin; i < end; i += NUMBERS) __builtin_prefetch(ahead[k] + i / IN_ONE<Next>, 0, 2);
      vec some[KEYS][VECTORS] = {};
      int64_t i = begin;
      if constexpr (TOGETHER > 1)
        for (; i + TOGETHER <= end; i += TOGETHER) add_terms<TOGETHER>(keys, panel, i, some);
      for (; i < end; ++i) add_terms<1>(keys, panel, i, some);
      for (int64_t k = 0; k < KEYS; ++k)
        for (int64_t v = 0; v < VECTORS; ++v) sum[k][v] += some[k][v];
    }
  }

 private:
  // Terms at a time. Registers hold the addresses of 12 keys; those of more are fetched once for so many terms.
  static constexpr int64_t TOGETHER = KEYS > 12 ? 8 : 1;

  template <int64_t COUNT>
  static void add_terms(const float* const (&keys)[KEYS], const float* panel, int64_t i, vec (&sums)[KEYS][VECTORS]) {
    vec q[COUNT][VECTORS];
#pragma GCC unroll 8
    for (int64_t t = 0; t < COUNT; ++t)
      for (int64_t v = 0; v < VECTORS; ++v) q[t][v] = load(panel + ((i + t) * VECTORS + v) * WIDTH);
#pragma GCC unroll 16
    for (int64_t k = 0; k < KEYS; ++k)
#pragma GCC unroll 8
      for (int64_t t = 0; t < COUNT; ++t)
        for (int64_t v = 0; v < VECTORS; ++v) sums[k][v] += keys[k][i + t] * q[t][v];
  }
};

// Scores of one panel and `count` keys, given in two parts of `width` and `rope` numbers. The last tile repeats the
// last key in place of missing ones, so `scores` must have room for a multiple of KEYS. The keys and ropes `ahead`,
// null or as many, are being prefetched when this returns.
template <int64_t KEYS, int64_t VECTORS, int64_t TERMS, typename Rows, typename Next, typename NextRope>
void score_panel(Rows keys, int64_t width, Rows ropes, int64_t rope, int64_t count, const float* panel,
                 float* scores, int64_t stride, const Next* const* ahead, const NextRope* const* ropes_ahead) {
  for (int64_t first = 0; first < count; first += KEYS) {
    const float *of_key[KEYS], *of_rope[KEYS];
    for (int64_t k = 0; k < KEYS; ++k) {
      of_key[k] = keys[std::min(first + k, count - 1)];
      of_rope[k] = ropes[std::min(first + k, count - 1)];
    }
    Tile<KEYS, VECTORS> tile;
    tile.template add<TERMS>(of_key, panel, width, ahead ? ahead + first : nullptr);
    tile.template add<TERMS>(of_rope, panel + width * VECTORS * WIDTH, rope,
                             ropes_ahead ? ropes_ahead + first : nullptr);
    for (int64_t k = 0; k < KEYS; ++k)
      for (int64_t v = 0; v < VECTORS; ++v) store(scores + (first + k) * stride + v * WIDTH, tile.sum[k][v]);
  }
}

// Weights are relative to the greatest score of a row, or to an earlier one that this exceeds by at most so much: a new
// one would change all sums, and weights of e^5 are as precise as those of 1.
constexpr float SLACK = 5.0f;

// The greatest of `count` scores, and of `most`, in each lane.
inline vec greatest(const float* scores, int64_t stride, int64_t count, vec most) {
  vec chains[4] = {most, most, most, most};  // independent ones
  int64_t k = 0;
  for (; k + 4 <= count; k += 4)
    for (int64_t i = 0; i < 4; ++i) chains[i] = maximum(load(scores + (k + i) * stride), chains[i]);
  for (; k < count; ++k) chains[0] = maximum(load(scores + k * stride), chains[0]);
  return maximum(maximum(chains[0], chains[1]), maximum(chains[2], chains[3]));
}

// Turns scores [count, rows] into weights relative to each row's m. All sums so far are to be multiplied by decay [rows];
// `total` already is. Returns whether any decay is not 1.
bool soften(float* scores, int64_t stride, int64_t rows, int64_t count, float* m, float* total, float* decay) {
  ivec decays = {};
  for (int64_t row = 0; row < rows; row += WIDTH) {
    float* column = scores + row;
    const vec m_old = load(m + row), most = greatest(column, stride, count, m_old);
    const vec m_new = most > m_old + SLACK ? most : m_old;
    const vec shrunk = exp_of(m_old - m_new);
    vec sum = {};
    for (int64_t k = 0; k < count; ++k) {
      const vec weight = exp_of(load(column + k * stride) - m_new);
      store(column + k * stride, weight);
      sum += weight;
    }
    store(m + row, m_new);
    store(total + row, load(total + row) * shrunk + sum);
    store(decay + row, shrunk);
    decays |= shrunk != 1.0f;
  }
  bool any = false;
  for (int64_t lane = 0; lane < WIDTH; ++lane) any = any || decays[lane];
  return any;
}

// o [R, V vectors] = o * decay + weights [count, R] values [count, V vectors]
template <int64_t R, int64_t V, typename Rows>
inline void value_tile(float* o, int64_t o_stride, const float* decay, const float* weights, int64_t stride,
                       Rows values, int64_t count) {
  vec sum[R][V] = {};
  for (int64_t k = 0; k < count; ++k) {
    vec value[V];
    for (int64_t v = 0; v < V; ++v) value[v] = load(values[k] + v * WIDTH);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t v = 0; v < V; ++v) sum[r][v] += weights[k * stride + r] * value[v];
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t v = 0; v < V; ++v) {
      float* to = o + r * o_stride + v * WIDTH;
      store(to, load(to) * decay[r] + sum[r][v]);
    }
}

// o [rows, columns] = o * decay + weights [count, rows] values [count, columns]
struct Values {
  float* o;
  int64_t o_stride, rows, columns;
  const float *decay, *weights;
  int64_t stride;

  template <typename Rows>
  void add(Rows values, int64_t count) const {
    int64_t column = 0;
    for (; column + COLUMNS * WIDTH <= columns; column += COLUMNS * WIDTH) add_vectors<COLUMNS>(values, column, count);
    for (; column + WIDTH <= columns; column += WIDTH) add_vectors<1>(values, column, count);
    for (; column < columns; ++column) add_column(values, column, count);
  }

 private:
  template <int64_t V, typename Rows>
  void add_vectors(Rows values, int64_t column, int64_t count) const {
    const Rows from = values.from(column);
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS)
      value_tile<ROWS, V>(o + row * o_stride + column, o_stride, decay + row, weights + row, stride, from, count);
    for (; row < rows; ++row)
      value_tile<1, V>(o + row * o_stride + column, o_stride, decay + row, weights + row, stride, from, count);
  }

  template <typename Rows>
  void add_column(Rows values, int64_t column, int64_t count) const {
    for (int64_t row = 0; row < rows; ++row) {
      float sum = 0.0f;
      for (int64_t k = 0; k < count; ++k) sum += weights[k * stride + row] * values[k][column];
      float& to = o[row * o_stride + column];
      to = to * decay[row] + sum;
    }
  }
};

}  // namespace
