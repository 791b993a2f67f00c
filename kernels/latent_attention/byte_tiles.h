// Products of a few rows and a block of keys in INT8 on AMX's tiles, without converting a key.
//
// Queries and weights are rounded to whole numbers of 16 bits: a row of a query in a unit of its own, the weights of a row
// in one for each block. Such a number is 256 * upper + lower, two bytes with signs, and each of them has its own sums,
// which int32 holds exactly. A key's scale is multiplied with its scores' sums and, before they are rounded, its weights.
//
// Values are interleaved in fours of keys, GROUP columns at a time. That permutes the columns of the output, which `end`
// undoes once per sequence.

#if defined(AMX)

namespace {

// The greatest whole number, of which both bytes have a sign.
constexpr float MOST_WHOLE = 127 * 256;

// Rows of numbers as whole ones, in bytes.
struct Bytes {
  i8 *upper, *lower;

  // Writes numbers that are given in their row's unit.
  void put(int64_t at, vec numbers) const {
    const __m512i whole = _mm512_cvtps_epi32(as<__m512>(numbers));
    const __m512i rest_added = _mm512_add_epi32(whole, _mm512_set1_epi32(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + at), _mm512_cvtepi32_epi8(_mm512_srai_epi32(rest_added, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower + at), _mm512_cvtepi32_epi8(whole));
  }
};

// Finds the unit of some numbers in each lane.
class Unit {
 public:
  void see(vec numbers) {
    most = maximum(as<vec>(as<ivec>(numbers) & 0x7fffffff), most);
    poison += numbers * 0.0f;
  }

  // NaN if any number was not finite.
  vec unit() const { return most * (1 / MOST_WHOLE) + poison; }

  // Its inverse. Numbers too small to have one become 0.
  vec per_unit() const {
    const vec inverse = MOST_WHOLE / most;
    return most > 0x1p-100f ? inverse : vec{};
  }

 private:
  vec most = {}, poison = {};
};

// `RopeKey` is i8 where rope keys share the latents' scales, or else bf16.
template <typename RopeKey>
class ByteTiles {
 public:
  typedef i8 Key;
  typedef Block<Key, RopeKey> Keys;
  static constexpr int64_t BLOCK = 128;
  static constexpr int64_t MOST_ROWS = 2 * amx::ROWS;  // beyond, bfloat16 takes fewer products

  static int64_t o_stride(const Sizes& s) { return round_up(s.rank, GROUP); }
  static int64_t o_rows(const Sizes& s) { return round_up(s.rows, amx::ROWS); }

  explicit ByteTiles(const Sizes& sizes)
      : s(sizes),
        padded_rows(round_up(sizes.rows, amx::ROWS)),
        latents(sizes.rank),
        ropes(sizes.rope),
        whole_width(latents.padded + (ROPE_IN_BYTES ? ropes.padded : 0)),
        units(padded_rows),
        query(HALVES * padded_rows * whole_width / 4),
        rope_query(padded_rows * ropes.padded / 2),
        sums(BLOCK * HALVES * amx::COLUMNS),
        rope_sums(BLOCK * amx::COLUMNS),
        weights(HALVES * padded_rows * BLOCK / 4),
        weight_units(padded_rows),
        values(2 * BLOCK * GROUP / 4) {}

  // Packs the query of a sequence.
  void begin(const bf16* q_latent, const bf16* q_rope) {
    if constexpr (!ROPE_IN_BYTES) {
      std::memset(rope_query.data(), 0, padded_rows * ropes.padded * sizeof(bf16));
      pack(q_rope, s.rows, s.rope, reinterpret_cast<pair_t*>(rope_query.data()), padded_rows);
    }
    const Buffer lines(HALVES * amx::ROWS * whole_width / 4);
    const Bytes bytes = bytes_of(lines, amx::ROWS * whole_width);
    for (int64_t row = 0; row < padded_rows; row += amx::ROWS) {
      const int64_t count = std::min(s.rows - row, amx::ROWS);
      for (int64_t r = 0; r < count; ++r)
        units.data()[row + r] = round_query(q_latent + (row + r) * s.rank, q_rope + (row + r) * s.rope,
                                            {bytes.upper + r * whole_width, bytes.lower + r * whole_width});
      std::fill_n(units.data() + row + count, amx::ROWS - count, 0.0f);
      for (int64_t column = 0; column < whole_width; column += GROUP) {
        pack_fours(bytes.upper + column, count, query_at(row, column));
        pack_fours(bytes.lower + column, count, query_at(row, column) + amx::COLUMNS);
      }
    }
  }

