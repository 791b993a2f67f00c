"""What a `Spelling` does with queries, keys and values: scores, masks, softmax and sums, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .choices import Spelling

SOFTCAP = 3.0
WINDOW = 4
LOW = -1e4


class Attending(nn.Module):
    """The part of a spelling's attention that starts from queries, keys and values."""

    spelling: Spelling
    letters: str
    """The dimensions of a tensor except the last; `{}` stands for its tokens."""
    tokens: int
    """The number of keys."""
    sink: nn.Parameter | None
    weights: Tensor
    """The attention weights, if they are returned."""
    up_weights: Callable[[], tuple[Tensor, Tensor]]

    def one_by_one(self, product: Callable[..., Tensor], a: Tensor, b: Tensor, orders: tuple[str, str, str]) -> Tensor:
        """A product of two tensors, in a loop if the spelling has one. `orders`: dimensions of them and the result."""
        over = "n" if self.spelling.loop == "heads" else "b"
        if self.spelling.loop == "no" or any(over not in order for order in orders):
            return product(a, b)
        i, j, k = (order.index(over) for order in orders)
        pieces = [product(a.narrow(i, n, 1), b.narrow(j, n, 1)) for n in range(a.shape[i])]
        if self.spelling.loop != "buffer":
            return torch.cat(pieces, dim=k)
        first, dims = pieces[0], list(pieces[0].shape)
        dims[k] = len(pieces)
        whole = first.new_empty(dims)
        for n, piece in enumerate(pieces):
            whole.select(k, n).copy_(piece.squeeze(k))
        return whole

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """`[B, N, S, T]`"""
        key_order = self.letters.format("t") if k.dim() == 4 else self.letters.format("t").replace("n", "")
        return self.one_by_one(self.product_of_keys, q, k, (self.letters.format("s"), key_order, "bnst"))

    def product_of_keys(self, q: Tensor, k: Tensor) -> Tensor:
        if self.spelling.order == "heads first":
            return q @ (k if k.dim() == 4 else k[:, None]).transpose(-1, -2)
        q_letters, k_letters = self.letters.format("s"), self.letters.format("t")
        k_letters = k_letters if k.dim() == 4 else k_letters.replace("n", "")
        return torch.einsum(f"{q_letters}d,{k_letters}d->bnst", q, k)

    def seen(self) -> Tensor:
        """Bool `[S, T]`: the keys that the mask lets each query attend to."""
        s = self.spelling
        shape, start = (s.queries, self.tokens), self.tokens - s.queries
        seen = torch.ones(shape, dtype=torch.bool).tril(start)
        if s.mask == "window":
            seen = seen & torch.ones(shape, dtype=torch.bool).triu(start - WINDOW)
        return seen & (torch.arange(s.queries) > 0)[:, None] if s.blind else seen

    def mask(self, dtype: torch.dtype, bias: Tensor | None) -> Tensor | None:
        """What to add to the scores, or which scores to keep."""
        match self.spelling.mask:
            case "none" | "causal":
                return None
            case "additive":
                return bias
            case "bool" | "window" | "low" | "assigned":
                return self.seen()
            case "triu":
                s = self.spelling
                hidden = torch.full((s.queries, self.tokens), -math.inf, dtype=dtype)
                return hidden.triu(self.tokens - s.queries + 1)
        return torch.zeros((), dtype=dtype).masked_fill(~self.seen(), torch.finfo(dtype).min)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        s = self.spelling
        order = [self.letters.format("t").index(letter) for letter in "bnt"]
        q, k, v = (t.permute(*order, 3) for t in (q, k, v))
        if s.scale == "scores":  # SDPA has no scores to scale
            q, scale = q * scale, 1.0
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            self.mask(q.dtype, bias),
            is_causal=s.mask == "causal",
            scale=scale if s.scale == "attention" else 1.0,
            enable_gqa=s.groups == "grouped",
        )
        return o.permute(*(order.index(i) for i in range(3)), 3)

    def by_hand(self, scores: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        s, dtype = self.spelling, v.dtype
        if s.softcap:
            scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        mask = self.mask(dtype, bias)
        if s.mask == "assigned":
            assert mask is not None
            scores = scores.clone()
            scores[~mask.expand(scores.shape)] = -math.inf
        elif mask is not None:
            fill = LOW if s.mask == "low" else -math.inf
            scores = scores.masked_fill(~mask, fill) if mask.dtype == torch.bool else scores + mask
        if self.sink is not None:
            column = self.sink.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
            scores = torch.cat([scores, column], dim=-1)
        wide = torch.promote_types(dtype, torch.float32)
        if s.softmax in ("by hand", "reciprocal", "late", "exp2"):
            scores = scores * math.log2(math.e) if s.softmax == "exp2" else scores
            power = torch.exp2 if s.softmax == "exp2" else torch.exp
            grown = power(scores - scores.amax(-1, keepdim=True))
            total = grown.sum(-1, keepdim=True)
            weights = grown
            if s.softmax != "late":
                weights = grown * total.reciprocal() if s.softmax == "reciprocal" else grown / total
        else:
            weights = scores.softmax(-1, dtype=wide if s.softmax == "wide" else None).to(dtype)
        if self.sink is not None:
            weights = weights[..., :-1]
        if s.returned:
            self.weights = weights
        rows = self.letters.format("s")
        o = self.one_by_one(self.product_of_values, weights, v, ("bnst", self.letters.format("t"), rows))
        return o / torch.einsum(f"bnsd->{rows}d", total) if s.softmax == "late" else o

    def of_three(self, x: Tensor, latent: Tensor, weight: Tensor, own: str, result: str) -> Tensor:
        """`x`, latents `[B, T, L]` and one weight per head in one product, in the order that the spelling says."""
        column = "d" if own == "s" else "e"
        letters = {"x": self.letters.format("s") + "d" if own == "s" else "bnst", "w": f"n{column}l"}
        letters["c"] = self.letters.format("t").replace("n", "") + "l"
        operands, order = {"x": x, "c": latent, "w": weight}, self.spelling.threes
        equation = ",".join(letters[name] for name in order)
        return torch.einsum(f"{equation}->{result}", *(operands[name] for name in order))

    def product_of_values(self, weights: Tensor, v: Tensor) -> Tensor:
        if self.spelling.threes != "no":
            return self.of_three(weights, v, self.up_weights()[1], "t", self.letters.format("s") + "e")
        if self.spelling.order == "heads first":
            return weights @ v
        return torch.einsum(f"bnst,{self.letters.format('t')}d->{self.letters.format('s')}d", weights, v)
