"""Sketch the part of a graph that makes up an attention as a few boxes and arrows, without views and copies.

An arrow stands for a tensor, and its kind follows from its origins. A tensor computed from the latent and a weight, but
not from queries, is expanded: it holds each head's projection of each key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mla_compile.kernels._common.sizes import expected
from mla_compile.passes.algebra.terms import Read, Scaled, Unread, made_of
from mla_compile.passes.mla.apart import up_projected_apart
from mla_compile.passes.nodes.arguments import is_tensor
from mla_compile.passes.nodes.common_subexpressions import CommonSubexpressions

from .collect import Proved

Kind = Literal["latent", "weight", "query", "mask", "expanded", "output"]

VIEWS = {
    "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "contiguous", "detach", "expand", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
JOINS = {"cat", "slice_scatter", "select_scatter", "constant_pad_nd", "stack"}
BLANKS = {"new_empty", "empty", "full", "zeros", "new_zeros", "zeros_like", "empty_like"}
TITLES = {
    "sealed_attention": "attention",
    "latent_attention": "latent attention",
    "paged_latent_attention": "paged latent attention",
    "sparse_latent_attention": "sparse latent attention",
    "expanded_attention": "chunked attention",
    "paged_expanded_attention": "chunked attention over pages",
    "per_head_matmul": "product per head",
    "mm": "product",
    "bmm": "product",
    "addmm": "product",
    "_softmax": "softmax",
    **dict.fromkeys(JOINS, "join"),
}
WIDEST = 40
"""The largest number of boxes that are drawn; for larger parts of a graph, the code is clearer."""


@dataclass(frozen=True)
class Box:
    """An input tensor, or an operation."""

    key: str
    title: str
    detail: str
    kind: Kind
    entrance: bool = False


@dataclass(frozen=True)
class Arrow:
    """A tensor from one box to another."""

    start: str
    end: str
    shape: str
    dtype: str
    bytes: int
    kind: Kind


@dataclass
class Sketch:
    """Boxes by key, each after those from which it takes tensors."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    """The names of all graph nodes that the sketch stands for."""

    @property
    def largest_shown(self) -> int:
        """Bytes of the largest tensor that is not a weight, as all weights are drawn with the same thickness."""
        return max((arrow.bytes for arrow in self.arrows if arrow.kind != "weight"), default=0)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the expanded keys and values that enter the attention itself."""
        return sum(a.bytes for a in self.arrows if a.kind == "expanded" and self.boxes[a.end].kind != "expanded")


def entrances(proved: Proved) -> dict[str, tuple[str, Kind]]:
    """The title and kind of each tensor from which an attention is computed, by the name of its node."""
    site = up_projected_apart(proved.site)
    found: dict[str, tuple[list[str], Kind]] = {}

    def add(read: Read | None, title: str, kind: Kind) -> None:
        source = None if read is None else read.source.node if isinstance(read.source, Unread) else read.source
        if isinstance(source, Scaled):  # a quantised weight
            add(source.of, title, kind)
            add(source.by, f"scales of {title}", kind)
        else:  # several tensors: a weight for each head, or a weight and an adapter's
            for part in made_of(source):
                add(part, title, kind)
        if isinstance(source, fx.Node):
            titles, _ = found.setdefault(source.name, ([], kind))
            titles += [title] * (title not in titles)

    if site.second_latent is not None:
        add(site.second_latent.latent.read, "latent of the keys", "latent")
    add(site.latent.read, "latent", "latent")
    for rope in site.ropes:
        add(rope.key.read, "rope key", "latent")
    add(site.w_uk, "W_UK", "weight")
    add(site.w_uv, "W_UV", "weight")
    add(site.nope.query.read, "query", "query")
    if site.unproved_keys is not None:
        add(site.nope.key.read, "key", "query")
    for rope in site.ropes:
        add(rope.query.read, "query", "query")
    for mask in site.attention.masks:
        add(mask.term.read, "mask", "mask")
    return {name: (", ".join(titles), kind) for name, (titles, kind) in found.items()}


def sketch(module: fx.GraphModule, output: str, inputs: Mapping[str, tuple[str, Kind]]) -> Sketch | None:
    """Sketch what leads from `inputs` to the node named `output`; None if it is too much to draw or missing."""
    node = next((n for n in module.graph.nodes if n.name == output), None)
    if node is None:
        return None
    common = CommonSubexpressions()  # an input that is computed twice is one entrance
    drawer = _Drawer({n: inputs[first] for n in module.graph.nodes if (first := common.first(n).name) in inputs})
    end = drawer.box(node)
    if end is None or len(drawer.sketch.boxes) > WIDEST:
        return None
    drawer.finish(end, node)
    return drawer.sketch


