"""The meaning of a mask, read from the graph, is the mask, element by element; in doubt it is just a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, arange, fx

from mla_compile.passes.algebra.terms import Read
from mla_compile.passes.attention.attention import Attention
from mla_compile.passes.attention.find import find
from mla_compile.passes.masks.causal import Causal
from mla_compile.passes.masks.limit import Limit
from mla_compile.passes.masks.marked import Marked
from mla_compile.passes.masks.meaning import Meaning, understand
from mla_compile.passes.masks.positions import Element
from mla_compile.passes.masks.tensor import TensorMask
from mla_compile.passes.masks.top_k import TopK
from mla_compile.passes.mla.prove import prove
from mla_compile.passes.mla.site import Site
from mla_compile.passes.trace.trace import Trace
from tests.passes import spellings as mla
from tests.passes.checks import on_paths
from tests.passes.graphs import capture, rewrite, values
from tests.passes.mask_cases import (
    ADDED,
    KNOWN,
    LEFT,
    MIDDLE,
    MINIMUM,
    REPEATED,
    SCORES,
    Case,
    Mask,
    added,
    attention,
    by_hand,
    causal,
    infinite,
    masks_left,
)
from tests.passes.meaning import World
from tests.passes.spellings import SQ, B, T


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
    """Which keys each query attends to by a meaning, bool `[B, Sq, T]`, computed element by element from its kinds."""
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
    for kind in meaning.kinds:
        match kind:
            case Causal(offset):
                allowed &= key <= query + world.number(offset)
            case Limit(what):
                left = world.number(what.const)
                for term, factor in what.terms:
                    left = left + factor * (world.read(term, grids) if isinstance(term, Read) else grids[term])
                allowed &= left <= 0
            case Marked(Element(read, inverted)):
                allowed &= world.read(read, grids).astype(bool) ^ inverted
            case TopK(named):
                size = world.number(named.named.size)
                inner = {axis: grid[..., None] for axis, grid in grids.items()} | {named.named: np.arange(size)}
                allowed &= (world.read(named.indices, inner) == key[..., None]).any(-1) ^ named.inverted
            case _:
                raise AssertionError(f"nothing is known of {kind}")
    return allowed


SYMBOLIC = ("arange", "less a maximum", "tril", "offset of a tensor", "sliding window", "left padding by index")
"""Masks under which the results of a graph with symbolic sizes are checked, too."""


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_mask(name: str, symbolic: bool) -> None:
    case = KNOWN[name]
    if symbolic and case.words.endswith(("top-k", "tensor")):
        pytest.skip("the indices have sizes of their own")
    tensors = (*mla.tensors(), *case.more)
    meaning, site, module = understood(attention(case.mask), tensors, symbolic)
    assert meaning.words == case.words
    assert not any(isinstance(kind, TensorMask) for kind in meaning.kinds)
    expected = case.mask(SQ, T, *case.more).expand(B, 1, SQ, T)[:, 0].numpy()
    np.testing.assert_array_equal(attends(meaning, site, module, tensors), expected)
    if not symbolic or name in SYMBOLIC:
        for path, _, (outcome,) in on_paths(module, tensors):
            assert outcome.path == path


@pytest.mark.parametrize("spelling", [attention, by_hand])
@pytest.mark.parametrize("case", ADDED.values(), ids=ADDED)
def test_a_known_mask_that_is_added(case: Case, spelling: Callable[[Mask], mla.Function]) -> None:
    tensors = (*mla.tensors(), *case.more)
    meaning, site, module = understood(spelling(case.mask), tensors, symbolic=False)
    assert meaning.words == case.words
    assert not any(isinstance(kind, TensorMask) for kind in meaning.kinds)
    expected = (case.mask(SQ, T, *case.more) == 0).expand(B, 1, SQ, T)[:, 0].numpy()
    np.testing.assert_array_equal(attends(meaning, site, module, tensors), expected)
    for path, _, (outcome,) in on_paths(module, tensors):
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
def test_any_other_mask_is_a_tensor_or_padding(case: Case) -> None:
    tensors = (*mla.tensors(), *case.more)
    meaning, _, module = understood(attention(case.mask), tensors, symbolic=False)
    assert meaning.words == case.words
    for path, _, (outcome,) in on_paths(module, tensors):
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


def takes_a_flag_and_a_mask() -> bool:
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        F.scaled_dot_product_attention(tensor, tensor, tensor, torch.ones(1, 1, dtype=torch.bool), is_causal=True)
    except RuntimeError:
        return False
    return True


FLAG_AND_MASK = pytest.mark.skipif(not takes_a_flag_and_a_mask(), reason="torch 2.15 takes a flag or a mask")


@FLAG_AND_MASK
def test_a_causal_flag_and_a_causal_mask_hold_both() -> None:
    def both(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        return mla.sealed(*mla.naive(x, latent, *args), causal(SQ, T), causal=True)

    meaning, _, module = understood(both, mla.tensors(), symbolic=False)
    assert meaning.kinds == (Causal(0),)
    for path, _, (outcome,) in on_paths(module, mla.tensors()):
        assert outcome.path == path


@FLAG_AND_MASK
def test_a_causal_flag_and_a_causal_mask_of_an_offset_that_may_be_less_hold_both() -> None:
    def both(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        return mla.sealed(*mla.naive(x, latent, *args), causal(x.shape[1], latent.shape[1]), causal=True)

    meaning, _, module = understood(both, mla.tensors(), symbolic=True)
    assert [type(kind) for kind in meaning.kinds] == [Causal, Causal]
    assert meaning.words == "causal"
    for path, _, (outcome,) in on_paths(module, mla.tensors()):
        assert outcome.path == path
