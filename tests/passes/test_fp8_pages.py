"""Caches in FP8 pages, dequantised in plain torch: attention reads the numbers and their scales; and what it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from tests.errors import assert_as_close_as_eager
from tests.passes.graphs import capture, rewrite, run
from tests.passes.meaning import check_lookups
from tests.passes.test_pages import GATHERS, OPS, L, N, P, R, V

FP8 = torch.float8_e4m3fn
B, G, PAGES, PAGE_SIZE, LENGTH = 2, 2, 9, 4, 10

Read = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`latent, k_rope` `[B, T, L]`, `[B, T, R]` of pages in FP8, scales, rope pages and a table."""


def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Naive MLA of queries `[B, N, Sq, P + R]`."""
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return torch.ops.mla.sealed_attention(q, k, v, mask, 0.0, False, None, False)


def inputs(dtype: torch.dtype = torch.float32, queries: int = 1, groups: int = G) -> list[Tensor]:
    """Queries, the weight, latents `[PAGES, PAGE_SIZE, L]` in FP8, scales `[PAGES, PAGE_SIZE, groups]` powers of
    two, rope pages and a table, one entry of which counts from the end."""
    q, weight = torch.randn(B, N, queries, P + R), torch.randn(N * (P + V), L) / L**0.5
    pages, scales = torch.randn(PAGES, PAGE_SIZE, L), 2.0 ** torch.randint(-3, 3, (PAGES, PAGE_SIZE, groups))
    rope, table = torch.randn(PAGES, PAGE_SIZE, R), torch.tensor([[1, 5, 2], [8, -9, 3]])
    return [q.to(dtype), weight.to(dtype), pages.to(FP8), scales, rope.to(dtype), table]


def graph(read: Read, tensors: list[Tensor]) -> fx.GraphModule:
    return capture(lambda q, weight, *cache: attend(q, *read(*cache), weight), *tensors)


def exact(read: Read, tensors: list[Tensor]) -> Tensor:
    """The result in float64, of the very numbers that the cache stands for."""
    q, weight, *cache = tensors
    return attend(q.double(), *(keys.double() for keys in read(*cache)), weight.double())


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes]


def reads_fp8(module: fx.GraphModule) -> bool:
    """Whether attention over pages takes latents in FP8 with scales, and nothing is gathered."""
    gathered = [n.meta["val"].dtype for n in module.graph.nodes if n.target in GATHERS]
    calls = [node for node in module.graph.nodes if node.target in OPS.values()]
    given = [dict(zip([a.name for a in n.target._schema.arguments], n.args, strict=False)) for n in calls]
    return (
        len(given) == 1
        and given[0]["latent_pages"].meta["val"].dtype == FP8
        and given[0].get("latent_scales") is not None
        and not any(dtype.is_floating_point or dtype == torch.uint8 for dtype in gathered)
    )


def grouped(latent: Tensor, scales: Tensor) -> Tensor:
    return (latent.unflatten(-1, (G, -1)) * scales[..., None]).flatten(-2)


def in_pages(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = (pages[table].to(rope.dtype).unflatten(-1, (G, -1)) * scales[table].to(rope.dtype)[..., None]).flatten(-2)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


READS: dict[str, Read] = {"in pages": in_pages}


@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_pages_in_fp8_are_read_as_they_are(read: Read, path: str) -> None:
    tensors = inputs(queries=1 if path == "absorbed" else 9)
    module = graph(read, tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, path)
    assert (outcome.path, targets(module).count(OPS[path])) == (path, 1)
    assert outcome.reason.endswith("reads the pages")
    assert reads_fp8(module)
    assert_as_close_as_eager(run(module, *tensors), eager, exact(read, tensors))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_trace_says_of_scaled_lookups_is_what_they_hold(read: Read) -> None:
    cache = inputs()[2:]
    lookups = check_lookups(capture(read, *cache), *cache)
    assert any(lookup.scales is not None for lookup in lookups.values())
