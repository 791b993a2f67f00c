"""A path: one of the things that a site may become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, fx

from mla_compile.cost import Cost, Dims, Named

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from .carriers import Carrier


class Code(Protocol):
    """Torch code, as a function of the tensors and sizes that it reads."""

    sources: list[fx.Node]

    @property
    def said(self) -> object | None:
        """All that it depends on besides its site and `sources`; None if other sites are not to share the code."""

    def __call__(self, *values: Any) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Code, and the node that it replaces."""

    place: fx.Node
    code: Code


class Path(ABC):
    """What sites become: one object serves all sites."""

    name: ClassVar[str]
    """A name that no other path has."""
    why: ClassVar[str]
    """When the cost model takes it, in a few words for the report."""
    carriers: ClassVar[tuple[type[Carrier], ...]] = ()
    """The forms of masks that its code takes, preferred ones first; none where masks stay as they are in the graph."""
    may_be_asked: ClassVar[bool] = True
    """Whether `mla.path` may ask for it."""
    may_branch: ClassVar[bool] = False
    """Whether its code may stand in a branch that is taken only in some runs."""
    of_values_alone: ClassVar[bool] = False
    """Whether it is a path of sites whose keys stay as they are, and of no others."""
    expands: ClassVar[bool] = False
    """Whether heads get keys and values of their own, a workspace at a time, rather than attend to the latents."""

    @property
    def word(self) -> str:
        """What reports and options call it."""
        return self.name

    def as_taken(self, site: Site) -> Site:
        """The site as this path takes it: all that follows is about that."""
        return site

    @abstractmethod
    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Whether it is a candidate for a site."""

    def refuse(self, site: Site, *, asked: bool) -> None:  # noqa: B027  most refuse nothing
        """Check a site for which it was chosen, or `asked` for.

        Raises:
            Refusal: if the site cannot take it, or if it would gain nothing and was not asked for.
        """

    def as_written(self, site: Site) -> str:
        """A sentence, if the user's code already does what the path does; else empty."""
        return ""

    @abstractmethod
    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """Its FLOPs and bytes; `named` says which keys queries name, None if they name none."""

    def competes(self, dims: Dims, named: Named | None) -> bool:
        """Whether the cost model may choose it at these sizes."""
        return True

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Whether its code reads keys that are stored so where they are."""
        return not keys.in_pages and keys.coded is None

    def prefers_lengths(self, device: str) -> bool:
        """Whether, on a type of device, a dense cache is better read up to its lengths than under a mask that gives
        them."""
        return False

    def op(self, keys: StoredKeys) -> str | None:
        """The mla op that attends to keys that are stored so; None where attention stays ordinary operations."""
        return None

    @abstractmethod
    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """The code of a site, the last part in the place of its output.

        Raises:
            Unaligned: if the graph does not tell the sizes that the code needs.
        """
