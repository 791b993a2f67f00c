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
from .module import HIDDEN, Attention

aten = torch.ops.aten
FACTOR = 8.0
"""How many times as far from float64 as eager a rewritten spelling may be.

Each distance is the greatest of only a few dozen errors, so their quotient varies. Among 2,000 correct spellings it
reaches 4 for some and 8 for none; for a wrong one it is in the thousands.
"""
PATHS = ("absorbed", "chunked")
MISSED = Outcome("", "", "", "unchanged", "no attention was found")


class _Sealed(TorchFunctionMode):
    """Writes SDPA as `mla_compile.dynamo.seal` does."""

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
    """Copies, since modules may write to their inputs; floating ones in `dtype`."""
    return [t.to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True) for t in tensors]


def products(module: fx.GraphModule) -> int:
    """How many matrix products of ATen a graph has."""
    kinds = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
    return sum(node.target in kinds for node in module.graph.nodes)


def check(spelling: Spelling, seed: int) -> Outcome:
    """Rewrite the spelling on both paths and check the results. Returns the outcome of the absorbed path.

    Raises:
        AssertionError: if a result is too much further from float64 than eager's, if only one of the paths is taken, or
            if products that the rewrite replaces are still in the graph.
    """
    module, inputs = made(spelling, seed)
    eager = module(*copies(inputs))
    exact = copy.deepcopy(module).double()(*copies(inputs, torch.float64))
    captured, tensors = graph_of(module, inputs)
    outcomes = []
    # Products outside the attention: down to the latent and the rope key, to the queries, and the output.
    expected = 2 + (spelling.query == "low rank") + (spelling.output != "raw")
    expected += {"no": 0, "keys": 1, "values": 1}.get(spelling.absorbed, 2)
    # What multiplies keys and values multiplies queries and outputs, or the weights; and the biases of the values.
    of_latents = 1 + (spelling.spoiled == "residual")
    expected += 0 if spelling.mapped == "no" else 1 + of_latents * (1 + spelling.bias)
    # Where a function of the scores sees them, also the biases of the keys.
    expected += spelling.mapped != "no" and spelling.bias and spelling.needs_scores
    # Hidden states that nothing norms are one latent for all groups, if that is narrower than theirs together.
    plain = spelling.latent == "plain" and spelling.cache == "none"
    expected += 2 * (spelling.latents == "groups" and plain and spelling.rank > HIDDEN)
    # Queries times the keys' weights, which no op takes if there are two latents, or times the rope keys of each head.
    expected += spelling.has_two_latents or spelling.has_own_ropes
    expected += 2 * (spelling.spoiled == "gate" and spelling.latents != "one")  # in each group, if it is rewritten
    if spelling.threes != "no":  # these orders absorb by hand
        expected += {*spelling.threes[:2]} == {*"xw"}
        expected += {*spelling.threes[:2]} == {*"xc"}
    # Products beside scores that exist. Absorbed: queries times latents, queries times rope keys, attention weights
    # times latents. By heads: latents times weights, queries times keys, attention weights times values.
    scores = {"absorbed": 3, "chunked": 4 + (spelling.keys == "two scores")}
    # If there are two scores, the loop over those of the rope keys stays; so does one over values that are the latent.
    loops = (spelling.keys == "two scores") + (spelling.absorbed == "values")
    scores["absorbed"] += loops * ({"no": 1, "heads": spelling.heads}.get(spelling.loop, spelling.batch) - 1)
    for path in PATHS:
        rewritten = fx.GraphModule(captured, copy.deepcopy(captured.graph))
        found = rewrite(rewritten, path)
        # A loop that is left unchanged has one outcome for each of its pieces.
        assert len(found) <= 1 or not any(outcome.rewritten for outcome in found), "expected one attention"
        outcomes += found[:1] or [MISSED]
        assert_as_close_as_eager(rewritten(*copies(tensors)), eager, exact, FACTOR)
        if found and found[0].rewritten:
            kept = spelling.sprinkled == "asserts"  # the keys that are asserted about have to exist
            taken = found[0].path  # one query is absorbed whatever path is asked for
            most = expected + (scores[taken] if spelling.needs_scores else 0)
            assert kept or products(rewritten) <= most, f"expected {most} matrix products, found {products(rewritten)}"
            assert spelling.needs_scores or "mla." in rewritten.code
    # For many queries, attention weights stay if they are returned, or divided after the product with the values.
    if not spelling.returned and not (spelling.softcap and spelling.softmax == "late"):
        assert outcomes[0].rewritten == outcomes[1].rewritten
    return outcomes[0]
