// Products of a block of keys in bfloat16 on AMX's tiles.
//
// The scores [keys, rows] are keys, read in place, times the packed query. The output [rows, columns] is the weights
// times values, which a product of tiles reads in pairs of neighbouring rows' numbers, and there are two ways to get these:
//
//     as they are    a pair of neighbouring columns of a key passes for one of rows: times (weight, 0) it gives the
//                    even columns, and times (0, weight) the odd ones. That is twice as many products.
//     interleaved    pairs of keys are interleaved in memory, GROUP columns at a time, which takes longer than the
//                    products of a few rows.

#if defined(AMX)

namespace {

class Tiles {
 public:
  typedef bf16 Key;
  typedef Block<Key> Keys;
  static constexpr int64_t PANEL = amx::COLUMNS;
  static constexpr int64_t BLOCK = 128;  // 128 keys of 576 numbers are 144 KiB

  static bool takes_scales(int64_t groups, int64_t group) { return groups == 1 || group % TERMS == 0; }

  static int64_t o_stride(const Sizes& s) { return round_up(s.rank, TERMS); }
  static int64_t o_rows(const Sizes& s) { return round_up(s.rows, amx::ROWS); }

  explicit Tiles(const Sizes& sizes)
      : s(sizes),
        padded_rows(round_up(sizes.rows, PANEL)),
        latents(sizes.rank),
        ropes(sizes.rope),
        interleaves(padded_rows > FEW_ROWS),
        query(padded_rows * (latents.padded + ropes.padded) / 2),
        parts(BLOCK * padded_rows),
        values(interleaves ? 2 * BLOCK / 2 * GROUP : 0),
        rounded(BLOCK * padded_rows),
        weights(2 * BLOCK * padded_rows) {}

  // Packs the query of a sequence, [(L + R) / 2, padded rows] pairs.
  void begin(const bf16* q_latent, const bf16* q_rope) {
    std::memset(query.data(), 0, padded_rows * (latents.padded + ropes.padded) * sizeof(bf16));
    pack(q_latent, s.rows, s.rank, pairs(query), padded_rows);
    pack(q_rope, s.rows, s.rope, pairs(query) + latents.padded / 2 * padded_rows, padded_rows);
  }

  // This and `add` prefetch the keys `ahead`.
  template <typename Latent, typename Rope>
  void score(const Keys& keys, const Block<Latent, Rope>* ahead, float* scores) {
    next.set(ahead, s);
    latents.place(keys.latent, keys.latent_stride, keys.count);
    ropes.place(keys.rope, keys.rope_stride, keys.count);
    score_rows(keys.scales, keys.count, scores);
    for (int64_t i = 0; i < keys.count * padded_rows; i += WIDTH) store(scores + i, load(scores + i) * s.scale);
  }

  void add(const Keys& keys, const float* some_weights, const float* decay, float* o) {
    const int64_t columns = o_stride(s);
    for (int64_t row = 0; row < s.rows; ++row)
      if (decay[row] != 1.0f)
        for (int64_t i = 0; i < columns; i += WIDTH)
          store(o + row * columns + i, load(o + row * columns + i) * decay[row]);
    const Scales& scales = keys.scales;
    const int64_t of_scale = columns / scales.groups, step = of_scale % GROUP ? GROUP / 2 : GROUP;
    if (!scales.of_keys) pack_weights(some_weights, keys.count, [](int64_t) { return 1.0f; });
    pair_t *group = pairs(values), *next_group = group + BLOCK / 2 * GROUP;
    if (interleaves) interleave(keys, 0, step, group);
    for (int64_t column = 0; column < columns; column += step) {
      if (scales.of_keys && column % of_scale == 0)
        pack_weights(some_weights, keys.count, [&](int64_t k) { return scales.at(k, column / of_scale); });
      // The next group is interleaved before this one, whose stores have reached the cache by then, is multiplied.
      if (interleaves && column + step < columns) interleave(keys, column + step, step, next_group);
      if (interleaves) add_interleaved(keys.count, step, group, o + column);
      else if (step == GROUP) add_in_place<2>(keys.count, column, o + column);
      else add_in_place<1>(keys.count, column, o + column);
      std::swap(group, next_group);
    }
    next.send(BLOCK);
  }

