"""The number of AMX tile products that attention takes, counted where AMX is emulated (`tests.pretended_amx`)."""

import os

import pytest
import torch

from tests.pretended_amx.pretend import PLACES, products_of_tiles

from .paged import INT8, make_paged, quantised

pytestmark = pytest.mark.skipif(PLACES not in os.environ, reason="runs where tiles are pretended (test_amx.py)")

ROWS, TERMS, BYTES = 16, 32, 64
"""A tile product multiplies [16, 32] by [32, 16] in bfloat16, or [16, 64] by [64, 16] in int8."""


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("heads", [16, 128])
def test_no_product_is_of_padding(heads, tokens):
    rank, rope = 512, 64
    q_latent, q_rope = torch.randn(1, 1, heads, rank + rope).bfloat16().split([rank, rope], dim=-1)
    latent, k_rope = torch.randn(1, tokens, rank + rope).bfloat16().split([rank, rope], dim=-1)
    before = products_of_tiles()
    torch.ops.mla.latent_attention(q_latent, q_rope, latent, k_rope, None, None, 0.1)
    scores = heads // ROWS * (tokens // ROWS) * ((rank + rope) // TERMS)
    values = heads // ROWS * (rank // ROWS) * (tokens // TERMS)
    if heads <= 2 * ROWS:  # values are multiplied as they are
        values *= 2
    assert products_of_tiles() - before == scores + values


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("heads", [16, 32])
def test_products_of_int8_are_of_two_bytes(heads, tokens):
    rank, rope = 512, 64
    x = make_paged([tokens], (1, heads, rank, rope), 64, torch.bfloat16)
    arguments, scales = quantised(x, 1, coded=INT8)
    before = products_of_tiles()
    torch.ops.mla.paged_latent_attention(*arguments, False, x.scale, scales)
    scores = heads // ROWS * (tokens // ROWS) * (2 * rank // BYTES + rope // TERMS)
    values = heads // ROWS * (rank // ROWS) * (2 * tokens // BYTES)
    assert products_of_tiles() - before == scores + values
