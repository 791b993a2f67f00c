"""The bundle of arguments (`arguments.py`) of each op."""

from mla_compile.kernels.append_latents.arguments import AppendLatents
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention, ExpandedAttentionBackward
from mla_compile.kernels.grow_cache.arguments import GrowCache
from mla_compile.kernels.index_scores.arguments import IndexScores
from mla_compile.kernels.latent_attention.arguments import LatentAttention, LatentAttentionBackward
from mla_compile.kernels.merge_states.arguments import MergeStates
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.per_head_matmul.arguments import PerHeadMatmul
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention
from mla_compile.kernels.widened_matmul.arguments import WidenedMatmul

BUNDLES = {
    "append_latents": AppendLatents,
    "expanded_attention": ExpandedAttention,
    "expanded_attention_backward": ExpandedAttentionBackward,
    "grow_cache": GrowCache,
    "index_scores": IndexScores,
    "latent_attention": LatentAttention,
    "latent_attention_backward": LatentAttentionBackward,
    "merge_states": MergeStates,
    "paged_expanded_attention": PagedExpandedAttention,
    "paged_latent_attention": PagedLatentAttention,
    "per_head_matmul": PerHeadMatmul,
    "sparse_latent_attention": SparseLatentAttention,
    "widened_matmul": WidenedMatmul,
}
