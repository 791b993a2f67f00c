"""Tokens divided among ranks, tested without vLLM: slots against a loop, the sum over ranks against float64."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_compile.vllm.context_parallel import install, slots, weigh
from mla_compile.vllm.pages import attend, write
from tests.errors import assert_as_close_as_eager

PAGE, L, R, N = 16, 32, 8, 4
LENGTHS = [1, 70, 17, 64]
TABLE = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(b))[:5] for b in range(4)])
"""A block table with five pages per sequence, which hold 80 tokens even on a single rank."""


def by_hand(position, pages, ranks, interleave):
    """Which rank has a token, and in which slot: ranks take turns of `interleave` tokens."""
    places = [0] * ranks
    for token in range(position + 1):
        rank = token // interleave % ranks
        place = places[rank]
        places[rank] += 1
    return rank, pages[place // PAGE] * PAGE + place % PAGE


@pytest.mark.parametrize("interleave", [1, 2, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_has_one_slot_on_one_rank(ranks, interleave):
    """The first sequence starts at its third token: slots depend on positions, not on the order within a step."""
    ranges = [range(2, 9), range(70), range(16, 17), range(0), range(40, 64)]
    table = torch.cat([TABLE, TABLE.flip(1)[:1]])
    starts = torch.tensor([0, *(len(r) for r in ranges)]).cumsum(0).int()
    positions = torch.tensor([position for r in ranges for position in r])
    expected = torch.full((ranks, len(positions)), -1)
    rows = [row for row, r in enumerate(ranges) for _ in r]
    for token, (row, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
        rank, slot = by_hand(position, table[row].tolist(), ranks, interleave)
        expected[rank, token] = slot
    for rank in range(ranks):
        found = slots(starts, positions, table.int(), PAGE, ranks, rank, interleave)
        assert found.dtype == torch.int64
        assert torch.equal(found, expected[rank])


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shares_of_all_ranks_add_up_to_the_attention_to_all_tokens(dtype, ranks, interleave):
    """Also for a sequence of one token, of which all ranks but one have nothing."""
    q, scale = torch.randn(4, N, L + R).to(dtype), 0.2
    keys = [torch.randn(length, L + R).to(dtype) for length in LENGTHS]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    parts = []
    for rank in range(ranks):
        pages = torch.randn(20, PAGE, L + R).to(dtype)  # what earlier sequences left there
        found = slots(starts, positions, disjoint(), PAGE, ranks, rank, interleave)
        write(torch.cat(keys)[:, :L], torch.cat(keys)[:, L:], pages, found)
        lengths = torch.tensor([int((row >= 0).sum()) for row in found.split(LENGTHS)])
        parts.append(attend(q, pages, disjoint(), lengths, L, scale))
    lses = torch.stack([lse for _, lse in parts])
    shares = [weigh(o, lses, rank) for rank, (o, _) in enumerate(parts)]
    o, lse = sum(share for share, _ in shares), shares[0][1]
    exact, eager = plain(q.double(), [k.double() for k in keys], scale), plain(q, keys, scale)
    assert o.dtype == dtype
    for mine, theirs, right in zip((o, lse), eager, exact, strict=True):
        assert_as_close_as_eager(mine, theirs, right)


def disjoint():
    """A block table of four sequences that have no page in common."""
    return torch.arange(20).view(4, 5).flip(1)


def plain(q, keys, scale):
    scores = [scale * q[b] @ k.T for b, k in enumerate(keys)]
    o = torch.stack([s.softmax(-1) @ k[:, :L] for s, k in zip(scores, keys, strict=True)])
    lse = torch.stack([s.to(torch.promote_types(s.dtype, torch.float32)).logsumexp(-1) for s in scores])
    return o, lse


def test_a_rank_without_tokens_and_a_sequence_without_any_have_no_share():
    o = torch.randn(2, 1, L)
    lses = torch.tensor([[[-math.inf], [-math.inf]], [[0.5], [-math.inf]]])
    none, _ = weigh(o, lses, 0)
    all_of_it, lse = weigh(o, lses, 1)
    assert torch.equal(none, torch.zeros(2, 1, L))
    assert torch.equal(all_of_it[0], o[0])
    assert torch.equal(all_of_it[1], torch.zeros(1, L))
    assert torch.equal(lse, torch.tensor([[0.5], [-math.inf]]))


KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


@pytest.fixture
def vllm_of(monkeypatch):
    """A function that installs a fake vLLM, and returns the kernels that it is given and its module `dcp`."""

    def make(*, cpu=True, triton=False, exchange="ag_rs"):
        config = SimpleNamespace(parallel_config=SimpleNamespace(dcp_comm_backend=exchange))
        kernels, dcp = {}, SimpleNamespace(correct_attn_out="its own")
        modules = {
            "vllm": {},
            "vllm.config": {"get_current_vllm_config": lambda: config},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm.triton_utils": {"HAS_TRITON": triton},
            "vllm.triton_utils.dispatcher": {"register_kernels": kernels.update},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.ops": {"dcp": dcp},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        return kernels, dcp

    yield make
    install.cache_clear()


def test_installed_functions_take_the_arguments_of_vllms_own(vllm_of):
    kernels, dcp = vllm_of()
    install()
    found = torch.zeros(6, dtype=torch.int64)
    starts, positions = torch.tensor([0, 2, 4]), torch.tensor([31, 32, 2, 3])
    kernels[KERNEL](4, 6, starts, positions, TABLE.int(), 5, found, PAGE, 2, 1, 1, -1, 1024)
    first, second = TABLE[:2, 0].tolist()
    assert found.tolist() == [first * PAGE + 15, -1, -1, second * PAGE + 1, -1, -1]
    o, lses = torch.randn(3, N, L), torch.randn(2, 3, N)
    for mine, right in zip(
        dcp.correct_attn_out(o, lses, 1, None, is_lse_base_on_e=True), weigh(o, lses, 1), strict=True
    ):
        assert torch.equal(mine, right)
    with pytest.raises(NotImplementedError, match="expected log-sum-exps of base e"):
        dcp.correct_attn_out(o, lses, 1, None, is_lse_base_on_e=False)


@pytest.mark.parametrize("kernels_of_its_own", [{"cpu": False}, {"triton": True}], ids=str)
def test_a_vllm_with_kernels_for_it_is_left_alone(vllm_of, kernels_of_its_own):
    kernels, dcp = vllm_of(**kernels_of_its_own)
    install()
    assert (kernels, dcp.correct_attn_out) == ({}, "its own")


def test_another_exchange_between_ranks_is_refused(vllm_of):
    kernels, dcp = vllm_of(exchange="a2a")
    with pytest.raises(NotImplementedError, match="expected dcp_comm_backend ag_rs, found a2a"):
        install()
    assert (kernels, dcp.correct_attn_out) == ({}, "its own")
