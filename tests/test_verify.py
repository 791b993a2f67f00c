"""What `mla.verify` says of two outputs of a site."""

import math

import pytest
import torch

from mla_compile.errors import VerifyError
from mla_compile.passes.outcome import Outcome
from mla_compile.verify import compare

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
        compare(torch.tensor(original), torch.tensor(rewritten), SITE)


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, -math.inf], []])
def test_equal_outputs_pass(values):
    compare(torch.tensor(values), torch.tensor(values), SITE)
