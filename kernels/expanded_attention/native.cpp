// Attention of many queries to a chunk of up-projected keys and values: flash attention on CPU cores, sums in float32.
//
//     q      [heads, queries, sharers, P], q_rope [heads, queries, sharers, R]
//     k      [heads, keys, P], k_rope [heads, keys, R]    with a stride of 0 where heads share the rope keys
//     v      [heads, V, keys]                             keys last: both products read rows with a last stride of 1
//     bias   [heads, queries, sharers, keys] or null      -inf hides
//     o      [heads, rows, V], lse [heads, rows]          on entry the state after earlier chunks, updated
//
// All have any strides but 1 in the last dim.
//
// NUMBER is the type of q; keys and values are of the type that `panels.h` chooses. lse is float32, and so is o, unless
// `whole`: then there are no other chunks, and o is of the type of q.
//
// Row r is of query r / sharers, as heads that share their keys and values are one, of more rows; query i sees keys up
// to i + offset. A task is a few panels of rows of one head. It goes through the keys that any of them sees, a block at a
// time, and each panel attends to a block in turn, so that keys and values are fetched into the core's own caches once
// for all of them. Rows of a panel are vector lanes: of the scores [keys, PANEL], of the weights, and of the output
// [V, PANEL].

#include <deque>

namespace {

constexpr int64_t TASKS_OF_A_THREAD = 8;  // at least

struct Problem {
  const Number *q, *q_rope;
  const Key *k, *k_rope, *v;
  const float* bias;
  void* o;
  float* lse;
  int64_t heads, rows, sharers, keys, nope, rope, value;
  int64_t q_head, q_query, q_sharer, q_rope_head, q_rope_query, q_rope_sharer, k_head, k_key, rope_head, rope_key;
  int64_t v_head, v_column, bias_head, bias_query, bias_sharer, o_head, o_row, lse_head, lse_row, offset;
  float scale;
  bool whole;
  int64_t block = on_tiles() ? 128 : 96;  // keys at a time: 16 or 12 KiB of scores

  int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
  template <typename Output>
  Output* o_of(int64_t head, int64_t row) const { return static_cast<Output*>(o) + head * o_head + row * o_row; }
  float& lse_of(int64_t head, int64_t row) const { return lse[head * lse_head + row * lse_row]; }
};

// A panel of rows of queries, and their running sums.
struct Rows {
  Buffer query, o, m, total;
  int64_t first = 0, count = 0, seen = 0;  // the first row, the number of rows, and of keys that any sees

  explicit Rows(const Problem& p)
      : query((Panel::lines(p.nope) + Panel::lines(p.rope)) * PANEL), o(round_up(p.value, ROWS_OF_A_TILE) * PANEL),
        m(PANEL), total(PANEL) {}

  Lane* packed() const { return reinterpret_cast<Lane*>(query.data()); }
};

constexpr int64_t IN_A_LINE = 64 / sizeof(Key);  // numbers of a cache line

// A block of keys, [count, P] and [count, R], and values [V, count] of a head.
struct Block {
  const Key *k, *k_rope, *v;
  int64_t k_row, rope_row, v_row;
};

struct Workspace {
  Units units;
  std::deque<Rows> panels;
  Buffer scores, weights, decay, copies;

  Workspace(const Problem& p, int64_t together)
      : scores(p.block * PANEL), weights(Panel::lines(p.block) * PANEL), decay(PANEL),
        copies(on_tiles() ? size_of_copies(p) : 0) {
    for (int64_t i = 0; i < together; ++i) panels.emplace_back(p);
  }

