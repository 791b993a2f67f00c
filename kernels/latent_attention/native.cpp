// Absorbed MLA for a few rows over cached keys: flash-decoding (Dao et al., 2023) on CPU cores. Products are those of
// the template parameter `Products` (Floats, Dots, Tiles or ByteTiles); output and softmax are float32 until the end.
//
//     q_latent [sequences, rows, L], q_rope [sequences, rows, R]  contiguous; row = query * heads + head
//     latent, k_rope   keys that `Cache` locates, with a last stride of 1
//     lengths  [sequences] or null            number of keys of each sequence; null: `keys` for all
//     offsets  [sequences] or null            query i sees keys up to i + offset
//     bias     [sequences, queries, heads, keys] or null    any strides, -inf hides
//     o        [sequences, rows, L], lse [sequences, rows]        contiguous
//
// NUMBER is the type of queries and output, LATENT and ROPE are those of the keys.
//
// The blocks of keys of all sequences, in order, are cut into one contiguous piece per thread. For each sequence that
// it meets, a thread keeps an unnormalised output, the rows' maximum and the sum of their weights; the partial results
// of a sequence are merged at the end. A block is read from memory for its scores and is still in the core's cache for
// its values, so the latents are read from memory once. Keys of a type that the products do not take are first
// converted into a block of the thread's own.

#include <vector>

namespace {

typedef NUMBER Number;
typedef LATENT Latent;
typedef ROPE Rope;
typedef Block<Latent, Rope> Raw;

struct Problem {
  const Number *q_latent, *q_rope;
  Cache<Latent, Rope> cache;
  const int64_t *lengths, *offsets;
  const float* bias;
  Number* o;
  float* lse;
  int64_t sequences, heads, keys, bias_sequence, bias_query, bias_head, bias_key;
  Sizes sizes;

  int64_t rows() const { return sizes.rows; }
  int64_t padded_rows() const { return round_up(sizes.rows, 16); }
  int64_t length(int64_t sequence) const { return lengths ? lengths[sequence] : keys; }
};

// A thread's partial result for a sequence: unnormalised o, and m and total [padded rows]. There is room for whole
// vectors at the end of the last row.
template <typename Products>
struct Partial {
  float *o, *m, *total;

  static int64_t o_size(const Sizes& s) { return Products::o_rows(s) * Products::o_stride(s); }
  static int64_t size(const Problem& p) { return round_up(o_size(p.sizes) + 2 * p.padded_rows() + WIDTH, LINE); }
  Partial(const Problem& p, float* at) : o(at + 2 * p.padded_rows()), m(at), total(at + p.padded_rows()) {}
};

// Provides blocks of keys in the type that the products take: in place, or converted.
template <typename Products>
class Loader {
  typedef typename Products::Key Key;
  typedef typename Products::Keys Keys;

 public:
  static constexpr bool CONVERTS = !std::is_same_v<Raw, Keys>;

  Loader(const Sizes& sizes, int64_t block)
      : s(sizes), room(block), converted(CONVERTS ? block * sizes.width() * sizeof(Key) / sizeof(float) + 1 : 1) {}

  // The block to multiply with; `ahead` is set to the next block as it lies in memory, or null.
  const Keys& load(const Problem& p, int64_t sequence, int64_t first, bool has_next, const Raw** ahead) {
    if (!located) locate(p, sequence, first, current);
    const int found = current;
    located = has_next;
    current = 1 - current;
    if (has_next) locate(p, sequence, first + room, current);
    *ahead = has_next ? &raw[current] : nullptr;
    if constexpr (CONVERTS) {
      convert_all(p.cache, raw[found], scales[found]);
      return block;
    } else {
      if (p.cache.scales) raw[found].scales = {scales[found], p.cache.groups, p.cache.scales_group, SCALED_ROPE};
      return raw[found];
    }
  }

 private:
  static constexpr bool SCALED_ROPE = sizeof(Rope) == 1;

  void locate(const Problem& p, int64_t sequence, int64_t first, int which) {
    p.cache.locate(sequence, first, std::min(room, p.length(sequence) - first), room, raw[which], scales[which]);
  }

