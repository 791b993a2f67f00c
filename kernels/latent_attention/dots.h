// Products of a block of keys in bfloat16, two terms per instruction (AVX512-BF16), summed in float32.
//
// Keys are used as they are stored: scores multiply pairs of neighbouring numbers of a key; values interleave two keys
// in registers. The latter permutes each 32 columns of the output, which `end` undoes once per sequence.
//
// The scales of FP8 and INT8 are not multiplied with the keys, whose numbers are exact in bfloat16. They are multiplied
// with the scores' sums and with the weights instead: once per key and group of columns, not once per number. Those of
// INT4 are, as each is of few columns and their numbers are looked up anyway.

#if defined(__AVX512BF16__)

namespace {

// 32 columns of two keys, interleaved: `low` those from the lower halves of each 128 bits, `high` from the upper ones.
struct Interleaved {
  static constexpr int64_t COLUMNS = 32;
  __m512i low, high;

  Interleaved(const bf16* first, const bf16* second, __mmask32 columns) {
    const __m512i a = _mm512_maskz_loadu_epi16(columns, first), b = _mm512_maskz_loadu_epi16(columns, second);
    low = _mm512_unpacklo_epi16(a, b);
    high = _mm512_unpackhi_epi16(a, b);
  }

  static __mmask32 mask(int64_t left) { return left >= COLUMNS ? ~__mmask32{0} : (__mmask32{1} << left) - 1; }

  // Permutes the sums of `low` and `high`, which lie side by side, into the order of the columns.
  static void undo(float* sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
    _mm512_storeu_ps(sums, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + 16, _mm512_permutex2var_ps(low, second, high));
  }
};

struct Dots {
  typedef bf16 Key;
  typedef Block<Key> Keys;
  static constexpr int64_t PANEL = 16;
  static constexpr int64_t KEYS = 16;   // per tile of scores: 16 of 32 registers accumulate
  static constexpr int64_t BLOCK = 64;  // 64 keys of 576 numbers are 72 KiB
  static constexpr int64_t ROWS = 8;    // per tile of values: 16 of 32 registers accumulate

  static bool takes_scales(int64_t groups, int64_t group) { return groups == 1 || group % Interleaved::COLUMNS == 0; }

  static int64_t o_stride(const Sizes& s) { return round_up(s.rank, Interleaved::COLUMNS); }
  static int64_t o_rows(const Sizes& s) { return round_up(s.rows, ROWS / 2); }

  explicit Dots(const Sizes& sizes)
      : s(sizes),
        padded_rows(round_up(sizes.rows, PANEL)),
        latent_pairs((sizes.rank + 1) / 2),
        pairs(latent_pairs + (sizes.rope + 1) / 2),
        query(padded_rows * pairs),
        weight_pairs(BLOCK / 2 * padded_rows) {}

  // Packs the query of a sequence, [panel, pairs of L then of R, PANEL].
  void begin(const bf16* q_latent, const bf16* q_rope) {
    std::memset(query.data(), 0, padded_rows * pairs * sizeof(pair_t));
    for (int64_t row = 0; row < s.rows; ++row) {
      pack_row(q_latent + row * s.rank, s.rank, row, 0);
      pack_row(q_rope + row * s.rope, s.rope, row, latent_pairs);
    }
  }

  // Also prefetches the keys `ahead`, of any type, into the second-level cache.
  template <typename Latent, typename Rope>
  void score(const Keys& keys, const Block<Latent, Rope>* ahead, float* scores) const {
    for (int64_t row = 0; row < padded_rows; row += PANEL) {
      const pair_t* panel = packed() + row * pairs;
      for (int64_t first = 0; first < keys.count; first += KEYS) {
        __m512 sum[KEYS];
        for (__m512& some : sum) some = _mm512_setzero_ps();
        const bool loads = ahead && row == 0;
        const Latent* const* latents = loads ? ahead->latent + first : nullptr;
        const Rope* const* ropes = loads ? ahead->rope + first : nullptr;
        const pair_t* rope_panel = panel + latent_pairs * PANEL;
        const Scales& scales = keys.scales;
        if (scales.of_keys) {
          const int64_t width = s.rank / scales.groups;
          for (int64_t g = 0; g < scales.groups; ++g) {
            __m512 part[KEYS];
            for (__m512& some : part) some = _mm512_setzero_ps();
            add_products(part, keys.latent + first, panel, g * width, width, latents);
            if (scales.rope) add_products(part, keys.rope + first, rope_panel, 0, s.rope, ropes);
            for (int64_t k = 0; k < KEYS; ++k)
              sum[k] = _mm512_fmadd_ps(part[k], _mm512_set1_ps(scales.at(first + k, g)), sum[k]);
          }
        } else {
          add_products(sum, keys.latent + first, panel, 0, s.rank, latents);
        }
        if (!scales.rope) add_products(sum, keys.rope + first, rope_panel, 0, s.rope, ropes);
        for (int64_t k = 0; k < KEYS; ++k)
          _mm512_storeu_ps(scores + (first + k) * padded_rows + row, _mm512_mul_ps(sum[k], _mm512_set1_ps(s.scale)));
      }
    }
  }

