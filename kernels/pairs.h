// Products of bfloat16, two terms per instruction (AVX512-BF16), summed in float32.

#if defined(__AVX512BF16__)

namespace {

typedef uint32_t pair_t;  // two numbers, the first in the low bits

inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, as<__m512bh>(a), as<__m512bh>(b)); }

// Packs weights [count, padded rows] of neighbouring keys into pairs [count / 2, padded rows], each weight times the
// `scale` of its key. An odd last key is paired with a weight of 0.
template <typename Scale>
inline void pair_weights(const float* weights, int64_t count, int64_t padded_rows, pair_t* pairs, Scale scale) {
  for (int64_t k = 0; k < count; k += 2)
    for (int64_t row = 0; row < padded_rows; row += 16) {
      const float* weight = weights + k * padded_rows + row;
      const auto scaled = [&](int64_t key, const float* from) {
        return _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(scale(key)));
      };
      const __m512 second = k + 1 < count ? scaled(k + 1, weight + padded_rows) : _mm512_setzero_ps();
      const __m512i low = _mm512_cvtepu16_epi32(as<__m256i>(_mm512_cvtneps_pbh(scaled(k, weight))));
      const __m512i high = _mm512_cvtepu16_epi32(as<__m256i>(_mm512_cvtneps_pbh(second)));
      _mm512_storeu_si512(pairs + k / 2 * padded_rows + row, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

inline void pair_weights(const float* weights, int64_t count, int64_t padded_rows, pair_t* pairs) {
  pair_weights(weights, count, padded_rows, pairs, [](int64_t) { return 1.0f; });
}

}  // namespace

#endif
