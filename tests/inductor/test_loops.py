"""Inductor's settings for loops, wherever in a graph they are."""

import torch
from torch import fx

from mla_compile.inductor.loops import settings_of_loops


def module_of(*targets):
    """A graph that calls ops without arguments."""
    graph = fx.Graph()
    for target in targets:
        graph.call_function(target)
    graph.output(None)
    return fx.GraphModule({}, graph)


def with_part(part):
    module = module_of(torch.ops.aten.relu.default)
    module.add_module("wrap_body_0", part)
    return module


def test_results_of_loops_have_memory_of_their_own():
    loop = module_of(torch.ops.higher_order.while_loop)
    for module in (loop, with_part(loop), with_part(with_part(loop))):
        assert settings_of_loops(module) == {"inplace_buffers": False}


def test_a_graph_without_loops_has_no_settings():
    assert settings_of_loops(with_part(module_of(torch.ops.aten.relu.default))) == {}
