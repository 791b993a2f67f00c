// Products of rows of keys or values and a panel of queries, whose rows lie in vector lanes; sums in float32.
//
// NUMBER is the type of the queries. Keys and values are floats, except for bf16 queries where the CPU multiplies pairs
// of bf16: then they are bf16. `bytes_of_a_key` tells which.

namespace {

typedef NUMBER Number;
#if defined(__AVX512BF16__)
typedef std::conditional_t<std::is_same_v<Number, bf16>, bf16, float> Key;
#else
typedef float Key;
#endif

#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int64_t ROWS_OF_A_TILE = 6;   // of keys or values: 12 of 16 registers accumulate
#else
constexpr int64_t ROWS_OF_A_TILE = 12;  // 24 of 32
#endif
constexpr int64_t VECTORS = 2, PANEL = VECTORS * WIDTH;

#if defined(__AVX512BF16__)
// A tile of rows in bfloat16 and a panel of pairs.
template <int64_t ROWS>
struct PairTile {
  __m512 sum[ROWS][VECTORS];

  PairTile() {
    for (auto& of_row : sum)
      for (__m512& some : of_row) some = _mm512_setzero_ps();
  }

  void add(const bf16* const (&rows)[ROWS], const pair_t* panel, int64_t width) {
    const int64_t whole = width / 2;
    for (int64_t i = 0; i < whole; ++i)
      add_pair(panel + i * PANEL, [&](int64_t row) {
        pair_t pair;
        std::memcpy(&pair, rows[row] + 2 * i, sizeof(pair));
        return pair;
      });
    if (width % 2) add_pair(panel + whole * PANEL, [&](int64_t row) { return pair_t{rows[row][width - 1].bits}; });
  }

 private:
  template <typename PairOf>
  void add_pair(const pair_t* panel, PairOf pair_of) {
    const __m512i first = _mm512_loadu_si512(panel), second = _mm512_loadu_si512(panel + WIDTH);
#pragma GCC unroll 12
    for (int64_t row = 0; row < ROWS; ++row) {
      const __m512i pair = _mm512_set1_epi32(pair_of(row));
      sum[row][0] = dot(sum[row][0], first, pair);
      sum[row][1] = dot(sum[row][1], second, pair);
    }
  }
};
#endif

template <int64_t ROWS>
struct FloatTile : Tile<ROWS, VECTORS> {
  static constexpr int64_t TERMS = 64;  // accumulated at a time: errors grow with the square root of this
  static constexpr const float* const* NONE = nullptr;

  void add(const float* const (&rows)[ROWS], const float* panel, int64_t width) {
    Tile<ROWS, VECTORS>::template add<TERMS>(rows, panel, width, NONE);
  }
};

// A panel of rows packed for a product, [width, PANEL]: floats, or pairs of neighbouring numbers.
//
// `lanes` loads a vector of them from a row that has `left` numbers left, with 0 for missing ones. `put_two` packs two
// neighbouring rows of PANEL numbers as lines.
// `weights` packs scores [count, PANEL], and `rows` are numbers as the rows of a product: both in place if they can.
template <typename Key>
struct Packed {
  typedef float Lane;
  template <int64_t ROWS> using Tile = FloatTile<ROWS>;

