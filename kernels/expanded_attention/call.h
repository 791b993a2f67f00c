// The signature of the kernel in `native.cpp`, shared with its callers.

#include <cstdint>

typedef void ExpandedAttentionKernel(const void* q, const void* q_rope, const void* k, const void* k_rope,
                                     const void* v, uintptr_t bias, void* o, float* lse, int64_t heads, int64_t rows,
                                     int64_t sharers, int64_t keys, int64_t nope, int64_t rope, int64_t value,
                                     int64_t q_head, int64_t q_query, int64_t q_sharer, int64_t q_rope_head,
                                     int64_t q_rope_query, int64_t q_rope_sharer, int64_t k_head, int64_t k_key,
                                     int64_t rope_head, int64_t rope_key, int64_t v_head, int64_t v_column,
                                     int64_t bias_head, int64_t bias_query, int64_t bias_sharer, int64_t o_head,
                                     int64_t o_row, int64_t lse_head, int64_t lse_row, int64_t offset, int64_t whole,
                                     float scale, int64_t threads);
