"""A model that sees: its language model is rewritten, with an image before the text too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.errors import assert_as_close_as_eager
from tests.hf.families import FAMILIES, Watch, build, exact, interpreted, merged, new_cache, some_ids

FAMILY = FAMILIES["kimi_k25"]
SEEN = 4
"""Tokens of an image of 4 x 4 patches, of which 2 x 2 are one token."""


def logits(model: nn.Module, ids: Tensor, pixels: Tensor) -> Tensor:
    """Those of a prompt of an image and words, and of the token after it."""
    cache, grid = new_cache(model, "dynamic"), torch.tensor([[1, 4, 4]])
    image = torch.full((1, SEEN), model.config.image_token_id)
    prompt = torch.cat([image, ids[:, :-1]], dim=1)
    first = model(prompt, pixel_values=pixels, image_grid_thw=grid, past_key_values=cache).logits
    return torch.cat([first, model(ids[:, -1:], past_key_values=cache).logits], dim=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_prompt_with_an_image() -> None:
    torch._dynamo.reset()
    model, ids = build(FAMILY, "sdpa"), some_ids()[:1]
    pixels = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        eager, exactly = logits(model, ids, pixels), logits(exact(model), ids, pixels.double())
        assert not torch.allclose(eager, logits(model, ids, pixels + 1))
        watch = Watch()
        with interpreted(FAMILY):
            model.compile(backend=watch)
            compiled = logits(model, ids, pixels)
    assert_as_close_as_eager(compiled, eager, exactly)
    rewritten = [site.path for site in merged(watch.ran).sites if site.rewritten]
    assert rewritten == ["chunked", "chunked", "absorbed", "absorbed"]
