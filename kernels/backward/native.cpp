// Gradients of attention of many queries to up-projected keys and values, on CPU cores; sums in float32.
//
//     q      [heads, queries, P + R], d_o [heads, queries, V]      NUMBER
//     k      [heads, keys, P], k_rope [heads, keys, R], v [heads, keys, V]    of the type that `panels.h` chooses
//     lse    [heads, queries]    of the scores; +inf in a row that sees no key
//     mean   [heads, queries]    sum(d_o * o) minus the gradient of lse: the weighted mean of a row's d_weights
//     mask   [heads, queries, keys] of bytes, 0 hides; or null
//     bias   [heads, queries, keys] of floats, added to the scores: -inf hides; or null
//     dq, dk, d_rope, dv         like q, k, k_rope (each head its own) and v
//     d_bias [heads, queries, keys], added to; or null
//
// of some sequences, with any strides, but 1 in the last dim (of which the mask has its own).
//
// Query i sees keys up to i + offset. Of each head:
//
//     weights = exp(scale q k + bias - lse),  d_scores = weights (d_o v - mean)
//     dv = weights^T d_o,  dk = scale d_scores^T q,  dq = scale d_scores k,  d_bias = d_scores
//
// A task is a head of a sequence. It goes through its keys, BLOCK at a time, and for each block through the panels of
// queries that see some of it, TOGETHER at a time. Scores and d_weights are [keys, PANEL], with queries in vector lanes,
// which is also what dq reads; for dv and dk their rows are multiplied with q and d_o themselves, whose columns are the
// lanes then.

#include <vector>

namespace {

constexpr int64_t BLOCK = 96;  // keys; a multiple of ROWS_OF_A_TILE
constexpr int64_t TOGETHER = 4;

struct Head {
  int64_t sequence, head;
};

// Of a tensor [sequences, heads, rows, .]; rows are queries or keys.
struct Strides {
  int64_t sequence, head, row;

  int64_t at(Head of, int64_t i) const { return of.sequence * sequence + of.head * head + i * row; }
};

struct Problem {
  const Number *q, *d_o;
  const Key *k, *k_rope, *v;
  const float *lse, *mean;
  const uint8_t* mask;
  const float* bias;
  float* d_bias;
  Number* dq;
  Key *dk, *d_rope, *dv;
  int64_t sequences, heads, queries, keys, nope, rope, value;
  Strides of_q, of_do, of_k, of_rope, of_v, of_rows, of_mask, of_bias, of_d_bias, of_dq, of_dk, of_d_rope, of_dv;
  int64_t mask_key, offset;
  float scale;

  int64_t width() const { return nope + rope; }
  int64_t panels() const { return (queries + PANEL - 1) / PANEL; }
  int64_t queries_of(int64_t panel) const { return std::min(queries - panel * PANEL, PANEL); }
};

// Of queries from the first of a panel on: their numbers for keys from `key` on.
template <typename Numbers>
auto rows_from(Numbers* numbers, Strides strides, Head head, int64_t panel, int64_t key) {
  return [=](int64_t row) { return numbers + strides.at(head, panel * PANEL + row) + key; };
}

// A matrix of queries of one head, packed for both kinds of products.
class Queries {
 public:
  // In `parts` of that many columns, each padded to whole lines; `width` is their sum.
  Queries(int64_t queries, std::initializer_list<int64_t> parts, int64_t width)
      : widths(parts), panels((queries + PANEL - 1) / PANEL), chunks((width + PANEL - 1) / PANEL), lines(0) {
    for (int64_t part : parts) lines += Panel::lines(part);
    in_lanes.resize(panels * lines * PANEL);
    in_rows.resize(chunks * panels * Panel::lines(PANEL) * PANEL);
  }

