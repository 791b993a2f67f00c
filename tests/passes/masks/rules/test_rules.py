"""Every rule for reading masks: what it says of each element is what torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, arange, fx

from mla_compile.passes.algebra.terms import Axis, Read
from mla_compile.passes.masks.kinds import RULES
from mla_compile.passes.masks.positions import Affine, AtMost, Conditional, Element, Literal, Named, Truth, Value
from mla_compile.passes.masks.valuation import Valuation
from mla_compile.passes.trace.trace import Trace
from tests.passes.graphs import capture, values

ROWS, COLUMNS = 5, 7
aten = torch.ops.aten
FLAGS = torch.tensor([True, False, True, True, False, True, False])
NAMES = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def rows() -> Tensor:
    return arange(ROWS)[:, None]


def columns() -> Tensor:
    return arange(COLUMNS)[None]


def seen() -> Tensor:
    return columns() <= rows()


def hidden() -> Tensor:
    return torch.where(seen(), 0.0, -torch.inf)


def whole(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((ROWS, COLUMNS), value, dtype=dtype)


def every(value: bool) -> Tensor:
    return torch.full((ROWS, COLUMNS), value)


def ones() -> Tensor:
    return torch.ones(ROWS, COLUMNS, dtype=torch.int64)


def two_of(scores: Tensor) -> Tensor:
    """The columns of the two greatest scores of each row."""
    return scores.topk(2, dim=1)[1]


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums": lambda flags, names: 2 * rows() + columns() - 3,
    "sums with numbers": lambda flags, names: aten.sub.Scalar(aten.add.Scalar(rows() + columns(), 4), 1),
    "a number less a sum": lambda flags, names: aten.rsub.Scalar(rows() - columns(), 2),
    "opposites": lambda flags, names: -(rows() - columns()),
    "products with numbers": lambda flags, names: aten.mul.Scalar(rows() - columns(), 3),
    "steps": lambda flags, names: arange(0, 3 * COLUMNS, 3) - arange(2, 2 + ROWS)[:, None],
    "at most": lambda flags, names: columns() - 2 <= rows(),
    "less": lambda flags, names: columns() < rows(),
    "at least": lambda flags, names: columns() >= rows(),
    "more": lambda flags, names: columns() > rows(),
    "numbers": lambda flags, names: (columns() <= 3) & (rows() >= 1) & (columns() < 6) & (rows() > 0),
    "and, or, not": lambda flags, names: ~((columns() > rows()) | (columns() < 2)) & flags,
    "in words": lambda flags, names: torch.logical_and(
        torch.logical_not(torch.logical_or(columns() > rows(), columns() < 2)), flags
    ),
    "truths times truths": lambda flags, names: seen() * flags,
    "numbers that were chosen": lambda flags, names: aten.lt.Scalar(hidden(), -1.0),
    "is a number that was chosen": lambda flags, names: torch.ones(ROWS, COLUMNS).tril() == 1,
    "is not that number": lambda flags, names: torch.ones(ROWS, COLUMNS).tril() != 1,
    "is that of a tensor": lambda flags, names: (hidden() == torch.zeros(1)) & (torch.ones(1, COLUMNS) != hidden()),
    "is a number as the tensor rounds it": lambda flags, names: torch.where(seen(), torch.tensor(0.1), 0.0) == 0.1,
    "is more than a number as the tensor rounds it": lambda flags, names: aten.gt.Scalar(
        torch.where(seen(), torch.tensor(0.1), 0.0), 0.1
    ),
    "is true": lambda flags, names: (seen() == 1) & (flags == True) & (~seen() != True),  # noqa: E712
    "chosen": lambda flags, names: torch.where(flags, hidden(), -torch.inf),
    "filled": lambda flags, names: whole(0).masked_fill(~seen(), -1e9),
    "filled with a tensor": lambda flags, names: whole(0).masked_fill(~seen(), torch.tensor(-torch.inf)),
    "below the diagonal": lambda flags, names: torch.ones(ROWS, COLUMNS).tril(1),
    "above the diagonal": lambda flags, names: whole(-torch.inf).triu(2),
    "filled whole": lambda flags, names: aten.fill.Scalar(whole(0), -torch.inf).triu(1),
    "cast": lambda flags, names: (1 - seen().to(torch.float16)) * -1e4,
    "added": lambda flags, names: hidden() + torch.where(flags, 0.0, -torch.inf),
    "added where nothing else is chosen": lambda flags, names: (
        torch.where(columns() < COLUMNS, 0.0, -1e9) + torch.where(seen(), 0.0, -1e9)
    ),
    "added where the other is always chosen": lambda flags, names: (
        torch.where(flags, 0.0, -1e9) - torch.where(rows() > ROWS, 5.0, 1.0)
    ),
    "like": lambda flags, names: (
        torch.zeros_like(hidden()) + torch.ones_like(hidden()) * torch.full_like(hidden(), 3.0)
    ),
    "new": lambda flags, names: names.new_ones(ROWS, COLUMNS) + names.new_zeros(1) + names.new_full((1,), 5),
    "counted": lambda flags, names: ones().cumsum(1),
    "looked up": lambda flags, names: flags[columns().expand(ROWS, COLUMNS)] & seen(),
    "negated": lambda flags, names: -torch.where(seen(), 0.0, 3.0),
    "zeros and ones": lambda flags, names: torch.zeros(ROWS, COLUMNS) - torch.ones(ROWS, COLUMNS),
    "named": lambda flags, names: aten.scatter.value(whole(-torch.inf), 1, two_of(names), 0.0),
    "side by side": lambda flags, names: torch.cat([whole(0)[:, :2], whole(-torch.inf)[:, :5].triu(1)], 1),
    "side by side, hidden behind": lambda flags, names: torch.cat([hidden()[:, :3], whole(-torch.inf)[:, 3:]], 1),
    "three side by side": lambda flags, names: torch.cat(
        [whole(0)[:, :1], whole(-torch.inf)[:, :4].triu(1), whole(0)[:, 5:]], -1
    ),
    "true above a triangle": lambda flags, names: torch.cat([every(True)[:2], seen()[:3]]),
    "true, then a triangle": lambda flags, names: torch.cat([every(True)[:, :3], seen()[:, :4]], 1),
    "a triangle, then false": lambda flags, names: torch.cat([seen()[:, :4], every(False)[:, :3]], 1),
    "a triangle, then true": lambda flags, names: torch.cat([seen()[:, :4], every(True)[:, :3]], 1),
    "padded": lambda flags, names: torch.nn.functional.pad(whole(-torch.inf)[:, :5].triu(1), (2, 0)),
    "padded on all sides": lambda flags, names: torch.nn.functional.pad(
        whole(-torch.inf)[:3, :4].triu(1), (2, 1, 1, 1), value=-torch.inf
    ),
    "padded with true": lambda flags, names: torch.nn.functional.pad(seen()[:1, :4], (2, 1, 0, 4), value=True),
    "chosen, or always": lambda flags, names: torch.where(columns() > 3, True, seen()),
    "chosen, else always": lambda flags, names: torch.where(columns() > 3, seen(), True),
    "named by zeros": lambda flags, names: aten.scatter.src(whole(-torch.inf), 1, two_of(names), torch.zeros(ROWS, 2)),
}


def valued(module: fx.GraphModule) -> tuple[Value | None, list[Axis]]:
    """What the rules say of the output at row i and column j, and the axes that stand for i and j."""
    (output,) = module.graph.output_node().all_input_nodes
    axes = [Axis(ROWS), Axis(COLUMNS)]
    valuation = Valuation(Trace(module.graph), RULES)
    return valuation(output, tuple(Affine(0, ((axis, 1),)) for axis in axes)), axes


def number(value: Affine, at: dict[Axis, int], tensors: dict[fx.Node, Tensor]) -> int:
    total = int(value.const)
    for what, factor in value.terms:
        total += factor * (at[what] if isinstance(what, Axis) else int(element(what, at, tensors)))
    return total


def element(read: Read, at: dict[Axis, int], tensors: dict[fx.Node, Tensor]) -> Tensor:
    place = []
    for digits in read.dims:
        index = 0
        for digit in digits:
            index = index * int(digit.extent) + int(digit.start)
            index += digit.step * at[digit.axis] if digit.axis is not None else 0
        place.append((int(digits[0].before) if digits else 0) + index)
    return tensors[read.source][tuple(place)]


def holds(literal: Literal, at: dict[Axis, int], tensors: dict[fx.Node, Tensor]) -> bool:
    match literal:
        case AtMost(what):
            return number(what, at, tensors) <= 0
        case Element(read, inverted):
            return bool(element(read, at, tensors)) != inverted
        case Named(indices, axis, key, _, _, inverted):
            found = (int(element(indices, at | {axis: i}, tensors)) for i in range(int(axis.size)))
            return (at[key] in found) != inverted
    raise AssertionError(literal)


def worked_out(value: Value, at: dict[Axis, int], tensors: dict[fx.Node, Tensor]) -> float:
    match value:
        case Affine():
            return number(value, at, tensors)
        case Truth(literals, negated):
            return all(holds(literal, at, tensors) for literal in literals) != negated
        case Conditional(condition, then, otherwise):
            return then if worked_out(condition, at, tensors) else otherwise
    raise AssertionError(value)


@pytest.mark.parametrize("case", CASES)
def test_an_element_is_what_its_value_says(case: str) -> None:
    module = capture(CASES[case], FLAGS, NAMES)
    value, axes = valued(module)
    assert value is not None, "no rule says anything of it"
    if isinstance(value, Truth):
        sources = {literal.read.source for literal in value.literals if isinstance(literal, Element)}
        assert sources.isdisjoint(module.graph.output_node().all_input_nodes), "it says only that it is itself"
    known = values(module, FLAGS, NAMES)
    tensors = {node: tensor for node, tensor in known.items() if isinstance(tensor, Tensor)}
    expected = tensors[module.graph.output_node().all_input_nodes[0]]
    for i in range(ROWS):
        for j in range(COLUMNS):
            assert worked_out(value, {axes[0]: i, axes[1]: j}, tensors) == expected[i, j].item(), (i, j)


def test_every_rule_has_a_case() -> None:
    graphs = [capture(case, FLAGS, NAMES) for case in CASES.values()]
    ran = {node.target for module in graphs for node in module.graph.nodes}
    assert set(RULES) - ran == set()


NOTHING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums that bfloat16 rounds": lambda flags, names: ones().cumsum(1, dtype=torch.bfloat16),
    "sums that wrap": lambda flags, names: ones().cumsum(1, dtype=torch.int8),
    "a sum of positions": lambda flags, names: torch.arange(COLUMNS).cumsum(0)[1].expand(ROWS, COLUMNS),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_said_of_what_may_be_another_number(case: str) -> None:
    value, _ = valued(capture(NOTHING[case], FLAGS, NAMES))
    assert not isinstance(value, Affine) or any(isinstance(what, Read) for what, _ in value.terms)
