"""A pool in INT4: what is read is what was written, rounded to 1/7 of the greatest magnitude of 32 columns."""

import pytest
import torch

from mla_compile import CacheMismatchError, INT4PagePool, PagedLatentCache
from mla_compile.cache import BlockTable
from mla_compile.int4 import groups_of, packed, unpacked
from mla_compile.scales import LEAST

L, R = 96, 8


def filled(tokens, dtype=torch.float32):
    """A pool, and a table that holds `tokens` `[B, T, L + R]`."""
    pool = INT4PagePool(1, L, R, pages=16, page_size=4, dtype=dtype)
    table = BlockTable(pool, len(tokens))
    table.extend(tokens.shape[1])
    table.write(0, tokens)
    return pool, table


def test_two_numbers_are_in_a_byte_the_even_column_in_its_lower_half():
    numbers = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(numbers, numbers).flatten()
    assert packed(torch.tensor([-8, 7], dtype=torch.int8)).tolist() == [0xF0]
    assert torch.equal(unpacked(packed(pairs)), pairs)
    assert packed(pairs).unique().numel() == 256


@pytest.mark.parametrize(("width", "groups"), [(512, 16), (48, 3), (32, 1), (40, 1), (8, 1)])
def test_a_group_is_of_32_columns_or_16(width, groups):
    assert groups_of(width) == groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_read_is_what_was_written_rounded(dtype):
    tokens = (torch.randn(2, 5, L + R) * 10.0 ** torch.randint(-3, 3, (2, 5, 1))).to(dtype)
    pool, table = filled(tokens, dtype)
    read = table.read(0)
    assert read.dtype == dtype
    assert torch.equal(read[..., L:], tokens[..., L:])
    latent = tokens[..., :L].double()
    half = (latent.unflatten(-1, (-1, 32)).abs().amax(-1) / 7 / 2).repeat_interleave(32, -1)
    narrow = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps * latent.abs()
    # Scale and quotient are rounded to float32: near a border between two numbers, the further one may be taken.
    border = 7 * torch.finfo(torch.float32).eps * half
    assert bool(((read[..., :L].double() - latent).abs() <= half + border + 2 * narrow).all())
    assert pool.layers[0].shape == (16, 4, L // 2)


def test_what_is_exact_stays_so():
    numbers = torch.randint(-7, 8, (1, 6, L)).float()
    numbers[..., ::32] = -7.0
    tokens = torch.cat([numbers * 2.0**-9, torch.randn(1, 6, R)], dim=-1)
    _, table = filled(tokens)
    assert torch.equal(table.read(0), tokens)


def test_zeros_and_what_is_not_finite_stay_so():
    tokens = torch.zeros(1, 4, L + R)
    tokens[0, 1], tokens[0, 2, 0], tokens[0, 3, 0] = LEAST / 4, torch.nan, torch.inf
    _, table = filled(tokens)
    read = table.read(0)
    assert torch.equal(read[:, 0], tokens[:, 0])
    assert bool((read[0, 1].abs() <= LEAST).all())
    assert not bool(read[0, 2:, :32].isfinite().any())
    assert torch.equal(read[0, 2:, 32:], tokens[0, 2:, 32:])  # other groups


def test_an_odd_width_is_refused():
    with pytest.raises(CacheMismatchError, match="expected latents of an even width for INT4, found 7"):
        INT4PagePool(1, 7, R, pages=1)


class Config(torch.nn.Linear):
    class config:
        num_hidden_layers, kv_lora_rank, qk_rope_head_dim = 2, 512, 64


def test_a_token_of_deepseek_takes_448_bytes():
    cache = PagedLatentCache.of(Config(1, 1, dtype=torch.bfloat16), pages=4, page_size=8, dtype=torch.int4)
    assert isinstance(cache.pool, INT4PagePool)
    assert cache.pool.dtype == torch.bfloat16
    assert sum(tensor.nbytes for tensor in cache.pool.tensors) == 2 * 4 * 8 * 448
