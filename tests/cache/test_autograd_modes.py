"""Caches in every mode of autograd: with gradients, without, and under `torch.inference_mode`."""

import pytest
import torch

from mla_compile import PagedLatentCache
from mla_compile.cache import FP8PagePool, INT8PagePool, PagePool
from mla_compile.cache.indexer_keys import IndexerKeys
from mla_compile.cache.room import Room

growing = pytest.importorskip("mla_compile.cache.growing", exc_type=ImportError)  # needs transformers

POOLS = {
    "plain": lambda: PagePool(1, 4, 2, pages=16, page_size=2),
    "fp8": lambda: FP8PagePool(1, 4, 2, pages=16, page_size=2),
    "fp8 with a scale": lambda: FP8PagePool(1, 4, 2, pages=16, page_size=2, scale=0.5),
    "int8": lambda: INT8PagePool(1, 4, 2, pages=16, page_size=2),
}


class Step(torch.nn.Module):
    """Make latents and rope keys of hidden states, append them to a cache, and sum functions of all that it holds."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(8, 6)
        self.scale = torch.nn.Parameter(torch.rand(4))

    def forward(self, hidden, cache):
        latent, k_rope = self.down(hidden)[:, None].split([4, 2], dim=-1)
        all_latents, all_ropes = cache.update(latent, k_rope, 0)
        return (all_latents * self.scale).sum() + all_ropes.sum() + latent.sum()


class Concatenated:
    """All latents and rope keys, concatenated at each step."""

    def __init__(self):
        self.kept = torch.empty(2, 1, 0, 4), torch.empty(2, 1, 0, 2)

    def update(self, latent, k_rope, layer):
        self.kept = torch.cat([self.kept[0], latent], dim=2), torch.cat([self.kept[1], k_rope], dim=2)
        return self.kept


class Grown:
    """One layer of a `LatentCache`."""

    def __init__(self):
        self.layer = growing.GrowingLayer(Room(0), 0)

    def update(self, latent, k_rope, layer):
        return self.layer.update(latent, k_rope)


class Indexed(Concatenated):
    """Rope keys that are concatenated, and latents that are kept as an indexer's keys are."""

    def __init__(self):
        super().__init__()
        self.keys = IndexerKeys()

    def update(self, latent, k_rope, layer):
        return self.keys.update(latent[:, 0], layer)[:, None], super().update(latent, k_rope, layer)[1]


def emptied(cache):
    """The cache, whose next token makes a new table."""
    cache.reset()
    return cache


def fixed():
    return PagedLatentCache(POOLS["plain"](), max_pages=4, batch=2)


CACHES = {
    "pages": lambda: PagedLatentCache(POOLS["plain"]()),
    "fp8 pages": lambda: PagedLatentCache(POOLS["fp8"]()),
    "pages from the beginning": fixed,
    "pages from the beginning, after a reset": lambda: emptied(fixed()),
    "buffers": Grown,
    "indexer's keys": Indexed,
}


def steps(cache, *runs):
    """What three steps return; each of `runs` is a function and the mode that it runs in."""
    torch.manual_seed(0)
    results = []
    for count, (function, mode) in zip((3, 1, 1), runs, strict=True):
        with mode():
            results.append(function(torch.randn(2, count, 8), cache))
    return results


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_that_need_gradients_leave_the_pool_without(pool, compiled):
    model, pages = Step(), POOLS[pool]()
    expected = steps(PagedLatentCache(POOLS[pool]()), *[(model, torch.no_grad)] * 3)
    run = torch.compile(model, backend="mla", fullgraph=True) if compiled else model
    found = steps(PagedLatentCache(pages), *[(run, torch.enable_grad)] * 3)
    assert not any(tensor.requires_grad for tensor in pages.tensors)
    torch.testing.assert_close(found, expected)
    found[-1].backward()
    torch.testing.assert_close(model.down.bias.grad, torch.tensor([2.0] * 4 + [0.0] * 2))  # not by what it has read


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cache", [Grown, Indexed])
def test_a_backward_goes_through_all_steps_of_buffers(cache, compiled):
    model = Step()
    run = torch.compile(model, backend="mla", fullgraph=True) if compiled else model
    gradients = []
    for function, kept in ((model, Concatenated()), (run, cache())):
        losses = steps(kept, *[(function, torch.enable_grad)] * 3)
        gradients.append(torch.autograd.grad(losses, list(model.parameters()), grad_outputs=[torch.ones(())] * 3))
    torch.testing.assert_close(*gradients)


def test_buffers_that_were_filled_with_gradients_go_on_without():
    model, cache = Step(), Grown()
    steps(cache, (model, torch.enable_grad), *[(model, torch.no_grad)] * 2)
    assert not cache.layer.keys.requires_grad


def orders():
    """Which of three steps are compiled, for each cache. Compilation takes long: all but a few are slow tests."""
    for cache in CACHES:
        for name, compiled in {"eager": (), "first": (0,), "others": (1, 2), "all": (0, 1, 2)}.items():
            fast = name == "eager" or (name == "first" and cache in ("pages", "buffers"))
            yield pytest.param(cache, compiled, id=f"{cache}-{name}", marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("cache", "compiled"), list(orders()))
def test_what_is_filled_under_inference_mode_goes_on_without(cache, compiled):
    model = Step()
    runs = [torch.compile(model, backend="mla", fullgraph=True) if i in compiled else model for i in range(3)]
    expected = steps(CACHES[cache](), *[(model, torch.no_grad)] * 3)
    found = steps(CACHES[cache](), *zip(runs, (torch.inference_mode, torch.no_grad, torch.no_grad), strict=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_made_under_inference_mode_goes_on_without(cache):
    model = Step()
    with torch.inference_mode():
        kept = CACHES[cache]()
    found = steps(kept, *[(model, mode) for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)])
    torch.testing.assert_close(found, steps(CACHES[cache](), *[(model, torch.no_grad)] * 3))
