"""What became of one attention of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .source import Frame


@dataclass(frozen=True)
class Outcome:
    """One attention: where it stands in the user's source, its path, and why.

    `path` is `absorbed`, `chunked`, `sparse` or `unchanged`. `shapes` maps the words `B, Sq, T, N, L, P, R, V` to sizes
    as text (symbolic ones as expressions), empty where the attention is no MLA site. `guards` are the inequalities
    between symbolic sizes under which the path was chosen. `mask` says what hides keys from queries: `none`, or
    `causal`, `lengths`, `window`, `padding`, `top-k` and `tensor` (some tensor) joined by ` + `; empty where unchanged.
    """

    node: str
    location: str
    code: str
    path: str
    reason: str
    shapes: dict[str, str] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    mask: str = ""

    @property
    def rewritten(self) -> bool:
        return self.path != "unchanged"


def outcome(
    node: fx.Node,
    frame: Frame | None,
    path: str,
    reason: str,
    shapes: dict[str, str] | None = None,
    guards: tuple[str, ...] = (),
    mask: str = "",
) -> Outcome:
    """The outcome of the attention at `node`, whose line of source is `frame`."""
    place, code = (str(frame), frame.code) if frame is not None else ("unknown", "")
    return Outcome(node.name, place, code, path, reason, shapes or {}, guards, mask)
