// Vectors of floats of this CPU's width, and the operations on them that the kernels share.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline vec load(const float* from) { return *reinterpret_cast<const unaligned_vec*>(from); }
inline void store(float* to, vec value) { *reinterpret_cast<unaligned_vec*>(to) = value; }
inline vec broadcast(float value) { return value - vec{}; }
inline vec maximum(vec a, vec b) { return a > b ? a : b; }
inline int64_t round_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// The numbers of a and b in turn: of their lower halves, and of their upper ones.
inline void interleave(vec a, vec b, vec& lower, vec& upper) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  lower = _mm512_permutex2var_ps(a, first, b);
  upper = _mm512_permutex2var_ps(a, second, b);
#else
  for (int64_t i = 0; i < WIDTH; ++i) {
    const vec& from = i % 2 ? b : a;
    lower[i] = from[i / 2];
    upper[i] = from[(WIDTH + i) / 2];
  }
#endif
}

// Loads up to WIDTH rows, row r as `row(r)`, with 0 for missing ones, and turns them into columns: interleaving the
// first half of the rows with the second, as often as halves can be halved, does that.
template <typename Row>
inline void load_columns(int64_t count, vec (&columns)[WIDTH], Row row) {
  if (count >= WIDTH)
#pragma GCC unroll 16
    for (int64_t r = 0; r < WIDTH; ++r) columns[r] = row(r);
  else
    for (int64_t r = 0; r < WIDTH; ++r) columns[r] = r < count ? row(r) : vec{};
#pragma GCC unroll 4
  for (int64_t width = WIDTH; width > 1; width /= 2) {
    vec turned[WIDTH];
#pragma GCC unroll 8
    for (int64_t i = 0; i < WIDTH / 2; ++i)
      interleave(columns[i], columns[i + WIDTH / 2], turned[2 * i], turned[2 * i + 1]);
    std::memcpy(columns, turned, sizeof(turned));
  }
}

// exp(x) for x < 88, within 1.5 ulp; 0 where it would be below the smallest normal number, NaN for NaN. It is 2^n e^r
// with |r| <= ln(2) / 2, and e^r is the polynomial of Cephes' expf.
inline vec exp_of(vec x) {
  const vec magic = broadcast(0x1.8p23f);  // adding it rounds to an integer and leaves that in the low bits
  const vec shifted = x * 0x1.715476p0f + magic;
  const vec n = shifted - magic;
  const vec r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln(2) in two parts; n times the first is exact
  vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ivec exponent, bits;
  std::memcpy(&exponent, &shifted, sizeof(vec));
  std::memcpy(&bits, &p, sizeof(vec));
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof(vec));
  return x < -87.0f ? vec{} : p;
}

// Uninitialised floats at the start of a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<float*>(::operator new(size * sizeof(float), ALIGNMENT))) {}
  ~Buffer() { ::operator delete(data_, ALIGNMENT); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }

 private:
  static constexpr std::align_val_t ALIGNMENT{64};
  float* data_;
};

}  // namespace
