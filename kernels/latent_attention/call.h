// The signature of the kernel in `native.cpp`, shared with its callers.

#include <cstdint>

typedef void LatentAttentionKernel(
    const void* q_latent, const void* q_rope, const void* latent, const void* k_rope, void* o, void* lse,
    uintptr_t scales, uintptr_t table, uintptr_t lengths, uintptr_t offsets, uintptr_t bias, int64_t sequences,
    int64_t heads, int64_t rows, int64_t keys, int64_t rank, int64_t rope, int64_t queries, int64_t page_size,
    int64_t table_row, int64_t groups, int64_t latent_batch, int64_t latent_page, int64_t latent_key,
    int64_t rope_batch, int64_t rope_page, int64_t rope_key, int64_t scales_batch, int64_t scales_page,
    int64_t scales_key, int64_t scales_group, int64_t bias_sequence, int64_t bias_query, int64_t bias_head,
    int64_t bias_key, float scale, int64_t threads);
