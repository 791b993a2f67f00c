// Conversions between the narrow numbers that a cache holds and vectors of floats.

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };  // float8_e4m3fn: no infinity, all ones is NaN
struct i8 { int8_t bits; };     // whole numbers from -128 to 127
struct i4 { uint8_t bits; };    // two whole numbers from -8 to 7, each plus 8, the lower half being the first

// How many numbers an element holds.
template <typename Number>
constexpr int64_t IN_ONE = std::is_same_v<Number, i4> ? 2 : 1;

template <typename To, typename From>
inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof(To));
  return to;
}

// Loads WIDTH integers of 8 or 16 bits. Compilers turn the generic version into one instruction per number.
template <typename Bits>
inline ivec load_bits(const void* from) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Bits, int8_t>)
    return as<ivec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
  else if constexpr (sizeof(Bits) == 1)
    return as<ivec>(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
  else
    return as<ivec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<Bits, int8_t>)
    return as<ivec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
  else if constexpr (sizeof(Bits) == 1)
    return as<ivec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
  else
    return as<ivec>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  typedef Bits bits_vec __attribute__((vector_size(sizeof(Bits) * WIDTH)));
  bits_vec bits;
  std::memcpy(&bits, from, sizeof(bits_vec));
  return __builtin_convertvector(bits, ivec);
#endif
}

// The float of a narrower format's sign, exponent and fraction, which are in a float's positions. The exponent is too
// small by `bias`; an exponent of 0 stands for 1 without the leading bit (subnormal numbers).
inline vec rebiased(ivec sign, ivec magnitude, int32_t bias) {
  const vec normal = as<vec>(magnitude + (bias << 23));
  const vec small = as<vec>(magnitude + ((bias + 1) << 23)) - as<float>((bias + 1) << 23);
  return as<vec>(as<ivec>(magnitude < (1 << 23) ? small : normal) | sign);
}

inline vec widened(const float* from) { return load(from); }
inline vec widened(const bf16* from) { return as<vec>(load_bits<uint16_t>(from) << 16); }

inline vec widened(const fp16* from) {
#if defined(__AVX512F__)
  return as<vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return as<vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  const ivec bits = load_bits<uint16_t>(from), magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const vec special = as<vec>(magnitude | sign | 0x7f800000);  // infinite, or NaN
  return magnitude >= 0x7c00 << 13 ? special : rebiased(sign, magnitude, 127 - 15);
#endif
}

inline vec widened(const e4m3* from) {
  const ivec bits = load_bits<uint8_t>(from), magnitude = (bits & 0x7f) << 20;
  const vec number = rebiased((bits & 0x80) << 24, magnitude, 127 - 7);
  return magnitude == 0x7f << 20 ? broadcast(NAN) : number;
}

inline vec widened(const i8* from) { return __builtin_convertvector(load_bits<int8_t>(from), vec); }


template <typename Number>
inline float widened_one(Number number) {
  Number some[WIDTH] = {number};
  return widened(some)[0];
}

// Rounded to nearest, ties to even; NaN stays NaN.
inline void narrow(vec value, float* to) { store(to, value); }

inline void narrow(vec value, bf16* to) {
  typedef uint16_t bits_vec __attribute__((vector_size(2 * WIDTH)));
#if defined(__AVX512BF16__)
  const bits_vec narrowed = as<bits_vec>(_mm512_cvtneps_pbh(as<__m512>(value)));
#else
  const ivec bits = as<ivec>(value), kept = (bits >> 16) & 0xffff;
  const ivec rounded = ((bits + 0x7fff + (kept & 1)) >> 16) & 0xffff;
  const bits_vec narrowed = __builtin_convertvector(value == value ? rounded : kept | 0x40, bits_vec);
#endif
  std::memcpy(to, &narrowed, sizeof(narrowed));
}

inline void narrow(vec value, fp16* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(as<__m512>(value), 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(as<__m256>(value), 0));
#else
  typedef uint16_t bits_vec __attribute__((vector_size(2 * WIDTH)));
  const ivec bits = as<ivec>(value), magnitude = bits & 0x7fffffff, kept = magnitude >> 13;
  const ivec normal = ((magnitude + 0xfff + (kept & 1)) >> 13) - ((127 - 15) << 10);
  // Adding 0.5 leaves a number below 2^-14 in units of 2^-24 in the low bits, rounded.
  const ivec small = as<ivec>(as<vec>(magnitude) + 0.5f) - as<int32_t>(0.5f);
  const ivec finite = magnitude < (127 - 14) << 23 ? small : magnitude >= 0x477ff000 ? ivec{} + 0x7c00 : normal;
  const ivec rounded = magnitude > 0x7f800000 ? ivec{} + 0x7e00 : finite;
  const bits_vec narrowed = __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), bits_vec);
  std::memcpy(to, &narrowed, sizeof(narrowed));
