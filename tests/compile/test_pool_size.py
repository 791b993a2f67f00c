"""A compiled step writes and reads pages in place: it touches those of its sequences, however large the pool is.

Nothing is timed. Bytes that are allocated are counted, and pages of the operating system that are touched for the first
time.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.memory import peak

B, N, L, P, R, V, PAGE_SIZE, ENTRIES = 2, 4, 64, 16, 16, 16, 16, 40
PAGE_BYTES = PAGE_SIZE * (L + R) * 4
SMALL, LARGE = (8 << 20) // PAGE_BYTES, (512 << 20) // PAGE_BYTES
"""Pages of pools of 8 and of 512 MiB."""


def by_index_put(pool: Tensor, table: Tensor, lengths: Tensor, new: Tensor) -> None:
    place = lengths[:, None] - new.shape[1] + torch.arange(new.shape[1], device=new.device)
    pool[table.gather(1, place // PAGE_SIZE), place % PAGE_SIZE] = new


def by_index_copy(pool: Tensor, table: Tensor, lengths: Tensor, new: Tensor) -> None:
    place = lengths[:, None] - new.shape[1] + torch.arange(new.shape[1], device=new.device)
    slots = table.gather(1, place // PAGE_SIZE) * PAGE_SIZE + place % PAGE_SIZE
    pool.view(-1, L + R).index_copy_(0, slots.flatten(), new.flatten(0, 1))


def by_slices(pool: Tensor, table: Tensor, lengths: Tensor, new: Tensor) -> None:
    """For pages that lie side by side: those of sequence b begin at page `b * ENTRIES`."""
    start = ENTRIES * PAGE_SIZE - new.shape[1]
    flat = pool.view(-1, L + R)
    for b in range(B):
        first = b * ENTRIES * PAGE_SIZE + start
        flat[first : first + new.shape[1]] = new[b]


COPIES = torch.__version__.startswith("2.11.")
"""Whether stock Inductor too copies a pool to which `index_copy_` writes."""
WRITES: tuple[Callable[[Tensor, Tensor, Tensor, Tensor], None], ...] = (
    (by_index_put, by_slices) if COPIES else (by_index_put, by_index_copy, by_slices)
)
"""How each layer writes to its pool."""


def step(q: Tensor, pools: list[Tensor], table: Tensor, lengths: Tensor, weight: Tensor, new: Tensor) -> Tensor:
    """The last Sq of `lengths` tokens of each sequence, in naive MLA."""
    outputs = []
    last = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    seen = (torch.arange(ENTRIES * PAGE_SIZE, device=q.device) <= last[..., None])[:, None]
    for pool, write in zip(pools, WRITES, strict=True):
        write(pool, table, lengths, new)
        latent, k_rope = pool[table].flatten(1, 2).split([L, R], dim=-1)
        k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.stack(outputs)


def untouched(pages: int) -> Tensor:
    """A pool of zeros of which nothing is in memory yet."""
    memory = mmap.mmap(-1, pages * PAGE_BYTES)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(pages, PAGE_SIZE, L + R)


def inputs(queries: int, pages: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    table = torch.arange(B * ENTRIES).view(B, ENTRIES)
    pools = [untouched(pages) for _ in WRITES]
    for pool in pools:
        pool[: B * ENTRIES] = torch.randn(B * ENTRIES, PAGE_SIZE, L + R)
        torch._dynamo.mark_dynamic(pool, 0)
    lengths = torch.full((B,), ENTRIES * PAGE_SIZE)
    weight, new = torch.randn(N * (P + V), L) / L**0.5, torch.randn(B, queries, L + R)
    return torch.randn(B, N, queries, P + R), pools, table, lengths, weight, new


def touched(call: Callable[[], object]) -> int:
    """How many pages of the operating system a call touches for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize(("queries", "path"), [(1, "absorbed"), (300, "chunked")])
def test_what_a_step_touches_does_not_grow_with_the_pool(queries: int, path: str) -> None:
    compiled = torch.compile(step, backend="mla", fullgraph=True, options={"mla.path": path})
    most, new = [], []
    for pages in (SMALL, LARGE):
        q, pools, *rest = given = inputs(queries, pages)
        plain = [pool[: B * ENTRIES].clone() for pool in pools]
        eager = step(q, plain, *rest)
        exact = step(
            q.double(), [p.double() for p in plain], *(t.double() if t.is_floating_point() else t for t in rest)
        )
        results = list[Tensor]()
        new.append(touched(lambda given=given, results=results: results.append(compiled(*given))))
        assert_as_close_as_eager(results[0], eager, exact)
        for pool, wanted in zip(pools, plain, strict=True):
            assert torch.equal(pool[: B * ENTRIES], wanted)
        most.append(peak(lambda given=given: compiled(*given)))
    (report,) = mla_compile.reports()
    assert [site.path for site in report.sites] == [path] * len(WRITES)
    assert all(site.reason.endswith("reads the pages") for site in report.sites)
    assert most[0] == most[1]
    assert new[1] < LARGE * PAGE_BYTES / mmap.PAGESIZE / 20


def test_a_copy_of_the_pool_would_be_counted() -> None:
    pool = untouched(SMALL)
    assert touched(lambda: pool.add_(1)) >= SMALL * PAGE_BYTES / mmap.PAGESIZE
    assert peak(pool.clone) >= SMALL * PAGE_BYTES
