"""Masks written in many ways, the words by which a report names each, and MLA under them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, arange, fx

from tests.passes import spellings as mla
from tests.passes.spellings import SQ, B, T

Mask = Callable[..., Tensor]
MINIMUM = torch.finfo(torch.float64).min
generator = torch.Generator().manual_seed(3)
LENGTHS = torch.tensor([4, T])
SCORES = torch.rand(B, SQ, T, generator=generator)
LEFT = arange(T) >= torch.tensor([2, 0])[:, None]
MIDDLE = (arange(T) < 3) | (arange(T) > 6 + arange(B)[:, None])
REPEATED = torch.tensor([[[0, 3, 3, 9], [1, 1, 1, 1], [10, 2, 8, 2]]] * B)


def attention(mask: Mask) -> mla.Function:
    """SDPA of MLA under `mask(Sq, T, *more)`, where `more` are the tensors that follow those of MLA."""

    def function(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        return mla.sealed(*mla.naive(x, latent, *args[:3]), mask(x.shape[1], latent.shape[1], *args[3:]))

    return function


def by_hand(mask: Mask) -> mla.Function:
    """The same as a softmax by hand, with the mask added to the scores."""

    def function(x: Tensor, latent: Tensor, *args: Tensor) -> Tensor:
        added = mask(x.shape[1], latent.shape[1], *args[3:])
        return mla.softmax(*mla.naive(x, latent, *args[:3]), lambda scores: scores + added)

    return function


@dataclass(frozen=True)
class Case:
    mask: Mask
    words: str
    more: tuple[Tensor, ...] = ()


def causal(s: int, t: int) -> Tensor:
    return arange(t) <= arange(s)[:, None] + (t - s)


KNOWN = {
    "arange": Case(causal, "causal"),
    "greater or equal": Case(lambda s, t: (arange(s) + t - s)[:, None] >= arange(t)[None], "causal"),
    "less": Case(lambda s, t: arange(t) < (arange(t - s, t) + 1)[:, None], "causal"),
    "not greater": Case(lambda s, t: ~(arange(t) > arange(t - s, t)[:, None]), "causal"),
    "difference": Case(lambda s, t: (arange(s)[:, None] + (t - s) - arange(t)) >= 0, "causal"),
    "strictly before": Case(lambda s, t: arange(t) < arange(s)[:, None] + (t - s), "causal"),
    "one more": Case(lambda s, t: arange(t) <= arange(s)[:, None] + (t - s) + 1, "causal"),
    "top left": Case(lambda s, t: arange(t) <= arange(s)[:, None], "causal"),
    "less a maximum": Case(
        lambda s, t: arange(t) + torch.sym_max(0, s - 2) <= arange(s)[:, None] + (t - s), "causal"
    ),
    "tril": Case(lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(t - s), "causal"),
    "a triangle of numbers": Case(lambda s, t: torch.ones(s, t).tril(t - s) == 1, "causal"),
    "not triu": Case(lambda s, t: ~torch.ones(s, t).triu(t - s + 1).bool(), "causal"),
    "a triangle beside the past": Case(
        lambda s, t: torch.cat([torch.ones(s, t - s, dtype=torch.bool), torch.ones(s, s, dtype=torch.bool).tril()], 1),
        "causal",
    ),
    "cumsum": Case(
        lambda s, t: arange(t) <= (torch.ones(1, t, dtype=torch.int64).cumsum(-1) - 1)[:, -s:, None], "causal"
    ),
    "rank 4 and expanded": Case(
        lambda s, t: (arange(t)[None, None, None] <= (arange(s) + t - s)[None, None, :, None]).expand(B, -1, s, t),
        "causal",
    ),
    "all true": Case(lambda s, t: torch.ones(s, t, dtype=torch.bool), "none"),
    "positions of a tensor": Case(
        lambda s, t, p: arange(t) <= p[:, None, :, None], "causal", (torch.tensor([[6, 7, 8], [8, 9, 10]]),)
    ),
    "offset of a tensor": Case(lambda s, t, p: arange(t) <= arange(s)[:, None] + p, "causal", (torch.tensor(5),)),
    "lengths": Case(lambda s, t, n: arange(t) < n[:, None, None, None], "lengths", (LENGTHS,)),
    "static length": Case(lambda s, t: (arange(t) < 7)[None], "lengths"),
    "sliding window": Case(
        lambda s, t: causal(s, t) & (arange(t) > arange(s)[:, None] + (t - s) - 4), "causal + window"
    ),
    "window alone": Case(lambda s, t: (arange(s)[:, None] - arange(t)) < 4 - (t - s), "window"),
    "left padding": Case(lambda s, t, p: causal(s, t) & p[:, None, None], "causal + padding", (LEFT,)),
    "left padding by index": Case(
        lambda s, t, p: torch.ones((), dtype=torch.bool)
        & causal(s, t)[None, None]
        & p[arange(B)[:, None, None, None], arange(t)[None, None, None]],
        "causal + padding",
        (LEFT,),
    ),
    "left padding of integers": Case(
        lambda s, t, p: causal(s, t) & p[:, None, None].bool(), "causal + padding", (1 * LEFT,)
    ),
    "left padding up to the present tokens": Case(
        lambda s, t, p: causal(s, t) & torch.cat([p[:, : t - s], p.new_ones(len(p), s)], 1)[:, None, None],
        "causal + padding",
        (LEFT,),
    ),
    "left padding of fewer keys": Case(
        lambda s, t, p: causal(s, t) & F.pad(p[:, : t - 2], (0, 2))[:, None, None], "causal + padding", (LEFT,)
    ),
    "padding in the middle": Case(lambda s, t, p: causal(s, t) & p[:, None, None], "causal + padding", (MIDDLE,)),
    "padding alone, inverted": Case(lambda s, t, p: ~(~p)[:, None, None], "padding", (MIDDLE,)),
    "either way": Case(
        lambda s, t, p: ~((arange(t) > arange(s)[:, None] + (t - s)) | ~p[:, None, None]),
        "causal + padding",
        (MIDDLE,),
    ),
    "chosen": Case(lambda s, t, p: torch.where(p[:, None, None], causal(s, t), False), "causal + padding", (LEFT,)),
    "masked": Case(lambda s, t, p: causal(s, t).masked_fill(~p[:, None, None], False), "causal + padding", (LEFT,)),
    "product": Case(lambda s, t, p: causal(s, t) * p[:, None, None], "causal + padding", (LEFT,)),
    "top-k": Case(
        lambda s, t, x: torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, True)[:, None],
        "top-k", (SCORES,),
    ),
    "top-k, inverted, causal": Case(
        lambda s, t, x: causal(s, t)[None, None]
        & ~torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices.int().long(), False)[:, None],
        "causal + top-k",
        (SCORES,),
    ),
    "indices with repetitions": Case(
        lambda s, t, i: torch.zeros(B, i.shape[1], T, dtype=torch.bool).scatter(-1, i, True)[:, None],
        "top-k",
        (REPEATED,),
    ),
    "all but the named": Case(
        lambda s, t, i: torch.ones(B, i.shape[1], T, dtype=torch.bool).scatter(-1, i, False)[:, None],
        "tensor",
        (REPEATED,),
    ),
}  # fmt: skip


def added(seen: Tensor, fill: float) -> Tensor:
    """0 where seen, else `fill`."""
    return torch.where(seen, torch.zeros((), dtype=torch.float64), torch.full((), fill, dtype=torch.float64))


def infinite(s: int, t: int) -> Tensor:
    return torch.full((s, t), -math.inf, dtype=torch.float64)


ADDED = {
    "triu of infinity": Case(lambda s, t: infinite(s, t).triu(t - s + 1), "causal"),
    "triu beside zeros": Case(
        lambda s, t: torch.cat([torch.zeros(s, t - s, dtype=torch.float64), infinite(s, s).triu(1)], 1), "causal"
    ),
    "triu with zeros before": Case(lambda s, t: F.pad(infinite(s, s).triu(1), (t - s, 0)), "causal"),
    "where": Case(lambda s, t: added(causal(s, t), MINIMUM), "causal"),
    "where with tensors": Case(
        lambda s, t: torch.where(causal(s, t), torch.zeros((), dtype=torch.float64), -math.inf), "causal"
    ),
    "masked_fill": Case(lambda s, t: torch.zeros(s, t).double().masked_fill(~causal(s, t), MINIMUM), "causal"),
    "times a number": Case(lambda s, t: (1.0 - causal(s, t).double()) * MINIMUM, "causal"),
    "negated": Case(lambda s, t: -(infinite(s, t) * -1).triu(t - s + 1), "causal"),
    "cast": Case(lambda s, t: infinite(s, t).float().triu(t - s + 1).double(), "causal"),
    "two sums": Case(
        lambda s, t, p: infinite(s, t).triu(t - s + 1)
        + torch.zeros(B, 1, 1, T, dtype=torch.float64).masked_fill(~p[:, None, None], -math.inf),
        "causal + padding",
        (LEFT,),
    ),
    "window of a large number": Case(
        lambda s, t: added(causal(s, t) & (arange(t) > arange(s)[:, None] + (t - s) - 4), -1e30),
        "causal + window",
    ),
    "top-k scattered into infinity": Case(
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter(-1, x.topk(4).indices, 0.0)[:, None],
        "top-k",
        (SCORES,),
    ),
    "top-k as DeepSeek writes it": Case(
        lambda s, t, x: torch.full(x.shape, -math.inf).double().scatter_(-1, x.topk(4).indices, 0)[:, None]
        + infinite(s, t).triu(t - s + 1),
        "causal + top-k",
        (SCORES,),
    ),
    "top-k filled into a causal mask": Case(
        lambda s, t, x: added(causal(s, t), MINIMUM)[None, None].masked_fill(
            torch.ones(x.shape, dtype=torch.bool).scatter(-1, x.topk(4).indices, False)[:, None], MINIMUM
        ),
        "causal + top-k",
        (SCORES,),
    ),
}  # fmt: skip


def masks_left(module: fx.GraphModule) -> list[fx.Node]:
    """The tensors of a graph with an element for each query and key."""
    tensors = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    return [node for node in tensors if tuple(node.meta["val"].shape)[-2:] == (SQ, T)]
