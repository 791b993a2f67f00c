"""On a GPU, DeepSeek-V3's decode step and prefill give the same bits each time.

Products on tensor cores run while other warps write to shared memory. Where a fence or a wait is missing, or where the
assembler takes registers too early, results differ from launch to launch.
"""

import pytest
import torch

from mla_compile.kernels import register  # noqa: F401  what the ops compute

pytestmark = pytest.mark.gpu
TIMES = 200
N, L, R, P, V, PAGE = 128, 512, 64, 128, 128, 64


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode():
    pages, batch = 512, 16
    pool = random(pages, PAGE, L + R)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
    lengths = torch.randint(1, table.shape[1] * PAGE, (batch,), device="cuda", dtype=torch.int32)
    queries = random(batch, 1, N, L), random(batch, 1, N, R)
    given = *queries, pool[..., :L], pool[..., L:], table, lengths, True, (P + R) ** -0.5
    return lambda: torch.ops.mla.paged_latent_attention(*given)


def prefill():
    tokens = 2048
    given = random(1, tokens, N, P + R), random(1, tokens, L), random(1, tokens, R), random(N, P, L), random(N, V, L)
    return lambda: torch.ops.mla.expanded_attention(*given, None, 0, (P + R) ** -0.5, 1024)


@pytest.mark.parametrize("make", [decode, prefill])
def test_every_launch_gives_the_same_bits(make):
    attend = make()
    first = attend()
    for _ in range(TIMES):
        for result, expected in zip(attend(), first, strict=True):
            assert torch.equal(result, expected)