  void load(const Number* from, int64_t stride, int64_t queries, int64_t width) {
    std::fill(in_lanes.begin(), in_lanes.end(), Lane{});
    std::vector<Number> padded(chunks * PANEL * 2, Number{});
    for (int64_t row = 0; row < queries; row += WIDTH) {
      const int64_t count = std::min(queries - row, WIDTH);
      const Number* rows[WIDTH];
      for (int64_t r = 0; r < count; ++r) rows[r] = from + (row + r) * stride;
      Lane* lanes_of_rows = in_lanes.data() + row / PANEL * lines * PANEL + row % PANEL;
      for (int64_t part : widths) {
        pack_lanes(rows, count, part, lanes_of_rows);
        for (int64_t r = 0; r < count; ++r) rows[r] += part;
        lanes_of_rows += Panel::lines(part) * PANEL;
      }
    }
    for (int64_t row = 0; row < panels * PANEL; row += 2) {
      for (int64_t i = 0; i < 2; ++i) {
        Number* one = padded.data() + i * chunks * PANEL;
        if (row + i < queries) std::copy_n(from + (row + i) * stride, width, one);
        else std::fill_n(one, width, Number{});
      }
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        Panel::put_two(padded.data() + chunk * PANEL, padded.data() + (chunks + chunk) * PANEL,
                       in_rows.data() + (chunk * panels * PANEL + row) / PANEL * Panel::lines(PANEL) * PANEL +
                           Panel::lines(row % PANEL) * PANEL);
    }
  }

  // [lines, PANEL]: the queries of a panel are the lanes.
  const Lane* lanes(int64_t panel) const { return in_lanes.data() + panel * lines * PANEL; }
  // [PANEL queries, PANEL]: columns are the lanes.
  const Lane* rows(int64_t chunk, int64_t panel) const {
    return in_rows.data() + (chunk * panels + panel) * Panel::lines(PANEL) * PANEL;
  }

  const std::vector<int64_t> widths;
  const int64_t panels, chunks;

 private:
  int64_t lines;
  std::vector<Lane> in_lanes, in_rows;
};

// What a thread needs for one head.
struct Workspace {
  Units units;
  Queries q, d_o;
  std::vector<float> lse, mean, dq;     // of all panels; dq [panels, rows of a tile, PANEL]
  std::vector<float> weights, d_scores;  // [TOGETHER, BLOCK, PANEL]
  std::vector<Key> narrow_weights, narrow_d_scores;
  std::vector<Lane> pairs;
  std::vector<Key> across;  // a block of keys, [P + R, BLOCK]
  std::vector<float> dk, dv;  // of a block, [BLOCK, columns]

  explicit Workspace(const Problem& p)
      : q(p.queries, {p.nope, p.rope}, p.width()), d_o(p.queries, {p.value}, p.value), lse(p.panels() * PANEL),
        mean(p.panels() * PANEL), dq(p.panels() * dq_rows(p) * PANEL), weights(TOGETHER * BLOCK * PANEL),
        d_scores(TOGETHER * BLOCK * PANEL), pairs(Panel::lines(BLOCK) * PANEL), across(p.width() * BLOCK),
        dk(BLOCK * q.chunks * PANEL), dv(BLOCK * d_o.chunks * PANEL) {
    narrow_weights.resize(std::is_same_v<Key, float> ? 0 : weights.size());
    narrow_d_scores.resize(narrow_weights.size());
  }