class _Drawer:
    def __init__(self, inputs: Mapping[fx.Node, tuple[str, Kind]]) -> None:
        self.inputs, self.sketch = inputs, Sketch()
        self._origins: dict[str, frozenset[Kind]] = {}
        """The kinds of the entrances from which each box is computed."""
        self._done: dict[fx.Node, Box | None] = {}

    def box(self, node: fx.Node) -> Box | None:
        """The box that makes a tensor; None for blanks, which have no content."""
        stack = [node]
        while stack:  # not recursive, as the graph may be deep
            current = stack[-1]
            pending = [] if self._ends(current) else [n for n in _taken(current) if n not in self._done]
            if pending and len(self._done) <= 50 * WIDEST:
                stack += pending
                continue
            stack.pop()
            if current not in self._done:
                self._done[current] = self._make(current)
        return self._done[node]

    def finish(self, end: Box, node: fx.Node) -> None:
        """Add the output box."""
        out = Box("output", "output", "", "output", entrance=True)
        self.sketch.boxes[out.key] = out
        self._arrow(end, out, node, "output")

    def _ends(self, node: fx.Node) -> bool:
        return node in self.inputs or node.op == "placeholder"

    def _make(self, node: fx.Node) -> Box | None:
        name = _name(node)
        if self._ends(node):
            title, kind = self.inputs.get(node, (node.name, "query"))
            self._origins[node.name] = frozenset({kind})
            return self._add(Box(node.name, title, _size(node), kind, entrance=True))
        taken = [(n, self._done.get(n)) for n in _taken(node)]
        boxes = [(n, box) for n, box in taken if box is not None]
        if name in BLANKS or not boxes:
            return None
        self.sketch.nodes.add(node.name)
        if name in VIEWS or name == "copy" or node.target is operator.getitem:
            return boxes[0][1]
        origins = frozenset[Kind]().union(*(self._origins[start.key] for _, start in boxes))
        box = Box(node.name, TITLES.get(name, name.strip("_")), _detail(node), _kind(origins))
        self._origins[box.key] = origins
        for operand, start in boxes:
            if start.kind == "weight" and start.entrance:
                start = self._weight_of(box, start, others=origins - {"weight"})
            if name in JOINS and start.title == "join" and not start.entrance:
                self._absorb(start, box)
            else:
                self._arrow(start, box, operand, _kind(self._origins[start.key]))
        return self._add(box)

    def _weight_of(self, box: Box, weight: Box, others: frozenset[Kind]) -> Box:
        """Give each use of a weight its own box. Of a weight that holds both, queries use W_UK and results use W_UV."""
        title = weight.title
        if box.title == TITLES["per_head_matmul"] and title == "W_UK, W_UV":
            title = "W_UV" if "latent" in others else "W_UK"
        self.sketch.boxes.pop(weight.key, None)
        own = Box(f"{weight.key} for {box.key}", title, weight.detail, "weight", entrance=True)
        self._origins[own.key] = self._origins[weight.key]
        return self._add(own)

    def _absorb(self, inner: Box, outer: Box) -> None:
        """Merge a join into the join that uses it."""
        self.sketch.boxes.pop(inner.key, None)
        self.sketch.arrows = [
            Arrow(a.start, outer.key, a.shape, a.dtype, a.bytes, a.kind) if a.end == inner.key else a
            for a in self.sketch.arrows
        ]

    def _add(self, box: Box) -> Box:
        self.sketch.boxes[box.key] = box
        return box

    def _arrow(self, start: Box, end: Box, tensor: fx.Node, kind: Kind) -> None:
        if not is_tensor(tensor):
            return
        value = tensor.meta["val"]
        size = value.element_size() * math.prod(map(expected, value.shape))
        arrow = Arrow(start.key, end.key, _size(tensor), _dtype(value), size, kind)
        if arrow not in self.sketch.arrows:
            self.sketch.arrows.append(arrow)


def _kind(origins: frozenset[Kind]) -> Kind:
    if "query" in origins:
        return "query"
    if {"latent", "weight"} <= origins:
        return "expanded"
    kinds: tuple[Kind, ...] = ("latent", "mask", "weight")
    return next((kind for kind in kinds if kind in origins), "query")


def _taken(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node uses. The target of a copy is left out, as it only gives the shape."""
    given = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    operands = [value for value in given if isinstance(value, fx.Node) and not _holds_nothing(value)]
    return operands[1:2] if _name(node) == "copy" else operands


def _holds_nothing(node: fx.Node) -> bool:
    """Whether a node is a size, or a tensor without elements, such as a rope key of width 0."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, int) and size == 0 for size in value.shape)
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _name(node: fx.Node) -> str:
    """The name of an operation without namespace and overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2]
    return getattr(target, "__name__", str(target))


def _detail(node: fx.Node) -> str:
    if _name(node) == "sealed_attention":
        return "scaled_dot_product_attention"
    return str(node.target).removesuffix(".default")


def _size(node: fx.Node) -> str:
    value = node.meta.get("val")
    return "[" + ", ".join(map(str, value.shape)) + "]" if isinstance(value, torch.Tensor) else ""


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
