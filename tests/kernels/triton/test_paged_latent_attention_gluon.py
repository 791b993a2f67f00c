"""The warp-specialised kernels of mla::paged_latent_attention: on a GPU that they are for, or emulated without one."""

import dataclasses
import functools
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mla_compile.asked import kept_to
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.implementations import choose, packages
from mla_compile.kernels.implementations.table import PAGED
from mla_compile.kernels.paged_latent_attention import (
    clusters,
    gluon,
    key_rows,
    paged_latent_attention_reference,
    tensor_memory,
    warp_groups,
)
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton

from ..emulated import Emulated
from ..errors import assert_as_close_as
from ..paged import make_paged
from .where import INTERPRETED, ON_GPU, to_device
from .where import machine as present

pytestmark = [*ON_GPU, pytest.mark.usefixtures("combined_in_few_programs")]

MODULES = {"key rows": key_rows, "warp groups": warp_groups, "clusters": warp_groups, "tensor memory": tensor_memory}
NAMES = {
    key_rows: "attend_key_rows",
    warp_groups: "attend_by_warp_groups",
    tensor_memory: "attend_in_tensor_memory",
}
ARCHITECTURES = {key_rows: "sm_90", warp_groups: "sm_90", tensor_memory: "sm_100"}
attend = gluon.paged_latent_attention_gluon


@pytest.fixture(autouse=True, params=MODULES)
def kernel(request, monkeypatch):
    """The name of each kernel, which then takes any number of rows; `key rows` takes 16 or 32 at a time, `clusters` is
    `warp groups` by programs of two thread blocks."""
    monkeypatch.setattr(gluon, "_MOST", 1 << 20 if request.param == "key rows" else 0)
    monkeypatch.setattr(gluon, "_PLANS", Plans())
    if request.param == "clusters":
        if not INTERPRETED and version("triton") < "3.9":
            pytest.skip("needs the Gluon of Triton 3.9")
        monkeypatch.setattr(f"{__name__}.attend", functools.partial(gluon.paged_latent_attention_gluon, blocks=2))
    return request.param


@pytest.fixture(autouse=True)
def machine(kernel):
    """A machine that has the kernel; where there is no GPU, a small imagined one."""
    if INTERPRETED:
        return Machine(ARCHITECTURES[MODULES[kernel]], 4)
    if present().arch != ARCHITECTURES[MODULES[kernel]]:
        pytest.skip(f"for {ARCHITECTURES[MODULES[kernel]]}")
    return present()


@pytest.fixture(autouse=True)
def emulated(monkeypatch, kernel):
    """Where there is no GPU, emulate the launched kernel; the value is a function that emulates that of a module."""

    def begin(module=MODULES[kernel], seed=0):
        launched = Emulated(module, module.attend_pages, seed)
        if INTERPRETED:
            monkeypatch.setattr(gluon, NAMES[MODULES[kernel]], launched)
            monkeypatch.setattr(gluon, "_PLANS", Plans())
        return launched

    begin()
    return begin


def run(machine, x, causal=True):
    bundle = PagedLatentAttention(*to_device(x.arguments), causal, x.scale)
    return [t.cpu() for t in attend(bundle, machine)]


def assert_right(machine, x, causal=True):
    o, lse = run(machine, x, causal)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    assert o.is_contiguous()


def make(lengths, queries=1, heads=16, index=torch.int32, page_size=64):
    return make_paged(lengths, (queries, heads, 512, 64), page_size, torch.bfloat16, index)


# lengths, queries, heads
CASES = {
    "one key": ([1], 1, 64),
    "odd lengths": ([130, 63, 65, 0, 1], 1, 16),
    "full pages": ([64, 128, 192], 1, 16),
    "two tiles of rows": ([200], 1, 128),
    "rows to spare": ([70, 128], 3, 30),
    "fewer keys than queries": ([1, 3], 4, 16),
    "one sequence, cut": ([1500], 1, 16),
    "several, cut": ([900, 40, 700, 0, 333], 1, 16),
}


