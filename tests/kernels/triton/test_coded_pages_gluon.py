"""Decode over pages of FP8 or INT8 on Hopper by warps of their own tasks: on such a GPU, or emulated without one."""

import inspect
import re
import types
from pathlib import Path

import pytest
import torch

from mla_compile.fp8 import FP8
from mla_compile.int8 import INT8
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.paged_latent_attention import (
    coded_key_rows,
    coded_tiles,
    coded_warp_groups,
    gluon,
    paged_latent_attention_reference,
)
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

from ..emulated import Emulated
from ..paged import make_paged, quantised
from .test_paged_latent_attention_gluon import SYNCHRONISES, without_line
from .test_words import assert_as_close
from .where import INTERPRETED, ON_GPU, to_device
from .where import machine as present

pytestmark = [*ON_GPU, pytest.mark.usefixtures("combined_in_few_programs")]


MODULES = {"key rows": coded_key_rows, "warp groups": coded_warp_groups}
NAMES = dict(zip(MODULES, ("attend_coded_key_rows", "attend_by_coded_warp_groups"), strict=True))


@pytest.fixture(autouse=True, params=MODULES)
def kernel(request, monkeypatch):
    """The name of each kernel, which then takes any number of rows."""
    monkeypatch.setattr(gluon, "_MOST_CODED", 1 << 20 if request.param == "key rows" else 0)
    return request.param


@pytest.fixture(autouse=True)
def machine():
    if INTERPRETED:
        return Machine("sm_90", 4)
    if present().arch != "sm_90":
        pytest.skip("for sm_90")
    return present()


@pytest.fixture(autouse=True)
def emulated(monkeypatch, kernel):
    """Where there is no GPU, emulate the launched kernel; the value is a function that emulates that of a module."""

    def begin(module=MODULES[kernel], seed=0):
        launched = Emulated(module, module.attend_pages, seed)
        if INTERPRETED:
            monkeypatch.setattr(gluon, NAMES[kernel], launched)
        monkeypatch.setattr(gluon, "_PLANS", Plans())
        return launched

    begin()
    return begin


@pytest.fixture
def make(kernel):
    """Make arguments, the factor of scores, and scales. Four scales are in a row with the codes and the rope key.

    `warp groups` is given four times as many heads.
    """

    def made(lengths, queries=1, heads=16, coded=FP8, groups=4, index=torch.int32, page_size=64):
        heads = heads if kernel == "key rows" else 4 * heads
        x = make_paged(lengths, (queries, heads, 512, 64), page_size, torch.bfloat16, index)
        arguments, scales = quantised(x, groups, False, coded)
        if groups < 4:
            arguments = (*arguments[:2], *(t.contiguous() for t in arguments[2:4]), *arguments[4:])
            scales = scales.contiguous()
        return arguments, x.scale, scales

    return made


def run(machine, arguments, scale, scales, causal=True):
    bundle = PagedLatentAttention(*to_device(arguments), causal, scale, *to_device([scales]))
    return [t.cpu() for t in gluon.paged_latent_attention_gluon(bundle, machine)]


@pytest.fixture
def assert_right(kernel, machine):
    """Compare with the equation in float32, of which the result is rounded: codes lose nothing on their way.

    By `warp groups` they do where a token has several scales: numbers of these are rounded to float16.
    """

    def check(arguments, scale, scales, causal=True):
        o, lse = run(machine, arguments, scale, scales, causal)
        in_float32, exact = (
            [t.to(dtype) if t.dtype == torch.bfloat16 else t for t in arguments]
            for dtype in (torch.float32, torch.float64)
        )
        exact = paged_latent_attention_reference(*exact, causal, scale, scales)
        factors = scales
        if kernel == "warp groups" and scales.shape[-1] > 1:
            in_float32[2], factors = in_float16(in_float32[2], scales), None
        measure = paged_latent_attention_reference(*in_float32, causal, scale, factors)
        assert_as_close(measure, (o, lse), exact, scales)
        assert o.is_contiguous()

    return check


def in_float16(codes, scales):
    """Latents whose largest scale is 1 in float16, times that scale."""
    numbers = codes.float().unflatten(-1, (scales.shape[-1], -1))
    largest = scales.abs().amax(-1, keepdim=True).clamp_min(2.0**-60)
    ratios = (scales / largest).half().float()[..., None]
    return (numbers * ratios).half().float().flatten(-2) * largest


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
def test_of_any_length(make, case, assert_right):
    assert_right(*make(*case))


@pytest.mark.parametrize(("coded", "groups"), [(FP8, 1), (FP8, 2), (INT8, 1), (INT8, 4)], ids=str)
def test_codes_and_scales(make, coded, groups, assert_right):
    assert_right(*make([130, 20], coded=coded, groups=groups))


