"""mla::paged_expanded_attention: the reference against naive MLA per sequence, and the op on CPU against that."""

from dataclasses import replace

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels import pages, visibility
from mla_compile.kernels.expanded_attention import chunks
from mla_compile.kernels.paged_expanded_attention import aten, paged_expanded_attention_reference
from tests.memory import peak

from .errors import assert_as_close_as
from .naive import Inputs, naive_mla
from .paged import CODED, make_paged_heads

paged_expanded_attention = torch.ops.mla.paged_expanded_attention

# lengths, (Sq, N, L, P, R, V), page_size
SIZES = {
    "prefill": ([70, 64, 3], (70, 4, 24, 16, 8, 12), 16),
    "after a context": ([81, 40], (9, 3, 11, 7, 5, 9), 8),
    "decode": ([33, 5], (1, 2, 16, 8, 4, 8), 32),
    "pages of one token": ([9, 1, 4], (4, 2, 16, 8, 4, 8), 1),
    "a page of many": ([40, 3], (3, 17, 12, 8, 4, 8), 128),
    "no rope": ([20, 41], (20, 2, 16, 8, 0, 12), 64),
    "one key": ([1], (1, 1, 5, 3, 1, 2), 32),
    "an empty sequence": ([0, 12, 0], (3, 3, 8, 4, 4, 5), 4),
    "nothing": ([0], (2, 1, 8, 4, 2, 3), 16),
    "full last pages": ([32, 16, 64], (5, 2, 20, 8, 6, 8), 16),
    "fewer keys than queries": ([2, 1, 6], (4, 2, 8, 4, 4, 4), 4),
    "widths of other models": ([30], (6, 1, 320, 192, 64, 256), 16),
}
ATOL = 1000 * torch.finfo(torch.float64).eps
"""How far two orders of the same float64 sums of numbers around 1 may differ: an eps per term, a few hundred terms."""


