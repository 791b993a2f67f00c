"""Every Triton kernel compiled for every architecture, in DeepSeek's shapes.

Without a GPU it can be shown that a kernel fits into shared memory, spills no registers and uses the matrix units.
"""

import re
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from mla_compile.fp8 import FP8
from mla_compile.int4 import PACKED
from mla_compile.kernels._common.tiles import choose, fits
from mla_compile.kernels._common.tuning import neighbours

from .ahead import (
    CUOBJDUMP,
    SPILLED,
    compile_append,
    compile_attention,
    compile_backward,
    compile_chunk,
    compile_combination,
    compile_gather,
    compile_merge,
    compile_specialised,
    machine_of,
)
from .instructions import (
    assert_clean,
    assert_clusters,
    assert_tensor_memory,
    assert_warp_groups,
    assert_words,
    matrix_unit,
)

pytestmark = [
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="Triton's package carries no cuobjdump here"),
    pytest.mark.usefixtures("no_kernel_cache"),
]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
SOME = [arch if arch == "sm_90" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
"""For kernels that differ little from those compiled for all: one architecture, and the others marked slow."""
SLOW_90 = [pytest.param(arch, marks=pytest.mark.slow) if arch == "sm_90" else arch for arch in ARCHITECTURES]
"""For kernels of which `test_launched.py` compiles real launches for sm_90."""
SLOW_80 = [pytest.param(arch, marks=pytest.mark.slow) if arch == "sm_80" else arch for arch in ARCHITECTURES]
"""For kernels of which sm_120 is the harder case: the same instructions as sm_80, and less shared memory."""
HEADS = {"V3": 128, "V2-Lite": 16}
STACK = 16 if version("triton") < "3.9" else 0
"""The most bytes of stack, other than for pages of 64 tokens without a mask: with Triton 3.6, up to four numbers of an
address are on the stack while the loop runs."""


@pytest.mark.diagonal
@pytest.mark.parametrize("work", ["shared", "parts"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("arch", SLOW_90)
def test_paged_decode(arch, heads, work):
    record = compile_attention(arch, heads, work=work)
    assert_clean(record, arch, *(SPILLED if work == "shared" else ()))


OF_CALLS = pytest.mark.parametrize(("causal", "index"), [(False, "*i32"), (True, "*i64")])


@pytest.mark.slow
@OF_CALLS
def test_warp_groups(causal, index):
    assert_warp_groups(compile_specialised("sm_90", causal, index), stack=32 if causal else 16)


@pytest.mark.slow
@pytest.mark.skipif(version("triton") < "3.9", reason="needs the Gluon of Triton 3.9")
@OF_CALLS
def test_clusters(causal, index):
    assert_clusters(compile_specialised("sm_90", causal, index, blocks=2))


@pytest.mark.slow
@OF_CALLS
def test_tensor_memory(causal, index):
    assert_tensor_memory(compile_specialised("sm_100", causal, index))


@pytest.mark.parametrize("arch", SOME)
def test_queries_that_are_not_the_last(arch):
    assert_clean(compile_attention(arch, 128, starts=True), arch, *SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fp8(arch, heads):
    # A few bytes are spilled before the loop and read after it.
    stack, in_loop = SPILLED
    spilled = {("sm_90", 128): 8, ("sm_100", 128): 32}.get((arch, heads), 0)
    assert_clean(compile_attention(arch, heads, coded=FP8), arch, max(stack, spilled), in_loop)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_int8(arch):
    # 8 bytes are spilled before the loop and read after it.
    stack, in_loop = SPILLED
    assert_clean(compile_attention(arch, 128, coded=torch.int8), arch, max(stack, 8 * (arch == "sm_90")), in_loop)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_int4(arch, heads):
    # Some numbers of 64 rows are on the stack while the loop runs.
    spilled = {("sm_100", 128): (8, 2), ("sm_120", 128): (56, 12)}.get((arch, heads), (0, 0))
    assert_clean(compile_attention(arch, heads, coded=PACKED), arch, *map(max, SPILLED, spilled))


@pytest.mark.parametrize("coded", [FP8, pytest.param(torch.int8, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("arch", SOME[:-1])
def test_codes_are_loaded_ahead_and_read_as_words(arch, coded):
    assert_words(compile_attention(arch, 16, coded=coded), choose(machine_of(arch), 16, 512, 64, 2, True))


@pytest.mark.parametrize(("rows", "of_codes", "of_numbers"), [(16, 16, 16), (17, 32, 64), (32, 32, 64), (33, 64, 64)])
def test_rows_of_codes_on_hopper(rows, of_codes, of_numbers):
    chosen = [choose(machine_of("sm_90"), rows, 512, 64, 2, coded).rows for coded in (True, False)]
    assert chosen == [of_codes, of_numbers]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pages", "named"])
@pytest.mark.parametrize("coded", [FP8, torch.int8], ids=str)
def test_half_of_64_rows_on_hopper(coded, kind):
    """They are taken as words, where Hopper's products of 64 rows would compute 32 for nothing. Addresses of named keys
    are on the stack while the loop runs."""
    tiles = choose(machine_of("sm_90"), 32, 512, 64, 2, True)
    assert tiles.rows == 32
    record = compile_attention("sm_90", 32, coded=coded, kind=kind, work="shared" if kind == "pages" else "parts")
    assert matrix_unit(record.assembly) == "mma.sync"
    assert_clean(record, "sm_90", 72, 16 if kind == "named" else 0)
    assert record.loop["PRMT"] <= 128


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fp8_of_named_keys(arch):
    # On sm_90, up to 16 bytes are spilled before the loop and read after it.
    assert_clean(compile_attention(arch, 128, coded=FP8, kind="named", work="parts"), arch, 16 * (arch == "sm_90"))


@pytest.mark.parametrize("heads", [pytest.param(128, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("width", [pytest.param(512, marks=pytest.mark.slow), 256])
@pytest.mark.parametrize("arch", SOME)
def test_keys_with_a_latent_of_their_own(arch, width, heads):
    """It is a rope key as wide as the latent. Few bytes are spilled before the loop and read after it."""
    assert_clean(compile_attention(arch, heads, kind="rows", rank=width, rope=width), arch, 48, 0)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("arch", SOME)
def test_combination(arch, shared, batch):
    record = compile_combination(arch, shared, batch=batch)
    assert record.stack == 0
    assert "trap;" not in record.assembly


@pytest.mark.parametrize("starts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sizes_without_a_bound_are_taken(starts):
    assert compile_attention("sm_90", 16, starts=starts, wide=True).stack == 0
    assert compile_combination("sm_90", starts=starts, wide=True).stack == 0


@pytest.mark.parametrize(
    "kernel", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("merge", "append")), "append with one scale"]
)
@pytest.mark.parametrize("arch", SOME)
def test_kernels_without_products(arch, kernel):
    record = compile_merge(arch) if kernel == "merge" else compile_append(arch, one_scale=kernel != "append")
    assert record.stack == 0
    assert "trap;" not in record.assembly


@pytest.mark.diagonal
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("arch", SLOW_80)
def test_chunks_of_a_prefill(arch, causal):
    """Heads of V3 and of V2-Lite have the same widths, and the kernel does not depend on their number."""
    record = compile_chunk(arch, causal=causal, state=True)
    assert_clean(record, arch)
    if arch == "sm_90":
        assert matrix_unit(record.assembly) == "wgmma.mma_async"


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", SOME)
def test_chunks_of_sequences_of_unequal_lengths(arch, causal):
    record = compile_chunk(arch, causal=causal, lengths=True)
    assert_clean(record, arch)
    if arch == "sm_90":
        assert matrix_unit(record.assembly) == "wgmma.mma_async"


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_are_gathered_without_the_stack(arch, fp8):
    record = compile_gather(arch, fp8)
    assert record.stack == 0
    assert "trap;" not in record.assembly


@pytest.mark.slow
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("widths", [(128, 64, 128), (192, 64, 256), (64, 32, 64), (96, 0, 80), (0, 256, 64)], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_of_other_widths(arch, widths, dtype, state):
    record = compile_chunk(arch, dtype, state=state, widths=widths)
    if (arch, widths) == ("sm_100", (96, 0, 80)):  # two blocks of values: one address is spilled
        assert (record.stack, record.spills_in_loop) <= (8, 2)
        assert record.shared <= machine_of(arch).shared_bytes
        assert matrix_unit(record.assembly) == "tcgen05.mma"
    else:
        assert_clean(record, arch)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_under_masks(arch, mask):
    for lengths in (False, True):
        assert_clean(compile_chunk(arch, mask=mask, lengths=lengths), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_in_float32(arch):
    record = compile_chunk(arch, torch.float32)
    assert record.shared <= machine_of(arch).shared_bytes
    assert record.stack == 0


@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("arch", SOME)
def test_gradients(arch, of):
    record = compile_backward(arch, of)
    assert_clean(record, arch)
    if arch == "sm_90":
        assert matrix_unit(record.assembly) == "wgmma.mma_async"


@pytest.mark.slow
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("widths", [(128, 64, 128), (192, 64, 256), (64, 32, 64), (96, 0, 80), (0, 256, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_of_other_widths(arch, dtype, widths, of):
    # For the widest some numbers are spilled before the loop and read after it; Triton 3.6 reads some in it.
    stack, in_loop = (80, 5) if version("triton") < "3.9" else (24 * (widths[0] == 192) + 8 * (widths[1] == 256), 0)
    assert_clean(compile_backward(arch, of, dtype, causal=False, widths=widths), arch, stack, in_loop)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("mask", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_under_masks(arch, mask, of):
    # Before the loop some numbers are spilled, which are read after it.
    assert_clean(compile_backward(arch, of, mask=mask), arch, {"sm_80": 8, "sm_90": 40}.get(arch, 0))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_in_float32(arch, of):
    record = compile_backward(arch, of, torch.float32)
    assert record.shared <= machine_of(arch).shared_bytes
    assert record.stack <= 16  # numbers of addresses, which are read after the loop
    assert record.spills_in_loop == 0


@pytest.mark.slow
@pytest.mark.parametrize("work", ["shared", "whole"])
@pytest.mark.parametrize("page_size", [1, 16, 32, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_page_sizes(arch, heads, page_size, work):
    record = compile_attention(arch, heads, work=work, page_size=page_size)
    assert_clean(record, arch, STACK)


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("rows", 128),
        ("named", 16),
        pytest.param("rows", 16, marks=pytest.mark.slow),
        pytest.param("named", 128, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arch", SOME)
def test_keys_in_rows_and_keys_named(arch, kind, heads):
    assert_clean(compile_attention(arch, heads, kind=kind, work="parts"), arch, STACK)


@pytest.mark.slow
@pytest.mark.parametrize("by_row", [False, True], ids=["of keys", "of rows"])
@pytest.mark.parametrize("mask", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("kind", "work"), [(kind, "parts") for kind in ("rows", "named")] + [("rows", "whole"), ("pages", "shared")]
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_masks(arch, kind, heads, work, mask, by_row):
    record = compile_attention(arch, heads, work=work, kind=kind, mask=mask, by_row=by_row)
    # Numbers of an address are on the stack while the loop runs.
    assert_clean(record, arch, max(8, STACK) if arch in ("sm_90", "sm_120") else STACK)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tile_that_autotuning_may_try(arch, heads, fp8):
    """Each fits and multiplies on matrix units; whether what it spills matters is left to the timer."""
    machine = machine_of(arch)
    table = choose(machine, heads, 512, 64, 2, fp8)
    for tiles in neighbours(table, lambda tiles: fits(machine, tiles, 512, 64, 2)):
        record = compile_attention(arch, heads, coded=FP8 if fp8 else None, tiles=tiles)
        assert record.shared <= machine.shared_bytes, tiles
        assert matrix_unit(record.assembly), tiles


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float32_is_multiplied_in_full_and_without_the_stack(arch):
    """NVIDIA's matrix units would round it to TF32; AMD's have products of float32."""
    record = compile_attention(arch, 16, torch.float32)
    assert record.shared <= machine_of(arch).shared_bytes
    assert record.stack == 0
    if arch.startswith("gfx"):
        assert set(re.findall(r"v_mfma_f32_\w+?_(\w*f\d+)", record.assembly)) == {"f32"}
    else:
        assert matrix_unit(record.assembly) is None
