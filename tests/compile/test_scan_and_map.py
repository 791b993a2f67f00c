"""Layers as a scan over their weights, and prompts as a map: what Inductor makes of them, loops, is right."""

import pytest
import torch

from tests.compile.test_control_flow import OverPrompts, OverWeights, call


@pytest.mark.parametrize("kind", [OverWeights, pytest.param(OverPrompts, marks=pytest.mark.slow)])
def test_what_inductor_makes_of_it(kind):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # without it, stock Inductor compiles neither
        assert [site.rewritten for site in call(kind(), 13)] == [True]
