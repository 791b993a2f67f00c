"""mla::paged_latent_attention: the reference against attention per sequence, and the op on CPU against that."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.int4 import PACKED
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.paged_latent_attention import aten, native, paged_latent_attention_reference

from .errors import assert_as_close_as
from .paged import CODED, FP8, INT8, Paged, make_paged, quantised

paged_latent_attention = torch.ops.mla.paged_latent_attention

# lengths, (Sq, N, L, R), page_size
SIZES = {
    "decode": ([70, 64, 3], (1, 4, 24, 8), 16),
    "several tokens": ([129, 33, 5, 2], (3, 3, 33, 7), 8),
    "pages of one token": ([9, 1, 4], (2, 2, 16, 4), 1),
    "no rope": ([40, 41], (1, 2, 16, 0), 64),
    "one key": ([1], (1, 1, 5, 1), 32),
    "an empty sequence": ([0, 12, 0], (2, 3, 8, 4), 4),
    "nothing": ([0], (1, 1, 8, 4), 16),
    "full last pages": ([32, 16, 64], (1, 5, 20, 6), 16),
    "fewer keys than queries": ([2, 1, 6], (4, 2, 8, 4), 4),
}
ATOL = 1000 * torch.finfo(torch.float64).eps
"""How far two orders of the same float64 sums of numbers around 1 may differ: an eps per term, a few hundred terms."""


def contiguous_cache(x, b):
    """The rows of one sequence in order, gathered in plain Python."""
    page_size = x.pool.shape[1]
    table = x.block_table[b].tolist()
    rows = [x.pool[table[j // page_size], j % page_size] for j in range(int(x.seq_lens[b]))]
    return torch.stack(rows) if rows else x.pool.new_empty(0, x.pool.shape[2])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_reference_is_attention_over_each_sequence(case, causal):
    x = make_paged(*case).double()
    o, lse = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    _, queries, _, rank = x.q_latent.shape
    for b, length in enumerate(case[0]):
        cache = contiguous_cache(x, b)
        mask = torch.ones(queries, length, dtype=torch.bool)
        for i in range(queries if causal else 0):
            mask[i, max(length - queries + i + 1, 0) :] = False
        q = x.q_latent[b : b + 1], x.q_rope[b : b + 1]
        expected = latent_attention_reference(
            *q, cache[None, :, :rank], cache[None, :, rank:], mask[None, None], None, x.scale
        )
        torch.testing.assert_close(o[b : b + 1], expected[0], rtol=0, atol=ATOL)
        torch.testing.assert_close(lse[b : b + 1], expected[1], rtol=ATOL, atol=ATOL)


def assert_right(x, causal, *rest, op=paged_latent_attention):
    o, lse = op(*x.arguments, causal, x.scale, *rest)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    assert_as_close_as(measure[0], o, exact[0], merges=x.block_table.shape[1])
    assert_as_close_as(measure[1].float(), lse, exact[1], merges=x.block_table.shape[1])
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_chunks(monkeypatch, no_compiler, case, dtype, causal, chunk):
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", chunk * (case[1][2] + case[1][3]))
    assert_right(make_paged(*case, dtype=dtype), causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_the_native_kernel(monkeypatch, case, dtype, causal):
    monkeypatch.setattr(native, "attend_with_aten", None)
    assert_right(make_paged(*case, dtype=dtype), causal)


def test_int64_tables(implementation):
    assert_right(make_paged(*SIZES["decode"], index=torch.int64), True)


def test_any_strides(implementation):
    x = make_paged(*SIZES["several tokens"])
    parts = x.q_latent, x.q_rope, x.pool, x.block_table, x.seq_lens
    assert_right(Paged(*(t.transpose(0, -1).contiguous().transpose(0, -1) for t in parts), x.scale), True)


STEP = {FP8: 1 / 16, INT8: 1 / 254, PACKED: 1 / 14}
"""The greatest error of rounding: e4m3 keeps four significant bits; integers have steps of 1/127 or 1/7 of the greatest
number."""


@pytest.mark.parametrize(("groups", "rope_too", "coded"), CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_in_few_bits(implementation, dtype, groups, rope_too, coded):
    x = make_paged([70, 0, 33], (2, 3, 24, 8), 16, dtype)
    arguments, scales = quantised(x, groups, rope_too, coded)
    o, lse = paged_latent_attention(*arguments, True, x.scale, scales)
    doubled = (arguments[0].double(), arguments[1].double(), *arguments[2:])
    if not rope_too:
        doubled = (*doubled[:3], doubled[3].double(), *doubled[4:])
    exact = paged_latent_attention_reference(*doubled, True, x.scale, scales)
    measure = paged_latent_attention_reference(*arguments, True, x.scale, scales)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    unquantised = paged_latent_attention(*x.arguments, True, x.scale)[0]
    # An average is off by as much as its values, and by as much again for its weights; half precision rounds besides.
    off = 2 * STEP[coded] + torch.finfo(dtype).eps
    assert (o.double() - unquantised.double()).abs().max() < off * x.pool.nan_to_num().abs().max()


def test_the_result_of_a_sequence_does_not_depend_on_the_batch(implementation):
    x = make_paged([70, 64, 3], (1, 4, 24, 8), 16)
    o, lse = paged_latent_attention(*x.arguments, True, x.scale, None, 32)
    for b in range(3):
        q_latent, q_rope, latent_pages, rope_pages, table, lengths = x.arguments
        this = slice(b, b + 1)
        alone = paged_latent_attention(
            q_latent[this], q_rope[this], latent_pages, rope_pages, table[this], lengths[this], True, x.scale, None, 32
        )
        assert torch.equal(alone[0], o[this])
        assert torch.equal(alone[1], lse[this])


@pytest.mark.parametrize("starts", [[3, 9, -2], [0, 200, 2]])
def test_queries_that_are_not_the_last(implementation, starts):
    x = make_paged([37, 16, 3], (3, 4, 24, 8), 16)
    first = torch.tensor(starts, dtype=torch.int32)
    o, lse = paged_latent_attention(*x.arguments, True, x.scale, first_positions=first)
    exact = paged_latent_attention_reference(*x.double().arguments, True, x.scale, first_positions=first)
    for b, start in enumerate(starts):
        seen = torch.arange(int(x.seq_lens[b])) <= start + torch.arange(3)[:, None]
        cache = contiguous_cache(x.double(), b)
        q = x.double().q_latent[b : b + 1], x.double().q_rope[b : b + 1]
        expected = latent_attention_reference(
            *q, cache[None, :, :24], cache[None, :, 24:], seen[None, None], None, x.scale
        )
        torch.testing.assert_close(exact[0][b : b + 1], expected[0], rtol=0, atol=ATOL)
    measure = paged_latent_attention_reference(*x.arguments, True, x.scale, first_positions=first)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    x = make_paged([5, 9], (2, 3, 8, 4), 4, dtype)
    x.pool.nan_to_num_()
    torch.library.opcheck(paged_latent_attention.default, (*x.arguments, True, x.scale, None, 8))


def test_opcheck_fp8():
    x = make_paged([5, 9], (2, 3, 8, 4), 4)
    arguments, scales = quantised(x, 2)
    # The other checks compute on their arguments with operations that torch lacks for FP8.
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(paged_latent_attention.default, (*arguments, True, x.scale, scales), test_utils=tests)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (1, torch.randn(2, 1, 5, 4), r"q_rope of shape \[B, Sq, N, R\] = \[2, 1, 3, 4\], found \[2, 1, 5, 4\]"),
        (2, torch.randn(6, 4, 9), r"latent_pages of shape \[pages, page_size, L\] = \[6, 4, 8\], found \[6, 4, 9\]"),
        (3, torch.randn(6, 4, 4).half(), "rope_pages of q_latent's torch.float32 on cpu, found torch.float16"),
        (4, torch.zeros(3, 4, dtype=torch.int32), r"block_table of shape \[B, max_pages\] = \[2, 4\], found \[3, 4\]"),
        (4, torch.zeros(2, 4), "block_table of torch.int32 or torch.int64, found torch.float32"),
        (4, torch.tensor([[0, 6, 1, 2], [0, 1, 2, 3]]), r"0 to 5 in block_table, found block_table\[0, 1\] = 6 for a"),
        (5, torch.tensor([5, 17]), r"lengths from 0 to max_pages \* page_size = 16, found seq_lens\[1\] = 17"),
        (5, torch.tensor([-1, 7]), r"lengths from 0 to max_pages \* page_size = 16, found seq_lens\[0\] = -1"),
        (8, torch.ones(6, 4, 3), r"broadcasts to \[pages, page_size, G\] = .*'a divisor of 8'\], found \[6, 4, 3\]"),
        (
            8,
            torch.ones(6, 4, 2),
            "with latent_scales given, of torch.float8_e4m3fn or torch.int8 or torch.uint8 on cpu, found",
        ),
        (9, 0, "split_tokens of at least 1, found 0"),
    ],
)
def test_refuses(position, wrong, message):
    x = make_paged([5, 9], (1, 3, 8, 4), 4, spare_pages=1)
    arguments = [*x.arguments, True, x.scale, None, None]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        paged_latent_attention(*arguments)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 3, 129), (4, 3, 1, 129), (4, 1, 3, 1)], ids=["keys", "heads", "queries"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_is_that_of_attention_over_each_sequence(kind, shape, causal, monkeypatch):
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", 40 * 40)  # several chunks of keys
    x = make_paged(*SIZES["several tokens"])
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)
    o, lse = paged_latent_attention(*x.arguments, causal, x.scale, mask=mask)
    d = x.double()
    more = mask if kind == "bool" else mask.double()
    exact = paged_latent_attention_reference(*d.arguments, causal, x.scale, mask=more)
    _, queries, _, rank = x.q_latent.shape
    for b, length in enumerate(x.seq_lens.tolist()):
        cache = contiguous_cache(d, b)[None]
        own = more.expand(4, -1, -1, -1)[b : b + 1]
        own = own if own.shape[3] == 1 else own[..., :length]
        q = d.q_latent[b : b + 1], d.q_rope[b : b + 1]
        offset = length - queries if causal else None
        expected = latent_attention_reference(*q, cache[..., :rank], cache[..., rank:], own, offset, x.scale)
        torch.testing.assert_close(exact[0][b : b + 1], expected[0], rtol=0, atol=ATOL)
    single = paged_latent_attention_reference(*x.arguments, causal, x.scale, mask=mask)
    assert_as_close_as(single[0], o, exact[0])
    assert_as_close_as(single[1].float(), lse, exact[1])


def test_a_mask_over_too_few_keys_is_refused():
    x = make_paged(*SIZES["several tokens"])
    with pytest.raises(KernelError, match=r"expected a mask over at least seq_lens.max\(\) = 129 keys"):
        paged_latent_attention(*x.arguments, True, x.scale, mask=torch.ones(1, 1, 3, 128, dtype=torch.bool))
