"""A pool in INT8: what is read is what was written, rounded to 1/127 of the greatest magnitude of the token."""

import pytest
import torch

from mla_compile import INT8PagePool, PagedLatentCache
from mla_compile.cache import BlockTable
from mla_compile.scales import LEAST

L, R = 200, 8


def filled(tokens, dtype=torch.float32):
    """A pool, and a table that holds `tokens` `[B, T, L + R]`."""
    pool = INT8PagePool(1, L, R, pages=16, page_size=4, dtype=dtype)
    table = BlockTable(pool, len(tokens))
    table.extend(tokens.shape[1])
    table.write(0, tokens)
    return pool, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_read_is_what_was_written_rounded(dtype):
    tokens = (torch.randn(2, 5, L + R) * 10.0 ** torch.randint(-3, 3, (2, 5, 1))).to(dtype)
    pool, table = filled(tokens, dtype)
    read = table.read(0)
    assert read.dtype == dtype
    assert torch.equal(read[..., L:], tokens[..., L:])
    latent = tokens[..., :L].double()
    half = latent.abs().amax(-1, keepdim=True) / 127 / 2
    narrow = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps * latent.abs()
    # Scale and quotient are rounded to float32: near a border between two numbers, the further one may be taken.
    border = 127 * torch.finfo(torch.float32).eps * half
    assert bool(((read[..., :L].double() - latent).abs() <= half + border + 2 * narrow).all())
    assert pool.layers[0].dtype == torch.int8
    assert pool.layers[0].abs().max() == 127


def test_what_is_exact_stays_so():
    numbers = torch.randint(-126, 127, (1, 6, L)).float()
    numbers[..., 0] = -127.0
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
    assert not bool(read[0, 2:, 0].isfinite().any())


def test_a_fork_copies_scales_and_rope_keys_too():
    _, table = filled(torch.randn(2, 6, L + R))
    before = table.read(0)
    other = table.fork()
    for own, size in ((other, 100.0), (table, 0.01)):
        own.extend(1)
        own.write(0, torch.full((2, 1, L + R), size))
    assert torch.equal(table.read(0)[:, :6], before)
    assert torch.equal(other.read(0)[:, :6], before)
    assert not torch.equal(table.read(0)[:, 6], other.read(0)[:, 6])


class Config(torch.nn.Linear):
    class config:
        num_hidden_layers, kv_lora_rank, qk_rope_head_dim = 2, 512, 64


def test_a_token_of_deepseek_takes_644_bytes():
    cache = PagedLatentCache.of(Config(1, 1, dtype=torch.bfloat16), pages=4, page_size=8, dtype=torch.int8)
    assert isinstance(cache.pool, INT8PagePool)
    assert cache.pool.dtype == torch.bfloat16
    assert sum(tensor.nbytes for tensor in cache.pool.tensors) == 2 * 4 * 8 * 644
