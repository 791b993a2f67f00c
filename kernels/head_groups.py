"""Gradients of MLA, a group of heads at a time: library products up-project and contract, a kernel does what is
between.

    latent [B, T, L], w_uk [N, P, L], w_uv [N, V, L]
    dk, d_rope, dv   [b, T, H, P], [b, T, H, R], [b, T, H, V]   of one group of heads, in the dtype of the weights

For a group of heads of some sequences, the latent's gradients due to keys and to values are one product each,
`dk @ W_UK` and `dv @ W_UV`, which sum over the heads, and so are the weights', `dk^T @ latent` and `dv^T @ latent`.
What is summed over groups is summed in float32. Nothing here reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attended import Attended, Wanted
from .even import even
from .share import in_even_groups, share_of
from .two_latents import latents_of
from .visibility import Visibility, causal_stop, part_of


@dataclass(frozen=True)
class Group:
    """A group of heads of some sequences, `H` and `b` in number, and the keys that some query may see.

    q `[b, Sq, H, P + R]`, ropes `[b, T, 1 or H, R]`, do and o `[b, Sq, H, V]`, of any strides but 1 in the last dim;
    lse and d_lse `[b, Sq, H]`; of_keys `[b, T, Lk]` and of_values `[b, T, Lv]`, the latents of keys and of values;
    w_uk `[H, P, Lk]`, w_uv `[H, V, Lv]`. d_mask, in float32, has the shape of the mask, and is None where no gradient
    of it is wanted.
    """

    q: Tensor
    of_keys: Tensor
    of_values: Tensor
    ropes: Tensor
    w_uk: Tensor
    w_uv: Tensor
    mask: Tensor | None
    d_mask: Tensor | None
    do: Tensor
    o: Tensor
    lse: Tensor
    d_lse: Tensor | None
    causal_offset: int | None
    scale: float


Kernel = Callable[[Group, Tensor, bool], tuple[Tensor, Tensor, Tensor] | None]
"""Fills dq `[b, Sq, H, P + R]` of a group, adds to its d_mask and returns dk, d_rope and dv, of any strides; or None in
their place where the flag says that these are not wanted."""
Groups = Callable[[Attended, int], Iterator[tuple[slice, slice]]]
"""From a problem and the number of keys to the sequences and heads taken at a time."""
Fewest = Callable[[int, int], int]
"""From the number of sequences taken together and that of keys to the fewest heads that keep the device busy."""


def attend_backward_in_groups(x: Attended, kernel: Kernel, groups: Groups) -> list[Tensor]:
    """The wanted gradients, each in the dtype of its operand; there are up-projections of keys and of values."""
    want, names = Wanted(*x.wanted), ("q", "latent", "k_rope", "w_uk", "w_uv", "mask")
    totals = {name: _zeros(getattr(x, name)) for name in names[1:] if getattr(want, name)}
    totals["q"] = x.q.new_zeros(x.q.shape)  # kernels write it, and it needs no sums
    tokens = causal_stop(x.causal_offset, range(x.q.shape[1]), x.latent.shape[1])
    q, do, o = (t if t.stride(3) == 1 else t.contiguous() for t in (x.q, x.grad_o, x.o))
    ropes = x.k_rope if x.k_rope.dim() == 4 else x.k_rope[:, :, None]
    ropes = ropes if ropes.shape[3] < 2 or ropes.stride(3) == 1 else ropes.contiguous()
    seen = replace(x, q=q, grad_o=do, o=o, latent=x.latent[:, :tokens], k_rope=ropes[:, :tokens])
    for part in groups(x, tokens) if x.lse.numel() and tokens else ():
        _add_group(seen, part, totals, kernel)
    dtypes = {"mask": None if x.mask is None else x.mask.dtype}  # the others may have been cast
    return [totals[name].to(dtypes.get(name) or x.q.dtype) for name in names if getattr(want, name)]


def _add_group(x: Attended, part: tuple[slice, slice], totals: dict[str, Tensor], kernel: Kernel) -> None:
    """Add what a group of heads of some sequences contributes to the totals.

    Only keys that some query may see are among those of `x`, whose rope keys are `[B, T, 1 or N, R]`.
    """
    some, heads = part
    group = _group_of(x, some, heads, totals.get("mask"))
    found = kernel(group, totals["q"][some, :, heads], totals.keys() != {"q"})
    if totals.keys() == {"q"}:
        return
    assert found is not None
    dk, d_rope, dv = found
    tokens = dk.shape[1]
    grads = dk.flatten(2).flatten(0, 1), dv.flatten(2).flatten(0, 1)  # [b T, H P], [b T, H V]
    weights = group.w_uk.flatten(0, 1), group.w_uv.flatten(0, 1)  # [H P, L], [H V, L]
    latents = group.of_keys.flatten(0, 1), group.of_values.flatten(0, 1)  # [b T, L]
    if "latent" in totals:
        of_each = latents_of(totals["latent"][some, :tokens], x.w_uk, x.w_uv)
        for total, grad, weight in zip(of_each, grads, weights, strict=True):
            if total.is_cpu:  # one product for each sequence, whose bits then do not depend on the batch
                for own, of_own in zip(total, grad.unflatten(0, total.shape[:2]), strict=True):
                    _add_product(own, of_own, weight)
            else:
                total += (grad @ weight).view(total.shape)
    if "k_rope" in totals:
        total = totals["k_rope"][some, :tokens]
        if total.dim() == 3:
            total += d_rope.sum(2, dtype=torch.float32)
        else:
            total[:, :, heads] += d_rope
    for name, grad, own in zip(("w_uk", "w_uv"), grads, latents, strict=True):
        if name in totals:
            _add_product(totals[name][heads].flatten(0, 1), grad.T, own)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b`, of `[n, k]` and `[k, m]`, to `total` `[n, m]`."""
    if a.is_cpu and a.stride(1) == 1:  # a transposed matrix is copied before it is multiplied
        a, b = even(a), even(b.T).T
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _group_of(x: Attended, some: slice, heads: slice, d_mask: Tensor | None) -> Group:
    assert x.w_uk is not None
    assert x.w_uv is not None
    tokens, mask = x.latent.shape[1], part_of(x.mask, some, heads)
    latent, ropes = x.latent[some], x.k_rope[some] if x.k_rope.shape[2] == 1 else x.k_rope[some, :, heads]
    if mask is not None and mask.dtype == torch.bool:
        # Keys that no query sees may hold anything, and 0 times NaN is NaN.
        visibility = Visibility(mask, x.causal_offset, max(mask.shape[3], tokens), mask.device)
        unseen = visibility.hidden_from_all(mask, range(x.q.shape[1]), range(tokens))
        latent, ropes = latent.masked_fill(unseen[..., None], 0), ropes.masked_fill(unseen[..., None, None], 0)
    return Group(
        x.q[some, :, heads],
        *latents_of(latent, x.w_uk, x.w_uv),
        ropes,
        x.w_uk[heads],
        x.w_uv[heads],
        mask,
        part_of(d_mask, some, heads),
        x.grad_o[some, :, heads],
        x.o[some, :, heads],
        x.lse[some, :, heads],
        None if x.grad_lse is None else x.grad_lse[some, :, heads],
        x.causal_offset,
        x.scale,
    )


def _zeros(operand: Tensor) -> Tensor:
    return torch.zeros(operand.shape, dtype=torch.float32, device=operand.device)


def busy_groups(fewest: Fewest) -> Groups:
    """As many sequences and heads at a time as the forward takes, and enough to keep the device busy."""

    def groups(x: Attended, tokens: int) -> Iterator[tuple[slice, slice]]:
        batch, _, heads, _ = x.q.shape
        share = share_of(batch, heads, tokens, x.workspace_tokens)
        size = in_even_groups(heads, max(share.heads, fewest(share.sequences, tokens)))
        for b in range(0, batch, share.sequences):
            for head in range(0, heads, size):
                yield slice(b, min(b + share.sequences, batch)), slice(head, min(head + size, heads))

    return groups