  void convert_all(const Cache<Latent, Rope>& cache, const Raw& keys, const float* const* of_keys) {
    const int64_t group = s.rank / cache.groups;
    constexpr bool IN_BYTES = sizeof(Latent) == 1 && IN_ONE<Latent> == 1;
    block.count = keys.count;
    block.latent_stride = block.rope_stride = s.width();
    const bool apart = IN_BYTES && cache.scales && Products::takes_scales(cache.groups, group);
    if (apart) block.scales = {of_keys, cache.groups, cache.scales_group, SCALED_ROPE};
    Key* to = reinterpret_cast<Key*>(converted.data());
    for (int64_t k = 0; k < room; ++k) {
      const int64_t from = std::min(k, block.count - 1);
      block.latent[k] = to + from * s.width();
      block.rope[k] = block.latent[k] + s.rank;
    }
    for (int64_t k = 0; k < block.count; ++k, to += s.width()) {
      const auto scale = [&](int64_t g) { return cache.scales ? of_keys[k][g * cache.scales_group] : 1.0f; };
      if constexpr (std::is_same_v<Rope, Key>) std::copy_n(keys.rope[k], s.rope, to + s.rank);
      if constexpr (std::is_same_v<Key, bf16> && IN_BYTES)
        if (apart) {
          convert(keys.latent[k], s.rank, to);
          if constexpr (SCALED_ROPE) convert(keys.rope[k], s.rope, to + s.rank);
          continue;
        }
      for (int64_t g = 0; g < cache.groups; ++g)
        convert(keys.latent[k] + g * group / IN_ONE<Latent>, group, scale(g), to + g * group);
      if constexpr (!std::is_same_v<Rope, Key>)
        convert(keys.rope[k], s.rope, SCALED_ROPE ? scale(0) : 1.0f, to + s.rank);
    }
  }

  Sizes s;
  int64_t room;
  Raw raw[2];
  const float* scales[2][Raw::MOST];
  bool located = false;
  int current = 0;
  Keys block;
  Buffer converted;
};

// Buffers of one thread: scores [BLOCK, padded rows].
template <typename Products>
struct Workspace {
  Products products;
  Loader<Products> loader;
  Buffer scores, decay;

  explicit Workspace(const Problem& p)
      : products(p.sizes), loader(p.sizes, Products::BLOCK), scores(Products::BLOCK * p.padded_rows()),
        decay(p.padded_rows()) {}
};

void add_bias(const Problem& p, int64_t sequence, int64_t first, int64_t count, float* scores) {
  const int64_t stride = p.padded_rows();
  const float* of_keys = p.bias + sequence * p.bias_sequence + first * p.bias_key;
  for (int64_t row = 0; row < p.rows(); ++row) {
    const float* bias = of_keys + row / p.heads * p.bias_query + row % p.heads * p.bias_head;
    for (int64_t k = 0; k < count; ++k) scores[k * stride + row] += bias[k * p.bias_key];
  }
}

void hide_later_keys(const Problem& p, int64_t offset, int64_t first, int64_t count, float* scores) {
  const int64_t stride = p.padded_rows();
  for (int64_t k = std::max(offset + 1 - first, int64_t{0}); k < count; ++k) {
    const int64_t hidden = (first + k - offset) * p.heads;  // rows of the queries before the one at this key
    std::fill_n(scores + k * stride, std::min(hidden, p.rows()), -INFINITY);
  }
}

// Attention to the blocks [begin, end) of one sequence.
template <typename Products>
void attend(const Problem& p, int64_t sequence, int64_t begin, int64_t end, const Partial<Products>& partial,
            Workspace<Products>& w) {
  // The lowest finite number, not -inf: a row whose scores are all -inf then gets exp(-inf), not NaN.
  std::fill_n(partial.m, p.padded_rows(), -FLT_MAX);
  std::fill_n(partial.total, p.padded_rows(), 0.0f);
  std::fill_n(partial.o, Partial<Products>::o_size(p.sizes), 0.0f);
  w.products.begin(p.q_latent + sequence * p.rows() * p.sizes.rank, p.q_rope + sequence * p.rows() * p.sizes.rope);
  const int64_t stride = p.padded_rows();
  float* scores = w.scores.data();
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * Products::BLOCK;
    const Raw* ahead;
    const auto& keys = w.loader.load(p, sequence, first, block + 1 < end, &ahead);
    w.products.score(keys, ahead, scores);
    if (p.bias) add_bias(p, sequence, first, keys.count, scores);
    if (p.offsets && first + keys.count - 1 > p.offsets[sequence])
      hide_later_keys(p, p.offsets[sequence], first, keys.count, scores);
    soften(scores, stride, stride, keys.count, partial.m, partial.total, w.decay.data());
    w.products.add(keys, scores, w.decay.data(), partial.o);
  }
  w.products.end(partial.o);
}

// Cuts the blocks of all sequences into one piece per thread.
struct Pieces {
  std::vector<int64_t> starts;  // of each sequence, among the blocks of all
  int64_t threads = 1;

  Pieces(const Problem& p, int64_t block) : starts(1) {
    for (int64_t sequence = 0; sequence < p.sequences; ++sequence)
      starts.push_back(starts.back() + (p.length(sequence) + block - 1) / block);
  }

  int64_t begin(int64_t thread, int64_t sequence) const { return clamp(starts.back() * thread / threads, sequence); }
  int64_t end(int64_t thread, int64_t sequence) const { return begin(thread + 1, sequence); }

 private:
  int64_t clamp(int64_t block, int64_t sequence) const {
    return std::min(std::max(block, starts[sequence]), starts[sequence + 1]) - starts[sequence];
  }
};

