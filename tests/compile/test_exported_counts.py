"""A package that counts its tokens: each call attends to those of the calls before."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mla_compile
from tests.errors import assert_as_close_as_eager

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")

N, L, P, R, V, HIDDEN, NEW, ROOM = 4, 32, 16, 8, 16, 48, 4, 24


class Counting(nn.Module):
    """New latents go to the places after those of `count` tokens, a buffer of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.kv_a = nn.Linear(HIDDEN, L + R, bias=False)
        self.kv_b = nn.Linear(L, N * (P + V), bias=False)
        self.register_buffer("cache", torch.zeros(1, ROOM, L + R))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        places = self.count + torch.arange(x.shape[1])
        self.cache.index_copy_(1, places, self.kv_a(x))
        self.count.add_(x.shape[1])
        latent, k_rope = self.cache.split([L, R], dim=-1)
        k_nope, v = self.kv_b(latent).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        q = self.q(x).unflatten(2, (N, P + R)).transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(ROOM) <= places[:, None])


def test_a_count_of_one_element_is_read_at_each_call(tmp_path):
    module = Counting().eval()
    exact = copy.deepcopy(module).double()
    prompts = torch.randn(5, 1, NEW, HIDDEN)
    with torch.no_grad():
        program = mla_compile.lower(mla_compile.rewrite(torch.export.export(module, (prompts[0],))))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "counting.pt2"))
        run = torch._inductor.aoti_load_package(package)
        results = [(run(x), module(x), exact(x.double())) for x in prompts]
    assert mla_compile.last_report().rewritten == 1
    assert_as_close_as_eager(*map(torch.stack, zip(*results, strict=True)))
