// Products of a block of keys by oneDNN's brgemm, which ships with torch, using AMX tiles where the CPU has them.
//
// The scores [keys, rows] are a block times the packed query, and keys are read in place. For the values, pairs of
// keys are interleaved, [keys / 2, columns, 2], the layout of a tile product's second operand. brgemm generates code
// for each combination of sizes that it meets, so products have the size of a whole block, with zeros for missing
// keys, or of a page's part of it. Inner sizes are multiples of TERMS: otherwise elements of the next row would be
// read, and NaN times 0 is NaN.

#if defined(BRGEMM) && defined(__AVX512BF16__)

#include <ATen/native/CPUBlas.h>

namespace {

struct Tiles {
  typedef bf16 Key;
  static constexpr int64_t PANEL = 16;
  static constexpr int64_t BLOCK = 128;  // 128 keys of 576 numbers, and their interleaved values, are 272 KiB
  static constexpr int64_t FEWEST = 32;  // the shortest run of keys that is multiplied in place: two tiles
  static constexpr int64_t TERMS = 32;   // numbers in a row of a tile

  static bool takes_scales(int64_t groups, int64_t group) { return groups == 1 || group % TERMS == 0; }

  static int64_t o_stride(const Sizes& s) { return round_up(s.rank, Interleaved::COLUMNS); }
  static int64_t o_rows(const Sizes& s) { return s.rows; }

  // Whether oneDNN has tiles on this CPU and may use them.
  static bool present() { return at::native::cpublas::could_pack(at::kBFloat16); }

  explicit Tiles(const Sizes& sizes)
      : s(sizes),
        padded_rows(round_up(sizes.rows, PANEL)),
        rank(round_up(sizes.rank, TERMS)),
        rope(round_up(sizes.rope, TERMS)),
        query(padded_rows * (rank + rope) / 2),
        copies(BLOCK * (rank + rope) / 2),
        parts(BLOCK * padded_rows),
        values(BLOCK * o_stride(sizes) / 2),
        weight_pairs(BLOCK / 2 * padded_rows),
        weight_rows(BLOCK / 2 * sizes.rows) {}
  ~Tiles() { at::native::cpublas::brgemm_release(); }

  // Packs the query of a sequence, [(L + R) / 2, padded rows] pairs.
  void begin(const bf16* q_latent, const bf16* q_rope) {
    std::memset(query.data(), 0, padded_rows * (rank + rope) * sizeof(bf16));
    for (int64_t row = 0; row < s.rows; ++row) {
      pack_row(q_latent + row * s.rank, s.rank, row, 0);
      pack_row(q_rope + row * s.rope, s.rope, row, rank / 2);
    }
  }

  // `add` prefetches the keys `ahead`.
  template <typename Latent, typename Rope>
  void score(const Block<bf16>& keys, const Block<Latent, Rope>* ahead, float* scores) {
    next.set(ahead, s);
    if (const Even even = evenly(keys); even.keys) {  // converted keys, as those with scales are, form one run
      for (int64_t k = 0; k < BLOCK; k += even.keys)
        score_rows(even.keys, keys.latent[k], even.latent, keys.rope[k], even.rope, keys.scales, even.keys,
                   scores + k * padded_rows);
    } else {
      for (int64_t k = 0; k < BLOCK; ++k) {
        bf16* to = numbers(copies) + k * (rank + rope);
        copy_padded(k < keys.count ? keys.latent[k] : nullptr, s.rank, rank, to);
        copy_padded(k < keys.count ? keys.rope[k] : nullptr, s.rope, rope, to + rank);
      }
      const bf16* rows = numbers(copies);
      score_rows(BLOCK, rows, rank + rope, rows + rank, rank + rope, keys.scales, keys.count, scores);
    }
    for (int64_t i = 0; i < keys.count * padded_rows; i += WIDTH) store(scores + i, load(scores + i) * s.scale);
  }

  void add(const Block<bf16>& keys, const float* weights, const float* decay, float* o) {
    const int64_t columns = o_stride(s);
    for (int64_t row = 0; row < s.rows; ++row)
      if (decay[row] != 1.0f)
        for (int64_t i = 0; i < columns; i += WIDTH)
          store(o + row * columns + i, load(o + row * columns + i) * decay[row]);
    const Scales& scales = keys.scales;
    interleave(keys, (keys.count + 1) / 2);
    if (!scales.of_keys) pack_weights(weights, keys.count, [](int64_t) { return 1.0f; });
    for (int64_t g = 0; g < scales.groups; ++g) {
      const int64_t some = columns / scales.groups, first = g * some;
      if (scales.of_keys) pack_weights(weights, keys.count, [&](int64_t k) { return scales.at(k, g); });
      at::native::cpublas::brgemm(s.rows, some, BLOCK, BLOCK, columns, columns, true,
                                  torch_numbers(numbers(weight_rows)), torch_numbers(numbers(values) + 2 * first),
                                  o + first);
    }
  }

  void end(float* o) const {
    for (int64_t i = 0; i < s.rows * o_stride(s); i += Interleaved::COLUMNS) Interleaved::undo(o + i);
  }

 private:
  static const at::BFloat16* torch_numbers(const bf16* from) {
    return reinterpret_cast<const at::BFloat16*>(from);
  }
  static bf16* numbers(const Buffer& buffer) { return reinterpret_cast<bf16*>(buffer.data()); }

