"""Decode over pages of FP8 or INT8 with few rows on Hopper: on such a GPU, or emulated without one."""

import re
from pathlib import Path

import pytest
import torch

from mla_compile.fp8 import FP8
from mla_compile.int8 import INT8
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.paged_latent_attention import coded_key_rows, gluon, paged_latent_attention_reference
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

from ..emulated import Emulated
from ..paged import make_paged, quantised
from .test_paged_latent_attention_gluon import SYNCHRONISES, without_line
from .test_words import assert_as_close
from .where import INTERPRETED, ON_GPU, to_device
from .where import machine as present

pytestmark = [*ON_GPU]


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

    def begin(module=coded_key_rows, seed=0):
        launched = Emulated(module, module.attend_pages, seed)
        if INTERPRETED:
            monkeypatch.setattr(gluon, "attend_coded_key_rows", launched)
        monkeypatch.setattr(gluon, "_PLANS", Plans())
        return launched

    begin()
    return begin


def make(lengths, queries=1, heads=16, coded=FP8, groups=4, index=torch.int32, page_size=64):
    """Arguments, the factor of scores, and scales. Four scales are in a row with the codes and the rope key."""
    x = make_paged(lengths, (queries, heads, 512, 64), page_size, torch.bfloat16, index)
    arguments, scales = quantised(x, groups, False, coded)
    if groups < 4:
        arguments = (*arguments[:2], *(t.contiguous() for t in arguments[2:4]), *arguments[4:])
        scales = scales.contiguous()
    return arguments, x.scale, scales


def run(machine, arguments, scale, scales, causal=True):
    bundle = PagedLatentAttention(*to_device(arguments), causal, scale, *to_device([scales]))
    return [t.cpu() for t in gluon.paged_latent_attention_gluon(bundle, machine)]


def assert_right(machine, arguments, scale, scales, causal=True):
    """Compare with the equation in float32, of which the result is rounded: codes lose nothing on their way."""
    o, lse = run(machine, arguments, scale, scales, causal)
    measure, exact = (
        paged_latent_attention_reference(
            *[t.to(dtype) if t.dtype == torch.bfloat16 else t for t in arguments], causal, scale, scales
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_close(measure, (o, lse), exact, scales)
    assert o.is_contiguous()


# lengths, queries, heads
CASES = {
    "one key": ([1], 1, 8),
    "odd lengths": ([130, 63, 65, 0, 1], 1, 16),
    "full pages": ([64, 128, 192], 1, 16),
    "two tiles of rows": ([200], 1, 30),
    "several queries": ([70, 128], 3, 5),
    "fewer keys than queries": ([1, 3], 4, 4),
    "one sequence, cut": ([1500], 1, 16),
    "several, cut": ([900, 40, 700, 0, 333], 1, 16),
}
SLOW = "full pages", "one sequence, cut"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in CASES.items()],
)
def test_of_any_length(machine, case):
    assert_right(machine, *make(*case))


@pytest.mark.parametrize(("coded", "groups"), [(FP8, 1), (FP8, 2), (INT8, 1), (INT8, 4)], ids=str)
def test_codes_and_scales(machine, coded, groups):
    assert_right(machine, *make([130, 20], coded=coded, groups=groups))


def test_a_scale_for_all(machine):
    arguments, scale, scales = make([130, 20], groups=1)
    assert_right(machine, arguments, scale, scales.nan_to_num().amax().reshape(1, 1, 1))


def test_queries_that_see_all_keys(machine):
    assert_right(machine, *make([70], 3, 5), causal=False)


def test_pages_of_several_tiles_and_numbers_of_64_bits(machine):
    assert_right(machine, *make([300, 128, 5], index=torch.int64, page_size=192))


@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**30])
def test_any_magnitude_of_queries_and_latents(machine, magnitude):
    (q, *rest), scale, scales = make([37, 90])
    assert_right(machine, (q / magnitude, *rest), scale, scales * magnitude)


def test_scales_that_differ_from_token_to_token(machine):
    (q, *rest), scale, scales = make([140])
    apart = torch.exp2(torch.randint(-20, 1, scales.shape[:2]))[..., None]
    assert_right(machine, (q, *rest), scale, scales * apart)


@pytest.mark.parametrize("coded", [FP8, INT8], ids=str)
def test_every_code(machine, coded):
    """Attention to a single key gives its latent."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(coded)
    numbers = codes.to(torch.bfloat16)
    some = codes.where(~numbers.isnan(), codes[0])
    assert torch.equal(only_key(machine, some)[0], some.to(torch.bfloat16))
    if coded == FP8:
        assert all(result.isnan().all() for result in only_key(machine, codes))  # in the score, and so in all


def only_key(machine, codes):
    q = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    pages = codes.view(1, 1, 512).expand(1, 64, 512).contiguous()
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    rope = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
    arguments = q[..., :512], q[..., 512:], pages, rope, table, lengths
    return [result.flatten() for result in run(machine, arguments, 1.0, torch.ones(1, 1, 1))]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_in_any_order(machine, emulated, seed):
    torch.manual_seed(seed)
    launched = emulated(seed=seed)
    assert_right(machine, *make([300, 130, 0, 77]))
    assert launched.launches == 1


LINES = Path(coded_key_rows.__file__).read_text().splitlines()
SYNCHRONISING = [place for place, line in enumerate(LINES) if re.match(SYNCHRONISES, line)]
SOME = SYNCHRONISING[::4]


@pytest.mark.skipif(not INTERPRETED, reason="of the emulation")
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in SOME else pytest.mark.slow) for place in SYNCHRONISING]
)
def test_nothing_that_keeps_warps_apart_can_be_left_out(machine, emulated, tmp_path, place):
    module = without_line(coded_key_rows, place, tmp_path)
    for seed in range(8):
        emulated(module, seed)
        try:
            assert_right(machine, *make([1500, 130, 0, 700]))  # more tiles for each program than fit into memory
        except AssertionError:
            return
    pytest.fail(f"nothing was noticed without line {place + 1}")
