"""Products of latents that were themselves rounded to few bits, and so are not the latent that is used elsewhere.

key = (int8(latent / s) @ int8 weight) * s * scale          an op of its own, whose integers or floats are then scaled
"""

from __future__ import annotations

from torch import fx

from ..algebra.terms import Term
from ..nodes.arguments import aten, is_elementwise
from ..nodes.source import where
from ..trace.trace import Trace
from .multiplied import held_by

_PRODUCTS = {
    aten._int_mm.default,
    aten._scaled_mm.default,
    aten._weight_int4pack_mm.default,
    aten._weight_int4pack_mm_for_cpu.default,
    aten._weight_int8pack_mm.default,
}
_STEPS = 12
"""How many steps to look back from keys or values for the product: scales, zero points and casts take about five."""

REMEDY = (
    "quantise only the weight of this projection, not its latents (a weight-only configuration), or leave the "
    "projection out (torchao: filter_fn of quantize_)"
)


def product_in_few_bits(term: Term, trace: Trace) -> str | None:
    """What a term was made of, in words, if that is a product in few bits; None if it is not."""
    edge = {term.read.source} if isinstance(term.read.source, fx.Node) else set[fx.Node]()
    for _ in range(_STEPS):
        for node in edge:
            if node.target in _PRODUCTS:
                return f"a product of quantised numbers, `{node.target}` in {where(node)}"
        edge = {held_by(operand, trace) for node in edge if is_elementwise(node) for operand in node.all_input_nodes}
    return None
