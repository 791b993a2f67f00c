"""The benchmark of whole models runs vLLM with both backends, and finds its log-probabilities right."""

import pytest
import torch

pytest.importorskip("vllm")

from mla_compile.bench.generation.measure import measure
from mla_compile.bench.generation.models import WholeModel, build
from mla_compile.bench.generation.ways import ENGINES, Batch
from mla_compile.bench.layers import Layer
from mla_compile.bench.workloads import Workload

pytestmark = pytest.mark.slow

OWN = "AMX_MLA" if torch.cpu._is_amx_tile_supported() else "CPU_MLA"
DTYPE = "bfloat16" if OWN == "AMX_MLA" else "float32"  # which vLLM's AMX_MLA does not take
LAYER = Layer("small", "deepseek_v2", hidden=128, N=4, Lq=None, L=512, P=32, R=64, V=32, dtype=DTYPE)
SMALL = WholeModel(
    LAYER, layers=2, intermediate=256, expert_intermediate=64, experts=2, shared_experts=1, vocabulary=128
)


def test_both_ways_have_times_and_their_own_attention():
    batches = [Batch(2, Workload("decode", 37)), Batch(1, Workload("prefill", 150))]
    results = measure(build(SMALL), SMALL, batches, ENGINES, 3)
    assert [(result.status, len(result.seconds)) for result in results] == [("ok", 3), ("ok", 1)] * 2, results
    assert [result.note for result in results] == [OWN] * 2 + ["MLA_COMPILE"] * 2
