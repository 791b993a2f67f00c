"""The implementations for CUDA tensors read no value on the host, so that a step can be captured in a CUDA graph.

They run here on meta tensors, which have no values, so that reading one raises. Launches are recorded and not made.
"""

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.fp8 import RowLayout
from mla_compile.kernels import append_latents, expanded_attention, latent_attention, merge_states
from mla_compile.kernels import paged_expanded_attention as prefill
from mla_compile.kernels import paged_latent_attention as paged
from mla_compile.kernels import sparse_latent_attention as sparse

from .recorded import made

FP8 = torch.float8_e4m3fn


def queries(batch, count):
    return made(batch, count, 16, 512), made(batch, count, 16, 64)


def decode(batch=3, count=2, mask=None, first=None, fp8=False, split_tokens=None, pages_each=32):
    pages = made(100, 64, 576)
    cache = pages[..., :512], pages[..., 512:]
    scales = None
    if fp8:
        numbers, scales, ropes = RowLayout(512, 64, torch.bfloat16).views(made(100, 64, 656, dtype=torch.uint8))
        cache = numbers, ropes
    table, lengths = made(batch, pages_each, dtype=torch.int32), made(batch, dtype=torch.int32)
    arguments = *queries(batch, count), *cache, table, lengths, True, 0.1, scales, split_tokens, mask, first
    return paged.paged_latent_attention_gpu(*arguments)


def chunks(mask=None, causal_offset=None):
    tensors = made(2, 40, 16, 192), made(2, 3000, 512), made(2, 3000, 64), made(16, 128, 512), made(16, 128, 512)
    return expanded_attention.expanded_attention_gpu(*tensors, mask, causal_offset, 0.1, 1024)


def gradients(mask=None, causal_offset=None, grad_lse=None, ropes=(64,)):
    tensors = made(2, 40, 16, 192), made(2, 3000, 512), made(2, 3000, *ropes), made(16, 128, 512), made(16, 128, 512)
    results = made(2, 40, 16, 128), made(2, 40, 16, dtype=torch.float32)
    given = results[0], grad_lse, *tensors, mask, causal_offset, 0.1, 1024, *results
    return expanded_attention.expanded_attention_backward_gpu(*given, [True] * 5 + [False])


def chunks_of_pages(mask=None, causal=True, counts=None, fp8=False):
    rows = made(100, 64, 656, dtype=torch.uint8) if fp8 else made(100, 64, 576)
    cache, scales = (rows[..., :512], rows[..., 512:]), None
    if fp8:
        numbers, scales, ropes = RowLayout(512, 64, torch.bfloat16).views(rows)
        cache = numbers, ropes
    table, lengths, first = made(3, 32, dtype=torch.int32), made(3, dtype=torch.int64), made(3, dtype=torch.int32)
    arguments = made(3, 40, 16, 192), *cache, table, lengths, made(16, 128, 512), made(16, 128, 512)
    starts = None if counts is not None else first
    return prefill.paged_expanded_attention_gpu(*arguments, causal, 0.1, 1024, scales, mask, starts, counts)


def rows(mask=None, causal_offset=None, tokens=900):
    return latent_attention.latent_attention_gpu(
        *queries(2, 3), made(2, tokens, 512), made(2, tokens, 64), mask, causal_offset, 0.1
    )


def named(uniform=False, mask=None):
    indices = made(2, 3, 256, dtype=torch.int64)
    cache = made(2, 900, 512), made(2, 900, 64)
    return sparse.sparse_latent_attention_gpu(*queries(2, 3), *cache, indices, mask, 890, 0.1, uniform)


def append(scale=False):
    tokens = made(7, 512), made(7, 64), made(7, dtype=torch.int64)
    if scale:
        place = made(10, 64, 576, dtype=FP8), made(1, dtype=torch.float32)
    else:
        place = made(10, 64, 656, dtype=torch.uint8), None
    return append_latents.append_latents_gpu(*tokens, *place)


def merge():
    sums = made(2, 3, 512), made(2, 3, dtype=torch.float32)
    return merge_states.merge_states_gpu(*sums, *sums)