#endif
}

// to [size] = from [size] * scale, rounded once
template <typename From, typename To>
inline void convert(const From* from, int64_t size, float scale, To* to) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) narrow(widened(from + i) * scale, to + i);
  if (i == size) return;
  From rest[WIDTH] = {};
  To narrowed[WIDTH];
  std::copy(from + i, from + size, rest);
  narrow(widened(rest) * scale, narrowed);
  std::copy_n(narrowed, size - i, to + i);
}

// The same of `size` numbers of 4 bits, an even number of them.
template <typename To>
inline void convert(const i4* from, int64_t size, float scale, To* to) {
  constexpr int64_t SOME = 64;
  i8 numbers[SOME];
  for (int64_t first = 0; first < size; first += SOME, from += SOME / 2) {
    const int64_t count = std::min(SOME, size - first);
    for (int64_t i = 0; i < count / 2; ++i) {
      numbers[2 * i].bits = (from[i].bits & 15) - 8;
      numbers[2 * i + 1].bits = (from[i].bits >> 4) - 8;
    }
    convert(numbers, count, scale, to + first);
  }
}

#if defined(__AVX512BF16__)
// Looks each number up among the 16 that there are, which are multiplied by the scale first.
inline void convert(const i4* from, int64_t size, float scale, bf16* to) {
  const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512 scaled = _mm512_mul_ps(numbers, _mm512_set1_ps(scale));
  const __m512i table = _mm512_castsi256_si512(as<__m256i>(_mm512_cvtneps_pbh(scaled)));
  const auto looked_up = [&](__m128i codes) {
    const __m512i bytes = _mm512_cvtepu8_epi32(codes), upper = _mm512_slli_epi32(bytes, 12);
    const __m512i places = _mm512_and_si512(_mm512_or_si512(bytes, upper), _mm512_set1_epi32(0xf000f));
    return _mm512_permutexvar_epi16(places, table);
  };
  int64_t i = 0;
  for (; i + 32 <= size; i += 32)
    _mm512_storeu_si512(to + i, looked_up(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i / 2))));
  if (i == size) return;
  const __mmask16 bytes = (__mmask16{1} << (size - i) / 2) - 1;
  const __mmask32 numbers_left = (__mmask32{1} << (size - i)) - 1;
  _mm512_mask_storeu_epi16(to + i, numbers_left, looked_up(_mm_maskz_loadu_epi8(bytes, from + i / 2)));
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// bfloat16 represents every e4m3 number and every integer up to 256 exactly: their bits, without the sign.
constexpr int32_t bits_of_whole(int32_t number, int32_t exponent) {  // number * 2^exponent, number below 256
  if (number == 0) return 0;
  int32_t leading = 7;
  while (!(number >> leading)) --leading;
  return (leading + exponent + 127) << 7 | ((number << (7 - leading)) & 0x7f);
}
constexpr int32_t bits_of_magnitude(e4m3, int32_t code) {
  const int32_t exponent = code >> 3, fraction = code & 7;
  if (code == 0x7f) return 0x7fc0;
  return exponent == 0 ? bits_of_whole(fraction, -9) : bits_of_whole(8 | fraction, exponent - 10);
}
constexpr int32_t bits_of_magnitude(i8, int32_t code) { return bits_of_whole(code, 0); }

// Tables of the low and the high byte, in bfloat16, of each 7-bit magnitude.
template <typename Number>
struct Magnitudes {
  alignas(64) uint8_t low[128], high[128];

  constexpr Magnitudes() : low(), high() {
    for (int32_t code = 0; code < 128; ++code) {
      const int32_t bits = bits_of_magnitude(Number{}, code);
      low[code] = bits & 0xff;
      high[code] = bits >> 8;
    }
  }
};
template <typename Number>
constexpr Magnitudes<Number> MAGNITUDES;

// The index of each code's magnitude in the tables, of which only the low 7 bits are used.
inline __m512i place_of(const e4m3*, __m512i codes) { return codes; }
inline __m512i place_of(const i8*, __m512i codes) { return _mm512_abs_epi8(codes); }

// Corrects the upper byte of -128, whose magnitude the tables lack; its lower byte is that of 0.
inline __m512i corrected(const e4m3*, __m512i, __m512i upper) { return upper; }
inline __m512i corrected(const i8*, __m512i codes, __m512i upper) {
  const __mmask64 least = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
  return _mm512_mask_blend_epi8(least, upper, _mm512_set1_epi8(static_cast<char>(0xc3)));
}

