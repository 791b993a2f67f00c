"""Small functional ATen graphs, as AOTAutograd hands them to the passes, and how the tests run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile import ops as ops  # defines the ops
from mla_compile.coded import HELD
from mla_compile.cost import Device
from mla_compile.int4 import PACKED, unpacked
from mla_compile.passes.outcome import Outcome
from mla_compile.passes.paths import absorbed
from mla_compile.passes.pipeline import Pipeline

DEVICE = Device("of the tests", 1e12, 1e11)


def capture(function: Callable[..., Any], *tensors: Tensor, symbolic: Sequence[Sequence[int]] = ()) -> fx.GraphModule:
    """The functional ATen graph of `function`: mutations are removed, and ops of ATen are not decomposed.

    `symbolic[i]` are the dimensions of tensor i whose size is a symbol; equal sizes get one symbol.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for i, tensor in enumerate(tensors):
        own = symbolic[i] if i < len(symbolic) else ()
        dynamic = [DimDynamic.DUCK if d in own else DimDynamic.STATIC for d in range(tensor.dim())]
        fakes.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic)))
    # For Python's matmul: torch 2.11's in C++ asks for the number of elements of functionalized tensors, which fails
    # if their sizes are symbolic.
    with mode, torch.no_grad(), enable_python_dispatcher():
        return make_fx(torch.func.functionalize(function, remove="mutations"), tracing_mode="real")(*fakes)


class _Run(fx.Interpreter):
    """Runs a graph. The mla ops are computed by their equations in `mla_compile.ops`, in the dtype of their inputs."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        match target:
            case torch.ops.mla.latent_attention.default:
                q_latent, q_rope, latent, k_rope, *rest = args
                weights, lse = _softmax(_dot(q_latent, latent) + _dot(q_rope, k_rope), *rest)
                return torch.einsum("bnst,btl->bsnl", weights, latent), lse
            case torch.ops.mla.sparse_latent_attention.default:
                q_latent, q_rope, latent, k_rope, indices, mask, offset, scale, uniform, *scales = args
                assert mask is None
                latent, k_rope = _dequantised(latent, k_rope, *scales, dtype=q_latent.dtype)
                rest = offset, scale
                tokens = latent.shape[1]
                assert indices.max() < tokens
                counts = torch.zeros(*indices.shape[:2], tokens + 1, dtype=torch.int64)
                counts.scatter_add_(2, indices.where(indices >= 0, tokens).long(), torch.ones_like(indices).long())
                assert counts[..., :tokens].max() <= 1, "a key that counts twice"
                named = counts[:, None, :, :tokens] > 0
                weights, lse = _softmax(_dot(q_latent, latent) + _dot(q_rope, k_rope), named, *rest)
                o = torch.einsum("bnst,btl->bsnl", weights, latent)
                if uniform:
                    o = torch.where((lse == -torch.inf)[..., None], latent.mean(1)[:, None, None], o)
                return o, lse
            case torch.ops.mla.expanded_attention.default:
                q, latent, k_rope, w_uk, w_uv, *rest, workspace_tokens = args
                assert workspace_tokens >= 1
                q_nope, q_rope = q.split([w_uk.shape[1], k_rope.shape[-1]], dim=-1)
                nope, v = _up_projected(q_nope, latent, w_uk, w_uv)
                rope = torch.einsum("bsnr,btnr->bnst" if k_rope.dim() == 4 else "bsnr,btr->bnst", q_rope, k_rope)
                weights, lse = _softmax(nope + rope, *rest)
                return torch.einsum("bnst,btnv->bsnv", weights, v), lse
            case torch.ops.mla.paged_latent_attention.default:
                q_latent, q_rope, latent_pages, rope_pages, table, seq_lens, causal, scale, *rest = args
                scales, _, mask, first = (*rest, *[None] * (4 - len(rest)))
                keys = _dequantised(latent_pages, rope_pages, scales, dtype=q_latent.dtype)
                latent, k_rope, seen = _in_pages(q_latent.shape[1], (*keys, table, seq_lens), causal, mask, first)
                weights, lse = _softmax(_dot(q_latent, latent) + _dot(q_rope, k_rope), seen, None, scale)
                return torch.einsum("bnst,btl->bsnl", weights, latent), lse
            case torch.ops.mla.paged_expanded_attention.default:
                q, latent_pages, rope_pages, *places, w_uk, w_uv = args[:7]
                causal, scale, workspace_tokens, *rest = args[7:]
                scales, mask, first, counts = (*rest, *[None] * (4 - len(rest)))
                assert workspace_tokens >= 1
                keys = _dequantised(latent_pages, rope_pages, scales, dtype=q.dtype)
                latent, k_rope, seen = _in_pages(q.shape[1], (*keys, *places), causal, mask, first)
                q_nope, q_rope = q.split([w_uk.shape[1], k_rope.shape[2]], dim=-1)
                nope, v = _up_projected(q_nope, latent, w_uk, w_uv)
                if counts is not None:
                    assert first is not None or not causal
                    assert ((counts >= 0) & (counts <= q.shape[1])).all()
                    seen = seen & (torch.arange(q.shape[1])[:, None] < counts[:, None, None, None])
                weights, lse = _softmax(nope + _dot(q_rope, k_rope), seen, None, scale)
                return torch.einsum("bnst,btnv->bsnv", weights, v), lse
            case torch.ops.mla.per_head_matmul.default:
                return torch.einsum("bsni,nio->bsno", *args)
        return super().call_function(target, args, kwargs)


def _up_projected(q_nope: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of up-projected keys, `[B, N, Sq, T]`, and the values `[B, T, N, V]`."""
    of_keys, of_values = w_uk.shape[2], w_uv.shape[2]
    assert latent.shape[2] == of_keys + of_values or latent.shape[2] == of_keys == of_values
    nope = torch.einsum("bsnp,npl,btl->bnst", q_nope, w_uk, latent[..., :of_keys])
    return nope, torch.einsum("btl,nvl->btnv", latent[..., latent.shape[2] - of_values :], w_uv)


