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
//
// Rows lie in vector lanes for the scores: scores [BLOCK, padded rows] are sums of a key's number, broadcast, times a
// vector of rows of the packed query [panel, L + R, PANEL]. That makes the softmax lane by lane, with no sum across a
// vector. For the values the lanes are columns of the latent.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
constexpr int64_t KEYS = 8, ROWS = 8, COLUMNS = 2;  // 8 and 16 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8;
constexpr int64_t KEYS = 6, ROWS = 4, COLUMNS = 2;  // 12 and 8 of 16 registers accumulate
#else
constexpr int64_t WIDTH = 4;
constexpr int64_t KEYS = 4, ROWS = 4, COLUMNS = 4;  // 16 and 16 of 32 registers accumulate
#endif
constexpr int64_t PANEL = 16;         // rows of a panel of the packed query
constexpr int64_t TERMS = 16;           // of a score in one sum: errors grow with sqrt(TERMS + L / TERMS), not sqrt(L)
constexpr int64_t BLOCK = 8 * KEYS;    // 64 keys of 576 numbers are 144 KiB: within a second-level cache

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline vec load(const float* from) { return *reinterpret_cast<const unaligned_vec*>(from); }
inline void store(float* to, vec value) { *reinterpret_cast<unaligned_vec*>(to) = value; }
inline vec broadcast(float value) { return value - vec{}; }
inline vec maximum(vec a, vec b) { return a > b ? a : b; }
inline int64_t round_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// exp for x <= 0 within 1.5 ulp, 0 below the smallest normal number, NaN of NaN. 2^n e^r with |r| <= ln(2) / 2, and
// e^r by the polynomial of Cephes' expf.
inline vec exp_of_nonpositive(vec x) {
  const vec magic = broadcast(0x1.8p23f);  // adding it rounds to an integer and leaves that in the low bits
  const vec shifted = x * 0x1.715476p0f + magic;
  const vec n = shifted - magic;
  const vec r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln(2), the first part of few enough bits
  vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ivec exponent, bits;
  std::memcpy(&exponent, &shifted, sizeof(vec));
  std::memcpy(&bits, &p, sizeof(vec));
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof(vec));
  return x < -87.0f ? vec{} : p;
}

// Uninitialised floats at the start of a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<float*>(::operator new(size * sizeof(float), ALIGNMENT))) {}
  ~Buffer() { ::operator delete(data_, ALIGNMENT); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }

 private:
  static constexpr std::align_val_t ALIGNMENT{64};
  float* data_;
};

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

using Scores = vec[KEYS][PANEL / WIDTH];

// Adds the products of KEYS keys [width] and a panel of rows [width, PANEL].
inline void add_products(Scores& scores, const float* const (&keys)[KEYS], const float* panel, int64_t width) {
  for (int64_t begin = 0; begin < width; begin += TERMS) {
    const int64_t end = std::min(begin + TERMS, width);
    Scores sum = {};
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t v = 0; v < PANEL / WIDTH; ++v) {
        const vec q = load(panel + i * PANEL + v * WIDTH);
        for (int64_t k = 0; k < KEYS; ++k) sum[k][v] += keys[k][i] * q;
      }
    }
    for (int64_t k = 0; k < KEYS; ++k)
      for (int64_t v = 0; v < PANEL / WIDTH; ++v) scores[k][v] += sum[k][v];
  }
}

// Scores [BLOCK, padded rows] of `count` keys from `first` on. The last tile repeats the last key in place of those
// that are missing.
void score_block(const Problem& p, const float* latent, const float* k_rope, int64_t count, const Workspace& w) {
  const int64_t stride = p.padded_rows();
  for (int64_t first = 0; first < count; first += KEYS) {
    const float *latents[KEYS], *ropes[KEYS];
    for (int64_t k = 0; k < KEYS; ++k) {
      latents[k] = latent + std::min(first + k, count - 1) * p.latent_key;
      ropes[k] = k_rope + std::min(first + k, count - 1) * p.rope_key;
    }
    for (int64_t row = 0; row < stride; row += PANEL) {
      const float* panel = w.query.data() + row * p.width();
      Scores scores = {};
      add_products(scores, latents, panel, p.rank);
      add_products(scores, ropes, panel + p.rank * PANEL, p.rope);
      for (int64_t k = 0; k < KEYS; ++k)
        for (int64_t v = 0; v < PANEL / WIDTH; ++v)
          store(w.scores.data() + (first + k) * stride + row + v * WIDTH, scores[k][v]);
    }
  }
}

void add_bias(const Problem& p, int64_t first, int64_t count, float* scores) {
  const int64_t stride = p.padded_rows();
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* bias = p.bias + row / p.heads * p.bias_query + row % p.heads * p.bias_head + first * p.bias_key;
    for (int64_t k = 0; k < count; ++k) scores[k * stride + row] += bias[k * p.bias_key];
  }
}

