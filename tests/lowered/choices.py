"""What a program is made of, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

PAGE_SIZE = 4
SIZES = 10
"""How many sizes a program runs at."""

Span = tuple[int, int]
"""The least and the greatest size of a range that a program is exported for; one size if they are equal."""


@dataclass(frozen=True)
class Program:
    """One or two layers of MLA, how it is exported and what is asked of the passes."""

    seed: int
    path: str
    """What `mla.path` is; `both` is `auto` with a cost model that takes either path, by the sizes of the run."""
    cache: str
    """`grown`: the past as an input, new tokens put behind it. `given`: all keys as an input. `pages`, `fp8 pages`."""
    mask: str
    weights: str
    softmax: str
    layers: int
    dtype: torch.dtype
    heads: int
    rank: int
    nope: int
    rope: int
    value: int
    workspace: int
    batch: Span
    queries: Span
    tokens: Span
    """The length of the cache, counted in pages if it has pages."""


def draw(seed: int) -> Program:
    """The program of a seed."""
    source = random.Random(seed)
    path = source.choice(["absorbed", "chunked", "chunked", "chunked", "both", "both", "auto", "sparse"])
    if path == "sparse":
        cache, mask = source.choice(["given", "pages"]), "named"
    else:
        cache = source.choice(["grown", "grown", "grown", "given", "given", "pages", "fp8 pages"])
        masks = {
            "grown": ["none", "causal", "causal", "window"],
            "given": ["none", "causal", "causal", "window", "bool", "additive", "of keys"],
        }
        mask = source.choice(masks.get(cache, ["lengths", "causal lengths"]))
    queries = source.choice([(1, 1), (3, 3), (1, 24), (1, 9), (2, 40)])
    least = 1 if cache == "grown" else 2
    tokens = source.choice([(least, 100), (least, 64), (2, 150), (64, 64), (17, 90)])
    if cache == "grown" and source.random() < 0.3 and tokens[0] != tokens[1]:
        tokens = (0, tokens[1])
    if mask == "named":
        tokens = (max(tokens[0], 8), tokens[1])
    if mask in ("causal", "window") and cache == "given":
        tokens = (max(tokens[0], queries[0]), max(tokens[1], queries[1]))
    if "pages" in cache:
        tokens = (max(tokens[0] // PAGE_SIZE, 2), tokens[1] // PAGE_SIZE)
    program = Program(
        seed,
        path,
        cache,
        mask,
        source.choice(["together", "apart"]),
        source.choice(["sdpa", "by hand"]),
        source.choice([1, 1, 2]) if cache in ("grown", "given") else 1,
        source.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        source.choice([1, 2, 3, 4]),
        source.choice([4, 8, 16, 33, 48]),
        source.choice([1, 4, 12, 24]),
        source.choice([2, 8, 0]) if cache in ("grown", "given") else source.choice([2, 8]),
        source.choice([1, 5, 8, 10, 24, 32]),
        source.choice([1, 7, 16, 64, 64, 1000]),
        source.choice([(1, 1), (1, 1), (1, 1), (2, 2), (3, 3), (1, 4), (2, 5)]),
        queries,
        tokens,
    )
    if path in ("both", "auto") and program.heads * (program.nope + program.value) <= 2 * program.rank:
        # A latent no narrower than what it expands to is not compressed: only a path that is asked for takes it.
        program = replace(program, heads=4, rank=8, nope=12)
    return program


def sizes(program: Program) -> list[tuple[int, int, int]]:
    """B, Sq and tokens of each run: the edges of the ranges, both sides of the workspace's, and some within."""
    source = random.Random(program.seed)
    edge: Callable[[Span], int] = source.choice
    ranges = program.batch, program.queries, program.tokens
    found = [tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)]
    found += [(edge(program.batch), program.queries[a], program.tokens[1 - a]) for a in (0, 1)]
    for around in (-1, 0, 1):
        tokens = min(max(program.workspace + around, program.tokens[0]), program.tokens[1])
        found.append((edge(program.batch), source.randint(*program.queries), tokens))
    found += [tuple(source.randint(*r) for r in ranges) for _ in range(SIZES - len(found))]
    return [(b, q, _enough(program, q, t)) for b, q, t in found]


def _enough(program: Program, queries: int, tokens: int) -> int:
    """Enough tokens for each query of a causal mask to see one."""
    return max(tokens, queries) if needs_a_key_a_query(program) else tokens


def needs_a_key_a_query(program: Program) -> bool:
    return program.cache == "given" and program.mask in ("causal", "window")


def example(program: Program) -> tuple[int, int, int]:
    """Sizes to export with. Torch would take 0 and 1 for constants."""
    b, q, t = (
        low if low == high else max(low + 1, 3) for low, high in (program.batch, program.queries, program.tokens)
    )
    return b, q, _enough(program, q, t) + (program.tokens[0] != program.tokens[1])


def dims(program: Program) -> dict[str, Any]:
    """A `Dim` for each range, or `STATIC` for a single size."""
    spans = {"B": program.batch, "Sq": program.queries, "T": program.tokens}
    return {
        name: torch.export.Dim.STATIC if low == high else torch.export.Dim(name, min=low, max=high)
        for name, (low, high) in spans.items()
    }
