"""Layers in `torch.utils.checkpoint`, which only calls them where no gradients are needed."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mla_compile
from tests.compile.layers import Layer, hidden
from tests.errors import assert_as_close_as_eager
from tests.models import V

pytestmark = pytest.mark.usefixtures("without_codegen")

called = functools.partial(checkpoint, use_reentrant=False)


class OfOneWidth(Layer):
    """Keys as wide as values, for which CPUs have a kernel that a checkpoint would call by its name."""

    mask = None

    def attend(self, q, k, v):
        q, k = q[..., :V], k[..., :V]
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None)


class Masked(OfOneWidth):
    mask = torch.ones(13, 13, dtype=torch.bool).tril()


class ByHand(Layer):
    def attend(self, q, k, v):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


class Twice(OfOneWidth):
    """In a checkpoint within another one, and by itself."""

    def forward(self, x):
        return called(lambda x: x + called(super(Twice, self).forward, x.sin()), x) + super().forward(x)


class InARegion(OfOneWidth):
    @torch.compiler.nested_compile_region
    def region(self, x):
        return called(super().forward, x)

    def forward(self, x):
        return self.region(x)


@pytest.mark.parametrize(("kind", "count"), [(OfOneWidth, 1), (Masked, 1), (ByHand, 1), (Twice, 2), (InARegion, 1)])
def test_they_are_rewritten_without_gradients(kind, count):
    layer, x = kind(), hidden()
    compiled = torch.compile(lambda x: called(layer, x), backend="mla", fullgraph=True)
    assert_as_close_as_eager(compiled(x), layer(x), copy.deepcopy(layer).double()(x.double()))
    assert [site.rewritten for site in mla_compile.last_report().sites] == [True] * count
