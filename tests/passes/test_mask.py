"""What a mask means is read from the graph that makes it, and is element by element the mask; in doubt a tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mla_compile.passes.axes import Read
from mla_compile.passes.find import Attention, find
from mla_compile.passes.mask import Meaning, understand
from mla_compile.passes.positions import AtMost, Element
from mla_compile.passes.site import Site, prove
from mla_compile.passes.trace import Trace
from torch import Tensor, arange, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_right, compiled
from tests.passes.graphs import capture, rewrite, run, values
from tests.passes.meaning import World
from tests.passes.spellings import SQ, B, T

Mask = Callable[..., Tensor]
MINIMUM = torch.finfo(torch.float64).min
generator = torch.Generator().manual_seed(3)
LENGTHS = torch.tensor([4, T])
SCORES = torch.rand(B, SQ, T, generator=generator)
LEFT = arange(T) >= torch.tensor([2, 0])[:, None]
MIDDLE = (arange(T) < 3) | (arange(T) > 6 + arange(B)[:, None])
REPEATED = torch.tensor([[[0, 3, 3, 9], [1, 1, 1, 1], [10, 2, 8, 2]]] * B)


def attention(mask: Mask) -> mla.Function:
    """SDPA of MLA under a mask of the number of queries and keys and what else is given."""

    def function(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        return mla.sealed(*mla.naive(x, latent, *args[:3]), mask(x.shape[1], latent.shape[1], *args[3:]))

    return function


def by_hand(mask: Mask) -> mla.Function:
    """The same as a softmax of scores to which a number is added."""

    def function(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        added = mask(x.shape[1], latent.shape[1], *args[3:])
        return mla.softmax(*mla.naive(x, latent, *args[:3]), lambda scores: scores + added)

    return function


def understood(
    function: mla.Function, tensors: Sequence[Tensor], symbolic: bool
) -> tuple[Meaning, Site, fx.GraphModule]:
    module = capture(function, *tensors, symbolic=mla.UNKNOWN[:2] if symbolic else ())
    trace = Trace(module.graph)
    (found,) = find(module.graph, trace)
    assert isinstance(found, Attention)
    site = prove(found, trace)
    return understand(site, trace), site, module


def attends(meaning: Meaning, site: Site, module: fx.GraphModule, tensors: Sequence[Tensor]) -> np.ndarray:
    """The pairs that a meaning lets meet, `[B, Sq, T]`, element by element from its parts."""
    world = World({node: v.numpy() for node, v in values(module, *tensors).items() if isinstance(v, Tensor)})
    for value in module.graph.find_nodes(op="placeholder"):
        for size, actual in zip(value.meta["val"].shape, world.tensors[value].shape, strict=True):
            if isinstance(size, torch.SymInt):
                world.symbols[size.node.expr] = actual
    axes = [*site.batch, *(site.tokens or ()), site.attention.keys[0]]
    grids = dict(zip(axes, np.indices([world.number(axis.size) for axis in axes], sparse=True), strict=True))
    key = grids[site.attention.keys[0]]
    query = grids[site.tokens[0]] if site.tokens else 0
    allowed = np.ones([world.number(axis.size) for axis in axes], dtype=bool)
    if meaning.causal_offset is not None:
        allowed &= key <= query + world.number(meaning.causal_offset)
    for literal in (*meaning.limits, *meaning.elements, *meaning.named):
        match literal:
            case AtMost(what):
                left = world.number(what.const)
                for term, factor in what.terms:
                    left = left + factor * (world.read(term, grids) if isinstance(term, Read) else grids[term])
                allowed &= left <= 0
            case Element(read, inverted):
                allowed &= world.read(read, grids).astype(bool) ^ inverted
            case named:
                size = world.number(named.named.size)
                inner = {axis: grid[..., None] for axis, grid in grids.items()} | {named.named: np.arange(size)}
                allowed &= (world.read(named.indices, inner) == key[..., None]).any(-1) ^ named.inverted
    return allowed


@dataclass(frozen=True)
class Case:
    mask: Mask
    words: str
    more: tuple[Tensor, ...] = ()
    static: str = ""
    """The words where sizes are known, if these say more."""


def causal(s: int, t: int) -> Tensor:
    return arange(t) <= arange(s)[:, None] + (t - s)


KNOWN = {
    "arange": Case(causal, "causal"),
    "greater or equal": Case(lambda s, t: (arange(s) + t - s)[:, None] >= arange(t)[None], "causal"),
    "less": Case(lambda s, t: arange(t) < (arange(t - s, t) + 1)[:, None], "causal"),
    "not greater": Case(lambda s, t: ~(arange(t) > arange(t - s, t)[:, None]), "causal"),
    "difference": Case(lambda s, t: (arange(s)[:, None] + (t - s) - arange(t)) >= 0, "causal"),
    "strictly before": Case(lambda s, t: arange(t) < arange(s)[:, None] + (t - s), "causal"),
    "one more": Case(lambda s, t: arange(t) <= arange(s)[:, None] + (t - s) + 1, "causal"),
    "top left": Case(lambda s, t: arange(t) <= arange(s)[:, None], "causal"),
    "tril": Case(lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(t - s), "causal"),
    "not triu": Case(lambda s, t: ~torch.ones(s, t).triu(t - s + 1).bool(), "causal"),
    "cumsum": Case(
        lambda s, t: arange(t) <= (torch.ones(1, t, dtype=torch.int64).cumsum(-1) - 1)[:, -s:, None], "causal"
    ),
    "rank 4 and expanded": Case(
        lambda s, t: (arange(t)[None, None, None] <= (arange(s) + t - s)[None, None, :, None]).expand(B, -1, s, t),
        "causal",
    ),
    "all true": Case(lambda s, t: torch.ones(s, t, dtype=torch.bool), "none"),
    "positions of a tensor": Case(
        lambda s, t, p: arange(t) <= p[:, None, :, None], "causal", (torch.tensor([[6, 7, 8], [8, 9, 10]]),)
    ),
    "offset of a tensor": Case(lambda s, t, p: arange(t) <= arange(s)[:, None] + p, "causal", (torch.tensor(5),)),
    "lengths": Case(lambda s, t, n: arange(t) < n[:, None, None, None], "lengths", (LENGTHS,)),
    "static length": Case(lambda s, t: (arange(t) < 7)[None], "lengths"),
    "sliding window": Case(
        lambda s, t: causal(s, t) & (arange(t) > arange(s)[:, None] + (t - s) - 4), "causal + window"
    ),
    "window alone": Case(lambda s, t: (arange(s)[:, None] - arange(t)) < 4 - (t - s), "window"),
    "left padding": Case(lambda s, t, p: causal(s, t) & p[:, None, None], "causal + padding", (LEFT,)),
    "left padding by index": Case(
        lambda s, t, p: torch.ones((), dtype=torch.bool)
        & causal(s, t)[None, None]
        & p[arange(B)[:, None, None, None], arange(t)[None, None, None]],
        "causal + padding",
        (LEFT,),
    ),
    "left padding of integers": Case(
        lambda s, t, p: causal(s, t) & p[:, None, None].bool(), "causal + padding", (1 * LEFT,)
    ),
    "padding in the middle": Case(lambda s, t, p: causal(s, t) & p[:, None, None], "causal + padding", (MIDDLE,)),
    "padding alone, inverted": Case(lambda s, t, p: ~(~p)[:, None, None], "padding", (MIDDLE,)),
    "either way": Case(
        lambda s, t, p: ~((arange(t) > arange(s)[:, None] + (t - s)) | ~p[:, None, None]),
        "causal + padding",
        (MIDDLE,),
    ),
    "chosen": Case(lambda s, t, p: torch.where(p[:, None, None], causal(s, t), False), "causal + padding", (LEFT,)),
    "masked": Case(lambda s, t, p: causal(s, t).masked_fill(~p[:, None, None], False), "causal + padding", (LEFT,)),
    "product": Case(lambda s, t, p: causal(s, t) * p[:, None, None], "causal + padding", (LEFT,)),
    "top-k": Case(
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None],
        "top-k", (SCORES,),
    ),
    "top-k, inverted, causal": Case(
        lambda s, t, x: causal(s, t)[None, None]
        & ~torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices.int().long(), False)[:, None],
        "causal + top-k",
        (SCORES,),
    ),
    "indices with repetitions": Case(
        lambda s, t, i: torch.zeros(B, i.shape[1], T, dtype=torch.bool).scatter(-1, i, True)[:, None],
        "top-k",
        (REPEATED,),
    ),
    "all but the named": Case(
        lambda s, t, i: torch.ones(B, i.shape[1], T, dtype=torch.bool).scatter(-1, i, False)[:, None],
        "tensor",
        (REPEATED,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
@pytest.mark.parametrize("case", KNOWN.values(), ids=KNOWN)
def test_a_known_mask(case: Case, symbolic: bool) -> None:
    if symbolic and case.words.endswith(("top-k", "tensor")):
        pytest.skip("the indices have sizes of their own")
    tensors = (*mla.tensors(), *case.more)
    meaning, site, module = understood(attention(case.mask), tensors, symbolic)
    assert meaning.words == case.words
    assert not meaning.tensors
    expected = case.mask(SQ, T, *case.more).expand(B, 1, SQ, T)[:, 0].numpy()
    np.testing.assert_array_equal(attends(meaning, site, module, tensors), expected)


@pytest.mark.parametrize("case", KNOWN.values(), ids=KNOWN)
def test_under_a_known_mask_the_result_is_right(case: Case) -> None:
    for path, _, (outcome,) in compiled(attention(case.mask), (*mla.tensors(), *case.more)):
        assert outcome.path == path


@pytest.mark.parametrize("name", ["arange", "tril", "offset of a tensor", "sliding window", "left padding by index"])
def test_under_a_known_mask_of_unknown_sizes_the_result_is_right(name: str) -> None:
    case = KNOWN[name]
    for path, _, (outcome,) in compiled(attention(case.mask), (*mla.tensors(), *case.more), mla.UNKNOWN[:2]):
        assert outcome.path == path


def added(seen: Tensor, fill: float) -> Tensor:
    """0 where seen, else a number."""
    return torch.where(seen, torch.zeros((), dtype=torch.float64), torch.full((), fill, dtype=torch.float64))


def infinite(s: int, t: int) -> Tensor:
    return torch.full((s, t), -math.inf, dtype=torch.float64)


ADDED = {
    "triu of infinity": Case(lambda s, t: infinite(s, t).triu(t - s + 1), "causal"),
    "where": Case(lambda s, t: added(causal(s, t), MINIMUM), "causal"),
    "where with tensors": Case(
        lambda s, t: torch.where(causal(s, t), torch.zeros((), dtype=torch.float64), -math.inf), "causal"
    ),
    "masked_fill": Case(lambda s, t: torch.zeros(s, t).double().masked_fill(~causal(s, t), MINIMUM), "causal"),
    "times a number": Case(lambda s, t: (1.0 - causal(s, t).double()) * MINIMUM, "causal"),
    "negated": Case(lambda s, t: -(infinite(s, t) * -1).triu(t - s + 1), "causal"),
    "cast": Case(lambda s, t: infinite(s, t).float().triu(t - s + 1).double(), "causal"),
    "two sums": Case(
        lambda s, t, p: infinite(s, t).triu(t - s + 1)
        + torch.zeros(B, 1, 1, T, dtype=torch.float64).masked_fill(~p[:, None, None], -math.inf),
        "causal + padding",
        (LEFT,),
    ),
    "window of a large number": Case(
        lambda s, t: added(causal(s, t) & (arange(t) > arange(s)[:, None] + (t - s) - 4), -1e30),
        "causal + window",
    ),
    "top-k scattered into infinity": Case(
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, 0.0)[:, None],
        "top-k",
        (SCORES,),
    ),
    "top-k as DeepSeek writes it": Case(
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter_(-1, x.topk(4).indices, 0)[:, None]
        + infinite(s, t).triu(t - s + 1),
        "causal + top-k",
        (SCORES,),
    ),
    "top-k filled into a causal mask": Case(
        lambda s, t, x: added(causal(s, t), MINIMUM)[None, None].masked_fill(
            torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, False)[:, None], MINIMUM
        ),
        "causal + top-k",
        (SCORES,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", [attention, by_hand])
@pytest.mark.parametrize("case", ADDED.values(), ids=ADDED)
def test_a_known_mask_that_is_added(case: Case, spelling: Callable[[Mask], mla.Function]) -> None:
    tensors = (*mla.tensors(), *case.more)
    meaning, site, module = understood(spelling(case.mask), tensors, symbolic=False)
    assert meaning.words == case.words
    assert not meaning.tensors
    expected = (case.mask(SQ, T, *case.more) == 0).expand(B, 1, SQ, T)[:, 0].numpy()
    np.testing.assert_array_equal(attends(meaning, site, module, tensors), expected)
    for path, _, (outcome,) in compiled(spelling(case.mask), tensors):
        assert outcome.path == path


UNKNOWN = {
    "equal": Case(lambda s, t: arange(t) != arange(s)[:, None], "tensor"),
    "hole": Case(lambda s, t: causal(s, t) & (arange(t) != 4), "causal + padding"),
    "either of two": Case(lambda s, t, p: causal(s, t) | p[:, None, None], "tensor", (MIDDLE,)),
    "blocks": Case(lambda s, t: (arange(t) // 3) == (arange(s)[:, None] // 3), "tensor"),
    "of queries and keys": Case(lambda s, t, p: p[None, None], "tensor", (SCORES[0] < 0.5,)),
    "reversed": Case(lambda s, t, p: p.flip(1)[:, None, None], "padding", (LEFT,)),
    "half of the rows": Case(
        lambda s, t, i: torch.zeros(B, SQ, T, dtype=torch.bool).scatter(-1, i[:, :2], True)[:, None],
        "tensor",
        (REPEATED,),
    ),
    "float positions": Case(lambda s, t: arange(t).double() <= arange(s)[:, None] + 8.5, "tensor"),
    "half of infinity": Case(lambda s, t: infinite(s, t).triu(t - s + 1) + 0.5, "tensor"),
    "a small number": Case(lambda s, t: added(causal(s, t), -1e4), "tensor"),
    "a bias": Case(lambda s, t: (arange(t) - arange(s)[:, None]).double() * 0.1, "tensor"),
    "three values": Case(
        lambda s, t, p: added(causal(s, t), MINIMUM) + added(p[:, None, None], MINIMUM),
        "tensor", (LEFT,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN)
def test_any_other_mask_is_some_tensor(case: Case) -> None:
    tensors = (*mla.tensors(), *case.more)
    meaning, _, _ = understood(attention(case.mask), tensors, symbolic=False)
    assert meaning.words == case.words
    for path, _, (outcome,) in compiled(attention(case.mask), tensors):
        assert outcome.path == path


def test_a_mask_of_many_operations_is_read_in_time() -> None:
    def shared(s: int, t: int, p: Tensor) -> Tensor:
        mask = causal(s, t) & p[:, None, None]
        for _ in range(60):
            mask = mask & mask
        return mask

    def deep(s: int, t: int, p: Tensor) -> Tensor:
        mask = causal(s, t)
        for _ in range(2000):
            mask = ~mask
        return mask & p[:, None, None]

    assert understood(attention(shared), (*mla.tensors(), LEFT), symbolic=False)[0].words == "causal + padding"
    assert understood(attention(deep), (*mla.tensors(), LEFT), symbolic=False)[0].words == "padding + tensor"


def masks_left(module: fx.GraphModule) -> list[fx.Node]:
    """The tensors of a graph with an element for each query and key."""
    tensors = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    return [node for node in tensors if tuple(node.meta["val"].shape)[-2:] == (SQ, T)]


@pytest.mark.parametrize("name", ["arange", "tril", "rank 4 and expanded", "left padding", "left padding by index"])
def test_a_causal_mask_is_not_built(name: str) -> None:
    case = KNOWN[name]
    for path in ("absorbed", "chunked"):
        module = capture(attention(case.mask), *mla.tensors(), *case.more)
        assert masks_left(module)
        rewrite(module, path)
        assert not masks_left(module)


@pytest.mark.parametrize("name", ["triu of infinity", "where", "times a number", "two sums"])
def test_a_causal_mask_that_is_added_is_not_built(name: str) -> None:
    case = ADDED[name]
    module = capture(by_hand(case.mask), *mla.tensors(), *case.more)
    rewrite(module, "chunked")
    assert not masks_left(module)


def test_one_query_sees_every_key_of_a_cache_that_grew() -> None:
    meaning, _, _ = understood(attention(causal), mla.tensors(queries=1), symbolic=False)
    assert meaning == Meaning()


def test_a_causal_flag_and_a_causal_mask_hold_both() -> None:
    def both(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        return mla.sealed(*mla.naive(x, latent, *args), causal(SQ, T), causal=True)

    meaning, _, _ = understood(both, mla.tensors(), symbolic=False)
    assert (meaning.causal_offset, meaning.limits) == (0, ())
    for _ in compiled(both, mla.tensors()):
        pass


SPARSE = {name: (attention, KNOWN[name]) for name in ("top-k", "top-k, inverted, causal", "indices with repetitions")}
SPARSE |= {
    name: (by_hand, ADDED[name])
    for name in ("top-k scattered into infinity", "top-k as DeepSeek writes it", "top-k filled into a causal mask")
}
NOWHERE = torch.rand(B, SQ, T, generator=generator) - (arange(T) < 9).double()
"""Scores whose greatest are at keys that a top-left causal mask hides."""


def sparse(function: mla.Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()) -> fx.GraphModule:
    module = capture(function, *tensors, symbolic=symbolic)
    before = copy.deepcopy(module)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    check_right(run(before, *tensors), run(module, *tensors))
    return module


@pytest.mark.parametrize(("spelling", "case"), SPARSE.values(), ids=SPARSE)
def test_named_keys_are_all_that_is_read(spelling: Callable[[Mask], mla.Function], case: Case) -> None:
    module = sparse(spelling(case.mask), (*mla.tensors(), *case.more))
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
    assert node.args[4].meta["val"].shape == (B, SQ, 4)
    assert node.args[5] is None
    assert all(n.target is torch.ops.aten.topk.default or n in case_inputs(n) for n in masks_left(module))


def case_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.graph.nodes if n.op == "placeholder"]


ROWS = {
    "bool": lambda seen: seen,
    "infinity": lambda seen: added(seen, -math.inf),
    "a finite number": lambda seen: added(seen, MINIMUM),
}


@pytest.mark.parametrize("spelling", [attention, by_hand])
@pytest.mark.parametrize("kind", ROWS)
def test_queries_whose_named_keys_are_all_hidden(kind: str, spelling: Callable[[Mask], mla.Function]) -> None:
    """0 from SDPA, NaN from a softmax, the mean of all values where what hides is a number: as the graph was."""
    if kind == "bool" and spelling is by_hand:
        pytest.skip("a bool mask is not added")

    def mask(s: int, t: int, x: Tensor, seen: Tensor) -> Tensor:
        named = torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(2).indices, True)[:, None]
        return ROWS[kind](named & (arange(t) <= arange(s)[:, None]) & seen[:, None, None])

    sparse(spelling(mask), (*mla.tensors(), NOWHERE, LEFT))


@pytest.mark.parametrize(
    "limit", ["lengths", "offset of a tensor", "positions of a tensor", "sliding window", "left padding"]
)
def test_named_keys_and_another_limit(limit: str) -> None:
    case = KNOWN[limit]

    def mask(s: int, t: int, x: Tensor, *more: Tensor) -> Tensor:
        named = torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(5).indices, True)[:, None]
        return named & case.mask(s, t, *more)

    for symbolic in ((), [(0,), (0,), (0,), (), (), (0,)]):
        module = sparse(attention(mask), (*mla.tensors(), SCORES, *case.more), symbolic)
        (node,) = (n for n in module.graph.nodes if n.target is torch.ops.mla.sparse_latent_attention.default)
        assert node.args[5] is None


def test_named_keys_with_symbolic_sizes() -> None:
    case = KNOWN["top-k, inverted, causal"]
    sparse(attention(case.mask), (*mla.tensors(), SCORES), [*mla.UNKNOWN, (), (), (0, 1, 2)])


def test_one_query_names_its_keys() -> None:
    case = KNOWN["top-k, inverted, causal"]
    sparse(attention(case.mask), (*mla.tensors(queries=1), SCORES[:, :1]))


@pytest.mark.parametrize(
    "mask",
    [
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None]
        & torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(6).indices, True)[:, None],
        lambda s, t, x: torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, False)[:, None],
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None]
        | causal(s, t),
        lambda s, t, x: torch.zeros(x.shape).double().scatter(-1, x.topk(4).indices, -math.inf)[:, None],
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, 1.0)[:, None],
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, x.double())[:, None],
    ],
    ids=["two sets", "all but these", "these or causal", "hidden", "another number", "numbers of their own"],
)  # fmt: skip
def test_what_names_keys_otherwise_is_not_sparse(mask: Mask) -> None:
    tensors = (*mla.tensors(), SCORES)
    module = capture(attention(mask), *tensors)
    before = copy.deepcopy(module)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path in ("absorbed", "chunked")
    check_right(run(before, *tensors), run(module, *tensors))
