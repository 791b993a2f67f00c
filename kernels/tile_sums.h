// Products that take several of AMX's tiles.

#if defined(AMX)

namespace amx {

template <int FIRST, int END, typename Step>
inline void unrolled(Step step) {
  if constexpr (FIRST < END) {
    step(std::integral_constant<int, FIRST>());
    unrolled<FIRST + 1, END>(step);
  }
}

// ROWS rows, `stride` bytes apart.
struct Rows {
  const void* first;
  int64_t stride;

  template <int TILE>
  void load(int64_t column) const { amx::load<TILE>(static_cast<const char*>(first) + 2 * column, stride); }
};

// Sums [M * 16, N * 16] in up to four tiles: of rows [M * 16, width] times pairs [width / 2, N * 16], where width is a
// multiple of TERMS. Both are read in place.
template <int M, int N>
class Sums {
  static_assert(M * N <= 4);

 public:
  Sums() {
    unrolled<0, M * N>([](auto i) { clear<i>(); });
  }

  // Strides are in floats.
  void load_from(const float* from, int64_t stride) {
    each([&](auto i, int64_t at) { load<i>(from + at, 4 * stride); }, stride);
  }
  void store_to(float* to, int64_t stride) const {
    each([&](auto i, int64_t at) { store<i>(to + at, 4 * stride); }, stride);
  }

  // Adds the products of `width` columns of rows, from `column` on. `meanwhile` is called for each TERMS of them.
  template <typename Meanwhile>
  __attribute__((always_inline)) void add(const Rows* rows, int64_t column, int64_t width, Rows pairs,
                                          Meanwhile meanwhile) const {
    const char* b = static_cast<const char*>(pairs.first);
    for (const int64_t end = column + width; column < end; column += TERMS, b += ROWS * pairs.stride) {
      if constexpr (M == 2 && N == 2) {
        load<6>(b, pairs.stride);
        load<7>(b + 64, pairs.stride);
        rows[0].load<4>(column);
        multiply<0, 4, 6>();
        multiply<1, 4, 7>();
        rows[1].load<5>(column);
        multiply<2, 5, 6>();
        multiply<3, 5, 7>();
      } else if constexpr (N == 1) {
        load<4>(b, pairs.stride);
        unrolled<0, M>([&](auto m) {
          rows[m].template load<5 + m % 3>(column);
          multiply<m, 5 + m % 3, 4>();
        });
      } else {
        static_assert(M == 1);
        rows[0].load<4>(column);
        unrolled<0, N>([&](auto n) {
          load<5 + n % 3>(b + n * 64, pairs.stride);
          multiply<n, 4, 5 + n % 3>();
        });
      }
      meanwhile();
    }
  }

 private:
  template <typename Step>
  static void each(Step step, int64_t stride) {
    unrolled<0, M * N>([&](auto i) { step(i, i / N * ROWS * stride + i % N * COLUMNS); });
  }
};

}  // namespace amx

#endif
