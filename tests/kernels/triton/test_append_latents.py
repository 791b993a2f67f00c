"""The Triton kernel of mla::append_latents writes the bytes of the reference."""

import pytest
import torch

from mla_compile.fp8 import FP8
from mla_compile.kernels.append_latents import append_latents_reference
from mla_compile.kernels.append_latents.arguments import AppendLatents
from mla_compile.kernels.append_latents.triton import append_latents_triton

from ..test_append_latents import SIZES, appended, make
from .where import ON_GPU, to_device

pytestmark = [*ON_GPU]


def run(given):
    tensors = to_device(given)
    append_latents_triton(AppendLatents(*tensors))
    return tensors[3].cpu().view(torch.uint8)


@pytest.mark.diagonal
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_bytes_of_the_reference(sizes, dtype, one_scale):
    given = make(sizes, dtype, one_scale=one_scale)
    assert torch.equal(run(given), appended(append_latents_reference, *given))


def test_every_number_and_what_lies_between():
    """Numbers of e4m3fn stay as they are; a number half way between two is rounded to the even one."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    latent = torch.cat([numbers, between, numbers * 0.999, -between, -numbers * 1.001])[None]
    rows = torch.zeros(1, 1, latent.shape[1], dtype=FP8)
    given = latent, latent[:, :0], torch.tensor([0]), rows, torch.tensor(1.0)
    assert torch.equal(run(given), latent.to(FP8)[None].view(torch.uint8))


def test_what_is_no_number_stays_none():
    latent = torch.tensor([[1.0, torch.nan, -2.0]])
    given = latent, latent[:, :0], torch.tensor([0]), torch.zeros(1, 1, 3, dtype=FP8), torch.tensor(1.0)
    assert run(given).view(FP8).float().isnan().tolist() == [[[False, True, False]]]


def test_any_strides():
    latent, k_rope, slots, rows, _ = make(SIZES["DeepSeek"])
    other = latent.t().contiguous().t(), k_rope.repeat_interleave(2, 1)[:, ::2], slots, rows, None
    assert torch.equal(run(other), run((latent, k_rope, slots, rows, None)))