  // Puts the columns in order.
  void end(float* o) const {
    for (int64_t i = 0; i < s.rows * o_stride(s); i += TERMS) {
      if (interleaves) {
        Interleaved::undo(o + i);
      } else {
        vec lower, upper;
        ::interleave(load(o + i), load(o + i + WIDTH), lower, upper);
        store(o + i, lower), store(o + i + WIDTH, upper);
      }
    }
  }

 private:
  static constexpr int64_t TERMS = amx::TERMS<bf16>, GROUP = 2 * TERMS;
  static constexpr int64_t FEW_ROWS = 2 * amx::ROWS;  // up to which values are multiplied as they are
  static_assert(TERMS == Interleaved::COLUMNS && amx::ROWS == WIDTH && Block<bf16>::RUN == amx::ROWS);

  static pair_t* pairs(const Buffer& buffer) { return reinterpret_cast<pair_t*>(buffer.data()); }

  // Some columns of keys, and the pairs of the query that they are multiplied with.
  struct Factors {
    const amx::Rows<bf16>* keys;
    int64_t column, width, first_pair;
  };

  void score_rows(const Scales& scales, int64_t count, float* scores) {
    const int64_t rank = latents.padded;
    const Factors whole{latents.from(0), 0, rank, 0}, of_rope{ropes.from(0), 0, ropes.padded, rank / 2};
    if (!scales.of_keys) return multiply(count, {whole, of_rope}, scores);
    const int64_t width = rank / scales.groups;
    for (int64_t g = 0; g < scales.groups; ++g) {
      const Factors group{latents.from(0), g * width, width, g * width / 2};
      multiply(count, {group, scales.rope ? of_rope : Factors{}}, parts.data());
      for (int64_t k = 0; k < count; ++k)
        for (int64_t i = k * padded_rows; i < (k + 1) * padded_rows; i += WIDTH) {
          const vec scaled = load(parts.data() + i) * scales.at(k, g);
          store(scores + i, g ? load(scores + i) + scaled : scaled);
        }
    }
    if (scales.rope || !s.rope) return;
    multiply(count, {of_rope}, parts.data());
    for (int64_t i = 0; i < count * padded_rows; i += WIDTH)
      store(scores + i, load(scores + i) + load(parts.data() + i));
  }

  // scores [count, padded rows] = the sum of the products; the last tile has keys that are missing too
  void multiply(int64_t count, std::initializer_list<Factors> factors, float* scores) {
    int64_t row = 0;
    for (; row + 2 * PANEL <= padded_rows; row += 2 * PANEL) multiply_keys<2, 2>(count, row, factors, scores);
    if (row < padded_rows) multiply_keys<4, 1>(count, row, factors, scores);
  }

  // The scores of N tiles of rows, K tiles of keys at a time.
  template <int K, int N>
  void multiply_keys(int64_t count, int64_t row, const std::initializer_list<Factors>& factors, float* scores) {
    int64_t key = 0;
    for (; key + K * amx::ROWS <= count; key += K * amx::ROWS) multiply_tiles<K, N>(key, row, factors, scores);
    for (; key < count; key += amx::ROWS) multiply_tiles<1, N>(key, row, factors, scores);
  }

  template <int K, int N>
  void multiply_tiles(int64_t key, int64_t row, const std::initializer_list<Factors>& factors, float* scores) {
    amx::Sums<bf16, K, N> sums;
    for (const Factors& some : factors) {
      const pair_t* of_query = pairs(query) + some.first_pair * padded_rows + row;
      sums.add(some.keys + key / amx::ROWS, some.column, some.width, {of_query, stride_of(padded_rows)},
               [&] { next.send(1); });
    }
    sums.store_to(scores + key * padded_rows + row, padded_rows);
  }

