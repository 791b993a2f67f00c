"""Whether random programs keep their numbers, whatever path is asked for."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mla_compile.passes.outcome import Outcome
from tests.passes.checks import SCORE, check_right
from tests.passes.graphs import capture, rewrite, run, values

from . import cuts, masks, tensors
from .drawing import Program

KINDS: dict[str, Callable[[int], Program]] = {
    "masks": masks.program,
    "tensors": tensors.program,
    "cuts": cuts.program,
}
PATHS = ("absorbed", "chunked", "sparse", "values")
LOST = 2 * SCORE / torch.finfo(torch.float64).eps
"""Nothing is left of a score that is added to a number of this size."""


@dataclass
class Tried:
    """What became of some seeds."""

    wrong: list[str] = field(default_factory=list)
    """A line for each program that is wrong, with its seed."""
    paths: Counter[str] = field(default_factory=Counter)
    """How many attentions became what, on all paths that were asked for."""
    masks: Counter[str] = field(default_factory=Counter)
    """How many of those that were rewritten have which mask."""


def try_seeds(kind: str, seeds: Iterable[int], tell: Callable[[str], object] = lambda line: None) -> Tried:
    """Check the programs of some seeds on each path. `tell` is called with each line about a wrong one."""
    tried = Tried()
    for seed in seeds:
        if faults := list(_faults(KINDS[kind](seed), tried)):
            tried.wrong.append(f"{seed}: {'; '.join(faults)}")
            tell(tried.wrong[-1])
    return tried


def _faults(program: Program, tried: Tried) -> Iterator[str]:
    """What is wrong with a program, and on which path. Its attentions are counted in `tried`."""
    try:
        module = capture(program.function, *program.tensors)
        before, score = run(module, *program.tensors), largest_score(module, program.tensors)
        check_right(program.function(*program.tensors), before, score)
    except Exception as error:
        yield f"before the passes: {_in_one_line(error)}"
        return
    for path in PATHS:
        changed = fx.GraphModule(module, copy.deepcopy(module.graph))
        outcomes: list[Outcome] = []
        try:
            outcomes = rewrite(changed, path)
            check_right(before, run(changed, *program.tensors), score)
        except Exception as error:
            became = ", ".join(f"{outcome.path}, mask: {outcome.mask or '-'}" for outcome in outcomes)
            yield f"{path} asked for ({became or 'no attention'}): {_in_one_line(error)}"
        tried.paths.update(outcome.path for outcome in outcomes)
        tried.masks.update(outcome.mask for outcome in outcomes if outcome.rewritten)


def largest_score(module: fx.GraphModule, inputs: Sequence[Tensor]) -> float:
    """What `check_right` takes: no score of a graph is larger, nor any number that scores are added to.

    A score that is added to -1e9 is rounded to a multiple of 1e-7, and another order of the sums rounds it differently.
    A number beyond `LOST` leaves nothing of a score, in any order, so that its size adds no error. The programs sum
    fewer than `TERMS` products, by as many as a change that is a product sums.
    """
    floating = [x for x in values(module, *inputs).values() if isinstance(x, Tensor) and x.is_floating_point()]
    sizes = (x.abs() for x in floating if x.numel())
    return max(SCORE, *(float(size.where(size < LOST, 0.0).max()) for size in sizes))


def _in_one_line(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({last.filename}:{last.lineno})"
