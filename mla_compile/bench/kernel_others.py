"""Other projects' kernels, compared if they are installed, over the same pages and called as their projects prescribe.

Each returns o `[B, Sq, N, L]`. What a call needs only once for given lengths is prepared before it is timed, and so are
outputs that the caller has to allocate.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile.bench.kernel_cases import PAGE, SCALE, Case, Inputs, L, R

Call = Callable[[], Tensor]
VLLM_SPLITS = 4
"""The number of splits that vLLM's Triton backend for MLA uses for any problem."""
SGLANG_SPLITS = 8
"""SGLang's default number of splits."""


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
    o, lse = q.new_empty((case.B, case.N, L)), q.new_empty((case.B, case.N))
    partial = q.new_empty((case.B, case.N, VLLM_SPLITS, L + 1), dtype=torch.float32)
    given = q, pages, pages[..., :L], o, lse, x.table, x.lengths, partial, VLLM_SPLITS, SCALE, PAGE
    named = _taken(module.decode_attention_fwd, is_mla=True)

    def call() -> Tensor:
        module.decode_attention_fwd(*given, **named)
        return o[:, None]

    return call


def _sglang(x: Inputs, module: Any) -> Call:
    """SGLang's Triton kernel, for one query, with keys listed one by one."""
    case, q, keys = x.case, x.q[:, 0], x.cache.view(-1, 1, L + R)
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    o = q.new_empty((case.B, case.N, L))
    shape = case.B, case.N, SGLANG_SPLITS
    partial, lse = (q.new_empty(size, dtype=torch.float32) for size in ((*shape, L), shape))
    starts = torch.arange(case.B + 1, **integers) * case.T
    places = (x.table[:, :, None] * PAGE + torch.arange(PAGE, **integers)).flatten()
    splits = torch.full((case.B,), SGLANG_SPLITS, **integers)
    given = q, keys, keys[..., :L], o, starts, places, partial, lse, splits, SGLANG_SPLITS, SCALE
    named = _taken(module.decode_attention_fwd, k_scale=1.0, v_scale=1.0, has_mla=True)

    def call() -> Tensor:
        module.decode_attention_fwd(*given, **named)
        return o[:, None]

    return call


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


OTHERS = {
    "flashmla": Other("flash_mla", ("flash_mla",), _flash_mla, lambda c: _paged(c) or (c.kind == "sparse" and c.fp8)),
    "flashinfer": Other("flashinfer-python", ("flashinfer.mla",), _flashinfer, _paged),
    "vllm": Other(
        "vllm",
        ("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention"),
        _vllm,
        _one_query,
    ),
    "sglang": Other("sglang", ("sglang.srt.layers.attention.triton_ops.decode_attention",), _sglang, _one_query),
}
"""Other projects' kernels by the name of the peer."""
