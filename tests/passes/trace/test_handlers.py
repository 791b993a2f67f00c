"""Every op of ATen that moves or joins elements has a handler, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from mla_compile.passes.trace.parts import SPLITS, UNBINDS
from mla_compile.passes.trace.trace import HANDLERS, TABLES
from mla_compile.passes.trace.unhandled import UNHANDLED

aten = torch.ops.aten

COMPUTE = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _cdist_forward _embedding_bag
    _fft_c2r _fft_r2c _local_scalar_dense _log_softmax _native_batch_norm_legit
    _native_batch_norm_legit_no_training _pdist_forward _softmax adaptive_avg_pool1d amax amin any arange argmax
    argmin avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d convolution convolution_backward cumsum
    embedding_dense_backward grid_sampler_2d max max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices mean min native_dropout native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward nonzero prod rand randn randperm scalar_tensor sort sum
    sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride topk upsample_bilinear2d var
"""
"""Core ops whose results are not elements of their operands, or are elements that values choose."""

OTHER_TENSORS = """
    _fw_primal _indices _make_dual _nested_get_values _nested_view_from_buffer _nested_view_from_jagged
    _sparse_broadcast_to _test_autograd_multiple_dispatch_view _values ccol_indices col_indices crow_indices
    indices row_indices values
"""
"""Views of sparse, nested and dual tensors, which the passes never see."""


EACH_BY_ITSELF = "leaky_relu"
"""Core ops that are pointwise, but not tagged so by torch 2.11."""


def operations() -> Iterator[OpOverload]:
    """ATen's functional ops that a graph without decompositions may have, except pointwise ones."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten" or packet in EACH_BY_ITSELF.split():
            continue
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None and not op._schema.is_mutable and torch.Tag.pointwise not in op.tags:
            yield op


def views(op: OpOverload) -> bool:
    """Whether an op gives its operand's elements, as a view or a copy of one, and is not made of other ops."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return False
    alias = any(argument.alias_info is not None for argument in op._schema.arguments)
    return alias or torch.Tag.view_copy in op.tags


def test_no_op_is_in_two_tables() -> None:
    assert sum(map(len, TABLES)) == len(HANDLERS)
    assert HANDLERS.keys().isdisjoint(UNHANDLED)


def test_every_op_that_moves_or_joins_is_handled_or_says_why_not() -> None:
    known = HANDLERS.keys() | UNHANDLED.keys() | SPLITS | UNBINDS
    missing = []
    for op in operations():
        name = op._schema.name.removeprefix("aten::")
        view = views(op) and name.removesuffix("_copy") not in OTHER_TENSORS.split()
        core = torch.Tag.core in op.tags and name not in COMPUTE.split()
        if (view or core) and op not in known:
            missing.append(str(op))
    assert not missing


def test_what_computes_something_else_is_still_there() -> None:
    names = {op._schema.name.removeprefix("aten::") for op in operations() if torch.Tag.core in op.tags}
    assert set(COMPUTE.split()) <= names
