"""Read attention ops over sequences that are packed one behind the other, each a run of rows.

    o = varlen(q [Tq, N, D], k [Tk, N, D], v [Tk, N, D], cu_seqlens_q [B + 1], cu_seqlens_k [B + 1])

In a sequence of Q queries and K keys, query i sees key j where `i + K - Q - left <= j <= i + K - Q + right`: the last
query stands at the last key. The output is 0 for a query that sees no key, and for one that is in no sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend

from ..algebra import operations
from ..algebra.sizes import Size
from ..algebra.terms import Dim, Read
from ..nodes.arguments import all_arguments
from ..nodes.refusal import Refusal
from ..nodes.shapes import shape_of, size_of

_WORDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seq_q": "starts of queries",
    "cum_seq_q": "starts of queries",
    "cu_seqlens_q": "starts of queries",
    "cu_seq_k": "starts of keys",
    "cum_seq_k": "starts of keys",
    "cu_seqlens_k": "starts of keys",
    "max_q": "most queries",
    "max_seqlen_q": "most queries",
    "max_k": "most keys",
    "max_seqlen_k": "most keys",
    "is_causal": "causal",
    "softmax_scale": "scale",
}
"""One word for each parameter of these ops that has several names."""
_OPS = ("torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward", "aten::_flash_attention_forward")
_NEEDED = {*_WORDS.values(), "scale"}
"""Parameters that all of these ops have; an op of the same name that lacks one is another op."""
_INDIFFERENT = ("enable_gqa", "num_splits", "return_softmax", "return_debug_mask", "zero_tensors")
"""Parameters about how attention is computed, and about results that nothing may read."""
_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
"""Values of `backend`: whose kernels compute the attention, as torch's op is told from 2.15 on."""


@dataclass(frozen=True)
class Vector:
    """A vector of integers, over an axis of its own."""

    read: Read
    dim: Dim


@dataclass(frozen=True)
class Packed:
    """Which of the queries and keys of an attention belong to which sequence, and the window that queries see."""

    queries: Vector
    """`[B + 1]`: where the queries of each sequence begin, and where the last ones end."""
    keys: Vector
    """The same for keys."""
    used: Vector | None
    """`[B]`: how many of its keys each sequence uses, if not all up to the next sequence."""
    sequences: Size
    """B."""
    most_queries: Size
    """The most that one sequence has."""
    most_keys: Size
    """The most that one sequence has."""
    left: int | None
    """How many keys before its own a query sees; None for all."""
    right: int | None
    """How many keys behind its own: 0, or None for all."""


@dataclass(frozen=True)
class Call:
    """What such an op is given, and its output."""

    output: fx.Node
    """The first of its results."""
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float | None
    packed: Packed


def packed_call(node: fx.Node) -> Call | None:
    """The call of such an op; None if `node` is another op, is given no sequences, or nothing takes its output.

    Raises:
        Refusal: if its arguments say more than queries, keys, values, sequences and windows.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _OPS:
        return None
    given = {_WORDS.get(name, name): value for name, value in all_arguments(node, node.target).items()}
    if not given.keys() >= _NEEDED or given["starts of queries"] is None:
        return None
    outputs = [user for user in node.users if user.target is operator.getitem]
    firsts = [user for user in outputs if user.args[1] == 0]
    if not firsts:
        return None
    if len(firsts) > 1 or any(user not in outputs or (user not in firsts and user.users) for user in node.users):
        reason = "expected only the output of packed attention to be read, found that other results are read too"
        raise Refusal(node, reason, "use only the output")
    left, right = _window(node, given)
    if any(given[name] is None for name in ("starts of keys", "most queries", "most keys")):
        remedy = "gather the latents, and pass their cu_seqlens"
        raise Refusal(node, "expected packed keys, found a cache in pages", remedy)
    _refuse_backend(node, given, (left, right))
    _refuse_more(node, given)
    queries, keys = (_vector(given[f"starts of {what}"]) for what in ("queries", "keys"))
    return Call(
        firsts[0],
        given["query"],
        given["key"],
        given["value"],
        _scale(node, given),
        Packed(
            queries,
            keys,
            None if given.get("seqused_k") is None else _vector(given["seqused_k"]),
            shape_of(given["starts of queries"])[0] - 1,
            size_of(given["most queries"]),
            size_of(given["most keys"]),
            left,
            right,
        ),
    )


def _vector(node: fx.Node) -> Vector:
    """A vector as a read of the node that holds it, whatever that is made of."""
    form = operations.leaf(node, shape_of(node))
    return Vector(form.term.read, form.dims[0])


def _window(node: fx.Node, given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    window = given.get("window_size") or (given.get("window_size_left"), given.get("window_size_right"))
    causal = given["causal"]
    if not all(number is None or isinstance(number, int) for number in (*window, causal)):
        raise Refusal(node, "expected a window of constant size, found one that is known only at run time")
    left, right = (None if number is None or number < 0 else int(number) for number in window)
    if causal:
        right = 0
    if right:
        reason = f"expected a window that ends at the query, or has no end, found one that ends {right} keys after it"
        raise Refusal(node, reason)
    return left, right


def _refuse_backend(node: fx.Node, given: Mapping[str, Any], window: tuple[int | None, int | None]) -> None:
    """Refuse kernels that attend to other keys than the arguments say, and backends that are not known.

    cuDNN is told of no window except the causal one. Without `seqused_k`, that one puts the first query at the first
    key, which is the same where queries and keys begin at the same places. `varlen_attn` chooses cuDNN only where the
    two are the same.
    """
    backend = given.get("backend", _FLASH)
    if backend == _FLASH:
        return
    if backend != _CUDNN:
        reason = f"expected packed attention of FlashAttention or cuDNN, found {_found(backend)} as its backend"
        raise Refusal(node, reason, "call varlen_attn, which chooses one of the two")
    together = given["starts of queries"] is given["starts of keys"]
    aligned = not given["causal"] or given.get("seqused_k") is not None or together
    if window != (None, 0 if given["causal"] else None) or not aligned:
        reason = (
            "expected packed attention of cuDNN without a window, causal only where queries "
            "and keys start at the same places, found other arguments"
        )
        raise Refusal(node, reason, "call varlen_attn, which then chooses FlashAttention")


def _found(value: object) -> object:
    return "a tensor" if isinstance(value, fx.Node) else value


def _refuse_more(node: fx.Node, given: Mapping[str, Any]) -> None:
    """Refuse arguments, besides queries, keys, values, sequences and windows, that change the result."""
    known = {*_WORDS.values(), "scale", "seqused_k", "window_size", "window_size_left", "window_size_right", "backend"}
    for name, value in given.items():
        if name in ("query", "key", "value", *_INDIFFERENT) or name in known:
            continue
        if isinstance(value, fx.Node) or value:
            reason = f"expected packed attention without {name}, found {_found(value)}"
            raise Refusal(node, reason, f"leave {name} out")


def _scale(node: fx.Node, given: Mapping[str, Any]) -> float | None:
    value = given["scale"]
    if value is not None and not isinstance(value, int | float):
        raise Refusal(node, "expected a constant scale, found one that is known only at run time")
    return None if value is None else float(value)
