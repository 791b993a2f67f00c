"""The page's card about one attention, or about several that came out alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from torch import fx

from mla_compile.passes.mla.apart import up_projected_apart
from mla_compile.passes.mla.why_not import name
from mla_compile.passes.outcome import Outcome, output_of

from ..cost import Device
from ..dynamo.control_flow import located
from ..rewriting import AFTER, BEFORE
from ..units import in_flops, in_seconds, in_units, span
from .collect import Compilation, Proved
from .costs import AS_WRITTEN, Model, PathCost, expands, style
from .drawing import draw
from .plot import draw_curves
from .sketch import Sketch, entrances, sketch

KINDS = {
    "latent": "the latent and the rope key",
    "expanded": "expanded: keys and values of each head",
    "query": "queries and results",
    "weight": "weights",
    "mask": "mask",
}
SHORTENED = re.compile(r"/\S*/(?=[^/\s]+/[^/\s]+:\d+)")
"""A source path up to, and without, its last folder."""
ASSIGNED = re.compile(r"^\s*(\w+)(?::| =)")


@dataclass(frozen=True)
class Group:
    """Attentions of one compilation that came out alike."""

    outcome: Outcome
    """The outcome of the first of them."""
    proved: Proved | None
    compilation: Compilation
    numbers: list[int]
    """Their numbers in the report."""

    @property
    def anchor(self) -> str:
        """The HTML id of the card."""
        return f"attention-{self.numbers[0]}"

    @property
    def title(self) -> str:
        """The card's title, with the numbers of the attentions."""
        return f"Attention{'s' if len(self.numbers) > 1 else ''} {span(self.numbers)}"


@dataclass(frozen=True)
class Workspace:
    """The memory in which an expanding path keeps keys and values."""

    bytes: int
    whole: bool
    """Whether all keys and values fit at once."""

    @staticmethod
    def of(model: Model) -> Workspace:
        """The workspace of an attention."""
        d = {name: int(getattr(model.dims, name)) for name in ("B", "T", "N", "P", "V")}
        tokens = min(d["T"], model.workspace_tokens)
        size = d["B"] * tokens * d["N"] * (d["P"] + d["V"]) * model.element_size
        return Workspace(size, whole=tokens == d["T"])


def card(group: Group, device: Device, workspace_tokens: int) -> str:
    """The card as an HTML article."""
    outcome = group.outcome
    chips = "".join(f"<li><b>{escape(word)}</b> {escape(size)}</li>" for word, size in outcome.shapes.items())
    chips += f"<li><b>mask</b> {escape(outcome.mask)}</li>" if outcome.mask else ""
    chips += "".join(f"<li><b>while</b> {escape(guard)}</li>" for guard in outcome.guards)
    parts = [
        f'<div class="head"><span class="badge {style(outcome.path)}">{outcome.path}</span><h3>{group.title}</h3>'
        f'<span class="source">{escape("/".join(outcome.location.split("/")[-2:]))} <code>{escape(outcome.code)}</code>'
        f"</span></div>",
        f'<p class="reason">{escape(outcome.reason)}</p><ul class="chips">{chips}</ul>',
    ]
    if outcome.remedy:
        parts.append(f'<p class="reason">To have it rewritten, {escape(outcome.remedy)}.</p>')
    if outcome.trail:
        lines = "\n".join(f"{'from' if k == 0 else 'back to'} {line}" for k, line in enumerate(outcome.trail))
        parts.append(f"<h4>How far the trace came</h4><pre>{escape(lines)}</pre>")
    if group.proved is not None:
        model = Model.of(group.proved, device, workspace_tokens)
        before, after = sketches(group)
        parts += [
            _pair(group, before, after, Workspace.of(model)),
            "<h4>Predicted cost of each path</h4>",
            _costs(model.paths(outcome, group.proved.named)),
            _crossings(model),
            _details("What was proved", _proof(group.proved)),
            _details("Code of this attention, before and after", _code(group, before, after)),
        ]
    return f'<article class="card" id="{group.anchor}">{"".join(parts)}</article>'


def sketches(group: Group) -> tuple[Sketch | None, Sketch | None]:
    """Sketches of the graph around the group's first attention, before and after the passes."""
    assert group.proved is not None
    inputs = entrances(group.proved)
    graphs = group.compilation.graphs
    (before, node), (after, _) = (located(graphs[stage], group.outcome.node) for stage in (BEFORE, AFTER))
    output = output_of(after.graph, node)
    return sketch(before, node, inputs), None if output is None else sketch(after, output.name, inputs)


def _pair(group: Group, before: Sketch | None, after: Sketch | None, workspace: Workspace) -> str:
    largest = max((drawn.largest_shown for drawn in (before, after) if drawn is not None), default=0)
    figures = []
    for title, drawn, made in (("Before", before, "written"), ("After", after, group.outcome.path)):
        words, picture = "", "<p>Too much to draw: see the code.</p>"
        if drawn is not None:
            words = _caption(drawn, made, workspace)
            picture = draw(drawn, largest, f"{group.title} {title.lower()} the passes")
        figures.append(f"<figure><figcaption><h4>{title}</h4><p>{words}</p></figcaption>{picture}</figure>")
    kinds = {arrow.kind for drawn in (before, after) if drawn is not None for arrow in drawn.arrows}
    legend = _legend({kind: words for kind, words in KINDS.items() if kind in kinds})
    return f'<div class="pair">{"".join(figures)}</div>{legend}'


