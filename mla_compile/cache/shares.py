"""Split the tokens of a sequence over the ranks of a mesh; each rank keeps its share in its own pages.

    token j belongs to rank  (j // interleave) % ranks,  as number  j // (interleave * ranks) * interleave + j %
    interleave

One page of each rank together form a page of `ranks * page_size` tokens, so that all ranks have the same block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CacheMismatchError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Shares:
    """How tokens are split over ranks, as seen by one rank."""

    ranks: int
    rank: int
    """This process's rank in the group."""
    group: str
    interleave: int
    """The number of consecutive tokens that a rank gets before it is the next rank's turn."""
    page_size: int
    spare: int
    """A page for the tokens of other ranks: each rank writes all tokens, its own to their places and others to it."""

    @classmethod
    def of(cls, mesh: DeviceMesh, interleave: int | None, page_size: int, spare: int) -> Shares:
        """The shares of a one-dimensional mesh; interleave None splits page by page.

        Raises: CacheMismatchError if the mesh has several dimensions, or interleave does not divide page_size.
        """
        if mesh.ndim != 1:
            raise CacheMismatchError(f"expected a mesh of one dimension, found {mesh.ndim}: name one, as in mesh['cp']")
        turn = page_size if interleave is None else interleave
        if turn < 1 or page_size % turn:
            raise CacheMismatchError(f"expected interleave to divide page_size {page_size}, found {turn}")
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name, turn, page_size, spare)

    @property
    def page_tokens(self) -> int:
        """The number of tokens in one page of each rank together."""
        return self.ranks * self.page_size

    def room(self, tokens: int) -> int:
        """The number of tokens that the pages needed for `tokens` have room for."""
        return (tokens + self.page_tokens - 1) // self.page_tokens * self.page_tokens

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """For tokens at positions `[S]`: whether each belongs to this rank, and its row in a page."""
        of_rank = position // self.interleave % self.ranks == self.rank
        own = position // (self.interleave * self.ranks) * self.interleave + position % self.interleave
        return of_rank, own % self.page_size

    def gathered(self, own: Tensor) -> Tensor:
        """Gather each rank's `[B, T, width]` as `[B, k T, width]` with tokens in their order; T must be whole pages."""
        collectives = torch.ops._c10d_functional
        whole = collectives.all_gather_into_tensor(own.contiguous(), self.ranks, self.group)
        of_ranks = collectives.wait_tensor(whole).unflatten(0, (self.ranks, -1))  # [k, B, T, width]
        turns = of_ranks.unflatten(2, (-1, self.interleave))
        return turns.permute(1, 2, 0, 3, 4).flatten(1, 3)
