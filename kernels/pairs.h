// Products of bfloat16, two terms an instruction (AVX512-BF16), summed in float32.

#if defined(__AVX512BF16__)

namespace {

typedef uint32_t pair_t;  // two numbers, the first in the low bits

inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, as<__m512bh>(a), as<__m512bh>(b)); }

// pairs [count / 2, padded rows] of weights [count, padded rows]; an odd last key is paired with a weight of 0
inline void pair_weights(const float* weights, int64_t count, int64_t padded_rows, pair_t* pairs) {
  for (int64_t k = 0; k < count; k += 2)
    for (int64_t row = 0; row < padded_rows; row += 16) {
      const float* weight = weights + k * padded_rows + row;
      const __m512 second = k + 1 < count ? _mm512_loadu_ps(weight + padded_rows) : _mm512_setzero_ps();
      const __m512i low = _mm512_cvtepu16_epi32(as<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(weight))));
      const __m512i high = _mm512_cvtepu16_epi32(as<__m256i>(_mm512_cvtneps_pbh(second)));
      _mm512_storeu_si512(pairs + k / 2 * padded_rows + row, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

}  // namespace

#endif
