"""Kinds of masks without some or all of their optional methods: what these would say is in their tensors, too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, arange, fx

from mla_compile.passes.algebra.terms import Read
from mla_compile.passes.masks import kinds, meaning
from mla_compile.passes.masks.kind import Filled, Kind
from mla_compile.passes.masks.pairs import Pairs
from mla_compile.passes.outcome import Outcome
from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.caches import test_fp8_pages as fp8
from tests.passes.caches import test_pages as pages
from tests.passes.checks import check_right
from tests.passes.graphs import capture, on_a_gpu, rewrite, run
from tests.passes.mask_cases import MINIMUM, added, attention

B, SQ, T = 2, 3, 12
"""The same for pages and dense caches: 3 pages have 12 keys."""
PATHS = ("absorbed", "chunked", "sparse")
MANDATORY = {"reads", "tensor"}
OPTIONAL = sorted(name for name in vars(Kind) if not name.startswith("_") and name not in MANDATORY)

generator = torch.Generator().manual_seed(5)
LENGTHS = torch.tensor([7, 10])
PADDING = arange(T) >= torch.tensor([2, 0])[:, None]
SCORES = torch.rand(B, SQ, T, generator=generator)


def last() -> Tensor:
    """The position of each query, the last of which is the last key."""
    return (arange(SQ) + T - SQ)[:, None]


def causal() -> Tensor:
    return arange(T) <= last()


def top_k(scores: Tensor, keys: int = 6) -> Tensor:
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(keys).indices, True)[:, None]


def up_to(lengths: Tensor) -> Tensor:
    return arange(T) < lengths[:, None, None, None]


GIVEN = LENGTHS, PADDING, SCORES
Masks = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A mask of lengths `[B]`, padding `[B, T]` and scores `[B, SQ, T]`."""
ALL, NUMBER = "all", "all, as a number"
MASKS: dict[str, Masks] = {
    "causal": lambda n, p, x: causal(),
    "a causal limit for each sequence": lambda n, p, x: arange(T) <= n[:, None, None, None] - SQ + arange(SQ)[:, None],
    "lengths": lambda n, p, x: up_to(n),
    "causal and lengths": lambda n, p, x: causal() & up_to(n),
    "a window": lambda n, p, x: causal() & (arange(T) > last() - 4),
    "padding": lambda n, p, x: p[:, None, None] & causal(),
    "top-k": lambda n, p, x: top_k(x),
    "all but the named": lambda n, p, x: ~top_k(x, 3),
    ALL: lambda n, p, x: causal() & up_to(n) & (arange(T) > last() - 9) & p[:, None, None] & top_k(x),
    NUMBER: lambda n, p, x: added(causal() & up_to(n) & p[:, None, None] & top_k(x, 4), MINIMUM).float(),
    "a bias": lambda n, p, x: x[:, None].masked_fill(~up_to(n), -math.inf),
    "nothing is left": lambda n, p, x: added(up_to(n) & (arange(T) > 7), torch.finfo(torch.float32).min).float(),
}


def forgetful(kind: Kind, forgotten: set[str]) -> Kind:
    """A kind that is `kind` without the methods `forgotten`."""

    def of_the_other(name: str) -> Any:
        if isinstance(vars(Kind)[name], property):
            return property(lambda self: getattr(self.kind, name))
        return lambda self, *args: getattr(self.kind, name)(*args)

    known = {name: of_the_other(name) for name in (*MANDATORY, *OPTIONAL) if name not in forgotten}
    made: type[Kind] = dataclass(frozen=True)(type("Forgetful", (Kind,), {"__annotations__": {"kind": Kind}, **known}))
    return made(kind)  # type: ignore[call-arg]


def forget(monkeypatch: pytest.MonkeyPatch, *forgotten: str) -> None:
    """Make the passes recognise only kinds without the methods `forgotten`."""

    def less(recognise: Callable[..., Kind | None]) -> Callable[..., Kind | None]:
        def recogniser(*args: Any) -> Kind | None:
            kind = recognise(*args)
            return None if kind is None else forgetful(kind, set(forgotten))

        return recogniser

    monkeypatch.setattr(kinds, "RECOGNISERS", tuple(map(less, kinds.RECOGNISERS)))
    monkeypatch.setattr(meaning, "tensor_mask", less(meaning.tensor_mask))


Attention = Callable[..., Tensor]
Cache = Callable[[Masks], tuple[Attention, Sequence[Tensor]]]


def _as(q: Tensor, mask: Tensor) -> Tensor:
    return mask.to(q.dtype) if mask.is_floating_point() else mask


def of_pages(mask: Masks) -> tuple[Attention, Sequence[Tensor]]:
    q, pool, table, weight = pages.inputs(queries=SQ)

    def function(q: Tensor, pool: Tensor, table: Tensor, weight: Tensor, *given: Tensor) -> Tensor:
        return pages.attend(q, pool[table].flatten(1, 2), weight, mask=_as(q, mask(*given)))

    return function, (q, pool, table, weight, *GIVEN)


