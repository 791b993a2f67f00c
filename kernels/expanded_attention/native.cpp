// Attention of many queries to a chunk of up-projected keys and values: flash attention on CPU cores, sums in float32.
//
//     q      [heads, queries, P + R]          any strides, but 1 in the last dim; the same holds for the others
//     k      [heads, keys, P], k_rope [heads, keys, R]   with a stride of 0 where heads share the rope keys
//     v      [heads, V, keys]                 keys last, so that both products read rows with a last stride of 1
//     bias   [heads, queries, keys] or null   -inf hides; queries side by side, or one for all with a stride of 0
//     o      [heads, queries, V], lse [heads, queries]    float32: on entry the state after earlier chunks, updated
//
// NUMBER is the type of q; keys and values are of the type that `panels.h` chooses.
//
// Query i sees keys up to i + offset. A task is a few panels of queries of one head. It goes through the keys that any
// of them sees, BLOCK at a time, and each panel attends to a block in turn, so that keys and values are fetched into
// the core's own caches once for all of them. Rows of a panel are vector lanes: of the scores [keys, PANEL], of the
// weights, and of the output [V, PANEL].

#include <deque>

namespace {

constexpr int64_t BLOCK = 96;  // keys: 12 KiB of scores; a multiple of ROWS_OF_A_TILE
constexpr int64_t SOME_COLUMNS = 16;  // of the output of a panel, a block of which stays in the first-level cache
constexpr int64_t TOGETHER = 4, TASKS_OF_A_THREAD = 8;  // at most so many panels per task, at least so many tasks

struct Problem {
  const Number* q;
  const Key *k, *k_rope, *v;
  const float* bias;
  float *o, *lse;
  int64_t heads, queries, keys, nope, rope, value;
  int64_t q_head, q_row, k_head, k_key, rope_head, rope_key, v_head, v_column, bias_head, bias_row, bias_key;
  int64_t o_head, o_row, lse_head, lse_row, offset;
  float scale;

  int64_t panels() const { return (queries + PANEL - 1) / PANEL; }
};

// A panel of queries, and their running sums.
struct Rows {
  Buffer query, o, m, total;
  int64_t first = 0, count = 0, seen = 0;  // the first query, the number of queries, and of keys that any sees

  explicit Rows(const Problem& p)
      : query((Panel::lines(p.nope) + Panel::lines(p.rope)) * PANEL), o(round_up(p.value, ROWS_OF_A_TILE) * PANEL),
        m(PANEL), total(PANEL) {}

  Lane* packed() const { return reinterpret_cast<Lane*>(query.data()); }
};

struct Workspace {
  std::deque<Rows> panels;
  Buffer scores, weights, decay;

  Workspace(const Problem& p, int64_t together)
      : scores(BLOCK * PANEL), weights(Panel::lines(BLOCK) * PANEL), decay(PANEL) {
    for (int64_t i = 0; i < together; ++i) panels.emplace_back(p);
  }
};

// Loads the queries from `first` on and their state; rows that pad the panel are 0.
void load_panel(const Problem& p, int64_t head, int64_t first, Rows& to) {
  to.first = first;
  to.count = std::max(std::min(PANEL, p.queries - first), int64_t{0});
  to.seen = to.count ? std::max(std::min(p.keys, first + to.count + p.offset), int64_t{0}) : 0;
  if (!to.seen) return;
  const int64_t nope = Panel::lines(p.nope) * PANEL;
  std::memset(to.packed(), 0, (nope + Panel::lines(p.rope) * PANEL) * sizeof(Lane));
  std::fill_n(to.o.data(), round_up(p.value, ROWS_OF_A_TILE) * PANEL, 0.0f);
  std::fill_n(to.m.data(), PANEL, -FLT_MAX);  // not -inf: a row whose scores are all -inf gets exp(-inf), not NaN
  std::fill_n(to.total.data(), PANEL, 0.0f);
  for (int64_t row = 0; row < to.count; ++row) {
    const Number* q = p.q + head * p.q_head + (first + row) * p.q_row;
    Panel::put(q, p.nope, to.packed() + row);
    Panel::put(q + p.nope, p.rope, to.packed() + nope + row);
    const float lse = p.lse[head * p.lse_head + (first + row) * p.lse_row];
    if (lse == -INFINITY) continue;
    const float* o = p.o + head * p.o_head + (first + row) * p.o_row;
    for (int64_t c = 0; c < p.value; ++c) to.o.data()[c * PANEL + row] = o[c];
    to.m.data()[row] = lse;
    to.total.data()[row] = 1.0f;
  }
}

void store_panel(const Problem& p, int64_t head, const Rows& of) {
  for (int64_t begin = 0; begin < p.value; begin += SOME_COLUMNS)
    for (int64_t row = 0; row < of.count; ++row) {
      const float total = of.total.data()[row];
      float* o = p.o + head * p.o_head + (of.first + row) * p.o_row;
      const float divisor = total == 0.0f ? 1.0f : total;  // 0 if no key was seen
      const int64_t end = std::min(begin + SOME_COLUMNS, p.value);
      for (int64_t c = begin; c < end; ++c) o[c] = of.o.data()[c * PANEL + row] / divisor;
    }
  for (int64_t row = 0; row < of.count; ++row)
    p.lse[head * p.lse_head + (of.first + row) * p.lse_row] = of.m.data()[row] + std::log(of.total.data()[row]);
}

// The bias of a panel's queries for one key.
const float* bias_of(const Problem& p, int64_t head, const Rows& of, int64_t key) {
  return p.bias + head * p.bias_head + of.first * p.bias_row + key * p.bias_key;
}

// Whether the bias hides a block of keys from every query of a panel.
bool hides(const Problem& p, int64_t head, const Rows& of, int64_t key, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    const float* bias = bias_of(p, head, of, key + k);
    for (int64_t r = 0; r < (p.bias_row ? of.count : 1); ++r)
      if (bias[r] != -INFINITY) return false;
  }
  return true;
}

