"""Whether a spelling is rewritten where it is trained, and has the right gradients."""

from __future__ import annotations

import copy

import torch

from mla_compile.passes.code.differentiable import OVER_GROUPS
from mla_compile.passes.outcome import Outcome
from tests.training import Rewritten, assert_gradients_close, gradients

from .checks import _MISSED, copies, made
from .choices import Spelling


def check_training(spelling: Spelling, seed: int) -> Outcome:
    """Rewrite the spelling as a graph that needs gradients, and check every one. Returns what became of it.

    Raises:
        AssertionError: if one is further from float64 than eager's, or what was rewritten has another op than ours.
    """
    module, inputs = made(spelling, seed)
    module.requires_grad_(True)
    wide = copy.deepcopy(module).double()
    eager = gradients(module, module, inputs)
    exact = gradients(wide, wide, copies(inputs, torch.float64))
    rewritten = Rewritten(module, path="chunked", workspace_tokens=4)
    found = gradients(rewritten, module, inputs)
    assert len(rewritten.outcomes) <= 1, f"expected one attention, found {len(rewritten.outcomes)}"
    outcome = rewritten.outcomes[0] if rewritten.outcomes else _MISSED
    ops = torch.ops.mla.expanded_attention.default, torch.ops.mla.latent_attention.default, OVER_GROUPS
    again = [node for graph in rewritten.graphs for node in graph.graph.nodes if "recompute" in node.meta]
    assert outcome.rewritten == (bool(again) or any(map(rewritten.nodes, ops)))
    assert_gradients_close(found, eager, exact)
    return outcome
