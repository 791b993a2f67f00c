"""Whether a spelling is rewritten, and right."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

import mla_compile.kernels.register  # noqa: F401  what the ops compute
from mla_compile.passes.outcome import Outcome
from tests.errors import assert_as_close_as_eager
from tests.passes.graphs import capture, rewrite

from .choices import Spelling
from .module import Attention

aten = torch.ops.aten
FACTOR = 8.0
"""A rewritten spelling may be this many times further from float64 than eager. Both distances are the greatest of a few
dozen errors, so chance has a wide field: of 2,000 right ones some are 4 times as far, none 8; a wrong one is off by
thousands."""
PATHS = ("absorbed", "chunked")
_MISSED = Outcome("", "", "", "unchanged", "no attention was found")


class _Sealed(TorchFunctionMode):
    """Attention as `mla_compile.seal` leaves it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v, mask = args
        causal, scale, grouped = kwargs["is_causal"], kwargs["scale"], kwargs["enable_gqa"]
        return torch.ops.mla.sealed_attention(q, k, v, mask, 0.0, causal, scale, grouped)


def made(spelling: Spelling, seed: int) -> tuple[Attention, tuple[Tensor, ...]]:
    """The module of a spelling and its inputs, in the spelling's dtype."""
    torch.manual_seed(seed)
    dtype = getattr(torch, spelling.dtype)
    module = Attention(spelling).to(dtype).requires_grad_(False)
    return module, module.inputs(torch.Generator().manual_seed(seed), dtype)


def graph_of(module: Attention, inputs: Sequence[Tensor]) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """The functional ATen graph of a module, and the tensors that it takes."""
    names = [name for name, _ in module.named_parameters()]
    weights = [weight.detach() for weight in module.parameters()]

    def function(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(names, tensors, strict=False))
        with _Sealed():
            return torch.func.functional_call(module, parameters, tensors[len(names) :])

    tensors = (*weights, *inputs)
    return capture(function, *tensors), tensors


def copies(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies, for what writes to its inputs; floating ones in `dtype`."""
    return [t.to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True) for t in tensors]


def products(module: fx.GraphModule) -> int:
    """How many matrix products of ATen a graph has."""
    kinds = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
    return sum(node.target in kinds for node in module.graph.nodes)


def check(spelling: Spelling, seed: int) -> Outcome:
    """Rewrite the spelling on both paths and check the numbers. Returns the outcome of one of them.

    Raises:
        AssertionError: if a result is further from float64 than eager's, the paths differ in whether they are taken, or
            something of what was rewritten is still computed.
    """
    module, inputs = made(spelling, seed)
    eager = module(*copies(inputs))
    exact = copy.deepcopy(module).double()(*copies(inputs, torch.float64))
    captured, tensors = graph_of(module, inputs)
    outcomes = []
    # Down to the latent and the rope key, to the queries, and out of the heads: what is not of the attention.
    expected = 2 + (spelling.query == "low rank") + (spelling.output != "raw")
    expected += {"no": 0, "keys": 1, "values": 1}.get(spelling.absorbed, 2)
    # Queries times the weights of the keys, which are no operand of an op then, or times rope keys of a head.
    expected += spelling.is_for_few_queries
    if spelling.threes != "no":  # queries that meet weights first are absorbed, as are attention weights and latents
        expected += {*spelling.threes[:2]} == {*"xw"}
        expected += {*spelling.threes[:2]} == {*"xc"}
    # Scores that exist are between products: of queries with latents, with rope keys, and of weights with latents; by
    # heads of latents with weights, of queries with keys, and of weights with values.
    scores = {"absorbed": 3, "chunked": 4 + (spelling.keys == "two scores")}
    # Of two scores a loop over those with rope keys stays, and over values that are the latent.
    loops = (spelling.keys == "two scores") + (spelling.absorbed == "values")
    scores["absorbed"] += loops * ({"no": 1, "heads": spelling.heads}.get(spelling.loop, spelling.batch) - 1)
    for path in PATHS:
        rewritten = fx.GraphModule(captured, copy.deepcopy(captured.graph))
        found = rewrite(rewritten, path)
        # What a loop leaves in pieces is told of piece by piece, where it stays.
        assert len(found) <= 1 or not any(outcome.rewritten for outcome in found), "expected one attention"
        outcomes += found[:1] or [_MISSED]
        assert_as_close_as_eager(rewritten(*copies(tensors)), eager, exact, FACTOR)
        if found and found[0].rewritten:
            kept = spelling.sprinkled == "asserts"  # keys that are looked at exist
            taken = found[0].path  # one query is absorbed whatever path is asked for
            most = expected + (scores[taken] if spelling.needs_scores else 0)
            assert kept or products(rewritten) <= most, f"expected {most} matrix products, found {products(rewritten)}"
            assert spelling.needs_scores or "mla." in rewritten.code
    # For many queries weights that are returned have to exist, as do those that are divided after the values.
    if spelling.is_for_few_queries:
        assert outcomes[1].path in ("unchanged", "absorbed"), "many queries attend to more than a latent"
    elif not spelling.returned and not (spelling.softcap and spelling.softmax == "late"):
        assert outcomes[0].rewritten == outcomes[1].rewritten
    return outcomes[0]
