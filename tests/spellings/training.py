"""Whether a spelling is rewritten in training, and has the right gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_compile.passes.code.differentiable import OVER_GROUPS
from mla_compile.passes.outcome import Outcome
from tests.training import FACTOR, Rewritten, assert_gradients_close, gradients

from .checks import MISSED, copies, made
from .choices import Spelling
from .module import Attention

CHANCE = 4.0
"""How many times the usual bound the error for one input may be, if it is within the bound for `OTHERS` more."""
OTHERS = 5


def check_training(spelling: Spelling, seed: int) -> Outcome:
    """Rewrite the spelling as a graph that needs gradients, and check every gradient. Returns its outcome.

    Raises:
        AssertionError: if a gradient is too much further from float64 than eager's, or if the graph has an op or a
            recomputation of ours although it was not rewritten, or has none although it was.
    """
    module, inputs = made(spelling, seed)
    module.requires_grad_(True)
    rewritten = Rewritten(module, path="chunked", workspace_tokens=4)
    first = _gradients(module, rewritten, inputs)
    assert len(rewritten.outcomes) <= 1, f"expected one attention, found {len(rewritten.outcomes)}"
    outcome = rewritten.outcomes[0] if rewritten.outcomes else MISSED
    ops = torch.ops.mla.expanded_attention.default, torch.ops.mla.latent_attention.default, OVER_GROUPS
    again = [node for graph in rewritten.graphs for node in graph.graph.nodes if "recompute" in node.meta]
    assert outcome.rewritten == (bool(again) or any(map(rewritten.nodes, ops)))
    try:
        assert_gradients_close(*first)
    except AssertionError:
        # A backward in the manner of flash attention subtracts nearly equal numbers. For one input in some hundreds it
        # loses a digit more than that of a recomputed softmax. A wrong gradient is wrong for other inputs, and by more.
        assert_gradients_close(*first, factor=CHANCE * FACTOR)
        for other in range(1, 1 + OTHERS):
            generator = torch.Generator().manual_seed(seed + other)
            others = module.inputs(generator, getattr(torch, spelling.dtype))
            assert_gradients_close(*_gradients(module, rewritten, others))
    return outcome


def _gradients(module: Attention, rewritten: Rewritten, inputs: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Gradients of the rewritten module, of eager, and in float64.

    The backward of torch's flash attention for CPUs counts every key of a row that a finite number hides everywhere as
    if it had all the weight, so eager attention is that of products and a softmax where there is such a row.
    """
    wide = copy.deepcopy(module).double()
    with sdpa_kernel(SDPBackend.MATH) if module.spelling.blind else nullcontext():
        eager, exact = gradients(module, module, inputs), gradients(wide, wide, copies(inputs, torch.float64))
    return gradients(rewritten, module, inputs), eager, exact
