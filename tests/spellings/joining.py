"""How a spelling orders dimensions, joins columns and repeats heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attending import Attending


class Joining(Attending):
    """Puts tensors `[B, T, N, D]` into the order of `spelling`; `letters` names all dimensions except the last."""

    def ordered(self, x: Tensor) -> Tensor:
        """From `[B, T, N, D]` (`[T, B, N, D]`) to this spelling's order."""
        return x.transpose(1, 2) if self.spelling.order == "heads first" else x

    def shared(self, k_rope: Tensor, like: Tensor) -> Tensor:
        """The rope key `[B, T, R]` (`[T, B, R]`) for every head of `like`."""
        head_dim = self.letters.format("t").index("n")
        return k_rope.unsqueeze(head_dim).expand(*like.shape[:-1], -1)

    def together(self, nope: Tensor, rope: Tensor, how: str) -> Tensor:
        first, second = (nope, rope) if self.spelling.rope == "last" else (rope, nope)
        width = first.shape[-1]
        match how:
            case "buffer":
                both = first.new_empty(*first.shape[:-1], width + second.shape[-1])
                both[..., :width] = first
                both[..., width:] = second
                return both
            case "pad":
                return F.pad(first, (0, second.shape[-1])) + F.pad(second, (width, 0))
        return torch.cat([first, second], dim=-1)

    def in_zeros(self, x: Tensor, width: int) -> Tensor:
        """`x` written to zeros of another width, one half of the heads at a time."""
        whole, dim = x.new_zeros(*x.shape[:-1], width), self.letters.format("t").index("n")
        start = 0
        for half in x.chunk(2, dim=dim):
            whole.narrow(dim, start, half.shape[dim])[..., : x.shape[-1]] = half
            start += half.shape[dim]
        return whole

    def repeated(self, x: Tensor) -> Tensor:
        dim = self.letters.format("t").index("n")
        match self.spelling.groups:
            case "repeat_interleave":
                return x.repeat_interleave(2, dim=dim)
            case "expand":
                sizes = [-1] * 5
                sizes[dim + 1] = 2
                return x.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)
            case "repeat":
                counts = [1] * 4
                counts[dim] = 2
                return x.repeat(counts)
        return x
