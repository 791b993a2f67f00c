"""Whole keys of earlier and later tokens that are made apart and then concatenated: their nope columns are one
up-projection, and their other columns are taken as they are, whatever each is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mla_compile.passes.outcome import Outcome
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.spellings import HIDDEN, Function, L, N, P, T, V

CUT = 6
R = 4
Keys = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Keys `[B, N, t, P + R]` of up-projected columns `[B, N, t, P]`, cached rope keys `[B, t, R]`, hidden states
`[B, t, HIDDEN]` and their latents `[B, t, L]`."""


def tensors(cuts: Sequence[int] = (CUT,)) -> tuple[Tensor, ...]:
    """`x`, `w_q`, `w_kv`, then latents, rope keys and hidden states of the tokens up to each cut, and after it."""
    x, latent, _, _, w_kv = mla.tensors()
    generator = torch.Generator().manual_seed(1)
    shapes = (HIDDEN, N * (P + R)), (2, T, R), (2, T, HIDDEN)
    w_q, k_rope, hidden = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    parts = zip(
        *(whole.tensor_split([*cuts], 1) for whole in (latent, k_rope, hidden / math.sqrt(HIDDEN))), strict=True
    )
    return x, w_q / math.sqrt(HIDDEN), w_kv, *(each.contiguous() for part in parts for each in part)


def apart(*keys: Keys, bias: float = 0.0) -> Function:
    """MLA whose keys and values are made apart for some tokens after the other."""

    def attention(x: Tensor, w_q: Tensor, w_kv: Tensor, *parts: Tensor) -> Tensor:
        q = (x @ w_q).unflatten(-1, (N, P + R)).transpose(1, 2)
        made = []
        for i, key in enumerate(keys):
            latent, k_rope, hidden = parts[3 * i : 3 * i + 3]
            up = latent @ w_kv + bias * torch.arange(w_kv.shape[1]).double() if bias else latent @ w_kv
            nope, v = up.unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
            made.append((key(nope, k_rope, hidden, latent), v))
        return mla.softmax(q, *(torch.cat(each, 2) for each in zip(*made, strict=True)))

    return attention


def with_rope(rope: Callable[[Tensor], Tensor]) -> Keys:
    """Keys with a rope key that heads share, made of hidden states."""
    return lambda nope, _, hidden, __: torch.cat([nope, mla.to_heads(rope(hidden))], -1)


def weight(columns: int) -> Tensor:
    return torch.arange(HIDDEN * columns).reshape(HIDDEN, columns).double().cos() / 3


def projected(hidden: Tensor) -> Tensor:
    return hidden @ weight(R)


def turned(hidden: Tensor) -> Tensor:
    """A rope by a rotation of halves."""
    first, second = projected(hidden).chunk(2, -1)
    return projected(hidden) * 0.6 + torch.cat([-second, first], -1) * 0.8


def turned_in_halves(hidden: Tensor) -> Tensor:
    first, second = projected(hidden).chunk(2, -1)
    return torch.cat([first * 0.6 - second * 0.8, second * 0.6 + first * 0.8], -1)


def turned_in_pairs(hidden: Tensor) -> Tensor:
    even, odd = projected(hidden).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * 0.6 - odd * 0.8, even * 0.8 + odd * 0.6], -1).flatten(-2)