  // This and `add` prefetch the keys `ahead`.
  template <typename Latent, typename Rope>
  void score(const Keys& keys, const Block<Latent, Rope>* ahead, float* scores) {
    next.set(ahead, s);
    latents.place(keys.latent, keys.latent_stride, keys.count);
    ropes.place(keys.rope, keys.rope_stride, keys.count);
    for (int64_t row = 0; row < padded_rows; row += amx::ROWS) {
      int64_t key = 0;
      for (; key + 2 * amx::ROWS <= keys.count; key += 2 * amx::ROWS) multiply_keys<2>(key, row);
      if (key < keys.count) multiply_keys<1>(key, row);
      if (key + amx::ROWS < keys.count) multiply_keys<1>(key + amx::ROWS, row);
      const vec unit = load(units.data() + row) * s.scale;
      for (int64_t k = 0; k < keys.count; ++k) {
        const int32_t* upper = whole_sums() + k * HALVES * amx::COLUMNS;
        const vec whole = sum_of(upper, upper + amx::COLUMNS) * (unit * keys.scales.at(k, 0));
        store(scores + k * padded_rows + row,
              ROPE_IN_BYTES ? whole : load(rope_sums.data() + k * amx::COLUMNS) * s.scale + whole);
      }
    }
  }

  void add(const Keys& keys, const float* some_weights, const float* decay, float* o) {
    for (int64_t row = 0; row < padded_rows; row += amx::ROWS) round_weights(keys, some_weights, row);
    int32_t *group = reinterpret_cast<int32_t*>(values.data()), *next_group = group + BLOCK * GROUP / 4;
    const int64_t columns = o_stride(s);
    interleave(keys, 0, group);
    for (int64_t column = 0; column < columns; column += GROUP) {
      // The next group is interleaved before this one, whose stores have reached the cache by then, is multiplied.
      if (column + GROUP < columns) interleave(keys, column + GROUP, next_group);
      for (int64_t row = 0; row < padded_rows; row += amx::ROWS)
        for (int64_t c = 0; c < GROUP; c += 2 * amx::COLUMNS)
          add_tiles(keys.count, row, group + c, decay, o + row * columns + column + c);
      std::swap(group, next_group);
    }
    next.send(BLOCK);
  }

  // Puts the columns in order: of each GROUP, there are first the first four of each 16, then the second four ...
  void end(float* o) const {
    for (int64_t i = 0; i < s.rows * o_stride(s); i += GROUP) {
      __m512 fours[4];
      for (int64_t n = 0; n < 4; ++n) fours[n] = _mm512_loadu_ps(o + i + n * WIDTH);
      const __m512 low[2] = {_mm512_shuffle_f32x4(fours[0], fours[1], 0x44), _mm512_shuffle_f32x4(fours[2], fours[3], 0x44)};
      const __m512 high[2] = {_mm512_shuffle_f32x4(fours[0], fours[1], 0xee),
                              _mm512_shuffle_f32x4(fours[2], fours[3], 0xee)};
      _mm512_storeu_ps(o + i, _mm512_shuffle_f32x4(low[0], low[1], 0x88));
      _mm512_storeu_ps(o + i + WIDTH, _mm512_shuffle_f32x4(low[0], low[1], 0xdd));
      _mm512_storeu_ps(o + i + 2 * WIDTH, _mm512_shuffle_f32x4(high[0], high[1], 0x88));
      _mm512_storeu_ps(o + i + 3 * WIDTH, _mm512_shuffle_f32x4(high[0], high[1], 0xdd));
    }
  }

