"""Inductor's code for a decode step of a small model on an H100, run by Triton's interpreter on the CPU.

python -m tests.fake_cuda.whole write FOLDER
TRITON_INTERPRET=1 python -m tests.fake_cuda.whole run FOLDER

`run` prints for each case how far results and caches are from those of the same graph in float64: the greatest
difference in a tensor, divided by its greatest number.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from .written import run_written

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 48, "intermediate_size": 96}
SIZES |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
CACHES = {"pages": 2, "static": 2, "dynamic": 2, "fixed pages": 1}
"""Kinds of cache, and the number of sequences. Each has 64 tokens, so that the step takes a new page of 16."""
LAYERS = 3


def write(folder: Path) -> None:
    """Write the code of each case, and its graph before launches replaced the mla ops, to files named by the cache."""
    from mla_compile.inductor import codegen

    from . import cases, lowering
    from .pretend import present

    small = {"L": 32, "R": 16, "CONTEXT": 64, "ROOM": 128, "PAGE_SIZE": 16, "DTYPE": torch.float32}
    facts, put_launches, name = lowering._facts, codegen.put_launches, ""

    def kept(code: str, *more: Any) -> Any:
        (folder / f"{name}.py").write_text(code)
        return facts(code, *more)

    def put(graph: fx.Graph, kernels: str, **named: Any) -> bool:
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(_exact(graph)))
        return put_launches(graph, kernels, **named)

    with (
        mock.patch.multiple(cases, **small),
        mock.patch.dict(cases.SIZES, {"small": SIZES}),
        mock.patch.object(lowering, "_facts", kept),
        mock.patch.object(codegen, "put_launches", put),
        present("h100"),
    ):
        for name, batch in CACHES.items():
            torch.compiler.reset()
            lowering.lower(cases.call_of(cases.Case("small", name, batch, 1, LAYERS)))


def _exact(graph: fx.Graph) -> tuple[list[Any], str]:
    """Sizes, strides and dtypes of a graph's inputs, and the graph's code in float64 on the CPU."""
    given = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    exact = fx.Graph()
    exact.output(exact.graph_copy(graph, {}))
    for node in exact.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _in_float64)
    return [(tuple(t.shape), t.stride(), t.dtype) for t in given], exact.python_code("self").src


def _in_float64(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return torch.float64 if argument is torch.float32 else argument


def run(folder: Path) -> dict[str, float]:
    """For each case, how far it is from float64."""
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers

    import mla_compile.kernels.register  # noqa: F401  the ops

    class Library:
        """Takes the place of CUDA's libdevice."""

        exp, rsqrt = staticmethod(lambda x: tl.exp(x)), staticmethod(lambda x: tl.rsqrt(x))

    found = {}
    with mock.patch.object(triton_helpers, "libdevice", Library):
        for name in CACHES:
            layouts, code = pickle.loads((folder / f"{name}.pickle").read_bytes())
            given = _values(layouts)
            wanted = [t.double() if t.dtype == torch.float32 else t.clone() for t in given]
            scope = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
            exec(code, scope)
            exact = scope["forward"](None, *wanted)  # type: ignore[operator]
            _, results = run_written(folder / f"{name}.py", given, folder)
            pairs = zip((*results, *given), (*exact, *wanted), strict=True)
            found[name] = max(_error(*pair) for pair in pairs if isinstance(pair[0], Tensor))
    return found


def _values(layouts: Sequence[Any]) -> list[Tensor]:
    """Random weights and caches, and integers that are valid as pages, positions and tokens."""
    made, values = torch.Generator().manual_seed(0), []
    for shape, stride, dtype in layouts:
        if dtype == torch.float32:
            value = torch.randn(shape, generator=made) * (shape[-1] ** -0.5 if len(shape) == 2 else 1.0)
        else:
            value = torch.randperm(math.prod(shape), generator=made).view(shape) if shape else torch.tensor(64)
        values.append(torch.empty_strided(shape, stride, dtype=dtype).copy_(value))
    return values


def _error(result: Tensor, exact: Tensor) -> float:
    if not result.dtype.is_floating_point:
        return 0.0 if torch.equal(result, exact) else math.inf
    return float(((result - exact).abs().max() / exact.abs().max()).nan_to_num(math.inf))


if __name__ == "__main__":
    command, where = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(where)
    else:
        print(json.dumps(run(where)))
