"""The form of every tensor of a graph says what the graph computes, with static and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.passes.algebra.terms import Join, Product, Scaled, Sum
from tests.passes.graphs import capture
from tests.passes.trace.forms import check_all, seen_through, whole


def scaled_product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return ((x @ w.to(x.dtype).t()) * scale).view(2, 3, 5, 2)


def product_scaled_by_head(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return scale * (x @ w.to(x.dtype).t()).view(2, 3, 5, 2)


@pytest.mark.parametrize(
    ("function", "shape"), [(scaled_product, (10,)), (product_scaled_by_head, (5, 2)), (product_scaled_by_head, (5, 1))]
)
def test_a_scale_behind_a_product_is_one_of_its_few_bit_weight(
    function: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    """A product with an int8 weight that is scaled afterwards is one with the dequantised weight."""
    tensors = whole(2, 3, 4), whole(10, 4, seed=1).to(torch.int8), whole(*shape, seed=2)
    form = check_all(capture(function, *tensors), *tensors)
    assert isinstance(form.term.parts, Product)
    assert isinstance(form.term.parts.right.read.source, Scaled)


def x3() -> tuple[Tensor, ...]:
    return (whole(2, 3, 4),)


def xy() -> tuple[Tensor, ...]:
    return whole(2, 3, 4), whole(2, 3, 4, seed=1)


def buffer_by_slices(x: Tensor, y: Tensor) -> Tensor:
    k = x.new_empty(2, x.shape[1], 9)
    k[..., :4] = x
    k[..., 5:] = y[:1]
    k[..., 4:5].copy_(y[..., :1])
    return k


def buffer_with_a_gap(x: Tensor, y: Tensor) -> Tensor:
    k = x.new_empty(2, x.shape[1], 9)
    k[..., :4].copy_(x)
    k[..., 5:].copy_(y)
    return k


def cache_written_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:2] = y[:, :1]
    return x


def put(x: Tensor, places: Tensor, what: Tensor, accumulate: bool = False) -> Tensor:
    """`x` with `what` at these places of the last dimension."""
    return torch.ops.aten.index_put(x, [None, None, places], what, accumulate)


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "detach": lambda x: x.detach(),
    "view split": lambda x: x.view(2, -1, 2, 2),
    "view merge": lambda x: x.view(-1, 4),
    "view through a permutation": lambda x: x.transpose(0, 1).reshape(-1, 8),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze of all": lambda x: x[:1].squeeze(),
    "squeeze of dims": lambda x: torch.squeeze(x[:1, :, :1], (0, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute from the end": lambda x: x.permute(-1, 0, -2),
    "transpose": lambda x: x.transpose(-1, -2),
    "t": lambda x: x[0].t(),
    "mT": lambda x: x.mT,
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1),
    "expand to more dims": lambda x: x.expand(3, *x.shape),
    "expand of a column": lambda x: x[..., :1].expand(-1, -1, 5),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat to more dims": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave by hand": lambda x: x[:, :, None].expand(-1, -1, 3, -1).reshape(2, -1, 4),
    "slice": lambda x: x[..., 1:3],
    "slice to the end": lambda x: x[:, 1:],
    "slice of the last": lambda x: x[..., -2:],
    "slice up to the last": lambda x: x[..., :-1],
    "slice with a step": lambda x: x[..., ::2],
    "slice with a step and a start": lambda x: x[..., 1::2],
    "slice of a slice": lambda x: x[..., 1:][..., 1:2],
    "slice beyond the beginning": lambda x: x[..., -100:],
    "slice beyond the end": lambda x: x[..., 2:100],
    "slice of an unknown length from the end": lambda x: x[:, -100:],
    "slice of all but the first": lambda x: x[:, -x.shape[1] + 1 :],
    "slice of as many as there are": lambda x: x[..., -x.shape[1] :],
    "slice of nothing": lambda x: x[..., 4:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "select": lambda x: x[:, 1],
    "select the last": lambda x: x[..., -1],
    "select twice": lambda x: x[0, :, 2],
    "split": lambda x: x.split(3, dim=-1)[1],
    "split with sizes": lambda x: x.split([1, 2, 1], dim=-1)[1],
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "unbind": lambda x: x.unbind(0)[1],
    "unbind from the end": lambda x: x.unbind(-1)[2],
    "movedim": lambda x: x.movedim(2, 0),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "tile": lambda x: x.tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "narrow_copy": lambda x: torch.narrow_copy(x, 2, 1, 2),
    "copies of views": lambda x: torch.permute_copy(torch.select_copy(torch.unsqueeze_copy(x, 0), 3, 1), (1, 2, 0)),
    "copies of parts": lambda x: torch.unbind_copy(torch.split_copy(x, 2, 2)[1], 0)[1],
    "hsplit": lambda x: torch.hsplit(x.transpose(1, 2), 2)[1],
    "unfold of pieces": lambda x: x.unfold(2, 2, 2),
    "unfold of pieces apart": lambda x: x.unfold(2, 1, 2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x.transpose(1, 2), 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.permute(2, 1, 0), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.permute(1, 0, 2), 2),
    "cast": lambda x: x.float(),
    "cast there and back": lambda x: x.bfloat16().transpose(0, 1).double(),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize("function", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_is_seen_through(function: Callable[[Tensor], Tensor], symbolic: bool) -> None:
    tensors = x3()
    module = capture(function, *tensors, symbolic=[(1,)] if symbolic else [])
    assert seen_through(check_all(module, *tensors))


PARTS: dict[str, tuple[Callable[..., Tensor], type | None]] = {
    "cat of tensors over the same axes": (lambda x, y: torch.cat([x, y], 1), None),
    "cat of a broadcast": (lambda x, y: torch.cat([x, y[:1].expand(2, -1, -1)], -1), Join),
    "cat of products": (lambda x, y: torch.cat([x @ x.mT, y], -1), Join),
    "cat of one": (lambda x, y: torch.cat([x @ x.mT], -1), Product),
    "cat of an empty piece": (lambda x, y: torch.cat([x[:, :0], y[:1].expand(2, -1, -1)], 1), None),
    "cat after nothing": (lambda x, y: torch.cat([x.new_zeros(0), x @ y.mT], 1), Product),
    "cat with nothing between": (lambda x, y: torch.cat([x @ x.mT, x.new_zeros(0), y], -1), Join),
    "cat of nothing": (lambda x, y: torch.cat([x[0, 0, :0], y[0, 0, :0]]), None),
    "cat cut again": (lambda x, y: torch.cat([x, (y @ y.mT) @ y], -1)[..., 4:], Product),
    "cat cut through a piece": (lambda x, y: torch.cat([x, y[:1].expand(2, -1, -1)], -1)[..., 3:6], Join),
    "cat with one column selected": (lambda x, y: torch.cat([x, y[:1].expand(2, -1, -1)], -1)[..., 5], None),
    "cat of the same tensor twice": (lambda x, y: torch.cat([x, x], 1), None),
    "cat of a tensor and its transpose": (lambda x, y: torch.cat([x[..., :3], x[..., :3].mT], 1), None),
    "stack": (lambda x, y: torch.stack([x, y[:1].expand(2, -1, -1)], 1), Join),
    "stack of tensors over the same axes": (lambda x, y: torch.stack([x, y], 1), None),
    "new_empty and slices": (buffer_by_slices, Join),
    "new_empty with a gap": (buffer_with_a_gap, Join),
    "a cache written in place": (cache_written_in_place, None),
    "copy of another dtype": (lambda x, y: torch.empty(2, 3, 4).copy_(x @ y.mT @ x), Product),
    "matmul": (lambda x, y: x @ y.transpose(1, 2), Product),
    "matmul with a matrix": (lambda x, y: x @ y[0].t(), Product),
    "matmul of a tensor with itself": (lambda x, y: x @ x.transpose(1, 2), Product),
    "matmul of a tensor with a product of itself": (lambda x, y: x @ (x @ (y[0].t() @ y[0])).mT, Product),
    "matmul of one row": (lambda x, y: x[:, :1] @ y.transpose(1, 2), Product),
    "einsum over heads": (lambda x, y: torch.einsum("btl,nlp->bntp", x, y.mT.contiguous()[:, :, :2]), Product),
    "linear": (lambda x, y: F.linear(x, y[1]), Product),
    "a product times a number": (lambda x, y: (x @ y.mT) * 0.5, Product),
    "a number times a product": (lambda x, y: 4 * (x @ y.mT), Product),
    "a product divided by a number": (lambda x, y: (x @ y.mT) / 4, Product),
    "a scaled join": (lambda x, y: torch.cat([x, y[:1].expand(2, -1, -1)], -1) * 2, Join),
    "a sliced scaled product": (lambda x, y: ((x @ y.mT) * 2)[..., 1:], Product),
    "a product and a bias": (lambda x, y: x @ y.mT + y[0, :, 0], Sum),
    "a bias and a product": (lambda x, y: y[0, :, 0] + x @ y.mT, Sum),
    "a product less another": (lambda x, y: x @ y.mT - y @ x.mT, Sum),
    "a product and a multiple of a bias": (lambda x, y: torch.add(x @ y.mT, y[0, :, 0], alpha=3), Sum),
    "a sum times a number": (lambda x, y: (x @ y.mT + y[0, :, 0]) * 2, Sum),
    "a sum that was cut": (lambda x, y: (x @ y.mT + y[0, :, 0])[..., 1:].transpose(1, 2), Sum),
    "a sum of sums": (lambda x, y: (x @ y.mT + y[0, :, 0]) + (y @ x.mT + 2 * x[0, :, 0]), Sum),
    "a sum of a product and a number": (lambda x, y: 2 - (x @ y.mT + 3), Sum),
    "a sum of a number and joined products": (lambda x, y: torch.cat([x @ y.mT, y], -1) + 3, Join),
    "a product and 0": (lambda x, y: 0 + x @ y.mT, Product),
    "a sum of many": (lambda x, y: sum(x @ y.mT for _ in range(5)), None),
    "a bias of joined products": (lambda x, y: torch.cat([x @ y.mT, y], -1) + x[0].repeat(1, 2)[0, :7], Join),
    "a product taken away": (lambda x, y: -(x @ y.mT), Product),
    "zeros after": (lambda x, y: F.pad(x, (0, 2)), Join),
    "zeros before and after": (lambda x, y: F.pad(x, (1, 2)), Join),
    "zeros before the rows": (lambda x, y: F.pad(x @ y.mT, (0, 0, 2, 0)), Join),
    "zeros on two sides": (lambda x, y: F.pad(x, (1, 0, 1, 0)), None),
    "ones after": (lambda x, y: F.pad(x, (0, 2), value=1), None),
    "two padded to one width": (
        lambda x, y: F.pad(x @ y.mT, (0, 4)) + F.pad(y, (3, 0)),
        Join,
    ),
    "two padded and overlapping": (
        lambda x, y: F.pad(x @ y.mT, (0, 3)) + F.pad(y, (2, 0)),
        Join,
    ),
    "a padded one and all of another": (lambda x, y: F.pad(x @ y.mT, (0, 1)) + y, Join),
    "a sum with what nobody wrote": (lambda x, y: buffer_with_a_gap(x, y) + buffer_with_a_gap(y, x), Join),
    "a sum": (lambda x, y: x + y, None),
    "a sum with a broadcast": (lambda x, y: x + y[:, :1], None),
    "a sum with a transpose of itself": (lambda x, y: x[:, :, :3] + x[:, :, :3].mT, None),
    "a function of a broadcast": (lambda x, y: x[:1].expand(2, -1, -1).exp(), None),
    "where": (lambda x, y: torch.where(x > 0, x, y[:, :1]), None),
    "clamp": (lambda x, y: x.clamp(-1, 1), None),
    "addmm": (lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t()), Sum),
    "addmm with factors": (lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t(), beta=2, alpha=3), Sum),
    "addmm without its bias": (lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t(), beta=0, alpha=3), Product),
    "addmv": (lambda x, y: torch.addmv(x[0, :, 0], x[0], y[0, 0], beta=2, alpha=3), Sum),
    "mv": (lambda x, y: torch.mv(x[0], y[0, 0]), Product),
    "dot": (lambda x, y: torch.dot(x[0, 0], y[0, 0]), Product),
    "addr": (lambda x, y: torch.addr(x[0], y[0, :, 0], y[1, 1], alpha=3), Sum),
    "baddbmm": (lambda x, y: torch.baddbmm(x[:, :, :3], x, y.mT), Sum),
    "baddbmm of a product": (lambda x, y: torch.baddbmm(x @ y.mT, y, x.mT), Sum),
    "baddbmm with factors": (lambda x, y: torch.baddbmm(x[:1, :1, :1], x, y.mT, beta=2, alpha=0.5), Sum),
    "baddbmm into an empty buffer": (
        lambda x, y: torch.baddbmm(torch.empty(2, 1, 1).double(), x, y.mT, beta=0, alpha=0.5)[..., 1:],
        Product,
    ),
    "a convolution of one place": (lambda x, y: F.conv1d(x, y[0].mT[..., None]), Product),
    "a convolution of one place, with a bias": (lambda x, y: F.conv1d(x, y[0].mT[..., None], x[0, 0]), Sum),
    "a convolution of one place of an image": (
        lambda x, y: F.conv2d(x[:, :, None], y[0].mT[..., None, None])[:, :, 0],
        Product,
    ),
    "a convolution of two places": (lambda x, y: F.conv1d(x, y[0].mT[..., None].repeat(1, 1, 2)), None),
    "a convolution of every second place": (lambda x, y: F.conv1d(x, y[0].mT[..., None], stride=2), None),
    "a convolution with zeros around": (lambda x, y: F.conv1d(x, y[0].mT[..., None], padding=1), None),
    "a convolution of each channel": (lambda x, y: F.conv1d(x, y[0, :, :1, None], groups=x.shape[1]), None),
    "addbmm": (lambda x, y: torch.addbmm(x[0, :, :3], x, y.mT, beta=0), Product),
    "addbmm with its addend": (lambda x, y: torch.addbmm(x[0, :, :3], x, y.mT, alpha=2), Sum),
    "rsub": (lambda x, y: torch.rsub(x @ y.mT, y @ x.mT, alpha=2), Sum),
    "a sum with zeros": (lambda x, y: torch.zeros(3, 3).double() + x @ y.mT, Product),
    "a buffer of zeros, written": (lambda x, y: torch.zeros(2, x.shape[1], 6).double().slice_scatter(x, 2, 1, 5), Join),
    "full of zeros": (lambda x, y: torch.cat([x @ y.mT, torch.full_like(x, 0)], -1), Join),
    "full of ones": (lambda x, y: torch.full((2, 3), 1.0).double() * x[..., 0], None),
    "stack of products": (lambda x, y: torch.stack([x @ y.mT, y @ x.mT], 1), Join),
    "stack of products with a matrix each": (lambda x, y: torch.stack([x @ y[0].mT, x @ y[1].mT], 1), Product),
    "stack of matrices times one": (lambda x, y: torch.stack([x[0] @ y[0].mT, x[1] @ y[0].mT], 1)[..., 1:], Product),
    "stack at the end of products": (lambda x, y: torch.stack([x @ y[i % 2].mT for i in range(3)], -1), Product),
    "products in a loop": (lambda x, y: torch.stack([x[b] @ y[b].mT for b in range(2)]), Product),
    "products in a loop over rows": (lambda x, y: torch.stack([x[:, i] @ y[0].mT for i in range(3)], 1), Product),
    "products in a loop, written": (
        lambda x, y: (
            torch.empty(2, 3, 3).double().select_scatter(x[0] @ y[0].mT, 0, 0).select_scatter(x[1] @ y[1].mT, 0, 1)
        ),
        Product,
    ),
    "products in a loop, the last first": (lambda x, y: torch.stack([x[b] @ y[b].mT for b in (1, 0)]), Join),
    "products in a loop, each with a matrix": (lambda x, y: torch.stack([x[b] @ (y[b] + b).mT for b in (0, 1)]), Join),
    "sums in a loop": (lambda x, y: torch.stack([x[b] @ y[b].mT + y[b] @ x[b].mT for b in range(2)]), Sum),
    "joins in a loop": (lambda x, y: torch.stack([torch.cat([x[b] @ y[b].mT, x[b]], -1) for b in (0, 1)]), Join),
    "slices in order": (lambda x, y: torch.cat([x[:, :1], x[:, 1:3], x[:, 3:]], 1) if x.shape[1] > 2 else x, None),
    "a part of the slices, twice": (lambda x, y: torch.cat([x[:, 1:2], x[:, 2:3], x[:, 1:2]], 1), None),
    "the same many times": (lambda x, y: torch.stack([x[0], x[0], x[0]]), None),
    "stack of products with a scale each": (lambda x, y: torch.stack([x @ y[0].mT, x @ y[1].mT * 2], 1), Join),
    "stack at the end": (lambda x, y: torch.stack([x, y[:1].expand(2, -1, -1), y], -1), Join),
    "stack of one": (lambda x, y: torch.stack([x @ y.mT], 1), Product),
    "stack of which one is taken": (lambda x, y: torch.stack([x, y @ y.mT @ y], 1)[:, 1], Product),
    "a product written in one row": (lambda x, y: torch.select_scatter(x, (y @ y.mT @ y)[:, 0], 1, -2), Join),
    "all rows written by select": (
        lambda x, y: torch.empty(2, 2, 4).double().select_scatter(x[:, 0], 1, 0).select_scatter(y[:, 1], 1, 1),
        None,
    ),
    "even and odd columns written": (
        lambda x, y: torch.empty_like(x).slice_scatter(x[..., 2:], 2, 1, step=2).slice_scatter(x[..., :2], 2, 0, 4, 2),
        None,
    ),
    "even and odd columns of a broadcast, written": (
        lambda x, y: (
            torch.empty_like(x[:1].expand(3, -1, -1))
            .slice_scatter(x[:1, :, 2:].neg().expand(3, -1, -1), 2, 0, 4, 2)
            .slice_scatter(x[:1, :, :2].exp().expand(3, -1, -1), 2, 1, 4, 2)
        ),
        None,
    ),
    "odd columns of a product written": (lambda x, y: torch.slice_scatter(y @ y.mT @ y, x[..., :2], 2, 1, 4, 2), Join),
    "odd rows written": (lambda x, y: y[:, :2].slice_scatter(x[:, :1], 1, 1, 2, 2), None),
    "one of the odd columns written": (lambda x, y: torch.slice_scatter(x, (y @ y.mT)[..., :1], 2, 1, 3, 2), None),
    "columns written from the third on": (lambda x, y: torch.slice_scatter(x, (y @ y.mT)[..., :1], 2, 2, 4, 2), None),
    "index_copy in a row": (lambda x, y: x.index_copy(2, torch.arange(1, 3), (y @ y.mT)[..., :2]), Join),
    "index_copy of all": (lambda x, y: x.index_copy(2, torch.arange(4), y @ y.mT @ y), Product),
    "index_copy of places one on": (lambda x, y: x.index_copy(2, torch.arange(2) + 1, (y @ y.mT)[..., :2]), Join),
    "index_copy of one": (lambda x, y: x.index_copy(2, torch.arange(3)[1:2], (y @ y.mT)[..., :1]), Join),
    "index_copy to places apart": (lambda x, y: x.index_copy(2, torch.arange(4)[::2], (y @ y.mT)[..., :2]), None),
    "index_copy to places doubled": (lambda x, y: x.index_copy(2, torch.arange(2) * 2, (y @ y.mT)[..., :2]), None),
    "index_put in a row": (lambda x, y: put(x, torch.arange(1, 3), (y @ y.mT)[..., :2]), Join),
    "index_put of a broadcast": (lambda x, y: put(x, torch.arange(4), (y @ y.mT)[:1, :1, :1]), Product),
    "index_put that adds": (lambda x, y: put(x, torch.arange(1, 3), (y @ y.mT)[..., :2], accumulate=True), None),
    "index_put at two indices": (lambda x, y: x.index_put((torch.arange(2), torch.arange(2)), y[0, :2]), None),
    "scatter in a row": (
        lambda x, y: x.scatter(2, torch.arange(1, 3).expand(2, x.shape[1], 2), (y @ y.mT)[..., :2]),
        Join,
    ),
    "scatter in some rows": (
        lambda x, y: x.scatter(2, torch.arange(1, 3).expand(1, x.shape[1], 2), (y @ y.mT)[:1, :, :2]),
        None,
    ),
    "flip of a broadcast": (lambda x, y: x[:1].expand(3, -1, -1).flip(1).view(3, -1), None),
    "roll of a broadcast": (lambda x, y: x[:, None].expand(-1, 3, -1, -1).roll(1, -1), None),
    "roll of all": (lambda x, y: x[:1].expand(3, -1, -1).roll(1), None),
    "means of a broadcast": (lambda x, y: x[:, None].expand(-1, 3, -1, -1).pow(2).mean(-1, keepdim=True), None),
    "sums of a broadcast": (lambda x, y: x[:1, None].expand(2, 3, -1, -1).sum((0, 2)).view(-1), None),
    "the greatest of a broadcast": (lambda x, y: x[:, None].expand(-1, 3, -1, -1).amax((1, -1)), None),
    "a sum of products": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1), Product),
    "a sum of products over the dimension of heads": (
        lambda x, y: (x.view(2, -1, 2, 2) * y.view(2, -1, 2, 2)[:, :1]).sum(2, keepdim=True).transpose(1, 3),
        Product,
    ),
    "a sum of products over two dimensions": (lambda x, y: (x[:, :3] * y[:, :3]).sum((0, -1)), Product),
    "a sum of products of two dtypes": (lambda x, y: (x.float()[:, :, None] * y[:, None]).sum(-1), Product),
    "a sum of squares": (lambda x, y: (x * x).sum(-1), Product),
    "a sum of products with a broadcast": (lambda x, y: (x[:, :1] * y).sum(1), None),
    "a sum of products with a number of each": (lambda x, y: (x * y[:, :1, :1]).sum(-1), None),
    "a sum of products, some of them of one": (lambda x, y: (x[:, :, None] * y[:, None]).sum((1, 3)), None),
    "a sum in another dtype": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1, dtype=torch.float32), None),
    "a sum of all": (lambda x, y: x[:, None].expand(-1, 3, -1, -1).sum(()), None),
    "complex of a broadcast": (
        lambda x, y: torch.view_as_real(
            torch.view_as_complex(x[:, None].expand(-1, 3, -1, -1).reshape(2, 3, -1, 2, 2)) * (1 + 1j)
        ).flatten(3),
        None,
    ),
    "linear with a bias": (lambda x, y: F.linear(x, y[1], x[0, 0, :3]), Sum),
    "rows before rows of another width": (
        lambda x, y: (x[0] @ torch.cat([y[0], y[1, :2]]).mT)[:, :4].view(-1, 2, 2),
        Product,
    ),
    "rows after rows of another width": (
        lambda x, y: (x[0] @ torch.cat([y[0], y[1, :2]]).mT)[:, 1:5].view(-1, 2, 2),
        Product,
    ),
    "integers": (lambda x, y: (x.long() * 3).double(), None),
    "flip": (lambda x, y: x.flip(1), None),
    "roll": (lambda x, y: x.roll(1, 1), None),
    "index": (lambda x, y: x[:, [1, 0]], None),
    "gather": (lambda x, y: x.gather(2, (y > 0).long()), None),
    "cumsum": (lambda x, y: x.cumsum(1), None),
    "tril": (lambda x, y: x.tril(), None),
    "softmax": (lambda x, y: x.softmax(-1), None),
    "index_copy": (lambda x, y: x.index_copy(1, torch.tensor([2]), y[:, :1]), None),
    "select written in place": (lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2), None),
    "a strided slice written": (lambda x, y: torch.slice_scatter(x, y[..., :2], 2, 0, 4, 2), None),
    "a slice written from the end": (lambda x, y: torch.slice_scatter(x, y[..., :2], 2, -2), None),
    "as_strided": (lambda x, y: x.as_strided((2, 2), (1, 2)), None),
    "diagonal": (lambda x, y: x.diagonal(dim1=1, dim2=2), None),
    "the real view of a complex product": (
        lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(2, -1, 2, 2)) * (1 + 1j)),
        None,
    ),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize(("function", "parts"), PARTS.values(), ids=PARTS)
def test_what_a_tensor_is_made_of(function: Callable[..., Tensor], parts: type | None, symbolic: bool) -> None:
    tensors = xy()
    module = capture(function, *tensors, symbolic=[(1,), (1,)] if symbolic else [])
    form = check_all(module, *tensors)
    if not symbolic:
        assert isinstance(form.term.parts, parts or type(None))


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "unknown"])
def test_an_attention_is_a_product_of_products(symbolic: bool) -> None:
    """As in models: heads in the middle, and keys joined from an up-projection and a broadcast rope key."""

    def attention(x: Tensor, latent: Tensor, rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q = (x @ w_q).view(x.shape[0], -1, 2, 5).transpose(1, 2)
        nope, v = (latent @ w_kv).view(x.shape[0], -1, 2, 6).transpose(1, 2).split([3, 3], -1)
        k = torch.cat([nope, rope[:, None].expand(-1, 2, -1, -1)], -1)
        return (q @ k.transpose(2, 3)) @ v

    tensors = whole(2, 3, 7), whole(2, 4, 5), whole(2, 4, 2), whole(7, 10), whole(5, 12)
    module = capture(attention, *tensors, symbolic=[(0, 1)] * 3 if symbolic else [])
    form = check_all(module, *tensors)
    assert isinstance(form.term.parts, Product)
    scores = form.term.parts.left
    assert isinstance(scores.parts, Product)
    assert isinstance(scores.parts.right.parts, Join)
