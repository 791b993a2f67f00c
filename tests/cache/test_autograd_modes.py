"""Caches in every mode of autograd: with gradients, without, and under `torch.inference_mode`."""

import pytest
import torch

from mla_compile import PagedLatentCache
from mla_compile.cache import FP8PagePool, INT8PagePool, PagePool

POOLS = {
    "plain": lambda: PagePool(1, 4, 2, pages=16, page_size=2),
    "fp8": lambda: FP8PagePool(1, 4, 2, pages=16, page_size=2),
    "fp8 with a scale": lambda: FP8PagePool(1, 4, 2, pages=16, page_size=2, scale=0.5),
    "int8": lambda: INT8PagePool(1, 4, 2, pages=16, page_size=2),
}


class Step(torch.nn.Module):
    """Make latents and rope keys of hidden states, append them to a cache, and sum all that it holds."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(8, 6)

    def forward(self, hidden, cache):
        latent, k_rope = self.down(hidden)[:, None].split([4, 2], dim=-1)
        return sum(kept.sum() for kept in cache.update(latent, k_rope, 0)) + latent.sum()


def steps(function, cache):
    torch.manual_seed(0)
    return [function(torch.randn(2, count, 8), cache) for count in (3, 1, 1)]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_that_need_gradients_leave_the_pool_without(pool, compiled):
    model, pages = Step(), POOLS[pool]()
    expected = steps(model, PagedLatentCache(POOLS[pool]()))
    with torch.enable_grad():
        run = torch.compile(model, backend="mla", fullgraph=True) if compiled else model
        found = steps(run, PagedLatentCache(pages))
    assert not any(tensor.requires_grad for tensor in pages.tensors)
    torch.testing.assert_close(found, expected)
    found[-1].backward()  # through the last step only, and not through what it read
    torch.testing.assert_close(model.down.bias.grad, torch.tensor([2.0] * 4 + [0.0] * 2))