 private:
  static constexpr int64_t GROUP = amx::TERMS<i8>, HALVES = 2;
  static constexpr bool ROPE_IN_BYTES = std::is_same_v<RopeKey, i8>;

  // Two arrays of bytes, one behind the other.
  static Bytes bytes_of(const Buffer& buffer, int64_t size, int64_t first = 0) {
    i8* bytes = reinterpret_cast<i8*>(buffer.data()) + first;
    return {bytes, bytes + size};
  }

  int32_t* whole_sums() const { return reinterpret_cast<int32_t*>(sums.data()); }

  // The sums of both bytes together.
  static vec sum_of(const int32_t* of_upper, const int32_t* of_lower) {
    const __m512 upper = _mm512_cvtepi32_ps(_mm512_loadu_si512(of_upper));
    const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(of_lower));
    return as<vec>(_mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower));
  }

  // Rounds one row; returns its unit.
  float round_query(const bf16* q_latent, const bf16* q_rope, Bytes to) const {
    const Buffer numbers(whole_width);
    std::fill_n(numbers.data(), whole_width, 0.0f);
    convert(q_latent, s.rank, 1.0f, numbers.data());
    if (ROPE_IN_BYTES) convert(q_rope, s.rope, 1.0f, numbers.data() + latents.padded);
    Unit lanes, row;
    for (int64_t i = 0; i < whole_width; i += WIDTH) lanes.see(load(numbers.data() + i));
    const vec units_of_lanes = lanes.unit();
    for (int64_t lane = 0; lane < WIDTH; ++lane) row.see(broadcast(units_of_lanes[lane] * MOST_WHOLE));
    for (int64_t i = 0; i < whole_width; i += WIDTH) to.put(i, load(numbers.data() + i) * row.per_unit());
    return row.unit()[0];
  }

  // The fours of columns from `column` on, [columns / 4, HALVES * 16], of the 16 rows from `row` on.
  int32_t* query_at(int64_t row, int64_t column) const {
    return reinterpret_cast<int32_t*>(query.data()) + HALVES * (row * whole_width + column * amx::COLUMNS) / 4;
  }

  // Turns GROUP columns of rows into fours of columns.
  void pack_fours(const i8* rows, int64_t count, int32_t* to) const {
    vec fours[WIDTH];
    load_columns(count, fours, [&](int64_t r) { return as<vec>(_mm512_loadu_si512(rows + r * whole_width)); });
    for (int64_t i = 0; i < WIDTH; ++i) _mm512_storeu_si512(to + i * HALVES * amx::COLUMNS, as<__m512i>(fours[i]));
  }

  // The sums for K tiles of keys and the 16 rows from `row` on.
  template <int K>
  void multiply_keys(int64_t key, int64_t row) {
    const int64_t columns = HALVES * amx::COLUMNS;
    const auto meanwhile = [&] { next.send(2); };
    {
      amx::Sums<i8, K, HALVES> tiles;
      tiles.add(latents.from(key), 0, latents.padded, {query_at(row, 0), stride_of(columns)}, meanwhile);
      if constexpr (ROPE_IN_BYTES)
        tiles.add(ropes.from(key), 0, ropes.padded, {query_at(row, latents.padded), stride_of(columns)}, meanwhile);
      tiles.store_to(whole_sums() + key * columns, columns);
    }
    if constexpr (!ROPE_IN_BYTES) {
      amx::Sums<bf16, K, 1> tiles;
      tiles.add(ropes.from(key), 0, ropes.padded, {rope_query.data() + row, stride_of(padded_rows)}, meanwhile);
      tiles.store_to(rope_sums.data() + key * amx::COLUMNS, amx::COLUMNS);
    }
  }

  Bytes weights_of(int64_t row) const { return bytes_of(weights, amx::ROWS * BLOCK, HALVES * row * BLOCK); }

