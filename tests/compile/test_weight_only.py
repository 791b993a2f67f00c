"""Layers whose weights alone a library quantises: attention is rewritten, and its numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mla_compile
from examples.plain_mla import NaiveMLA

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("without_codegen")]


def in_4_bits(layer: NaiveMLA, nested: bool) -> None:
    """As `BitsAndBytesConfig(load_in_4bit=True)` makes it."""
    library = pytest.importorskip("bitsandbytes").nn
    for name, child in list(layer.named_children()):
        if isinstance(child, nn.Linear):
            linear = library.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4")
            weight = child.weight.data
            linear.weight = library.Params4bit(weight, False, quant_type="nf4", compress_statistics=nested)
            setattr(layer, name, linear.to("cpu"))


def in_bytes(layer: NaiveMLA, kind: str) -> None:
    """As `QuantoConfig(weights="int8")` makes it."""
    library = pytest.importorskip("optimum.quanto")
    library.quantize(layer, weights=getattr(library, kind))
    library.freeze(layer)


def in_hqqs_4_bits(layer: NaiveMLA) -> None:
    """As `HqqConfig(nbits=4, group_size=64)` makes it."""
    library = pytest.importorskip("hqq.core.quantize")
    for name, child in list(layer.named_children()):
        if isinstance(child, nn.Linear):
            config, dtype = library.BaseQuantizeConfig(nbits=4, group_size=64), child.weight.dtype
            setattr(layer, name, library.HQQLinear(child, config, compute_dtype=dtype, device="cpu"))


QUANTISED: dict[str, Callable[[NaiveMLA], None]] = {
    "bitsandbytes, nf4": lambda layer: in_4_bits(layer, nested=False),
    "bitsandbytes, nf4 with quantised scales": lambda layer: in_4_bits(layer, nested=True),
    "quanto, int8": lambda layer: in_bytes(layer, "qint8"),
    "quanto, float8": lambda layer: in_bytes(layer, "qfloat8"),
    "quanto, int4": lambda layer: in_bytes(layer, "qint4"),
    "HQQ, int4": in_hqqs_4_bits,
}


@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantise", QUANTISED.values(), ids=QUANTISED)
def test_weights_in_few_bits_are_absorbed(
    quantise: Callable[[NaiveMLA], None], dtype: torch.dtype, queries: int
) -> None:
    torch.manual_seed(0)
    layer = NaiveMLA(hidden=128, N=4, L=64, P=32, R=32, V=32).to(dtype)
    quantise(layer)
    layer.eval()
    given = (
        torch.randn(1, queries, 128).to(dtype),
        (torch.randn(1, 200, 64).to(dtype), torch.randn(1, 200, 32).to(dtype)),
    )
    expected, _ = layer(*given)
    o, _ = torch.compile(layer, backend="mla")(*given)
    # bitsandbytes multiplies in bfloat16 on CPUs with AVX512-BF16, whatever the dtype of the layer.
    torch.testing.assert_close(o, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))
    assert mla_compile.last_report().rewritten == 1
