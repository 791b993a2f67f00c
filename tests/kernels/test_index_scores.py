"""An indexer's scores: the sum over heads, however it is computed, and without the products of single heads."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels.index_scores import aten, index_scores_reference

from .errors import assert_as_close_as

# B, Sq, H, D, T
SIZES = {
    "one of everything": (1, 1, 1, 1, 1),
    "a decode step": (2, 1, 64, 128, 300),
    "a prompt": (1, 9, 64, 32, 131),
    "odd sizes": (2, 3, 5, 7, 67),
    "more heads than a group has rows": (1, 2, 300, 16, 40),
    "a group and a part of one": (2, 35, 8, 16, 20),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def tensors(sizes, dtype):
    batch, queries, heads, width, keys = sizes
    weights = torch.randn(batch, queries, heads, dtype=torch.promote_types(dtype, torch.float32))
    return torch.randn(batch, queries, heads, width).to(dtype), torch.randn(batch, keys, width).to(dtype), weights


def check(q, k, weights):
    exact = index_scores_reference(q.double(), k.double(), weights.double())
    found = torch.ops.mla.index_scores(q, k, weights)
    assert found.is_contiguous()
    assert_as_close_as(index_scores_reference(q, k, weights), found, exact)


@pytest.fixture(params=["native", "aten"])
def way(request):
    if request.param == "aten":
        request.getfixturevalue("no_compiler")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_is_the_sum(way, sizes, dtype, threads):
    torch.set_num_threads(threads)
    check(*tensors(sizes, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(way, dtype):
    q, k, weights = tensors((2, 3, 8, 32, 50), dtype)
    wide = torch.full((2, 60, 40), torch.nan, dtype=dtype)
    wide[:, 5:55, 3:35] = k
    check(q.transpose(1, 2).contiguous().transpose(1, 2), wide[:, 5:55, 3:35], weights.mT.contiguous().mT)
    check(q, k[:1].expand(2, -1, -1), weights)
    check(q, k.mT.contiguous().mT, weights)


def test_nothing_to_score(way):
    for sizes in ((0, 2, 3, 4, 5), (1, 0, 3, 4, 5), (1, 2, 3, 4, 0)):
        operands = tensors(sizes, torch.float32)
        assert torch.equal(torch.ops.mla.index_scores(*operands), index_scores_reference(*operands))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_a_number_stays_so(way, dtype):
    q, k, weights = tensors((1, 3, 4, 16, 40), dtype)
    q[0, 1, 2, 3] = k[0, 7, 0] = torch.nan
    weights[0, 2, 3] = torch.nan
    found = torch.ops.mla.index_scores(q, k, weights).isnan()
    expected = torch.zeros(1, 3, 40, dtype=torch.bool)
    expected[0, 1:], expected[..., 7] = True, True
    assert torch.equal(found, expected)


def test_products_of_single_heads_are_bounded(no_compiler, monkeypatch):
    seen = []
    score = aten.score
    monkeypatch.setattr(aten, "_MOST_BYTES", 4 * 2 * 8 * 50 * 4)  # of 4 queries
    monkeypatch.setattr(aten, "score", lambda x: seen.append(x.q.shape[1]) or score(x))
    check(*tensors((2, 10, 8, 16, 50), torch.float32))
    assert seen == [4, 4, 2]


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(2, 3, 8), "expected q"),
        (1, torch.zeros(2, 50, 31), "expected k"),
        (1, torch.zeros(2, 50, 32, dtype=torch.float64), "expected"),
        (2, torch.zeros(2, 3, 7), "expected weights"),
        (2, torch.zeros(2, 3, 8, dtype=torch.bfloat16), "expected weights of torch.float32"),
    ],
    ids=["rank", "width", "dtype", "heads", "dtype of weights"],
)
def test_what_does_not_fit_is_refused(place, wrong, message):
    operands = [*tensors((2, 3, 8, 32, 50), torch.float32)]
    operands[place] = wrong
    with pytest.raises(KernelError, match=message):
        torch.ops.mla.index_scores(*operands)
