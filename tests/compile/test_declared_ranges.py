"""Sizes whose range the user declares by `mark_dynamic`: torch refuses graphs whose guards narrow it."""

import re

import pytest
import torch

import mla_compile
from tests.models import Combined, L, R

pytestmark = pytest.mark.usefixtures("without_codegen")


def test_the_choice_of_a_path_narrows_no_declared_range():
    """Of 20 queries, few cached tokens would be up-projected, and many absorbed."""
    module = Combined()
    compiled = torch.compile(module, backend="mla", fullgraph=True)
    for tokens in (50, 3, 2048):
        x, cache = torch.randn(1, 20, 32), (torch.randn(1, tokens, L), torch.randn(1, tokens, R))
        for part in cache:
            torch._dynamo.mark_dynamic(part, 1, min=2, max=2048)
        torch.testing.assert_close(compiled(x, cache)[0], module(x, cache)[0])
    (report,) = mla_compile.reports()
    (site,) = report.sites
    assert site.rewritten
    assert re.search(r", taking s\d+ for 50$", site.reason), site


def test_a_choice_that_holds_in_all_of_a_declared_range_is_said_without_a_size():
    module = Combined()
    x, cache = torch.randn(1, 1, 32), (torch.randn(1, 300, L), torch.randn(1, 300, R))
    for part in cache:
        torch._dynamo.mark_dynamic(part, 1, min=256, max=2048)
    torch.testing.assert_close(torch.compile(module, backend="mla")(x, cache)[0], module(x, cache)[0])
    (site,) = mla_compile.last_report().sites
    assert (site.path, "taking" in site.reason) == ("absorbed", False)