def _dequantised(
    latent: Tensor, k_rope: Tensor, scales: Tensor | None = None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if scales is None:
        return latent, k_rope
    assert latent.dtype in HELD
    latent = unpacked(latent) if latent.dtype == PACKED else latent
    assert k_rope.dtype in (latent.dtype, dtype)
    assert scales.dtype == torch.float32
    scales = scales.to(dtype)
    latent = (latent.to(dtype).unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
    if k_rope.dtype in HELD:
        assert scales.shape[-1] == 1
        k_rope = k_rope.to(dtype) * scales
    assert k_rope.dtype == dtype
    return latent, k_rope


def _in_pages(
    queries: int, cache: Sequence[Tensor], causal: bool, mask: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Latents and rope keys of all pages that a table names, and which of them each query sees, `[B, N|1, Sq, T]`."""
    latent_pages, rope_pages, table, seq_lens = cache
    assert seq_lens.min() >= 0
    assert seq_lens.max() <= table.shape[1] * latent_pages.shape[1]
    latent, k_rope = latent_pages[table].flatten(1, 2), rope_pages[table].flatten(1, 2)
    positions = torch.arange(latent.shape[1])
    seen = (positions < seq_lens[:, None, None]).expand(-1, queries, -1)
    if causal:
        first = seq_lens - queries if first is None else first
        seen = seen & (positions <= first[:, None, None] + torch.arange(queries)[:, None])
    seen = seen[:, None]
    if mask is not None:
        more = latent.shape[1] - mask.shape[3] if mask.shape[3] != 1 else 0
        mask = torch.nn.functional.pad(mask, (0, more))
        seen = seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    return latent, k_rope, seen


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bsnl,btl->bnst", q, k)


def _softmax(scores: Tensor, mask: Tensor | None, causal_offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """Weights `[B, N, Sq, T]`, 0 in a row with nothing to attend to, and their lse `[B, Sq, N]`, float32."""
    batch, heads, queries, keys = scores.shape
    scores = scale * scores
    if mask is not None:
        assert mask.dtype == torch.bool or mask.is_floating_point()
        assert all(size in (1, full) for size, full in zip(mask.shape, (batch, heads, queries, keys), strict=True))
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal_offset is not None:
        hidden = torch.arange(keys) > torch.arange(queries)[:, None] + causal_offset
        scores = scores.masked_fill(hidden, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    return weights, scores.logsumexp(-1).transpose(1, 2).float()


def run(module: fx.GraphModule, *tensors: Tensor) -> Any:
    """The results of a graph for `tensors`; the mla ops are computed by their equations."""
    with torch.no_grad():
        return _Run(module).run(*tensors)


def value_of(module: fx.GraphModule, node: fx.Node, *tensors: Tensor) -> Any:
    """The value of one node of a graph."""
    interpreter = _Run(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*tensors)
    return interpreter.env[node]


class _Poisoned(fx.Interpreter):
    """Runs a graph with NaN in memory that was never written."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        return result.fill_(torch.nan) if "empty" in str(target) else result


def values(module: fx.GraphModule, *tensors: Tensor) -> dict[fx.Node, Any]:
    """The value of every node of a graph; NaN in memory that was never written."""
    interpreter = _Poisoned(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*tensors)
    return interpreter.env


def on_a_gpu() -> AbstractContextManager[object]:
    """Within this context, or a function that it decorates, no kernel looks at masks, as on a GPU: the absorbed path,
    too, reads a dense cache up to its lengths."""
    return mock.patch.object(absorbed, "_LOOK_AT_MASKS", set())


def shapes_of(module: fx.GraphModule) -> ShapeEnv:
    """The environment that knows the symbols of a graph and the guards on them."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return torch._guards.detect_fake_mode(inputs).shape_env


def rewrite(module: fx.GraphModule, path: str = "absorbed", workspace_tokens: int = 4) -> list[Outcome]:
    """Run the passes over a graph in place."""
    pipeline = Pipeline(DEVICE, path, workspace_tokens)
    pipeline.rephrase(module)
    return [result.outcome for result in pipeline(module)]
