"""Other projects' kernels, compared if they are installed, over the same pages and called as their projects prescribe.

Each returns o `[B, Sq, N, L]`. What a call needs only once for given lengths is prepared before it is timed, and so are
outputs that the caller has to allocate.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile.bench.kernel_cases import PAGE, SCALE, Case, Inputs, L, R
from mla_compile.kernels._common.machine import present

Call = Callable[[], Tensor]


def _flash_mla(x: Inputs, module: Any) -> Call:
    """FlashMLA: bfloat16 in pages of 64; for sparse decode, FP8 rows of 656 bytes."""
    case, heads = x.case, (x.case.Sq * x.case.N, 1)
    if x.rows is None:
        metadata, pages = module.get_mla_metadata(x.lengths, *heads), x.pages
        arguments: dict[str, Any] = {"causal": case.Sq > 1}
    else:
        assert x.indices is not None
        metadata = module.get_mla_metadata(x.lengths, *heads, case.N, True, case.keys)
        pages = x.rows.view(torch.float8_e4m3fn)
        first = torch.arange(case.B, device=x.q.device, dtype=torch.int32) * case.T  # first row of each sequence
        arguments = {"is_fp8_kvcache": True, "indices": x.indices + first[:, None, None]}
    given = x.q, pages[:, :, None], x.table, x.lengths, L, *metadata
    return lambda: module.flash_mla_with_kvcache(*given, softmax_scale=SCALE, **arguments)[0]


def _flashinfer(x: Inputs, module: Any) -> Call:
    """FlashInfer, planned once for the lengths."""
    case, device = x.case, x.q.device
    wrapper = module.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
    counts = torch.arange(case.B + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        counts * case.Sq,
        counts * (case.T // PAGE),
        x.table.flatten(),
        x.lengths,
        case.N,
        L,
        R,
        PAGE,
        case.Sq > 1,
        SCALE,
        x.q.dtype,
        x.cache.dtype,
    )
    q, pages = x.q.flatten(0, 1), x.pages
    given = q[..., :L], q[..., L:], pages[..., :L], pages[..., L:]
    return lambda: wrapper.run(*given).unflatten(0, (case.B, case.Sq))


def _vllm(x: Inputs, module: Any) -> Call:
    """vLLM's Triton kernel, for one query."""
    case, q, pages = x.case, x.q[:, 0], x.pages[:, :, None]
    splits = _vllm_splits(case, present(q.device).processors)
    o, lse = q.new_empty((case.B, case.N, L)), q.new_empty((case.B, case.N))
    partial = q.new_empty((case.B, case.N, splits, L + 1), dtype=torch.float32)
    given = q, pages, pages[..., :L], o, lse, x.table, x.lengths, partial, splits, SCALE, PAGE
    one = torch.ones((), dtype=torch.float32, device=q.device)  # else each call makes one on the host, and copies it
    named = _taken(module.decode_attention_fwd, k_scale=one, v_scale=one, is_mla=True)

    def call() -> Tensor:
        module.decode_attention_fwd(*given, **named)
        return o[:, None]

    return call


def _vllm_splits(case: Case, processors: int) -> int:
    """The number of parts of a sequence in vLLM 0.33: of 256 to 512 keys, at most two for each multiprocessor."""
    return min(_power_of_two(max(case.T // 512, 1)), 2 * processors)


def _sglang(x: Inputs, module: Any) -> Call:
    """SGLang's Triton kernel, for one query, with keys listed one by one."""
    case, q, keys = x.case, x.q[:, 0], x.cache.view(-1, 1, L + R)
    machine = present(q.device)
    splits, most = _sglang_splits(case, machine.processors)
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    o = q.new_empty((case.B, case.N, L))
    shape = case.B, case.N, most
    partial, lse = (q.new_empty(size, dtype=torch.float32) for size in ((*shape, L), shape))
    starts = torch.arange(case.B + 1, **integers) * case.T
    places = (x.table.long()[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten()
    counts = torch.full((case.B,), splits, **integers)
    given = q, keys, keys[..., :L], o, starts, places, partial, lse, counts, most, SCALE
    # Its second kernel may be launched while the first still runs, which sm_90 and later can do.
    early = machine.arch.startswith("sm_") and int(machine.arch.removeprefix("sm_")) >= 90
    named = _taken(module.decode_attention_fwd, k_scale=1.0, v_scale=1.0, has_mla=True, use_pdl=early)

    def call() -> Tensor:
        module.decode_attention_fwd(*given, **named)
        return o[:, None]

    return call


def _sglang_splits(case: Case, processors: int) -> tuple[int, int]:
    """The number of parts of a sequence in SGLang 0.5.23, and the most for which its buffers have room.

    A program takes up to 16 heads of a part. There are as many parts as fill a GPU that is taken to be larger the
    longer the sequences are.
    """
    most = max(min(_power_of_two(processors), _power_of_two(_quotient(case.T, 32))), 8)
    scaled = int(processors * max(math.log2(case.T / 64), 1))
    programs = case.B * _quotient(case.N, min(case.N, 16))
    keys = _quotient(case.T, min(_quotient(scaled, programs), most))
    return _quotient(case.T, keys), most


def _quotient(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def _power_of_two(number: int) -> int:
    """The least one that is not less than a positive number."""
    return 1 << (number - 1).bit_length()


def _taken(function: Callable[..., Any], **named: Any) -> dict[str, Any]:
    """The arguments among `named` that the installed version accepts."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in named.items() if name in parameters}


@dataclass(frozen=True)
class Other:
    """A project's kernel."""

    package: str
    modules: tuple[str, ...]
    """The modules in which its versions have it, the newest first."""
    make: Callable[[Inputs, Any], Call]
    takes: Callable[[Case], bool]

    def module(self) -> Any:
        """The first of the modules that can be imported, or None. Errors other than a missing module are raised."""
        for name in self.modules:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        return None

    def version(self) -> str:
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return self.package


def _paged(case: Case) -> bool:
    return case.kind == "decode" and not case.fp8


def _one_query(case: Case) -> bool:
    return _paged(case) and case.Sq == 1


def _flash_mla_takes(case: Case) -> bool:
    """Named keys it reads in tiles of 64, in FP8 alone, for two numbers of heads."""
    return _paged(case) or (case.kind == "sparse" and case.fp8 and case.N in (64, 128) and case.keys % 64 == 0)


OTHERS = {
    "flashmla": Other("flash_mla", ("flash_mla",), _flash_mla, _flash_mla_takes),
    "flashinfer": Other("flashinfer-python", ("flashinfer.mla",), _flashinfer, _paged),
    "vllm": Other(
        "vllm",
        ("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention"),
        _vllm,
        _one_query,
    ),
    "sglang": Other(
        "sglang",
        (
            "sglang.kernels.ops.attention.decode_attention",
            "sglang.srt.layers.attention.triton_ops.decode_attention",
        ),
        _sglang,
        _one_query,
    ),
}
"""Other projects' kernels by the name of the peer."""
