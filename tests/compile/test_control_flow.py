"""Attention in branches of `torch.cond` and in bodies of loops is rewritten like any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_over

import mla_compile
from mla_compile import device
from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted
from mla_compile.inspect.collect import compilations
from mla_compile.inspect.folder import write
from mla_compile.inspect.page import Inspection
from tests.compile.layers import Layer
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, N, P, R, V

pytestmark = pytest.mark.usefixtures("without_codegen")


class InBranches(Layer):
    """The same attention in both branches: one returns its results as the attention lays them out, one their tanh."""

    def both(self, x):
        q = self.mla.q_proj(x).unflatten(2, (N, P + R)).transpose(1, 2)
        latent, k_rope = self.latents(x)
        k_nope, v = self.up_projected(latent)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return F.scaled_dot_product_attention(q[:, :, -1:], k, v), latent

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.both, lambda x: tuple(t.tanh() for t in self.both(x)), (x,))


class InALoop(Layer):
    """A layer three times in a loop, in a branch that is always taken."""

    def forward(self, x):
        def step(i, x):
            return i + 1, torch.cond(x.isfinite().all(), lambda x: super(InALoop, self).forward(x), torch.tanh, (x,))

        return while_loop(lambda i, _: i < 3, step, (torch.tensor(0), x))[1]


class OverWeights(Layer):
    """Three layers as one scan over what differs between them."""

    def forward(self, x):
        def step(x, weight):
            q = self.mla.q_proj(x).unflatten(2, (N, P + R)).transpose(1, 2)
            latent, k_rope = self.latents(x)
            k_nope, v = (latent @ weight).unflatten(-1, (N, -1)).transpose(1, 2).split([P, V], -1)
            o = F.scaled_dot_product_attention(q, torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], -1), v)
            x = x + o.transpose(1, 2).flatten(2) @ self.mla.o_proj.weight.T
            return x, x.mean(-1)

        factors = torch.arange(1, 4, dtype=x.dtype)[:, None, None]
        return scan(step, x, self.mla.kv_b_proj.weight.T * factors)


class OverPrompts(Layer):
    """A layer, mapped over prompts."""

    def forward(self, x):
        return map_over(super().forward, torch.stack([x, x.sin()]))


def call(layer, tokens, sign=1, **options):
    """Compare the results of one compiled call with eager's; returns the sites of the compilation."""
    x = sign * torch.rand(2, tokens, HIDDEN)
    results, eager, exact = (
        torch.utils._pytree.tree_leaves(f(t))
        for f, t in (
            (torch.compile(layer, backend="mla", fullgraph=True, **options), x),
            (layer, x),
            (copy.deepcopy(layer).double(), x.double()),
        )
    )
    for found in zip(results, eager, exact, strict=True):
        assert_as_close_as_eager(*found)
    return mla_compile.last_report().sites


def test_sizes_may_be_symbols_and_either_branch_is_right():
    layer = InBranches()
    for tokens, sign in ((13, 1), (13, -1), (24, 1)):
        assert [site.path for site in call(layer, tokens, sign, dynamic=True)] == ["absorbed"] * 2
    assert len(mla_compile.reports()) == 1


def test_what_is_decided_of_one_branch_is_not_told_of_another():
    """The outer graphs of the two calls have the same code, and differ only in a branch."""
    x = torch.randn(2, 13, HIDDEN)
    for ours in (torch.sin, Layer()):
        torch._dynamo.reset()
        torch.compile(lambda x, f=ours: torch.cond(x.sum() > 0, f, torch.tanh, (x,)), backend="mla")(x)
    assert mla_compile.last_report().rewritten == 1


ROUNDS = {InBranches: {1}, InALoop: {3}, OverWeights: {3, 4}, OverPrompts: {2}}
"""How often attention runs: of two branches, only the one that is taken does; torch 2.11 takes a scan's first step
twice."""