  // In floats.
  static int64_t size_of_copies(const Problem& p) {
    return (p.block * (p.nope + p.rope + IN_A_LINE) + p.value * (p.block + IN_A_LINE)) * sizeof(Key) / sizeof(float) + 1;
  }
};

// Loads the sums after earlier chunks: of rows whose lse is -inf, there are none.
void load_state(const Problem& p, int64_t head, Rows& to) {
  std::fill_n(to.o.data(), round_up(p.value, ROWS_OF_A_TILE) * PANEL, 0.0f);
  std::fill_n(to.m.data(), PANEL, -FLT_MAX);  // not -inf: a row whose scores are all -inf gets exp(-inf), not NaN
  std::fill_n(to.total.data(), PANEL, 0.0f);
  if (p.whole) return;
  for (int64_t row = 0; row < to.count; ++row) {
    const float lse = p.lse_of(head, to.first + row);
    if (lse == -INFINITY) continue;
    const float* o = p.o_of<float>(head, to.first + row);
    for (int64_t c = 0; c < p.value; ++c) to.o.data()[c * PANEL + row] = o[c];
    to.m.data()[row] = lse;
    to.total.data()[row] = 1.0f;
  }
}

// Loads the rows from `first` on and their state; rows that pad the panel are 0.
void load_panel(const Problem& p, int64_t head, int64_t first, Rows& to) {
  to.first = first;
  to.count = std::max(std::min(PANEL, p.rows - first), int64_t{0});
  const int64_t queries = (first + to.count - 1) / p.sharers + 1;
  to.seen = to.count ? std::max(std::min(p.keys, queries + p.offset), int64_t{0}) : 0;
  if (!to.seen) return;
  for (int64_t lane = 0; lane < PANEL; lane += WIDTH) {
    const int64_t count = std::min(to.count - lane, WIDTH);
    const Number *rows[WIDTH], *ropes[WIDTH];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t query = (first + lane + r) / p.sharers, sharer = (first + lane + r) % p.sharers;
      rows[r] = p.q + head * p.q_head + query * p.q_query + sharer * p.q_sharer;
      ropes[r] = p.q_rope + head * p.q_rope_head + query * p.q_rope_query + sharer * p.q_rope_sharer;
    }
    pack_lanes(rows, count, p.nope, to.packed() + lane);
    pack_lanes(ropes, count, p.rope, to.packed() + Panel::lines(p.nope) * PANEL + lane);
  }
  load_state(p, head, to);
}

template <typename Output>
void store_output(const Problem& p, int64_t head, const Rows& of) {
  for (int64_t lane = 0; lane < of.count; lane += WIDTH) {
    const vec total = load(of.total.data() + lane), divisor = total == 0.0f ? broadcast(1.0f) : total;  // 0: no key
    for (int64_t first = 0; first < p.value; first += WIDTH) {
      const int64_t columns = std::min(p.value - first, WIDTH);
      const float* sums = of.o.data() + first * PANEL + lane;
      vec rows[WIDTH];
      load_columns(columns, rows, [&](int64_t c) { return load(sums + c * PANEL) / divisor; });
      for (int64_t row = 0; row < std::min(of.count - lane, WIDTH); ++row) {
        Output* o = p.o_of<Output>(head, of.first + lane + row) + first;
        Output narrowed[WIDTH];
        narrow(rows[row], columns == WIDTH ? o : narrowed);
        if (columns < WIDTH) std::copy_n(narrowed, columns, o);
      }
    }
  }
}

void store_panel(const Problem& p, int64_t head, const Rows& of) {
  if (p.whole) store_output<Number>(p, head, of);
  else store_output<float>(p, head, of);
  for (int64_t row = 0; row < of.count; ++row)
    p.lse_of(head, of.first + row) = of.m.data()[row] + std::log(of.total.data()[row]);
}

// The biases of rows of a panel, for keys from `key` on.
auto biases(const Problem& p, int64_t head, const Rows& of, int64_t key) {
  return [&p, first = of.first, bias = p.bias + head * p.bias_head + key](int64_t row) {
    const int64_t query = (first + row) / p.sharers, sharer = (first + row) % p.sharers;
    return bias + query * p.bias_query + sharer * p.bias_sharer;
  };
}

void hide_later_keys(const Problem& p, int64_t row, int64_t key, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t hidden = (key + k - p.offset) * p.sharers - row;
    std::fill_n(scores + k * PANEL, std::min(std::max(hidden, int64_t{0}), PANEL), -INFINITY);
  }
}

// Copies `count` rows, and prefetches those `next` numbers later.
void copy_rows(const Key* from, int64_t stride, int64_t count, int64_t width, int64_t next, Key* to, int64_t to_row) {
  for (int64_t row = 0; row < count; ++row, from += stride, to += to_row) {
    for (int64_t i = 0; i < width; i += IN_A_LINE) __builtin_prefetch(from + i + next, 0, 2);
    std::memcpy(to, from, width * sizeof(Key));
  }
}

// The block at a key. For tiles it is copied, once for all panels: rows of one head lie in as many pages of memory, and
// tiles are multiplied faster than those are found. A gap of a cache line between rows spreads them over the cache.
Block block_at(const Problem& p, int64_t head, int64_t key, int64_t count, Workspace& w) {
  const Block block{p.k + head * p.k_head + key * p.k_key, p.k_rope + head * p.rope_head + key * p.rope_key,
                    p.v + head * p.v_head + key, p.k_key, p.rope_key, p.v_column};
  if (!on_tiles()) return block;
  const int64_t k_row = p.nope + p.rope + IN_A_LINE, v_row = p.block + IN_A_LINE;
  Key *const k = reinterpret_cast<Key*>(w.copies.data()), *const v = k + p.block * k_row;
  copy_rows(block.k, block.k_row, count, p.nope, p.block * block.k_row, k, k_row);
  copy_rows(block.k_rope, block.rope_row, count, p.rope, p.block * block.rope_row, k + p.nope, k_row);
  copy_rows(block.v, block.v_row, p.value, count, p.block, v, v_row);
  return {k, k + p.nope, v, k_row, k_row, v_row};
}

