// Absorbed attention of many queries without a mask, like `latent_attention/many_queries.py`: to the kernel of expanded
// attention, latents are keys and values, and all heads are one, of N rows for each query.

namespace {

constexpr int64_t KEYS_AT_A_TIME = 4096;
constexpr int64_t FEWEST_KEYS = 128;      // below, matrix products are faster in float32, unless a limit hides keys
constexpr int64_t ROWS_OF_A_THREAD = 32;  // at least so many rows per thread keep all threads busy

// Whether this is faster for queries `[B, Sq, N, .]` of so many keys than the kernel for a few rows, and than the general
// implementation.
bool are_many(const Tensor& q, int64_t tokens, bool limited, const OfChunks& chunks) {
  const int64_t rows = q.size(1) * q.size(2);
  const bool enough = rows > std::max(MOST_ROWS_OF_ATTENTION, ROWS_OF_A_THREAD * at::get_num_threads());
  const bool products_lose = q.scalar_type() != at::kFloat || limited || tokens >= FEWEST_KEYS || alone();
  return chunks.kernel && tokens > 0 && enough && products_lose;
}

// The same rows with a last stride of 1.
Tensor dense(const Tensor& rows) { return rows.size(-1) > 1 && rows.stride(-1) != 1 ? rows.contiguous() : rows; }

// One sequence: q `[Sq, N, L]` and `[Sq, N, R]`. Fills the output `[Sq, N, L]` and lse `[Sq, N]`, -inf at first, of
// queries that see a key.
void attend_many(const OfChunks& chunks, const Tensor& q_latent, const Tensor& q_rope, const Sequence& sequence,
                 float scale, const Tensor& output, const Tensor& lse) {
  const int64_t queries = q_latent.size(0), heads = q_latent.size(1), rank = q_latent.size(2), rope = q_rope.size(2);
  const Seen& seen = sequence.seen;
  const Sums sums(output, seen.stop <= KEYS_AT_A_TIME);
  for (int64_t start = 0; start < seen.stop; start += KEYS_AT_A_TIME) {
    const int64_t count = std::min(KEYS_AT_A_TIME, seen.stop - start);
    const auto [k, ropes] = sequence.load({0, heads}, start, count, chunks.dtype);
    const Tensor v = rows_in(room_for(k, rank, count), rank, count).copy_(k.t());
    chunks.kernel(q_latent.data_ptr(), q_rope.data_ptr(), k.data_ptr(), ropes.data_ptr(), v.data_ptr(), 0,
                  sums.of_chunks.data_ptr(), lse.data_ptr<float>(), 1, queries * heads, heads, count, rank, rope, rank,
                  0, q_latent.stride(0), q_latent.stride(1), 0, q_rope.stride(0), q_rope.stride(1), 0, k.stride(0), 0,
                  ropes.stride(0), 0, v.stride(0), 0, 0, 0, 0, rank, 0, 1, seen.offset - start, sums.whole, scale,
                  at::get_num_threads());
  }
  sums.finish();
}

// o and lse of queries `[B, Sq, N, L]` and `[B, Sq, N, R]`, and one sequence of keys for each b.
Attended attend_many_queries(const OfChunks& chunks, const Tensor& q_latent, const Tensor& q_rope,
                             const std::vector<Sequence>& sequences, double scale) {
  const Tensor q = dense(q_latent), q_of_rope = dense(q_rope);
  bool all_see = true;  // the kernel leaves queries alone that see no key
  for (const Sequence& sequence : sequences) all_see = all_see && sequence.seen.stop > 0 && sequence.seen.offset >= 0;
  const Tensor o = all_see ? at::empty(q.sizes(), q.options()) : at::zeros(q.sizes(), q.options());
  const Tensor lse = at::full(q.sizes().slice(0, 3), -INFINITY, q.options().dtype(at::kFloat));
  for (const Sequence& sequence : sequences) {
    const int64_t b = sequence.b;
    attend_many(chunks, q[b], q_of_rope[b], sequence, static_cast<float>(scale), o[b], lse[b]);
  }
  return {o, lse};
}

}  // namespace
