"""The C++ kernels compiled for other CPUs: every way to multiply whose instructions this CPU has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa

from mla_compile.kernels import native
from mla_compile.kernels.backward import attend_backward, attend_backward_on_cpu
from mla_compile.kernels.backward import native as backward_native
from mla_compile.kernels.expanded_attention import expanded_attention_reference
from mla_compile.kernels.expanded_attention import native as expanded_native
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttentionBackward
from mla_compile.kernels.index_scores import index_scores_reference
from mla_compile.kernels.index_scores import native as indexer_native
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.latent_attention import native as latent_native
from mla_compile.kernels.paged_latent_attention import native as paged_native
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.widened_matmul import native as widened_native
from mla_compile.kernels.widened_matmul import widened_matmul_reference

from .errors import assert_as_close_as
from .naive import case_of, make_inputs, masks
from .paged import FP8, INT8, PACKED, make_paged, quantised

AMX, TILES, PAIRS = "AMX", "AMX in software", "AVX512-BF16"
SETS = {
    AMX: ({}, (), torch.cpu._is_amx_tile_supported),
    TILES: ({}, (), torch.cpu._is_avx512_bf16_supported),
    PAIRS: ({}, ("NO_AMX",), torch.cpu._is_avx512_bf16_supported),
    "AVX-512": ({"cpp.march": "x86-64-v4", "cpp.simdlen": 512}, (), torch.cpu._is_avx512_supported),
    "AVX2": ({"cpp.march": "x86-64-v3", "cpp.simdlen": 256}, (), torch.cpu._is_avx2_supported),
    "SSE2": ({"cpp.march": "x86-64", "cpp.simdlen": 1}, (), torch.cpu._is_avx2_supported),
}
"""For each way to multiply, Inductor's settings, macros, and a function that tells whether this CPU has it."""
SOFTWARE = Path(__file__).with_name("amx_in_software.h")
OWN = "AVX2" if str(pick_vec_isa()) == "avx2" else None
"""The set for which kernels are compiled on this CPU anyway, if it is one of those with settings."""


@cache
def built(name: str, sources: tuple[Path, ...], argtypes: tuple[str, ...], defines: tuple[str, ...]):
    settings, more, _ = SETS[name]
    if name == OWN:  # the libraries that all tests load
        settings = {}
    if name == TILES:
        sources = tuple(SOFTWARE if source == native.AMX else source for source in sources)
    with config.patch(settings):
        return native.start.__wrapped__(sources, argtypes, (*defines, *more))()


BF16, HALF = torch.bfloat16, (torch.bfloat16, torch.float16)
OF_BF16 = AMX, TILES, PAIRS
ALL = [(name, t) for name in SETS for t in (*HALF, torch.float32) if name not in OF_BF16 or t == BF16]
"""Ways to multiply, and dtypes."""


@pytest.fixture
def dtype(request, monkeypatch):
    """Compile the kernels for another CPU, and let nothing else compute; the value is the dtype of the queries."""
    name, dtype = request.param
    settings, _, has = SETS[name]
    if not has():
        pytest.skip(f"this CPU has no {name}")
    if settings and not hasattr(config.cpp, "march"):
        pytest.skip("torch 2.11 compiles C++ for this CPU alone")
    monkeypatch.setattr(native, "load", lambda *arguments: built(name, *arguments))
    monkeypatch.setattr(expanded_native, "Flash", None)
    monkeypatch.setattr(backward_native, "attend_backward", None)
    monkeypatch.setattr(latent_native, "attend_with_aten", None)
    monkeypatch.setattr(paged_native, "attend_with_aten", None)
    return dtype


SLOW = [(name, dtype) for name in ("AVX-512", "AVX2", "SSE2") for dtype in (torch.float16, torch.float32)]
SLOW += [("AVX-512", BF16)]
"""Marked slow, since a kernel takes seconds to build; other tests run those of the CPU's own instructions too."""
CODED = [*SLOW, ("SSE2", BF16)]
"""Marked slow where latents are codes, which SSE2 reads one by one: one test of them has both kinds of codes."""


