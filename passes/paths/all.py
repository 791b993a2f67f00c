"""Every path: a new one is its own file and a line here."""

from __future__ import annotations

from ..masks.meaning import Meaning
from ..mla.site import Site
from .absorbed import Absorbed
from .by_heads import ByHeads
from .chunked import Chunked
from .opaque import Opaque
from .path import Path
from .sparse import Sparse
from .trained import Trained
from .trained_absorbed import TrainedAbsorbed
from .trained_by_heads import TrainedByHeads
from .trained_with_scores import TrainedWithScores
from .values import ValuesAlone

PATHS: tuple[Path, ...] = (Absorbed(), Opaque(), Chunked(), ByHeads(), Sparse(), ValuesAlone())
"""In the order in which the cost model prefers them on a tie."""

TRAINED: tuple[Path, ...] = (Trained(), TrainedAbsorbed(), TrainedWithScores(), TrainedByHeads())
"""Paths where gradients are needed; no two of them take the same site."""

AUTO = "auto"
"""The word that leaves the choice to the cost model."""


def path_named(name: str) -> Path:
    """The path that has a name.

    Raises:
        ValueError: if there is none.
    """
    for path in PATHS:
        if path.name == name:
            return path
    raise ValueError(f"unknown path {name!r}: there are {', '.join(path.name for path in PATHS)}")


def paths_of(site: Site, meaning: Meaning, *, training: bool = False) -> tuple[Path, ...]:
    """The paths that are candidates for a site, in order; `training` where its graph needs gradients."""
    alone, known = site.unproved_keys is not None, TRAINED if training else PATHS
    return tuple(path for path in known if path.of_values_alone == alone and path.takes(site, meaning))


def words() -> tuple[str, ...]:
    """What reports call the paths, in order."""
    return tuple(dict.fromkeys(path.word for path in PATHS))


def may_be_asked() -> tuple[str, ...]:
    """The words of the paths that `mla.path` may ask for."""
    return tuple(dict.fromkeys(path.word for path in PATHS if path.may_be_asked))


def check_asked(word: str) -> None:
    """Check that a word is that of a path, or leaves the choice to the cost model.

    Raises:
        ValueError: if it is neither.
    """
    known = (AUTO, *words())
    if word not in known:
        raise ValueError(f"unknown path {word!r}: there are {', '.join(known)}")
