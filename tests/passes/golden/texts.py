"""The texts of the cases. `python -m tests.passes.golden.texts` writes the files again; review their diff."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from mla_compile.passes.attention.attention import Attention
from mla_compile.passes.attention.find import find
from mla_compile.passes.masks.meaning import understand
from mla_compile.passes.mla.values_alone import prove_or_values_alone
from mla_compile.passes.pipeline import Pipeline
from mla_compile.passes.text.graphs import graph_text
from mla_compile.passes.text.masks import mask_text
from mla_compile.passes.text.proofs import choice_text
from mla_compile.passes.text.sites import site_text
from mla_compile.passes.trace.trace import Trace
from tests.passes.golden.cases import CASES, Case
from tests.passes.graphs import DEVICE, capture, on_a_gpu, shapes_of

FOLDER = Path(__file__).parent


def path_of(name: str) -> Path:
    """The file that holds the text of a case."""
    return FOLDER / f"{name.replace(', ', '-').replace(' ', '_')}.txt"


def text_of(case: Case) -> str:
    """What is proved of a case's attention, the choice of its path, and its graph before and after the passes."""
    module = capture(case.function, *case.inputs, symbolic=case.symbolic)
    before = graph_text(module.graph)
    trace = Trace(module.graph)
    (attention,) = find(module.graph, trace)
    assert isinstance(attention, Attention)
    proved = prove_or_values_alone(attention, trace)
    site = site_text(proved)
    mask = mask_text(proved, understand(proved, trace))
    ranges = dict(shapes_of(module).var_to_range) if case.exported else None
    with on_a_gpu() if case.on_a_gpu else nullcontext():
        (result,) = Pipeline(DEVICE, case.path, 4, ranges)(module)
    outcome = result.outcome
    choice = f"{outcome.path}: {outcome.reason}\n" if result.choice is None else choice_text(result.choice)
    sections = {"site": site, "mask": mask, "choice": choice, "before": before, "after": graph_text(module.graph)}
    return "\n".join(f"# {title}\n{text}" for title, text in sections.items())


if __name__ == "__main__":
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, case in CASES.items():
        path_of(name).write_text(text_of(case))
