"""What a training step keeps, and what its backward recomputes: queries if asked, and always what adapters add."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mla_compile
from mla_compile.bench.memory import kept_for_backward
from tests.adapters import adapt
from tests.compile.layers import ByHand, Layer, hidden
from tests.models import HIDDEN, Combined, L, N, P, R, V
from tests.training import assert_gradients_close, assert_gradients_of, gradients

pytestmark = pytest.mark.usefixtures("without_codegen")
LQ, TOKENS = 24, 64
ATTENTION = N * V + N + L + R
"""Numbers of a token: output, log-sum-exp, latent and rope key."""


def layer(q_lora: bool = True) -> Layer:
    module = Layer()
    module.mla = Combined(q_lora)
    return module


def compiled(module: nn.Module, recompute: str = "queries"):
    torch._dynamo.reset()
    return torch.compile(module, backend="mla", dynamic=False, options={"mla.recompute": recompute})


def kept(module: nn.Module, recompute: str, dtype: torch.dtype = torch.float32) -> float:
    """Numbers of a dtype that a forward keeps for each token, besides its inputs and the weights."""
    x = hidden(dtype, tokens=TOKENS).requires_grad_()
    saved = kept_for_backward(functools.partial(compiled(module, recompute), x), (x, *module.parameters()))
    assert saved > 0
    return saved / (x.shape[0] * TOKENS * dtype.itemsize)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_queries_are_not_kept_and_their_latent_is_anyway(dtype):
    """For DeepSeek-V3 in bf16, queries take 49,152 bytes a token, and their latent 3,072."""
    module = layer().to(dtype)
    assert kept(module, "nothing", dtype) - kept(module, "queries", dtype) == N * (P + R)
    assert kept(module, "queries", dtype) >= ATTENTION + LQ


def test_queries_of_one_projection_are_not_kept_where_hidden_states_are_narrower():
    module = layer(q_lora=False)
    assert HIDDEN < N * (P + R)
    assert kept(module, "nothing") - kept(module, "queries") == N * (P + R)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapted", [(), ("kv_b_proj",)], ids=["", "adapters"])
def test_gradients_are_those_of_queries_that_are_kept(dtype, adapted):
    module = layer().to(dtype)
    adapt(module.mla, *adapted)
    module = module.to(dtype)
    wide = layer()
    adapt(wide.mla, *adapted)
    wide.double().load_state_dict(module.state_dict())
    for given, weight in zip(wide.parameters(), module.parameters(), strict=True):
        given.requires_grad_(weight.requires_grad)
    x = hidden(dtype)
    exact, eager = gradients(wide, wide, [x.double()]), gradients(module, module, [x])
    assert_gradients_close(gradients(compiled(module), module, [x]), eager, exact)
    (site,) = mla_compile.last_report().sites
    assert site.reason == "keys and values are up-projected again for gradients, and so are queries"


def test_an_adapter_beside_the_projection_of_queries():
    module = layer()
    module.mla.q_proj[2].requires_grad_(False)
    adapt(module.mla.q_proj, "2")
    x = hidden()
    assert_gradients_of(compiled(module), module, [x])
    assert mla_compile.last_report().sites[0].reason.endswith("and so are queries")


def test_a_softmax_by_hand():
    """No node of Dynamo's graph is the result itself, only a view of it."""
    module, x = ByHand(), hidden()
    module.mla = Combined(True)
    assert_gradients_of(compiled(module), module, [x])
    assert mla_compile.last_report().sites[0].reason.endswith("and so are queries")


class Dropped(Layer):
    """Random dropout on the queries."""

    def attend(self, q, k, v):
        return super().attend(torch.nn.functional.dropout(q, 0.5), k, v)


class Normed(Layer):
    """Queries that are normed after their projection: no up-projection."""

    def attend(self, q, k, v):
        return super().attend(torch.nn.functional.rms_norm(q, q.shape[-1:]), k, v)


@pytest.mark.parametrize("kind", [pytest.param(Dropped, marks=pytest.mark.slow), Normed])
def test_other_queries_are_kept_and_the_report_says_why(kind):
    module = kind()
    gradients(compiled(module), module, [hidden()])
    (site,) = mla_compile.last_report().sites
    assert site.path == "chunked"
    assert "; queries are kept: expected queries that are " in site.reason


def test_a_checkpoint_computes_all_again_whatever_is_asked():
    module = layer()

    def checkpointed(x):
        return checkpoint(module, x, use_reentrant=False)

    x = hidden()
    assert_gradients_of(compiled(checkpointed), module, [x])


def test_what_is_added_for_an_adapter_is_not_kept():
    """Neither the weights nor the latent are kept in the form that the adapter's columns are joined to."""
    module = layer().requires_grad_(False)
    module.mla.kv_a_proj.requires_grad_(True)
    without = kept(module, "nothing")
    adapt(module.mla, "kv_b_proj")
    assert kept(module, "nothing") == without


def test_another_word_is_an_error():
    with pytest.raises(Exception, match=r"mla\.recompute: expected nothing or queries, found 'keys'"):
        compiled(layer(), "keys")(hidden())
