"""What writes to a view as another dtype writes to the tensor itself, so that a loop gets no view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

import mla_compile
from tests.errors import assert_as_close_as_eager

from .test_loop_operands import loop, straightened, while_loop

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")

Write = Callable[[Tensor, Tensor, Tensor], Tensor]
GIVEN = (
    torch.arange(-6, 6, dtype=torch.int8).view(3, 4),
    torch.tensor([2, 0]),
    torch.tensor([[-3], [5]], dtype=torch.int8),
)
WRITES: dict[str, Write] = {
    "index_put": lambda x, at, new: x.index_put((at,), new),
    "index_copy": lambda x, at, new: x.index_copy(0, at, new.expand(2, 4)),
    "scatter": lambda x, at, new: x.scatter(0, at[:, None].expand(2, 4), new.expand(2, 4).contiguous()),
    "slice": lambda x, at, new: torch.slice_scatter(x, new.expand(2, 4), 0, 1, 3),
    "select": lambda x, at, new: torch.select_scatter(x, new[0].expand(4), 0, 1),
    "one after the other": lambda x, at, new: x.index_put((at,), new).index_put((at + 0,), new + 1),
}


def written(write: Write, pages: Tensor, at: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    """Codes are written as bytes, and a loop reads them as codes."""
    return loop(write(pages.view(torch.uint8).detach(), at, new.view(torch.uint8)).detach().view(torch.int8))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_bytes_are_written_as_codes(write: Write) -> None:
    module = straightened(lambda *given: written(write, *given), *GIVEN)
    (node,) = module.graph.find_nodes(op="call_function", target=while_loop)
    (operand,) = node.args[3]
    while operand.op != "placeholder":
        assert operand.meta["val"].dtype == torch.int8, operand
        operand = operand.args[0]
    assert torch.equal(module(*GIVEN)[1], written(write, *GIVEN)[1])


OTHERS: dict[str, Write] = {
    "added to": lambda x, at, new: x.index_put((at,), new, accumulate=True),
    "halves of codes": lambda x, at, new: x.view(torch.int16).index_put((at,), new[:1].short()).view(x.dtype),
}


@pytest.mark.parametrize("write", OTHERS.values(), ids=OTHERS)
def test_what_is_another_number_in_another_dtype_stays(write: Write) -> None:
    module = straightened(lambda *given: written(write, *given), *GIVEN)
    (put,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    assert put.meta["val"].dtype != torch.int8
    assert torch.equal(module(*GIVEN)[1], written(write, *GIVEN)[1])


N, L, R, P, HIDDEN, SIZE = 4, 32, 8, 16, 64, 4


class Pages(nn.Module):
    """FP8 pages that the program writes as bytes, as torch has few ops for FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv_a = nn.Linear(HIDDEN, N * (P + R)), nn.Linear(HIDDEN, L + R)
        self.kv_b = nn.Linear(L, N * 2 * P, bias=False)
        self.register_buffer("pages", torch.zeros(20, SIZE, L, dtype=torch.float8_e4m3fn))
        self.register_buffer("ropes", torch.zeros(20, SIZE, R))

    def forward(self, x: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        place = lengths[:, None] + torch.arange(x.shape[1])
        at = table.gather(1, torch.div(place, SIZE, rounding_mode="floor")), place % SIZE
        latent, k_rope = self.kv_a(x).split([L, R], dim=-1)
        self.pages.view(torch.uint8)[at] = latent.to(torch.float8_e4m3fn).view(torch.uint8)
        self.ropes[at] = k_rope
        latent = self.pages.view(torch.uint8)[table].view(torch.float8_e4m3fn).to(x.dtype).flatten(1, 2)
        k_nope, v = self.kv_b(latent).unflatten(2, (N, -1)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k_nope, self.ropes[table].flatten(1, 2)[:, None].expand(-1, N, -1, -1)], dim=-1)
        q = self.q(x).unflatten(2, (N, -1)).transpose(1, 2)
        seen = torch.arange(k.shape[2]) <= place[:, None, :, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.slow
def test_a_package_reads_what_it_wrote(tmp_path) -> None:
    module = Pages().eval()
    example = torch.randn(2, 3, HIDDEN), torch.arange(12).view(2, 6), torch.tensor([3, 4])
    dims = {1: Dim("Sq", min=1, max=16)}, {1: Dim("pages", min=2, max=8)}, {}
    with torch.no_grad():
        program = mla_compile.rewrite(
            torch.export.export(module, example, dynamic_shapes=dims), options={"mla.path": "chunked"}
        )
        assert mla_compile.last_report().rewritten == 1
        package = torch._inductor.aoti_compile_and_package(
            mla_compile.lower(program), package_path=str(tmp_path / "pages.pt2")
        )
        run = torch._inductor.aoti_load_package(package)
        x, table = torch.randn(2, 16, HIDDEN), torch.arange(16).view(2, 8)
        for start in (0, 0, 7):
            given = x, table, torch.tensor([start, 1 + start])
            found, eager = run(*given), module(*given)
            assert_as_close_as_eager(found, eager, eager.double())