  // Rounds the weights of 16 rows, times the scales of keys, to [HALVES, 16, BLOCK], with zeros for missing keys.
  void round_weights(const Keys& keys, const float* from, int64_t row) {
    const auto scaled = [&](int64_t k) { return load(from + k * padded_rows + row) * keys.scales.at(k, 0); };
    Unit of_rows;
    for (int64_t k = 0; k < keys.count; ++k) of_rows.see(scaled(k));
    const vec per_unit = of_rows.per_unit();
    store(weight_units.data() + row, of_rows.unit());
    const Bytes to = weights_of(row);
    for (int64_t first = 0; first < round_up(keys.count, GROUP); first += WIDTH) {
      vec lines[WIDTH];
      load_columns(std::clamp(keys.count - first, int64_t{0}, WIDTH), lines,
                   [&](int64_t i) { return scaled(first + i) * per_unit; });
      for (int64_t r = 0; r < WIDTH; ++r) to.put(r * BLOCK + first, lines[r]);
    }
  }

  // Fours of keys, which end in repetitions of the last one: [BLOCK / 4, GROUP].
  void interleave(const Keys& keys, int64_t column, int32_t* to) const {
    const int64_t left = s.rank - column;
    const __mmask64 given = left >= GROUP ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    for (int64_t k = 0; k < round_up(keys.count, GROUP); k += 4, to += GROUP) {
      __m512i of_key[4];
      for (int64_t i = 0; i < 4; ++i) of_key[i] = _mm512_maskz_loadu_epi8(given, keys.latent[k + i] + column);
      const __m512i first[2] = {_mm512_unpacklo_epi8(of_key[0], of_key[1]), _mm512_unpackhi_epi8(of_key[0], of_key[1])};
      const __m512i last[2] = {_mm512_unpacklo_epi8(of_key[2], of_key[3]), _mm512_unpackhi_epi8(of_key[2], of_key[3])};
      for (int64_t i = 0; i < 2; ++i) {
        _mm512_storeu_si512(to + 2 * i * WIDTH, _mm512_unpacklo_epi16(first[i], last[i]));
        _mm512_storeu_si512(to + (2 * i + 1) * WIDTH, _mm512_unpackhi_epi16(first[i], last[i]));
      }
    }
  }

  // o [16, 32 columns] = o * decay + the weights of the 16 rows from `row` on, times interleaved values
  void add_tiles(int64_t count, int64_t row, const int32_t* group, const float* decay, float* o) {
    constexpr int64_t COLUMNS = 2 * amx::COLUMNS;
    const Bytes of_row = weights_of(row);
    const amx::Rows<i8> halves[HALVES] = {{of_row.upper, BLOCK}, {of_row.lower, BLOCK}};
    amx::Sums<i8, HALVES, 2> tiles;
    tiles.add(halves, 0, round_up(count, GROUP), {group, stride_of(GROUP)}, [&] { next.send(2); });
    tiles.store_to(whole_sums(), COLUMNS);
    const int64_t rows = std::min(s.rows - row, amx::ROWS);
    for (int64_t r = 0; r < rows; ++r, o += o_stride(s)) {
      const float unit = weight_units.data()[row + r], shrunk = decay[row + r];
      for (int64_t c = 0; c < COLUMNS; c += WIDTH) {
        const int32_t* upper = whole_sums() + r * COLUMNS + c;
        store(o + c, load(o + c) * shrunk + sum_of(upper, upper + amx::ROWS * COLUMNS) * unit);
      }
    }
  }

  Sizes s;
  amx::InUse in_use;
  Ahead<BLOCK> next;
  int64_t padded_rows;
  KeyTiles<i8, BLOCK> latents;
  KeyTiles<RopeKey, BLOCK> ropes;
  int64_t whole_width;  // of a row of the query in bytes
  Buffer units, query, rope_query, sums, rope_sums, weights, weight_units, values;
};

}  // namespace

#endif