// Attention of a panel to one block of keys.
void attend_block(const Problem& p, int64_t head, int64_t key, const Block& block, const Rows& of, const Workspace& w) {
  const int64_t count = std::min(p.block, of.seen - key);
  if (p.bias && hide_all(of.count, count, biases(p, head, of, key))) return;
  const Lane *nope = of.packed(), *rope = nope + Panel::lines(p.nope) * PANEL;
  float *scores = w.scores.data(), *o = of.o.data();
  multiply({{block.k, block.k_row, p.nope, nope}, {block.k_rope, block.rope_row, p.rope, rope}}, count, {scores});
  for (int64_t at = 0; at < count * PANEL; at += WIDTH) store(scores + at, load(scores + at) * p.scale);
  if (p.bias) add_rows(of.count, count, biases(p, head, of, key), scores);
  if (key + count - 1 > of.first / p.sharers + p.offset) hide_later_keys(p, of.first, key, count, scores);
  if (soften(scores, PANEL, PANEL, count, of.m.data(), of.total.data(), w.decay.data()))
    for (int64_t at = 0; at < p.value * PANEL; at += WIDTH)
      store(o + at, load(o + at) * load(w.decay.data() + at % PANEL));
  const Lane* weights = Panel::weights(scores, count, reinterpret_cast<Lane*>(w.weights.data()));
  multiply({{block.v, block.v_row, count, weights}}, p.value, {o, PANEL, true});
}

void attend(const Problem& p, int64_t head, int64_t first, Workspace& w) {
  int64_t seen = 0;
  for (Rows& panel : w.panels) {
    load_panel(p, head, first, panel);
    seen = std::max(seen, panel.seen);
    first += PANEL;
  }
  for (int64_t key = 0; key < seen; key += p.block) {
    const Block block = block_at(p, head, key, std::min(p.block, seen - key), w);
    for (const Rows& panel : w.panels)
      if (key < panel.seen) attend_block(p, head, key, block, panel, w);
  }
  for (const Rows& panel : w.panels)
    if (panel.seen) store_panel(p, head, panel);
}

// The most panels of a task. Where blocks are copied for each task, these are as many as a second-level cache holds.
int64_t most_together(const Problem& p) {
  constexpr int64_t FEW = 4, BYTES = 1 << 20;
  const int64_t of_a_panel = (Panel::lines(p.nope + p.rope) + p.value) * PANEL * int64_t{sizeof(float)};
  return on_tiles() ? std::max(BYTES / of_a_panel, FEW) : FEW;
}

}  // namespace

extern "C" void kernel(const void* q, const void* q_rope, const void* k, const void* k_rope, const void* v,
                       uintptr_t bias, void* o, float* lse, int64_t heads, int64_t rows, int64_t sharers,
                       int64_t keys, int64_t nope, int64_t rope, int64_t value, int64_t q_head, int64_t q_query,
                       int64_t q_sharer, int64_t q_rope_head, int64_t q_rope_query, int64_t q_rope_sharer,
                       int64_t k_head, int64_t k_key, int64_t rope_head, int64_t rope_key, int64_t v_head,
                       int64_t v_column, int64_t bias_head, int64_t bias_query, int64_t bias_sharer,
                       int64_t o_head, int64_t o_row, int64_t lse_head, int64_t lse_row, int64_t offset,
                       int64_t whole, float scale, int64_t threads) {
  const Problem p{static_cast<const Number*>(q), static_cast<const Number*>(q_rope), static_cast<const Key*>(k),
                  static_cast<const Key*>(k_rope), static_cast<const Key*>(v), reinterpret_cast<const float*>(bias), o,
                  lse, heads, rows, sharers, keys, nope, rope, value,
                  q_head, q_query, q_sharer, q_rope_head, q_rope_query, q_rope_sharer, k_head, k_key, rope_head, rope_key,
                  v_head, v_column, bias_head, bias_query, bias_sharer, o_head, o_row, lse_head, lse_row, offset, scale,
                  whole != 0};
  // As many panels per task as leave each thread some tasks.
  const int64_t of_a_task = heads * p.panels() / (threads * TASKS_OF_A_THREAD);
  const int64_t together = std::min(std::max(of_a_task, int64_t{1}), most_together(p));
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