def contiguous_cache(x, b):
    """The latents and rope keys of one sequence in order, gathered in plain Python."""
    latent_pages, rope_pages, table, lengths = x.cache
    size = latent_pages.shape[1]
    places = [(int(table[b, j // size]), j % size) for j in range(int(lengths[b]))]
    found = [torch.stack([part[page, row] for page, row in places]) for part in (latent_pages, rope_pages)]
    return [part[None] for part in found]


def seen_by(length, first, count, causal):
    seen = torch.ones(count, length, dtype=torch.bool)
    return seen & (torch.arange(length) <= first + torch.arange(count)[:, None]) if causal else seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_reference_is_attention_over_each_sequence(case, causal):
    x = make_paged_heads(*case).double()
    queries = x.q.shape[1]
    counts = torch.randint(queries + 1, (len(case[0]),))
    first = torch.tensor(case[0]) - torch.randint(3, counts.shape) - 1
    for given, starts in ((None, None), (counts, None), (None, first), (counts, first)):
        more = {"first_positions": starts, "query_lens": given}
        o, lse = paged_expanded_attention_reference(*x.arguments, causal, x.scale, 7, **more)
        for b, length in enumerate(case[0]):
            count = queries if given is None else int(counts[b])
            assert (o[b, count:] == 0).all()
            assert (lse[b, count:] == -torch.inf).all()
            if length:
                start = length - count if starts is None else int(first[b])
                mask = seen_by(length, start, count, causal)[None, None]
                inputs = Inputs(x.q[b : b + 1, :count], *contiguous_cache(x, b), x.w_uk, x.w_uv, x.scale)
                expected, expected_lse = naive_mla(inputs, (mask, None))
                torch.testing.assert_close(o[b, :count], expected[0], rtol=0, atol=ATOL)
                torch.testing.assert_close(lse[b, :count], expected_lse[0], rtol=ATOL, atol=ATOL)
            else:
                assert (o[b] == 0).all()
                assert (lse[b] == -torch.inf).all()


def assert_right(x, causal, workspace_tokens, op=paged_expanded_attention, **more):
    """Check the op against the reference in float64; the reference in the inputs' dtype is the measure of error."""
    given = more if x.scales is None else {"latent_scales": x.scales, **more}
    rest = causal, x.scale, workspace_tokens
    o, lse = op(*x.arguments, *rest, **given)
    mask = more.get("mask")
    doubled = given if mask is None or mask.dtype == torch.bool else {**given, "mask": mask.double()}
    exact = paged_expanded_attention_reference(*x.double().arguments, *rest, **doubled)
    measure = paged_expanded_attention_reference(*x.arguments, *rest, **given)
    merges = -(-int(x.cache[3].max()) // workspace_tokens)
    assert_as_close_as(measure[0], o, exact[0], merges)
    assert_as_close_as(measure[1].float(), lse, exact[1], merges)
    assert o.is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("workspace_tokens", [1, 7, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("implementation")
def test_float32(case, causal, workspace_tokens):
    assert_right(make_paged_heads(*case), causal, workspace_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_a_latent_for_keys_and_one_for_values(dtype):
    for case in (SIZES["after a context"], SIZES["an empty sequence"]):
        assert_right(make_paged_heads(*case, dtype=dtype).with_two_latents(5), True, 20)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("implementation")
def test_half_precision(case, dtype):
    assert_right(make_paged_heads(*case, dtype=dtype, index=torch.int64), True, 20)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("workspace_tokens", [5, 48])
def test_page_sizes_around_that_of_a_workspace(page_size, workspace_tokens):
    assert_right(make_paged_heads([150, 17], (40, 2, 16, 8, 4, 8), page_size), True, workspace_tokens)


COUNTS = [[70, 1, 3], [0, 64, 2], [5, 5, 0]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.usefixtures("implementation")
def test_as_many_new_tokens_as_a_sequence_has(counts, causal):
    x = make_paged_heads(*SIZES["prefill"])
    x.q[torch.arange(70) >= torch.tensor(counts)[:, None]] = torch.nan  # padding may hold anything
    assert_right(x, causal, 20, query_lens=torch.tensor(counts))


@pytest.mark.parametrize("starts", [[60, 9, -2], [0, 200, 2]], ids=str)
@pytest.mark.parametrize("counts", [None, *COUNTS[:2]], ids=str)
@pytest.mark.usefixtures("implementation")
def test_queries_that_are_not_the_last(starts, counts):
    counts = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    x = make_paged_heads(*SIZES["prefill"])
    assert_right(x, True, 20, first_positions=torch.tensor(starts), query_lens=counts)


def masks(batch, heads, queries, keys):
    """Masks over `keys` keys; no sequence has more."""
    lowest = torch.finfo(torch.float32).min
    return {
        "some keys": torch.rand(batch, 1, 1, keys) < 0.6,
        "one for all sequences": torch.rand(1, 1, queries, keys) < 0.6,
        "of each head": torch.rand(batch, heads, queries, keys) < 0.6,
        "all or none": torch.arange(batch)[:, None, None, None] % 2 == 0,
        "a bias": torch.randn(batch, 1, queries, keys),
        "a bias of finfo.min": torch.where(torch.rand(batch, 1, queries, keys) < 0.6, 0.0, lowest),
        "finfo.min for all keys": torch.full((batch, 1, 1, keys), lowest),
    }


MASKS = tuple(masks(1, 1, 1, 1))


@pytest.mark.diagonal
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("implementation", ["native", "aten"], indirect=True)  # C++ alone takes no mask
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", [None, COUNTS[0]], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("implementation")
def test_masks_and_values_that_are_looked_at_or_not(mask, counts, causal, looks, monkeypatch):
    for module in (aten, chunks, pages, visibility):
        monkeypatch.setattr(module, "reads_values", lambda tensor: looks)
    x = make_paged_heads(*SIZES["prefill"])
    given = {"query_lens": None if counts is None else torch.tensor(counts)}
    assert_right(x, causal, 20, mask=masks(3, 4, 70, 75)[mask], **given)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", [None, COUNTS[0]], ids=str)
@pytest.mark.usefixtures("implementation")
def test_values_that_are_not_looked_at(counts, causal, monkeypatch):
    for module in (aten, chunks, pages, visibility):
        monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    assert_right(
        make_paged_heads(*SIZES["prefill"]), causal, 20, query_lens=None if counts is None else torch.tensor(counts)
    )


@pytest.mark.parametrize(("groups", "rope_too", "coded"), CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_pages_in_few_bits(dtype, groups, rope_too, coded):
    x = make_paged_heads([70, 0, 33], (9, 3, 24, 8, 8, 8), 16, dtype, groups=groups, rope_too=rope_too, coded=coded)
    assert_right(x, True, 20)


def test_any_strides():
    x = make_paged_heads(*SIZES["after a context"])
    q, *cache, w_uk, w_uv = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in x.arguments)
    assert_right(replace(x, q=q, cache=tuple(cache), w_uk=w_uk, w_uv=w_uv), True, 20)


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.usefixtures("implementation")
def test_memory_depends_neither_on_pool_nor_table_nor_keys(groups):
    taken = set()
    for spare, tokens in ((0, 600), (2000, 600), (0, 1200)):
        x = make_paged_heads([tokens], (60, 4, 32, 8, 8, 8), 16, groups=groups)
        more = [part.new_zeros(spare, *part.shape[1:]) for part in x.cache[:2]]
        pools = [torch.cat([part, rows]) for part, rows in zip(x.cache[:2], more, strict=True)]
        table = torch.cat([x.cache[2], x.cache[2].new_full((1, spare), 10**6)], dim=1)
        scales = None if groups is None else torch.cat([x.scales, x.scales.new_zeros(spare, *x.scales.shape[1:])])
        arguments = x.q, *pools, table, x.cache[3], x.w_uk, x.w_uv, True, x.scale, 64, scales
        taken.add(peak(lambda arguments=arguments: paged_expanded_attention(*arguments)))
    assert len(taken) == 1, taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    x = make_paged_heads([5, 9], (3, 3, 8, 4, 4, 6), 4, dtype)
    for part in x.cache[:2]:
        part.nan_to_num_()
    torch.library.opcheck(
        paged_expanded_attention.default,
        (*x.arguments, True, x.scale, 2),
        {"query_lens": torch.tensor([2, 3]), "first_positions": torch.tensor([3, 6])},
    )


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.randn(2, 2, 3, 9), r"q of shape \[B, Sq, N, P\+R\] = \[2, 2, 3, 8\], found \[2, 2, 3, 9\]"),
        (1, torch.randn(6, 4, 9), "of L = 9, or of two sizes that add up to it, found 8 and 8"),
        (2, torch.randn(6, 5, 4), r"rope_pages of shape .* = \[\d+, 4, 4\], found \[6, 5, 4\]"),
        (3, torch.zeros(3, 4, dtype=torch.int32), r"block_table of shape \[B, max_pages\] = \[2, 4\], found \[3, 4\]"),
        (4, torch.zeros(2), "seq_lens of torch.int32 or torch.int64, found torch.float32"),
        (4, torch.tensor([5, 90]), r"lengths from 0 to max_pages \* page_size = \d+, found seq_lens\[1\] = 90"),
        (5, torch.randn(3, 4, 8).half(), "w_uk of q's torch.float32 on cpu, found torch.float16"),
        (9, 0, "workspace_tokens of at least 1, found 0"),
        (
            10,
            torch.ones(1, 1, 2),
            "with latent_scales given, of torch.float8_e4m3fn or torch.int8 or torch.uint8 on cpu, found",
        ),
        (11, torch.ones(1, 1, 2, 8, dtype=torch.bool), r"a mask over at least seq_lens.max\(\) = 9 keys"),
        (12, torch.zeros(3, dtype=torch.int64), r"first_positions of shape \[B\] = \[2\], found \[3\]"),
        (13, torch.tensor([1, 3]), r"query_lens from 0 to Sq = 2, found query_lens\[1\] = 3"),
    ],
)
def test_refuses(position, wrong, message):
    x = make_paged_heads([5, 9], (2, 3, 8, 4, 4, 6), 4)
    arguments = [*x.arguments, True, x.scale, 2, None, None, None, None]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        paged_expanded_attention(*arguments)
