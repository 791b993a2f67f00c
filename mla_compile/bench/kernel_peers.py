"""The peers that are compared: the op, and other ways to compute a case.

Each returns o `[B, Sq, N, L]`, for prefill `[B, Sq, N, V]`, and for train the gradient of q `[B, Sq, N, P + R]`. Peers
in plain torch read a bfloat16 cache without pages, which favours them; other projects' kernels read the same pages as
the op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.asked import OURS, kept_to
from mla_compile.bench.kernel_cases import SCALE, Inputs, L, P, R, V
from mla_compile.bench.kernel_others import OTHERS
from mla_compile.errors import KernelError
from mla_compile.fp8 import RowLayout
from mla_compile.kernels._common.machine import present
from mla_compile.kernels.implementations.gluon import CLUSTERS, HOPPER, TENSOR_MEMORY
from mla_compile.kernels.implementations.implementation import Implementation
from mla_compile.kernels.implementations.pages import Paged
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

Call = Callable[[], Tensor]


def _mla(x: Inputs) -> Call:
    case, ops = x.case, torch.ops.mla
    if case.of_prompts:
        return functools.partial(_expanded_attention, x)
    if case.kind == "sparse":
        latent, k_rope, scales = x.cache[..., :L], x.cache[..., L:], None
        if x.rows is not None:
            latent, scales, k_rope = RowLayout(L, R, x.q.dtype).views(x.rows)
            latent, k_rope, scales = (t.unflatten(0, (case.B, -1)).flatten(1, 2) for t in (latent, k_rope, scales))
        named = (x.q[..., :L], x.q[..., L:], latent, k_rope, x.indices, None, None, SCALE, False, scales)
        return lambda: ops.sparse_latent_attention(*named)[0]
    paged = _paged(x)
    return lambda: ops.paged_latent_attention(*paged)[0]


def _paged(x: Inputs) -> tuple[Any, ...]:
    """The arguments of `mla::paged_latent_attention`."""
    latent, scales, k_rope = x.pages[..., :L], None, x.pages[..., L:]
    if x.rows is not None:
        latent, scales, k_rope = RowLayout(L, R, x.q.dtype).views(x.rows)
    return x.q[..., :L], x.q[..., L:], latent, k_rope, x.table, x.lengths, x.case.Sq > 1, SCALE, scales


def _expanded_attention(x: Inputs) -> Tensor:
    assert x.weight is not None
    operands = x.q, x.cache[..., :L], x.cache[..., L:], x.weight[:, :P], x.weight[:, P:]
    o: Tensor = torch.ops.mla.expanded_attention(*operands, None, 0, SCALE, x.case.workspace_tokens)[0]
    return o


def _alone(kernels: Sequence[Implementation[PagedLatentAttention]], x: Inputs) -> Call:
    """The last kernel that is for this GPU, without its trial. Raises KernelError if there is none, or it does not take
    the case."""
    bundle = PagedLatentAttention(*_paged(x))
    problem, machine = Paged.of(bundle), present(x.q.device)
    assert problem is not None
    *_, kernel = [each for each in kernels if machine.arch in each.architectures] or kernels[:1]
    why = kernel.refusal(problem, machine.arch)
    if why is not None:
        raise KernelError(f"{kernel.name} {why}")
    module = importlib.import_module(kernel.homes[0])
    return lambda: kernel.attend(module, bundle)[0]


def _by_ours(call: Call) -> Call:
    """Make a call use our kernels only, for gradients too: other projects' kernels are peers of their own."""

    def alone() -> Tensor:
        with kept_to(OURS):
            return call()

    return alone


def _seen(x: Inputs) -> Tensor | None:
    """Bool `[Sq, T]`, True where a query attends to a key; None if all do."""
    case = x.case
    if case.Sq == 1:
        return None
    last = torch.arange(case.T - case.Sq, case.T, device=x.q.device)[:, None]
    return torch.arange(case.T, device=x.q.device) <= last


def _by_hand(x: Inputs) -> Call:
    return functools.partial(by_hand, x)


def by_hand(x: Inputs) -> Tensor:
    """Two plain products and a softmax in the dtype of the inputs."""
    if x.case.of_prompts:
        k, v = _expanded(x)
        scores = x.q.transpose(1, 2) @ k.mT * SCALE
    else:
        keys = x.cache[:, None]
        if x.indices is not None:
            sequence = torch.arange(x.case.B, device=x.q.device)[:, None, None]
            keys = x.cache[sequence, x.indices.long()]  # [B, Sq, keys, L + R]
            weights = (x.q @ keys.mT * SCALE).softmax(-1)
            return weights @ keys[..., :L]
        scores, v = x.q.transpose(1, 2) @ keys.mT * SCALE, keys[..., :L]
    seen = _seen(x)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def plainly(x: Inputs) -> Call:
    """What every peer returns for a case, by hand; its error measures what rounding explains."""
    return _for_kind(_by_hand, x)


