// Absorbed MLA for a few rows over a range of cached keys, float32: flash-decoding (Dao et al., 2023) on CPU cores.
//
//     q_latent [batch, rows, L], q_rope [batch, rows, R]      contiguous; row = query * heads + head
//     latent   [batch, keys, L], k_rope [batch, keys, R]      any strides of batch and keys, 1 of the last dim
//     bias     [queries, heads, keys] or null                 any strides, shared by the batch, -inf hides
//     o        [batch, rows, L], lse [batch, rows]            contiguous
//
// The blocks of BLOCK keys of all sequences, in order, are cut into one contiguous piece a thread. A thread keeps, for
// each sequence it meets, an unnormalised output, the rows' maximum and the sum of their weights; the pieces of a
// sequence are merged by their log-sum-exp at the end. A block is read from memory for its scores and is still in the
// core's cache for its values, so the cache of latents is read once.

namespace {

#if defined(__AVX512F__)
constexpr int64_t KEYS = 16;  // of a tile of scores: 16 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int64_t KEYS = 6;   // 12 of 16
#else
constexpr int64_t KEYS = 4;   // 16 of 32
#endif
constexpr int64_t PANEL = 16;         // rows of a panel of the packed query
constexpr int64_t TERMS = 16;         // of a score in one sum: errors grow with sqrt(TERMS + L / TERMS), not sqrt(L)
constexpr int64_t BLOCK = 64 / KEYS * KEYS;  // 64 keys of 576 numbers are 144 KiB: within a second-level cache

struct Problem {
  const float *q_latent, *q_rope, *latent, *k_rope, *bias;
  float *o, *lse;
  int64_t batch, heads, rows, keys, rank, rope;
  int64_t latent_batch, latent_key, rope_batch, rope_key, bias_query, bias_head, bias_key;
  float scale;

  int64_t width() const { return rank + rope; }
  int64_t padded_rows() const { return round_up(rows, PANEL); }
  int64_t blocks() const { return (keys + BLOCK - 1) / BLOCK; }
};

// What a thread has of a sequence: o [rows, rank] unnormalised, m and total [padded rows].
struct Partial {
  float *o, *m, *total;

  static int64_t size(const Problem& p) { return round_up(p.rows * p.rank + 2 * p.padded_rows(), PANEL); }
  Partial(const Problem& p, float* at) : o(at + 2 * p.padded_rows()), m(at), total(at + p.padded_rows()) {}
};

// Buffers of one thread: the packed query of a sequence [panel, L + R, PANEL], scores [BLOCK, padded rows].
struct Workspace {
  Buffer query, scores, decay;

  explicit Workspace(const Problem& p)
      : query(p.padded_rows() * p.width()), scores(BLOCK * p.padded_rows()), decay(p.padded_rows()) {}
};

void pack_query(const Problem& p, int64_t sequence, float* packed) {
  for (int64_t row = 0; row < p.padded_rows(); ++row) {
    float* to = packed + row / PANEL * PANEL * p.width() + row % PANEL;
    const bool real = row < p.rows;
    const float* q_latent = p.q_latent + (sequence * p.rows + row) * p.rank;
    const float* q_rope = p.q_rope + (sequence * p.rows + row) * p.rope;
    for (int64_t i = 0; i < p.rank; ++i) to[i * PANEL] = real ? q_latent[i] * p.scale : 0.0f;
    for (int64_t i = 0; i < p.rope; ++i) to[(p.rank + i) * PANEL] = real ? q_rope[i] * p.scale : 0.0f;
  }
}

void add_bias(const Problem& p, int64_t first, int64_t count, float* scores) {
  const int64_t stride = p.padded_rows();
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* bias = p.bias + row / p.heads * p.bias_query + row % p.heads * p.bias_head + first * p.bias_key;
    for (int64_t k = 0; k < count; ++k) scores[k * stride + row] += bias[k * p.bias_key];
  }
}

