"""TensorRT-LLM's decode for Blackwell, as shipped by FlashInfer (github.com/flashinfer-ai/flashinfer, 0.7).

From its sources: it takes bfloat16 on sm_100 and sm_103, widths 512 and 64 in one row, pages of 32 or 64 tokens, int32
table and lengths, with lengths on the device and their bound on the host; lse is `[B Sq, N]`, in a base that can be
chosen. The kernels are binaries: the trial tells what a row without keys gives, and whether what lies after the last
key is multiplied.

FlashInfer's `BatchMLAPagedAttentionWrapper` is not used, because its `plan` copies lengths to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .implementation import Function, Implementation
from .pages import Takes, numbers_of, rows_of

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

_WORKSPACE = 128 << 20
"""Bytes, from its documentation, which requires zeros only before the first use."""
_NOPE = 128
"""The width of queries before absorption, which FlashInfer only checks."""
_workspaces: dict[torch.device, dict[int, Tensor]] = {}
"""Of each device and stream."""


def _workspace(device: torch.device) -> Tensor:
    """The workspace of the current stream: calls on two streams may run at once.

    While a graph is captured, none is made that could be had: only a replay would fill it with zeros, and no other
    graph's. A graph that is captured on a stream of its own takes the device's first one, that of the warm-up.
    """
    known = _workspaces.setdefault(device, {})
    stream, captured = _stream(device)
    if stream not in known and not (captured and known):
        known[stream] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    return known[stream] if stream in known else next(iter(known.values()))


def _stream(device: torch.device) -> tuple[int, bool]:
    """The handle of the current stream, and whether a graph is being captured on it."""
    if device.type != "cuda":
        return 0, False
    with torch.cuda.device(device):
        return torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()


def _attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    batch, queries, heads, rank = x.q_latent.shape
    table, lengths = numbers_of(x)
    o, lse = module.trtllm_batch_decode_with_kv_cache_mla(
        query=torch.cat([x.q_latent, x.q_rope], dim=-1),
        kv_cache=rows_of(x),
        workspace_buffer=_workspace(x.q_latent.device),
        qk_nope_head_dim=_NOPE,
        kv_lora_rank=rank,
        qk_rope_head_dim=x.q_rope.shape[3],
        block_tables=table,
        seq_lens=lengths,
        max_seq_len=table.shape[1] * x.latent_pages.shape[1],
        bmm1_scale=x.scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",
        return_lse=True,
        return_lse_base="basee",
    )
    return o.reshape(x.q_latent.shape).contiguous(), lse.reshape(batch, queries, heads).contiguous()


TRTLLM_GEN = Implementation(
    name="FlashInfer's trtllm-gen",
    homes=("flashinfer.mla",),
    functions=(
        Function(
            "trtllm_batch_decode_with_kv_cache_mla",
            (
                "query",
                "kv_cache",
                "workspace_buffer",
                "qk_nope_head_dim",
                "kv_lora_rank",
                "qk_rope_head_dim",
                "block_tables",
                "seq_lens",
                "max_seq_len",
                "bmm1_scale",
                "bmm2_scale",
                "backend",
                "return_lse",
                "return_lse_base",
            ),
        ),
    ),
    attend=_attend,
    architectures=("sm_100", "sm_103"),
    limits=Takes(dtypes=(torch.bfloat16,), widths=(512, 64), page_sizes=(32, 64), most_queries=1),
)
