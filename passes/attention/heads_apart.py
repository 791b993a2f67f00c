"""Heads that are computed one by one, in a loop or a list of modules, as one attention in the place of their join.

    o = cat([softmax(q_0 k_0^T) v_0, softmax(q_1 k_1^T) v_1, ...])

The heads are one more axis of its rows, along which queries, keys and values are joined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..algebra.made import joined
from ..algebra.operations import alike, read_of
from ..algebra.sizes import Unaligned
from ..algebra.terms import Axis, Dim, Form, Join, Segment, Term, Unread
from ..nodes.arguments import arguments, aten, is_tensor
from ..trace.trace import Trace
from .attention import Attention
from .changed import changed

_JOINS = (aten.cat.default, aten.stack.default)


def in_one(graph: fx.Graph, found: Sequence[Attention], trace: Trace) -> Iterator[Attention]:
    """The attentions of all heads that are computed one by one, `found` being those of each, where nothing else reads
    them and they differ in no more than their operands."""
    known = {each.node: each for each in found}
    for node in graph.nodes if len(found) > 1 else ():
        if node.target not in _JOINS or not is_tensor(node):
            continue
        operands = arguments(node)[0]
        heads = [head for operand in operands if (head := _head(operand, node, known, trace)) is not None]
        if len(heads) < max(len(operands), 2):
            continue
        with contextlib.suppress(Unaligned):
            if (whole := _joined(node, heads)) is not None:
                yield replace(whole, heads_apart=tuple(known[head.node] for head in heads))


def _head(operand: fx.Node, join: fx.Node, found: Mapping[fx.Node, Attention], trace: Trace) -> Attention | None:
    """The attention whose whole output `operand` is, with the dimensions that it has there."""
    reader, output = join, operand
    while output.users.keys() == {reader} and output not in found:  # views
        tensors = [own for own in output.all_input_nodes if is_tensor(own)]
        if len(tensors) != 1:
            return None
        reader, output = output, tensors[0]
    attention = found.get(output)
    if attention is None or output.users.keys() != {reader} or not _is_plain(attention):
        return None
    dims = _dims(trace[operand], attention)
    if dims is None or operand.meta["val"].dtype != join.meta["val"].dtype:
        return None
    return replace(attention, dims=dims)


def _is_plain(attention: Attention) -> bool:
    """Whether no more than queries, keys, values and masks decide on an output."""
    special = attention.sinks, attention.opaque, attention.padding, attention.packed
    return not any(special) and not attention.shared


def _dims(form: Form, attention: Attention) -> tuple[Dim, ...] | None:
    """The axes of an attention that the dimensions of `form` are made of; None if that is not its output as it is."""
    read = form.term.read
    if read.source is not attention.node or read.then or not read.whole:
        return None
    digits, axes = read.digits, [axis for dim in attention.dims for axis in dim]
    own = {digit.axis: axis for digit, axis in zip(digits, axes, strict=False)}
    counted = tuple(digit.axis for digit in digits if digit.axis is not None)
    if len(digits) != len(axes) or not alike(counted, tuple(axes)):
        return None
    repeated = {axis for dim in form.dims for axis in dim} - own.keys()
    return None if repeated else tuple(tuple(own[axis] for axis in dim) for dim in form.dims)


def _joined(node: fx.Node, heads: Sequence[Attention]) -> Attention | None:
    axes = [Axis(axis.size) for axis in _axes(heads[0])]  # new ones, which mean nothing else in any of the heads
    if any(not alike(_axes(head), tuple(axes)) or _counts(head) != _counts(heads[0]) for head in heads):
        return None
    renamed = [changed(head, dict(zip(_axes(head), axes, strict=True))) for head in heads]
    first = renamed[0]
    if any(_shared(each) != _shared(first) for each in renamed):
        return None
    head = Axis(len(heads))
    scores = []
    for of_each in zip(*(each.scores for each in renamed), strict=True):
        queries = _queries([score.query for score in of_each], head)
        if queries is None:
            return None
        keys = _pieces([score.key for score in of_each], head, node)
        scores.append(replace(of_each[0], query=queries, key=keys))
    dims, dim = list(first.dims), (*arguments(node)[1:], 0)[0] % node.meta["val"].dim()
    if node.target is aten.stack.default:
        dims.insert(dim, (head,))
    else:
        dims[dim] = (head, *dims[dim])
    return replace(
        first,
        node=node,
        dims=tuple(dims),
        rows=(head, *first.rows),
        scores=tuple(scores),
        value=_pieces([each.value for each in renamed], head, node),
    )


def _shared(attention: Attention) -> object:
    """What all heads have to have in common, beside their sizes."""
    scores = [(score.summed, score.scale) for score in attention.scores]
    masks = [replace(mask, term=Term(mask.term.read)) for mask in attention.masks]
    dims = attention.dims, attention.rows, attention.keys, attention.columns, attention.queries
    return dims, scores, masks, attention.causal, attention.strict_rows, attention.numbers


def _axes(attention: Attention) -> Dim:
    """All axes of an attention."""
    summed = [axis for score in attention.scores for axis in score.summed]
    return (*attention.rows, *attention.keys, *attention.columns, *summed)


def _counts(attention: Attention) -> list[int]:
    """How many axes it has of each kind."""
    dims = attention.rows, attention.keys, attention.columns, *(score.summed for score in attention.scores)
    return [len(dim) for dim in dims]


def _queries(terms: Sequence[Term], head: Axis) -> Term | None:
    """The queries of all heads side by side, as one tensor that is joined of theirs; None if they cannot be."""
    if all(term == terms[0] for term in terms):
        return terms[0]
    read, along = terms[0].read, Dim()
    for count, term in enumerate(terms[1:], 2):
        axis = head if count == len(terms) else Axis(count)
        both = joined(read, term.read, (along, ()), axis)
        if both is None:
            return None
        read, along = both, (axis,)
    return Term(read)


def _pieces(terms: Sequence[Term], head: Axis, node: fx.Node) -> Term:
    """The keys or the values of all heads: one for each index of `head`, or one for all."""
    if all(term == terms[0] for term in terms):
        return terms[0]
    parts = Join(head, tuple(Segment((), term) for term in terms))
    axes = Term(terms[0].read, parts).axes
    return Term(read_of(Unread(node), [(axis,) for axis in axes]).read, parts)
