"""What a rewrite keeps of the old graph; `golden` has the rewritten graphs, line by line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import UNKNOWN, L, N, P, R, T, V


def attention(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor, mask: Tensor) -> Tensor:
    """Queries have heads after tokens; everything else is as in DeepSeek's code."""
    k_nope, v = mla.up_projected(latent, w_kv)
    return mla.sealed(q.transpose(1, 2), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v, mask)


def tensors() -> tuple[Tensor, ...]:
    _, latent, k_rope, _, w_kv = mla.tensors()
    q = torch.randn(mla.B, mla.SQ, N, P + R, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return q, latent, k_rope, w_kv, torch.ones(mla.SQ, T, dtype=torch.bool).tril(8)


@pytest.mark.parametrize("symbolic", [(), UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_the_new_output_has_the_shape_and_dtype_of_the_old(path: str, symbolic: list[tuple[int, ...]]) -> None:
    module = capture(attention, *tensors(), symbolic=symbolic)
    old = module.graph.output_node().args[0].meta["val"]
    rewrite(module, path)
    new = module.graph.output_node().args[0].meta["val"]
    assert new.dtype == old.dtype
    assert all(bool(a == b) for a, b in zip(new.shape, old.shape, strict=True))


def test_new_nodes_say_where_the_old_one_came_from() -> None:
    module = capture(attention, *tensors())
    (old,) = module.graph.find_nodes(op="call_function", target=torch.ops.mla.sealed_attention.default)
    old.meta["stack_trace"] = 'File "/model.py", line 7, in forward\n    o = F.scaled_dot_product_attention(q, k, v)'
    (outcome,) = rewrite(module)
    assert (outcome.location, outcome.code) == ("/model.py:7", "o = F.scaled_dot_product_attention(q, k, v)")
    (new,) = module.graph.find_nodes(op="call_function", target=torch.ops.mla.latent_attention.default)
    assert new.meta["stack_trace"] == old.meta["stack_trace"]


def test_an_outcome_names_the_sizes_of_its_site() -> None:
    (outcome,) = rewrite(capture(attention, *tensors()))
    sizes = {"B": 2, "Sq": 3, "T": 11, "N": 5, "L": 7, "P": 4, "R": 2, "V": 6}
    assert outcome.shapes == {name: str(size) for name, size in sizes.items()}
    assert outcome.rewritten


def test_a_view_that_needed_no_copy_before_may_need_one_after() -> None:
    """SDPA's output has heads before tokens in memory, that of the rewritten site tokens before heads."""

    def merged(*args: Tensor) -> Tensor:
        o = attention(*args)
        return o.transpose(1, 2).contiguous().view(mla.B, mla.SQ, N * V) + o.contiguous().view(-1).sum()

    module = capture(merged, *tensors())
    before = run(module, *tensors())
    rewrite(module)
    torch.testing.assert_close(run(module, *tensors()), before, rtol=0, atol=1e-12)


def test_a_dtype_of_its_own_of_the_latent_is_that_of_the_arithmetic() -> None:
    """A float32 latent whose keys are cast to the queries' bfloat16: the op runs in float32, the result is bfloat16."""

    def cast(q: Tensor, latent: Tensor, k_rope: Tensor, w_kv: Tensor) -> Tensor:
        k_nope, v = (part.bfloat16() for part in mla.up_projected(latent, w_kv))
        return mla.sealed(q.transpose(1, 2), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)

    q, latent, k_rope, w_kv, _ = tensors()
    inputs = q.bfloat16(), latent.float(), k_rope.bfloat16(), w_kv.float()
    module = capture(cast, *inputs)
    before = run(module, *inputs).double()
    exact = run(
        capture(attention, *(t.double() for t in inputs), torch.ones(1, 1) > 0),
        *(t.double() for t in inputs),
        torch.ones(1, 1) > 0,
    )
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    after = run(module, *inputs)
    assert after.dtype == torch.bfloat16
    assert (after.double() - exact).abs().max() <= (before - exact).abs().max()


def test_sizes_that_only_a_merged_dimension_tells_are_found_elsewhere() -> None:
    """Batch and tokens both symbolic: the queries are read from a product over their merged dimension."""
    module = capture(mla.combined, *mla.tensors(), symbolic=UNKNOWN)
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    assert [size for name, size in outcome.shapes.items() if name in ("N", "L", "P", "R", "V")] == [
        str(size) for size in (N, L, P, V, R)
    ]
    smaller = [t[:1] if t.dim() == 3 else t for t in mla.tensors()]
    fewer = [smaller[0].repeat(3, 1, 1)[:, :2], *(t[:, :7].repeat(3, 1, 1) for t in smaller[1:3]), *smaller[3:]]
    torch.testing.assert_close(run(module, *fewer), mla.combined(*fewer), rtol=0, atol=1e-13)
