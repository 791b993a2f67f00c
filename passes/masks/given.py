"""Masks that a graph is given, as a buffer or an argument: what they hide is known only to a run."""

from __future__ import annotations

import torch
from torch import fx

from ..mla.site import Site
from ..nodes.arguments import is_elementwise, is_tensor, is_view
from .meaning import Meaning


def given_mask(site: Site, meaning: Meaning) -> str:
    """What would be gained by computing such a mask in the forward, for a report; empty if there is none."""
    rows, keys = {*site.tokens}, {*site.attention.keys}
    for read in (read for kind in meaning.kinds if "tensor" in kind.words for read in kind.reads):
        if read.axes & rows and read.axes & keys and _is_given(read.source):
            return (
                "the mask is an input of the graph (a buffer or an argument), which kernels have to read: if it is "
                "causal or a window, is_causal, or tril or arange in the forward, would tell them which keys to skip"
            )
    return ""


def _is_given(source: object) -> bool:
    """Whether a tensor is an input, or what is made of one of the same sizes, as by `== 0`."""
    while isinstance(source, fx.Node) and source.op == "call_function":
        tensors = [node for node in source.all_input_nodes if is_tensor(node)]
        known = is_elementwise(source) or (isinstance(source.target, torch._ops.OpOverload) and is_view(source.target))
        if not known or len(tensors) != 1:
            return False
        (source,) = tensors
    return isinstance(source, fx.Node) and source.op == "placeholder"
