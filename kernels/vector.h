// Vectors of floats of this CPU's width, and the operations on them that the kernels share.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

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

// exp(x) for x <= 0, within 1.5 ulp; 0 where it would be below the smallest normal number, NaN for NaN. It is 2^n e^r
// with |r| <= ln(2) / 2, and e^r is the polynomial of Cephes' expf.
inline vec exp_of_nonpositive(vec x) {
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