  // Packs the weights times the `scale` of their keys, with zeros for missing keys: (weight, 0) for each key and, behind
  // all of these, (0, weight), [2, padded rows, BLOCK]; or, where values are interleaved, pairs, [padded rows, BLOCK / 2].
  template <typename Scale>
  void pack_weights(const float* from, int64_t count, Scale scale) {
    if (interleaves) pair_weights(from, count, padded_rows, pairs(rounded), scale);
    const int64_t given = interleaves ? (count + 1) / 2 : count, places = interleaves ? BLOCK / 2 : BLOCK;
    for (int64_t row = 0; row < padded_rows; row += WIDTH)
      for (int64_t first = 0; first < given; first += WIDTH) {
        vec of_rows[WIDTH];
        load_columns(std::min(given - first, WIDTH), of_rows, [&](int64_t i) {
          const int64_t at = (first + i) * padded_rows + row;
          if (interleaves) return load(rounded.data() + at);
          const auto narrow = _mm512_cvtneps_pbh(as<__m512>(load(from + at) * scale(first + i)));
          return as<vec>(_mm512_cvtepu16_epi32(as<__m256i>(narrow)));
        });
        pair_t* to = pairs(weights) + row * places + first;
        for (int64_t r = 0; r < WIDTH; ++r, to += places) {
          store(reinterpret_cast<float*>(to), of_rows[r]);
          if (!interleaves)
            _mm512_storeu_si512(to + padded_rows * places, _mm512_slli_epi32(as<__m512i>(of_rows[r]), 16));
        }
      }
  }

  // o [rows, N * 32] += weights times values from `column` on: of each 32 columns, first the 16 even ones
  template <int N>
  void add_in_place(int64_t count, int64_t column, float* o) {
    const int64_t stride = o_stride(s);
    for (int64_t row = 0; row < padded_rows; row += amx::ROWS) {
      float* to = o + row * stride;
      const pair_t* of_even = pairs(weights) + row * BLOCK;
      amx::unrolled<0, 2 * N>([&](auto i) { amx::load<i>(to + i * WIDTH, sizeof(float) * stride); });
      for (int64_t k = 0; k < count; k += amx::ROWS) {
        amx::load<4>(of_even + k, stride_of(BLOCK));
        amx::load<5>(of_even + padded_rows * BLOCK + k, stride_of(BLOCK));
        amx::unrolled<0, N>([&](auto n) {
          latents.from(k)->template load<6 + n>(column + n * TERMS);
          amx::multiply<bf16, 2 * n, 4, 6 + n>();
          amx::multiply<bf16, 2 * n + 1, 5, 6 + n>();
        });
        next.send(1);
      }
      amx::unrolled<0, 2 * N>([&](auto i) { amx::store<i>(to + i * WIDTH, sizeof(float) * stride); });
    }
  }

  // o [rows, `step`] += weights times interleaved values
  void add_interleaved(int64_t count, int64_t step, const pair_t* group, float* o) {
    int64_t row = 0;
    for (; row + 2 * amx::ROWS <= padded_rows; row += 2 * amx::ROWS)
      for (int64_t c = 0; c < step; c += 2 * amx::COLUMNS) add_tiles<2, 2>(count, row, group + c, o + c);
    if (row < padded_rows)
      for (int64_t c = 0; c < step; c += 2 * amx::COLUMNS) add_tiles<1, 2>(count, row, group + c, o + c);
  }

  template <int M, int N>
  void add_tiles(int64_t count, int64_t row, const pair_t* group, float* o) {
    float* to = o + row * o_stride(s);
    amx::Sums<bf16, M, N> sums;
    sums.load_from(to, o_stride(s));
    amx::Rows<bf16> of_rows[M];
    for (int m = 0; m < M; ++m)
      of_rows[m] = {pairs(weights) + (row + m * amx::ROWS) * BLOCK / 2, stride_of(BLOCK / 2)};
    sums.add(of_rows, 0, round_up(count, TERMS), {group, stride_of(GROUP)}, [&] { next.send(1); });
    sums.store_to(to, o_stride(s));
  }

  void interleave(const Keys& keys, int64_t column, int64_t columns, pair_t* to) const {
    int64_t k = 0;
    for (; k < keys.count; k += 2, to += GROUP)
      for (int64_t c = 0; c < columns; c += TERMS) {
        const Interleaved some(keys.latent[k] + column + c, keys.latent[k + 1] + column + c,
                               Interleaved::mask(s.rank - column - c));
        _mm512_storeu_si512(to + c, some.low);
        _mm512_storeu_si512(to + c + 16, some.high);
      }
    for (; k < round_up(keys.count, TERMS); k += 2, to += GROUP) std::fill_n(to, columns, pair_t{0});
  }

  Sizes s;
  amx::InUse units;
  Ahead<BLOCK> next;
  int64_t padded_rows;
  KeyTiles<bf16, BLOCK> latents, ropes;
  bool interleaves;
  Buffer query, parts, values, rounded, weights;
};

}  // namespace

#endif
