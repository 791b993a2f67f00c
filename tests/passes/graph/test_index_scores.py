"""An indexer's scores become one op, however they are spelled, and nothing else does."""

import pytest
import torch
from torch import Tensor

import mla_compile.kernels.register  # noqa: F401  the op is run
from mla_compile.passes.graph.index_scores import sum_index_scores
from tests.passes.graphs import capture, run

B, SQ, T, H, D = 2, 3, 7, 4, 8
OP = torch.ops.mla.index_scores.default


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q `[B, Sq, H, D]`, k `[B, T, D]`, weights `[B, Sq, H]`."""
    return tuple(torch.randn(size, dtype=dtype) for size in ((B, SQ, H, D), (B, T, D), (B, SQ, H)))


def deepseek(q, k, w):
    """As transformers has it."""
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * D**-0.5
    return torch.matmul((w.float() * H**-0.5).unsqueeze(-2), scores.relu()).squeeze(-2)


def scaled_after(q, k, w):
    scores = (q.float() @ k.float().mT.unsqueeze(1)).relu() * D**-0.5
    return (w.float().unsqueeze(-2) @ scores).squeeze(-2) * 3.0


def clamped(q, k, w):
    return (w.float().unsqueeze(-2) @ (q.float() @ k.float().mT.unsqueeze(1)).clamp(min=0)).squeeze(-2)


def by_einsum(q, k, w):
    return torch.einsum("bsh,bsht->bst", w.float(), torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu())


def keys_first(q, k, w):
    return torch.einsum("bths,bsh->bts", torch.einsum("btd,bshd->bths", k.float(), q.float()).relu(), w.float())


def heads_first(q, k, w):
    scores = (q.float().transpose(1, 2) @ k.float()[:, None].mT).relu()  # [B, H, Sq, T]
    return torch.einsum("bhst,bsh->bst", scores, w.float())


def weights_of_heads(q, k, w):
    return torch.einsum("h,bsht->bst", w.float()[0, 0], torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu())


def part_of_a_cache(q, k, w):
    wide = torch.nn.functional.pad(k, (1, 2, 0, 3))
    return deepseek(q, wide[:, :T, 1 : D + 1], w)


def joined_query(q, k, w):
    return deepseek(torch.cat([q[..., : D // 2].neg(), q[..., D // 2 :]], -1), k, w)


def scaled_before(q, k, w):
    return deepseek(q.float() * -0.5, k.float() * 3.0, w.float() * 2.0)


def summed(q, k, w):
    """As transformers has it for DeepSeek-V4."""
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)).relu() * D**-0.5
    return (scores * (w.float() * H**-0.5).unsqueeze(-1)).sum(dim=2)


def summed_twice(q, k, w):
    products = (q.float().unsqueeze(3) * k.float()[:, None, None]).sum(-1).relu()  # [B, Sq, H, T]
    return (w.float().unsqueeze(-1) * products).sum(2, keepdim=True)[:, :, 0]


SPELLED = [
    *(deepseek, scaled_after, clamped, by_einsum, keys_first, heads_first, weights_of_heads, part_of_a_cache),
    *(joined_query, scaled_before, summed, summed_twice),
]


def negative_scale(q, k, w):
    return (w.float().unsqueeze(-2) @ ((q.float() @ k.float().mT.unsqueeze(1)) * -0.5).relu()).squeeze(-2)


def another_activation(q, k, w):
    return (w.float().unsqueeze(-2) @ (q.float() @ k.float().mT.unsqueeze(1)).sigmoid()).squeeze(-2)


def another_limit(q, k, w):
    return (w.float().unsqueeze(-2) @ (q.float() @ k.float().mT.unsqueeze(1)).clamp(min=0.5)).squeeze(-2)


def limited_above(q, k, w):
    return (w.float().unsqueeze(-2) @ (q.float() @ k.float().mT.unsqueeze(1)).clamp(min=0, max=1.0)).squeeze(-2)


def products_are_read(q, k, w):
    scores = (q.float() @ k.float().mT.unsqueeze(1)).relu()
    return (w.float().unsqueeze(-2) @ scores).squeeze(-2) + scores.amax(2)


def keys_of_heads(q, k, w):
    return torch.einsum(
        "bsh,bsht->bst", w.float(), torch.einsum("bshd,bhtd->bsht", q, k[:, None] * w[:, :1].mT[..., None]).relu()
    )


def over_keys(q, k, w):
    """A layer with ReLU: sums over what would be the keys."""
    return torch.einsum("td,bsht->bshd", k.float()[0], torch.einsum("bshd,td->bsht", q.float(), k.float()[1]).relu())


def a_bias(q, k, w):
    return (w.float().unsqueeze(-2) @ (q.float() @ k.float().mT.unsqueeze(1) + 0.1).relu()).squeeze(-2)


def of_positive_parts(q, k, w):
    return torch.einsum("bsh,bsht->bst", w.float(), torch.einsum("bshd,btd->bsht", q.relu(), k.relu()))


NEAR = [
    *(negative_scale, another_activation, another_limit, limited_above, products_are_read, keys_of_heads),
    *(over_keys, a_bias, of_positive_parts),
]


def choosing(function):
    """The scores, and the keys that they name."""

    def chosen(*inputs):
        scores = function(*inputs)
        return scores, scores.masked_fill(scores > 3, -torch.inf).topk(2).indices

    return chosen


def calls(module):
    return sum(node.target is OP for node in module.graph.nodes)


@pytest.mark.parametrize("symbolic", [[], [(0, 1), (0, 1), (0, 1)]], ids=["sizes", "symbols"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("function", SPELLED, ids=lambda function: function.__name__)
def test_scores_of_an_indexer(function, dtype, symbolic):
    inputs = tensors(dtype)
    module = capture(choosing(function), *inputs, symbolic=symbolic)
    expected, _ = run(module, *inputs)
    assert sum_index_scores(module.graph)
    module.recompile()
    assert calls(module) == 1
    assert not any(node.target is torch.ops.aten.relu.default for node in module.graph.nodes)
    found, _ = run(module, *inputs)
    assert found.dtype == expected.dtype == torch.float32
    exact = function(*(tensor.double() for tensor in inputs))
    assert (found - exact).abs().max() <= 3 * (expected - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("function", NEAR, ids=lambda function: function.__name__)
def test_what_is_not(function):
    module = capture(choosing(function), *tensors())
    assert not sum_index_scores(module.graph)
    assert calls(module) == 0


def test_products_in_half_precision_stay():
    """They are rounded before they are compared."""

    def scores(q, k, w):
        return (w.unsqueeze(-2) @ (q @ k.mT.unsqueeze(1)).relu()).squeeze(-2)

    assert not sum_index_scores(capture(choosing(scores), *tensors(torch.bfloat16)).graph)
    assert sum_index_scores(capture(choosing(scores), *tensors()).graph)


def test_narrow_numbers_are_not_widened():
    module = capture(choosing(deepseek), *tensors(torch.bfloat16))
    sum_index_scores(module.graph)
    (call,) = (node for node in module.graph.nodes if node.target is OP)
    assert [operand.meta["val"].dtype for operand in call.args] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_scores_from_which_nothing_is_chosen_stay():
    assert not sum_index_scores(capture(deepseek, *tensors()).graph)
