// Which keys a mask lets the queries of each sequence see, like `visibility.py`.

namespace {

// How many keys a sequence has, and the causal limit: query i sees the keys before `stop(i)`.
struct Limit {
  std::optional<int64_t> offset;
  int64_t tokens;

  int64_t stop(int64_t query) const {
    return offset ? std::min(std::max(query + *offset + 1, int64_t{0}), tokens) : tokens;
  }
};

// One limit for each sequence, or one for all.
typedef std::vector<Limit> Limits;

// The keys of each sequence that at least one of its queries sees, and what is added to their scores.
struct Visible {
  int64_t first_key = 0, keys = 0;    // consecutive keys, for all sequences from the same one on,
  std::vector<int64_t> named = {};    // unless they are named: `[B or 1, keys]`
  std::vector<int64_t> counts = {};   // how many each sequence has; empty for `keys`, the same for all
  std::vector<int64_t> offsets = {};  // query i sees keys up to i + offset of these; empty for no limit
  Tensor bias = {};                   // float32 `[B or 1, N or 1, Sq or 1, keys]`, undefined for nothing
};

// Calls `row(head, query, values, step)` for rows of a bool mask `[N or 1, rows or 1, T]`.
template <typename Row>
void for_each_row(const Tensor& mask, int64_t rows, const Row& row) {
  for (int64_t h = 0; h < mask.size(0); ++h)
    for (int64_t i = 0; i < rows; ++i)
      row(h, i, mask.const_data_ptr<bool>() + h * mask.stride(0) + (mask.size(1) == 1 ? 0 : i) * mask.stride(1),
          mask.stride(2));
}

// The keys that a mask `[N or 1, Sq or 1, T]` and the limit leave to at least one query.
std::vector<int64_t> keys_of(const Tensor& mask, const Limit& limit, int64_t queries) {
  // A row for all queries hides the same from each of them, and the last sees most keys.
  const int64_t rows = mask.size(1), skipped = queries - rows;
  std::vector<uint8_t> seen(limit.stop(queries - 1), 0);
  for_each_row(mask, rows, [&](int64_t, int64_t i, const bool* values, int64_t step) {
    const int64_t stop = limit.stop(i + skipped);
    if (step == 1)
      for (int64_t j = 0; j < stop; ++j) seen[j] |= values[j];
    else
      for (int64_t j = 0; j < stop; ++j) seen[j] |= values[j * step];
  });
  std::vector<int64_t> keys;
  keys.reserve(seen.size());
  for (size_t j = 0; j < seen.size(); ++j)
    if (seen[j]) keys.push_back(j);
  return keys;
}

// Whether a mask hides one of these keys from a query that is late enough to see it.
bool hides_one(const Tensor& mask, const std::vector<int64_t>& keys, const Limit& limit, int64_t queries) {
  const int64_t rows = mask.size(1), skipped = queries - rows;
  bool hidden = false;
  if (rows * mask.size(0) > 1)
    for_each_row(mask, rows, [&](int64_t, int64_t i, const bool* values, int64_t step) {
      const int64_t stop = limit.stop(i + skipped);
      for (size_t k = 0; k < keys.size() && keys[k] < stop && !hidden; ++k) hidden = !values[keys[k] * step];
    });
  return hidden;
}

// What a bool mask `[B or 1, N or 1, Sq or 1, T]` leaves: `[B, ...]` if there is a limit for each sequence.
Visible through(const Tensor& mask, const Limits& limits, int64_t batch, int64_t queries) {
  const int64_t masks = mask.size(0), heads = mask.size(1);
  const auto limit = [&](int64_t b) -> const Limit& { return limits[limits.size() == 1 ? 0 : b]; };
  std::vector<std::vector<int64_t>> keys;
  std::optional<int64_t> start;
  bool alike = true, ranges = true, cut = false, differ = false;
  size_t most = 0;
  for (int64_t b = 0; b < masks; ++b) {
    const std::vector<int64_t>& own = keys.emplace_back(keys_of(mask.select(0, b), limit(b), queries));
    most = std::max(most, own.size());
    differ = differ || hides_one(mask.select(0, b), own, limit(b), queries);
    if (own.empty()) continue;
    if (!start) start = own[0];
    alike = alike && own[0] == *start;
    ranges = ranges && own.back() - own[0] == static_cast<int64_t>(own.size()) - 1;
    cut = cut || own.back() >= limit(b).stop(0);
  }
  Visible visible{alike && ranges ? start.value_or(0) : 0, static_cast<int64_t>(most)};
  for (const std::vector<int64_t>& own : keys) {
    if (masks > 1) visible.counts.push_back(own.size());
    if (alike && ranges) continue;
    visible.named.insert(visible.named.end(), own.begin(), own.end());
    visible.named.resize(visible.named.size() + most - own.size());
  }
  // The kernel's own limit counts keys as if they were consecutive.
  if (cut && !differ && ranges)
    for (int64_t b = 0; b < batch; ++b) {
      const std::vector<int64_t>& own = keys[masks == 1 ? 0 : b];
      visible.offsets.push_back(*limit(b).offset - (own.empty() ? 0 : own[0]));
    }
  if (!differ && (!cut || ranges)) return visible;

  const int64_t rows = cut ? queries : mask.size(2);
  visible.bias = at::empty({masks, heads, rows, visible.keys}, mask.options().dtype(at::kFloat));
  float* bias = visible.bias.mutable_data_ptr<float>();
  for (int64_t b = 0; b < masks; ++b)
    for_each_row(mask.select(0, b), rows, [&](int64_t, int64_t i, const bool* values, int64_t step) {
      const int64_t stop = limit(b).stop(cut ? i : queries - 1);
      for (size_t k = 0; k < keys[b].size(); ++k)
        bias[k] = keys[b][k] < stop && values[keys[b][k] * step] ? 0.0f : -INFINITY;
      bias += visible.keys;
    });
  return visible;
}

// What a mask `[B or 1, N or 1, Sq or 1, T or 1]`, if given, and the limits let the queries see.
Visible visible_to(const std::optional<Tensor>& mask, const Limits& limits, int64_t batch, int64_t queries) {
  if (batch == 0) return {};
  int64_t tokens = 0;
  for (const Limit& limit : limits) tokens = std::max(tokens, limit.tokens);
  const auto over_keys = [&](int64_t sequences) {
    return mask->expand({sequences, -1, -1, mask->size(3) == 1 ? tokens : -1});
  };
  if (is_given(mask) && mask->scalar_type() == at::kBool)
    return through(over_keys(limits.size() == 1 ? -1 : batch), limits, batch, queries);
  Visible visible;
  bool cut = false;
  for (const Limit& limit : limits) {
    const int64_t stop = limit.stop(queries - 1);
    visible.keys = std::max(visible.keys, stop);
    cut = cut || stop > limit.stop(0);
    if (limits.size() > 1) visible.counts.push_back(stop);
  }
  for (int64_t b = 0; cut && b < batch; ++b) visible.offsets.push_back(*limits[limits.size() == 1 ? 0 : b].offset);
  if (is_given(mask)) visible.bias = over_keys(-1).slice(3, 0, visible.keys).to(at::kFloat);
  return visible;
}

// Whether this is a mask `[B or 1, N or 1, Sq or 1, T or 1]`, bool or floating, on CPU.
bool mask_fits(const Tensor& mask, int64_t batch, int64_t heads, int64_t queries, int64_t tokens) {
  return mask.dim() == 4 && mask.device().is_cpu() && (mask.scalar_type() == at::kBool || mask.is_floating_point()) &&
         broadcasts(mask, {batch, heads, queries, tokens});
}

}  // namespace
