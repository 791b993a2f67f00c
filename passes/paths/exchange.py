"""What ranks exchange that each hold some of the keys of a site: queries and outputs, in place of the keys.

Before   o = attention of q to the latents of all ranks, gathered
After    o, lse = attention of the queries of all ranks, gathered, to this rank's latents
         what the ranks have for this rank's queries, all to all; merged by the log-sum-exp

Where all ranks have the same queries these are not gathered, and outputs are exchanged after W_UV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size
from .operands import Operands

Op = Callable[..., tuple[Tensor, Tensor]]
Attend = Callable[[Op, Operands, int], tuple[Tensor, Tensor]]
_LSE_BYTES = 4


@dataclass(frozen=True)
class Exchange:
    """Between the `ranks` of a process group, of which each attends to its own keys."""

    group: str
    ranks: int
    same_queries: bool
    """Whether all ranks have the same queries."""

    def around(self, attend: Attend) -> Attend:
        """Attention to the keys of all ranks, given attention to those of this one."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            if self.same_queries:
                return self._of_same(*attend(op, x, workspace_tokens))
            return attend(lambda *q_and_keys, **named: self._of_all(op, *q_and_keys, **named), x, workspace_tokens)

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Bytes that a rank receives; sizes are those of a `Site`."""
        s = sizes
        width = s["V"] if self.same_queries else 2 * s["L"] + s["R"]
        return (self.ranks - 1) * s["B"] * s["Sq"] * s["N"] * (width * element_size + _LSE_BYTES)

    def received_keys(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Bytes that a rank receives where it gathers latents and rope keys: T is a multiple of the ranks."""
        s = sizes
        keys = sympy.sympify(s["T"]) / self.ranks
        return (self.ranks - 1) * s["B"] * keys * (s["L"] + s["R"]) * element_size

    def _of_same(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """`o [B, Sq, N, V]`, `lse [B, Sq, N]` of this rank's keys: of those of all ranks."""
        return _merged(_unpacked(self._gathered(_packed(o, lse)), o.dtype))

    def _of_all(
        self, op: Op, q_latent: Tensor, q_rope: Tensor, *keys: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        """An op of latents for this rank's queries, `[B, Sq, N, L]` and `[B, Sq, N, R]`, and the keys of all ranks."""
        queries = self._gathered(torch.cat([q_latent, q_rope], dim=-1))
        heads = queries.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, Sq, k N, L + R]
        o, lse = op(*heads.split([q_latent.shape[3], q_rope.shape[3]], dim=-1), *keys, **named)
        packed = _packed(o, lse).unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()
        each = [1] * self.ranks
        received = torch.ops._c10d_functional.all_to_all_single(packed, each, each, self.group)
        return _merged(_unpacked(torch.ops._c10d_functional.wait_tensor(received), o.dtype))

    def _gathered(self, own: Tensor) -> Tensor:
        """`[k, ...]` of each rank's."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(own.contiguous(), self.ranks, self.group)
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
        return whole.unflatten(0, (self.ranks, -1))


def _packed(o: Tensor, lse: Tensor) -> Tensor:
    """o and lse side by side, as bytes: one collective, and no bit of them is a number to whoever copies it."""
    return torch.cat([o.contiguous().view(torch.uint8), lse.unsqueeze(-1).contiguous().view(torch.uint8)], dim=-1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    o, lse = packed.split([packed.shape[-1] - _LSE_BYTES, _LSE_BYTES], dim=-1)
    return o.contiguous().view(dtype), lse.contiguous().view(torch.float32).squeeze(-1)


def _merged(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of `[k, B, Sq, N, width]` and `[k, B, Sq, N]` what attention to all keys gives, rounded once."""
    o, lse = parts
    wide = o.to(torch.promote_types(o.dtype, torch.float32))
    merge = torch.ops.mla.merge_states
    whole, sums = reduce(lambda a, b: merge(*a, *b), zip(wide.unbind(), lse.unbind(), strict=True))
    return whole.to(o.dtype), sums
