"""Models with vision: their language model is rewritten, with an image before the text too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers as hf

from tests.errors import assert_as_close_as_eager
from tests.hf.families import (
    EXPERTS,
    FAMILIES,
    PLAIN,
    ROUTED,
    VISION,
    Family,
    Watch,
    build,
    exact,
    interpreted,
    merged,
    new_cache,
    some_ids,
)

FAMILY = FAMILIES["kimi_k25"]
SEEN = 4
"""Tokens of an image of 4 x 4 patches: 2 x 2 patches are one token."""


def logits(model: nn.Module, ids: Tensor, pixels: Tensor) -> Tensor:
    """The logits of a prompt of an image and words, and of the token after it."""
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


IMAGE = 1
"""The token that is replaced by a feature of an image."""
TOWER = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 8}


def llava() -> nn.Module:
    text = PLAIN | EXPERTS | {"first_k_dense_replace": 1, "model_type": "deepseek_v3"}
    vision = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1)
    )


def mistral3() -> nn.Module:
    text = ROUTED | {"model_type": "glm4_moe_lite", "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
    vision = TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 16}
    return hf.Mistral3ForConditionalGeneration(
        hf.Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_of", "layers", "width", "tokens"),
    [
        pytest.param(llava, 2, 8, 4, id="llava", marks=pytest.mark.slow),
        pytest.param(mistral3, 1, 16, 2, id="mistral3", marks=pytest.mark.slow),
    ],
)
def test_a_language_model_with_mla_in_a_model_with_vision(
    model_of: Callable[[], nn.Module], layers: int, width: int, tokens: int
) -> None:
    """transformers' general classes for a vision tower and a language model: a prompt of an image and words, and the
    token after it."""
    family = Family(model_of.__name__, model_of)
    model, ids = build(family, "sdpa"), some_ids()[:1, :6]
    prompt = torch.cat([torch.full((1, tokens), IMAGE), ids[:, :-1]], dim=1)
    pixels = torch.randn(1, 3, 8, width, generator=torch.Generator().manual_seed(2))
    sizes = {} if model_of is llava else {"image_sizes": torch.tensor([[8, width]])}

    def seen(model: nn.Module, pixels: Tensor) -> Tensor:
        cache = new_cache(model, "dynamic")
        first = model(prompt, pixel_values=pixels, past_key_values=cache, **sizes).logits
        return torch.cat([first, model(ids[:, -1:], past_key_values=cache).logits], dim=1)

    eager, exactly = seen(model, pixels), seen(exact(model), pixels.double())
    assert not torch.allclose(eager[:, -1], seen(model, -pixels)[:, -1])
    watch = Watch()
    with interpreted(family):
        model.compile(backend=watch)
        compiled = seen(model, pixels)
    assert_as_close_as_eager(compiled, eager, exactly)
    rewritten = [site.path for site in merged(watch.ran).sites if site.rewritten]
    assert rewritten == ["chunked"] * layers + ["absorbed"] * layers