  void pack_row(const bf16* from, int64_t width, int64_t row, int64_t first_pair) {
    pair_t* to = reinterpret_cast<pair_t*>(query.data()) + first_pair * padded_rows + row;
    for (int64_t i = 0; i < width; ++i) to[i / 2 * padded_rows] |= pair_t{from[i].bits} << i % 2 * 16;
  }

  // A block made of runs of `keys` keys each, evenly spaced by these strides: the parts of pages, for example.
  struct Even {
    int64_t keys = 0, latent = 0, rope = 0;
  };

  // The runs of a block; 0 keys if it has to be copied instead.
  Even evenly(const Block<bf16>& keys) const {
    if (keys.count < BLOCK || rank != s.rank || rope != s.rope) return {};
    const int64_t latent = keys.latent[1] - keys.latent[0], rope_stride = keys.rope[1] - keys.rope[0];
    const auto follows = [&](int64_t k) {
      return keys.latent[k] - keys.latent[k - 1] == latent && keys.rope[k] - keys.rope[k - 1] == rope_stride;
    };
    int64_t run = 1, k = 1;
    while (run < BLOCK && follows(run)) ++run;
    if (latent < rank || rope_stride < rope || run < FEWEST || BLOCK % run) return {};
    while (k < BLOCK && (k % run == 0 || follows(k))) ++k;
    return k < BLOCK ? Even{} : Even{run, latent, rope_stride};
  }

  static void copy_padded(const bf16* from, int64_t size, int64_t padded, bf16* to) {
    const int64_t given = from ? size : 0;
    std::copy_n(from, given, to);
    std::fill_n(to + given, padded - given, bf16{0});
  }

  // Scores of `keys` keys, `count` of which are real. Numbers past s.rank and s.rope are 0.
  void score_rows(int64_t keys, const bf16* latent, int64_t latent_stride, const bf16* k_rope, int64_t rope_stride,
                  const Scales& scales, int64_t count, float* scores) {
    const auto add_rope = [&](float* to) {
      if (rope) multiply(keys, k_rope, rope_stride, rope, rank / 2, true, to);
    };
    if (!scales.of_keys) {
      multiply(keys, latent, latent_stride, rank, 0, false, scores);
      return add_rope(scores);
    }
    const int64_t width = rank / scales.groups;
    for (int64_t g = 0; g < scales.groups; ++g) {
      multiply(keys, latent + g * width, latent_stride, width, g * width / 2, false, parts.data());
      if (scales.rope) add_rope(parts.data());
      for (int64_t k = 0; k < count; ++k)
        for (int64_t i = k * padded_rows; i < (k + 1) * padded_rows; i += WIDTH) {
          const vec scaled = load(parts.data() + i) * scales.at(k, g);
          store(scores + i, g ? load(scores + i) + scaled : scaled);
        }
    }
    std::fill_n(scores + count * padded_rows, (keys - count) * padded_rows, 0.0f);
    if (!scales.rope) add_rope(scores);
  }

  // Packs the weights times the `scale` of their keys, [rows, BLOCK], with zeros for missing keys.
  template <typename Scale>
  void pack_weights(const float* weights, int64_t count, Scale scale) {
    pair_t* pairs = reinterpret_cast<pair_t*>(weight_pairs.data());
    pair_weights(weights, count, padded_rows, pairs, scale);
    pair_t* by_row = reinterpret_cast<pair_t*>(weight_rows.data());
    const int64_t given = (count + 1) / 2;
    for (int64_t row = 0; row < s.rows; ++row)
      for (int64_t i = 0; i < BLOCK / 2; ++i)
        by_row[row * BLOCK / 2 + i] = i < given ? pairs[i * padded_rows + row] : 0;
  }

  // scores [count, padded rows] = keys [count, width] times the packed query from `first_pair` on
  void multiply(int64_t count, const bf16* keys, int64_t stride, int64_t width, int64_t first_pair, bool adds,
                float* scores) const {
    at::native::cpublas::brgemm(count, padded_rows, width, stride, padded_rows, padded_rows, adds, torch_numbers(keys),
                                torch_numbers(numbers(query) + 2 * first_pair * padded_rows), scores);
  }

  void interleave(const Block<bf16>& keys, int64_t given) {
    const int64_t columns = o_stride(s);
    pair_t* to = reinterpret_cast<pair_t*>(values.data());
    for (int64_t i = 0; i < given; ++i, to += columns) {
      next.send_for(2 * i);
      next.send_for(2 * i + 1);
      for (int64_t column = 0; column < columns; column += Interleaved::COLUMNS) {
        const Interleaved some(keys.latent[2 * i] + column, keys.latent[2 * i + 1] + column,
                               Interleaved::mask(s.rank - column));
        _mm512_storeu_si512(to + column, some.low);
        _mm512_storeu_si512(to + column + 16, some.high);
      }
    }
    std::memset(to, 0, (BLOCK / 2 - given) * columns * sizeof(pair_t));
  }

  Sizes s;
  Ahead<BLOCK> next;
  int64_t padded_rows, rank, rope;
  Buffer query, copies, parts, values, weight_pairs, weight_rows;
};

}  // namespace

#endif
