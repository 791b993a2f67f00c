// `mla::append_latents`: quantises tokens into their rows, one after the other.

namespace {

constexpr int64_t NUMBERS_OF_A_TASK = 1 << 15;  // a few microseconds, as long as waking a thread takes
constexpr float MOST_OF_E4M3 = 448.0f;
constexpr float LEAST_OF_A_GROUP = 0x1p-100f;

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A float as e4m3fn, rounded to nearest, ties to even; magnitudes greater than 464 become NaN.
//
// A binade has 8 steps; below 2^-6 steps get no smaller. Adding a number around which floats are one step apart rounds
// to whole steps.
inline uint8_t to_e4m3(float value) {
  const uint32_t word = bits_as<uint32_t>(value), magnitude = word & 0x7FFFFFFF;
  const uint32_t exponent = std::max(magnitude >> 23, uint32_t{127 - 6});
  const uint32_t a_step_apart = (exponent - 3 + 23) << 23;
  const uint32_t steps = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(a_step_apart)) - a_step_apart;
  const uint32_t code = (exponent - (127 - 6)) * 8 + steps;
  return (exponent > 127 + 8 || code > 0x7F ? 0x7F : code) | (word >> 24 & 0x80);
}

// Where the parts of a row of `mla_compile.fp8.RowLayout` begin, in bytes.
struct RowLayout {
  int64_t groups, scales, rope, bytes;

  RowLayout(int64_t rank, int64_t rope_width, int64_t itemsize) {
    groups = rank % 128 == 0 ? rank / 128 : 1;
    scales = up(rank, 4);
    rope = up(scales + 4 * groups, itemsize);
    bytes = up(rope + rope_width * itemsize, 16);
  }

 private:
  static int64_t up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }
};

// The greatest magnitude; NaN if any number is.
inline float greatest(const float* numbers, int64_t count) {
  uint32_t most = 0;  // the bits of magnitudes are ordered like the numbers, and NaN comes last
  for (int64_t i = 0; i < count; ++i) most = std::max(most, bits_as<uint32_t>(numbers[i]) & 0x7FFFFFFF);
  return bits_as<float>(most);
}

// Quantises the groups of a token, each by its own scale.
void put_groups(const float* latent, int64_t rank, int64_t groups, uint8_t* numbers, uint8_t* scales) {
  const int64_t width = rank / groups;
  for (int64_t g = 0; g < groups; ++g) {
    const float* group = latent + g * width;
    const float most = greatest(group, width);
    const float scale = (most < LEAST_OF_A_GROUP ? LEAST_OF_A_GROUP : most) / MOST_OF_E4M3;
    std::memcpy(scales + 4 * g, &scale, sizeof(scale));
    for (int64_t i = 0; i < width; ++i) numbers[g * width + i] = to_e4m3(group[i] / scale);
  }
}

void put_by(float scale, const float* numbers, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = numbers[i] / scale;
    to[i] = to_e4m3(number > MOST_OF_E4M3 ? MOST_OF_E4M3 : number < -MOST_OF_E4M3 ? -MOST_OF_E4M3 : number);
  }
}

void append_latents(const Tensor& latent, const Tensor& k_rope, const Tensor& slots, const Tensor& rows,
                    const std::optional<Tensor>& scale) {
  const bool one_scale = is_given(scale);
  const bool ranks = latent.dim() == 2 && k_rope.dim() == 2 && slots.dim() == 1 && rows.dim() == 3;
  const int64_t tokens = ranks ? latent.size(0) : 0, rank = ranks ? latent.size(1) : 0;
  const int64_t rope = ranks ? k_rope.size(1) : 0, itemsize = k_rope.element_size();
  const RowLayout layout(rank, rope, itemsize);
  const auto in_fours = [](int64_t number) { return number % 4 == 0; };
  const bool placed = ranks && rows.device().is_cpu() && rows.size(2) == (one_scale ? rank + rope : layout.bytes) &&
                      rows.scalar_type() == (one_scale ? at::kFloat8_e4m3fn : at::kByte) && rows.stride(2) == 1 &&
                      (one_scale || (in_fours(rows.stride(0)) && in_fours(rows.stride(1)) &&
                                     in_fours(rows.storage_offset())));
  const bool scaled =
      !one_scale || (scale->scalar_type() == at::kFloat && scale->device().is_cpu() && scale->numel() == 1);
  bool fits = placed && scaled && latent.is_floating_point() && alike(latent, {k_rope}) && k_rope.size(0) == tokens &&
              slots.size(0) == tokens && Integers::fit(slots) && rank > 0;
  const int64_t page_size = ranks ? rows.size(1) : 0, places = ranks ? rows.size(0) * page_size : 0;
  std::vector<int64_t> where;
  for (int64_t t = 0; fits && t < tokens; ++t) {
    where.push_back(Integers(slots)[t * slots.stride(0)]);
    fits = where.back() < places;
  }
  if (!fits) {
    static const auto op = general<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                        const std::optional<Tensor>&)>("mla::append_latents_general");
    return op.call(latent, k_rope, slots, rows, scale);
  }
  const Tensor numbers = latent.to(at::kFloat).contiguous();
  const Tensor rope_key = (one_scale ? k_rope.to(at::kFloat) : k_rope).contiguous();
  const float* from = numbers.const_data_ptr<float>();
  const auto* rope_from = static_cast<const char*>(rope_key.const_data_ptr());
  const float by = one_scale ? *scale->const_data_ptr<float>() : 0.0f;
  auto* cache = static_cast<uint8_t*>(rows.data_ptr());
  at::parallel_for(0, tokens, NUMBERS_OF_A_TASK / (rank + rope) + 1, [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      if (where[t] < 0) continue;
      uint8_t* row = cache + where[t] / page_size * rows.stride(0) + where[t] % page_size * rows.stride(1);
      if (one_scale) {
        put_by(by, from + t * rank, rank, row);
        put_by(by, reinterpret_cast<const float*>(rope_from) + t * rope, rope, row + rank);
        continue;
      }
      put_groups(from + t * rank, rank, layout.groups, row, row + layout.scales);
      std::memcpy(row + layout.rope, rope_from + t * rope * itemsize, rope * itemsize);
    }
  });
}

}  // namespace
