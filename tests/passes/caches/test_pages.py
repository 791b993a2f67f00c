"""Caches in pages, however they are read: one op over the pool, nothing gathered. Near misses are gathered."""

import pytest
import torch
import torch.nn.functional as F

from mla_compile.passes.nodes.arguments import aten
from tests.errors import assert_as_close_as_eager
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run, value_of
from tests.passes.meaning import check_lookups

N, L, P, R, V = 4, 16, 12, 8, 10
PAGE_SIZE, LENGTH = 4, 10
PAGED = torch.ops.mla.paged_latent_attention.default
OPS = {"absorbed": PAGED, "chunked": torch.ops.mla.paged_expanded_attention.default}
"""The op of each path if keys are in pages."""
GATHERS = (aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.gather.default)


def attend(q, tokens, weight, mask=None, causal=False):
    """Naive MLA of queries `[B, N, Sq, P + R]` over tokens `[B, T, L + R]`."""
    latent, k_rope = tokens.split([L, R], dim=-1)
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return torch.ops.mla.sealed_attention(q, k, v, mask, 0.0, causal, None, False)


def inputs(batch=2, queries=1, page_size=PAGE_SIZE, dtype=torch.float32):
    """Queries, a pool of 9 pages, a table of 3 pages per sequence, one of them by a negative index, and the weight."""
    table = torch.tensor([[1, 5, 2], [8, -9, 3]])[:batch]
    pool = torch.randn(9, page_size, L + R)
    q, weight = torch.randn(batch, N, queries, P + R), torch.randn(N * (P + V), L) / L**0.5
    return q.to(dtype), pool.to(dtype), table, weight.to(dtype)


def forward(table):
    """The same pages without negative indices, for ops that do not take these."""
    return table.remainder(9)


def positions():
    return torch.arange(LENGTH)


