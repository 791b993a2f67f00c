"""Numbers that may change from call to call: with `dynamic=True`, Dynamo makes a module's float attributes inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.training import assert_gradients_close, gradients

pytestmark = pytest.mark.usefixtures("without_codegen")
HIDDEN, HEADS, WIDTH, LATENT = 24, 4, 8, 12


class Scaled(nn.Module):
    """MLA whose scale, and what keeps its norm from dividing by 0, are attributes; `attend` says how it attends."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scale, self.epsilon, self.attend = WIDTH**-0.5, 1e-5, attend
        self.query, self.down = nn.Linear(HIDDEN, HEADS * WIDTH), nn.Linear(HIDDEN, LATENT)
        self.keys, self.values = (nn.Linear(LATENT, HEADS * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, temperature: float = 1.0) -> Tensor:
        latent = self.down(x)
        latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + self.epsilon)
        heads = (each.unflatten(-1, (HEADS, WIDTH)) for each in (self.query(x), self.keys(latent), self.values(latent)))
        q, k, v = (each.transpose(1, 2) for each in heads)
        return self.attend(q / temperature, k, v, self.scale)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (q @ k.mT / (1 / scale)).softmax(-1) @ v


def sealed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def of_queries(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (q * scale @ k.mT).softmax(-1) @ v


def check(module: Scaled, compiled: Any, x: Tensor, *numbers: float) -> None:
    given = [x, *numbers]
    eager, exact = gradients(module, module, given), copy.deepcopy(module).double()
    assert_gradients_close(gradients(compiled, module, given), eager, gradients(exact, exact, [x.double(), *numbers]))


@pytest.mark.parametrize("attend", [by_hand, divided, sealed, of_queries])
def test_attributes_are_no_obstacle(attend: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    module = Scaled(attend)
    compiled = torch.compile(module, backend="mla", dynamic=True, fullgraph=True)
    check(module, compiled, torch.randn(2, 17, HIDDEN))
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]
    module.scale, module.epsilon = 0.5, 0.1
    check(module, compiled, torch.randn(3, 9, HIDDEN))


def test_an_argument_that_changes_is_read_at_each_call() -> None:
    torch.manual_seed(0)
    module = Scaled(by_hand)
    compiled = torch.compile(module, backend="mla", fullgraph=True)
    before = len(mla_compile.reports())
    for temperature in (1.5, 0.5, 0.75, 3.0):
        check(module, compiled, torch.randn(2, 17, HIDDEN), temperature)
    found = mla_compile.reports()[before:]
    assert [[site.path for site in report.sites] for report in found] == [["chunked"], ["chunked"]]  # 1.5, any number
