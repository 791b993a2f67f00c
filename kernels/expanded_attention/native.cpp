// Many queries attend to a chunk of up-projected keys and values, float32: flash attention on CPU cores.
//
//     q      [heads, queries, width]          any strides of heads and queries, 1 of the last dim; so are the others
//     k      [heads, keys, width]
//     v      [heads, keys, value]
//     bias   [heads, queries, keys] or null   any strides, -inf hides
//     o      [heads, queries, value], lse [heads, queries]    what earlier chunks gave, and then that of all
//
// Query i sees keys up to i + offset. A task is a panel of queries of a head: it goes through the keys that one of the
// panel sees, BLOCK at a time, and keeps everything of its own in a first-level cache.

namespace {

#if defined(__AVX512F__)
constexpr int64_t KEYS = 12;  // of a tile of scores: 24 of 32 registers accumulate
#else
constexpr int64_t KEYS = 6;   // 12 of 16
#endif
constexpr int64_t VECTORS = 2, PANEL = VECTORS * WIDTH;
constexpr int64_t TERMS = 64;         // of a score in one sum
constexpr int64_t BLOCK = 96;         // keys: 12 KiB of scores; a multiple of KEYS

struct Problem {
  const float *q, *k, *v, *bias;
  float *o, *lse;
  int64_t heads, queries, keys, width, value;
  int64_t q_head, q_row, k_head, k_key, v_head, v_key, bias_head, bias_row, bias_key;
  int64_t o_head, o_row, lse_head, lse_row, offset;
  float scale;

  int64_t panels() const { return (queries + PANEL - 1) / PANEL; }
};

struct Workspace {
  Buffer query, scores, o, m, total, decay;

  explicit Workspace(const Problem& p)
      : query(p.width * PANEL), scores(BLOCK * PANEL), o(PANEL * p.value), m(PANEL), total(PANEL),
        decay(PANEL) {}
};

// The queries and the state of `rows` rows from `first` on; rows that fill the panel up are 0.
void load_panel(const Problem& p, int64_t head, int64_t first, int64_t rows, const Workspace& w) {
  std::fill_n(w.query.data(), p.width * PANEL, 0.0f);
  std::fill_n(w.m.data(), PANEL, -FLT_MAX);  // and not -inf: a row whose scores are all -inf gets exp(-inf), no NaN
  std::fill_n(w.total.data(), PANEL, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const float* q = p.q + head * p.q_head + (first + row) * p.q_row;
    for (int64_t i = 0; i < p.width; ++i) w.query.data()[i * PANEL + row] = q[i] * p.scale;
    std::copy_n(p.o + head * p.o_head + (first + row) * p.o_row, p.value, w.o.data() + row * p.value);
    const float lse = p.lse[head * p.lse_head + (first + row) * p.lse_row];
    if (lse == -INFINITY) continue;
    w.m.data()[row] = lse;
    w.total.data()[row] = 1.0f;
  }
}

void store_panel(const Problem& p, int64_t head, int64_t first, int64_t rows, const Workspace& w) {
  for (int64_t row = 0; row < rows; ++row) {
    const float total = w.total.data()[row];
    float* o = p.o + head * p.o_head + (first + row) * p.o_row;
    const float divisor = total == 0.0f ? 1.0f : total;  // nothing seen
    for (int64_t c = 0; c < p.value; ++c) o[c] = w.o.data()[row * p.value + c] / divisor;
    p.lse[head * p.lse_head + (first + row) * p.lse_row] = w.m.data()[row] + std::log(total);
  }
}

void add_bias(const Problem& p, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t count, float* scores) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* bias = p.bias + head * p.bias_head + (row + r) * p.bias_row + key * p.bias_key;
    for (int64_t k = 0; k < count; ++k) scores[k * PANEL + r] += bias[k * p.bias_key];
  }
}

void hide_later_keys(const Problem& p, int64_t row, int64_t key, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; ++k)
    std::fill_n(scores + k * PANEL, std::min(std::max(key + k - p.offset - row, int64_t{0}), PANEL), -INFINITY);
}

void attend(const Problem& p, int64_t head, int64_t first, const Workspace& w) {
  const int64_t rows = std::min(PANEL, p.queries - first);
  const int64_t seen = std::min(p.keys, first + rows + p.offset);
  if (seen <= 0) return;
  load_panel(p, head, first, rows, w);
  const Values values{w.o.data(), p.value, rows, p.value, w.decay.data(), w.scores.data(), PANEL};
  for (int64_t key = 0; key < seen; key += BLOCK) {
    const int64_t count = std::min(BLOCK, seen - key);
    const Lines keys{p.k + head * p.k_head + key * p.k_key, p.k_key};
    score_panel<KEYS, VECTORS, TERMS>(keys, p.width, keys, 0, count, w.query.data(), w.scores.data(), PANEL);
    if (p.bias) add_bias(p, head, first, rows, key, count, w.scores.data());
    if (key + count - 1 > first + p.offset) hide_later_keys(p, first, key, count, w.scores.data());
    soften(w.scores.data(), PANEL, PANEL, count, w.m.data(), w.total.data(), w.decay.data());
    values.add(Lines{p.v + head * p.v_head + key * p.v_key, p.v_key}, count);
  }
  store_panel(p, head, first, rows, w);
}

}  // namespace

extern "C" void kernel(const float* q, const float* k, const float* v, const float* bias,
                       float* o, float* lse, int64_t heads, int64_t queries, int64_t keys, int64_t width,
                       int64_t value, int64_t q_head, int64_t q_row, int64_t k_head, int64_t k_key,
                       int64_t v_head, int64_t v_key, int64_t bias_head, int64_t bias_row, int64_t bias_key,
                       int64_t o_head, int64_t o_row, int64_t lse_head, int64_t lse_row, int64_t offset,
                       int64_t has_bias, float scale, int64_t threads) {
  const Problem p{q, k, v, has_bias ? bias : nullptr, o, lse, heads, queries, keys, width, value,
                  q_head, q_row, k_head, k_key, v_head, v_key, bias_head, bias_row, bias_key,
                  o_head, o_row, lse_head, lse_row, offset, scale};
  const int64_t panels = p.panels();
#pragma omp parallel num_threads(threads)
  {
    const Workspace workspace(p);
    // The last panels of a head see the most keys: they go first, so that no thread is left with one.
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < heads * panels; ++task)
      attend(p, task / panels, (panels - 1 - task % panels) * PANEL, workspace);
  }
}