def of_fp8_pages(mask: Masks) -> tuple[Attention, Sequence[Tensor]]:
    def function(q: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        keys = (tokens.to(q.dtype) for tokens in fp8.in_pages(*rest[:4]))
        return fp8.attend(q, *keys, weight, _as(q, mask(*rest[4:])))

    return function, (*fp8.inputs(queries=SQ), *GIVEN)


def of_a_dense_cache(mask: Masks) -> tuple[Attention, Sequence[Tensor]]:
    q, _, _, weight = pages.inputs(queries=SQ)

    def function(q: Tensor, cache: Tensor, weight: Tensor, *given: Tensor) -> Tensor:
        return pages.attend(q, cache, weight, mask=_as(q, mask(*given)))

    return function, (q, torch.randn(B, T, pages.L + pages.R), weight, *GIVEN)


CACHES: dict[str, Cache] = {"dense": of_a_dense_cache, "pages": of_pages, "FP8 pages": of_fp8_pages}
FEWER_KINDS = [(cache, name) for cache in (of_a_dense_cache, of_pages) for name in ("causal and lengths", "a window")]
FEWER_KINDS += [(of_pages, ALL), (of_a_dense_cache, NUMBER)]
KEPT = torch.float8_e4m3fn, torch.bool, torch.int64


def rewritten(cache: Cache, mask: Masks) -> Iterator[tuple[fx.GraphModule, Outcome]]:
    """The graph and outcome of each path. Asserts that every result is as close to float64 as eager's."""
    function, tensors = cache(mask)
    traced = capture(function, *tensors)
    exact = function(*(t if t.dtype in KEPT else t.double() for t in tensors))
    for path in PATHS:
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.rewritten
        assert_as_close_as_eager(run(module, *tensors), function(*tensors), exact)
        yield module, outcome


@pytest.fixture(autouse=True)
def every_path_reads_up_to_lengths() -> Iterator[None]:
    with on_a_gpu():
        yield


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_kinds_that_are_nothing_but_a_tensor(cache: Cache, mask: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, *OPTIONAL)
    for _, outcome in rewritten(cache, mask):
        assert outcome.path in ("absorbed", "chunked")
        assert outcome.mask == "tensor"


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (of_a_dense_cache, ALL),
        (of_pages, NUMBER),
        *(pytest.param(cache, name, marks=pytest.mark.slow) for cache, name in FEWER_KINDS),
    ],
)
@pytest.mark.parametrize("forgotten", OPTIONAL)
def test_what_a_kind_forgets_is_not_lost(
    forgotten: str, cache: Cache, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch, forgotten)
    for _ in rewritten(cache, MASKS[name]):
        pass


@pytest.mark.parametrize("forgotten", OPTIONAL)
def test_what_a_kind_forgets_is_not_lost_where_sizes_are_symbols(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch, forgotten)

    def mask(s: int, t: int) -> Tensor:
        places = (arange(s) + t - s)[:, None]
        return (arange(t) <= places) & (arange(t) > places - 4)

    tensors = mla.tensors()
    traced = capture(attention(mask), *tensors, symbolic=mla.UNKNOWN[:2])
    before = run(traced, *tensors)
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.path == path
        check_right(before, run(module, *tensors))


@dataclass(frozen=True)
class EveryOther(Kind):
    """A kind of mask that the passes do not have: it hides the keys with an odd index."""

    reads: tuple[Read, ...] = ()

    def tensor(self, pairs: Pairs) -> Tensor | Filled:
        return pairs.key % 2 == 0


@pytest.mark.diagonal
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_new_kind_hides_keys_beside_any_other(cache: Cache, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added to what the passes understand of each mask. It has only a tensor, which has to hide its keys."""
    understand = meaning.understand

    def with_another(*args: Any) -> meaning.Meaning:
        understood = understand(*args)
        return meaning.Meaning((*understood.kinds, EveryOther()), understood.fill)

    monkeypatch.setattr("mla_compile.passes.pipeline.understand", with_another)
    given, even = MASKS[name], arange(T) % 2 == 0
    function, tensors = cache(given)
    traced = capture(function, *tensors)

    def wanted(*tensors: Tensor) -> Tensor:
        mask = given(*tensors)
        if mask.dtype == torch.bool:
            return mask & even
        finite = mask.isfinite().all()
        return mask.masked_fill(~even, float(mask.min()) if finite else -math.inf)

    hidden, _ = cache(wanted)
    exact = hidden(*(t if t.dtype in KEPT else t.double() for t in tensors))
    for path in PATHS:
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.mask.endswith("tensor")
        assert outcome.path in ("absorbed", "chunked")
        assert_as_close_as_eager(run(module, *tensors), hidden(*tensors), exact)