SLOW = "full pages", "one sequence, cut"
SOME = [pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in CASES.items()]
"""Slow is what `odd lengths` and `several, cut` have too."""


@pytest.mark.parametrize("case", SOME)
def test_of_any_length(machine, case):
    assert_right(machine, make(*case))


def test_queries_that_see_all_keys(machine):
    assert_right(machine, make([70], 3), causal=False)


def test_numbers_of_64_bits(machine):
    assert_right(machine, make([130, 3], index=torch.int64))


@pytest.mark.parametrize("columns", [64 * 576 + 8, 66 * 576])
def test_pages_apart(machine, columns):
    x = make([130, 90])
    wide = torch.full((len(x.pool), columns), torch.nan, dtype=torch.bfloat16)
    wide[:, : 64 * 576] = x.pool.flatten(1)
    assert_right(machine, dataclasses.replace(x, pool=wide[:, : 64 * 576].unflatten(1, (64, 576))))


@pytest.mark.diagonal
@pytest.mark.parametrize("lengths", [[300, 128, 5], [900, 40, 700, 0, 333]])
def test_pages_of_several_tiles(machine, lengths):
    assert_right(machine, make(lengths, page_size=192))


def test_a_page_each_of_any_size(machine):
    """As of a static cache: the last tile of a page goes on in the next sequence's page, where there is NaN."""
    assert_right(machine, static([130, 201, 5, 0, 90]))
    x = static([130, 201, 5, 90])
    place = torch.arange(4).flip(0)
    for _ in place:  # in turn each page is the last, beyond which a tile goes on
        place = place.roll(1)
        assert_right(machine, dataclasses.replace(x, pool=x.pool[place.argsort()], block_table=place[x.block_table]))


def static(lengths, heads=16):
    return make_paged(lengths, (1, heads, 512, 64), 201, torch.bfloat16, spare_pages=0)


def test_latents_apart_from_rope_keys(machine):
    x = make([300, 128, 5], heads=64)
    wide = torch.full((len(x.pool), 70, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, :64] = x.pool[..., 512:]
    q_latent, q_rope, latent, _, *numbers = x.arguments
    bundle = PagedLatentAttention(
        *to_device([q_latent, q_rope, latent.contiguous(), wide[:, :64], *numbers]), True, x.scale
    )
    o, lse = attend(bundle, machine)
    expected = run(machine, x)
    torch.testing.assert_close((o.cpu(), lse.cpu()), tuple(expected), atol=0, rtol=0)


def test_queries_of_any_strides(machine):
    x = make([100, 20], heads=32)
    q_latent = x.q_latent.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(machine, dataclasses.replace(x, q_latent=q_latent, q_rope=x.q_rope.clone()))


def test_a_sequence_that_begins_with_what_is_far_below(machine):
    """The greatest score so far changes in every page, for one consumer and for the other."""
    x = make([700])
    order = (x.q_latent[0, 0] @ x.pool[x.block_table[0, :11], :, :512].flatten(0, 1).nan_to_num().T).sum(0)
    rows = x.pool[x.block_table[0, :11]].flatten(0, 1)
    rows[:700] = rows[:700][order[:700].argsort()]
    pool = x.pool.clone()
    pool[x.block_table[0, :11]] = rows.view(11, 64, 576)
    assert_right(machine, dataclasses.replace(x, pool=pool, scale=0.3))


def test_no_sequences(machine):
    o, lse = run(machine, make([0, 0]))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_no_pages(machine):
    x = make([0, 0])
    for none in ({"pool": x.pool[:0]}, {"block_table": x.block_table[:, :0]}):
        o, lse = run(machine, dataclasses.replace(x, **none))
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_in_any_order(machine, emulated, seed):
    torch.manual_seed(seed)
    launched = emulated(seed=seed)
    assert_right(machine, make([300, 130, 0, 77]))
    assert launched.launches == 1


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "x", [lambda heads: make([100, 7], heads=heads), lambda heads: static([100, 7], heads)], ids=["pages", "one each"]
)
def test_it_is_used_once_it_agreed(kernel, machine, monkeypatch, x):
    monkeypatch.setattr(gluon, "present", lambda device: machine)
    monkeypatch.setattr(packages, "_exists", lambda top: top == "mla_compile")
    for cached in (packages.is_installed, packages.found, choose.any_installed):
        cached.cache_clear()
    monkeypatch.setattr(choose, "_TRIED", {})
    monkeypatch.setattr(choose, "CHOICES", Plans())
    x, calls = x({"key rows": 16, "clusters": 128}.get(kernel, 64)), []

    def ours(problem):
        calls.append(problem)
        return paged_latent_attention_triton(problem, machine)

    bundle = PagedLatentAttention(*to_device(x.arguments), True, x.scale)
    with kept_to("gluon"):
        o, _ = choose.attend(PAGED, bundle, machine, ours)
    assert len(calls) == 1
    torch.testing.assert_close(o.cpu(), run(machine, x)[0], atol=0, rtol=0)


