// Locates the keys of a sequence, a block at a time, wherever they are stored.

namespace {

// The sizes that every kind of product needs: `rows` is queries times heads, each of `rank` and `rope` numbers.
struct Sizes {
  int64_t rows, rank, rope;
  float scale;

  int64_t width() const { return rank + rope; }
};

// Scales, `[groups]` of each key, that a block's latents, and its rope keys if `rope`, have yet to be multiplied with.
// Null if there are none.
struct Scales {
  const float* const* of_keys = nullptr;
  int64_t groups = 1, group = 0;  // the number of groups, and their stride
  bool rope = false;

  float at(int64_t key, int64_t g) const { return of_keys[key][g * group]; }
};

// Up to MOST keys in two parts. The last key is repeated in place of missing ones.
template <typename Latent, typename Rope = Latent>
struct Block {
  static constexpr int64_t MOST = 128;
  const Latent* latent[MOST];
  const Rope* rope[MOST];
  int64_t count;
  Scales scales;
};

// Prefetches the next block into the second-level cache, one key at a time.
template <int64_t MOST>
class Ahead {
 public:
  template <typename Latent, typename Rope>
  void set(const Block<Latent, Rope>* keys, const Sizes& s) {
    count = keys ? keys->count : 0;
    for (int64_t k = 0; k < count; ++k) {
      parts[k][0] = {reinterpret_cast<const char*>(keys->latent[k]), s.rank * int64_t{sizeof(Latent)} / IN_ONE<Latent>};
      parts[k][1] = {reinterpret_cast<const char*>(keys->rope[k]), s.rope * int64_t{sizeof(Rope)}};
    }
  }

  // Must be inlined: GCC sees no effect in a call of a function that only prefetches, and removes it.
  __attribute__((always_inline)) void send_for(int64_t key) const {
    if (key < count)
      for (const Part& part : parts[key])
        for (int64_t byte = 0; byte < part.size; byte += 64) __builtin_prefetch(part.at + byte, 0, 2);
  }

 private:
  struct Part {
    const char* at;
    int64_t size;
  };
  int64_t count = 0;
  Part parts[MOST][2];
};

// Key j of a sequence is in row j % page_size of page table[j / page_size], or of page 0 without a table. Each
// `queries` consecutive sequences share one step of the `batch` strides. Latents in FP8, INT8 or INT4 have a scale for
// each of `groups` groups of columns; so have rope keys in FP8 or INT8, with one group.
template <typename Latent, typename Rope>
struct Cache {
  const Latent* latent;
  const Rope* rope;
  const float* scales;
  const int64_t* table;
  int64_t queries, page_size, table_row, groups;
  int64_t latent_batch, latent_page, latent_key, rope_batch, rope_page, rope_key;
  int64_t scales_batch, scales_page, scales_key, scales_group;

  // Locates the `count` keys from `first` on, and their scales; entries up to `room` repeat the last key.
  void locate(int64_t sequence, int64_t first, int64_t count, int64_t room, Block<Latent, Rope>& block,
              const float** block_scales) const {
    const int64_t batch = sequence / queries;
    block.count = count;
    for (int64_t k = 0; k < room; ++k) {
      const int64_t j = first + std::min(k, count - 1), row = j % page_size;
      const int64_t page = table ? table[sequence * table_row + j / page_size] : 0;
      block.latent[k] = latent + batch * latent_batch + page * latent_page + row * latent_key;
      block.rope[k] = rope + batch * rope_batch + page * rope_page + row * rope_key;
      if (scales) block_scales[k] = scales + batch * scales_batch + page * scales_page + row * scales_key;
    }
  }
};

}  // namespace
