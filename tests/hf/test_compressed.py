"""DeepSeek-V4's heavily compressed layers by themselves: a window of keys, and a key for each full group of tokens."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.errors import assert_as_close_as_eager
from tests.hf.families import FAMILIES, Watch, build, exact, interpreted, merged, new_cache, some_ids

RATE = 2
HEAVY = "heavily_compressed_attention"


TOKENS = 12


def heavily_compressed() -> nn.Module:
    """One such layer. After `TOKENS` there are six keys of groups, and the window has left the first tokens behind."""
    model = FAMILIES["deepseek_v4"].build()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 1, [HEAVY], ["hash_moe"]
    config.compress_rates = {**config.compress_rates, HEAVY: RATE}
    return type(model)(config)


FAMILY = replace(FAMILIES["deepseek_v4"], name="heavily compressed", build=heavily_compressed, sites=1)


def last(model: nn.Module, ids: Tensor, queries: int) -> Tensor:
    """The logits of the last queries. Only their call is compiled: the one before them is the module's `forward`."""
    past = new_cache(model, "dynamic")
    model.forward(ids[:, :-queries], past_key_values=past, use_cache=True)
    return model(ids[:, -queries:], past_key_values=past, use_cache=True).logits


@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_it_is_rewritten_and_right(queries: int) -> None:
    model, ids = build(FAMILY, "eager"), some_ids()[:, :TOKENS]
    other = ids.clone()
    other[:, 0] = ids[:, 0] % 32 + 3  # outside the window, it is seen only in the key of its group
    exactly, eager = last(exact(model), ids, queries), last(model, ids, queries)
    assert not torch.allclose(eager[:, -1], last(model, other, queries)[:, -1])
    watch = Watch()
    model.compile(backend=watch)
    with interpreted(FAMILY):
        compiled = last(model, ids, queries)
    assert_as_close_as_eager(compiled, eager, exactly)
    assert [site.rewritten for site in merged(watch.ran).sites] == [True]
