"""Whole models to generate with: transformers models with random weights, fewer layers and fewer experts."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mla_compile.bench.layers import LAYERS, Layer, config_of
from mla_compile.bench.workloads import Workload
from mla_compile.cost import Cost, Device, Dims, predicted_seconds
from mla_compile.optional_packages import require
from mla_compile.passes.paths.absorbed import absorbed_cost
from mla_compile.passes.paths.as_written import expanded_cost

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
"""The rope scaling of DeepSeek-V2. With plain rope, vLLM 0.32 on CPUs gives other logits than transformers."""


@dataclass(frozen=True)
class WholeModel:
    """The sizes of a model, per layer as published."""

    layer: Layer
    """The attention of each layer."""
    layers: int
    """The number of layers, of which the first is dense."""
    intermediate: int
    """The MLP width of the dense layer."""
    expert_intermediate: int
    experts: int
    """The number of routed experts that a token takes."""
    shared_experts: int
    vocabulary: int

    def cut_to(self, layers: int) -> "WholeModel":
        """The model with fewer layers and a proportionally smaller vocabulary: with the full vocabulary, the output
        head would hide the time of the layers."""
        share = self.vocabulary * layers // self.layers
        return replace(self, layers=layers, vocabulary=max(share // 64, 1) * 64)


MODELS = {
    "v2-lite": WholeModel(
        LAYERS["v2-lite"],
        layers=27,
        intermediate=10944,
        expert_intermediate=1408,
        experts=6,
        shared_experts=2,
        vocabulary=102400,
    )
}


def build(whole: WholeModel) -> nn.Module:
    """Build transformers' causal language model on CPU, without gradients, with transformers' own initialisation.

    It has only as many routed experts as a token takes: otherwise the last bit could decide which experts are taken,
    and two correct runs could not be compared. Raises ImportError, naming the extra, if transformers is not installed.
    """
    require("transformers", "hf", "the benchmark")
    import transformers

    layer = whole.layer
    config = config_of(
        layer,
        num_hidden_layers=whole.layers,
        first_k_dense_replace=1,
        intermediate_size=whole.intermediate,
        moe_intermediate_size=whole.expert_intermediate,
        n_routed_experts=whole.experts,
        num_experts_per_tok=whole.experts,
        n_shared_experts=whole.shared_experts,
        n_group=1,
        topk_group=1,
        rope_parameters=ROPE,
        vocab_size=whole.vocabulary,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    from_config: Any = transformers.AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = from_config(config, attn_implementation="sdpa", dtype=layer.torch_dtype)
    return model.eval().requires_grad_(False)


def limit(model: nn.Module, whole: WholeModel, workload: Workload, batch: int, device: Device) -> float:
    """The lower bound on a step's seconds at the device's rates.

    Bytes: every weight and the latent cache once; of the embedding only the rows that are read. FLOPs: every matrix
    with each token, the output head with the last token alone, and for each attention the cheaper of absorbing and
    expanding.
    """
    layer, tokens = whole.layer, batch * workload.queries
    size = layer.torch_dtype.itemsize
    dims = Dims(batch, workload.queries, workload.keys, layer.N, layer.L, layer.P, layer.R, layer.V)
    table = whole.vocabulary * layer.hidden  # elements of the embedding, and of the output head
    weights = sum(weight.numel() for weight in model.parameters()) - table
    up_projections = whole.layers * layer.N * layer.L * (layer.P + layer.V)  # already counted by both costs
    attending = whole.layers * min(cost(dims, size, causal=True).flops for cost in (absorbed_cost, expanded_cost))
    flops = attending + 2 * tokens * (weights - table - up_projections) + 2 * batch * table
    elements = weights + tokens * layer.hidden + batch * workload.keys * whole.layers * (layer.L + layer.R)
    return predicted_seconds(Cost(flops, size * elements), device)