CALLS = {
    "decode": decode,
    "decode with fixed parts": lambda: decode(split_tokens=256),
    "decode under a mask": lambda: decode(mask=made(3, 1, 1, 2048, dtype=torch.bool)),
    "decode of other queries": lambda: decode(first=made(3, dtype=torch.int64)),
    "decode in FP8": lambda: decode(fp8=True),
    "rows": rows,
    "rows under a mask": lambda: rows(mask=made(2, 1, 3, 900, dtype=torch.float32), causal_offset=7),
    "named keys": named,
    "named keys, uniform where there is none": lambda: named(True, made(1, 1, 3, 900, dtype=torch.bool)),
    "chunks": lambda: chunks(causal_offset=2960),
    "chunks under a mask": lambda: chunks(mask=made(2, 1, 1, 3000, dtype=torch.bool)),
    "chunks of pages": chunks_of_pages,
    "chunks of pages, not causal": lambda: chunks_of_pages(causal=False),
    "chunks of pages in FP8": lambda: chunks_of_pages(fp8=True),
    "chunks of pages under a mask": lambda: chunks_of_pages(mask=made(3, 1, 40, 2000)),
    "chunks of pages with padding": lambda: chunks_of_pages(counts=made(3, dtype=torch.int64)),
    "gradients": lambda: gradients(causal_offset=2960, grad_lse=made(2, 40, 16, dtype=torch.float32)),
    "gradients of rope keys of each head": lambda: gradients(ropes=(16, 64)),
    "gradients under a mask": lambda: gradients(mask=made(2, 1, 40, 3000, dtype=torch.bool), causal_offset=2960),
    "gradients under a bias": lambda: gradients(mask=made(1, 16, 40, 3000)),
    "append": append,
    "append with one scale": lambda: append(True),
    "merge": merge,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_asks_for_a_value(launches, call):
    call()
    assert launches
    for launch in launches:
        assert all(isinstance(size, int) for size in launch.grid)
        assert all(isinstance(a, torch.Tensor | int | float) for a in launch.arguments)
        assert "enable_fp_fusion" in launch.constants  # Triton 3.9 warns of a launch without it


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, torch.Tensor.nonzero, torch.Tensor.tolist])
def test_a_value_would_be_missed(ask):
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta"):
        ask(made(1, dtype=torch.int32))


def test_the_aten_path_would_be_caught():
    """The ATen implementation reads which slots are left out."""
    tokens, rows = (made(7, 512), made(7, 64)), made(10, 64, 656, dtype=torch.uint8)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta"):
        append_latents.append_latents_aten(*tokens, made(7, dtype=torch.int64), rows)


GROWING = {
    "rows": lambda n: rows(made(2, 1, 1, n, dtype=torch.bool), tokens=n),
    "rows under a limit": lambda n: rows(made(2, 1, 3, n, dtype=torch.float32), n - 3, n),
    "pages": lambda n: decode(pages_each=n // 32),
    "pages under a mask": lambda n: decode(mask=made(3, 1, 1, n // 32 * 64, dtype=torch.bool), pages_each=n // 32),
}


@pytest.mark.parametrize("call", GROWING.values(), ids=GROWING)
def test_nothing_is_compiled_anew_as_a_sequence_grows(launches, call):
    """Triton compiles anew for an integer that is 1 or a multiple of 16, unless told not to specialise it."""
    from mla_compile.kernels._common.kernel import attend_latents

    compiled = []
    for tokens in (901, 960, 1023, 1024):
        launches.clear()
        call(tokens)
        launch = launches[0]
        told = [
            "any" if parameter.do_not_specialize else (argument == 1, argument % 16 == 0)
            for parameter, argument in zip(attend_latents.params, launch.arguments, strict=False)
            if isinstance(argument, int)
        ]
        assert "any" in told
        compiled.append((told, launch.constants))
    assert all(one == compiled[0] for one in compiled)


def test_masks_whose_tiles_32_bits_do_not_span_go_another_way():
    from mla_compile.kernels._common.suits import small

    whole = made(1, 1, 4, 1, dtype=torch.bool)
    assert all(small(mask) for mask in (None, whole, whole.expand(2, 4, 4, 2**30), made(2, 1, 300, 2**22)))
    assert not small(made(1, 1, 2**24, 2).as_strided((1, 1, 4, 4), (0, 0, 2**23, 1)))
    assert not small(made(1, 1, 2**24, 2).as_strided((1, 1, 4, 4), (0, 0, 1, 2**23)))