// Merges the partial results of one row, from the threads that met its sequence; `o` has room for the vectors of a row.
template <typename Products>
void merge_row(const Problem& p, const Pieces& pieces, float* partials, int64_t sequence, int64_t row, float* o) {
  const int64_t rank = p.sizes.rank;
  std::fill_n(o, round_up(rank, WIDTH), 0.0f);
  float m = -FLT_MAX, total = 0.0f;
  for (int64_t thread = 0; thread < pieces.threads; ++thread) {
    if (pieces.begin(thread, sequence) == pieces.end(thread, sequence)) continue;
    const Partial<Products> partial(p, partials + (thread + sequence) * Partial<Products>::size(p));
    const float m_new = std::max(partial.m[row], m);
    const float decay = std::exp(m - m_new), weight = std::exp(partial.m[row] - m_new);
    m = m_new;
    total = total * decay + partial.total[row] * weight;
    const float* from = partial.o + row * Products::o_stride(p.sizes);
    for (int64_t c = 0; c < rank; c += WIDTH) store(o + c, load(o + c) * decay + load(from + c) * weight);
  }
  // A row's greatest score adds exp(0) = 1 to its total, so only a row that saw no key is below 1.
  const vec divisor = broadcast(total < 1.0f ? 1.0f : total);
  for (int64_t c = 0; c < rank; c += WIDTH) store(o + c, load(o + c) / divisor);
  convert(o, rank, 1.0f, p.o + (sequence * p.rows() + row) * rank);
  p.lse[sequence * p.rows() + row] = m + std::log(total);
}

// The least number of products per thread, about 10 us: waking a thread takes as long.
constexpr int64_t PRODUCTS_OF_A_THREAD = 1 << 20;

template <typename Products>
void run(const Problem& p, int64_t most_threads) {
  Pieces pieces(p, Products::BLOCK);
  const int64_t products = pieces.starts.back() * Products::BLOCK * p.rows() * (p.sizes.rank + p.sizes.width());
  const int64_t threads = pieces.threads = std::min(most_threads, products / PRODUCTS_OF_A_THREAD + 1);
  // Partial results are numbered thread + sequence: each next one belongs to the next thread or the next sequence.
  const Buffer partials((threads + p.sequences) * Partial<Products>::size(p));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread) {
    Workspace<Products> workspace(p);
    for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
      const int64_t begin = pieces.begin(thread, sequence), end = pieces.end(thread, sequence);
      if (begin == end) continue;
      float* at = partials.data() + (thread + sequence) * Partial<Products>::size(p);
      attend<Products>(p, sequence, begin, end, Partial<Products>(p, at), workspace);
    }
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Buffer o(round_up(p.sizes.rank, WIDTH));
#pragma omp for
    for (int64_t row = 0; row < p.sequences * p.rows(); ++row)
      merge_row<Products>(p, pieces, partials.data(), row / p.rows(), row % p.rows(), o.data());
  }
}

void run_best(const Problem& p, int64_t threads) {
#if defined(AMX)
  if constexpr (std::is_same_v<Number, bf16> && std::is_same_v<Latent, i8>)
    if (amx::allowed() && p.sizes.rows <= ByteTiles<Rope>::MOST_ROWS && p.cache.scales && p.cache.groups == 1)
      return run<ByteTiles<Rope>>(p, threads);
#endif
  with_best_products<Number>([&](auto* best) { run<std::remove_pointer_t<decltype(best)>>(p, threads); });
}

}  // namespace

extern "C" void kernel(const void* q_latent, const void* q_rope, const void* latent, const void* k_rope, void* o,
                       void* lse, uintptr_t scales, uintptr_t table, uintptr_t lengths, uintptr_t offsets,
                       uintptr_t bias, int64_t sequences, int64_t heads, int64_t rows, int64_t keys, int64_t rank,
                       int64_t rope, int64_t queries, int64_t page_size, int64_t table_row, int64_t groups,
                       int64_t latent_batch, int64_t latent_page, int64_t latent_key, int64_t rope_batch,
                       int64_t rope_page, int64_t rope_key, int64_t scales_batch, int64_t scales_page,
                       int64_t scales_key, int64_t scales_group, int64_t bias_sequence, int64_t bias_query,
                       int64_t bias_head, int64_t bias_key, float scale, int64_t threads) {
  const Cache<Latent, Rope> cache{static_cast<const Latent*>(latent), static_cast<const Rope*>(k_rope),
                                  reinterpret_cast<const float*>(scales), reinterpret_cast<const int64_t*>(table),
                                  queries, page_size, table_row, groups,
                                  latent_batch, latent_page, latent_key, rope_batch, rope_page, rope_key,
                                  scales_batch, scales_page, scales_key, scales_group};
  run_best({static_cast<const Number*>(q_latent), static_cast<const Number*>(q_rope), cache,
            reinterpret_cast<const int64_t*>(lengths), reinterpret_cast<const int64_t*>(offsets),
            reinterpret_cast<const float*>(bias), static_cast<Number*>(o), static_cast<float*>(lse), sequences, heads,
            keys, bias_sequence, bias_query, bias_head, bias_key, {rows, rank, rope, scale}},
           threads);
}

static_assert(std::is_same_v<decltype(kernel), LatentAttentionKernel>);
