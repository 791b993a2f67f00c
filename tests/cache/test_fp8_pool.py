"""A pool in FP8: its rounding, which is that of `append_latents`, and the rules of every pool."""

import pytest
import torch

import mla_compile
import mla_compile.kernels.register  # registers what `append_latents` does
from mla_compile import FP8PagePool, PagedLatentCache
from mla_compile.cache import BlockTable
from mla_compile.fp8 import FP8, MOST, RowLayout
from mla_compile.scales import LEAST

L, R = 256, 8
SPACING = 2.0**-3
"""The distance between e4m3 numbers from 1 to 2, which have 3 bits after the point. Rounding is off by half at most."""
SMALLEST = 2.0**-9
"""The least e4m3 number above 0, and the smallest distance between two numbers."""


def filled(count=5, batch=2, dtype=torch.float32, **more):
    """A pool, a table, and the tokens in it, which differ widely in magnitude."""
    pool = FP8PagePool(1, L, R, pages=16, page_size=4, dtype=dtype, **more)
    table = BlockTable(pool, batch)
    tokens = (torch.randn(batch, count, L + R) * 10.0 ** torch.randint(-3, 3, (batch, count, 1))).to(dtype)
    table.extend(count)
    table.write(0, tokens)
    return pool, table, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_read_is_what_was_written_rounded_to_three_bits(dtype):
    _, table, tokens = filled(dtype=dtype)
    read = table.read(0)
    assert read.dtype == dtype
    assert torch.equal(read[..., L:], tokens[..., L:])
    latent, numbers = tokens[..., :L].double().unflatten(-1, (2, -1)), read[..., :L].double().unflatten(-1, (2, -1))
    scale = latent.abs().amax(-1, keepdim=True) / MOST
    rounding = SPACING / 2 * torch.maximum(latent.abs(), scale * SMALLEST / SPACING)
    narrow = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps * latent.abs()
    assert bool(((numbers - latent).abs() <= rounding + 2 * narrow).all())


def test_the_numbers_are_those_of_packed_rows():
    pool, table, tokens = filled(dtype=torch.bfloat16)
    layout = RowLayout(L, R, torch.bfloat16)
    rows = torch.zeros(pool.pages, pool.page_size, layout.row_bytes, dtype=torch.uint8)
    position = torch.arange(table.length)
    slots = (table.pages[:, position // 4] * 4 + position % 4).flatten()
    latent, k_rope = tokens.flatten(0, 1).split([L, R], dim=-1)
    mla_compile.ops.append_latents(latent, k_rope, slots, rows)
    for ours, theirs in zip((*pool.layers, *pool.scales, *pool.ropes), layout.views(rows), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_one_scale_for_all_is_that_of_the_op_too():
    pool, table, tokens = filled(scale=0.01)
    rows = torch.zeros(pool.pages, pool.page_size, L + R).to(FP8)
    position = torch.arange(table.length)
    slots = (table.pages[:, position // 4] * 4 + position % 4).flatten()
    latent, k_rope = tokens.flatten(0, 1).split([L, R], dim=-1)
    mla_compile.ops.append_latents(latent, k_rope, slots, rows, torch.tensor([0.01]))
    assert torch.equal(pool.layers[0].view(torch.uint8), rows.view(torch.uint8))
    assert float(tokens.abs().max()) > float(table.read(0).abs().max()) == pytest.approx(0.01 * MOST)


def test_zeros_and_what_is_not_finite_stay_so():
    pool = FP8PagePool(1, L, R, pages=2, page_size=4)
    table = BlockTable(pool, 1)
    table.extend(3)
    tokens = torch.zeros(1, 3, L + R)
    tokens[0, 1], tokens[0, 2, 0] = LEAST / 4, torch.nan
    table.write(0, tokens)
    read = table.read(0)
    assert torch.equal(read[:, 0], tokens[:, 0])
    assert bool((read[0, 1].abs() <= LEAST).all())
    assert bool(read[0, 2, 0].isnan())


@pytest.mark.parametrize("scale", [None, 0.5], ids=["a scale a token", "one scale"])
def test_a_fork_copies_scales_and_rope_keys_too(scale):
    _, table, _ = filled(count=6, scale=scale)
    before = table.read(0)
    other = table.fork()
    for own, size in ((other, 100.0), (table, 0.01)):
        own.extend(1)
        own.write(0, torch.full((2, 1, L + R), size))
    assert torch.equal(table.read(0)[:, :6], before)
    assert torch.equal(other.read(0)[:, :6], before)
    assert not torch.equal(table.read(0)[:, 6], other.read(0)[:, 6])


def test_there_may_be_no_rope_key():
    pool = FP8PagePool(1, L, 0, pages=4, page_size=4)
    table = BlockTable(pool, 1)
    table.extend(2)
    table.write(0, torch.ones(1, 2, L))
    other = table.fork()
    other.extend(1)
    other.write(0, torch.zeros(1, 1, L))
    assert torch.equal(other.read(0), torch.tensor([1.0, 1.0, 0.0])[None, :, None].expand(-1, -1, L))


def test_latents_of_another_dtype_are_refused():
    pool, table, _ = filled(dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in pool.tensors]
    for dtype in (torch.float32, FP8):
        with pytest.raises(mla_compile.CacheMismatchError, match="expected tokens of the pool's dtype"):
            table.write(0, torch.zeros(2, 1, L + R).to(dtype))
    for tensor, was in zip(pool.tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), torch.ones(3), torch.ones(2, 1)], ids=str)
def test_scales_that_cannot_be(scale):
    with pytest.raises(
        mla_compile.CacheMismatchError, match="expected a scale above 0, or 2 of them, one for each layer, found"
    ):
        FP8PagePool(2, L, R, pages=1, scale=scale)


class Config(torch.nn.Linear):
    class config:
        num_hidden_layers, kv_lora_rank, qk_rope_head_dim = 2, L, R


def test_sizes_and_dtype_come_from_the_model():
    model = Config(1, 1, dtype=torch.bfloat16)
    cache = PagedLatentCache.of(model, pages=4, page_size=8, dtype=FP8)
    assert isinstance(cache.pool, FP8PagePool)
    assert cache.pool.dtype == torch.bfloat16
    latent, k_rope = cache.update(torch.ones(1, 1, 3, L).bfloat16(), torch.ones(1, 1, 3, R).bfloat16(), 0)
    assert latent.dtype == k_rope.dtype == torch.bfloat16
    assert type(PagedLatentCache.of(model, pages=4, dtype=torch.bfloat16).pool) is mla_compile.PagePool


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"dtype": torch.float8_e5m2}, "torch.float8_e5m2"),
        ({"scale": 1.0}, "None with a scale"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused(more, found):
    expected = (
        "expected a cache in the model's torch.bfloat16, in torch.float8_e4m3fn, torch.int8 or torch.int4, found "
    )
    with pytest.raises(mla_compile.CacheMismatchError, match=expected + found):
        PagedLatentCache.of(Config(1, 1, dtype=torch.bfloat16), pages=4, **more)
