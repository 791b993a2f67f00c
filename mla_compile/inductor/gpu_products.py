"""Lower `mla::per_head_matmul` on a GPU to a library product that Inductor calls, without calling the op.

`aten.bmm` returns `[N, B * Sq, O]`, contiguous, and `[B, Sq, N, O]` would be a copy of it: one more launch unless there
is a single query of a single sequence. But the library writes to any strides, so it writes to the transposed result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import fx
from torch._inductor import ir, lowering
from torch._inductor.kernel.bmm import aten_bmm

from ..ops import per_head_matmul

_OP = per_head_matmul.default


@contextlib.contextmanager
def products_of(graph: fx.Graph) -> Iterator[None]:
    """A context in which this graph is compiled with that lowering, if all its products are on a GPU."""
    nodes = graph.find_nodes(op="call_function", target=_OP)
    own = {_OP: _lower} if nodes and all(node.meta["val"].is_cuda for node in nodes) else {}
    with mock.patch.dict(lowering.lowerings, own):
        yield


def _lower(x: Any, weight: Any) -> Any:
    """Args: x `[B, Sq, N, I]`, weight `[N, I, O]`. Returns: `[B, Sq, N, O]`, contiguous."""
    batch, queries, heads, width = x.get_size()
    columns = weight.get_size()[2]
    rows = lowering.permute(lowering.view(x, [batch * queries, heads, width]), [1, 0, 2])
    size, stride = [heads, batch * queries, columns], [columns, heads * columns, 1]
    layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size, stride)
    operands = [ir.ExternKernel.realize_input(operand) for operand in (rows, weight)]
    product = aten_bmm.bind(operands, layout).output_node()
    return lowering.view(lowering.permute(product, [1, 0, 2]), [batch, queries, heads, columns])