def cached(nope: Tensor, k_rope: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return torch.cat([nope, mla.to_heads(k_rope)], -1)


def of_the_latent(nope: Tensor, _: Tensor, __: Tensor, latent: Tensor) -> Tensor:
    """The rope key is another projection of the latent, which heads share."""
    return torch.cat([nope, mla.to_heads(latent @ weight(R)[:L])], -1)


def rope_first(rope: Callable[[Tensor, Tensor], Tensor]) -> Keys:
    return lambda nope, k_rope, hidden, _: torch.cat([mla.to_heads(rope(k_rope, hidden)), nope], -1)


NEW: dict[str, Keys] = {
    "projected": with_rope(projected),
    "turned": with_rope(turned),
    "turned in halves": with_rope(turned_in_halves),
    "turned in pairs": with_rope(turned_in_pairs),
    "a projection of the latent": of_the_latent,
}


def outcomes(function: Function, args: Sequence[Tensor]) -> list[Outcome]:
    return [outcome for _, _, (outcome,) in compiled(function, args)]


@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
@pytest.mark.parametrize("bias", [0.0, 0.1], ids=["no biases", "biases"])
@pytest.mark.parametrize("order", [1, -1], ids=["cached first", "cached last"])
def test_new_rope_keys_beside_those_of_a_cache(new: Keys, bias: float, order: int) -> None:
    check_rewritten(apart(*(cached, new)[::order], bias=bias), tensors())


@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_one_new_token_of_unknown_batch_and_length(new: Keys) -> None:
    check_rewritten(apart(cached, new), tensors([T - 1]), [(0, 1), (), (), *[(0, 1)] * 3, *[(0,)] * 3])


@pytest.mark.parametrize("new", list(NEW.values())[:3], ids=list(NEW)[:3])
def test_rope_keys_of_all_tokens_are_made_alike(new: Keys) -> None:
    check_rewritten(apart(new, new), tensors())


LISTS = {
    "cached, cached, new": (cached, cached, NEW["projected"]),
    "new, new, cached": (NEW["projected"], NEW["projected"], cached),
    "new between": (cached, NEW["turned"], cached),
    "new around": (NEW["turned in halves"], cached, NEW["turned in halves"]),
    "four": (cached, NEW["projected"], NEW["projected"], cached),
}


@pytest.mark.parametrize("keys", LISTS.values(), ids=LISTS)
def test_a_list_of_chunks(keys: tuple[Keys, ...]) -> None:
    check_rewritten(apart(*keys), tensors(range(3, 3 * len(keys), 3)[: len(keys) - 1]))


def test_rope_keys_before_the_nope_columns() -> None:
    keys = rope_first(lambda k_rope, _: k_rope), rope_first(lambda _, hidden: projected(hidden))
    check_rewritten(apart(*keys), tensors())


def test_a_prompt_of_all_sequences() -> None:
    """The prompt's rope keys are projected, and those of each sequence are cached."""
    sequences = apart(NEW["projected"], cached)

    def attention(*args: Tensor) -> Tensor:
        once = [each.narrow(0, 0, 1).expand(2, -1, -1) for each in args[3:6]]
        return sequences(*args[:3], *once, *args[6:])

    check_rewritten(attention, tensors())


def test_rope_keys_of_each_head_for_some_tokens() -> None:
    def own(nope: Tensor, _: Tensor, hidden: Tensor, __: Tensor) -> Tensor:
        return torch.cat([nope, (hidden @ weight(N * R)).unflatten(-1, (N, R)).transpose(1, 2)], -1)

    for path, _, (outcome,) in compiled(apart(cached, own), tensors()):
        assert (outcome.path, outcome.mask) == (path, "own ropes" if path == "absorbed" else "none")


def swapped(nope: Tensor, _: Tensor, hidden: Tensor, __: Tensor) -> Tensor:
    """Rope first, unlike the keys beside it; both have as many columns."""
    return torch.cat([mla.to_heads(projected(hidden)), nope], -1)


def one_column_more(nope: Tensor, k_rope: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """A rope key takes the place of an up-projected column."""
    return torch.cat([nope[..., :-1], mla.to_heads(torch.cat([k_rope[..., :1].sin(), k_rope], -1))], -1)


def normed(nope: Tensor, _: Tensor, hidden: Tensor, __: Tensor) -> Tensor:
    return torch.cat([nope / nope.norm(dim=-1, keepdim=True), mla.to_heads(projected(hidden))], -1)


def twice(nope: Tensor, _: Tensor, hidden: Tensor, __: Tensor) -> Tensor:
    return torch.cat([nope * 2, mla.to_heads(projected(hidden))], -1)


def of_the_latent_for_each_head(nope: Tensor, _: Tensor, __: Tensor, latent: Tensor) -> Tensor:
    """All columns are up-projected from the latent, by two weights: one product, wider than that beside it."""
    return torch.cat([nope, (latent @ weight(N * R)[:L]).unflatten(-1, (N, R)).transpose(1, 2)], -1)


OTHERS = {
    "columns swapped": (cached, swapped),
    "another seam": (cached, one_column_more),
    "a norm in one part": (cached, normed),
    "a norm in the first part": (normed, cached),
    "a factor of one part": (cached, twice),
    "columns of the latent for each head": (cached, of_the_latent_for_each_head),
}


@pytest.mark.parametrize("keys", OTHERS.values(), ids=OTHERS)
def test_keys_whose_columns_are_made_otherwise(keys: tuple[Keys, ...]) -> None:
    """The reason says what each part's columns are."""
    for outcome in outcomes(apart(*keys), tensors()):
        assert outcome.path == "unchanged"
        assert "a product of" in outcome.reason