SYNCHRONISES = r"\s{8,}(mbarrier\.(wait|arrive)\(|fence_async_shared\(\))|\s{4}mbarrier.(wait|arrive)"
"""Lines that synchronise warps."""


def of_clusters(lines, place):
    """Whether a line does something only in programs of two thread blocks."""
    depth = len(re.match(" *", lines[place])[0])
    around = next(line for line in reversed(lines[:place]) if len(re.match(" *", line)[0]) < depth and line.strip())
    return around.strip() == "if BLOCKS == 2:"


# Kernels and these lines of their source.
SYNCHRONISING = [
    (name, place)
    for name, module in MODULES.items()
    for lines in [Path(module.__file__).read_text().splitlines()]
    for place, line in enumerate(lines)
    if re.match(SYNCHRONISES, line) and (name == "clusters" or not of_clusters(lines, place))
]
SOME = SYNCHRONISING[::5]


def without_line(module, place, folder):
    """The module without what a line of its source does."""
    lines = Path(module.__file__).read_text().splitlines()
    lines[place] = re.match(r"\s*", lines[place])[0] + "pass"
    text = "\n".join(lines).replace("from .._common", "from mla_compile.kernels._common")
    path = folder / "changed.py"
    path.write_text(re.sub(r"^from \.(\w)", rf"from {gluon.__package__}.\1", text, flags=re.M))
    spec = importlib.util.spec_from_file_location("changed", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


@pytest.mark.skipif(not INTERPRETED, reason="of the emulation")
@pytest.mark.parametrize(
    ("kernel", "place"),
    [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow) for each in SYNCHRONISING],
    indirect=["kernel"],
)
def test_nothing_that_keeps_warps_apart_can_be_left_out(kernel, machine, emulated, tmp_path, place):
    module = without_line(MODULES[kernel], place, tmp_path)
    for seed in range(8):
        emulated(module, seed)
        try:
            assert_right(machine, make([300, 130, 0, 77]))
        except AssertionError:
            return
    pytest.fail(f"nothing was noticed without line {place + 1}")


@pytest.mark.skipif(not INTERPRETED, reason="of the emulation")
def test_no_block_is_overwritten_while_it_reads(kernel, machine, emulated, monkeypatch):
    """The barriers that say where there is room have to be those of both blocks."""
    if kernel != "clusters":
        pytest.skip("of programs of two thread blocks")
    monkeypatch.setattr(warp_groups, "a_barrier_for_all", clusters.a_barrier_each)
    for seed in range(8):
        emulated(seed=seed)
        try:
            assert_right(machine, make([300, 130, 0, 77]))
        except AssertionError:
            return
    pytest.fail("nothing was noticed")