  static int64_t lines(int64_t width) { return width; }
  static vec lanes(const Number* numbers, int64_t left) {
    if (left >= WIDTH) return widened(numbers);
    Number some[WIDTH] = {};
    std::copy_n(numbers, left, some);
    return widened(some);
  }
  static const Lane* weights(const float* scores, int64_t, Lane*) { return scores; }
  static const float* rows(const float* numbers, int64_t, float*) { return numbers; }
  static void put_two(const Number* first, const Number* second, Lane* lines) {
    convert(first, PANEL, 1.0f, lines);
    convert(second, PANEL, 1.0f, lines + PANEL);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Packed<bf16> {
  typedef pair_t Lane;
  template <int64_t ROWS> using Tile = PairTile<ROWS>;

  static int64_t lines(int64_t width) { return (width + 1) / 2; }
  static vec lanes(const bf16* numbers, int64_t left) {
    return as<vec>(_mm512_maskz_loadu_epi16(left < 32 ? (__mmask32{1} << left) - 1 : ~__mmask32{0}, numbers));
  }
  static const Lane* weights(const float* scores, int64_t count, Lane* pairs) {
    pair_weights(scores, count, PANEL, pairs);
    return pairs;
  }
  static const bf16* rows(const float* numbers, int64_t size, bf16* narrowed) {
    convert(numbers, size, 1.0f, narrowed);
    return narrowed;
  }
  static void put_two(const bf16* first, const bf16* second, Lane* line) {
    for (int64_t i = 0; i < PANEL; ++i) line[i] = pair_t{first[i].bits} | pair_t{second[i].bits} << 16;
  }
};
#endif

typedef Packed<Key> Panel;
typedef Panel::Lane Lane;

// Packs up to WIDTH rows of `width` numbers as neighbouring lanes, with 0 for missing rows.
inline void pack_lanes(const Number* const* rows, int64_t count, int64_t width, Lane* to) {
  constexpr int64_t NUMBERS = sizeof(Lane) / sizeof(Key) * WIDTH;  // of a vector
  for (int64_t first = 0; first < width; first += NUMBERS) {
    vec lines[WIDTH];
    load_columns(count, lines, [&](int64_t r) { return Panel::lanes(rows[r] + first, width - first); });
    const int64_t given = Panel::lines(std::min(width - first, NUMBERS));
    for (int64_t i = 0; i < given; ++i, to += PANEL) store(reinterpret_cast<float*>(to), lines[i]);
  }
}

// Rows of keys or of values, and the panel that they are multiplied with.
struct Factors {
  const Key* data;
  int64_t stride, width;
  const Lane* panel;
};

// Where products [rows, PANEL] go: instead of what is there, or added to it. Rows are `stride` floats apart.
struct Sums {
  float* data;
  int64_t stride = PANEL;
  bool adds = false;

  float* at(int64_t row) const { return data + row * stride; }
  void put(int64_t row, int64_t lane, vec sum) const {
    float* to = at(row) + lane;
    store(to, adds ? load(to) + sum : sum);
  }
};

// Products of columns from `begin(width)` of each part on.
template <int64_t ROWS, typename Parts, typename Begin>
inline void multiply_tile(const Parts& parts, int64_t first, int64_t count, Begin begin, const Sums& to) {
  typename Panel::Tile<ROWS> tile;
  for (const Factors& part : parts) {
    const int64_t done = begin(part.width);
    const Key *rows[ROWS], *data = part.data + done;
    for (int64_t row = 0; row < ROWS; ++row) rows[row] = data + std::min(first + row, count - 1) * part.stride;
    tile.add(rows, part.panel + Panel::lines(done) * PANEL, part.width - done);
  }
#pragma GCC unroll 12
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t v = 0; v < VECTORS; ++v) to.put(first + row, v * WIDTH, as<vec>(tile.sum[row][v]));
}

// The rows from `first` on. The last tile has a third, two thirds or all of the rows of others, and repeats the last row
// for missing ones.
template <typename Parts, typename Begin>
inline void multiply_rows(const Parts& parts, int64_t first, int64_t count, Begin begin, const Sums& to) {
  constexpr int64_t THIRD = ROWS_OF_A_TILE / 3;
  for (; count - first > 2 * THIRD; first += 3 * THIRD) multiply_tile<3 * THIRD>(parts, first, count, begin, to);
  if (count - first > THIRD) multiply_tile<2 * THIRD>(parts, first, count, begin, to);
  else if (count > first) multiply_tile<THIRD>(parts, first, count, begin, to);
}

// What a thread has while it multiplies.
#if defined(AMX)
typedef amx::InUse Units;
#else
struct Units {};
#endif

// Whether products are computed on tiles.
inline bool on_tiles() {
#if defined(AMX)
  return std::is_same_v<Key, bf16> && amx::allowed();
#else
  return false;
#endif
}

#if defined(AMX)
static_assert(amx::ROWS % (ROWS_OF_A_TILE / 3) == 0);

inline int64_t whole_terms(int64_t width) { return width / amx::TERMS<Key> * amx::TERMS<Key>; }

// M tiles of rows. Columns that fill no tile are added in pairs.
template <int M, typename Parts>
inline void multiply_tiles(const Parts& parts, int64_t first, const Sums& to) {
  amx::Sums<Key, M, PANEL / amx::COLUMNS> tiles;
  if (to.adds) tiles.load_from(to.at(first), to.stride);
  bool all = true;
  for (const Factors& part : parts) {
    const int64_t width = whole_terms(part.width);
    amx::Rows<Key> rows[M];
    for (int m = 0; m < M; ++m)
      rows[m] = {part.data + (first + m * amx::ROWS) * part.stride, int64_t{sizeof(Key)} * part.stride};
    tiles.add(rows, 0, width, {part.panel, int64_t{sizeof(Lane)} * PANEL}, [] {});
    all = all && width == part.width;
  }
  tiles.store_to(to.at(first), to.stride);
  if (!all) multiply_rows(parts, first, first + M * amx::ROWS, whole_terms, {to.data, to.stride, true});
}

// As many of the first rows as fill tiles; returns their number.
template <typename Parts>
inline int64_t multiply_on_tiles(const Parts& parts, int64_t count, const Sums& to) {
  int64_t first = 0;
  for (; first + 2 * amx::ROWS <= count; first += 2 * amx::ROWS) multiply_tiles<2>(parts, first, to);
  if (first + amx::ROWS <= count) {
    multiply_tiles<1>(parts, first, to);
    first += amx::ROWS;
  }
  return first;
}
#endif

// Computes products [count, PANEL], summed over the parts. There must be room for a multiple of ROWS_OF_A_TILE / 3
// rows.
template <typename Parts>
inline void multiply(const Parts& parts, int64_t count, const Sums& to) {
  int64_t first = 0;
#if defined(AMX)
  if constexpr (std::is_same_v<Key, bf16>)
    if (on_tiles()) first = multiply_on_tiles(parts, count, to);
#endif
  multiply_rows(parts, first, count, [](int64_t) { return int64_t{0}; }, to);
}

inline void multiply(std::initializer_list<Factors> parts, int64_t count, const Sums& to) {
  multiply<std::initializer_list<Factors>>(parts, count, to);
}

// Whether the numbers that are added to the scores of some rows hide all of `count` keys; row r has them at `row(r)`.
template <typename Row>
inline bool hide_all(int64_t rows, int64_t count, Row row) {
  const float* last = nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    const float* numbers = row(r);
    if (numbers == last) continue;  // rows that share them
    last = numbers;
    bool seen = false;
    for (int64_t k = 0; k < count; ++k) seen |= numbers[k] != -INFINITY;
    if (seen) return false;
  }
  return true;
}

// Adds `count` numbers of each row, up to PANEL of them, to [count, PANEL], where rows lie in the lanes.
template <typename Row>
inline void add_rows(int64_t rows, int64_t count, Row row, float* to) {
  for (int64_t lane = 0; lane < rows; lane += WIDTH) {
    const int64_t together = std::min(rows - lane, WIDTH);
    const float* from[WIDTH];
    for (int64_t r = 0; r < together; ++r) from[r] = row(lane + r);
    for (int64_t first = 0; first < count; first += WIDTH) {
      const int64_t some = std::min(count - first, WIDTH);
      vec columns[WIDTH];
      load_columns(together, columns, [&](int64_t r) {
        if (some == WIDTH) return load(from[r] + first);
        vec numbers = {};
        std::memcpy(&numbers, from[r] + first, some * sizeof(float));
        return numbers;
      });
      float* place = to + first * PANEL + lane;
      for (int64_t k = 0; k < some; ++k, place += PANEL) store(place, load(place) + columns[k]);
    }
  }
}

// Adds [count, PANEL] to rows of `count` numbers, up to PANEL of them.
template <typename Row>
inline void add_to_rows(int64_t rows, int64_t count, const float* from, Row row) {
  for (int64_t lane = 0; lane < rows; lane += WIDTH)
    for (int64_t first = 0; first < count; first += WIDTH) {
      const int64_t some = std::min(count - first, WIDTH);
      vec lines[WIDTH];
      load_columns(some, lines, [&](int64_t k) { return load(from + (first + k) * PANEL + lane); });
      for (int64_t r = 0; r < std::min(rows - lane, WIDTH); ++r) {
        float* to = row(lane + r) + first;
        vec sum = {};
        std::memcpy(&sum, to, some * sizeof(float));
        sum += lines[r];
        std::memcpy(to, &sum, some * sizeof(float));
      }
    }
}

}  // namespace

extern "C" const int64_t bytes_of_a_key = sizeof(Key);
