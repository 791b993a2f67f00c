"""Attention layers to measure: the unmodified module of transformers with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mla_compile.optional_packages import require


@dataclass(frozen=True)
class Layer:
    """An attention layer's name, its model type in transformers and its sizes in the words of `ops`."""

    name: str
    model_type: str
    hidden: int
    N: int
    Lq: int | None
    L: int
    P: int
    R: int
    V: int
    dtype: str = "float32"
    """Of weights, cache and hidden states, as torch calls it."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("v2-lite", "deepseek_v2", hidden=2048, N=16, Lq=None, L=512, P=128, R=64, V=128),
        Layer("v3", "deepseek_v3", hidden=7168, N=128, Lq=1536, L=512, P=128, R=64, V=128),
    )
}


@dataclass(frozen=True)
class Built:
    """A layer with its weights."""

    layer: Layer
    config: Any
    """The transformers config it was built from."""
    attention: nn.Module
    rotary: nn.Module
    """Makes the attention's `position_embeddings` from hidden states and positions `[B, Sq]`."""


def config_of(layer: Layer, **others: Any) -> Any:
    """A transformers config whose attention is the layer's, with `others` of its fields."""
    import transformers

    return transformers.AutoConfig.for_model(
        layer.model_type,
        hidden_size=layer.hidden,
        num_attention_heads=layer.N,
        num_key_value_heads=layer.N,
        q_lora_rank=layer.Lq,
        kv_lora_rank=layer.L,
        qk_nope_head_dim=layer.P,
        qk_rope_head_dim=layer.R,
        v_head_dim=layer.V,
        max_position_embeddings=2**17,
        **others,
    )


def build(layer: Layer, seed: int = 0) -> Built:
    """Attention module of a one-layer transformers model on CPU, no gradients.

    Weights are normal with variance `1 / in_features` (activations keep their size), norm weights around 1.
    Raises ImportError, naming the extra, without transformers.
    """
    require("transformers", "hf", "the benchmark")
    import transformers

    config = config_of(
        layer,
        # The rest of the model is not used: as small as it goes, and no experts.
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=1,
        vocab_size=8,
    )
    from_config: Any = transformers.AutoModel.from_config
    model = from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    attention = model.layers[0].self_attn
    generator = torch.Generator().manual_seed(seed)
    for name, weight in attention.named_parameters():
        weight.normal_(generator=generator)
        if weight.dim() == 2:
            weight.mul_(weight.shape[1] ** -0.5)
        elif name.endswith("layernorm.weight"):
            weight.mul_(0.1).add_(1)
    return Built(layer, model.config, attention.to(layer.torch_dtype), model.rotary_emb)
