// Calls the kernel of attention over cached keys, like `latent_attention/cached.py`.

namespace {

constexpr int64_t MOST_ROWS_OF_ATTENTION = 256;  // queries times heads up to which this beats matrix products

typedef std::atomic<LatentAttentionKernel*> LatentAttentionEntry;
std::array<LatentAttentionEntry, DTYPES * DTYPES * DTYPES> latent_attention_kernels;

typedef std::tuple<Tensor, Tensor> Attended;

// The kernel for queries and keys of these dtypes, null if none was provided.
LatentAttentionKernel* attention_kernel(const Tensor& q, const Tensor& latent, const Tensor& k_rope) {
  int64_t index = 0;
  for (const Tensor& tensor : {q, latent, k_rope}) {
    const int64_t dtype = place(tensor.scalar_type());
    if (dtype < 0) return nullptr;
    index = index * DTYPES + dtype;
  }
  return latent_attention_kernels[index].load();
}

// Keys `[batches, pages, page_size, .]` of sequences: key j of sequence s is `[s / queries, table[s, j / page_size],
// j % page_size]`; without a table (null) the page is 0.
struct CachedKeys {
  const Tensor &latent, &k_rope;
  std::array<int64_t, 3> latent_strides, rope_strides;
  int64_t queries, page_size;
  const int64_t* table = nullptr;
  int64_t table_row = 0;
  Tensor scales;  // none, or `[batches, pages, page_size, groups]`
};

// What is added to scores, float32, and its strides; null for nothing.
struct Bias {
  const float* numbers = nullptr;
  int64_t sequence = 0, query = 0, head = 0, key = 0;
};

// The same of `[B or 1, N or 1, Sq or 1, keys]`, or of an undefined tensor. It has to outlive the call.
Bias bias_of(const Tensor& bias) {
  if (!bias.defined()) return {};
  const auto stride = [&](int64_t dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
  return {bias.const_data_ptr<float>(), stride(0), stride(2), stride(1), stride(3)};
}

// Operands and results of calls of the kernel, for all sequences of q `[sequences, queries, heads, .]` or some of them.
struct Call {
  LatentAttentionKernel* kernel;
  Tensor q_latent, q_rope, o, lse;
  int64_t queries;
  float scale;

  Call(LatentAttentionKernel* k, const Tensor& latent, const Tensor& rope, int64_t query_count, double by)
      : kernel(k), q_latent(latent.contiguous()), q_rope(rope.contiguous()),
        o(at::empty(latent.sizes(), latent.options())),
        lse(at::empty(latent.sizes().slice(0, 3), latent.options().dtype(at::kFloat))), queries(query_count),
        scale(static_cast<float>(by)) {}

  // Runs the kernel for the queries of some sequences and the keys, the bias and so on of just these: `keys` keys each,
  // or `lengths` unless empty; unless `offsets` are empty, query i sees keys up to i + offset. The cache is read from
  // `latent_start` and `rope_start` numbers after its first.
  void run(const CachedKeys& cached, int64_t first, int64_t sequences, int64_t keys,
           const std::vector<int64_t>& lengths, const std::vector<int64_t>& offsets, const Bias& bias = {},
           int64_t latent_start = 0, int64_t rope_start = 0) const {
    const int64_t heads = q_latent.size(2), rank = q_latent.size(3), rope = q_rope.size(3), rows = queries * heads;
    const bool scaled = cached.scales.defined();
    const auto moved = [](const Tensor& tensor, int64_t numbers) {
      return static_cast<char*>(tensor.data_ptr()) + numbers * tensor.element_size();
    };
    const auto& [latent_batch, latent_page, latent_key] = cached.latent_strides;
    const auto& [rope_batch, rope_page, rope_key] = cached.rope_strides;
    const auto stride = [&](int64_t dim) { return scaled ? cached.scales.stride(dim) : 0; };
    const auto numbers = [](const std::vector<int64_t>& of) {
      return reinterpret_cast<uintptr_t>(of.empty() ? nullptr : of.data());
    };
    kernel(moved(q_latent, first * rows * rank), moved(q_rope, first * rows * rope),
           moved(cached.latent, latent_start), moved(cached.k_rope, rope_start), moved(o, first * rows * rank),
           moved(lse, first * rows), scaled ? reinterpret_cast<uintptr_t>(cached.scales.data_ptr()) : 0,
           reinterpret_cast<uintptr_t>(cached.table), numbers(lengths), numbers(offsets),
           reinterpret_cast<uintptr_t>(bias.numbers), sequences, heads, rows, keys, rank, rope, cached.queries,
           cached.page_size, cached.table_row, scaled ? cached.scales.size(3) : 1, latent_batch, latent_page,
           latent_key, rope_batch, rope_page, rope_key, stride(0), stride(1), stride(2), stride(3), bias.sequence,
           bias.query, bias.head, bias.key, scale, at::get_num_threads());
  }
};

// Whether q_latent and q_rope `[., ., N, .]` fit each other.
bool queries_fit(const Tensor& q_latent, const Tensor& q_rope) {
  return q_rope.sizes().slice(0, 3) == q_latent.sizes().slice(0, 3);
}

// Whether the kernel takes so many rows of queries.
bool are_few(int64_t rows) { return 0 < rows && (rows <= MOST_ROWS_OF_ATTENTION || alone()); }

// Keys `[., ., .]`, copied if the kernel could not read them and there is no general implementation that could.
Tensor readable(const Tensor& keys) {
  return alone() && keys.dim() == 3 && keys.size(2) > 1 && keys.stride(2) != 1 ? keys.contiguous() : keys;
}

// How many columns latents have.
int64_t rank_of(const Tensor& latent) { return latent.size(2) * (latent.scalar_type() == at::kByte ? 2 : 1); }

// Whether keys `[., ., L]` and `[., ., R]` fit each other, and have the strides that the kernel requires.
bool keys_fit(const Tensor& latent, const Tensor& k_rope, int64_t rank, int64_t rope) {
  const bool readable = (rank < 2 || latent.stride(2) == 1) && (rope < 2 || k_rope.stride(2) == 1);
  return readable && rank_of(latent) == rank && k_rope.size(2) == rope &&
         k_rope.sizes().slice(0, 2) == latent.sizes().slice(0, 2) && latent.device().is_cpu() &&
         k_rope.device().is_cpu();
}

// Whether keys have the dtype of q, or are FP8, INT8 or INT4 with suitable scales.
bool dtypes_fit(const Tensor& q, const Tensor& latent, const Tensor& k_rope, const std::optional<Tensor>& scales) {
  if (!is_given(scales)) return alike(q, {latent, k_rope});
  const bool shaped = scales->dim() == 3 && scales->scalar_type() == at::kFloat && scales->device().is_cpu() &&
                      scales->size(2) > 0 && latent.size(2) % scales->size(2) == 0 &&
                      broadcasts(*scales, {latent.size(0), latent.size(1), scales->size(2)});
  const bool in_bytes = latent.scalar_type() == at::kFloat8_e4m3fn || latent.scalar_type() == at::kChar;
  return shaped && (in_bytes || latent.scalar_type() == at::kByte) &&
         (k_rope.scalar_type() == q.scalar_type() ||
          (in_bytes && k_rope.scalar_type() == latent.scalar_type() && scales->size(2) == 1));
}

// Scales expanded to `[a, b, groups]` for keys `[a, b, .]`; undefined if there are none.
Tensor scales_of(const std::optional<Tensor>& scales, const Tensor& latent) {
  return is_given(scales) ? scales->expand({latent.size(0), latent.size(1), -1}) : Tensor();
}

// int32 or int64 numbers.
struct Integers {
  const void* data;
  bool wide;

  explicit Integers(const Tensor& tensor) : data(tensor.data_ptr()), wide(tensor.scalar_type() == at::kLong) {}

  static bool fit(const Tensor& tensor) {
    return tensor.device().is_cpu() && (tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt);
  }

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace
