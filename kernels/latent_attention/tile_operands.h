// What AMX's tiles multiply: keys, where they lie or in copies, and the query, packed.

#if defined(AMX)

namespace {

// One of the two parts of up to MOST keys, as tiles of 16 keys each: in place where keys fill them, or else copied. Tiles
// are whole, with zeros for missing keys and numbers: NaN times 0 is NaN.
template <typename Number, int64_t MOST>
class KeyTiles {
 public:
  const int64_t padded;  // the numbers of a key and of its padding

  explicit KeyTiles(int64_t width)
      : padded(round_up(width, amx::TERMS<Number>)), width(width), copies(MOST * padded * sizeof(Number) / sizeof(float)) {}

  // `stride` is that of each 16 keys, or 0 if they have none.
  void place(const Number* const* keys, int64_t stride, int64_t count) {
    constexpr int64_t BYTES = sizeof(Number);
    for (int64_t k = 0; k < count; k += amx::ROWS) {
      if (stride && padded == width && k + amx::ROWS <= count) {
        tiles[k / amx::ROWS] = {keys[k], BYTES * stride};
        continue;
      }
      Number* to = reinterpret_cast<Number*>(copies.data()) + k * padded;
      tiles[k / amx::ROWS] = {to, BYTES * padded};
      for (int64_t i = k; i < k + amx::ROWS; ++i, to += padded) {
        const int64_t given = i < count ? width : 0;
        std::copy_n(keys[i], given, to);
        std::fill_n(to + given, padded - given, Number{});
      }
    }
  }

  const amx::Rows<Number>* from(int64_t key) const { return tiles + key / amx::ROWS; }

 private:
  int64_t width;
  amx::Rows<Number> tiles[MOST / amx::ROWS];
  Buffer copies;
};

inline int64_t stride_of(int64_t fours_of_bytes) { return 4 * fours_of_bytes; }

// Turns rows [rows, width] into pairs of columns, [width / 2, padded rows].
inline void pack(const bf16* from, int64_t rows, int64_t width, pair_t* to, int64_t padded_rows) {
  constexpr int64_t TERMS = amx::TERMS<bf16>;
  for (int64_t row = 0; row < rows; row += WIDTH)
    for (int64_t first = 0; first < width; first += TERMS) {
      const __mmask32 given = Interleaved::mask(width - first);
      vec lines[WIDTH];
      load_columns(std::min(rows - row, WIDTH), lines, [&](int64_t r) {
        return as<vec>(_mm512_maskz_loadu_epi16(given, from + (row + r) * width + first));
      });
      pair_t* line = to + first / 2 * padded_rows + row;
      for (int64_t i = 0; i < (std::min(width - first, TERMS) + 1) / 2; ++i, line += padded_rows)
        _mm512_storeu_si512(line, as<__m512i>(lines[i]));
    }
}

}  // namespace

#endif
