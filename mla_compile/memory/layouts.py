"""The bytes that each way to cache keys and values takes per token.

The FP8 latent is the layout of `mla::paged_latent_attention` with `latent_scales`: `L` elements of one byte (e4m3), a
float32 scale for each group of 128 of them (`mla_compile.fp8`), and the rope key in bfloat16. For L=512 and R=64 that
is 512 + 16 + 128 = 656 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ..fp8 import groups_of
from .sizes import ModelSizes, Sizes

CacheDtype = Literal["bf16", "fp32", "fp8"]
CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
ELEMENT_SIZE: dict[CacheDtype, int] = {"bf16": 2, "fp32": 4, "fp8": 1}


@dataclass(frozen=True)
class Layout:
    """One way to cache keys and values."""

    name: str
    holds: Callable[[Sizes], str]
    """What is stored per token in a layer, in words."""
    layer_bytes: Callable[[Sizes], int]
    """Bytes per token in a layer."""

    def token_bytes(self, model: ModelSizes) -> int:
        """Bytes per token in all layers."""
        return sum(count * self.layer_bytes(sizes) for sizes, count in model.layers.items())

    def sequence_bytes(self, model: ModelSizes, context: int) -> int:
        """Bytes of a sequence of `context` tokens in all layers; layers with a window keep only that many tokens."""
        return sum(
            count * self.layer_bytes(sizes) * min(context, sizes.window or context)
            for sizes, count in model.layers.items()
        )


def layouts(dtype: CacheDtype, kv_heads: int) -> list[Layout]:
    """The layouts: expanded as in naive code, MHA, GQA with `kv_heads` heads (both with heads of width V), and latents,
    all in `dtype`; then FP8 latents."""
    size = ELEMENT_SIZE[dtype]
    heads = [
        Layout("expanded", lambda s: f"{s.N} x ({s.P + s.R} + {s.V})", lambda s: size * s.N * (s.P + s.R + s.V)),
        Layout("MHA", lambda s: f"{s.N} x ({s.V} + {s.V})", lambda s: size * s.N * 2 * s.V),
        Layout(
            "GQA",
            lambda s: f"{min(s.N, kv_heads)} x ({s.V} + {s.V})",
            lambda s: size * min(s.N, kv_heads) * 2 * s.V,
        ),
    ]
    fp8 = Layout("latent FP8", _fp8_words, fp8_bytes)
    if dtype == "fp8":
        return [*heads, fp8]
    return [*heads, Layout("latent", lambda s: f"{s.L} + {s.R}", lambda s: size * (s.L + s.R)), fp8]


def fp8_bytes(sizes: Sizes) -> int:
    """Bytes per token of an FP8 latent with its scales, and of the rope key."""
    return sizes.L + 4 * groups_of(sizes.L) + 2 * sizes.R


def _fp8_words(sizes: Sizes) -> str:
    groups = groups_of(sizes.L)
    return f"{sizes.L} e4m3, {groups} scale{'s' if groups > 1 else ''}, {sizes.R} bf16"