def _caption(drawn: Sketch, made: str, workspace: Workspace) -> str:
    if drawn.expanded_bytes:
        size = in_units(drawn.expanded_bytes)
        return f'Every head has keys and values of its own: <span class="loud">{size}</span> of them.'
    if expands(made):
        size = in_units(workspace.bytes)
        if workspace.whole:
            return f'Keys and values fit one workspace: <span class="calm">{size}</span> inside the operation.'
        return f'Keys and values are made <span class="calm">{size} at a time</span> and never exist as a whole.'
    if made == "written":
        return "No tensor holds keys or values of each head: absorbed by hand."
    return 'No tensor holds keys or values of each head: <span class="calm">queries go to the latents</span> instead.'


def _costs(costs: list[PathCost]) -> str:
    slowest = max(cost.seconds for cost in costs)
    written = next(cost.seconds for cost in costs if cost.path == AS_WRITTEN)
    rows = []
    for cost in costs:
        kind = "chosen" if cost.chosen else "written" if cost.path == AS_WRITTEN else ""
        times = "" if cost.path == AS_WRITTEN else f"{written / cost.seconds:.3g}x"
        rows.append(
            f'<tr class="{kind}"><td>{cost.path}</td><td class="n">{in_flops(cost.flops)}</td>'
            f'<td class="n">{in_units(cost.bytes)}</td><td class="n">{in_seconds(cost.seconds)}</td>'
            f'<td class="n">{times}</td>'
            f'<td class="wide"><span class="meter" style="width:{100 * cost.seconds / slowest:.2f}%"></span></td></tr>'
        )
    columns = {"path": "", "work": "n", "memory traffic": "n", "predicted": "n", "against written": "n"}
    head = "".join(f'<th class="{kind}">{title}</th>' for title, kind in columns.items()) + "<th></th>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _crossings(model: Model) -> str:
    """The crossover plots; empty if there is only one path to draw."""
    paths = model.drawn
    if len(paths) <= 1:
        return ""
    title = f"Where {' and '.join(path.word for path in paths)} cross"
    legend = _legend({style(path.word): f"{path.word}{', dashed' * path.expands}" for path in paths})
    return f'<h4>{title}</h4><div class="panels">{draw_curves(model.curves())}</div>{legend}'


def _legend(entries: dict[str, str]) -> str:
    items = "".join(f'<li class="{kind}">{escape(words)}</li>' for kind, words in entries.items())
    return f'<ul class="legend">{items}</ul>'


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def proof(proved: Proved) -> list[tuple[str, str]]:
    """Each part of the attention, with its tensor in the graph in words."""
    site = up_projected_apart(proved.site)
    without = "none: absorbed by hand" if site.unproved_keys is None else "none: keys stay what the graph computes"
    lines = [
        *(("latent of the keys", name(own.latent.read)) for own in (site.second_latent,) if own is not None),
        ("latent", name(site.latent.read)),
        ("W_UK", without if site.w_uk is None else name(site.w_uk)),
        ("W_UV", "none: absorbed by hand" if site.w_uv is None else name(site.w_uv)),
        ("query" if site.unproved_keys is not None else "query without rope", name(site.nope.query.read)),
        *((f"rope key, {piece.width} wide", name(piece.key.read)) for piece in site.ropes),
        *((f"rope key of each head, {piece.width} wide", name(piece.key.read)) for piece in site.own_ropes),
        ("scale", f"{site.nope.scale:.6g}"),
        ("mask", proved.meaning.words),
    ]
    return lines + [("added to every value", name(bias)) for bias in site.biases]


def _proof(proved: Proved) -> str:
    rows = "".join(
        f'<tr><td>{escape(k)}</td><td class="wrap"><code>{escape(SHORTENED.sub("", v))}</code></td></tr>'
        for k, v in proof(proved)
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div><pre>{escape(proved.text)}</pre>'


def _code(group: Group, before: Sketch | None, after: Sketch | None) -> str:
    parts = []
    for title, stage, drawn in (("before", BEFORE, before), ("after", AFTER, after)):
        names = set() if drawn is None else drawn.nodes
        module, _ = located(group.compilation.graphs[stage], group.outcome.node)
        text = "\n".join(lines_of(module, names)) or "see the files"
        parts.append(f"<div><h4>{title}</h4><pre>{escape(text)}</pre></div>")
    return f'<div class="code">{"".join(parts)}</div>'


def lines_of(module: fx.GraphModule, names: Iterable[str]) -> list[str]:
    """The lines of a graph's code that define the named nodes."""
    wanted = set(names)
    lines = module.print_readable(print_output=False).splitlines()
    found = [(match[1], line) for line in lines if (match := ASSIGNED.match(line))]
    return [line.strip().partition(";  ")[0] for made, line in found if made in wanted]