def _for_kind(make: Callable[[Inputs], Call], x: Inputs) -> Call:
    """The call of a case; for train, it and its gradients of queries, cache and weight, of which it returns the first.

    A peer takes views of these only when it is called.
    """
    if x.case.kind != "train":
        return make(x)
    assert x.weight is not None
    leaves = [t.detach().requires_grad_() for t in (x.q, x.cache, x.weight)]
    forward = make(replace(x, q=leaves[0], cache=leaves[1], weight=leaves[2]))

    def call() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(forward(), leaves, x.direction)[0]

    return call


def _expanded(x: Inputs) -> tuple[Tensor, Tensor]:
    """Keys `[B, N, T, P + R]` and values `[B, N, T, V]` of a prefill."""
    assert x.weight is not None
    k_nope, v = (x.cache[:, None, :, :L] @ x.weight.mT).split([P, V], dim=-1)
    return torch.cat([k_nope, x.cache[:, None, :, L:].expand(*k_nope.shape[:3], R)], dim=-1), v


def _sdpa(x: Inputs) -> Call:
    """SDPA: absorbed, with heads as queries of one head; expanded for prefill."""
    if x.case.of_prompts:

        def expanded() -> Tensor:
            k, v = _expanded(x)
            o = F.scaled_dot_product_attention(x.q.transpose(1, 2), k, v, is_causal=True, scale=SCALE)
            return o.transpose(1, 2)

        return expanded
    seen = _seen(x)
    mask = None if seen is None else seen.repeat_interleave(x.case.N, 0)  # [Sq * N, T]
    q, k = x.q.flatten(1, 2)[:, None], x.cache[:, None]

    def absorbed() -> Tensor:
        o = F.scaled_dot_product_attention(q, k, k[..., :L], mask, scale=SCALE)
        return o[:, 0].unflatten(1, (x.case.Sq, x.case.N))

    return absorbed


def _flex(x: Inputs) -> Call:
    """flex_attention: absorbed, with the cache as the only key head."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    behind = x.case.T - x.case.Sq

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + behind

    mask = create_block_mask(seen, None, None, x.case.Sq, x.case.T, device=str(x.q.device)) if x.case.Sq > 1 else None
    compiled = torch.compile(functools.partial(flex_attention, scale=SCALE, enable_gqa=True), dynamic=False)
    q, k = x.q.transpose(1, 2), x.cache[:, None]
    return lambda: compiled(q, k, k[..., :L], block_mask=mask).transpose(1, 2)


def _inductor(x: Inputs) -> Call:
    """The plain equation under torch.compile."""
    compiled: Call = torch.compile(lambda: by_hand(x), dynamic=False)
    return compiled


def calls(x: Inputs, names: Sequence[str]) -> dict[str, Callable[[], Call]]:
    """For each named peer that can take a case, a function that makes its call."""
    own: dict[str, Callable[[Inputs], Call]] = {"mla": lambda x: _by_ours(_mla(x)), "mla-default": _mla}
    if not x.case.fp8:
        own |= {"by-hand": _by_hand, "inductor": _inductor}
        if x.case.kind != "sparse":
            own["sdpa"] = _sdpa
        if x.case.kind == "decode":
            own["flex"] = _flex
    if x.case.kind == "decode":
        own["mla-gluon"] = functools.partial(_alone, (HOPPER, TENSOR_MEMORY))
        own["mla-clusters"] = functools.partial(_alone, (CLUSTERS,))
    makers: dict[str, Callable[[], Call]] = {name: functools.partial(_for_kind, make, x) for name, make in own.items()}
    for name in names:
        other = OTHERS.get(name)
        if other is None or not other.takes(x.case):
            continue
        try:
            module = other.module()
        except Exception as broken:  # an installed package that fails to import is a failure of that peer
            makers[name] = functools.partial(_raise, broken)
            continue
        if module is not None:
            makers[name] = functools.partial(other.make, x, module)
    return {name: makers[name] for name in names if name in makers}


def _raise(error: Exception) -> Call:
    raise error


def version(peer: str) -> str:
    """The package and version that compute a peer."""
    return OTHERS[peer].version() if peer in OTHERS else f"torch {torch.__version__}"
