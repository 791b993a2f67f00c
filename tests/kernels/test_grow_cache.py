"""A cache that is copied as it grows: its values, and the memory that is used again."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels.grow_cache import grow_cache_aten, grow_cache_reference

SHAPES = {
    "tokens of one sequence": ((1, 1, 700, 512), (1, 1, 1, 512), 2),
    "tokens of many": ((3, 2, 300, 257), (3, 2, 5, 257), -2),
    "first dimension": ((1100, 300), (7, 300), 0),
    "small": ((2, 5, 3), (2, 1, 3), 1),
    "nothing before": ((2, 0, 3), (2, 4, 3), 1),
    "nothing new": ((1, 600, 512), (1, 0, 512), 1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
MEBIBYTE = 1 << 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("op", [torch.ops.mla.grow_cache, grow_cache_aten], ids=["op", "aten"])
def test_it_is_the_concatenation(dispatched, op, shapes, dtype):
    *sizes, dim = SHAPES[shapes]
    past, new = (torch.randn(size).mul(50).to(dtype) for size in sizes)
    spread = torch.stack([past, past], -1)[..., 0]
    for cache in (past, spread):
        found = op(cache, new, dim)
        assert torch.equal(found, grow_cache_reference(past, new, dim))
        assert found.is_contiguous()


def test_memory_of_the_cache_before_last_is_used_again(dispatched):
    """A step reads the last cache as it writes the next one, so two blocks take turns, even as they grow."""
    cache, new = torch.randn(1, 5000, 512), torch.randn(1, 1, 512)
    places = []
    for _ in range(12):
        cache = torch.ops.mla.grow_cache(cache, new, 1)
        places.append(cache.data_ptr())
    assert places[2:] == places[:-2]
    assert len(set(places)) == 2


def test_a_block_is_not_used_while_a_view_of_it_lives(dispatched):
    cache, new = torch.randn(1, 2000, 512), torch.randn(1, 1, 512)
    kept, expected = [], []
    for step in range(6):
        cache = torch.ops.mla.grow_cache(cache, new + step, 1)
        kept.append(cache[:, -1])
        expected.append(new[:, 0] + step)
    assert torch.equal(torch.stack(kept), torch.stack(expected))


def test_what_was_kept_is_freed_with_the_last_cache(dispatched):
    new = torch.randn(1, 1, 512)
    before = resident()
    caches = [torch.ops.mla.grow_cache(torch.zeros(1, 20000, 512), new, 1) for _ in range(4)]
    caches = [torch.ops.mla.grow_cache(cache, new, 1) for cache in caches]
    assert resident() - before > 2 * 4 * 39 * MEBIBYTE * 0.9  # those that are used, and as much for the next step
    del caches
    gc.collect()
    assert resident() - before < 39 * MEBIBYTE


def test_threads_share_the_memory(dispatched):
    def grow(number):
        cache, new = torch.full((1, 1000, 512), float(number)), torch.full((1, 1, 512), float(number))
        for _ in range(20):
            cache = torch.ops.mla.grow_cache(cache, new, 1)
        return bool((cache == number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(grow, range(8)))


def test_a_result_is_a_tensor_like_any_other(dispatched, tmp_path):
    cache = torch.ops.mla.grow_cache(torch.ones(1, 3000, 512), torch.ones(1, 1, 512), 1)
    torch.save(cache, tmp_path / "cache.pt")
    copy = torch.load(tmp_path / "cache.pt")
    assert torch.equal(copy, cache)
    assert torch.equal(cache.clone(), cache)
    cache.resize_(1, 4000, 512)
    assert torch.equal(cache[:, :3001], copy)
    assert torch.equal(cache.share_memory_()[:, :3001], copy)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_is_as_much_an_inference_tensor_as_any_other(dispatched, mode):
    with mode():
        past, new = torch.ones(1, 3000, 512), torch.ones(1, 1, 512)
        cache, expected = torch.ops.mla.grow_cache(past, new, 1), torch.cat([past, new], 1)
    assert (cache.is_inference(), cache.requires_grad) == (expected.is_inference(), expected.requires_grad)


@pytest.mark.parametrize(
    ("past", "new", "dim", "message"),
    [
        ((2, 3), (2, 3), 2, r"expected a dimension of past \[2, 3\], found 2"),
        ((2, 3), (3, 3), 1, r"expected new of past's sizes \[2, 3\] but in dimension 1, found \[3, 3\]"),
        ((2, 3), (2, 3, 1), 1, r"expected new of past's sizes \[2, 3\] but in dimension 1, found \[2, 3, 1\]"),
    ],
)
def test_what_does_not_fit_is_named(dispatched, past, new, dim, message):
    with pytest.raises(KernelError, match=message):
        torch.ops.mla.grow_cache(torch.ones(past), torch.ones(new), dim)


def test_dtypes_differ(dispatched):
    with pytest.raises(KernelError, match=r"expected new of past's torch.float32 on cpu, found torch.float64 on cpu"):
        torch.ops.mla.grow_cache(torch.ones(2, 3), torch.ones(2, 1).double(), 1)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
