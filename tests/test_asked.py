"""Which kernels a call asks for reaches its gradients, which autograd computes later and maybe in another thread."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile.asked import asked, kept_to


class Heard(TorchDispatchMode):
    """Records what is asked for where a backward of this project's ops is called."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mla.expanded_attention_backward.default:
            self.kernels.append(asked())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_gradients_are_by_the_kernels_that_the_forward_was_kept_to(kernels):
    q, latent, k_rope = torch.randn(1, 3, 2, 6), torch.randn(1, 5, 8), torch.randn(1, 5, 2)
    weights, heard = (torch.randn(2, 4, 8), torch.randn(2, 4, 8)), Heard()

    def differentiate():
        with heard, torch.enable_grad():
            torch.autograd.grad(o.sum(), q)

    with torch.enable_grad(), kept_to(kernels):
        o, _ = torch.ops.mla.expanded_attention(q.requires_grad_(), latent, k_rope, *weights, None, 2, 0.4, 16)
    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()
    assert (heard.kernels, asked()) == ([kernels], "auto")
