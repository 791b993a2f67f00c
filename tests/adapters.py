"""Low-rank adapters beside linear layers, as in peft: several by name, switched on and off, merged and unmerged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK, SCALING = 3, 2.0


class Adapted(nn.Module):
    """A frozen linear layer and the adapters that are added to it.

    `active` lists the names of the adapters in use; `off` disables them all. Merged adapters are part of the weight.
    """

    def __init__(self, base: nn.Linear, *names: str, dropout: float = 0.0, frozen: bool = True) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(not frozen)
        self.lora_A = nn.ModuleDict({n: nn.Linear(base.in_features, RANK, bias=False) for n in names or ("one",)})
        self.lora_B = nn.ModuleDict({n: nn.Linear(RANK, base.out_features, bias=False) for n in self.lora_A})
        self.lora_dropout = nn.ModuleDict({n: nn.Dropout(dropout) if dropout else nn.Identity() for n in self.lora_A})
        self.active = list(self.lora_A)[:1]
        self.off = False
        self.merged: list[str] = []

    def delta(self, name: str) -> Tensor:
        """The matrix that an adapter adds to the weight."""
        return SCALING * (self.lora_B[name].weight @ self.lora_A[name].weight)

    def merge(self) -> None:
        """Add the active adapters to the weight itself."""
        with torch.no_grad():
            for name in self.active:
                self.base_layer.weight += self.delta(name)
        self.merged = list(self.active)

    def unmerge(self) -> None:
        """Subtract from the weight what was added to it."""
        with torch.no_grad():
            for name in self.merged:
                self.base_layer.weight -= self.delta(name)
        self.merged = []

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.off or self.merged:
            return result
        dtype = result.dtype
        for name in self.active:
            result = self.with_adapter(result, x.to(self.lora_A[name].weight.dtype), name)
        return result.to(dtype)

    def with_adapter(self, result: Tensor, x: Tensor, name: str) -> Tensor:
        return result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * SCALING


class WithMagnitudes(Adapted):
    """DoRA: each column of the sum has a learned length, whose gradient does not go through the norm."""

    def __init__(self, base: nn.Linear, *names: str, **settings: object) -> None:
        super().__init__(base, *names, **settings)
        self.magnitude = nn.ParameterDict(
            {
                n: nn.Parameter(base.weight.norm(dim=1) * torch.linspace(0.8, 1.2, base.out_features))
                for n in self.lora_A
            }
        )

    def with_adapter(self, result: Tensor, x: Tensor, name: str) -> Tensor:
        a, b, base = self.lora_A[name], self.lora_B[name], self.base_layer.weight
        eye = torch.eye(a.weight.shape[1], dtype=x.dtype)
        delta = b(a(eye)).T.detach()
        norm = torch.linalg.norm(base + SCALING * delta.to(base.dtype), dim=1).to(base.dtype).detach()
        scale = (self.magnitude[name] / norm).view(1, -1)
        plain = result
        if not isinstance(self.lora_dropout[name], nn.Identity) and self.training:
            x = self.lora_dropout[name](x)
            plain = F.linear(x, base)
        return result + (scale - 1) * plain + scale * b(a(x)) * SCALING


def adapt(module: nn.Module, *projections: str, kind: type[Adapted] = Adapted, names: tuple[str, ...] = (), **settings):
    """Put adapters beside some linear layers of `module`, leaving other weights as they are; returns the adapters."""
    adapters = {name: kind(getattr(module, name), *names, **settings) for name in projections}
    for name, adapter in adapters.items():
        setattr(module, name, adapter)
    return adapters
