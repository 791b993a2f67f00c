"""One program: exported, rewritten, lowered, packaged, and run at all its sizes against float64."""

from __future__ import annotations

import copy
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import mla_compile
from mla_compile import exported
from mla_compile.cost import Device

from .choices import Program, example, sizes
from .module import Model, dynamic_shapes, inputs

FACTOR = 3.0
"""How many times further from float64 than eager a result may be, as in `tests/kernels/errors.py`: runs are small."""
COUNTING = Device("that only counts FLOPs", 1e9, 1e18)
_READ_TWICE = re.compile(r"assign_tensors_out\(RAIIAtenTensorHandle\((\w+)\), &\w*while_loop_")


class Wrong(AssertionError):
    """A package whose code or results are wrong."""


def run(program: Program, folder: Path, say: Callable[[str], None]) -> None:
    """Raise unless the program's package is right; `say` hears what is about to be done."""
    torch.manual_seed(program.seed)
    module = Model(program).eval()
    exact = copy.deepcopy(module).double()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = make(program, copy.deepcopy(module).to(program.dtype), folder, say)
        say("load")
        compiled = torch._inductor.aoti_load_package(package)
        module = module.to(program.dtype)
        exact.load_state_dict(module.state_dict())  # the weights as they are rounded
        generator = torch.Generator().manual_seed(program.seed)
        for size in sizes(program):
            say(f"B, Sq, T = {size}")
            given = cast(inputs(program, size, generator), program.dtype)
            results = compiled(*given), module(*given), exact(*cast(given, torch.float64))
            for own, eager, true in zip(*results, strict=True):
                check(program, size, own, eager, true)


def make(program: Program, module: Model, folder: Path, say: Callable[[str], None]) -> str:
    say("export")
    generator = torch.Generator().manual_seed(program.seed)
    given = cast(inputs(program, example(program), generator), program.dtype)
    made = torch.export.export(module, given, dynamic_shapes=dynamic_shapes(program))
    say("rewrite")
    if program.path == "both":
        exported.rates_of = lambda _: COUNTING
    path = program.path if program.path in ("absorbed", "chunked") else "auto"
    options = {"mla.path": path, "mla.workspace_tokens": program.workspace, "mla.strict": True}
    made = mla_compile.rewrite(made, options=options)
    taken = {site.path for site in mla_compile.last_report().sites}
    say("lower")
    made = mla_compile.lower(made)
    say(f"compile {', '.join(sorted(taken))}")
    package = torch._inductor.aoti_compile_and_package(made, package_path=str(folder / "program.pt2"))
    handles = read_twice(package)
    if handles:
        raise Wrong(f"loops that read freed memory: {', '.join(handles)}")
    return package


def read_twice(package: str) -> list[str]:
    """Handles in a package's C++ that a loop gives both to its condition, which frees them, and to its body."""
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith("wrapper.cpp")]
    if not sources:
        raise Wrong("a package without its C++")
    return sorted({name for source in sources for name in _READ_TWICE.findall(source)})


def cast(given: Any, dtype: torch.dtype) -> Any:
    """Cast a model's inputs to `dtype`. Scales are cast only to float64, and FP8 numbers not at all."""

    def one(t: Tensor) -> Tensor:
        if t.dtype == torch.float32 and dtype != torch.float64:
            return t
        return t.to(dtype) if t.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else t

    return pytree.tree_map_only(Tensor, one, given)


def check(program: Program, size: tuple[int, int, int], own: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Check a result's distance to float64 against eager's in the same dtype, which counts as one rounding at least.

    Each merge of two chunks rounds a running float32 result once more.
    """
    if (own.shape, own.dtype) != (eager.shape, eager.dtype):
        raise Wrong(f"{own.dtype} {list(own.shape)} and not {eager.dtype} {list(eager.shape)} at {size}")
    if not own.isfinite().all() or not exact.isfinite().all():
        raise Wrong(f"not finite at {size}")
    if exact.numel() == 0:
        return
    largest = exact.abs().max().item()
    error, unit = ((t.double() - exact).abs().max().item() for t in (own, eager))
    allowed = FACTOR * max(unit, torch.finfo(own.dtype).eps * largest)
    merges = program.layers * -(-(size[1] + 4 * size[2]) // program.workspace)
    allowed += merges * torch.finfo(torch.float32).eps / 2 * max(largest, 1.0)
    if error > allowed:
        raise Wrong(f"error {error:.3g}, allowed {allowed:.3g}, eager's {unit:.3g}, at {size}")
