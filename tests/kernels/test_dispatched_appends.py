"""`mla::append_latents` as torch's dispatcher calls it in C++: the bytes that the reference writes."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.fp8 import FP8, RowLayout
from mla_compile.kernels.append_latents import append_latents_reference


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (40, 6), (256, 0), (13, 3)])
def test_appending_runs_no_python(no_python, rank, rope, dtype, one_scale, index):
    """Numbers of all magnitudes: below the least step, half way between two steps, infinite and NaN."""
    latent, k_rope = (torch.randn(2, 9, rank + rope) * torch.randn(9, 1).mul(20).exp2()).to(dtype)
    latent, k_rope = latent[:, rope:], k_rope[:, rank:]
    latent[3:6, ::7] = torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)[:, None]
    latent[6] = torch.arange(rank).to(dtype) / 16 * 2.0**-6
    latent[6, -1] = 448
    width = rank + rope if one_scale else RowLayout(rank, rope, dtype).row_bytes
    rows = torch.randint(0, 100, (5, 4, width + 16), dtype=torch.uint8)[1:, :, :width]
    slots = torch.tensor([4, -1, 0, 15, 9, 1, 7, 8, 2], dtype=index)
    scale = torch.tensor(1.0) if one_scale else None
    found = []
    for op in (torch.ops.mla.append_latents, append_latents_reference):
        written = rows.clone()
        op(latent, k_rope, slots, written.view(FP8) if one_scale else written, scale)
        found.append(written)
    assert torch.equal(*found)


def test_every_number_is_appended_as_torch_rounds_it(no_python):
    """All bit patterns of bfloat16, and float32 numbers at and next to those that are half way between two steps."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    halfway = torch.arange(2**14, dtype=torch.int32).mul(2**17).view(torch.float32)
    close = [halfway, *(torch.nextafter(halfway, torch.tensor(end)) for end in (0.0, torch.inf))]
    latent = torch.cat([numbers, *close, *(-part for part in close)])[None]
    rows = torch.zeros(1, 1, latent.shape[1], dtype=FP8)
    torch.ops.mla.append_latents(latent, latent[:, :0], torch.tensor([0]), rows, torch.tensor(1.0))
    expected = latent.clamp(-448, 448).to(FP8)
    assert torch.equal(rows[0].isnan(), expected.isnan())
    assert torch.equal(rows[0].view(torch.uint8)[~expected.isnan()], expected.view(torch.uint8)[~expected.isnan()])


def test_nothing_is_appended_where_a_slot_cannot_be(dispatched):
    rows = torch.zeros(2, 3, RowLayout(8, 4, torch.float32).row_bytes, dtype=torch.uint8)
    with pytest.raises(KernelError, match=r"expected slots below 6, found slots\[1\] = 6"):
        torch.ops.mla.append_latents(torch.ones(2, 8), torch.ones(2, 4), torch.tensor([0, 6]), rows)
    assert not rows.any()
