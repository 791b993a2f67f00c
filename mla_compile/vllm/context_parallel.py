"""Decode context parallelism on CPUs: vLLM's two steps that exist only as Triton kernels, in plain torch.

With `decode_context_parallel_size` ranks, each rank in turn gets `interleave` consecutive tokens of a sequence and
attends to its own tokens. The outputs are added up, each weighted by its share of the sum of exponentials.
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
    """Install both functions in vLLM in this process, on CPUs without Triton, where vLLM would refuse or fail.

    Raises: NotImplementedError for `dcp_comm_backend="a2a"`, another way to exchange outputs.
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
    """The slot at which this rank keeps each token, or -1 if another rank keeps it.

    Args: starts `[B + 1]`, the index of each sequence's first token, and the number of tokens; positions `[tokens]`,
    of each token in its sequence; block_table `[B, blocks]`, whose pages hold `page_size` tokens on each rank; all
    integer.
    Returns: `[tokens]`, int64.
    """
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    block, within = positions // (page_size * ranks), positions % (page_size * ranks)
    turn, of_turn = within // (interleave * ranks), within % (interleave * ranks)
    kept = block_table[sequence, block].long() * page_size + turn * interleave + of_turn % interleave
    return torch.where(of_turn // interleave == rank, kept, -1)


def weigh(o: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Weight a rank's output so that the sum over ranks is the attention to all tokens.

    Args: o `[B, N, L]`, over this rank's tokens; lses `[ranks, B, N]`, natural, -inf where a rank has no token.
    Returns: the weighted output, in o's dtype, and the lse of all tokens `[B, N]`.
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
    """`slots` with the signature of vLLM's kernel."""
    slot_mapping[:tokens] = slots(starts, positions[:tokens], block_table, page_size, ranks, rank, interleave)
    slot_mapping[tokens:] = none


def _weigh(o: Tensor, lses: Tensor, rank: int, _launcher: Any, is_lse_base_on_e: bool = True) -> tuple[Tensor, Tensor]:
    """`weigh` with the signature of the vLLM function that runs before the sum over ranks."""
    if not is_lse_base_on_e:
        raise NotImplementedError(f"{NAME}: on CPUs, expected log-sum-exps of base e from every backend, found base 2")
    return weigh(o, lses, rank)