void add_bias(const Problem& p, int64_t head, const Rows& of, int64_t key, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; ++k, scores += PANEL) {
    const float* bias = bias_of(p, head, of, key + k);
    if (p.bias_row == 0)
      for (int64_t r = 0; r < of.count; ++r) scores[r] += *bias;
    else
      for (int64_t r = 0; r < of.count; ++r) scores[r] += bias[r];
  }
}

void hide_later_keys(const Problem& p, int64_t row, int64_t key, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; ++k)
    std::fill_n(scores + k * PANEL, std::min(std::max(key + k - p.offset - row, int64_t{0}), PANEL), -INFINITY);
}

// Attention of a panel to one block of keys.
void attend_block(const Problem& p, int64_t head, int64_t key, const Rows& of, const Workspace& w) {
  const int64_t count = std::min(BLOCK, of.seen - key);
  if (p.bias && hides(p, head, of, key, count)) return;
  const Lane *nope = of.packed(), *rope = nope + Panel::lines(p.nope) * PANEL;
  float *scores = w.scores.data(), *o = of.o.data();
  multiply({{p.k + head * p.k_head + key * p.k_key, p.k_key, p.nope, nope},
            {p.k_rope + head * p.rope_head + key * p.rope_key, p.rope_key, p.rope, rope}},
           count, [&](int64_t at, vec sum) { store(scores + at, sum * p.scale); });
  if (p.bias) add_bias(p, head, of, key, count, scores);
  if (key + count - 1 > of.first + p.offset) hide_later_keys(p, of.first, key, count, scores);
  soften(scores, PANEL, PANEL, count, of.m.data(), of.total.data(), w.decay.data());
  const Lane* weights = Panel::weights(scores, count, reinterpret_cast<Lane*>(w.weights.data()));
  const float* decay = w.decay.data();
  multiply({{p.v + head * p.v_head + key, p.v_column, count, weights}}, p.value,
           [&](int64_t at, vec sum) { store(o + at, load(o + at) * load(decay + at % PANEL) + sum); });
}

void attend(const Problem& p, int64_t head, int64_t first, Workspace& w) {
  int64_t seen = 0;
  for (Rows& panel : w.panels) {
    load_panel(p, head, first, panel);
    seen = std::max(seen, panel.seen);
    first += PANEL;
  }
  for (int64_t key = 0; key < seen; key += BLOCK)
    for (const Rows& panel : w.panels)
      if (key < panel.seen) attend_block(p, head, key, panel, w);
  for (const Rows& panel : w.panels)
    if (panel.seen) store_panel(p, head, panel);
}

}  // namespace

extern "C" void kernel(const void* q, const void* k, const void* k_rope, const void* v, uintptr_t bias, float* o,
                       float* lse, int64_t heads, int64_t queries, int64_t keys, int64_t nope, int64_t rope,
                       int64_t value, int64_t q_head, int64_t q_row, int64_t k_head, int64_t k_key,
                       int64_t rope_head, int64_t rope_key, int64_t v_head, int64_t v_column, int64_t bias_head,
                       int64_t bias_row, int64_t bias_key, int64_t o_head, int64_t o_row, int64_t lse_head,
                       int64_t lse_row, int64_t offset, float scale, int64_t threads) {
  const Problem p{static_cast<const Number*>(q), static_cast<const Key*>(k), static_cast<const Key*>(k_rope),
                  static_cast<const Key*>(v), reinterpret_cast<const float*>(bias), o, lse,
                  heads, queries, keys, nope, rope, value,
                  q_head, q_row, k_head, k_key, rope_head, rope_key, v_head, v_column, bias_head, bias_row, bias_key,
                  o_head, o_row, lse_head, lse_row, offset, scale};
  // As many panels per task as leave each thread some tasks.
  const int64_t together = std::min(std::max(heads * p.panels() / (threads * TASKS_OF_A_THREAD), int64_t{1}), TOGETHER);
  const int64_t groups = (p.panels() + together - 1) / together;
#pragma omp parallel num_threads(threads)
  {
    Workspace workspace(p, together);
    // The last panels of a head see the most keys; they go first, so that none is left over for a single thread.
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < heads * groups; ++task)
      attend(p, task / groups, (groups - 1 - task % groups) * together * PANEL, workspace);
  }
}

static_assert(std::is_same_v<decltype(kernel), ExpandedAttentionKernel>);
