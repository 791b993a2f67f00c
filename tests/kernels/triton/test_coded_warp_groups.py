"""The warp-specialised kernel of mla::paged_latent_attention for FP8: on Hopper, or emulated without a GPU."""

import dataclasses

import pytest
import torch

from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.paged_latent_attention import (
    coded_warp_groups,
    gluon,
    paged_latent_attention_reference,
)
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

from ..emulated import Emulated
from ..errors import assert_as_close_as
from ..paged import make_paged, quantised
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
    """Where there is no GPU, emulate the launched kernel; the value is a function that emulates it from a seed."""

    def begin(seed=0):
        kernel = Emulated(coded_warp_groups, coded_warp_groups.attend_coded_pages, seed)
        if INTERPRETED:
            monkeypatch.setattr(gluon, "attend_by_coded_warp_groups", kernel)
            monkeypatch.setattr(gluon, "_PLANS", Plans())
        return kernel

    begin()
    return begin


def make(lengths, queries=1, heads=16, page_size=64, **named):
    return make_paged(lengths, (queries, heads, 512, 64), page_size, torch.bfloat16, **named)


def assert_right(machine, x, groups=4, causal=True):
    arguments, scales = quantised(x, groups)
    if groups != 4:  # else rows begin at multiples of 16 bytes, and so do their rope keys
        arguments = (*arguments[:2], arguments[2].clone(), arguments[3].clone(), *arguments[4:])
    bundle = PagedLatentAttention(*to_device([*arguments]), causal, x.scale, *to_device([scales]))
    o, lse = (t.cpu() for t in gluon.paged_latent_attention_gluon(bundle, machine))
    wide = [t.double() if t.dtype == torch.bfloat16 else t for t in arguments]
    exact = paged_latent_attention_reference(*wide, causal, x.scale, scales)
    measure = paged_latent_attention_reference(*arguments, causal, x.scale, scales)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


# lengths, queries, heads
CASES = {
    "one key": ([1], 1, 64),
    "odd lengths": ([130, 63, 65, 0, 1], 1, 16),
    "two tiles of rows": ([200], 1, 128),
    "rows to spare": ([70, 128], 3, 30),
    "fewer keys than queries": ([1, 3], 4, 16),
    "several, cut": ([900, 40, 700, 0, 333], 1, 16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_any_length(machine, case):
    assert_right(machine, make(*case))


@pytest.mark.parametrize("groups", [1, 2])
def test_fewer_scales(machine, groups):
    assert_right(machine, make([300, 70, 5]), groups)


def test_pages_of_several_tiles(machine):
    assert_right(machine, make([300, 128, 5], page_size=192))


def test_a_page_each_of_any_size(machine):
    assert_right(machine, make([130, 201, 5, 0], page_size=201, spare_pages=0))


def test_queries_of_any_strides(machine):
    x = make([100, 20], heads=32)
    q_latent = x.q_latent.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(machine, dataclasses.replace(x, q_latent=q_latent, q_rope=x.q_rope.clone()), causal=False)


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x01, 0x80, 0x7E])
def test_special_codes(machine, code):
    """Codes that are no number, that are below the normal numbers, -0, and the greatest."""
    x = make([70], heads=16)
    arguments, scales = quantised(x, 4)
    arguments[2].view(torch.uint8)[x.block_table[0, 0], 3, 100] = code
    bundle = PagedLatentAttention(*to_device([*arguments]), True, x.scale, *to_device([scales]))
    o, _ = (t.cpu() for t in gluon.paged_latent_attention_gluon(bundle, machine))
    if code in (0x7F, 0xFF):
        assert o.isnan().all()
        return
    wide = [t.double() if t.dtype == torch.bfloat16 else t for t in arguments]
    exact, _ = paged_latent_attention_reference(*wide, True, x.scale, scales)
    torch.testing.assert_close(o.double(), exact, atol=0.02, rtol=0.02)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_in_any_order(machine, emulated, seed):
    torch.manual_seed(seed)
    kernel = emulated(seed=seed)
    assert_right(machine, make([300, 130, 0, 77]))
    assert kernel.launches == 1