@pytest.mark.parametrize("kind", ROUNDS)
def test_it_is_rewritten_and_verified(kind, monkeypatch):
    checked = []
    monkeypatch.setattr("mla_compile.verify.compare", lambda original, rewritten, site, _: checked.append(site.path))
    found = call(kind(), 13, options={"mla.verify": True})
    assert [site.rewritten for site in found] == [True] * (2 if kind is InBranches else 1)
    assert len({site.node for site in found}) == len(found)
    assert len(checked) in ROUNDS[kind]


@pytest.mark.slow
def test_where_gradients_are_needed_it_stays_and_the_report_says_so():
    layer, x = InBranches(), torch.rand(2, 13, HIDDEN)
    with torch.enable_grad():
        o, _ = torch.compile(layer, backend="mla")(x)
        (ours,) = torch.autograd.grad(o.sum(), [layer.mla.kv_b_proj.weight])
        (eager,) = torch.autograd.grad(layer(x)[0].sum(), [layer.mla.kv_b_proj.weight])
    torch.testing.assert_close(ours, eager)
    assert "but in control flow" in mla_compile.last_report().note


@torch.compiler.nested_compile_region
def region(x, w_q, w_latent, w_uk, w_uv):
    q, latent = (x @ w_q).unflatten(-1, (4, 8)).transpose(1, 2), (x @ w_latent)[:, None]
    return F.scaled_dot_product_attention(q, latent @ w_uk, latent @ w_uv)


def test_of_a_nested_region_the_report_says_that_it_stays_where_gradients_are_needed():
    given = torch.rand(2, 9, 16), torch.rand(16, 32), torch.rand(16, 6), torch.rand(4, 6, 8), torch.rand(4, 6, 8)
    with torch.enable_grad():
        compiled = torch.compile(lambda x, *w: region(x, *w) + region(x.sin(), *w), backend="mla")
        compiled(*(t.requires_grad_() for t in given)).sum().backward()
    assert "or nested regions" in mla_compile.last_report().note


def test_of_vmap_the_report_says_that_it_is_not_rewritten_for_training():
    def attend(q, latent, w_uk, w_uv):
        return F.scaled_dot_product_attention(q, latent @ w_uk, latent @ w_uv)

    given = torch.rand(2, 3, 4, 5, 8), torch.rand(2, 3, 1, 9, 6), torch.rand(4, 6, 8), torch.rand(4, 6, 8)
    with torch.enable_grad():
        module = torch.compile(torch.func.vmap(attend, in_dims=(0, 0, None, None)), backend="mla")
        module(*(t.requires_grad_() for t in given)).sum().backward()
    assert "found torch.func.vmap" in mla_compile.last_report().note


def test_it_is_inspected(tmp_path, monkeypatch):
    monkeypatch.setattr(codegen, "compile_fx_inner", interpreted)
    found = compilations(InALoop(), "a loop", torch.rand(2, 13, HIDDEN))
    write(Inspection("loops", found, device.rates_of([]), 1024), tmp_path)
    assert "Too much to draw" not in (tmp_path / "index.html").read_text()


class Turned(Layer):
    """A layer mapped over prompts of one sequence each, whose results have their dimensions in another order."""

    def forward(self, x):
        return map_over(lambda x: super(Turned, self).forward(x)[:, None].transpose(1, 2), x)


class Uneven(Layer):
    """The same of first tokens alone: what is returned has the strides of all tokens."""

    def forward(self, x):
        return map_over(lambda x: super(Uneven, self).forward(x)[:, None, :1].transpose(1, 2), x)


@pytest.mark.parametrize(("kind", "path"), [(Turned, "chunked"), (Uneven, "unchanged")])
def test_strides_of_results_may_be_symbols(kind, path):
    layer = kind()
    compiled = torch.compile(layer, backend="mla", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for tokens in (13, 24):
            x = torch.rand(3, 1, tokens, HIDDEN)
            assert_as_close_as_eager(compiled(x), layer(x), copy.deepcopy(layer).double()(x.double()))
            assert compiled(x).stride()[1:] == layer(x).stride()[1:]
    (site,) = mla_compile.last_report().sites
    assert site.path == path
    assert site.rewritten or "strides that are symbols beside a dimension of one element" in site.reason
    assert len(mla_compile.reports()) == 1
