"""How the tokens of a sequence are dealt out to the ranks of a mesh, so that each keeps its share in pages of its own.

    token j is of rank  (j // interleave) % ranks,  its  j // (interleave * ranks) * interleave + j % interleave -th

A page of every rank together is a page of `ranks * page_size` tokens, so that all ranks have the same block table.
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
    """What a rank needs to know to keep its share."""

    ranks: int
    rank: int
    """Its own place among them."""
    group: str
    interleave: int
    """Tokens that a rank has before it is another's turn."""
    page_size: int
    spare: int
    """A page for the tokens of other ranks: each rank writes all tokens, to where they are its own or to there."""

    @classmethod
    def of(cls, mesh: DeviceMesh, interleave: int | None, page_size: int, spare: int) -> Shares:
        """Of a mesh of one dimension; interleave None for page by page.

        Raises: CacheMismatchError for another mesh, or if interleave does not divide page_size.
        """
        if mesh.ndim != 1:
            raise CacheMismatchError(f"expected a mesh of one dimension, found {mesh.ndim}: name one, as in mesh['cp']")
        turn = page_size if interleave is None else interleave
        if turn < 1 or page_size % turn:
            raise CacheMismatchError(f"expected interleave to divide page_size {page_size}, found {turn}")
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name, turn, page_size, spare)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of every rank."""
        return self.ranks * self.page_size

    def room(self, tokens: int) -> int:
        """Tokens that the pages of so many have room for."""
        return (tokens + self.page_tokens - 1) // self.page_tokens * self.page_tokens

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens at `[S]`, whether they are this rank's, and in which row of a page."""
        of_rank = position // self.interleave % self.ranks == self.rank
        own = position // (self.interleave * self.ranks) * self.interleave + position % self.interleave
        return of_rank, own % self.page_size

    def gathered(self, own: Tensor) -> Tensor:
        """`[B, k T, width]` of each rank's `[B, T, width]`, tokens in their order; T is whole pages."""
        collectives = torch.ops._c10d_functional
        whole = collectives.all_gather_into_tensor(own.contiguous(), self.ranks, self.group)
        of_ranks = collectives.wait_tensor(whole).unflatten(0, (self.ranks, -1))  # [k, B, T, width]
        turns = of_ranks.unflatten(2, (-1, self.interleave))
        return turns.permute(1, 2, 0, 3, 4).flatten(1, 3)
