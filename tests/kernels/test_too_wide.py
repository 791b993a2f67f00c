"""Latents and heads too wide for a GPU's shared memory go another way than through Triton's kernels."""

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels import expanded_attention, latent_attention, launches
from mla_compile.kernels import paged_expanded_attention as prefill
from mla_compile.kernels import paged_latent_attention as paged
from mla_compile.kernels import sparse_latent_attention as sparse
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.tiles import takes

from .recorded import made, recorded

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
FITS, TOO_WIDE = 64, 4096


def of_rows(width):
    q = torch.randn(1, 2, 2, width), torch.randn(1, 2, 2, 8)
    return *q, torch.randn(1, 20, width), torch.randn(1, 20, 8), None, 0, 0.1


def of_pages(width):
    q = torch.randn(1, 2, 2, width), torch.randn(1, 2, 2, 8)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    return *q, torch.randn(2, 16, width), torch.randn(2, 16, 8), table, lengths, True, 0.1


def of_names(width):
    indices = torch.tensor([3, 5, 9]).expand(1, 2, 3)
    return *of_rows(width)[:4], indices, None, None, 0.1, False


def of_heads(width):
    weights = torch.randn(2, 16, 8), torch.randn(2, width, 8)
    return torch.randn(1, 2, 2, 24), torch.randn(1, 20, 8), torch.randn(1, 20, 8), *weights, None, 0, 0.1, 64


def of_heads_in_pages(width):
    q, *_, w_uk, w_uv, _, _, _, _ = of_heads(width)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    return q, torch.randn(2, 16, 8), torch.randn(2, 16, 8), table, lengths, w_uk, w_uv, True, 0.1, 64


CASES = {
    "rows": (latent_attention.latent_attention_gpu, latent_attention.latent_attention_aten, of_rows),
    "pages": (paged.paged_latent_attention_gpu, paged.paged_latent_attention_aten, of_pages),
    "named keys": (sparse.sparse_latent_attention_gpu, sparse.sparse_latent_attention_aten, of_names),
    "heads": (expanded_attention.expanded_attention_gpu, expanded_attention.expanded_attention_aten, of_heads),
    "heads in pages": (
        prefill.paged_expanded_attention_gpu,
        prefill.paged_expanded_attention_aten,
        of_heads_in_pages,
    ),
}


@pytest.mark.parametrize(("on_gpu", "by_aten", "arguments"), CASES.values(), ids=CASES)
def test_aten_computes_what_no_tile_holds(on_gpu, by_aten, arguments):
    with recorded("sm_120") as launched:
        on_gpu(*arguments(FITS))
        assert launched
        launched.clear()
        given = arguments(TOO_WIDE)
        result = on_gpu(*given)
    assert not launched
    torch.testing.assert_close(result, by_aten(*given))


@pytest.mark.parametrize(("width", "planned"), [(FITS, True), (TOO_WIDE, False)])
def test_inductor_launches_only_what_fits(width, planned):
    q, caches = (made(1, 2, 2, width), made(1, 2, 2, 8)), (made(1, 20, width), made(1, 20, 8))
    with recorded("sm_120"):
        op = torch.ops.mla.latent_attention.default
        found = launches.launch_of(op, (*q, *caches, None, 0, 0.1), {}, "triton", guards=False)
    assert (found is not None) == planned


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 512), (256, 320)])
def test_keys_with_a_latent_of_their_own_are_taken(rank, rope, arch):
    """It is a rope key to the kernel, and may be as wide as that of the values."""
    assert takes(Machine(arch, 132), rank, rope, 2)
    assert takes(Machine(arch, 132), 512, 64, 4)
    assert not takes(Machine(arch, 132), 8192, rope, 4)