// Scores become weights relative to the rows' new maximum; decay is what that makes of everything summed so far.
void soften(const Problem& p, int64_t count, const Partial& partial, const Workspace& w) {
  const int64_t stride = p.padded_rows();
  for (int64_t row = 0; row < stride; row += WIDTH) {
    float* scores = w.scores.data() + row;
    const vec m = load(partial.m + row);
    vec m_new = m;
    for (int64_t k = 0; k < count; ++k) m_new = maximum(load(scores + k * stride), m_new);
    const vec decay = exp_of_nonpositive(m - m_new);
    vec total = {};
    for (int64_t k = 0; k < count; ++k) {
      const vec weight = exp_of_nonpositive(load(scores + k * stride) - m_new);
      store(scores + k * stride, weight);
      total += weight;
    }
    store(partial.m + row, m_new);
    store(partial.total + row, load(partial.total + row) * decay + total);
    store(w.decay.data() + row, decay);
  }
}

// o [R, V vectors] = o * decay + weights [count, R] latent [count, V vectors]
template <int64_t R, int64_t V>
inline void value_tile(float* o, int64_t rank, const float* decay, const float* weights, int64_t stride,
                       const float* latent, int64_t latent_key, int64_t count) {
  vec sum[R][V] = {};
  for (int64_t k = 0; k < count; ++k) {
    vec value[V];
    for (int64_t v = 0; v < V; ++v) value[v] = load(latent + k * latent_key + v * WIDTH);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t v = 0; v < V; ++v) sum[r][v] += weights[k * stride + r] * value[v];
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t v = 0; v < V; ++v) {
      float* to = o + r * rank + v * WIDTH;
      store(to, load(to) * decay[r] + sum[r][v]);
    }
}

// V vectors of columns for all rows.
template <int64_t V>
void value_columns(const Problem& p, int64_t column, const float* latent, int64_t count, const Partial& partial,
                   const Workspace& w) {
  const float *decay = w.decay.data(), *weights = w.scores.data();
  float* o = partial.o + column;
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS)
    value_tile<ROWS, V>(o + row * p.rank, p.rank, decay + row, weights + row, p.padded_rows(), latent + column,
                        p.latent_key, count);
  for (; row < p.rows; ++row)
    value_tile<1, V>(o + row * p.rank, p.rank, decay + row, weights + row, p.padded_rows(), latent + column,
                     p.latent_key, count);
}

// Columns that fill no vector.
void last_columns(const Problem& p, int64_t column, const float* latent, int64_t count, const Partial& partial,
                  const Workspace& w) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t c = column; c < p.rank; ++c) {
      float sum = 0.0f;
      for (int64_t k = 0; k < count; ++k)
        sum += w.scores.data()[k * p.padded_rows() + row] * latent[k * p.latent_key + c];
      float& o = partial.o[row * p.rank + c];
      o = o * w.decay.data()[row] + sum;
    }
  }
}

void add_values(const Problem& p, const float* latent, int64_t count, const Partial& partial, const Workspace& w) {
  int64_t column = 0;
  for (; column + COLUMNS * WIDTH <= p.rank; column += COLUMNS * WIDTH)
    value_columns<COLUMNS>(p, column, latent, count, partial, w);
  for (; column + WIDTH <= p.rank; column += WIDTH) value_columns<1>(p, column, latent, count, partial, w);
  last_columns(p, column, latent, count, partial, w);
}

// Blocks [begin, end) of one sequence.
void attend(const Problem& p, int64_t sequence, int64_t begin, int64_t end, const Partial& partial,
            const Workspace& w) {
  // The lowest finite number and not -inf: a row whose scores are all -inf then gets exp(-inf) and not a NaN.
  std::fill_n(partial.m, p.padded_rows(), -FLT_MAX);
  std::fill_n(partial.total, p.padded_rows(), 0.0f);
  std::fill_n(partial.o, p.rows * p.rank, 0.0f);
  pack_query(p, sequence, w.query.data());
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * BLOCK, count = std::min(BLOCK, p.keys - first);
    const float* latent = p.latent + sequence * p.latent_batch + first * p.latent_key;
    score_block(p, latent, p.k_rope + sequence * p.rope_batch + first * p.rope_key, count, w);
    if (p.bias) add_bias(p, first, count, w.scores.data());
    soften(p, count, partial, w);
    add_values(p, latent, count, partial, w);
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

void run(const Problem& p, int64_t threads) {
  const Pieces pieces{p.blocks(), p.blocks() * p.batch, threads};
  // Going on to the next thread or the next sequence is going on to the next partial result.
  const Buffer partials((threads + p.batch) * Partial::size(p));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t thread = 0; thread < threads; ++thread) {
    const Workspace workspace(p);
    for (int64_t sequence = 0; sequence < p.batch; ++sequence) {
      const int64_t begin = pieces.begin(thread, sequence), end = pieces.end(thread, sequence);
      if (begin == end) continue;
      attend(p, sequence, begin, end, Partial(p, partials.data() + (thread + sequence) * Partial::size(p)), workspace);
    }
  }
#pragma omp parallel for num_threads(threads)
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