def of(pairs, slow=SLOW):
    ids = [f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in pairs]
    marks = [[pytest.mark.slow] if pair in slow else [] for pair in pairs]
    marked = [pytest.param(p, id=i, marks=m) for p, i, m in zip(pairs, ids, marks, strict=True)]
    return pytest.mark.parametrize("dtype", marked, indirect=True)


# B, Sq, T, N, L, P, R, V
SIZES = {
    "one of everything": (1, 1, 1, 1, 1, 1, 1, 1),
    "whole tiles": (1, 1, 384, 16, 64, 8, 32, 8),
    "whole tiles and a few keys": (2, 1, 131, 16, 64, 8, 32, 8),
    "odd widths": (2, 3, 267, 7, 33, 5, 7, 9),
    "no rope": (3, 4, 70, 5, 48, 8, 0, 8),
    "many rows": (1, 3, 129, 37, 24, 8, 8, 8),
}
MASKS = ("none", "causal", "causal, first queries see nothing", "right padding", "bias of -inf")


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@of(ALL)
def test_latent_attention(monkeypatch, dtype, sizes, threads, mask):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = make_inputs(sizes, dtype)
    # The cache is a part of a larger one, whose other columns and rows hold NaN.
    batch, _, tokens, _, rank, _, rope, _ = sizes
    cache = torch.full((batch, tokens + 5, rank + rope + 3), torch.nan, dtype=dtype)
    cache[:, :tokens, 1 : rank + 1], cache[:, :tokens, rank + 1 : -2] = x.latent, x.k_rope
    keys = cache[:, :tokens, 1 : rank + 1], cache[:, :tokens, rank + 1 : -2]
    q = x.absorbed[:2]
    tensor, causal_offset = masks(batch, sizes[3], sizes[1], tokens)[mask]
    case = tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor, causal_offset
    o, lse = torch.ops.mla.latent_attention(*q, *keys, *case, x.scale)
    exact = latent_attention_reference(*(t.double() for t in (*q, *keys)), *case, x.scale)
    measure = latent_attention_reference(*q, *keys, *case, x.scale)
    assert_as_close_as(measure[0], o, exact[0].nan_to_num())
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@of(ALL)
def test_expanded_attention(monkeypatch, dtype, sizes, threads, mask):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = make_inputs(sizes, dtype)
    tensor, causal_offset = case_of(sizes, mask)
    case = tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor, causal_offset
    operands = x.q, x.latent, x.k_rope, x.w_uk, x.w_uv
    o, lse = torch.ops.mla.expanded_attention(*operands, *case, x.scale, 100)
    exact = expanded_attention_reference(*(t.double() for t in operands), *case, x.scale, 100)
    measure = expanded_attention_reference(*operands, *case, x.scale, 100)
    assert_as_close_as(measure[0], o, exact[0], merges=3)
    assert_as_close_as(measure[1].float(), lse, exact[1], merges=3)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "scattered keys"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@of(ALL)
