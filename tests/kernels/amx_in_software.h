// `amx.h` for any CPU with AVX512-BF16: tiles are arrays.

#if defined(__AVX512BF16__)
#define AMX

namespace amx {

constexpr int64_t ROWS = 16, COLUMNS = 16;
template <typename Number>
constexpr int64_t TERMS = 64 / sizeof(Number);

thread_local float tiles[8][16][16];
thread_local bool set_up = false;

inline bool allowed() { return true; }

class InUse {
 public:
  InUse() { set_up = true; }
  ~InUse() { set_up = false; }
};

template <int TILE>
inline void load(const void* rows, int64_t stride) {
  if (!set_up) __builtin_trap();
  for (int64_t i = 0; i < 16; ++i) std::memcpy(tiles[TILE][i], static_cast<const char*>(rows) + i * stride, 64);
}

template <int TILE>
inline void store(void* rows, int64_t stride) {
  for (int64_t i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(rows) + i * stride, tiles[TILE][i], 64);
}

template <int TILE>
inline void clear() {
  if (!set_up) __builtin_trap();
  std::memset(tiles[TILE], 0, sizeof tiles[TILE]);
}

inline __m512i added_products(bf16, __m512i sum, __m512i a, __m512i b) {
  return as<__m512i>(dot(as<__m512>(sum), a, b));
}

inline __m512i added_products(i8, __m512i sum, __m512i a, __m512i b) {
  for (int byte = 0; byte < 32; byte += 8) {
    const auto number = [&](__m512i of) { return _mm512_srai_epi32(_mm512_slli_epi32(of, 24 - byte), 24); };
    sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(number(a), number(b)));
  }
  return sum;
}

template <typename Number, int SUMS, int A, int B>
inline void multiply() {
  for (int64_t row = 0; row < 16; ++row) {
    __m512i sum = _mm512_loadu_si512(tiles[SUMS][row]);
    for (int64_t k = 0; k < 16; ++k)
      sum = added_products(Number{}, sum, as<__m512i>(_mm512_set1_ps(tiles[A][row][k])), _mm512_loadu_si512(tiles[B][k]));
    _mm512_storeu_si512(tiles[SUMS][row], sum);
  }
}

}  // namespace amx

#endif
