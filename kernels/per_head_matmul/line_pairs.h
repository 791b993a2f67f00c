// Products of bfloat16 in pairs (AVX512-BF16), two terms per instruction.

#if defined(__AVX512BF16__)

namespace {

// Up to BLOCK numbers; the others are 0.
inline __m512i load_some(const void* from, int64_t count) {
  if (count >= BLOCK) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, from);
}

// out [R, columns] += x [R, 2 S] weight [2 S, columns], of which `lines` are there. Of each BLOCK of columns, the even
// ones come first in out.
template <int64_t R, int64_t S>
inline void add_pairs(const Task<bf16>& t, int64_t i, int64_t lines) {
  constexpr __mmask32 upper = 0xaaaaaaaa;
  for (int64_t c = 0; c < t.columns; c += BLOCK) {
    __m512i even[S], odd[S];
    for (int64_t s = 0; s < S; ++s) {
      const Number* line = t.weight + (i + 2 * s) * t.line + c;
      const __m512i a = load_some(line, t.columns - c);
      const __m512i b = 2 * s + 1 < lines ? load_some(line + t.line, t.columns - c) : _mm512_setzero_si512();
      even[s] = _mm512_mask_blend_epi16(upper, a, _mm512_slli_epi32(b, 16));
      odd[s] = _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(a, 16), b);
    }
    for (int64_t row = 0; row < R; ++row) {
      float* out = t.out + row * t.out_row + c;
      __m512 first = _mm512_loadu_ps(out), second = _mm512_loadu_ps(out + WIDTH);
      for (int64_t s = 0; s < S; ++s) {
        int32_t pair;
        std::memcpy(&pair, t.x + row * t.x_row + i + 2 * s, sizeof(pair));
        first = dot(first, even[s], _mm512_set1_epi32(pair));
        second = dot(second, odd[s], _mm512_set1_epi32(pair));
      }
      _mm512_storeu_ps(out, first);
      _mm512_storeu_ps(out + WIDTH, second);
    }
  }
}

template <int64_t R>
void sum_some_lines(const Task<bf16>& t) {
  for (int64_t row = 0; row < R; ++row) std::fill_n(t.out + row * t.out_row, t.out_row, 0.0f);
  int64_t i = 0;
  for (; i + STREAMS <= t.inner; i += STREAMS) {
    ask_for(t, i + STREAMS, std::min(STREAMS, t.inner - i - STREAMS));
    add_pairs<R, STREAMS / 2>(t, i, STREAMS);
  }
  for (; i < t.inner; i += 2) add_pairs<R, 1>(t, i, t.inner - i);
  for (int64_t row = 0; row < R; ++row)
    for (int64_t c = 0; c < t.columns; c += BLOCK) {
      float* out = t.out + row * t.out_row + c;
      vec lower, upper;
      interleave(load(out), load(out + WIDTH), lower, upper);
      store(out, lower);
      store(out + WIDTH, upper);
    }
}

template <int64_t R>
void dot_some_lines(const Task<bf16>& t) {
  constexpr int64_t CHAINS = 2;  // independent chains of additions per row
  constexpr int64_t PAGE = 4096 / sizeof(Number);  // a CPU's own prefetchers stop where a page ends
  for (int64_t c = 0; c < t.columns; ++c) {
    const Number* weight = t.weight + c * t.line;
    __m512 sums[R][CHAINS] = {};
    int64_t i = 0;
    for (; i + CHAINS * BLOCK <= t.inner; i += CHAINS * BLOCK)
      for (int64_t chain = 0; chain < CHAINS; ++chain) {
        const Number* const at = weight + i + chain * BLOCK;
        const __m512i line = _mm512_loadu_si512(at);
        __builtin_prefetch(at + PAGE, 0, 2);
        for (int64_t row = 0; row < R; ++row)
          sums[row][chain] = dot(sums[row][chain], _mm512_loadu_si512(t.x + row * t.x_row + i + chain * BLOCK), line);
      }
    for (; i < t.inner; i += BLOCK) {
      const __m512i line = load_some(weight + i, t.inner - i);
      for (int64_t row = 0; row < R; ++row)
        sums[row][0] = dot(sums[row][0], load_some(t.x + row * t.x_row + i, t.inner - i), line);
    }
    for (int64_t row = 0; row < R; ++row)
      t.out[row * t.out_row + c] = _mm512_reduce_add_ps(_mm512_add_ps(sums[row][0], sums[row][1]));
  }
}

inline void dot_lines(const Task<bf16>& t, int64_t rows) {
  by_rows(t, rows, [](auto count, const Task<bf16>& some) { dot_some_lines<count>(some); });
}

}  // namespace

#endif