def test_a_scale_for_all(make, assert_right):
    arguments, scale, scales = make([130, 20], groups=1)
    assert_right(arguments, scale, scales.nan_to_num().amax().reshape(1, 1, 1))


def test_queries_that_see_all_keys(make, assert_right):
    assert_right(*make([70], 3, 5), causal=False)


def test_pages_of_several_tiles_and_numbers_of_64_bits(make, assert_right):
    assert_right(*make([300, 128, 5], index=torch.int64, page_size=192))


@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**30])
def test_any_magnitude_of_queries_and_latents(make, magnitude, assert_right):
    (q, *rest), scale, scales = make([37, 90])
    assert_right((q / magnitude, *rest), scale, scales * magnitude)


@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_any_factor_of_scores(make, assert_right, scale):
    arguments, _, scales = make([3, 90], 4, 4)
    assert_right(arguments, scale, scales)


def test_a_sequence_that_begins_with_what_is_far_below(make, assert_right):
    """The greatest score so far changes in every tile, by more than weights may grow."""
    (q, q_rope, codes, ropes, table, lengths), _, scales = make([700], heads=4)
    pages = table[0, :11].long()
    ropes = ropes.clone()
    direction = q_rope[0, 0].float().sum(0)
    ropes[pages] = (torch.arange(704)[:, None] * direction / 256).bfloat16().view(11, 64, 64)
    ropes[pages[-1], 700 - 640 :] = torch.nan
    assert_right((q, q_rope, codes, ropes, table, lengths), 0.3, scales)


@pytest.mark.parametrize("kind", ["zero queries", "great rope queries", "negative scales", "no scale"])
def test_odd_numbers(make, assert_right, kind):
    (q, q_rope, *rest), scale, scales = make([130, 5], groups=2)
    if kind == "zero queries":
        q, q_rope = q.clone(), q_rope.clone()
        q[0] = 0
        q_rope[:, :, 1] = 0
    elif kind == "great rope queries":
        q = q * 2.0**-100
    elif kind == "negative scales":
        scales = scales * torch.where(torch.rand(scales.shape) < 0.5, -1.0, 1.0)
    else:
        scales = torch.where(torch.rand(scales.shape[:2])[..., None] < 0.3, 0.0 * scales, scales)
    assert_right((q, q_rope, *rest), scale, scales)


def test_scales_that_differ_from_token_to_token(make, assert_right):
    (q, *rest), scale, scales = make([140])
    apart = torch.exp2(torch.randint(-20, 1, scales.shape[:2]))[..., None]
    assert_right((q, *rest), scale, scales * apart)


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
def test_in_any_order(make, emulated, seed, assert_right):
    torch.manual_seed(seed)
    launched = emulated(seed=seed)
    assert_right(*make([300, 130, 0, 77]))
    assert launched.launches == 1


def unused_lines(name):
    """The lines of a function of `coded_tiles` that a kernel does not call."""
    unused = coded_tiles.place_ratios if name == "key rows" else coded_tiles.place_factors
    lines, first = inspect.getsourcelines(unused.fn)
    return range(first - 1, first - 1 + len(lines))


SYNCHRONISING = [
    (name, module, place)
    for name, kernel in MODULES.items()
    for module in (kernel, coded_tiles)
    for place, line in enumerate(Path(module.__file__).read_text().splitlines())
    if re.match(SYNCHRONISES, line) and not (module is coded_tiles and place in unused_lines(name))
]
SOME = SYNCHRONISING[::5]


def changed_without(kernel, module, place, folder):
    """A kernel's module without what a line does, which is its own or one of `coded_tiles`."""
    changed = without_line(module, place, folder)
    if module is kernel:
        return changed
    copy = types.ModuleType(kernel.__name__)
    vars(copy).update(vars(kernel), load_tiles=changed.load_tiles)
    vars(copy).update(place_factors=changed.place_factors, place_ratios=changed.place_ratios)
    return copy


@pytest.mark.skipif(not INTERPRETED, reason="of the emulation")
@pytest.mark.parametrize(
    ("kernel", "module", "place"),
    [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow) for each in SYNCHRONISING],
    indirect=["kernel"],
)
def test_nothing_that_keeps_warps_apart_can_be_left_out(kernel, module, make, emulated, tmp_path, place, assert_right):
    changed = changed_without(MODULES[kernel], module, place, tmp_path)
    for seed in range(8):
        emulated(changed, seed)
        try:
            assert_right(*make([1500, 130, 0, 700]))  # more tiles for each program than fit into memory
        except AssertionError:
            return
    pytest.fail(f"nothing was noticed without line {place + 1}")
