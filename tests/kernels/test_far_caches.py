"""On CPU, the ops read and write caches whose offsets do not fit into 32 bits."""

import pytest
import torch

from .far import CASES, append_case, attention_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "dim"), CASES)
def test_attention(op, dim, dtype):
    run, (near, far) = getattr(torch.ops.mla, op), attention_case(op, dim, dtype)
    for a, b in zip(run(*near), run(*far), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("one_scale", [False, True])
def test_append(one_scale):
    near, far = append_case(one_scale)
    for arguments in (near, far):
        torch.ops.mla.append_latents(*arguments)
    assert near[3].view(torch.uint8).any()
    assert torch.equal(near[3].view(torch.uint8), far[3].view(torch.uint8))
