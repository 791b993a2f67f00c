"""Recorded launches, compiled with their own arguments: Triton specialises a kernel for strides and addresses.

Where a stride is no multiple of 16 elements, it assumes no alignment, and loads one element at a time.
"""

import re
from importlib.metadata import version
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from mla_compile.fp8 import FP8, RowLayout
from mla_compile.kernels import paged_expanded_attention as prefill
from mla_compile.kernels import paged_latent_attention as paged
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.paged_latent_attention import gluon
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.sparse_latent_attention import gluon as gluon_of_names
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention
from mla_compile.kernels.sparse_latent_attention.triton import sparse_latent_attention_triton

from .ahead import CUOBJDUMP, SPILLED, compile_launch, machine_of
from .instructions import (
    assert_clean,
    assert_clusters,
    assert_coded_key_rows,
    assert_coded_warp_groups,
    assert_each_score_once_and_no_wait_between,
    assert_key_rows,
    assert_tensor_memory,
    assert_warp_groups,
    matrix_unit,
)
from .recorded import made, recorded
from .test_no_sync import CALLS

pytestmark = [
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="Triton's package carries no cuobjdump here"),
    pytest.mark.usefixtures("no_kernel_cache"),
]

L, R, PAGES, PAGE_SIZE = 512, 64, 4, 64
SOME = ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100", "sm_120"))]

QUICK = ("append", "merge", "named keys")
STACK = {("packed", 16): 40}
"""By kind of pages and number of heads, bytes of stack that are written before the loop and read after it."""
STACK_ON = {("sm_100", "packed", 128): 24}
"""The same on one architecture alone."""


def cache(kind):
    """Pages of latents and of rope keys, and scales."""
    if kind == "packed":
        numbers, scales, ropes = RowLayout(L, R, torch.bfloat16).views(
            torch.zeros(PAGES, PAGE_SIZE, 656, dtype=torch.uint8)
        )
        return numbers, ropes, scales
    rows = torch.zeros(PAGES, PAGE_SIZE, L + R, dtype=torch.bfloat16)
    return rows[..., :L], rows[..., L:], None


TABLE, LENGTHS = torch.zeros(2, 2, dtype=torch.int32), torch.full((2,), 100, dtype=torch.int32)


def decode(kind, heads):
    latent, ropes, scales = cache(kind)
    q = torch.zeros(2, 1, heads, L, dtype=torch.bfloat16), torch.zeros(2, 1, heads, R, dtype=torch.bfloat16)
    paged.paged_latent_attention_gpu(*q, latent, ropes, TABLE, LENGTHS, True, 0.1, scales)


def gather(kind, heads):
    latent, ropes, scales = cache(kind)
    weights = torch.zeros(2, heads, 128, L, dtype=torch.bfloat16)
    q = torch.zeros(2, 8, heads, 128 + R, dtype=torch.bfloat16)
    given = q, latent, ropes, TABLE, LENGTHS, *weights, True, 0.1, 64, scales
    prefill.paged_expanded_attention_gpu(*given)


def narrow(record):
    """Loads of two bytes from global memory."""
    return re.findall(r"ld\.global\S*\.[bu]16\s", record.assembly)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["rows", "packed"])
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("arch", SOME)
def test_decode_loads_whole_words_and_leaves_nothing_on_the_stack(arch, heads, kind):
    with recorded(arch) as launches:
        decode(kind, heads)
    record = compile_launch(arch, launches[0])
    assert launches[0].kernel == "attend_latents"
    stack, in_loop = SPILLED
    assert_clean(record, arch, max(stack, STACK.get((kind, heads), 0), STACK_ON.get((arch, kind, heads), 0)), in_loop)
    assert narrow(record) == []
    if (arch, heads, kind) == ("sm_90", 128, "rows"):
        assert_each_score_once_and_no_wait_between(record)


