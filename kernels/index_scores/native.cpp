// An indexer's scores: out[b, s, t] = sum_h weights[b, s, h] relu(q[b, s, h] . k[b, t]), summed in float32. Products are
// those of decode attention (`Floats`, `Dots` or `Tiles`), for which a row is a head of a query.
//
//     q        [sequences, queries, heads, width]   contiguous
//     k        [sequences, keys, width]             a last stride of 1
//     weights  [sequences, queries, heads]          contiguous
//     out      [sequences, queries, keys]           contiguous
//
// NUMBER is the type of q and k. Queries are taken in groups of about MOST_ROWS rows, which meet one block of keys after
// the other: the products of a block with a group are all that exists of those of single heads. Blocks of all groups,
// in order, are cut into one contiguous piece per thread.

#include <optional>

namespace {

typedef NUMBER Number;

constexpr int64_t MOST_ROWS = 256;  // 128 keys times as many floats are 128 KiB

struct Problem {
  const Number *q, *k;
  const float* weights;
  float* out;
  int64_t sequences, queries, heads, keys, width, k_sequence, k_key;

  int64_t group() const { return std::min(std::max(MOST_ROWS / heads, int64_t{1}), queries); }
  int64_t groups() const { return (queries + group() - 1) / group(); }
};

// Some queries of a sequence, and what a thread needs to multiply with them.
template <typename Products>
class Group {
  typedef typename Products::Key Key;
  static constexpr int64_t BLOCK = Products::BLOCK;
  static constexpr bool CONVERTS = !std::is_same_v<Number, Key>;

 public:
  Group(const Problem& p, int64_t index)
      : p(p),
        sequence(index / p.groups()),
        first(index % p.groups() * p.group()),
        queries(std::min(p.group(), p.queries - first)),
        rows(round_up(queries * p.heads, Products::PANEL)),
        products({queries * p.heads, p.width, 0, 1.0f}),
        scores(BLOCK * rows),
        converted(CONVERTS ? BLOCK * p.width : 0) {
    const Number* q = p.q + at(0) * p.heads * p.width;
    products.begin(q, q);
  }

  void score(int64_t block) {
    const int64_t key = block * BLOCK, count = std::min(BLOCK, p.keys - key);
    locate(p.k + sequence * p.k_sequence + key * p.k_key, count);
    products.score(keys, static_cast<const Block<Key>*>(nullptr), scores.data());
    for (int64_t query = 0; query < queries; ++query)
      for (int64_t k = 0; k < count; k += WIDTH) {
        vec sums[WIDTH], total = {};
        load_columns(std::min(count - k, WIDTH), sums, [&](int64_t i) { return sum_of_heads(query, k + i); });
        for (const vec& lane : sums) total += lane;
        std::memcpy(p.out + at(query) * p.keys + key + k, &total, std::min(count - k, WIDTH) * sizeof(float));
      }
  }

 private:
  // The place of a query among those of all sequences.
  int64_t at(int64_t query) const { return sequence * p.queries + first + query; }

  void locate(const Number* from, int64_t count) {
    keys.count = count;
    keys.latent_stride = CONVERTS ? p.width : p.k_key;
    for (int64_t k = 0; k < BLOCK; ++k) {
      const Number* key = from + std::min(k, count - 1) * p.k_key;
      if constexpr (CONVERTS) {
        Key* to = converted.data() + k * p.width;
        if (k < count) convert(key, p.width, 1.0f, to);
        keys.latent[k] = converted.data() + std::min(k, count - 1) * p.width;
      } else {
        keys.latent[k] = key;
      }
      keys.rope[k] = keys.latent[k];
    }
  }

  // The weighted products of a query's heads with a key, added up in lanes.
  vec sum_of_heads(int64_t query, int64_t key) const {
    const float *from = scores.data() + key * rows + query * p.heads, *weight = p.weights + at(query) * p.heads;
    vec sum = {};
    int64_t head = 0;
    for (; head + WIDTH <= p.heads; head += WIDTH) sum += positive(load(from + head)) * load(weight + head);
    for (; head < p.heads; ++head) sum[0] += (from[head] < 0.0f ? 0.0f : from[head]) * weight[head];
    return sum;
  }

  // NaN stays NaN.
  static vec positive(vec x) { return x < 0.0f ? vec{} : x; }

  const Problem& p;
  int64_t sequence, first, queries, rows;
  Products products;
  Block<Key> keys;
  Buffer scores, converted;
};

// The least number of products per thread, about 10 us.
constexpr int64_t PRODUCTS_OF_A_THREAD = 1 << 20;

template <typename Products>
void run(const Problem& p, int64_t most_threads) {
  const int64_t blocks = (p.keys + Products::BLOCK - 1) / Products::BLOCK, all = p.sequences * p.groups() * blocks;
  const int64_t products = p.sequences * p.queries * p.heads * p.keys * p.width;
  const int64_t threads = std::min({most_threads, products / PRODUCTS_OF_A_THREAD + 1, all});
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread) {
    std::optional<Group<Products>> group;
    int64_t last = -1;
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      if (i / blocks != last) group.emplace(p, last = i / blocks);
      group->score(i % blocks);
    }
  }
}

}  // namespace

extern "C" void kernel(const void* q, const void* k, const void* weights, void* out, int64_t sequences, int64_t queries,
                       int64_t heads, int64_t keys, int64_t width, int64_t k_sequence, int64_t k_key, int64_t threads) {
  const Problem p{static_cast<const Number*>(q), static_cast<const Number*>(k), static_cast<const float*>(weights),
                  static_cast<float*>(out), sequences, queries, heads, keys, width, k_sequence, k_key};
  with_best_products<Number>([&](auto* best) { run<std::remove_pointer_t<decltype(best)>>(p, threads); });
}
