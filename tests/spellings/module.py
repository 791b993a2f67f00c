"""The MLA attention that a `Spelling` describes, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .choices import TENSORS, Spelling
from .joining import Joining

HIDDEN = 10
PAGE = 2
LETTERS = {"heads first": "bn{}", "tokens first": "b{}n", "time first": "{}bn"}
"""The dimensions of a tensor except the last, in each order; `{}` stands for its tokens."""


class Attention(Joining):
    """Takes hidden states `[B, S, HIDDEN]` (`[S, B, HIDDEN]` where time is first) and the tensors of `inputs`."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = s = spelling
        self.query_heads = s.heads * (2 if s.groups != "none" else 1)
        self.rope_width = 0 if s.rope == "none" else s.rope_width
        self.width = s.nope + self.rope_width
        self.letters = LETTERS[s.order]
        self.w_down = nn.Linear(HIDDEN, s.rank + self.rope_width, bias=False)
        if s.query == "low rank":
            self.w_query = nn.Sequential(
                nn.Linear(HIDDEN, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, self.query_heads * self.width)
            )
        else:
            self.w_query = nn.Linear(HIDDEN, self.query_heads * self.width, bias=False)
        rows = [s.heads * (s.nope + s.value)] if s.weights != "apart" else [s.heads * s.nope, s.heads * s.value]
        self.rank = s.rank if s.latents == "one" else s.rank // 2
        self.w_up = nn.ModuleList(nn.Linear(self.rank, count, bias=s.bias) for count in rows)
        self.w_out = nn.Parameter(torch.randn(self.query_heads, s.value, HIDDEN) / math.sqrt(self.query_heads))
        if s.scale in TENSORS:
            shape = {"number": (), "head": (self.query_heads, 1, 1), "position": (s.queries, 1)}[s.scale]
            self.score_scale = nn.Parameter(
                (0.5 + torch.rand(shape)) * self.width ** (0.5 if s.scale == "position" else -0.5)
            )
        if s.keys_scaled != "no":
            width = self.width if s.keys_scaled == "column" else 1
            heads_first = s.order == "heads first"
            shape = (self.query_heads, 1, width) if heads_first else (self.query_heads, width)
            self.key_scale = nn.Parameter(0.5 + torch.rand(shape))
        self.sink = nn.Parameter(torch.randn(self.query_heads)) if s.sink else None
        self.share = nn.Parameter(torch.tensor(0.7)) if s.spoiled == "residual" else None
        self.maps = [None, None]
        if s.mapped != "no":
            lead = (s.heads,) if s.mapped == "head" else ()
            maps = [nn.Parameter(torch.randn(*lead, width, width) / math.sqrt(width)) for width in (s.nope, s.value)]
            self.maps = nn.ParameterList(maps)

    # The order of sequences, tokens and heads

    @property
    def batch_dim(self) -> int:
        return 1 if self.spelling.order == "time first" else 0

    @property
    def token_dim(self) -> int:
        return 1 - self.batch_dim

    def inputs(self, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Hidden states, the tensors of the cache, and a bias of the scores if the mask is `additive`."""
        s = self.spelling

        def normal(*shape: int) -> Tensor:
            lead = shape[:2] if self.batch_dim == 0 else (shape[1], shape[0])
            return torch.randn(*lead, *shape[2:], generator=generator, dtype=torch.float64).to(dtype)

        widths = [s.rank, self.rope_width] if s.cache_tensors == "two" else [s.rank + self.rope_width]
        widths = [width for width in widths if width]
        made = [normal(s.batch, s.queries, HIDDEN)]
        match s.cache:
            case "cat":
                made += [normal(s.batch, s.past, width) for width in widths]
            case "slices" | "index_copy":
                made += [normal(s.batch, s.past + s.queries + 2, width) for width in widths]
            case "pages":
                count = -(-s.past // PAGE)
                pages = [torch.randn(12, PAGE, width, generator=generator, dtype=torch.float64) for width in widths]
                made += [page.to(dtype) for page in pages]
                made.append(torch.randint(12, (s.batch, count), generator=generator))
        if s.mask == "additive":
            bias = torch.randn(s.batch, 1, s.queries, self.tokens, generator=generator, dtype=torch.float64)
            made.append(bias.to(dtype))
        return tuple(made)

    @property
    def tokens(self) -> int:
        """T: the number of keys."""
        s = self.spelling
        match s.cache:
            case "none":
                return s.queries
            case "index_copy":
                return s.past + s.queries + 2
            case "pages":
                return -(-s.past // PAGE) * PAGE
        return s.past + s.queries

    # From hidden states to the latent and the rope key of every token

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        s = self.spelling
        bias, cache = (given[-1], given[:-1]) if s.mask == "additive" else (None, given)
        start = self.tokens - s.queries
        latent, k_rope = self.w_down(x).split([s.rank, self.rope_width], dim=-1)
        if s.latent == "normed":
            latent = F.rms_norm(latent, (s.rank,))
        elif s.latent == "scaled":
            latent = latent * 0.7
        if self.rope_width:
            k_rope = self.rotate(k_rope.unsqueeze(2), start).squeeze(2)
        new = latent
        latent, k_rope = self.read_cache(latent, k_rope, cache)
        q = self.w_query(x).unflatten(-1, (self.query_heads, self.width))
        q_nope, q_rope = q.split([s.nope, self.rope_width], dim=-1)
        if self.rope_width:
            q_rope = self.rotate(q_rope, start)
        scale = self.width**-0.5
        if s.scale == "query":
            q_nope, q_rope = q_nope * scale, q_rope * scale
        elif s.scale == "weight":
            scale = 1.0
        if s.apart:
            of_all = (self.up_project(part) for part in (cache[0], new))
            dim = self.letters.format("t").index("t")
            k_nope, v = (torch.cat(parts, dim=dim) for parts in zip(*of_all, strict=True))
        else:
            k_nope, v = self.up_project(latent)
        if s.gated:
            gate = latent[..., :1].sigmoid().unsqueeze(self.letters.format("t").index("n"))
            k_nope, v = k_nope * gate, v * gate
        k_nope, k_rope, v = self.spoil(latent, k_nope, k_rope, v)
        w_uk, w_uv = self.up_weights()
        if s.absorbed in ("keys", "both", "joined"):
            q_nope, k_nope = self.by_head(q_nope, w_uk), self.shared(latent, k_nope)
        if s.absorbed in ("values", "both", "joined"):
            v = self.shared(latent, v)
        columns, width = v.shape[-1], k_nope.shape[-1] + self.rope_width
        if s.padded != "no" and width > columns:
            v = F.pad(v, (0, width - columns)) if s.padded == "pad" else self.in_zeros(v, width)
        o = self.attend(self.ordered(q_nope), self.ordered(q_rope), latent, k_nope, k_rope, v, bias, scale)
        o = o[..., :columns] if s.padded != "no" else o
        if s.absorbed in ("values", "both", "joined"):
            o = self.ordered(self.by_head(self.ordered(o), w_uv.transpose(1, 2)))
        o = self.leave(o)
        return torch.cat([o.flatten(), self.weights.flatten()]) if s.returned else o

    def attend(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_nope: Tensor,
        k_rope: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        s = self.spelling
        k_nope, v = self.repeated(k_nope), self.repeated(v)
        if s.threes != "no":
            scores = self.of_three(self.sprinkle(q_nope), latent, self.up_weights()[0], "s", "bnst")
            scores = scores + self.scores(q_rope, k_rope) if self.rope_width else scores
            return self.by_hand(self.scaled(scores, scale), latent, bias)
        if s.keys == "two scores" and s.softmax != "sdpa" and self.rope_width and k_rope.dim() == 3:
            if s.scale == "key":
                k_nope, k_rope = k_nope * scale, k_rope / (1 / scale)
            q_nope, k_nope, v = (self.sprinkle(t) for t in (q_nope, k_nope, v))
            scores = self.scores(q_nope, k_nope) + self.scores(q_rope, k_rope)
        else:
            if self.rope_width:
                joined = None
                if s.absorbed == "joined":
                    joined = torch.cat([latent, k_rope] if s.rope == "last" else [k_rope, latent], dim=-1)
                    joined = self.shared(joined, k_nope) if s.softmax == "sdpa" else joined
                if k_rope.dim() == 3:
                    k_rope = self.shared(k_rope, k_nope)
                q = self.together(q_nope, q_rope, "cat")
                k = self.together(k_nope, k_rope, s.keys) if joined is None else joined
            else:
                q, k = q_nope, k_nope
            k = k * scale if s.scale == "key" else k
            k = k * self.key_scale if s.keys_scaled != "no" and k.dim() == 4 else k
            q, k, v = (self.sprinkle(t) for t in (q, k, v))
            if s.softmax == "sdpa":
                return self.sdpa(q, k, v, bias, scale)
            scores = self.scores(q, k)
        return self.by_hand(self.scaled(scores, scale), v, bias)

    def scaled(self, scores: Tensor, scale: float) -> Tensor:
        s = self.spelling
        if s.scale in TENSORS:
            return scores / self.score_scale if s.scale == "position" else scores * self.score_scale
        if s.scale in ("scores", "attention"):
            return scores * scale if s.scale == "scores" else scores / (1 / scale)
        return scores

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotate the last dimension of `[B, S, H, R]` (`[S, B, H, R]`) by positions from `start`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        frequency = 10.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=wide) / x.shape[-1])
        angle = (start + torch.arange(x.shape[self.token_dim], dtype=wide))[:, None, None] * frequency
        angle = angle.unsqueeze(1) if self.token_dim == 0 else angle
        match self.spelling.rotation:
            case "complex":
                turned = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2))) * torch.polar(angle * 0 + 1, angle)
                return torch.view_as_real(turned).flatten(-2).to(x.dtype)
            case "interleaved":
                a, b = x[..., 0::2], x[..., 1::2]
            case _:
                a, b = x.chunk(2, dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        pair = a * cos - b * sin, b * cos + a * sin
        return torch.stack(pair, -1).flatten(-2) if self.spelling.rotation == "interleaved" else torch.cat(pair, -1)

    def read_cache(self, latent: Tensor, k_rope: Tensor, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        s = self.spelling
        new = [latent, k_rope] if self.rope_width else [latent]
        if s.cache_tensors == "one":
            new = [torch.cat(new, dim=-1)]
        elif s.cache_tensors == "swapped":
            new = [torch.cat(new[::-1], dim=-1)]
        match s.cache:
            case "cat":
                new = [torch.cat([past, part], dim=self.token_dim) for past, part in zip(cache, new, strict=True)]
            case "slices":
                for buffer, part in zip(cache, new, strict=True):
                    place = [slice(None)] * 2
                    place[self.token_dim] = slice(s.past, s.past + s.queries)
                    buffer[tuple(place)] = part
                new = [buffer.narrow(self.token_dim, 0, s.past + s.queries) for buffer in cache]
            case "index_copy":
                positions = s.past + torch.arange(s.queries)
                for buffer, part in zip(cache, new, strict=True):
                    buffer.index_copy_(self.token_dim, positions, part)
                new = list(cache)
            case "pages":
                new = [pages[cache[-1]].flatten(1, 2) for pages in cache[:-1]]
                new = [part.transpose(0, 1) for part in new] if self.token_dim == 0 else new
        if s.cache_tensors == "one":
            return new[0][..., : s.rank], new[0][..., s.rank :]
        if s.cache_tensors == "swapped":
            return new[0][..., self.rope_width :], new[0][..., : self.rope_width]
        return new[0], new[1] if self.rope_width else k_rope

    # From the latent to keys and values

    def up_project(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.plainly_up_projected(latent)
        return self.mapped(keys, self.maps[0]), self.mapped(values, self.maps[1])

    def mapped(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        """Keys or values times a matrix of each head, or of all heads."""
        if matrix is None or matrix.dim() == 2:
            return x if matrix is None else x @ matrix
        lead = self.letters.format("t")
        return x @ matrix if lead == "bnt" else torch.einsum(f"{lead}d,nde->{lead}e", x, matrix)

    def plainly_up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        s = self.spelling
        if s.latents != "one":
            halves = latent.chunk(2, dim=-1)
            if s.latents == "normed groups":
                halves = tuple(F.rms_norm(half, half.shape[-1:]) for half in halves)
            return tuple(self.of_groups(halves, weight) for weight in self.up_weights())
        if s.weights == "apart":
            return tuple(self.project(latent, w, width) for w, width in zip(self.w_up, (s.nope, s.value), strict=True))
        if s.weights == "keys before values":
            if s.projection in ("einsum", "bmm"):
                rows = [s.heads * s.nope, s.heads * s.value]
                weights = self.w_up[0].weight.split(rows)
                biases = self.w_up[0].bias.split(rows) if s.bias else (None, None)
                parts = zip(weights, biases, (s.nope, s.value), strict=True)
                return tuple(self.per_head(latent, w, b, width) for w, b, width in parts)
            k, v = self.flat(latent, self.w_up[0]).split([s.heads * s.nope, s.heads * s.value], dim=-1)
            return self.ordered(k.unflatten(-1, (s.heads, -1))), self.ordered(v.unflatten(-1, (s.heads, -1)))
        kv = self.project(latent, self.w_up[0], s.nope + s.value)
        if s.weights == "values first":
            return kv[..., s.value :], kv[..., : s.value]
        return kv.split([s.nope, s.value], dim=-1)

    def of_groups(self, halves: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Each half of the latent times the weight, of `[N, D, L / 2]`, of its half of the heads."""
        if self.spelling.projection in ("einsum", "bmm"):
            both = torch.stack(list(halves), 2)
            product = torch.einsum("btgl,gndl->btgnd", both, weight.unflatten(0, (2, -1))).flatten(2, 3)
        else:
            pairs = zip(halves, weight.chunk(2), strict=True)
            product = torch.cat([(half @ w.flatten(0, 1).t()).unflatten(-1, w.shape[:2]) for half, w in pairs], dim=2)
        return self.ordered(product)

    def up_weights(self) -> tuple[Tensor, Tensor]:
        """`W_UK` `[N, P, L]` and `W_UV` `[N, V, L]`, from the rows that hold them."""
        s = self.spelling
        match s.weights:
            case "apart":
                rows = [linear.weight for linear in self.w_up]
            case "keys before values":
                rows = self.w_up[0].weight.split([s.heads * s.nope, s.heads * s.value])
            case "values first":
                rows = self.w_up[0].weight.unflatten(0, (s.heads, -1)).split([s.value, s.nope], dim=1)[::-1]
            case _:
                rows = self.w_up[0].weight.unflatten(0, (s.heads, -1)).split([s.nope, s.value], dim=1)
        return tuple(part.reshape(s.heads, -1, self.rank) for part in rows)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[B, S, N, D]` (`[S, B, N, D]`) times one matrix per head, `[N, D, E]`."""
        return torch.einsum("bsnd,nde->bsne", x, weight)

    def project(self, latent: Tensor, linear: nn.Module, width: int) -> Tensor:
        if self.spelling.projection in ("einsum", "bmm"):
            return self.per_head(latent, linear.weight, linear.bias, width)
        return self.ordered(self.flat(latent, linear).unflatten(-1, (self.spelling.heads, width)))

    def flat(self, latent: Tensor, linear: nn.Module) -> Tensor:
        match self.spelling.projection:
            case "linear":
                return linear(latent)
            case "functional":
                return F.linear(latent, linear.weight, linear.bias)
            case "matmul":
                product = latent @ linear.weight.t()
                return product if linear.bias is None else product + linear.bias
        rows = latent.reshape(-1, latent.shape[-1])
        weight = linear.weight.t()
        product = rows @ weight if linear.bias is None else torch.addmm(linear.bias, rows, weight)
        return product.view(*latent.shape[:2], -1)

    def per_head(self, latent: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
        heads = self.spelling.heads
        weight = weight.view(heads, width, -1)
        if self.spelling.projection == "einsum":
            lead = self.letters.format("t")
            product = torch.einsum(f"{lead.replace('n', '')}l,ndl->{lead}d", latent, weight)
        else:
            rows = latent.reshape(1, -1, latent.shape[-1]).expand(heads, -1, -1)
            product = torch.bmm(rows, weight.transpose(1, 2)).view(heads, *latent.shape[:2], width)
            product = self.ordered(product.permute(1, 2, 0, 3))
        if bias is None:
            return product
        bias = bias.view(heads, width)
        return product + (bias[:, None] if self.spelling.order == "heads first" else bias)

    def sprinkle(self, x: Tensor) -> Tensor:
        match self.spelling.sprinkled:
            case "contiguous":
                return x.contiguous()
            case "clone":
                return x.clone()
            case "cast":
                return x.to(torch.float64).to(x.dtype)
            case "dropout":
                return F.dropout(x, 0.0, training=True)
            case "asserts":
                torch._assert_async(x.isfinite().all(), "numbers")
            case "views":
                return x.flatten(0, 1).unflatten(0, x.shape[:2]).mT.mT
        return x

    def spoil(self, latent: Tensor, k: Tensor, k_rope: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.spelling
        match s.spoiled:
            case "tanh":
                k = k.tanh()
            case "norm":
                k = F.rms_norm(k, (k.shape[-1],))
            case "gate":
                k = k * latent[..., :1].sigmoid().unsqueeze(self.letters.format("t").index("n"))
            case "rope a head":
                heads = 1 + torch.arange(k.shape[self.letters.format("t").index("n")], dtype=k.dtype)
                k_rope = self.shared(k_rope, k)
                k_rope = (k_rope * (heads[:, None, None] if s.order == "heads first" else heads[:, None])).tanh()
            case "two latents":
                v = self.up_project(latent * 2 + 1)[1]
            case "shifted":
                v = self.up_project(latent.roll(1, self.token_dim))[1]
            case "residual":
                v = v + self.share * self.up_project(latent.roll(1, self.token_dim))[1]
        return k, k_rope, v

    def leave(self, o: Tensor) -> Tensor:
        """From the heads to hidden states."""
        s = self.spelling
        match s.output:
            case "einsum":
                rows = self.letters.format("s")
                return torch.einsum(f"{rows}d,ndh->{rows.replace('n', '')}h", o, self.w_out)
            case "reshape":
                return self.ordered(o).flatten(2) @ self.w_out.flatten(0, 1)
        return o
