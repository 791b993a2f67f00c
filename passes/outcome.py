"""The outcome of one attention of a graph: its path, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .nodes.refusal import Refusal
from .nodes.source import Frame, common_frame, trail

SITE = "mla_site"
"""The key in the `meta` of each rewritten output under which is the name of the attention that it replaces."""
WEIGHT = "mla_weight"
"""The name of the tensor that W_UV is a view of, if that is a tensor of the graph."""
QUERY_LATENT = "mla_query_latent"
"""In training, the name of the latent that queries are an up-projection of, if they have one."""
UP_PROJECTIONS = "mla_up_projections"
"""Where the code stays, the names of the latents and of the products of queries and keys: what lies between them is
up-projected."""


@dataclass(frozen=True)
class Outcome:
    """One attention: where it stands in the user's source, its path, and why.

    `path` is `absorbed`, `chunked`, `sparse`, `values` or `unchanged`; in an exported program, where the sizes of a
    run may decide, it may also be `absorbed or chunked`. `shapes` maps the words `B, Sq, T, N, L, P, R, V` to sizes
    as text (symbolic sizes as expressions). `guards` are the inequalities between symbolic sizes under which the path
    was chosen. `mask` says what hides keys from queries: `none`, or `sequences`, `causal`, `lengths`, `window`,
    `padding`, `top-k`, `tensor` (an arbitrary tensor), `own ropes` and `keys of queries` (which hide nothing: they are
    added to scores), joined by ` + `.

    An unchanged attention has no `shapes` and no `mask`. Its `remedy` says what would get it rewritten, if anything
    would, and its `trail` lists the lines of source from the attention back to where the trace stopped. `hint` says
    what else would save time, if anything would.
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


def output_of(graph: fx.Graph, attention: str) -> fx.Node | None:
    """The node of a rewritten graph that holds the output of an attention, by the name of its node before."""
    return next((node for node in graph.nodes if node.meta.get(SITE) == attention), None)


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
    """The outcome of the attention at `node`, which was refused."""
    way = trail(node, refusal.stopped) if refusal.stopped is not None else ()
    place = _place(common_frame(node, ()))
    return Outcome(node.name, *place, "unchanged", str(refusal), remedy=refusal.remedy, trail=way)


def _place(frame: Frame | None) -> tuple[str, str]:
    return (str(frame), frame.code) if frame is not None else ("unknown", "")
