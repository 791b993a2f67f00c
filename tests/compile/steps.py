"""Prompts and steps of a layer, one after another."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from torch import Tensor, nn

import mla_compile
from mla_compile import device
from mla_compile.cost import Device
from mla_compile.passes.outcome import Outcome
from tests.errors import assert_as_close_as_eager


def prompts_and_steps(layer: nn.Module, past: tuple[Tensor, ...], width: int) -> list[Outcome]:
    """Assert that a compiled layer is as close to its float64 copy as it is eagerly, each time after what it returned.

    `layer` takes hidden states of a width and the tensors of its cache, and returns its output and the new cache;
    `past` is an empty one. Returns the sites of all compilations, whose paths are chosen for the same rates on every
    machine, however busy it is.
    """
    exact, compiled, sites = copy.deepcopy(layer).double(), torch.compile(layer, backend="mla"), []
    rates = Device("of the tests", flops_per_s=2e11, bytes_per_s=7e10)
    with torch.no_grad(), mock.patch.object(device, "measured", return_value=rates):
        for count in (30, 1, 1, 1, 60):
            x = torch.randn(past[0].shape[0], count, width, dtype=past[0].dtype)
            before = len(mla_compile.reports())
            o, after = compiled(x, *past)
            expected, _ = exact(x.double(), *(t.double() for t in past))
            assert_as_close_as_eager(o, layer(x, *past)[0], expected)
            sites += [site for report in mla_compile.reports()[before:] for site in report.sites]
            past = after
    return sites
