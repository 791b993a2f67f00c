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

// Up to MOST keys in two parts. The last key is repeated in place of missing ones. Where strides are given, each run of
// RUN keys is evenly spaced by them.
template <typename Latent, typename Rope = Latent>
struct Block {
  static constexpr int64_t MOST = 128, RUN = 16;
  const Latent* latent[MOST];
  const Rope* rope[MOST];
  int64_t count, latent_stride = 0, rope_stride = 0;
  Scales scales;
};

// Prefetches the next block into the second-level cache, some keys at a time.
template <int64_t MOST>
class Ahead {
 public:
  template <typename Latent, typename Rope>
  void set(const Block<Latent, Rope>* keys, const Sizes& s) {
    count = keys ? keys->count : 0, sent = 0;
    sizes[0] = s.rank * int64_t{sizeof(Latent)} / IN_ONE<Latent>;
    sizes[1] = s.rope * int64_t{sizeof(Rope)};
    for (int64_t k = 0; k < count; ++k) {
      parts[0][k] = reinterpret_cast<const char*>(keys->latent[k]);
      parts[1][k] = reinterpret_cast<const char*>(keys->rope[k]);
    }
  }

  // Those of the next `keys` keys, if there are any left. Must be inlined: GCC sees no effect in a call of a function that
  // only prefetches, and removes it.
  __attribute__((always_inline)) void send(int64_t keys) {
    for (const int64_t end = std::min(sent + keys, count); sent < end; ++sent)
      for (int64_t part = 0; part < 2; ++part)
        for (int64_t byte = 0; byte < sizes[part]; byte += 64) __builtin_prefetch(parts[part][sent] + byte, 0, 2);
  }

 private:
  int64_t count = 0, sent = 0, sizes[2] = {};  // in bytes
  const char* parts[2][MOST];
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
    const bool even = !table || (page_size % block.RUN == 0 && first % block.RUN == 0);
    block.latent_stride = even ? latent_key : 0, block.rope_stride = even ? rope_key : 0;
    int64_t row = first % page_size, page = first / page_size;
    for (int64_t k = 0; k < room; ++k) {
      const int64_t at = table ? table[sequence * table_row + page] : 0;
      block.latent[k] = latent + batch * latent_batch + at * latent_page + row * latent_key;
      block.rope[k] = rope + batch * rope_batch + at * rope_page + row * rope_key;
      if (scales) block_scales[k] = scales + batch * scales_batch + at * scales_page + row * scales_key;
      if (k + 1 >= count) continue;
      if (++row == page_size) row = 0, ++page;
    }
  }
};

}  // namespace
