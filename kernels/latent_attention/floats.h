// Products of a block of keys in float32, for any CPU.

namespace {

struct Floats {
  typedef float Key;
  typedef Block<Key> Keys;
#if defined(__AVX512F__)
  static constexpr int64_t KEYS = 16;  // per tile of scores: 16 of 32 registers accumulate
#elif defined(__AVX__)
  static constexpr int64_t KEYS = 6;   // 12 of 16
#else
  static constexpr int64_t KEYS = 4;   // 16 of 32
#endif
  static constexpr int64_t PANEL = 16;         // rows of a panel of the packed query
  // Terms of a score accumulated in one sum: errors grow with sqrt(TERMS + L / TERMS), not sqrt(L), which is the same
  // for both values if L = 512. On x86, registers do not hold both sums: one is loaded and stored after TERMS terms.
#if defined(__AVX__)
  static constexpr int64_t TERMS = 32;
#else
  static constexpr int64_t TERMS = 16;
#endif
  static constexpr int64_t BLOCK = 64 / KEYS * KEYS;  // 64 keys of 576 floats are 144 KiB: within a second-level cache

  static bool takes_scales(int64_t, int64_t) { return false; }

  static int64_t o_stride(const Sizes& s) { return s.rank; }
  static int64_t o_rows(const Sizes& s) { return s.rows; }

  explicit Floats(const Sizes& sizes)
      : s(sizes), padded_rows(round_up(sizes.rows, PANEL)), query(padded_rows * sizes.width()),
        line(sizes.width()) {}

  // Packs the scaled query of a sequence, [panel, L + R, PANEL].
  template <typename Number>
  void begin(const Number* q_latent, const Number* q_rope) {
    std::fill_n(query.data(), padded_rows * s.width(), 0.0f);
    for (int64_t row = 0; row < s.rows; ++row) {
      pack_row(q_latent + row * s.rank, s.rank, row, 0);
      pack_row(q_rope + row * s.rope, s.rope, row, s.rank);
    }
  }

  // scores [BLOCK, padded rows]; prefetches the keys `ahead`
  template <typename Latent, typename Rope>
  void score(const Keys& keys, const Block<Latent, Rope>* ahead, float* scores) const {
    for (int64_t row = 0; row < padded_rows; row += PANEL) {
      const bool loads = ahead && row == 0;
      score_panel<KEYS, PANEL / WIDTH, TERMS>(
          Scattered{keys.latent}, s.rank, Scattered{keys.rope}, s.rope, keys.count, query.data() + row * s.width(),
          scores + row, padded_rows, loads ? ahead->latent : nullptr, loads ? ahead->rope : nullptr);
    }
  }

  // o [rows, L] = o * decay + weights [BLOCK, padded rows] latents
  void add(const Keys& keys, const float* weights, const float* decay, float* o) const {
    const Values values{o, s.rank, s.rows, s.rank, decay, weights, padded_rows};
    values.add(Scattered{keys.latent}, keys.count);
  }

  void end(float*) const {}

 private:
  template <typename Number>
  void pack_row(const Number* from, int64_t width, int64_t row, int64_t first) {
    convert(from, width, s.scale, line.data());
    float* to = query.data() + row / PANEL * PANEL * s.width() + first * PANEL + row % PANEL;
    for (int64_t i = 0; i < width; ++i) to[i * PANEL] = line.data()[i];
  }

  Sizes s;
  int64_t padded_rows;
  Buffer query, line;
};

}  // namespace
