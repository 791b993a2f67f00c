"""What `mla.verify` says of two outputs of a site."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from mla_compile import last_report, verify
from mla_compile.errors import VerifyError
from mla_compile.passes.outcome import Outcome
from mla_compile.verify import compare
from tests.models import HIDDEN, Combined, L, R

SITE = Outcome("bmm", "model.py:7", "", "absorbed", "few queries", shapes={"L": "4", "T": "9"})


@pytest.mark.parametrize(
    ("original", "rewritten", "found"),
    [
        ([1.0, 1.0], [1.0, math.nan], "is not finite where the original is"),
        ([1.0, -math.inf], [1.0, 1.0], "is finite where the original is not"),
        ([1.0, 1.0], [1.0, 1.1], "differs from the original by 0.1; rounding of float32 explains"),
    ],
)
def test_it_says_how_they_differ(original, rewritten, found):
    with pytest.raises(VerifyError, match=f"mla.verify: model.py:7: the absorbed path {found}"):
        compare(torch.tensor(original), torch.tensor(rewritten), SITE, lambda: True)


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, -math.inf], []])
def test_equal_outputs_pass(values):
    compare(torch.tensor(values), torch.tensor(values), SITE, lambda: True)


@pytest.mark.parametrize("runs", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)])
def test_a_site_and_its_original_both_run_or_neither(monkeypatch, runs):
    """Neither in a branch that is not taken. Data may end a loop a turn earlier in one."""
    found = iter([{"bmm": [torch.ones(2)] * count} for count in runs])
    monkeypatch.setattr(verify, "_outputs", lambda *_: next(found))
    module = fx.GraphModule({}, fx.Graph())
    if all(runs) == any(runs):
        verify.check(module, module, [SITE], ())
    else:
        with pytest.raises(VerifyError, match=r"model.py:7: only one of the absorbed path and the original ran"):
            verify.check(module, module, [SITE], ())


class Two(nn.Module):
    """Two attentions, with dropout between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Combined(), Combined()

    def forward(self, x, cache):
        x = F.dropout(self.first(x, cache)[0], 0.3, training=True)
        return F.dropout(self.second(x, cache)[0], 0.3, training=True)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("trained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_uses_no_random_numbers(trained):
    module, cache, found = Two(), (torch.randn(1, 40, L), torch.randn(1, 40, R)), []
    with torch.set_grad_enabled(trained):
        for options in ({}, {"mla.verify": True}):
            torch._dynamo.reset()
            torch.manual_seed(0)
            found.append(torch.compile(module, backend="mla", options=options)(torch.randn(1, 1, HIDDEN), cache))
            assert last_report().rewritten == 2
    assert torch.equal(*found)


@pytest.mark.usefixtures("without_codegen")
def test_what_no_query_sees_may_be_anything():
    """In the original, 0 times NaN is NaN."""
    latent, seen = torch.randn(1, 40, L), torch.arange(40) < 37
    latent[:, ~seen] = torch.nan

    def attend(q, latent, weight, seen):
        k, v = (latent[:, None] @ weight).split([8, 6], -1)
        return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    operands = torch.randn(1, 4, 1, 8), latent, torch.randn(4, L, 14), seen
    assert attend(*operands).isnan().all()
    assert torch.compile(attend, backend="mla", options={"mla.verify": True})(*operands).isfinite().all()