def slots(table):
    return table[:, positions() // PAGE_SIZE] * PAGE_SIZE + positions() % PAGE_SIZE


READS = {
    "flattened": lambda pool, table: pool[table].flatten(1, 2),
    "viewed": lambda pool, table: pool[table].view(table.shape[0], -1, L + R),
    "the first keys": lambda pool, table: pool[table].flatten(1, 2)[:, :LENGTH],
    "the first entries": lambda pool, table: pool[table[:, :2]].flatten(1, 2)[:, :7],
    "position by position": lambda pool, table: pool[table[:, positions() // PAGE_SIZE], positions() % PAGE_SIZE],
    "slots": lambda pool, table: pool.flatten(0, 1)[slots(forward(table))],
    "slots by index_select": lambda pool, table: (
        pool.flatten(0, 1).index_select(0, slots(forward(table)).flatten()).view(table.shape[0], LENGTH, L + R)
    ),
    "index_select": lambda pool, table: pool.index_select(0, forward(table).flatten()).view(table.shape[0], -1, L + R),
    "embedding": lambda pool, table: F.embedding(forward(table), pool.flatten(1)).view(table.shape[0], -1, L + R),
    "a layer of many": lambda pool, table: torch.stack([pool, pool + 1])[1][table].flatten(1, 2),
}


def gathered_elements(module):
    """How many floating-point elements the gathers of a graph make."""
    gathers = [node.meta["val"] for node in module.graph.nodes if node.target in GATHERS]
    return sum(value.numel() for value in gathers if value.is_floating_point())


@pytest.mark.diagonal
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_keys_in_pages_are_read_there(read, path, batch):
    tensors = inputs(batch, queries=1 if path == "absorbed" else 9)
    module = capture(lambda q, pool, table, weight: attend(q, read(pool, table), weight), *tensors)
    eager = run(module, *tensors)
    exact = run(module, *(t.double() if t.is_floating_point() else t for t in tensors))
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    assert outcome.reason.endswith("reads the pages")
    assert [node.target for node in module.graph.nodes].count(OPS[path]) == 1
    assert gathered_elements(module) == 0
    assert_as_close_as_eager(run(module, *tensors), eager, exact)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_trace_says_of_a_lookup_is_what_it_reads(read):
    pool, table = inputs()[1:3]
    module = capture(read, pool, table)
    assert check_lookups(module, pool, table)


@pytest.mark.parametrize("path", OPS)
def test_a_causal_limit_that_ends_at_the_last_key_goes_with_the_pages(path):
    tensors = inputs(queries=3 * PAGE_SIZE, dtype=torch.float64)
    module = capture(lambda q, p, t, w: attend(q, p[t].flatten(1, 2), w, causal=True), *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, path)
    assert outcome.reason.endswith("reads the pages")
    check_right(eager, run(module, *tensors))


def test_chunks_are_laid_over_as_many_entries_as_there_are_keys():
    """A table has room for the longest possible sequence; the op gets only the entries that the keys at hand need."""
    q, pool, table, weight = inputs(queries=9)
    table = torch.cat([table, table.new_full((2, 90), -(2**30))], dim=1)
    tokens = torch.randn(2, LENGTH)

    def prefill(q, pool, table, weight, tokens):
        position = torch.arange(tokens.shape[1])
        return attend(q, pool[table[:, position // PAGE_SIZE], position % PAGE_SIZE], weight, causal=True)

    module = capture(prefill, q, pool, table, weight, tokens, symbolic=[(2,), (), (), (), (1,)])
    rewrite(module, "chunked")
    (node,) = [node for node in module.graph.nodes if node.target == OPS["chunked"]]
    for queries, length in ((9, LENGTH), (5, 5), (3, 12)):
        given = torch.randn(2, N, queries, P + R), pool, table, weight, torch.randn(2, length)
        exact = prefill(*(t.double() if t.is_floating_point() else t for t in given))
        assert_as_close_as_eager(run(module, *given), prefill(*given), exact)
        assert value_of(module, node.args[3], *given).shape == (2, -(-length // PAGE_SIZE))


def from_the_middle(pool, table):
    return pool[table].flatten(1, 2)[:, 2:]


def pages_of_each_sequence(pool, table):
    return torch.stack([pool, pool + 1])[torch.arange(2)[:, None], forward(table)].flatten(1, 2)


def rows_before_pages(pool, table):
    return pool[table].transpose(1, 2).reshape(table.shape[0], -1, L + R)


def scaled(pool, table):
    return pool[table].flatten(1, 2) * 0.5


def another_page_size(pool, table):
    return pool[table[:, positions() // 5], positions() % 4]


def rows_apart(pool, table):
    return pool[table[:, positions() // PAGE_SIZE], (positions() + 1) % PAGE_SIZE]


NEAR_MISSES = [from_the_middle, pages_of_each_sequence, rows_before_pages, scaled, another_page_size, rows_apart]


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", NEAR_MISSES)
def test_what_is_not_the_first_keys_of_one_pool_is_gathered(read, path):
    tensors = inputs(queries=1 if path == "absorbed" else 9, dtype=torch.float64)
    module = capture(lambda q, pool, table, weight: attend(q, read(pool, table), weight), *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, path)
    assert OPS[path] not in [node.target for node in module.graph.nodes]
    assert outcome.path == path
    check_right(eager, run(module, *tensors))


def test_rope_keys_of_another_table_are_gathered():
    q, pool, table, weight = inputs(dtype=torch.float64)

    def decode(q, pool, table, other, weight):
        tokens = torch.cat([pool[table][..., :L], pool[other][..., L:]], dim=-1).flatten(1, 2)
        return attend(q, tokens, weight)

    tensors = q, pool, table, table.flip(1), weight
    module = capture(decode, *tensors)
    eager = run(module, *tensors)
    rewrite(module)
    assert PAGED not in [node.target for node in module.graph.nodes]
    check_right(eager, run(module, *tensors))


def test_rope_keys_may_have_a_pool_of_their_own():
    q, pool, table, weight = inputs(dtype=torch.float64)

    def decode(q, latents, ropes, table, weight):
        latent, k_rope = latents[table].flatten(1, 2), ropes[table].flatten(1, 2)
        k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return torch.ops.mla.sealed_attention(q, k, v, None, 0.0, False, None, False)

    tensors = q, pool[..., :L].contiguous(), pool[..., L:].contiguous(), table, weight
    module = capture(decode, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module)
    assert outcome.reason.endswith("reads the pages")
    assert gathered_elements(module) == 0
    check_right(eager, run(module, *tensors))


SPARSE = torch.ops.mla.sparse_latent_attention.default
LIMITS = {
    "named": lambda named, s, t: named,
    "named and causal": lambda named, s, t: named & (torch.arange(t) <= torch.arange(s)[:, None] + t - s),
    "named, added": lambda named, s, t: torch.zeros(named.shape).masked_fill(~named, -torch.inf),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("read", ["flattened", "the first keys", "position by position", "slots"])
def test_keys_that_are_named_one_by_one_are_read_in_their_pages(read, limit, queries):
    tensors = inputs(queries=queries)
    length = READS[read](tensors[1], tensors[2]).shape[1]
    scores = torch.randn(2, queries, length)

    def function(q, pool, table, weight, scores):
        tokens = READS[read](pool, table)
        named = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(5).indices, True)[:, None]
        return attend(q, tokens, weight, limit(named, queries, length))

    tensors = (*tensors, scores)
    module = capture(function, *tensors)
    eager = run(module, *tensors)
    exact = run(module, *(t.double() if t.is_floating_point() else t for t in tensors))
    (outcome,) = rewrite(module, "sparse")
    assert outcome.path == "sparse"
    assert outcome.reason.endswith("reads the pages")
    assert [node.target for node in module.graph.nodes].count(SPARSE) == 1
    assert gathered_elements(module) == 0
    assert_as_close_as_eager(run(module, *tensors), eager, exact)
