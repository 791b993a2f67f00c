"""Caches in FP8 pages that plain torch dequantises, however it is written: the ops read the numbers and scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.errors import assert_as_close_as_eager
from tests.passes.caches.test_pages import GATHERS, OPS, L, N, P, R, V, forward, positions
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.meaning import check_lookups

FP8, INT8 = torch.float8_e4m3fn, torch.int8
B, G, PAGES, PAGE_SIZE, LENGTH = 2, 2, 9, 4, 10

Read = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes `latent` `[B, T, L]` and `k_rope` `[B, T, R]` of pages in FP8, scales, rope pages and a table."""


def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Naive MLA of queries `[B, N, Sq, P + R]`."""
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return torch.ops.mla.sealed_attention(q, k, v, mask, 0.0, False, None, False)


def inputs(
    dtype: torch.dtype = torch.float32, queries: int = 1, groups: int = G, coded: torch.dtype = FP8
) -> list[Tensor]:
    """Queries, the weight, latents `[PAGES, PAGE_SIZE, L]` in FP8 or int8, scales `[PAGES, PAGE_SIZE, groups]`, rope
    pages and a table. Scales are powers of two. One entry of the table is negative: it counts from the end."""
    q, weight = torch.randn(B, N, queries, P + R), torch.randn(N * (P + V), L) / L**0.5
    pages, scales = torch.randn(PAGES, PAGE_SIZE, L), 2.0 ** torch.randint(-3, 3, (PAGES, PAGE_SIZE, groups))
    rope, table = torch.randn(PAGES, PAGE_SIZE, R), torch.tensor([[1, 5, 2], [8, -9, 3]])
    if coded == INT8:
        pages, scales = (32 * pages).round().clamp(-128, 127), scales / 32
    return [q.to(dtype), weight.to(dtype), pages.to(coded), scales, rope.to(dtype), table]


def graph(read: Read, tensors: list[Tensor]) -> fx.GraphModule:
    return capture(lambda q, weight, *cache: attend(q, *read(*cache), weight), *tensors)


def exact(read: Read, tensors: list[Tensor]) -> Tensor:
    """The result in float64, from the keys that `read` makes of the cache."""
    q, weight, *cache = tensors
    return attend(q.double(), *(keys.double() for keys in read(*cache)), weight.double())


def reads_coded(module: fx.GraphModule, coded: torch.dtype = FP8) -> bool:
    """Whether attention over pages takes latents in FP8 or int8 with scales, and nothing is gathered."""
    gathered = [n.meta["val"].dtype for n in module.graph.nodes if n.target in GATHERS]
    calls = [node for node in module.graph.nodes if node.target in OPS.values()]
    given = [dict(zip([a.name for a in n.target._schema.arguments], n.args, strict=False)) for n in calls]
    return (
        len(given) == 1
        and given[0]["latent_pages"].meta["val"].dtype == coded
        and given[0].get("latent_scales") is not None
        and not any(dtype.is_floating_point or dtype in (torch.uint8, INT8) for dtype in gathered)
    )


def check_read(read: Read, tensors: list[Tensor], path: str, coded: torch.dtype = FP8) -> None:
    """Assert that the path's op reads pages of this dtype as they are, and that the result is right."""
    module = graph(read, tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    assert outcome.reason.endswith("reads the pages")
    assert reads_coded(module, coded)
    assert_as_close_as_eager(run(module, *tensors), eager, exact(read, tensors))


def times(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers `[..., L]` times the scales `[..., G]` of their groups."""
    return (numbers.to(dtype).unflatten(-1, (scales.shape[-1], -1)) * scales.to(dtype)[..., None]).flatten(-2)


def in_pages(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def laid_out_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, own = pages[table].flatten(1, 2), scales[table].flatten(1, 2)
    return times(latent, own, rope.dtype), rope[table].flatten(1, 2)


def the_first_keys(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, k_rope = in_pages(pages, scales, rope, table)
    return latent[:, :LENGTH], k_rope[:, :LENGTH]


def position_by_position(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    page, row = table[:, positions() // PAGE_SIZE], positions() % PAGE_SIZE
    return times(pages[page, row], scales[page, row], rope.dtype), rope[page, row]


def slots(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    slot = (forward(table)[:, positions() // PAGE_SIZE] * PAGE_SIZE + positions() % PAGE_SIZE).flatten()
    latent, own, k_rope = (
        tokens.flatten(0, 1).index_select(0, slot).view(B, LENGTH, -1) for tokens in (pages, scales, rope)
    )
    return times(latent, own, rope.dtype), k_rope


def embedding(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, own, k_rope = (
        F.embedding(forward(table), tokens.flatten(1)).view(B, -1, tokens.shape[2]) for tokens in (pages, scales, rope)
    )
    return times(latent, own, rope.dtype), k_rope


def scale_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is the first factor, and is repeated for the columns of its group."""
    own = scales[table].flatten(1, 2).repeat_interleave(L // scales.shape[2], -1)
    return own * pages[table].flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)


def in_float32(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in bfloat16 times scales in float32; the product is cast afterwards."""
    numbers = pages[table].to(torch.bfloat16).unflatten(-1, (scales.shape[-1], -1))
    return (numbers * scales[table][..., None]).flatten(-2).to(rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_a_token(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each token, without an axis for groups."""
    latent = pages[table].to(rope.dtype) * scales[..., 0][table][..., None]
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def one_for_all(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = pages[table].to(rope.dtype) * scales[0, 0, 0]
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def a_number_for_all(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return (0.25 * pages[table].to(rope.dtype)).flatten(1, 2), rope[table].flatten(1, 2)


def unscaled(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([pages, rope.to(FP8)], dim=-1)[table].flatten(1, 2)
    return tokens[..., :L].to(rope.dtype), tokens[..., L:].to(rope.dtype)


def a_number_and_one_for_all(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = pages[table].to(rope.dtype) / 4 * scales[0, 0, :1]
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def one_a_group(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Static scales: for each group of columns, the same for all tokens."""
    return times(pages[table], scales[0, 0].bfloat16(), rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def whole_in_fp8(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and rope keys in one pool, and one scale."""
    tokens = torch.cat([pages, rope.to(FP8)], dim=-1)[table].to(rope.dtype) * scales[0, 0, :1]
    latent, k_rope = tokens.flatten(1, 2).split([L, R], dim=-1)
    return latent, k_rope


def whole_in_fp8_one_a_token(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([pages, rope.to(FP8)], dim=-1)[table].to(rope.dtype) * scales[..., :1][table]
    latent, k_rope = tokens.flatten(1, 2).split([L, R], dim=-1)
    return latent, k_rope


def bytes_before(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return in_pages(pages.view(torch.uint8).clone().view(FP8), scales, rope, table)


def bytes_after(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    kept = pages.view(torch.uint8).clone()
    return times(kept[table].view(FP8), scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def bytes_laid_out(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = pages.view(torch.uint8)[table].flatten(1, 2)[:, :LENGTH].view(FP8)
    own = scales[table].flatten(1, 2)[:, :LENGTH]
    return times(latent, own, rope.dtype), rope[table].flatten(1, 2)[:, :LENGTH]


READS: dict[str, Read] = {
    read.__name__.replace("_", " "): read
    for read in (
        in_pages,
        laid_out_first,
        the_first_keys,
        position_by_position,
        slots,
        embedding,
        scale_first,
        in_float32,
        one_a_token,
        one_for_all,
        a_number_for_all,
        unscaled,
        a_number_and_one_for_all,
        one_a_group,
        whole_in_fp8,
        whole_in_fp8_one_a_token,
        bytes_before,
        bytes_after,
        bytes_laid_out,
    )
}


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_pages_in_fp8_are_read_as_they_are(read: Read, path: str) -> None:
    tensors = inputs(queries=1 if path == "absorbed" else 9)
    check_read(read, tensors, path)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_trace_says_of_scaled_lookups_is_what_they_hold(read: Read) -> None:
    cache = inputs()[2:]
    assert check_lookups(capture(read, *cache), *cache)


SIZES = {
    "several queries": {"queries": 3},
    "groups of one column": {"groups": L},
    "one group": {"groups": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_number_of_queries_groups_and_dtypes(sizes: dict) -> None:
    tensors = inputs(**sizes)
    module = graph(in_pages, tensors)
    eager = run(module, *tensors)
    rewrite(module)
    assert reads_coded(module)
    if eager.dtype == torch.float64:
        check_right(eager, run(module, *tensors))
    else:
        assert_as_close_as_eager(run(module, *tensors), eager, exact(in_pages, tensors))


def test_pages_without_rope_keys_are_read_too() -> None:
    q, weight, pages, scales, _, table = inputs(torch.float64)

    def function(q: Tensor, weight: Tensor, pages: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        latent = times(pages[table], scales[table], q.dtype).flatten(1, 2)
        k, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        return torch.ops.mla.sealed_attention(q, k, v, None, 0.0, False, None, False)

    tensors = q[..., :P], weight, pages, scales, table
    module = capture(function, *tensors)
    eager = run(module, *tensors)
    rewrite(module)
    assert reads_coded(module)
    check_right(eager, run(module, *tensors))


def test_symbolic_sizes_are_read_too() -> None:
    tensors = inputs(torch.float64)
    symbolic = ([0], [], [0], [0], [0], [0, 1])
    module = capture(lambda q, weight, *cache: attend(q, *in_pages(*cache), weight), *tensors, symbolic=symbolic)
    eager = run(module, *tensors)
    rewrite(module)
    assert reads_coded(module)
    check_right(eager, run(module, *tensors))


SPARSE = torch.ops.mla.sparse_latent_attention.default


@pytest.mark.parametrize(
    "read", [in_pages, the_first_keys, position_by_position, one_for_all, whole_in_fp8_one_a_token]
)
def test_keys_that_are_named_one_by_one_are_read_in_fp8(read: Read) -> None:
    tensors = inputs(torch.float64, queries=3)
    length = read(*tensors[2:])[0].shape[1]
    scores = torch.randn(B, 3, length)

    def function(q: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        *cache, scores = rest
        named = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(5).indices, True)
        return attend(q, *read(*cache), weight, named[:, None])

    tensors.append(scores)
    module = capture(function, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    assert outcome.reason.endswith("reads the pages")
    (call,) = (node.args for node in module.graph.nodes if node.target is SPARSE)
    assert call[2].meta["val"].dtype == FP8
    check_right(eager, run(module, *tensors))
