"""Write the products that ops of libraries compute as the weight, then a product with it.

Before   k = bitsandbytes::gemm_4bit(latent, codes, absmax, ...)
After    k = latent @ bitsandbytes::dequantize_4bit(codes, absmax, ...).T

These ops multiply by a weight that is stored in few bits, and nowhere in the graph is it a tensor that could be
absorbed. Where it is not, they stay: they read fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..code.reading import nodes_of
from ..mla.site import Site
from ..nodes.arguments import all_arguments, is_tensor
from .packed_weights import int4_pack, is_known, nf4_pack

Weight = Callable[[Mapping[str, Any]], Tensor]
"""The weight `[N, K]` of an op, from its arguments by their names."""


def _in_bytes(weight: str, scales: str) -> Weight:
    """Weights of a byte each with a scale for each of their rows: quanto, and `torch._weight_int8pack_mm`."""

    def dequantized(given: Mapping[str, Any]) -> Tensor:
        scale: Tensor = given[scales]
        return given[weight].to(scale.dtype) * scale.reshape(-1, 1)

    return dequantized


def _in_4_bits(given: Mapping[str, Any]) -> Tensor:
    """Weights of bitsandbytes, whose scales may be stored in 8 bits themselves (`bnb_4bit_use_double_quant`)."""
    ops, absmax = torch.ops.bitsandbytes, given["absmax"]
    if given["absmax_8bit"] is not None:
        of_scales = given["absmax_8bit"], absmax, given["absmax_code"], 256, torch.float32
        absmax = ops.dequantize_blockwise.default(*of_scales) + given["absmax_offset"]
    coded = given["B"], absmax, given["blocksize"], given["quant_type"], given["shapeB"]
    return ops.dequantize_4bit.default(*coded, given["A"].dtype)


_WEIGHTS: Mapping[str, Weight] = {
    "aten::_weight_int4pack_mm_for_cpu": int4_pack,
    "aten::_weight_int8pack_mm": _in_bytes("mat2", "scales"),
    "bitsandbytes::gemm_4bit": _in_4_bits,
    "bitsandbytes::gemv_4bit": nf4_pack,
    "quanto::qbytes_mm": _in_bytes("B", "scales"),
}
"""The ops, each of which multiplies its first argument by the weight."""


@dataclass(frozen=True)
class LibraryProduct:
    """The product `place` of a library; called with the values of its `sources`."""

    place: fx.Node

    @property
    def sources(self) -> list[fx.Node]:
        """Its operands."""
        return self.place.all_input_nodes

    def __call__(self, *values: Any) -> Tensor:
        """The same product, with the weight as a tensor."""
        known = dict(zip(self.sources, values, strict=True))
        given = {name: fx.map_arg(value, known.__getitem__) for name, value in _arguments(self.place).items()}
        rows = next(iter(given.values()))
        weight = _WEIGHTS[_name(self.place)](given).to(rows.dtype)
        return F.linear(rows, weight, given.get("bias")).to(self.place.meta["val"].dtype)

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether a site absorbs, or up-projects by, the weight."""
        owners = [own for site in sites for own in (site, site.of_keys) if own is not None]
        weights = [own.w_uk for own in owners] + [site.w_uv for site in sites]
        return any(node in added for weight in weights if weight is not None for node in nodes_of(weight))


def may_be_library_product(node: fx.Node) -> bool:
    """Whether a node is an op that multiplies numbers, not codes, by a weight whose layout is known."""
    if _name(node) not in _WEIGHTS or not is_tensor(node):
        return False
    given = fx.map_arg(_arguments(node), lambda operand: operand.meta["val"])
    return next(iter(given.values())).is_floating_point() and is_known(_name(node), given)


def library_products_in(graph: fx.Graph) -> Iterator[LibraryProduct]:
    """The products of a graph that ops of libraries compute."""
    yield from (LibraryProduct(node) for node in graph.nodes if may_be_library_product(node))


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    return all_arguments(node, node.target)
