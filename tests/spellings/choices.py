"""The independent choices of somebody who writes MLA in plain torch, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Spelling:
    """One way to write an MLA attention. Every field is a choice; some have no effect beside certain others."""

    projection: str = "linear"
    """How the latent is multiplied by a matrix: `linear`, `functional`, `einsum`, `matmul`, `bmm`, `addmm`."""
    bias: bool = False
    """Whether the up-projection has a bias."""
    weights: str = "together"
    """Rows of the up-projection: for each head keys and values `together` or `values first`; all `keys before values`;
    or `apart`, in two weights."""
    order: str = "heads first"
    """`heads first` `[B, N, T, D]`, `tokens first` `[B, T, N, D]`, or `time first` `[T, B, N, D]`."""
    rope: str = "last"
    """Where the rope columns are: `first`, `last`, `none`."""
    rotation: str = "half"
    """`half`, `interleaved`, `complex`."""
    keys: str = "cat"
    """How nope and rope columns of keys are joined: `cat`, `buffer` (`new_empty`, then written), `pad` (and add), or
    not at all: `two scores`."""
    scale: str = "attention"
    """Where the scale is: on the `query`, `key` or `scores`, in the `weight` of the queries, or an argument of the
    `attention`; or a tensor that multiplies the scores, `number` (of no dimension) or `head` (one for each), or that
    divides them, `position` (one for each query)."""
    absorbed: str = "no"
    """What is absorbed by hand: `keys` (queries are multiplied by W_UK, and keys are the latent), `values` (values are
    the latent, and outputs are multiplied by W_UV), `both`, or `joined` (both, with latent and rope key in one tensor
    for all heads)."""
    groups: str = "none"
    """How key heads serve two query heads each: `none`, `repeat_interleave`, `expand`, `repeat`, `grouped`."""
    softmax: str = "sdpa"
    """`sdpa`, `plain`, `wide` (in float32), `by hand`, `reciprocal`, `late` (values first, then the division), or
    `exp2` (by hand, to the base of 2)."""
    mask: str = "none"
    """`none`, `causal`, `triu` of -inf, `bool`, `additive`, `window`, `least` (the lowest finite number is added),
    `low` (-1e4 replaces scores), `assigned` (`scores[mask] = -inf`)."""
    padded: str = "no"
    """How values are padded with zeros to the width of keys: `no`, `pad`, or `buffer` (of zeros, half of the heads
    written at a time). The zeros are cut off the output."""
    returned: bool = False
    """Whether the attention weights are returned beside the output."""
    softcap: bool = False
    sink: bool = False
    cache: str = "none"
    """`none`, `cat`, `slices`, `index_copy`, `pages`."""
    cache_tensors: str = "two"
    """`two`, `one` (latent first), `swapped` (rope key first)."""
    latent: str = "normed"
    """`normed`, `scaled`, `plain`."""
    query: str = "direct"
    """`direct`, `low rank`."""
    output: str = "reshape"
    """How heads are projected to the output: `reshape` and one product, `einsum`, or not (`raw`)."""
    sprinkled: str = "none"
    """An op on keys, values and queries that changes no number: `none`, `contiguous`, `clone`, `cast`, `dropout` of 0,
    `views`, `asserts`."""
    dtype: str = "float32"
    batch: int = 2
    queries: int = 4
    past: int = 7
    heads: int = 3
    """Key heads; there are twice as many query heads if there are groups."""
    rank: int = 8
    nope: int = 4
    rope_width: int = 2
    value: int = 6
    spoiled: str = "no"
    """`no`; or what makes it not MLA, of `SPOILERS`; or MLA of another kind, of `OWN_ROPES` or `TWO_LATENTS`."""
    latents: str = "one"
    """`one` for all heads, or one for each of two `groups` of heads: half of the columns each, which has a norm of its
    own in `normed groups`."""
    loop: str = "no"
    """What attention by hand loops over: `sequences`, the same with results written to a `buffer`, `heads`, or `no`
    loop."""
    gated: bool = False
    """Whether keys and values are multiplied by one factor of each token."""
    threes: str = "no"
    """Whether one `einsum` multiplies three tensors, and in which order: `x` queries or attention weights, `c` latents,
    `w` weights."""
    keys_scaled: str = "no"
    """What whole keys are multiplied by: one number per `head`, one per head and `column`, or `no` factor."""
    apart: bool = False
    """Whether cached and new latents are up-projected separately, and the keys and values concatenated."""
    half: str = "bfloat16"
    """Which half precision takes the place of bfloat16 as the `dtype`."""
    blind: bool = False
    """Whether the mask hides all keys from the first query."""
    mapped: str = "no"
    """By what keys and values of each head are multiplied after their up-projection: a matrix of each `head`, or one
    matrix of `all` heads, or `no` matrix."""

    @property
    def needs_scores(self) -> bool:
        """Whether the rewritten graph has to compute all scores."""
        return self.softcap or self.returned

    @property
    def has_two_latents(self) -> bool:
        """Whether keys have a latent of their own, with which it is rewritten."""
        return self.spoiled in TWO_LATENTS and self.latents == "one"

    @property
    def has_own_ropes(self) -> bool:
        """Whether it has a rope key per head, with which it is rewritten."""
        return self.spoiled in OWN_ROPES and not self.needs_scores and self.latents == "one"

    @property
    def is_rewritten(self) -> bool:
        """Whether it is rewritten for some number of queries."""
        return self.spoiled == "no" or self.has_two_latents or self.has_own_ropes


TENSORS = ("number", "head", "position")
"""Scales that are tensors."""

SPOILERS = ("tanh", "norm")
"""On the keys: a nonlinearity, or a norm of each head."""

OWN_ROPES = ("rope a head",)
"""One rope key per head: few queries attend to the latent, and what the rope keys add to scores is a bias; many have
keys that end with it."""

TWO_LATENTS = ("two latents", "shifted", "gate", "residual")
"""Values from another latent, or from the token before, or a gate on the keys alone: few queries attend to both
latents; for many, each is up-projected. Or values to which a learned share of the previous token's is added: from both
latents side by side."""

CHOICES: dict[str, tuple[object, ...]] = {
    "projection": ("linear", "functional", "einsum", "matmul", "bmm", "addmm"),
    "bias": (False, False, False, True),
    "weights": ("together", "values first", "keys before values", "apart"),
    "order": ("heads first", "tokens first", "time first"),
    "rope": ("last", "first", "last", "first", "none"),
    "rotation": ("half", "interleaved", "complex"),
    "keys": ("cat", "buffer", "pad", "two scores"),
    "scale": ("query", "key", "scores", "weight", "attention", "number", "head", "position"),
    "absorbed": ("no",) * 5 + ("keys", "values", "both", "joined"),
    "groups": ("none", "none", "repeat_interleave", "expand", "repeat", "grouped"),
    "softmax": ("sdpa", "sdpa", "plain", "wide", "by hand", "reciprocal", "late", "exp2"),
    "mask": ("none", "causal", "triu", "bool", "additive", "window", "least", "low", "assigned"),
    "padded": ("no",) * 8 + ("pad", "buffer"),
    "returned": (False,) * 9 + (True,),
    "softcap": (False,) * 7 + (True,),
    "sink": (False,) * 7 + (True,),
    "cache": ("none", "cat", "slices", "index_copy", "pages"),
    "cache_tensors": ("two", "one", "swapped"),
    "latent": ("normed", "scaled", "plain"),
    "query": ("direct", "low rank"),
    "output": ("reshape", "einsum", "raw"),
    "sprinkled": ("none", "none", "contiguous", "clone", "cast", "dropout", "views", "asserts"),
    "dtype": ("float32", "float32", "bfloat16"),
    "batch": (1, 2),
    "queries": (1, 4, 5),
    "past": (3, 7),
    "heads": (2, 3, 4),
    "rank": (6, 8, 12),
    "nope": (4, 6),
    "rope_width": (2, 4),
    "value": (4, 5, 6),
    "spoiled": ("no",) * 8 + ("yes",),
    "latents": ("one",) * 6 + ("groups", "normed groups"),
    "loop": ("no",) * 5 + ("sequences", "buffer", "heads"),
    "gated": (False,) * 9 + (True,),
    "threes": ("no",) * 54 + ("xcw", "xwc", "cxw", "cwx", "wxc", "wcx"),
    "keys_scaled": ("no",) * 18 + ("head", "column"),
    "apart": (False,) * 3 + (True,),
    "half": ("bfloat16", "float16"),
    "blind": (False,) * 3 + (True,),
    "mapped": ("no",) * 6 + ("head", "all"),
}


def draw(seed: int) -> Spelling:
    """The spelling of a seed, which depends only on the seed, the lists above and `_possible`."""
    dice = random.Random(seed)
    drawn = Spelling(**{field.name: dice.choice(CHOICES[field.name]) for field in fields(Spelling)})
    return _possible(drawn, dice)


def _possible(s: Spelling, dice: random.Random) -> Spelling:
    """The nearest spelling that somebody could have written: some choices rule others out."""
    s = replace(s, dtype=s.half) if s.dtype == "bfloat16" else s
    if s.threes != "no":
        s = replace(s, absorbed="no", bias=False, groups="none", spoiled="no", latents="one", loop="no", gated=False)
        s = replace(s, keys="two scores", padded="no", softcap=False, returned=False, keys_scaled="no")
        s = replace(s, scale="query") if s.scale == "key" else s
        s = replace(s, softmax=dice.choice(("plain", "wide", "by hand"))) if s.softmax in ("sdpa", "late") else s
    if s.absorbed != "no" or s.threes != "no" or s.latents != "one":
        s = replace(s, mapped="no")
    if s.absorbed != "no" or s.groups != "none" or s.keys == "two scores":
        s = replace(s, keys_scaled="no")  # there are no whole keys of each head
    if s.cache != "cat" or s.cache_tensors != "two" or s.absorbed != "no" or s.gated or s.latents != "one":
        s = replace(s, apart=False)
    if s.gated:  # a bias would differ between tokens
        s = replace(s, absorbed="no", bias=False)
    if s.absorbed != "no":
        s = replace(s, bias=False, groups="none", spoiled="no")
        s = replace(s, scale="query") if s.scale == "key" else s
        if s.absorbed in ("both", "joined"):
            s = replace(s, softcap=False, returned=False)  # then nothing is left to regroup
    if s.latents != "one":  # a soft cap or weights that are returned leave scores of all groups
        s = replace(s, heads=2 * (s.heads // 2), absorbed="no", bias=False, softcap=False, returned=False)
    if s.returned and s.softmax == "late":
        s = replace(s, softmax="by hand")
    if s.softcap or s.sink or s.returned or (s.keys == "two scores" and s.rope != "none"):
        s = replace(s, softmax=dice.choice(("plain", "wide", "by hand")) if s.softmax == "sdpa" else s.softmax)
    if s.sink and s.softmax == "late":
        s = replace(s, softmax="plain")  # a sink is a column of the weights that is dropped
    if s.groups == "grouped" and s.softmax != "sdpa":
        s = replace(s, groups="expand")
    if s.scale in TENSORS and s.softmax == "sdpa":
        s = replace(s, scale="attention")
    if s.loop == "heads":
        s = replace(s, groups="none")
    if s.absorbed == "keys" and s.needs_scores:
        s = replace(s, loop="no")  # the rewrite would leave as many products as there were
    if s.mask == "assigned" and s.needs_scores:
        s = replace(s, mask="bool")  # an assignment is no function of each score
    if s.mask in ("low", "assigned") and s.softmax == "sdpa":
        s = replace(s, mask="bool")
    if s.mask == "causal" and s.softmax != "sdpa":
        s = replace(s, mask="triu")
    if s.cache == "none" and s.queries == 1:
        s = replace(s, queries=4)  # attention to one key is no attention
    if s.rope == "none":
        s = replace(s, cache_tensors="two")
    if s.spoiled != "no":
        s = replace(s, spoiled=dice.choice(SPOILERS + OWN_ROPES + TWO_LATENTS), bias=False, groups="none")
        alone = s.latents != "one" and s.heads == 2  # the only head of its group: no other head shares its rope key
        if s.spoiled == "rope a head" and (s.rope == "none" or alone):
            s = replace(s, spoiled="tanh")
    return s
