"""Read the sizes of a model's weights from its config.json: those with heads, those in experts, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..memory.fields import Fields, is_count, read_config
from ..memory.sizes import ModelSizes, Sizes, read_sizes

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
DENSE, SPARSE = MLP_KINDS = "dense", "sparse"
LONGCAT = ("ffn_hidden_size", "expert_ffn_hidden_size", "zero_expert_num")
"""Fields of LongCat-Flash's configs. In one of its layers are two attentions and two MLPs, and experts beside both MLPs
of which some have no weights (transformers makes half of those all the same)."""
FP8_BLOCK = 128
"""The default block size of FP8 checkpoints: the rows and columns of a weight that share a float32 scale."""


@dataclass(frozen=True)
class Layer:
    """The numbers of weight elements of one layer."""

    whole: int
    """Weights without heads: projections to latents, norms, the router."""
    heads: int
    """Attention weights with heads."""
    dense: int
    """The MLP that every token takes: that of a dense layer, or the shared experts."""
    expert: int
    """Each routed expert; 0 in a dense layer."""


@dataclass(frozen=True)
class Model:
    """The properties of a model that a plan needs."""

    caches: ModelSizes
    sizes: Sizes
    """The attention sizes of every layer."""
    layers: tuple[Layer, ...]
    hidden: int
    vocabulary: int
    tied: bool
    """Whether embedding and head share one weight."""
    experts: int
    """The number of routed experts in a layer; 0 if there are none."""
    experts_of_token: int
    widths: Mapping[str, int]
    """The widths of MLPs that tensor parallelism splits, by name."""
    fp8: bool
    """Whether layers are in FP8; embedding and head never are."""
    block: int
    """The parts of a split width must be multiples of this: in FP8, the rows that share a scale."""

    @property
    def elements(self) -> int:
        """The number of elements of all weights."""
        ends = self.hidden * self.vocabulary * (1 if self.tied else 2) + self.hidden
        routed = sum(layer.expert for layer in self.layers) * self.experts
        return ends + routed + sum(layer.whole + layer.heads + layer.dense for layer in self.layers)

    @property
    def element_size(self) -> float:
        """Bytes per element of a layer's weights, including its part of a scale."""
        return 1 + 4 / self.block**2 if self.fp8 else 2


def read_model(path: Path, fp8: bool | None = None) -> Model:
    """Read a model from a config.json, or from the directory that contains it.

    Args: fp8, whether layers are in FP8 rather than bfloat16; None to follow the file's `quantization_config`.
    Raises:
        ConfigError: if not all layers have the same MLA, there is an indexer, layers are those of LongCat-Flash, or the
            file lacks a size, or says of another dtype while `fp8` is None.
        OSError: if there is no such file.
    """
    caches = read_sizes(path)
    config, read = read_config(path)
    if len(caches.layers) > 1 or caches.others or caches.index_width or next(iter(caches.layers)).window:
        raise ConfigError(
            f"expected attention of one kind in every layer, to all tokens, found others in {read.file}: their weights "
            "and what they read are not counted"
        )
    if others := [key for key in LONGCAT if read.values.get(key)]:
        raise ConfigError(
            f"expected one attention and one MLP or experts in a layer, found {', '.join(others)} in {read.file}: two "
            "of each in a layer, and experts without weights, as in LongCat-Flash, are not counted"
        )
    read = read.with_values({"num_hidden_layers": caches.count})  # which the file may leave to transformers
    quantized = read.part("quantization_config")
    quantized = quantized if quantized.values else config.part("quantization_config")
    in_fp8 = _says_fp8(quantized) if fp8 is None else fp8
    (sizes,) = caches.layers
    experts = read.first(*EXPERTS)
    chosen = read("num_experts_per_tok") if experts else 0
    if chosen > experts:
        raise read.wrong("num_experts_per_tok", f"at most {experts} experts")
    widths = {"intermediate_size": read("intermediate_size")}
    if experts:
        widths["moe_intermediate_size"] = read("moe_intermediate_size")
    return Model(
        caches,
        sizes,
        tuple(_layer(read, sizes, experts if sparse else 0) for sparse in _with_experts(read, caches.count, experts)),
        read("hidden_size"),
        read("vocab_size"),
        read.flag("tie_word_embeddings"),
        experts,
        chosen,
        widths,
        in_fp8,
        _block(quantized) if in_fp8 else 1,
    )


def _says_fp8(quantized: Fields) -> bool:
    """Whether weights are in FP8, by the `quantization_config` of a model; in bfloat16 if it has none."""
    if quantized.values and quantized.values.get("quant_method") != "fp8":
        raise quantized.wrong("quant_method", "fp8, or --weights (bf16 or fp8) to be given")
    return bool(quantized.values)


def _block(quantized: Fields) -> int:
    """The rows of a weight's block that has a scale of its own."""
    block = quantized.values.get("weight_block_size") or [FP8_BLOCK]
    if not isinstance(block, list) or not is_count(block[0]):
        raise quantized.wrong("weight_block_size", "a pair of whole numbers")
    rows: int = block[0]
    return rows


def _with_experts(read: Fields, layers: int, experts: int) -> list[bool]:
    """Whether each layer has routed experts: as `mlp_layer_types` says, or as vLLM reads DeepSeek's own fields."""
    if not experts:
        return [False] * layers
    if kinds := read.of_each_layer("mlp_layer_types"):
        if not all(kind in MLP_KINDS for kind in kinds):
            raise read.wrong("mlp_layer_types", f"a list of {' and '.join(MLP_KINDS)}")
        return [kind == SPARSE for kind in kinds]
    first, each = read.given("first_k_dense_replace"), read.values.get("moe_layer_freq")
    if isinstance(each, list):
        chosen = read.of_each_layer("moe_layer_freq") or []
        if not all(one in (0, 1) for one in chosen):
            raise read.wrong("moe_layer_freq", "a whole number, or a list of 0 and 1")
        return [i >= first and bool(one) for i, one in enumerate(chosen)]
    if read.values.get("first_k_dense_replace") is None:
        raise ConfigError(
            f"expected mlp_layer_types or first_k_dense_replace in {read.file}, which say what layers have experts, "
            "found neither"
        )
    every = 1 if each is None else read("moe_layer_freq")
    return [i >= first and i % every == 0 for i in range(layers)]


def _layer(read: Fields, s: Sizes, experts: int) -> Layer:
    hidden, rank = read("hidden_size"), read.given("q_lora_rank")
    norms = 2 * hidden + s.L + rank
    whole = norms + hidden * (rank + s.L + s.R)
    heads = s.N * ((rank or hidden) * (s.P + s.R) + s.L * (s.P + s.V) + s.V * hidden)
    if not experts:
        return Layer(whole, heads, 3 * hidden * read("intermediate_size"), 0)
    expert = 3 * hidden * read("moe_intermediate_size")
    return Layer(whole + hidden * experts, heads, read.first(*SHARED_EXPERTS) * expert, expert)
