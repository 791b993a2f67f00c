"""The attention layers that are measured: transformers' unmodified modules with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mla_compile.optional_packages import require


@dataclass(frozen=True)
class Layer:
    """An attention layer: its name, its model type in transformers, and its sizes, named as in `ops`."""

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
    """The dtype of weights, cache and hidden states, by its name in torch."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch dtype."""
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
    """The transformers config from which it was built."""
    attention: nn.Module
    rotary: nn.Module
    """The module that makes `position_embeddings` from hidden states and positions `[B, Sq]`."""


def config_of(layer: Layer, **others: Any) -> Any:
    """A transformers config with the layer's attention, and `others` as further fields."""
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


def build(layer: Layer, device: torch.device | None = None) -> Built:
    """Build the attention module of a one-layer transformers model on a device (default: CPU), without gradients.

    Weights are normal with variance `1 / in_features`, so that activations keep their magnitude; norm weights are
    around 1. They are drawn where they stay: a CPU takes seconds for the 187 million of `v3`. Raises ImportError,
    naming the extra, if transformers is not installed.
    """
    device = device or torch.device("cpu")
    require("transformers", "hf", "the benchmark")
    import transformers

    config = config_of(
        layer,
        # The rest of the model is not used, so it is as small as possible and has no experts.
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=1,
        vocab_size=8,
    )
    from_config: Any = transformers.AutoModel.from_config
    with device:
        model = from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    attention = model.layers[0].self_attn
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in attention.named_parameters():
        weight.normal_(generator=generator)
        if weight.dim() == 2:
            weight.mul_(weight.shape[1] ** -0.5)
        elif name.endswith("layernorm.weight"):
            weight.mul_(0.1).add_(1)
    return Built(layer, model.config, attention.to(layer.torch_dtype), model.rotary_emb)
