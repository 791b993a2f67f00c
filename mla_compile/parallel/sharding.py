"""Sharding rules of the ops on DTensors: which placements of the operands an op accepts, and those of its results.

An op accepts operands sharded by sequences or by heads, or replicated; torch first redistributes operands with other
placements. Gradients of replicated operands are sums over ranks that have yet to be taken (`Partial`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.experimental import register_sharding

from .. import ops

Placements = tuple[list[Placement], list[Placement | None]]
"""The placements of the results, and of the arguments (None for one that is not a tensor)."""


@dataclass(frozen=True)
class Axes:
    """The dimensions of an op's tensors as letters: B for sequences, N for heads. Equal letters are sharded together.

    A leading `*` marks a tensor that broadcasts: it may have only the last of these dimensions, and is replicated
    along those of size 1.
    """

    arguments: Mapping[str, str]
    results: tuple[str, ...]
    shared: str = "BN"
    """The dimensions that may be sharded."""

    def rules(self, arguments: Mapping[str, Any]) -> Iterator[Placements]:
        """The accepted placements along one mesh dimension; `arguments` by name, of which tensors have a shape."""
        for axis in ("", *self.shared):
            yield (
                [_placed(axes, axis) for axes in self.results],
                [self._argument(name, given, axis) for name, given in arguments.items()],
            )

    def _argument(self, name: str, given: Any, axis: str) -> Placement | None:
        return _placed(self.arguments[name], axis, given.shape) if hasattr(given, "shape") else None


def _placed(axes: str, axis: str, shape: tuple[int, ...] | None = None) -> Placement:
    """The placement of a tensor; `shape` is given for arguments only."""
    dim = axes.find(axis) if axis else -1
    if axes.startswith("*") and shape is not None:
        dim -= len(axes) - len(shape)
        return Shard(dim) if axis in axes and dim >= 0 and shape[dim] != 1 else Replicate()
    return Shard(dim) if dim >= 0 else Replicate()


_MASK = "*BNST"
_QUERY = {"q_latent": "BSNL", "q_rope": "BSNR"}
_KEYS = {"latent": "BTL", "k_rope": "BTR"}
_PAGES = {
    "latent_pages": "pcL",
    "rope_pages": "pcR",
    "block_table": "Bt",
    "seq_lens": "B",
    "latent_scales": "pcG",
    "mask": _MASK,
    "first_positions": "B",
    "query_lens": "B",
}
_WEIGHTS = {"w_uk": "NPL", "w_uv": "NVL"}
_HEADS = {"query": "BNSD", "key": "BNTD", "value": "BNTV", "attn_mask": _MASK}

RULES: Mapping[str, Axes] = {
    "latent_attention": Axes({**_QUERY, **_KEYS, "mask": _MASK}, ("BSNL", "BSN")),
    "sparse_latent_attention": Axes(
        {**_QUERY, **_KEYS, "indices": "BSk", "mask": _MASK, "latent_scales": "*BTG"}, ("BSNL", "BSN")
    ),
    "paged_latent_attention": Axes({**_QUERY, **_PAGES}, ("BSNL", "BSN")),
    "expanded_attention": Axes({"q": "BSNd", **_KEYS, **_WEIGHTS, "mask": _MASK}, ("BSNV", "BSN")),
    "paged_expanded_attention": Axes({"q": "BSNd", **_PAGES, **_WEIGHTS}, ("BSNV", "BSN")),
    "per_head_matmul": Axes({"x": "BSNI", "weight": "NIO"}, ("BSNO",), "BSN"),
}
_RESULTS = {"grad_o": "BSNV", "grad_lse": "BSN", "o": "BSNV", "lse": "BSN"}
BACKWARDS: Mapping[str, tuple[Axes, tuple[str, ...]]] = {
    "latent_attention_backward": (Axes({**_RESULTS, **_QUERY, **_KEYS, "mask": _MASK}, ()), (*_QUERY, *_KEYS, "mask")),
    "expanded_attention_backward": (
        Axes({**_RESULTS, "q": "BSNd", **_KEYS, **_WEIGHTS, "mask": _MASK}, ()),
        ("q", *_KEYS, *_WEIGHTS, "mask"),
    ),
}
"""The dimensions of each backward's arguments, and its differentiable operands in the order of `wanted`."""


def _named(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _register(name: str, axes: Axes) -> None:
    op = getattr(ops, name).default

    def rules(*args: Any, **kwargs: Any) -> list[Placements]:
        return list(axes.rules(_named(op, args, kwargs)))

    register_sharding(op)(rules)


def _merged(o_a: Any, *others: Any) -> list[Placements]:
    """Any dimension but the last may be sharded, as rows do not depend on each other."""
    dims = [Replicate(), *map(Shard, range(len(o_a.shape) - 1))]
    return [([placed, placed], [placed] * 4) for placed in dims]


def _sealed(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, *others: Any) -> list[Placements]:
    """The rules of the attention itself. With dropout everything is replicated: every rank draws the same numbers."""
    axes = Axes(_HEADS, ("BNSV",), "BN" if len(query.shape) == 4 and not dropout_p else "")
    named = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    found = [(results, [*placed, *[None] * (1 + len(others))]) for results, placed in axes.rules(named)]
    return found if _each_rank_has_its_keys(query, key) else found[:2]


def _each_rank_has_its_keys(query: Any, key: Any) -> bool:
    """Whether query heads that share a key head stay on the same rank as it."""
    return query.shape[1] == key.shape[1] or key.shape[1] % key.mesh.size() == 0


def _gradients(schema: OpSchema) -> OpStrategy:
    """The strategy of a backward, whose result is a list of the wanted gradients."""
    axes, differentiable = BACKWARDS[schema.op._schema.name.removeprefix("mla::")]
    given = _named(schema.op, schema.args_schema, schema.kwargs_schema)
    named: dict[str, Any] = {
        name: each.strategies[0].output_spec if isinstance(each, OpStrategy) else each for name, each in given.items()
    }
    asked = [name for name, wanted in zip(differentiable, named["wanted"], strict=True) if wanted]
    rules = []
    for axis, (_, placed) in zip(("", "B", "N"), axes.rules(named), strict=True):
        of = dict(zip(named, placed, strict=True))
        results = [Partial() if axis and of[name] == Replicate() else of[name] for name in asked]
        rules.append([*results, *placed])
    strategy = expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, rules, input_index=len(asked))
    for one in strategy.strategies:  # the result is a list even if it has one element
        one.output_specs = one.output_specs if isinstance(one.output_specs, tuple) else (one.output_specs,)
    return strategy


def register() -> None:
    """Register the sharding rules of every op with torch."""
    for name, axes in RULES.items():
        _register(name, axes)
    register_sharding(ops.merge_states.default)(_merged)
    register_sharding(ops.sealed_attention.default)(_sealed)
    for name in BACKWARDS:
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
            getattr(ops, name).default, _gradients, RuntimeSchemaInfo(100, needs_pytree=True)
        )
