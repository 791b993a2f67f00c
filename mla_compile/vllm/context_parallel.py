"""Tokens of a sequence shared out over ranks, on CPUs: what vLLM does there in Triton kernels alone, in plain torch.

With `decode_context_parallel_size` ranks, `interleave` tokens one after another go to a rank, then as many to the next.
Each rank attends to its own; their outputs are added up, each weighed by its share of all weights.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import NAME

_SLOTS = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


@functools.cache
def install() -> None:
    """Give vLLM both functions in this process, where it has no Triton for CPUs and so refuses, or none to call.

    Raises: NotImplementedError where ranks shall exchange outputs by `dcp_comm_backend="a2a"`.
    """
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cpu():
        return
    exchange = get_current_vllm_config().parallel_config.dcp_comm_backend
    if exchange != "ag_rs":
        raise NotImplementedError(f"{NAME}: on CPUs, expected dcp_comm_backend ag_rs, found {exchange}")
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.attention.ops import dcp

    register_kernels({_SLOTS: _write_slots})
    dcp.correct_attn_out = _weigh


def slots(
    starts: Tensor, positions: Tensor, block_table: Tensor, page_size: int, ranks: int, rank: int, interleave: int
) -> Tensor:
    """Where this rank keeps each token: its slot, or -1 where another rank keeps it.

    Args: starts `[B + 1]`, the first token of every sequence and their end; positions `[tokens]`, of each in its
    sequence; block_table `[B, blocks]`, of pages that hold `page_size` tokens on every rank; integers all.
    Returns: `[tokens]`, int64.
    """
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    block, within = positions // (page_size * ranks), positions % (page_size * ranks)
    turn, of_turn = within // (interleave * ranks), within % (interleave * ranks)
    kept = block_table[sequence, block].long() * page_size + turn * interleave + of_turn % interleave
    return torch.where(of_turn // interleave == rank, kept, -1)


def weigh(o: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's share of the output, which only has to be added to the others'.

    Args: o `[B, N, L]`, over this rank's tokens; lses `[ranks, B, N]`, natural, -inf where a rank has no token.
    Returns: the share, of o's dtype, and the lse of all tokens `[B, N]`.
    """
    lse = lses.logsumexp(0)
    share = (lses[rank] - lse).exp().masked_fill(lses[rank] == -torch.inf, 0)
    return (o * share[..., None]).to(o.dtype), lse


def _write_slots(
    tokens: int,
    _max_tokens: int,
    starts: Tensor,
    positions: Tensor,
    block_table: Tensor,
    _stride: int,
    slot_mapping: Tensor,
    page_size: int,
    ranks: int,
    rank: int,
    interleave: int,
    none: int,
    _threads: int,
) -> None:
    """What vLLM calls, its kernel's arguments in their order."""
    slot_mapping[:tokens] = slots(starts, positions[:tokens], block_table, page_size, ranks, rank, interleave)
    slot_mapping[tokens:] = none


def _weigh(o: Tensor, lses: Tensor, rank: int, _launcher: Any, is_lse_base_on_e: bool = True) -> tuple[Tensor, Tensor]:
    """What vLLM calls before it adds up."""
    if not is_lse_base_on_e:
        raise NotImplementedError(f"{NAME}: on CPUs, expected a natural lse of every backend, found one of base 2")
    return weigh(o, lses, rank)
