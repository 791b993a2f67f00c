"""Quotients of positions on a CPU: Inductor's code for loops that it splits leaves out what remains of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen.cpp import CppScheduling

import mla_compile
from mla_compile.cache import BlockTable
from mla_compile.inductor.loop_splits import split_loops_evenly
from tests.compile.test_fp8_pages import L, N, P, R, V, attend

PAGE_SIZE, TOKENS, QUERIES = 16, 37, 19
BLOCKS = -(-TOKENS // PAGE_SIZE)


def compiled(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """What a function returns when compiled, by memory that held NaN before."""
    result = torch.compile(function, backend="mla", fullgraph=True)(*given)
    del result
    torch.compiler.reset()
    poison = [torch.full((size,), torch.nan) for size in (TOKENS, TOKENS * QUERIES) for _ in range(64)]
    del poison
    return torch.compile(function, backend="mla", fullgraph=True)(*given)


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "repeated": lambda x: x[:BLOCKS].repeat_interleave(PAGE_SIZE)[:TOKENS] * 2,
    "expanded": lambda x: x[:BLOCKS, None].expand(-1, PAGE_SIZE).flatten()[:TOKENS] * 2,
    "divided": lambda x: x[0] * (torch.arange(TOKENS) // PAGE_SIZE),
    "divided by a tensor": lambda x: x[0] * (torch.arange(TOKENS) // torch.tensor(PAGE_SIZE)),
    "divided after a sum": lambda x: x[0] * ((torch.ones(TOKENS, dtype=torch.int64).cumsum(0) - 1) // PAGE_SIZE),
    "of a whole number of blocks": lambda x: x[0] * (torch.arange(3 * PAGE_SIZE) // PAGE_SIZE),
}


@pytest.mark.parametrize("function", REPEATED.values(), ids=REPEATED)
def test_a_loop_is_computed_to_its_end(function):
    x = torch.randn(64)
    torch.testing.assert_close(compiled(function, x), function(x))


def test_a_loop_of_whole_steps_is_still_split():
    split_loops_evenly()
    split, kept = CppScheduling.try_loop_split, list[bool]()

    def seen(self, nodes):
        before = [node._body for node in nodes]
        after = split(self, nodes)
        kept.append(all(node._body is body for node, body in zip(after, before, strict=True)))
        return after

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CppScheduling, "try_loop_split", seen)
        for tokens in (3 * PAGE_SIZE, TOKENS):
            torch.compile(lambda x, t=tokens: x[:BLOCKS].repeat_interleave(PAGE_SIZE)[:t] * 2)(torch.randn(64))
    assert kept == [False, True]


def blocks() -> Tensor:
    """Causal over blocks."""
    whole = torch.ones(BLOCKS, BLOCKS, dtype=torch.bool).tril().repeat_interleave(PAGE_SIZE, 1)[:, :TOKENS]
    return whole.repeat_interleave(PAGE_SIZE, 0)[TOKENS - QUERIES : TOKENS]


def bias() -> Tensor:
    return ((torch.arange(TOKENS) // PAGE_SIZE) * 0.3).expand(QUERIES, TOKENS)


def of_a_buffer() -> Tensor:
    return torch.linspace(1, -1, 9).exp()[torch.arange(TOKENS) // PAGE_SIZE].expand(QUERIES, TOKENS)


@pytest.mark.parametrize(
    "gradients", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "training"]
)
@pytest.mark.parametrize("mask", [blocks, bias, of_a_buffer])
def test_masks_of_blocks(mask, gradients):
    def step(q: Tensor, w: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        k_nope, v = (latent @ w).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask())

    shapes = (2, N, QUERIES, P + R), (L, N * (P + V)), (2, TOKENS, L), (2, TOKENS, R)
    given = [torch.randn(shape).div(L**0.25).requires_grad_(gradients) for shape in shapes]
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(compiled(step, *given), step(*given))
    assert mla_compile.last_report().rewritten == 1


def test_keys_by_their_slots_in_pages():
    def step(q: Tensor, w: Tensor, pages: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(TOKENS)
        latent, k_rope = pages.flatten(0, 1)[table[:, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE].split([L, R], -1)
        k_nope, v = (latent @ w).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    shapes = (2, N, 1, P + R), (L, N * (P + V)), (9, PAGE_SIZE, L + R)
    given = [*(torch.randn(shape) / L**0.25 for shape in shapes), torch.randperm(9)[:6].view(2, 3)]
    torch.testing.assert_close(compiled(step, *given), step(*given))
    assert mla_compile.last_report().rewritten == 1


def test_a_prompt_that_ends_within_a_page_is_written_and_read_whole():
    """Stock Inductor fails at an index that it never computed, or leaves tokens out."""

    def run(compile) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        pool = mla_compile.PagePool(1, L, R, pages=64, page_size=PAGE_SIZE)
        table = BlockTable(pool, 2)
        q, weight = torch.randn(2, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
        tokens = torch.randn(2, TOKENS, L + R)

        def prompt(q: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
            table.extend(TOKENS)
            table.write(0, tokens)
            return attend(q, *table.keys(0), weight, table.lengths)

        with torch.no_grad():
            output = compile(prompt)(q, weight, tokens)
        assert torch.equal(table.read(0), tokens)
        return output, table.pages

    output, pages = run(lambda function: torch.compile(function, backend="mla", fullgraph=True))
    assert mla_compile.last_report().rewritten == 1
    eager, own = run(lambda function: function)
    torch.testing.assert_close(output, eager)
    assert torch.equal(pages, own)
