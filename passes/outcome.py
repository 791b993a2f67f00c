"""What became of one attention of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .nodes.refusal import Refusal
from .nodes.source import Frame, common_frame, trail


@dataclass(frozen=True)
class Outcome:
    """One attention: where it stands in the user's source, its path, and why.

    `path` is `absorbed`, `chunked`, `sparse`, `values` or `unchanged`, and in an exported program, where the sizes of a
    run may decide, `absorbed or chunked`. `shapes` maps the words `B, Sq, T, N, L, P, R, V` to sizes
    as text (symbolic ones as expressions), empty where the attention is no MLA site. `guards` are the inequalities
    between symbolic sizes under which the path was chosen. `mask` says what hides keys from queries: `none`, or
    `sequences`, `causal`, `lengths`, `window`, `padding`, `top-k`, `tensor` (some tensor) and `own ropes` (which hide
    nothing: they are added to scores) joined by ` + `; empty where unchanged.
    Where unchanged, `remedy` says what would have it rewritten, if anything, and `trail` how far the trace came: the
    lines of source from the attention back to where it stopped. `hint` says what else would save time, if anything.
    """

    node: str
    location: str
    code: str
    path: str
    reason: str
    shapes: dict[str, str] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    mask: str = ""
    remedy: str = ""
    trail: tuple[str, ...] = ()
    hint: str = ""

    @property
    def rewritten(self) -> bool:
        return self.path != "unchanged"


def rewritten(
    node: fx.Node,
    frame: Frame | None,
    path: str,
    reason: str,
    shapes: dict[str, str],
    guards: tuple[str, ...],
    mask: str,
    hint: str,
) -> Outcome:
    """The outcome of the attention at `node`, whose line of source is `frame`."""
    return Outcome(node.name, *_place(frame), path, reason, shapes, guards, mask, hint=hint)


def unchanged(node: fx.Node, refusal: Refusal) -> Outcome:
    """The outcome of the attention at `node` that was refused."""
    way = trail(node, refusal.stopped) if refusal.stopped is not None else ()
    place = _place(common_frame(node, ()))
    return Outcome(node.name, *place, "unchanged", str(refusal), remedy=refusal.remedy, trail=way)


def _place(frame: Frame | None) -> tuple[str, str]:
    return (str(frame), frame.code) if frame is not None else ("unknown", "")