  void add(const Keys& keys, const float* weights, const float* decay, float* o) {
    const Scales& scales = keys.scales;
    const int64_t width = scales.of_keys && scales.groups > 1 ? s.rank / scales.groups : o_stride(s);
    if (!scales.of_keys) pair_weights(weights, keys.count, padded_rows, weights_packed());
    for (int64_t column = 0; column < o_stride(s); column += Interleaved::COLUMNS) {
      if (scales.of_keys && column % width == 0)
        pair_weights(weights, keys.count, padded_rows, weights_packed(),
                     [&](int64_t k) { return scales.at(k, column / width); });
      int64_t row = 0;
      for (; row + ROWS <= o_rows(s); row += ROWS) value_tile<ROWS>(keys, row, column, decay, o);
      if (row < o_rows(s)) value_tile<ROWS / 2>(keys, row, column, decay, o);
    }
  }

  void end(float* o) const {
    for (int64_t i = 0; i < s.rows * o_stride(s); i += Interleaved::COLUMNS) Interleaved::undo(o + i);
  }

 private:
  pair_t* packed() const { return reinterpret_cast<pair_t*>(query.data()); }
  pair_t* weights_packed() const { return reinterpret_cast<pair_t*>(weight_pairs.data()); }

  void pack_row(const bf16* from, int64_t width, int64_t row, int64_t first_pair) {
    pair_t* to = packed() + row / PANEL * PANEL * pairs + first_pair * PANEL + row % PANEL;
    for (int64_t i = 0; i < width; ++i) to[i / 2 * PANEL] |= pair_t{from[i].bits} << i % 2 * 16;
  }

  // Adds the products of `width` columns of the keys from `first` on. `first` is even, and so is `width` unless these
  // are the last columns.
  template <typename Number>
  static void add_products(__m512 (&sum)[KEYS], const bf16* const* keys, const pair_t* panel, int64_t first,
                           int64_t width, const Number* const* ahead) {
    // In a cache line of keys ahead.
    constexpr int64_t LINE_PAIRS = LINE * sizeof(float) / sizeof(Number) * IN_ONE<Number> / 2;
    const int64_t whole = (first + width) / 2;
    for (int64_t begin = first / 2; begin < whole; begin += LINE_PAIRS) {
      if (ahead)
        for (int64_t k = 0; k < KEYS; ++k) __builtin_prefetch(ahead[k] + 2 * begin / IN_ONE<Number>, 0, 2);
      const int64_t end = std::min(begin + LINE_PAIRS, whole);
      for (int64_t i = begin; i < end; ++i) {
        const __m512i q = _mm512_loadu_si512(panel + i * PANEL);
#pragma GCC unroll 16
        for (int64_t k = 0; k < KEYS; ++k) {
          pair_t pair;
          std::memcpy(&pair, keys[k] + 2 * i, sizeof(pair));
          sum[k] = dot(sum[k], q, _mm512_set1_epi32(pair));
        }
      }
    }
    if (width % 2 == 0) return;
    const __m512i q = _mm512_loadu_si512(panel + whole * PANEL);
    for (int64_t k = 0; k < KEYS; ++k) sum[k] = dot(sum[k], q, _mm512_set1_epi32(keys[k][first + width - 1].bits));
  }

  template <int64_t R>
  void value_tile(const Keys& keys, int64_t row, int64_t column, const float* decay, float* o) const {
    __m512 low[R], high[R];
    for (int64_t r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    const __mmask32 columns = Interleaved::mask(s.rank - column);
    const pair_t* weight = weights_packed() + row;
    for (int64_t k = 0; k < keys.count; k += 2, weight += padded_rows) {
      const Interleaved values(keys.latent[k] + column, keys.latent[k + 1] + column, columns);
#pragma GCC unroll 8
      for (int64_t r = 0; r < R; ++r) {
        const __m512i w = _mm512_set1_epi32(weight[r]);
        low[r] = dot(low[r], values.low, w);
        high[r] = dot(high[r], values.high, w);
      }
    }
    for (int64_t r = 0; r < R; ++r) {
      float* to = o + (row + r) * o_stride(s) + column;
      const __m512 shrunk = _mm512_set1_ps(decay[row + r]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), shrunk, low[r]));
      _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), shrunk, high[r]));
    }
  }

  Sizes s;
  int64_t padded_rows, latent_pairs, pairs;
  Buffer query, weight_pairs;
};

}  // namespace

#endif
