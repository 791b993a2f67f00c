"""Describe up-projections that were multiplied by something that differs between keys, or normed.

key[b, n, t] = (latent[b, t] W_UK[n]) * gate[b, n, t]        MLA, if the gate were the same for all heads
key[b, n, t] = (latent[b, t] W_UK[n]) * r[b, n, t]           r = rsqrt(mean of its squares): a norm of each head

A norm scales the score: q . (W_UK c) r(n, t). But r is made of all of W_UK c, which takes P L multiply-adds a head and
key, or L L as the quadratic form c^T (W_UK^T W_UK) c: the up-projection that absorbing leaves out, at every step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from ..algebra.terms import Product, Term
from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.shapes import shape_of
from ..nodes.source import where
from ..trace.trace import Trace

NORM = "norm the latent before the up-projection: a norm after it needs all that absorbing would leave out"
"""The remedy for a norm of up-projections."""
_NORMS = {aten._fused_rms_norm.default, aten.native_layer_norm.default}
_MULTIPLY = {aten.mul.Tensor, aten.div.Tensor}
_DEPTH = 12
"""How many steps to look back from a factor for the product that it is made of: a norm takes about five."""


@dataclass(frozen=True)
class MultipliedProduct:
    """A product that was multiplied by `factor`, or normed by it."""

    factor: fx.Node
    is_norm: bool
    """Whether the factor is made of the product."""

    @property
    def found(self) -> str:
        """What was found, in words."""
        if self.is_norm:
            return f"an up-projection of each head times {where(self.factor)}, which is computed from it as in a norm"
        return f"an up-projection times {where(self.factor)}"

    @property
    def remedy(self) -> str:
        """What would let it be rewritten."""
        if self.is_norm:
            return NORM
        return "multiply by one number of each key for all heads, which is then applied to the latent"


def multiplied_product(term: Term, trace: Trace) -> MultipliedProduct | None:
    """What an up-projection was multiplied by, if a term is one with nothing else done to it."""
    source = term.read.source
    return _multiplied(source, trace, 0) if isinstance(source, fx.Node) and term.parts is None else None


def _multiplied(node: fx.Node, trace: Trace, depth: int) -> MultipliedProduct | None:
    node = held_by(node, trace)
    if depth == _DEPTH or node.op != "call_function":
        return None
    operands = [operand for operand in arguments(node)[:2] if is_tensor(operand)]
    if node.target is operator.getitem:
        (norm,) = node.all_input_nodes
        if norm.target in _NORMS and _product(arguments(norm)[0], trace):
            return MultipliedProduct(norm, is_norm=True)
        return None
    if node.target not in _MULTIPLY or len(operands) != 2:
        return None
    for whole, factor in (operands, operands[::-1]):
        if shape_of(whole) != shape_of(node):
            continue
        if _product(whole, trace):
            return MultipliedProduct(factor, is_norm=held_by(whole, trace) in _before(factor, trace))
        if (within := _multiplied(whole, trace, depth + 1)) is not None:
            return within
    return None


def is_made_of(factor: Term, whole: Term, trace: Trace) -> bool:
    """Whether what multiplies a term is made of that term, as in a norm."""
    by, of = factor.read.source, whole.read.source
    return isinstance(by, fx.Node) and isinstance(of, fx.Node) and held_by(of, trace) in _before(by, trace)


def held_by(node: fx.Node, trace: Trace) -> fx.Node:
    """The tensor whose elements a node holds."""
    return trace.source(node) or node


def _product(node: fx.Node, trace: Trace) -> bool:
    return isinstance(trace[node].term.parts, Product)


def _before(node: fx.Node, trace: Trace) -> set[fx.Node]:
    """What a node is made of, up to `_DEPTH` steps back."""
    found, edge = {node}, {node}
    for _ in range(_DEPTH):
        edge = {held_by(operand, trace) for each in edge for operand in each.all_input_nodes} - found
        found |= edge
    return found
