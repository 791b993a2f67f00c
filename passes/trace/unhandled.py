"""Ops that move, join or write elements and have no handler, with the reason, for reports of where the trace stopped.

What a form can say of a tensor is in `algebra/terms`: a read has one digit for each axis, which counts upward; a join
concatenates pieces along one axis.
"""

from __future__ import annotations

from typing import Any

from ..nodes.arguments import aten

_DIAGONAL = "an axis that runs along two dimensions at once"
_MEMORY = "strides, which say where in memory an element is and not which one it is"
_PLACES = "positions that are known only at run time"
_SEVERAL = "pieces along several dimensions at once"
_COPIES = "elements that are read different numbers of times"

UNHANDLED: dict[Any, str] = {
    aten._conj.default: "an op that conjugates or negates",
    aten._conj_copy.default: "an op that conjugates or negates",
    aten._neg_view.default: "an op that conjugates or negates",
    aten._neg_view_copy.default: "an op that conjugates or negates",
    aten.as_strided.default: _MEMORY,
    aten.as_strided_copy.default: _MEMORY,
    aten.as_strided_scatter.default: _MEMORY,
    aten.block_diag.default: _SEVERAL,
    aten.col2im.default: _COPIES,
    aten.diag_embed.default: _DIAGONAL,
    aten.diagonal.default: _DIAGONAL,
    aten.diagonal_copy.default: _DIAGONAL,
    aten.diagonal_scatter.default: _DIAGONAL,
    aten.im2col.default: _COPIES,
    aten.index_add.default: _PLACES,
    aten.index_fill.int_Scalar: _PLACES,
    aten.index_fill.int_Tensor: _PLACES,
    aten.masked_scatter.default: _PLACES,
    aten.masked_select.default: _PLACES,
    aten.put.default: _PLACES,
    aten.reflection_pad1d.default: _COPIES,
    aten.reflection_pad2d.default: _COPIES,
    aten.reflection_pad3d.default: _COPIES,
    aten.repeat_interleave.Tensor: _PLACES,
    aten.replication_pad1d.default: _COPIES,
    aten.replication_pad2d.default: _COPIES,
    aten.replication_pad3d.default: _COPIES,
    aten.rot90.default: "indices that count downward",
    aten.scatter.reduce: _PLACES,
    aten.scatter.value: _PLACES,
    aten.scatter.value_reduce: _PLACES,
    aten.scatter_add.default: _PLACES,
    aten.scatter_reduce.two: _PLACES,
    aten.slice_inverse.default: "a gradient",
    aten.take.default: _PLACES,
    aten.tril.default: _DIAGONAL,
    aten.triu.default: _DIAGONAL,
    aten.upsample_nearest1d.default: _COPIES,
    aten.upsample_nearest2d.default: _COPIES,
    aten.upsample_nearest2d.vec: _COPIES,
    aten.upsample_nearest3d.default: _COPIES,
}
"""For each op, what it takes that no form can express."""
