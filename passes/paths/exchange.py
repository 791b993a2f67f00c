"""What ranks exchange in place of keys, where each holds some of the keys of a site: queries and outputs.

Before   o = attention of q to the latents of all ranks, gathered
After    o, lse = attention of the queries of all ranks to this rank's latents, exchanged, merged by the log-sum-exp

The merge is linear, so ranks that have the weights of all heads may exchange outputs after W_UV, and gather queries
before W_UK. Each form has a class. For B Sq queries of N heads, with e bytes an element, each of k ranks receives

    queries gathered, latent outputs all to all                 (k - 1) B Sq N ((2 L + R) e + 4)
    queries gathered before W_UK, outputs all to all after W_UV (k - 1) B Sq N ((P + R + V) e + 4)
    same queries of all heads, outputs all to all               (k - 1) B Sq N (V e + 4)
    same queries, outputs gathered                              (k - 1) B Sq N (V e + 4)
    same queries, outputs merged by heads, then gathered        2 (k - 1) B Sq N / k (V e + 4)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import ClassVar

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size
from ..code.reading import wide
from ..mla.site import Site
from .operands import Operands

Op = Callable[..., tuple[Tensor, Tensor]]
Attend = Callable[[Op, Operands, int], tuple[Tensor, Tensor]]
_LSE_BYTES = 4


@dataclass(frozen=True)
class Exchange(ABC):
    """An exchange between the `ranks` of a process group, each of which attends to its own keys."""

    group: str
    ranks: int

    calls: ClassVar[int]
    """How many collectives it takes, one after the other."""
    words: ClassVar[str] = ""
    """How it is done, for a report; empty where there is nothing to say."""
    of_latents: ClassVar[bool] = False
    """Whether outputs are exchanged as sums of latents, which takes a path that attends to latents."""

    @abstractmethod
    def around(self, attend: Attend) -> Attend:
        """Attention to the keys of all ranks, given attention to those of this one."""

    @abstractmethod
    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Bytes that a rank receives; sizes are those of a `Site`."""

    def operands(self, site: Site) -> Site:
        """The site whose queries and weights attention takes on each rank."""
        return site

    def received_keys(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Bytes that a rank receives if it gathers latents and rope keys instead: T is a multiple of the ranks."""
        s = sizes
        keys = sympy.sympify(s["T"]) / self.ranks
        return (self.ranks - 1) * s["B"] * keys * (s["L"] + s["R"]) * element_size

    def _gathered(self, own: Tensor) -> Tensor:
        """`[k, ...]`: the tensors of all ranks."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(own.contiguous(), self.ranks, self.group)
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
        return whole.unflatten(0, (self.ranks, -1))

    def _of_all_heads(self, *queries: Tensor) -> list[Tensor]:
        """`[B, Sq, k N, width]` from all ranks' `[B, Sq, N, width]`, by one collective."""
        whole = self._gathered(torch.cat(queries, dim=-1))
        heads = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return list(heads.split([each.shape[3] for each in queries], dim=-1))

    def _of_own_heads(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """From `o [B, Sq, k N, width]`, `lse [B, Sq, k N]` over this rank's keys: those of its heads over all keys."""
        packed = _packed(o, lse).unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()
        each = [1] * self.ranks
        received = torch.ops._c10d_functional.all_to_all_single(packed, each, each, self.group)
        return _merged(_unpacked(torch.ops._c10d_functional.wait_tensor(received), o.dtype))


@dataclass(frozen=True)
class InLatentSpace(Exchange):
    """Queries are gathered after W_UK, heads side by side; outputs go all to all before W_UV."""

    calls = 2
    of_latents = True

    def around(self, attend: Attend) -> Attend:
        """The op takes the queries of all ranks; what is around it takes those of this rank."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            def of_all(q_latent: Tensor, q_rope: Tensor, *keys: object, **named: object) -> tuple[Tensor, Tensor]:
                return self._of_own_heads(*op(*self._of_all_heads(q_latent, q_rope), *keys, **named))

            return attend(of_all, x, workspace_tokens)

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Latent queries and outputs."""
        s = sizes
        width = 2 * s["L"] + s["R"]
        return (self.ranks - 1) * s["B"] * s["Sq"] * s["N"] * (width * element_size + _LSE_BYTES)


@dataclass(frozen=True)
class _WithAllWeights(Exchange):
    """Each rank has the weights of all heads, of which its own are a range; `whole` is the site of all heads."""

    whole: Site = field(compare=False, repr=False)


@dataclass(frozen=True)
class OutsideOfWeights(_WithAllWeights):
    """Queries are gathered before W_UK, heads side by side; outputs go all to all after W_UV."""

    calls = 2
    words = "before W_UK and after W_UV"

    def around(self, attend: Attend) -> Attend:
        """Everything is of all heads, except what is given and what comes out."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            q_nope, q_rope = self._of_all_heads(x.q_nope, x.q_rope)
            of_all = replace(x, site=self.whole, q_nope=q_nope, q_rope=q_rope)
            return self._of_own_heads(*attend(op, of_all, workspace_tokens))

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Queries as they are, and values."""
        s = sizes
        width = s["P"] + s["R"] + s["V"]
        return (self.ranks - 1) * s["B"] * s["Sq"] * s["N"] * (width * element_size + _LSE_BYTES)


@dataclass(frozen=True)
class ToOwnHeads(_WithAllWeights):
    """All ranks have the same queries of all heads, and each wants the outputs of its own: queries are not sent, and
    outputs go all to all after W_UV."""

    calls = 1
    words = "each rank receiving those of its own heads"

    def operands(self, site: Site) -> Site:
        """The site with the queries of all heads, too."""
        return self.whole

    def around(self, attend: Attend) -> Attend:
        """Everything is of all heads, except what comes out."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            return self._of_own_heads(*attend(op, x, workspace_tokens))

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Values."""
        return _values(self.ranks - 1, sizes, element_size)


@dataclass(frozen=True)
class Gathered(Exchange):
    """All ranks have the same queries and want all outputs: these are gathered after W_UV."""

    calls = 1

    def around(self, attend: Attend) -> Attend:
        """Each rank merges the outputs of all."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            o, lse = attend(op, x, workspace_tokens)
            return _merged(_unpacked(self._gathered(_packed(o, lse)), o.dtype))

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Values."""
        return _values(self.ranks - 1, sizes, element_size)


@dataclass(frozen=True)
class ScatteredAndGathered(Exchange):
    """As `Gathered`, but each rank merges the outputs of some heads, and merged outputs are gathered: with more than
    two ranks fewer bytes, in twice the messages."""

    calls = 2
    words = "merged by heads"

    def around(self, attend: Attend) -> Attend:
        """The ranks divide the heads among them."""

        def attend_to_all(op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
            o, lse = self._of_own_heads(*attend(op, x, workspace_tokens))
            parts, sums = _unpacked(self._gathered(_packed(o, lse)), o.dtype)  # [k, B, Sq, N / k, width]
            return parts.movedim(0, 2).flatten(2, 3), sums.movedim(0, 2).flatten(2, 3)

        return attend_to_all

    def received(self, sizes: Mapping[str, Size], element_size: int) -> Size:
        """Values, once in parts and once merged."""
        return _values(sympy.Rational(2 * (self.ranks - 1), self.ranks), sizes, element_size)


def _values(times: Size, sizes: Mapping[str, Size], element_size: int) -> Size:
    """Bytes of outputs after W_UV with their log-sum-exps, times `times`."""
    s = sizes
    return times * s["B"] * s["Sq"] * s["N"] * (s["V"] * element_size + _LSE_BYTES)


def _packed(o: Tensor, lse: Tensor) -> Tensor:
    """o and lse side by side, as bytes: one collective sends both, and whatever copies their bits sees no numbers."""
    return torch.cat([o.contiguous().view(torch.uint8), lse.unsqueeze(-1).contiguous().view(torch.uint8)], dim=-1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    o, lse = packed.split([packed.shape[-1] - _LSE_BYTES, _LSE_BYTES], dim=-1)
    return o.contiguous().view(dtype), lse.contiguous().view(torch.float32).squeeze(-1)


def _merged(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What attention to all keys gives, rounded once, from `[k, B, Sq, N, width]` and `[k, B, Sq, N]`."""
    o, lse = parts
    merge = torch.ops.mla.merge_states
    whole, sums = reduce(lambda a, b: merge(*a, *b), zip(wide(o).unbind(), lse.unbind(), strict=True))
    return whole.to(o.dtype), sums
