"""Attention to named keys in FP8 or INT8 on Hopper by warps of their own tasks: on such a GPU, or emulated."""

import re
import types
from pathlib import Path

import pytest
import torch

from mla_compile.fp8 import FP8, RowLayout
from mla_compile.int8 import INT8
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.coded import dequantised
from mla_compile.kernels.implementations import named
from mla_compile.kernels.paged_latent_attention import coded_warp_groups, named_tiles
from mla_compile.kernels.sparse_latent_attention import gluon, sparse_latent_attention_reference, warp_groups
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention

from ..emulated import Emulated
from .test_coded_pages_gluon import in_float16
from .test_paged_latent_attention_gluon import SYNCHRONISES, without_line
from .test_words import assert_as_close
from .where import INTERPRETED, ON_GPU, to_device
from .where import machine as present

pytestmark = [*ON_GPU, pytest.mark.usefixtures("combined_in_few_programs")]


@pytest.fixture(autouse=True)
def machine():
    if INTERPRETED:
        return Machine("sm_90", 4)
    if present().arch != "sm_90":
        pytest.skip("for sm_90")
    return present()


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Where there is no GPU, emulate the launched kernel; the value is a function that emulates that of a module."""

    def begin(module=warp_groups, seed=0):
        launched = Emulated(module, module.attend_named, seed)
        if INTERPRETED:
            monkeypatch.setattr(gluon, "attend_named", launched)
        monkeypatch.setattr(gluon, "_PLANS", Plans())
        return launched

    begin()
    return begin


def make(topk, batch=2, queries=1, heads=64, tokens=300, coded=FP8, groups=4, index=torch.int32, causal=None):
    """Random arguments. Some names are no keys, and what no query names is NaN. Four scales are in a row with a key."""
    q = torch.randn(batch, queries, heads, 576, dtype=torch.bfloat16)
    keys = torch.randn(batch, tokens, 576, dtype=torch.bfloat16)
    indices = torch.randint(-tokens // 8, tokens + tokens // 8, (batch, queries, topk), dtype=index)
    scales = torch.rand(batch, tokens, groups) / 32 + 1 / 64
    codes = (keys[..., :512].float() * 32).clamp(-127, 127).to(coded)
    x = SparseLatentAttention(
        q[..., :512], q[..., 512:], codes, keys[..., 512:].contiguous(), indices, None, causal, 0.05, False, scales
    )
    if groups == 4:
        rows = torch.zeros(batch, tokens, RowLayout(512, 64, torch.bfloat16).row_bytes, dtype=torch.uint8)
        latent, of_rows, rope = RowLayout(512, 64, torch.bfloat16).views(rows)
        latent.view(torch.uint8).copy_(codes.view(torch.uint8))
        of_rows.copy_(scales)
        rope.copy_(x.k_rope)
        return with_nan(replaced(x, latent=latent.view(coded), k_rope=rope, latent_scales=of_rows))
    return with_nan(x)


def replaced(x, **new):
    return SparseLatentAttention(**(vars(x) | new))


def with_nan(x):
    """NaN in the rope keys and the scales of keys that no query names."""
    tokens = x.latent.shape[1]
    places = x.indices.flatten(1).long()
    unnamed = torch.ones(len(x.latent), tokens + 1, dtype=torch.bool)
    unnamed.scatter_(1, places.where((places >= 0) & (places < tokens), tokens), False)
    for part in (x.k_rope, x.latent_scales):
        part[unnamed[:, :tokens]] = torch.nan
    return x


def run(machine, x):
    given = replaced(x, **{name: to_device([t])[0] for name, t in vars(x).items() if isinstance(t, torch.Tensor)})
    return [t.cpu() for t in gluon.sparse_latent_attention_gluon(given, machine)]


def assert_right(machine, x):
    o, lse = run(machine, x)
    exact = reference(x, torch.float64, dequantised(x.latent, x.k_rope, x.latent_scales, torch.float64)[0])
    rounded = in_float16(x.latent, x.latent_scales) if x.latent_scales.shape[-1] > 1 else None
    measure = rounded if rounded is not None else dequantised(x.latent, x.k_rope, x.latent_scales, torch.float32)[0]
    assert_as_close(reference(x, torch.float32, measure), (o, lse), exact, x.latent_scales.nan_to_num(1.0))
    assert o.is_contiguous()


def reference(x, dtype, latent):
    q_latent, q_rope, rope = (t.to(dtype) for t in (x.q_latent, x.q_rope, x.k_rope))
    return sparse_latent_attention_reference(
        q_latent, q_rope, latent.to(dtype), rope, x.indices, None, x.causal_offset, x.scale, x.uniform_when_empty
    )


CASES = {
    "one name": {"topk": 1},
    "odd": {"topk": 130, "batch": 3, "heads": 32},
    "two tiles of rows": {"topk": 200, "heads": 128},
    "several queries": {"topk": 70, "queries": 3, "heads": 20},
    "cut": {"topk": 1500, "batch": 1},
    "cut, several queries": {"topk": 700, "queries": 3},
    "a causal limit": {"topk": 200, "queries": 3, "causal": 150},
    "names of 64 bits": {"topk": 130, "index": torch.int64},
    "one scale": {"topk": 130, "groups": 1},
    "INT8": {"topk": 130, "coded": INT8, "groups": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_kind(machine, case):
    assert_right(machine, make(**case))


def test_names_of_which_the_first_tiles_are_no_keys(machine):
    x = make(330, queries=3)
    x.indices[0, 0, :200] = -1
    x.indices[0, 1] = 300
    x.indices[1, 2, 10:] = -1
    assert_right(machine, with_nan(x))


@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_any_factor_of_scores(machine, scale):
    assert_right(machine, replaced(make(130), scale=scale))


def test_a_mean_where_nothing_is_seen(machine):
    x = make(100)
    for part in (x.k_rope, x.latent_scales):
        part.nan_to_num_(1.0)
    x.indices[1] = -1
    o, lse = run(machine, replaced(x, uniform_when_empty=True))
    mean = dequantised(x.latent, x.k_rope, x.latent_scales, torch.float32)[0][1].mean(0)
    torch.testing.assert_close(o[1, 0, 0].float(), mean, atol=1e-2, rtol=1e-2)
    assert (lse[1] == -torch.inf).all()


def test_nothing_is_named(machine):
    o, lse = run(machine, make(0))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_the_trial(machine):
    for causal in (None, 100):
        for groups in (1, 4):
            small = named.small(make(130, groups=groups, causal=causal))
            assert small.latent_scales.isnan().any()
            assert_right(machine, small)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_in_any_order(machine, emulated, seed):
    torch.manual_seed(seed)
    launched = emulated(seed=seed)
    assert_right(machine, make(300, queries=3, heads=32))
    assert launched.launches == 1


ARRIVES = SYNCHRONISES + r"|\s{8,}copies_arrive\("
SYNCHRONISING = [
    (module, place)
    for module in (coded_warp_groups, named_tiles)
    for place, line in enumerate(Path(module.__file__).read_text().splitlines())
    if re.match(ARRIVES, line)
]
SOME = SYNCHRONISING[::6]


@pytest.mark.skipif(not INTERPRETED, reason="of the emulation")
@pytest.mark.parametrize(
    ("module", "place"),
    [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow) for each in SYNCHRONISING],
)
def test_nothing_that_keeps_warps_apart_can_be_left_out(machine, emulated, tmp_path, module, place):
    changed = without_line(module, place, tmp_path)
    kernel = types.ModuleType("changed")
    vars(kernel).update(vars(warp_groups))
    for name in ("attend_tiles", "weigh", "add_up", "load_named"):
        vars(kernel)[name] = getattr(changed, name, getattr(coded_warp_groups, name))
    for seed in range(8):
        emulated(kernel, seed)
        try:
            assert_right(machine, make(900, queries=2, heads=32))
        except AssertionError:
            return
    pytest.fail(f"nothing was noticed without line {place + 1}")