def test_gradients_of_expanded_attention(monkeypatch, dtype, sizes, threads, mask):
    """Against ATen operations in float64 and, as the measure of error, in this dtype."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, case = make_inputs(sizes, dtype), case_of(sizes, mask)
    operands = x.q, x.latent, x.k_rope, x.w_uk, x.w_uv
    wide = [t.double() for t in operands]
    o, lse = expanded_attention_reference(*wide, *case, x.scale, 100)
    direction = torch.randn_like(o)
    wanted = [True] * 5 + [False]

    def problem(tensors, o, lse, direction):
        return ExpandedAttentionBackward(direction, None, *tensors, *case, x.scale, 100, o, lse, wanted)

    exact = attend_backward(problem(wide, o, lse.float(), direction))
    rounded = problem(operands, o.to(dtype), lse.float(), direction.to(dtype))
    for found, measure, truth in zip(attend_backward_on_cpu(rounded), attend_backward(rounded), exact, strict=True):
        if truth.numel():  # else a rope key without columns
            assert_as_close_as(measure, found, truth, merges=32)


@pytest.mark.parametrize("page_size", [1, 16, 160])
@pytest.mark.parametrize("causal", [True, False])
@of(ALL)
def test_pages(dtype, causal, page_size):
    x = make_paged([290, 0, 33, 2], (3, 4, 64, 32), page_size, dtype)
    o, lse = torch.ops.mla.paged_latent_attention(*x.arguments, causal, x.scale)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


SCALED = {
    "groups that a product divides": ((4, False), (2, 3, 128, 8), 16),
    "two of them, many rows": ((2, False), (5, 7, 128, 32), 160),
    "groups that none does": ((4, False), (2, 3, 72, 8), 16),
    "one": ((1, False), (2, 3, 96, 32), 160),
    "one of an odd width": ((1, False), (2, 3, 33, 7), 16),
    "one, and rope keys too": ((1, True), (2, 3, 72, 8), 16),
    "one of an odd width, and rope keys too": ((1, True), (2, 3, 33, 7), 16),
    "no rope keys": ((2, False), (1, 16, 64, 0), 1),
}
"""Scales per latent, and whether rope keys are coded too; sizes `Sq, N, L, R`; tokens per page."""


def assert_coded_pages_right(arguments, scales, scale):
    o, lse = torch.ops.mla.paged_latent_attention(*arguments, True, scale, scales)
    doubled = [t.double() if t.dtype == arguments[0].dtype else t for t in arguments]
    exact = paged_latent_attention_reference(*doubled, True, scale, scales)
    measure = paged_latent_attention_reference(*arguments, True, scale, scales)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.diagonal
@pytest.mark.parametrize("coded", [FP8, INT8, PACKED], ids=["FP8", "INT8", "INT4"])
@pytest.mark.parametrize(("scaled", "sizes", "page_size"), SCALED.values(), ids=SCALED)
@of([(name, BF16) for name in SETS], CODED)
def test_scaled_pages(dtype, scaled, sizes, page_size, coded):
    groups, rope_too = scaled
    if coded == PACKED and (rope_too or sizes[2] % 2):
        pytest.skip("INT4 is for latents of an even width alone")
    x = make_paged([150, 0, 33, 128], sizes, page_size, dtype)
    assert_coded_pages_right(*quantised(x, groups, rope_too, coded), x.scale)


@pytest.mark.parametrize("sizes", [(1, 9, 64, 32, 131), (2, 35, 5, 7, 67)], ids=["whole vectors", "odd sizes"])
@of(ALL)
def test_index_scores(monkeypatch, dtype, sizes):
    monkeypatch.setattr(indexer_native, "score_in_blocks", None)
    batch, queries, heads, width, keys = sizes
    q, k = torch.randn(batch, queries, heads, width).to(dtype), torch.randn(batch, keys, width).to(dtype)
    weights = torch.randn(batch, queries, heads)
    exact = index_scores_reference(q.double(), k.double(), weights.double())
    assert_as_close_as(index_scores_reference(q, k, weights), torch.ops.mla.index_scores(q, k, weights), exact)


FEW = {
    "whole tiles": ((1, 16, 64, 32), 64),
    "two tiles of rows": ((2, 15, 128, 64), 64),
    "odd widths": ((3, 7, 97, 35), 16),
    "rows anywhere": ((1, 5, 64, 8), 3),
    "no rope": ((1, 16, 192, 0), 32),
}
"""Sizes `Sq, N, L, R` and tokens per page: rows that AMX's tiles multiply with INT8 as it is."""


@pytest.mark.parametrize("rope_too", [False, True], ids=["rope keys apart", "rope keys too"])
@pytest.mark.parametrize(("sizes", "page_size"), FEW.values(), ids=FEW)
@of([(name, BF16) for name in (AMX, TILES)])
def test_few_rows_of_int8(monkeypatch, dtype, sizes, page_size, rope_too):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = make_paged([150, 0, 333, 128, 1], sizes, page_size, dtype)
    assert_coded_pages_right(*quantised(x, 1, rope_too and sizes[3] > 0, INT8), x.scale)