WARPS_OF_THEIR_OWN_TASKS = {
    "128 heads": ("sm_90", "attend_by_warp_groups", (1, 128), "rows", assert_warp_groups),
    "128 heads, sm_100": ("sm_100", "attend_in_tensor_memory", (2, 128), "rows", assert_tensor_memory),
    "16 heads": ("sm_90", "attend_key_rows", (1, 16), "rows", lambda record: assert_key_rows(record, 0)),
    "16 heads, 2 queries": ("sm_90", "attend_key_rows", (2, 16), "rows", lambda record: assert_key_rows(record, 112)),
    "128 heads, FP8": ("sm_90", "attend_by_coded_warp_groups", (1, 128), "packed", assert_coded_warp_groups),
    "16 heads, FP8": ("sm_90", "attend_coded_key_rows", (1, 16), "packed", assert_coded_key_rows),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kernel", "rows", "kind", "check"), WARPS_OF_THEIR_OWN_TASKS.values(), ids=WARPS_OF_THEIR_OWN_TASKS
)
def test_warps_of_their_own_tasks(arch, kernel, rows, kind, check):
    latent, ropes, scales = cache(kind)
    q = (torch.zeros(2, *rows, width, dtype=torch.bfloat16) for width in (L, R))
    with recorded(arch) as launches, mock.patch.object(gluon, "_PLANS", Plans()):
        gluon.paged_latent_attention_gluon(
            PagedLatentAttention(*q, latent, ropes, TABLE, LENGTHS, True, 0.1, scales), machine_of(arch)
        )
    assert [launch.kernel for launch in launches] == ["share_out", kernel, "combine"]
    for launch in launches:
        record = compile_launch(arch, launch)
        assert record.shared <= machine_of(arch).shared_bytes
        assert narrow(record) == []
        if launch.kernel == kernel:
            check(record)
        else:
            assert record.stack == 0


@pytest.mark.slow
@pytest.mark.skipif(version("triton") < "3.9", reason="needs the Gluon of Triton 3.9")
def test_clusters():
    q = (torch.zeros(2, 1, 128, width, dtype=torch.bfloat16) for width in (L, R))
    x = PagedLatentAttention(*q, *cache("rows")[:2], TABLE, LENGTHS, True, 0.1)
    with recorded("sm_90") as launches, mock.patch.object(gluon, "_PLANS", Plans()):
        gluon.paged_latent_attention_gluon(x, machine_of("sm_90"), blocks=2)
    launch = launches[1]
    assert (launch.grid, launch.constants["num_ctas"]) == ((66,), 2)
    assert_clusters(compile_launch("sm_90", launch))


@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_named_keys_by_warps_of_their_own_tasks(index):
    latent, ropes, scales = cache("packed")
    q = (torch.zeros(2, 1, 128, width, dtype=torch.bfloat16) for width in (L, R))
    names = torch.zeros(2, 1, 200, dtype=index)
    x = SparseLatentAttention(*q, latent[:2], ropes[:2], names, None, 50, 0.1, False, scales[:2])
    with recorded("sm_90") as launches, mock.patch.object(gluon_of_names, "_PLANS", Plans()):
        gluon_of_names.sparse_latent_attention_gluon(x, machine_of("sm_90"))
    assert [launch.kernel for launch in launches] == ["share_out", "attend_named", "combine"]
    record = compile_launch("sm_90", launches[1])
    assert_coded_warp_groups(record, named=True)
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", record.assembly)
    assert copied == ["0x10"] * (64 * 640 // 128 // 16)


@pytest.mark.parametrize("index", [torch.int64, pytest.param(torch.int32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("arch", SOME)
def test_names_of_few_codes(arch, index):
    """Names in 64 bits are loaded in another layout than names in 32."""
    codes, scales = made(2, 40, 64, dtype=FP8), made(2, 40, 2, dtype=torch.float32)
    named = made(2, 40, 8), made(2, 3, 24, dtype=index)
    x = SparseLatentAttention(
        made(2, 3, 20, 64), made(2, 3, 20, 8), codes, *named, None, None, 0.1, False, latent_scales=scales
    )
    with recorded(arch) as launches:
        sparse_latent_attention_triton(x, machine_of(arch), Tiles(32, 32, 8, 2))
    (launch,) = launches
    assert launch.constants["WORDS"] == 2
    record = compile_launch(arch, launch)
    assert matrix_unit(record.assembly) == "mma.sync"
    assert record.spills_in_loop == 0


@pytest.mark.parametrize("kind", ["rows", "packed"])
@pytest.mark.parametrize("arch", SOME)
def test_gathering_loads_whole_words(arch, kind):
    with recorded(arch) as launches:
        gather(kind, 16)
    record = compile_launch(arch, launches[0])
    assert launches[0].kernel == "gather_chunk"
    assert record.stack == 0
    assert narrow(record) == []


SOME_CALLS = [
    pytest.param(call, marks=() if name in QUICK else pytest.mark.slow, id=name) for name, call in CALLS.items()
]


@pytest.mark.parametrize("call", SOME_CALLS)
def test_every_launch_compiles_with_the_arguments_and_options_that_it_has(call):
    """Triton warns of options that it does not support, and warnings are errors in tests."""
    with recorded("sm_90") as launches:
        call()
    different = {(launch.kernel, str(sorted(launch.constants.items()))): launch for launch in launches}
    for launch in different.values():
        record = compile_launch("sm_90", launch)
        assert record.shared <= machine_of("sm_90").shared_bytes
        assert "trap;" not in record.assembly
