// The signature of the kernel in `native.cpp`, shared with its callers.

#include <cstdint>

typedef void ExpandedAttentionKernel(const void* q, const void* k, const void* k_rope, const void* v, uintptr_t bias,
                                     float* o, float* lse, int64_t heads, int64_t queries, int64_t keys, int64_t nope,
                                     int64_t rope, int64_t value, int64_t q_head, int64_t q_row, int64_t k_head,
                                     int64_t k_key, int64_t rope_head, int64_t rope_key, int64_t v_head,
                                     int64_t v_column, int64_t bias_head, int64_t bias_row, int64_t bias_key,
                                     int64_t o_head, int64_t o_row, int64_t lse_head, int64_t lse_row, int64_t offset,
                                     float scale, int64_t threads);