@of([(name, BF16) for name in (AMX, TILES)])
def test_small_numbers_beside_great_ones(dtype):
    """A query's number is 1/300 of its greatest one, and so are the weights of all keys but one."""
    tokens, rank = 128, 64
    latent = torch.zeros(1, 1, tokens, rank, dtype=INT8)
    latent[..., 0, 0], latent[..., 1:, 1] = 114, 127
    q = torch.zeros(1, 1, 1, rank, dtype=dtype)
    q[..., 0], q[..., 2] = 0.05, 15.0
    table, lengths, scales = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([tokens]), torch.ones(1, 1, 1)
    cache = latent[0], torch.zeros(1, tokens, 0, dtype=dtype), table, lengths.int()
    o, lse = torch.ops.mla.paged_latent_attention(q, q[..., :0], *cache, False, 1.0, scales)
    wide = q.double(), q[..., :0].double(), cache[0], cache[1].double(), *cache[2:]
    exact = paged_latent_attention_reference(*wide, False, 1.0, scales)
    assert exact[0][..., 1].item() > 30
    rounding = 114 * 15 / 2**16  # of a score, by half a unit of the query
    torch.testing.assert_close(o.double(), exact[0], rtol=rounding + 2.0**-8, atol=0)
    torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=rounding)


@of([(name, BF16) for name in (AMX, TILES)])
def test_what_is_not_finite_stays_so(dtype):
    x = make_paged([70, 200], (1, 4, 64, 32), 64, dtype)
    arguments, scales = quantised(x, 1, False, INT8)
    x.q_latent[0, 0, 1, 5], x.q_latent[0, 0, 2, 7] = torch.nan, torch.inf
    scales[x.block_table[1, 1], 3] = torch.nan
    o, lse = torch.ops.mla.paged_latent_attention(*arguments, False, x.scale, scales)
    expected = torch.tensor([[False, True, True, False], [True] * 4])[:, None]
    assert torch.equal(o.isnan().all(-1), expected)
    assert torch.equal(o.isnan().any(-1), expected)
    assert torch.equal(lse.isnan(), expected)


@pytest.mark.parametrize("rows", [1, 6])
@of([(name, t) for name, t in ALL if t in HALF and name not in OF_BF16])
def test_widened_products(monkeypatch, dtype, rows):
    monkeypatch.setattr(widened_native, "multiply_by_panels", None)
    x, weight = torch.randn(rows, 77, dtype=dtype), torch.randn(13, 77, dtype=dtype).t()
    exact = widened_matmul_reference(x.double(), weight.double())
    assert_as_close_as(widened_matmul_reference(x, weight), torch.ops.mla.widened_matmul(x, weight), exact)


@of([(name, t) for name, t in ALL if t in HALF])
def test_every_number_is_read_as_it_is_and_written_rounded(dtype):
    """Attention to a single key gives its latent: for all bit patterns of the dtype, except infinities and NaN."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    if dtype == torch.bfloat16:
        numbers = numbers[(numbers == 0) | (numbers.abs() >= torch.finfo(dtype).tiny)]  # below, dot products read 0
    q = torch.zeros(1, 1, 1, len(numbers), dtype=dtype)
    none = torch.zeros(1, 1, 0, dtype=dtype)
    o, _ = torch.ops.mla.latent_attention(q, none[:, None], numbers[None, None], none, None, None, 1.0)
    assert torch.equal(o.flatten(), numbers)


@of([(name, BF16) for name in SETS])
@pytest.mark.parametrize("coded", [FP8, INT8], ids=["FP8", "INT8"])
def test_every_number_of_a_byte(dtype, coded):
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = (bits[bits % 128 != 127] if coded == FP8 else bits).view(coded)
    q = torch.zeros(1, 1, 1, len(numbers), dtype=dtype)
    table, lengths, scales = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.full((1, 1, 1), 0.5),
    )
    o, _ = torch.ops.mla.paged_latent_attention(
        q, q[..., :0], numbers[None, None], q[0, ..., :0], table, lengths, False, 1.0, scales
    )
    assert torch.equal(o.flatten(), numbers.to(dtype) * 0.5)
