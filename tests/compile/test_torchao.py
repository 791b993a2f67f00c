"""torchao's quantised layers: if only weights are quantised, attention is rewritten; results are always eager's."""

import pytest
import torch

import mla_compile
from examples.plain_mla import NaiveMLA

# On import and while it quantises, torchao warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("without_codegen")]
quantization = pytest.importorskip("torchao.quantization")

WEIGHT_ONLY = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(),
    "int4": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.granularity.PerGroup(16)
    ),
    "float8": lambda: quantization.Float8WeightOnlyConfig(),
}


def run(config):
    """The report of a layer that is quantised as a configuration says, whose numbers are those of eager."""
    layer = NaiveMLA(hidden=64, N=4, L=16, P=8, R=4, V=8).eval()
    quantization.quantize_(layer, config)
    given = torch.randn(1, 1, 64), (torch.randn(1, 20, 16), torch.randn(1, 20, 4))
    expected, _ = layer(*given)
    o, _ = torch.compile(layer, backend="mla")(*given)
    torch.testing.assert_close(o, expected)
    return mla_compile.last_report()


@pytest.mark.parametrize("config", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_weights_in_few_bits_are_absorbed(config):
    assert run(config()).rewritten == 1


def test_latents_in_int8_stay_and_say_so_and_weights_alone_do_not_after_them():
    """Both have one Dynamo graph and differ in their weights only: the stored report of one is not the other's."""
    (site,) = run(quantization.Int8DynamicActivationInt8WeightConfig()).sites
    assert not site.rewritten
    assert "found a product of quantised numbers, `aten._int_mm.default` in `" in site.reason
    assert "quantise only the weight" in site.remedy
    torch._dynamo.reset()
    assert run(WEIGHT_ONLY["int8"]()).rewritten == 1
