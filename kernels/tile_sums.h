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

// ROWS rows of numbers, `stride` bytes apart.
template <typename Number>
struct Rows {
  const void* first;
  int64_t stride;

  template <int TILE>
  void load(int64_t column) const { amx::load<TILE>(static_cast<const Number*>(first) + column, stride); }
};

// Sums [M * 16, N * 16] in up to four tiles: of rows [M * 16, width] times columns [width, N * 16], where width is a
// multiple of TERMS. Both are read in place; of columns, the numbers that fill four bytes lie together.
template <typename Number, int M, int N>
class Sums {
  static_assert(M * N <= 4);
  typedef std::conditional_t<std::is_same_v<Number, bf16>, float, int32_t> Sum;

 public:
  Sums() {
    unrolled<0, M * N>([](auto i) { clear<i>(); });
  }

  // Strides are in sums.
  void load_from(const Sum* from, int64_t stride) {
    each([&](auto i, int64_t at) { load<i>(from + at, sizeof(Sum) * stride); }, stride);
  }
  void store_to(Sum* to, int64_t stride) const {
    each([&](auto i, int64_t at) { store<i>(to + at, sizeof(Sum) * stride); }, stride);
  }

  // Adds the products of `width` columns of rows, from `column` on. `meanwhile` is called for each TERMS of them.
  template <typename Meanwhile>
  __attribute__((always_inline)) void add(const Rows<Number>* rows, int64_t column, int64_t width, Rows<Number> columns,
                                          Meanwhile meanwhile) const {
    const char* b = static_cast<const char*>(columns.first);
    for (const int64_t end = column + width; column < end; column += TERMS<Number>, b += ROWS * columns.stride) {
      if constexpr (M == 2 && N == 2) {
        load<6>(b, columns.stride);
        load<7>(b + 64, columns.stride);
        rows[0].template load<4>(column);
        multiply<Number, 0, 4, 6>();
        multiply<Number, 1, 4, 7>();
        rows[1].template load<5>(column);
        multiply<Number, 2, 5, 6>();
        multiply<Number, 3, 5, 7>();
      } else if constexpr (N == 1) {
        load<4>(b, columns.stride);
        unrolled<0, M>([&](auto m) {
          rows[m].template load<5 + m % 3>(column);
          multiply<Number, m, 5 + m % 3, 4>();
        });
      } else {
        static_assert(M == 1);
        rows[0].template load<4>(column);
        unrolled<0, N>([&](auto n) {
          load<5 + n % 3>(b + n * 64, columns.stride);
          multiply<Number, n, 4, 5 + n % 3>();
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
