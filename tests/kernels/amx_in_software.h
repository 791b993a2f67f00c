// `amx.h` for any CPU with AVX512-BF16: tiles are arrays.

#if defined(__AVX512BF16__)
#define AMX

namespace amx {

constexpr int64_t ROWS = 16, COLUMNS = 16, TERMS = 32;

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

template <int SUMS, int A, int B>
inline void multiply() {
  for (int64_t row = 0; row < 16; ++row) {
    __m512 sum = _mm512_loadu_ps(tiles[SUMS][row]);
    for (int64_t k = 0; k < 16; ++k)
      sum = dot(sum, _mm512_loadu_si512(tiles[B][k]), as<__m512i>(_mm512_set1_ps(tiles[A][row][k])));
    _mm512_storeu_ps(tiles[SUMS][row], sum);
  }
}

}  // namespace amx

#endif
