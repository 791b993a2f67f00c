"""Inductor's code for an op on an H100, written in one process and run in another by Triton's interpreter on the CPU.

python -m tests.fake_cuda.written write FOLDER
TRITON_INTERPRET=1 python -m tests.fake_cuda.written run FOLDER

`run` prints what was launched, and how far results are from float64, in units of the error that float32 explains.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

B, N, L, R, PAGES, PAGE_SIZE, T, G = 3, 4, 32, 16, 9, 16, 70, 2
SCALE = 0.2
FP8 = torch.float8_e4m3fn
CPP = {"cpp_wrapper": True, "triton.autotune_at_compile_time": False}
"""Settings with which Inductor writes C++ as for packages of AOTInductor, but compiles none."""
mla = torch.ops.mla


def paged(q_latent: Tensor, q_rope: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Any:
    return mla.paged_latent_attention(q_latent, q_rope, pool[..., :L], pool[..., L:], table, lengths, True, SCALE)


def paged_fp8(q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, scales: Tensor, *pages: Tensor) -> Any:
    return mla.paged_latent_attention(q, q_rope, latent, rope, *pages, True, SCALE, scales.float())


def one_page(q_latent: Tensor, q_rope: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Any:
    """Over the single page per sequence of a static cache, whose length is the size of the page."""
    return paged(q_latent, q_rope, pool, table, lengths)


def rows(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Any:
    return mla.latent_attention(q_latent, q_rope, latent, k_rope, None, latent.shape[1] - q_latent.shape[1], SCALE)


def masked(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor) -> Any:
    return mla.latent_attention(q_latent, q_rope, latent, k_rope, seen[:, None, None], None, SCALE)


def named(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, indices: Tensor) -> Any:
    return mla.sparse_latent_attention(q_latent, q_rope, latent, k_rope, indices, None, None, SCALE, False)


def merged(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Any:
    return mla.merge_states(o_a, lse_a.float(), o_b, lse_b.float())


def product(x: Tensor, weight: Tensor) -> Any:
    """The product of some of the columns of x with a transposed weight."""
    return (mla.per_head_matmul(x[..., :L], weight.mT),)


def step(q: Tensor, row: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Any:
    """Normalise (without a root) and rotate queries and a token's row, write the row to its page, and attend."""
    (q_latent, q_rope), (latent, k_rope) = (tensor.split([L, R], dim=-1) for tensor in (q, row))
    written = torch.cat([_normed(latent), _rotated(k_rope)], dim=-1)[:, 0]
    last = lengths - 1
    page = table[torch.arange(B, device=table.device), last // PAGE_SIZE]
    after = torch.ops.aten.index_put(pool, [page, last % PAGE_SIZE], written)
    o, lse = paged(_normed(q_latent), _rotated(q_rope), after, table, lengths)
    pool.copy_(after)
    return o, lse, after


def _normed(x: Tensor) -> Tensor:
    return x / (x * x).mean(-1, keepdim=True)


def _rotated(x: Tensor) -> Tensor:
    angle = torch.arange(R, device=x.device) * 0.3
    return x * angle.cos() + torch.cat([-x[..., R // 2 :], x[..., : R // 2]], dim=-1) * angle.sin()


class _Module(nn.Module):
    def forward(self, *arguments: Tensor) -> Any:
        return paged(*arguments)


def cases(queries: int = 1) -> dict[Callable[..., Any], list[Tensor]]:
    """Functions and their arguments, with `queries` queries per sequence where a function takes several."""
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    q = [random(B, queries, N, L), random(B, queries, N, R)]
    table = torch.randperm(PAGES, generator=made).view(B, PAGES // B)
    pages = [table, torch.tensor([48, 0, 17])]
    cache = [random(B, T, L), random(B, T, R)]
    indices = torch.randint(-1, T, (B, queries, 24), generator=made)
    parts = [random(B, 5, L), random(B, 5)]
    row, grown = random(B, 1, L + R), [table, torch.tensor([48, 1, 17])]
    scales = torch.rand(PAGES, PAGE_SIZE, G, generator=made) + 0.5
    return {
        paged: [*q, random(PAGES, PAGE_SIZE, L + R), *pages],
        paged_fp8: [*q, random(PAGES, PAGE_SIZE, L).to(FP8), random(PAGES, PAGE_SIZE, R), scales, *pages],
        one_page: [*q, random(B, 60, L + R), torch.arange(B)[:, None], torch.tensor([48, 9, 17])],
        rows: [*q, *cache],
        masked: [*q, *cache, torch.rand(B, T, generator=made) > 0.3],
        named: [*q, *cache, indices],
        merged: [*parts, random(B, 5, L), random(B, 5)],
        step: [random(B, 1, N, L + R), row, random(PAGES, PAGE_SIZE, L + R), *grown],
        product: [random(B, 2, N, L + R), random(N, 5, L)],
    }


SYMBOLS: dict[Callable[..., Any], list[str]] = {
    paged: ["bs", "bs", "pk", "bw", "b"],
    paged_fp8: ["bs", "bs", "pk", "pk", "pk", "bw", "b"],
    one_page: ["bs", "bs", "bk", "b", "b"],
    rows: ["bs", "bs", "bt", "bt"],
    masked: ["bs", "bs", "bt", "bt", "bt"],
    named: ["bs", "bs", "bt", "bt", "bs"],
    merged: ["bs"] * 4,
}
"""Functions that are also compiled for symbolic sizes: for each argument, a letter for each of its first dims."""


def larger() -> dict[Callable[..., Any], list[Tensor]]:
    """Arguments of other sizes than those with which functions were compiled for symbolic sizes."""
    made = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    batch, queries, tokens, width, count = 4, 5, 190, 12, 60
    q = [random(batch, queries, N, L), random(batch, queries, N, R)]
    table = torch.randperm(count, generator=made)[: batch * width].view(batch, width)
    pages = [table, torch.tensor([width * PAGE_SIZE, 8, 0, 48])]
    cache = [random(batch, tokens, L), random(batch, tokens, R)]
    parts = [random(batch, queries, L), random(batch, queries)]
    return {
        paged: [*q, random(count, PAGE_SIZE, L + R), *pages],
        paged_fp8: [
            *(*q, random(count, PAGE_SIZE, L).to(FP8), random(count, PAGE_SIZE, R)),
            *(torch.rand(count, PAGE_SIZE, G, generator=made) + 0.5, *pages),
        ],
        one_page: [*q, random(batch, 193, L + R), torch.arange(batch)[:, None], torch.tensor([193, 8, 177, 9])],
        rows: [*q, *cache],
        masked: [*q, *cache, torch.rand(batch, tokens, generator=made) > 0.3],
        named: [*q, *cache, torch.randint(-1, tokens, (batch, queries, 24), generator=made)],
        merged: [*parts, random(batch, queries, L), random(batch, queries)],
    }


def _fake(tensor: Tensor, letters: str, known: dict[str, Any]) -> Tensor:
    """A fake tensor of the same shape, but with the symbols of some letters as its first dims."""
    from torch._dynamo.source import ConstantSource
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    shape: list[Any] = list(tensor.shape)
    for dim, letter in enumerate(letters):
        if letter not in known:
            env, source = detect_fake_mode(torch.empty(())).shape_env, ConstantSource(letter)
            symbol = env.create_symbol(shape[dim], source, DimDynamic.DYNAMIC, None)
            known[letter] = env.create_symintnode(symbol, hint=shape[dim], source=source)
        shape[dim] = known[letter]
    return torch.empty(shape, dtype=tensor.dtype, device="cuda")


def write(folder: Path, names: Sequence[str]) -> None:
    """Write the code of the named cases in Python and in C++, and the ops of a lowered exported program, to files.

    A torch that can write C++ only with a GPU writes none.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    import mla_compile
    from mla_compile.inductor.gpu_accesses import accesses_remembered
    from mla_compile.inductor.gpu_launches import put_launches
    from mla_compile.inductor.gpu_products import products_of
    from mla_compile.inductor.gpu_together import together
    from mla_compile.inductor.gpu_writes import write_in_parts

    from .pretend import present

    class Written(BaseException):
        pass

    def stop(graph: Any) -> None:
        code, _ = graph.codegen()
        raise Written(code.value)

    given, several = cases(), cases(queries=2)
    # Cases have the same kernels: what these read and write is found once for all, and not for each graph.
    remembered = accesses_remembered()
    with present("h100"), remembered, mock.patch.object(GraphLowering, "compile_to_module", stop), torch.no_grad():
        for function, any_size in [*((function, False) for function in given), *((each, True) for each in SYMBOLS)]:
            name = _name(function, any_size)
            if name not in names:
                continue
            symbols: dict[str, Any] = {}
            letters = SYMBOLS[function] if any_size else [""] * len(given[function])
            traced_with = (several if any_size else given)[function]
            fakes = [_fake(*each, symbols) for each in zip(traced_with, letters, strict=True)]
            traced = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
            put_launches(traced.graph, "triton")
            write_in_parts(traced.graph)
            # Before torch 2.13, C++ can only be written for kernels that a GPU has compiled.
            for cpp in (False, True) if hasattr(DeferredTritonCallWrapper, "generate_lazy") else (False,):
                module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
                try:
                    with products_of(module.graph), together(), config.patch(CPP if cpp else {}):
                        compile_fx_inner(module, fakes, cpp_wrapper=cpp)
                except Written as written:
                    (folder / f"{name}.{'cpp' if cpp else 'py'}").write_text(written.args[0])
        program = torch.export.export(_Module(), tuple(torch.empty_like(t, device="cuda") for t in given[paged]))
        with unset_fake_temporarily():
            graph = mla_compile.lower(program).graph
        (folder / "exported.txt").write_text("".join(f"{n.target}\n" for n in graph.nodes if n.op == "call_function"))


def run(folder: Path, names: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """For each of the named cases, the kernels that were launched, and the error of the results."""
    import mla_compile.kernels.register  # noqa: F401  the ops

    found = {}
    for any_size, given in (False, cases()), (True, larger()):
        for function, arguments in given.items():
            name = _name(function, any_size)
            if name not in names:
                continue
            exact = function(*[t.double() if t.dtype == torch.float32 else t for t in arguments])
            launches, results = run_written(folder / f"{name}.py", arguments, folder)
            found[name] = launches, max(map(_error, results, exact))
    return found


def _name(function: Callable[..., Any], any_size: bool) -> str:
    return f"{function.__name__}_of_any_size" if any_size else function.__name__


def _error(result: Tensor, exact: Tensor) -> float:
    """The greatest difference, divided by the error that sums in float32 may have."""
    difference = torch.where(result == exact, 0.0, result.double() - exact).abs().max()
    explained = torch.finfo(torch.float32).eps * (L + R + T) ** 0.5 * exact[exact.isfinite()].abs().max()
    return float((difference / explained).nan_to_num(torch.inf))


_HEURISTICS = ("user_autotune", "pointwise", "reduction", "persistent_reduction")
_BLOCKS = {"XBLOCK": 32, "R0_BLOCK": 16}
"""Block sizes of the kernels that are Inductor's own."""


class _Kernel:
    """Runs a kernel, in Triton's interpreter, where Inductor's code launches it."""

    def __init__(self, source: str, file: Path, launches: list[str]) -> None:
        from torch._inductor.runtime import triton_helpers, triton_heuristics

        self.launches = launches

        def kept(**options: Any) -> Callable[[Any], Any]:
            self.constants, self.meta = options["triton_meta"]["constants"], options["inductor_meta"]
            self.own = "custom_kernel" not in options
            return lambda kernel: setattr(self, "kernel", kernel)

        with (
            mock.patch.multiple(triton_heuristics, **dict.fromkeys(_HEURISTICS, kept)),
            mock.patch.object(triton_helpers, "set_driver_to_gpu"),  # there is none to be active
        ):
            file.write_text(source)
            runpy.run_path(str(file))

    def run(self, *arguments: Any, stream: int) -> None:
        self.launches.append(self.meta["kernel_name"])
        if self.own:
            self._run_own(arguments)
            return
        parameters = inspect.signature(self.kernel.fn).parameters
        declared = [name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)]
        *given, first, second, third = arguments
        names = [name for name in self.kernel.arg_names if name not in declared]
        by_name = dict(zip(names, given, strict=True)) | {name: self.constants[name] for name in declared}
        self.kernel[first, second, third](**by_name)

    def _run_own(self, arguments: Sequence[Any]) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        names = self.kernel.arg_names
        blocks = {name: block for name, block in _BLOCKS.items() if name in names}
        by_name = dict(zip((name for name in names if name not in blocks), arguments, strict=True)) | blocks
        grid = GridExpr.from_meta(self.meta, blocks).eval_slow(by_name)
        self.kernel[grid](**by_name)


def run_written(code: Path, arguments: Sequence[Tensor], folder: Path) -> tuple[list[str], list[Tensor]]:
    from torch._C._dynamo import guards
    from torch._inductor.async_compile import AsyncCompile

    from tests.assembly import emulated_assembly
    from tests.quick_interpreter import quick_interpreter

    launches: list[str] = []

    def interpreted(_: Any, name: str, source: str, **__: Any) -> _Kernel:
        return _Kernel(source, folder / f"{code.stem}_{name}_kernel.py", launches)

    def poisoned(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        empty = torch.empty_strided(size, stride, dtype=dtype)
        return empty.fill_(torch.nan if dtype.is_floating_point else -(1 << 30))

    with (
        quick_interpreter(),
        emulated_assembly(),
        mock.patch.object(AsyncCompile, "triton", interpreted),
        mock.patch.object(guards, "_empty_strided_cuda", poisoned, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
        mock.patch.object(torch.cuda, "_DeviceGuard", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        results = runpy.run_path(str(code))["call"](list(arguments))
    return launches, results


if __name__ == "__main__":
    command, folder, *names = sys.argv[1:]
    if command == "write":
        write(Path(folder), names)
    else:
        print(json.dumps(run(Path(folder), names)))