// Blocks [begin, end) of one sequence.
void attend(const Problem& p, int64_t sequence, int64_t begin, int64_t end, const Partial& partial,
            const Workspace& w) {
  // The lowest finite number and not -inf: a row whose scores are all -inf then gets exp(-inf) and not a NaN.
  std::fill_n(partial.m, p.padded_rows(), -FLT_MAX);
  std::fill_n(partial.total, p.padded_rows(), 0.0f);
  std::fill_n(partial.o, p.rows * p.rank, 0.0f);
  pack_query(p, sequence, w.query.data());
  const int64_t stride = p.padded_rows();
  const Values values{partial.o, p.rank, p.rows, p.rank, w.decay.data(), w.scores.data(), stride};
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * BLOCK, count = std::min(BLOCK, p.keys - first);
    const Lines latents{p.latent + sequence * p.latent_batch + first * p.latent_key, p.latent_key};
    const Lines ropes{p.k_rope + sequence * p.rope_batch + first * p.rope_key, p.rope_key};
    for (int64_t row = 0; row < stride; row += PANEL)
      score_panel<KEYS, PANEL / WIDTH, TERMS>(latents, p.rank, ropes, p.rope, count, w.query.data() + row * p.width(),
                                              w.scores.data() + row, stride, row == 0 && block + 1 < end ? BLOCK : 0);
    if (p.bias) add_bias(p, first, count, w.scores.data());
    soften(w.scores.data(), stride, stride, count, partial.m, partial.total, w.decay.data());
    values.add(latents, count);
  }
}

// How the blocks of all sequences are cut into one piece a thread.
struct Pieces {
  int64_t blocks, total, threads;  // blocks of a sequence, of all sequences

  int64_t begin(int64_t thread, int64_t sequence) const { return clamp(total * thread / threads, sequence); }
  int64_t end(int64_t thread, int64_t sequence) const { return clamp(total * (thread + 1) / threads, sequence); }

 private:
  int64_t clamp(int64_t block, int64_t sequence) const {
    return std::min(std::max(block - sequence * blocks, int64_t{0}), blocks);
  }
};

// One row from the partial results of the threads that met its sequence.
void merge_row(const Problem& p, const Pieces& pieces, float* partials, int64_t sequence, int64_t row) {
  float* o = p.o + (sequence * p.rows + row) * p.rank;
  std::fill_n(o, p.rank, 0.0f);
  float m = -FLT_MAX, total = 0.0f;
  for (int64_t thread = 0; thread < pieces.threads; ++thread) {
    if (pieces.begin(thread, sequence) == pieces.end(thread, sequence)) continue;
    const Partial partial(p, partials + (thread + sequence) * Partial::size(p));
    const float m_new = std::max(partial.m[row], m);
    const float decay = std::exp(m - m_new), weight = std::exp(partial.m[row] - m_new);
    m = m_new;
    total = total * decay + partial.total[row] * weight;
    for (int64_t c = 0; c < p.rank; ++c) o[c] = o[c] * decay + partial.o[row * p.rank + c] * weight;
  }
  // The greatest score adds exp(0) = 1 to total, so only a row that saw no key is below 1.
  const float divisor = total < 1.0f ? 1.0f : total;
  for (int64_t c = 0; c < p.rank; ++c) o[c] /= divisor;
  p.lse[sequence * p.rows + row] = m + std::log(total);
}

// Threads that have at least this many products each, about 10 us: waking one takes as long.
constexpr int64_t PRODUCTS_OF_A_THREAD = 1 << 20;

void run(const Problem& p, int64_t most_threads) {
  const int64_t products = p.batch * p.rows * p.keys * (p.rank + p.width());
  const int64_t threads = std::min(most_threads, products / PRODUCTS_OF_A_THREAD + 1);
  const Pieces pieces{p.blocks(), p.blocks() * p.batch, threads};
  // Going on to the next thread or the next sequence is going on to the next partial result.
  const Buffer partials((threads + p.batch) * Partial::size(p));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread) {
    const Workspace workspace(p);
    for (int64_t sequence = 0; sequence < p.batch; ++sequence) {
      const int64_t begin = pieces.begin(thread, sequence), end = pieces.end(thread, sequence);
      if (begin == end) continue;
      attend(p, sequence, begin, end, Partial(p, partials.data() + (thread + sequence) * Partial::size(p)), workspace);
    }
  }
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < p.batch * p.rows; ++row)
    merge_row(p, pieces, partials.data(), row / p.rows, row % p.rows);
}

}  // namespace

extern "C" void kernel(const float* q_latent, const float* q_rope, const float* latent, const float* k_rope,
                       const float* bias, float* o, float* lse, int64_t batch, int64_t heads, int64_t rows,
                       int64_t keys, int64_t rank, int64_t rope, int64_t latent_batch, int64_t latent_key,
                       int64_t rope_batch, int64_t rope_key, int64_t bias_query, int64_t bias_head,
                       int64_t bias_key, int64_t has_bias, float scale, int64_t threads) {
  run(Problem{q_latent, q_rope, latent, k_rope, has_bias ? bias : nullptr, o, lse, batch, heads, rows, keys, rank,
              rope, latent_batch, latent_key, rope_batch, rope_key, bias_query, bias_head, bias_key, scale},
      threads);
}