  static int64_t dq_rows(const Problem& p) { return round_up(p.width(), ROWS_OF_A_TILE); }
  float* dq_of(const Problem& p, int64_t panel) { return dq.data() + panel * dq_rows(p) * PANEL; }
};

void load_head(const Problem& p, Head head, Workspace& w) {
  w.q.load(p.q + p.of_q.at(head, 0), p.of_q.row, p.queries, p.width());
  w.d_o.load(p.d_o + p.of_do.at(head, 0), p.of_do.row, p.queries, p.value);
  std::fill(w.lse.begin(), w.lse.end(), INFINITY);  // rows that pad a panel get weights of 0
  std::fill(w.mean.begin(), w.mean.end(), 0.0f);
  std::fill(w.dq.begin(), w.dq.end(), 0.0f);
  for (int64_t row = 0; row < p.queries; ++row) {
    w.lse[row] = p.lse[p.of_rows.at(head, row)];
    w.mean[row] = p.mean[p.of_rows.at(head, row)];
  }
}

// Whether a query of a panel sees a key of a block.
bool sees(const Problem& p, Head head, int64_t panel, int64_t key, int64_t count) {
  const int64_t first = panel * PANEL, rows = p.queries_of(panel);
  if (first + rows - 1 + p.offset < key) return false;
  if (p.bias) return !hide_all(rows, count, rows_from(p.bias, p.of_bias, head, panel, key));
  if (!p.mask) return true;
  for (int64_t row = first; row < first + rows; ++row)
    for (int64_t k = key; k < key + count; ++k)
      if (p.mask[p.of_mask.at(head, row) + k * p.mask_key]) return true;
  return false;
}

// Sets weights and d_scores [count, PANEL] of what is hidden to 0.
void hide(const Problem& p, Head head, int64_t first, int64_t key, int64_t count, float* weights, float* d_scores) {
  if (key + count - 1 > first + p.offset)
    for (int64_t k = 0; k < count; ++k) {
      const int64_t hidden = std::min(std::max(key + k - p.offset - first, int64_t{0}), PANEL);
      std::fill_n(weights + k * PANEL, hidden, 0.0f);
      std::fill_n(d_scores + k * PANEL, hidden, 0.0f);
    }
  if (!p.mask) return;
  for (int64_t row = first; row < std::min(first + PANEL, p.queries); ++row) {
    const uint8_t* seen = p.mask + p.of_mask.at(head, row) + key * p.mask_key;
    for (int64_t k = 0; k < count; ++k)
      if (!seen[k * p.mask_key]) weights[k * PANEL + row - first] = d_scores[k * PANEL + row - first] = 0.0f;
  }
}

// Weights and d_scores [count, PANEL] of a panel and a block of keys.
void score(const Problem& p, Head head, int64_t panel, int64_t key, int64_t count, const Workspace& w,
           float* weights, float* d_scores) {
  const Lane *nope = w.q.lanes(panel), *rope = nope + Panel::lines(p.nope) * PANEL;
  multiply({{p.k + p.of_k.at(head, key), p.of_k.row, p.nope, nope},
            {p.k_rope + p.of_rope.at(head, key), p.of_rope.row, p.rope, rope}},
           count, {weights});
  for (int64_t at = 0; at < count * PANEL; at += WIDTH) store(weights + at, load(weights + at) * p.scale);
  if (p.bias)
    add_rows(p.queries_of(panel), count, rows_from(p.bias, p.of_bias, head, panel, key), weights);
  multiply({{p.v + p.of_v.at(head, key), p.of_v.row, p.value, w.d_o.lanes(panel)}}, count, {d_scores});
  for (int64_t v = 0; v < PANEL; v += WIDTH) {
    const vec lse = load(w.lse.data() + panel * PANEL + v), mean = load(w.mean.data() + panel * PANEL + v);
    for (int64_t at = v; at < count * PANEL; at += PANEL) {
      const vec weight = exp_of(load(weights + at) - lse);
      store(weights + at, weight);
      store(d_scores + at, weight * (load(d_scores + at) - mean));
    }
  }
  hide(p, head, panel * PANEL, key, count, weights, d_scores);
  if (p.d_bias)
    add_to_rows(p.queries_of(panel), count, d_scores, rows_from(p.d_bias, p.of_d_bias, head, panel, key));
}

// Adds the products of rows [count, PANEL queries] of some panels and the queries themselves to `to` [BLOCK, columns].
void add_products(const std::vector<int64_t>& panels, const Key* rows, const Queries& queries, int64_t count,
                  float* to) {
  const int64_t columns = queries.chunks * PANEL;
  std::vector<Factors> parts(panels.size());
  for (int64_t chunk = 0; chunk < queries.chunks; ++chunk) {
    for (size_t i = 0; i < panels.size(); ++i)
      parts[i] = {rows + i * BLOCK * PANEL, PANEL, PANEL, queries.rows(chunk, panels[i])};
    multiply(parts, count, {to + chunk * PANEL, columns, true});
  }
}

void add_block(const Problem& p, Head head, const std::vector<int64_t>& panels, int64_t key, int64_t count,
               Workspace& w) {
  const int64_t size = BLOCK * PANEL;
  for (size_t i = 0; i < panels.size(); ++i)
    score(p, head, panels[i], key, count, w, w.weights.data() + i * size, w.d_scores.data() + i * size);
  const int64_t all = panels.size() * size;
  add_products(panels, Panel::rows(w.weights.data(), all, w.narrow_weights.data()), w.d_o, count, w.dv.data());
  add_products(panels, Panel::rows(w.d_scores.data(), all, w.narrow_d_scores.data()), w.q, count, w.dk.data());
  for (size_t i = 0; i < panels.size(); ++i) {
    const Lane* lanes = Panel::weights(w.d_scores.data() + i * size, count, w.pairs.data());
    multiply({{w.across.data(), BLOCK, count, lanes}}, p.width(), {w.dq_of(p, panels[i]), PANEL, true});
  }
}

// Copies a block of keys to `across` [P + R, BLOCK].
void transpose(const Problem& p, Head head, int64_t key, int64_t count, Workspace& w) {
  for (int64_t k = 0; k < count; ++k) {
    const Key* nope = p.k + p.of_k.at(head, key + k);
    const Key* rope = p.k_rope + p.of_rope.at(head, key + k);
    for (int64_t i = 0; i < p.nope; ++i) w.across[i * BLOCK + k] = nope[i];
    for (int64_t i = 0; i < p.rope; ++i) w.across[(p.nope + i) * BLOCK + k] = rope[i];
  }
}

void attend(const Problem& p, Head head, Workspace& w) {
  load_head(p, head, w);
  std::vector<int64_t> panels;
  for (int64_t key = 0; key < p.keys; key += BLOCK) {
    const int64_t count = std::min(BLOCK, p.keys - key);
    transpose(p, head, key, count, w);
    std::fill(w.dk.begin(), w.dk.end(), 0.0f);
    std::fill(w.dv.begin(), w.dv.end(), 0.0f);
    panels.clear();
    for (int64_t panel = 0; panel < p.panels(); ++panel) {
      if (sees(p, head, panel, key, count)) panels.push_back(panel);
      if (panels.size() == TOGETHER || (panel + 1 == p.panels() && !panels.empty())) {
        add_block(p, head, panels, key, count, w);
        panels.clear();
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      const float *dk = w.dk.data() + k * w.q.chunks * PANEL, *dv = w.dv.data() + k * w.d_o.chunks * PANEL;
      convert(dk, p.nope, p.scale, p.dk + p.of_dk.at(head, key + k));
      convert(dk + p.nope, p.rope, p.scale, p.d_rope + p.of_d_rope.at(head, key + k));
      convert(dv, p.value, 1.0f, p.dv + p.of_dv.at(head, key + k));
    }
  }
  std::vector<float> row(p.width());
  for (int64_t i = 0; i < p.queries; ++i) {
    const float* dq = w.dq_of(p, i / PANEL) + i % PANEL;
    for (int64_t c = 0; c < p.width(); ++c) row[c] = dq[c * PANEL];
    convert(row.data(), p.width(), p.scale, p.dq + p.of_dq.at(head, i));
  }
}

}  // namespace

#define STRIDES(name) int64_t name##_sequence, int64_t name##_head, int64_t name##_row
#define OF(name) {name##_sequence, name##_head, name##_row}

extern "C" void kernel(const void* q, const void* d_o, const void* k, const void* k_rope, const void* v,
                       const float* lse, const float* mean, uintptr_t mask, uintptr_t bias, uintptr_t d_bias,
                       void* dq, void* dk, void* d_rope, void* dv, int64_t sequences, int64_t heads, int64_t queries,
                       int64_t keys, int64_t nope, int64_t rope, int64_t value, STRIDES(q), STRIDES(do), STRIDES(k),
                       STRIDES(rope), STRIDES(v), STRIDES(rows), STRIDES(mask), STRIDES(bias), STRIDES(d_bias),
                       STRIDES(dq), STRIDES(dk), STRIDES(d_rope), STRIDES(dv), int64_t mask_key, int64_t offset,
                       float scale, int64_t threads) {
  const Problem p{static_cast<const Number*>(q), static_cast<const Number*>(d_o), static_cast<const Key*>(k),
                  static_cast<const Key*>(k_rope), static_cast<const Key*>(v), lse, mean,
                  reinterpret_cast<const uint8_t*>(mask), reinterpret_cast<const float*>(bias),
                  reinterpret_cast<float*>(d_bias), static_cast<Number*>(dq), static_cast<Key*>(dk),
                  static_cast<Key*>(d_rope), static_cast<Key*>(dv), sequences, heads, queries, keys, nope, rope, value,
                  OF(q), OF(do), OF(k), OF(rope), OF(v), OF(rows), OF(mask), OF(bias), OF(d_bias), OF(dq), OF(dk),
                  OF(d_rope), OF(dv), mask_key, offset, scale};
#pragma omp parallel num_threads(threads)
  {
    Workspace workspace(p);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < sequences * heads; ++task) attend(p, {task / heads, task % heads}, workspace);
  }
}
