"""Spellings of MLA whose graph is cut at random nodes, which become inputs: a mask that the caller makes, for instance,
or a part of the keys."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random

import torch
from torch import Tensor, fx

from mla_compile.passes.nodes.walk import makers, walk
from tests.passes.graphs import values
from tests.spellings.checks import graph_of
from tests.spellings.choices import draw
from tests.spellings.module import Attention

from .drawing import Program


def program(seed: int) -> Program:
    """The spelling of a seed, cut at one to three nodes."""
    random = Random(seed)
    torch.manual_seed(seed)
    module = Attention(replace(draw(seed), dtype="float64")).double().requires_grad_(False)
    with torch.no_grad():
        whole, tensors = graph_of(module, module.inputs(torch.Generator().manual_seed(seed), torch.float64))
        found = {node.name: value for node, value in values(whole, *tensors).items()}
    cut = fx.GraphModule(whole, copy.deepcopy(whole.graph))
    chosen = _some(random, [node for node in cut.graph.nodes if _may_be_cut(node)])
    (*_, last) = cut.graph.find_nodes(op="placeholder")
    for node in chosen:
        with cut.graph.inserting_after(last):
            last = cut.graph.placeholder(f"cut_{node.name}")
        node.replace_all_uses_with(last)
    cut.graph.eliminate_dead_code()
    cut.recompile()
    return Program(cut, (*tensors, *(found[node.name] for node in chosen)))


def _some(random: Random, nodes: list[fx.Node]) -> list[fx.Node]:
    """Nodes that depend on no input, bool ones, or any: masks are cut more often than they would be by chance."""
    constants = [node for node in nodes if not any(other.op == "placeholder" for other in walk([node], makers))]
    pool = random.choice([constants, [node for node in nodes if node.meta["val"].dtype == torch.bool], nodes]) or nodes
    return random.sample(pool, min(len(pool), random.choice([1, 1, 1, 2, 3])))


def _may_be_cut(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and bool(node.users)