// Looks up both bytes of each number, which takes two instructions for 64 numbers, and stores `finish` of each 32.
template <typename Number, typename Finish>
inline void look_up(const Number* from, int64_t size, bf16* to, Finish finish) {
  const auto& magnitudes = MAGNITUDES<Number>;
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const __m512i low[2] = {table(magnitudes.low), table(magnitudes.low + 64)};
  const __m512i high[2] = {table(magnitudes.high), table(magnitudes.high + 64)};
  // Unpacking interleaves the low 8 bytes of each 16-byte lane, or the high 8. With this order of 8-byte groups the low
  // ones are the first 32 numbers, the high ones the last 32.
  const __m512i halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-0x80);
  const auto both_bytes = [&](__m512i bytes, __m512i& first, __m512i& last) {
    const __m512i codes = _mm512_permutexvar_epi64(halves, bytes), place = place_of(from, codes);
    const __m512i unsigned_upper = _mm512_permutex2var_epi8(high[0], place, high[1]);
    const __m512i upper = corrected(from, codes, _mm512_or_si512(unsigned_upper, _mm512_and_si512(codes, sign)));
    const __m512i lower = _mm512_permutex2var_epi8(low[0], place, low[1]);
    first = finish(_mm512_unpacklo_epi8(lower, upper));
    last = finish(_mm512_unpackhi_epi8(lower, upper));
  };
  __m512i first, last;
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    both_bytes(_mm512_loadu_si512(from + i), first, last);
    _mm512_storeu_si512(to + i, first);
    _mm512_storeu_si512(to + i + 32, last);
  }
  if (i == size) return;
  const __mmask64 rest = (__mmask64{1} << (size - i)) - 1;
  both_bytes(_mm512_maskz_loadu_epi8(rest, from + i), first, last);
  _mm512_mask_storeu_epi16(to + i, static_cast<__mmask32>(rest), first);
  if (size - i > 32) _mm512_mask_storeu_epi16(to + i + 32, static_cast<__mmask32>(rest >> 32), last);
}

// Without a scale: exact, as bfloat16 represents them all.
template <typename Number>
inline void convert(const Number* from, int64_t size, bf16* to) {
  look_up(from, size, to, [](__m512i numbers) { return numbers; });
}

// With a scale: multiplied in float32.
template <typename Number, typename = std::enable_if_t<sizeof(Number) == 1>>
inline void convert(const Number* from, int64_t size, float scale, bf16* to) {
  const __m512i odd = _mm512_set1_epi32(-0x10000);
  const __m512i in_turn = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                            0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                                            0x1e000e, 0x1f000f);
  const __m512 by_scale = _mm512_set1_ps(scale);
  const auto scaled = [&](__m512i bits) { return _mm512_mul_ps(as<__m512>(bits), by_scale); };
  const auto narrowed = [&](__m512i pairs) {
    const __m512 evens = scaled(_mm512_slli_epi32(pairs, 16)), odds = scaled(_mm512_and_si512(pairs, odd));
    return _mm512_permutexvar_epi16(in_turn, as<__m512i>(_mm512_cvtne2ps_pbh(odds, evens)));
  };
  look_up(from, size, to, narrowed);
}
#elif defined(__AVX512BF16__)
// The same by way of float16, with half the instructions: e4m3's bits, moved up, are a float16 2^8 times smaller.
inline void convert(const e4m3* from, int64_t size, float scale, bf16* to) {
  const __m512i special = _mm512_set1_epi16(0x3f80), nan = _mm512_set1_epi16(0x7e00);
  const __m512 by_format = _mm512_set1_ps(256.0f), by_scale = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < size; i += 32) {
    const __mmask32 given = size - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (size - i)) - 1;
    const __m512i bits = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(given, from + i));
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(bits, 7), special);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(bits, 8), _mm512_set1_epi16(-0x8000));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, special);
    const __m512i half = _mm512_mask_mov_epi16(_mm512_or_si512(sign, magnitude), is_nan, nan);
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    const auto scaled = [&](__m512 value) { return _mm512_mul_ps(_mm512_mul_ps(value, by_format), by_scale); };
    _mm512_mask_storeu_epi16(to + i, given, as<__m512i>(_mm512_cvtne2ps_pbh(scaled(high), scaled(low))));
  }
}

// Without a scale: exact, as bfloat16 represents them all.
template <typename Number>
inline void convert(const Number* from, int64_t size, bf16* to) { convert(from, size, 1.0f, to); }
#endif

}  // namespace
