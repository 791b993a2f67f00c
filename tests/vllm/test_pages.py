"""What the backend for vLLM computes over vLLM's pages, against float64, tested without vLLM."""

import math

import pytest
import torch

from mla_compile.vllm.pages import attend, attend_to_prompts, write
from tests.errors import assert_as_close_as_eager

BLOCK, L, R, N, B, P, V = 16, 32, 8, 4, 5, 12, 10


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def pages(request):
    return torch.randn(12, BLOCK, L + R).to(request.param)


TABLE = torch.tensor([[3, 7, 0], [1, 0, 0], [9, 2, 5], [4, 0, 0], [6, 0, 0]])
LENGTHS = torch.tensor([20, 16, 48, 1, 0])


def plain(q, pages, scale):
    out = torch.zeros(B, N, L, dtype=q.dtype)
    lse = torch.full((B, N), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for b, length in enumerate(LENGTHS.tolist()):
        if length:
            keys = pages[TABLE[b]].flatten(0, 1)[:length]
            scores = scale * q[b] @ keys.T
            out[b], lse[b] = scores.softmax(-1) @ keys[:, :L], scores.to(lse.dtype).logsumexp(-1)
    return out, lse


def test_a_query_attends_to_the_pages_of_its_sequence(pages):
    q, scale = torch.randn(B, N, L + R).to(pages.dtype), 0.2
    exact = plain(q.double(), pages.double(), scale)
    found = attend(q, pages, TABLE, LENGTHS, L, scale)
    assert found[0].shape == (B, N, L)
    assert found[1].dtype == torch.float32
    for mine, eager, right in zip(found, plain(q, pages, scale), exact, strict=True):
        assert_as_close_as_eager(mine, eager, right)


def test_a_sequence_without_keys_has_no_weight(pages):
    o, lse = attend(torch.randn(B, N, L + R).to(pages.dtype), pages, TABLE, LENGTHS, L, 0.2)
    assert torch.equal(o[4], torch.zeros(N, L, dtype=pages.dtype))
    assert torch.equal(lse[4], torch.full((N,), -math.inf))


def prompts(q, pages, w_uk, w_uv, scale, counts):
    """As it is written, by keys and values of all tokens of each sequence."""
    found, first = [], 0
    for sequence, (count, length) in enumerate(zip(counts, LENGTHS.tolist(), strict=False)):
        keys = pages[TABLE[sequence]].flatten(0, 1)[:length]
        k_nope = torch.einsum("npl,tl->ntp", w_uk, keys[:, :L])
        k = torch.cat([k_nope, keys[:, L:].expand(N, -1, -1)], dim=-1)
        hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        scores = scale * q[first : first + count].transpose(0, 1) @ k.mT
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        found.append((weights @ torch.einsum("nvl,tl->ntv", w_uv, keys[:, :L])).transpose(0, 1).flatten(1))
        first += count
    return torch.cat(found)


@pytest.mark.parametrize("counts", [(20, 16, 48), (1, 7, 30), (20, 0, 2, 1)], ids=["whole", "the last", "none of one"])
def test_tokens_of_prompts_attend_to_those_before_them_and_to_themselves(pages, counts):
    q, scale = torch.randn(sum(counts), N, P + R).to(pages.dtype), 0.2
    w_uk, w_uv = (torch.randn(N, width, L).div(L**0.5).to(pages.dtype) for width in (P, V))
    before = [length - count for count, length in zip(counts, LENGTHS.tolist(), strict=False)]
    out = torch.full((sum(counts), N * V), math.nan, dtype=pages.dtype)
    attend_to_prompts(q, pages, TABLE[: len(counts)], counts, before, w_uk, w_uv, scale, out)
    exact = prompts(q.double(), pages.double(), w_uk.double(), w_uv.double(), scale, counts)
    assert_as_close_as_eager(out, prompts(q, pages, w_uk, w_uv, scale, counts), exact)


def test_tokens_are_written_to_their_slots_and_no_others(pages):
    before = pages.clone()
    latent, rope = torch.randn(3, L).to(pages.dtype), torch.randn(3, R).to(pages.dtype)
    write(latent, rope, pages, torch.tensor([35, -1, 0]))
    assert torch.equal(pages[2, 3], torch.cat([latent[0], rope[0]]))
    assert torch.equal(pages[0, 0], torch.cat([latent[2], rope[2]]))
    pages[2, 3], pages[0, 0] = before[2, 3], before[0, 0]
    assert torch.equal(pages, before)
