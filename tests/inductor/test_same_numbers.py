"""Equal computations of integers are merged, unless a result is returned or may be written to."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.inductor.same_numbers import merge_same_numbers


def merged(function, *inputs):
    """The graph of a function after merging, how many nodes went, and that it still gives the same."""
    expected = function(*(t.clone() for t in inputs))
    module = make_fx(function)(*(t.clone() for t in inputs))
    count = merge_same_numbers(module.graph)
    module.graph.lint()
    module.recompile()
    found = module(*(t.clone() for t in inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return module.graph, count


def calls(graph, op):
    return len(graph.find_nodes(op="call_function", target=op))


LENGTHS = torch.tensor([3, 5])
X = torch.randn(2, 8)


def seen(lengths: Tensor) -> Tensor:
    return torch.arange(8) < (lengths + 1)[:, None]


def test_masks_of_two_layers_are_one():
    graph, count = merged(lambda x, n: x.masked_fill(seen(n), 0.0).masked_fill(~seen(n), 1.0), X, LENGTHS)
    assert count >= 3
    for op in (torch.ops.aten.arange.default, torch.ops.aten.add.Tensor, torch.ops.aten.lt.Tensor):
        assert calls(graph, op) == 1


def test_other_numbers_stay():
    graph, _ = merged(lambda x, n: (x * (n + 1)[:, None]) * (n + 2)[:, None] * (n + True)[:, None], X, LENGTHS)
    assert calls(graph, torch.ops.aten.add.Tensor) == 3


def test_floating_numbers_are_left_alone():
    graph, count = merged(lambda x: x.sin() + x.sin(), X)
    assert (calls(graph, torch.ops.aten.sin.default), count) == (2, 0)


def test_two_results_are_two_tensors():
    graph, count = merged(lambda n: (n + 1, (n + 1).view(-1)), LENGTHS)
    assert (calls(graph, torch.ops.aten.add.Tensor), count) == (2, 0)


def test_numbers_before_and_after_a_write_are_not_the_same():
    def step(x: Tensor, n: Tensor) -> Tensor:
        before = x * (n[:1] + 1)
        n.add_(2)
        return before * (n[:1] + 1)

    graph, _ = merged(step, X, LENGTHS)
    assert calls(graph, torch.ops.aten.add.Tensor) == 2


def test_numbers_of_what_is_written_at_the_end_are_the_same():
    def step(x: Tensor, n: Tensor) -> Tensor:
        y = x * (n.view(-1)[:1] + 1) * (n.view(-1)[:1] + 1)
        n.copy_(n + 2)
        return y

    graph, _ = merged(step, X, LENGTHS)
    assert calls(graph, torch.ops.aten.add.Tensor) == 2


def test_a_result_that_is_written_to_is_its_own():
    def step(x: Tensor, n: Tensor) -> Tensor:
        a, b = n + 1, n + 1
        return x * a.add_(2)[:1] * b[:1]

    graph, _ = merged(step, X, LENGTHS)
    assert calls(graph, torch.ops.aten.add.Tensor) == 2


def test_random_numbers_are_not_merged():
    module = make_fx(lambda x: x * torch.randint(9, (8,)) * torch.randint(9, (8,)))(X)
    assert merge_same_numbers(module.graph) == 0
