"""Masks that hide all but the first keys of a sequence reach ops over pages as lengths; any other stays a mask."""

import math

import pytest
import torch

from tests.errors import assert_as_close_as_eager
from tests.passes.caches.test_pages import OPS, PAGE_SIZE, attend, gathered_elements, inputs
from tests.passes.graphs import capture, rewrite, run, value_of

T = 3 * PAGE_SIZE
LENGTHS = ([7, 2], [0, T], [-3, T + 5], [1, 1])


def keys():
    return torch.arange(T)


def rows(queries):
    return torch.arange(queries)[:, None]


def of_each(lengths):
    return lengths[:, None, None, None]


# The mask for lengths `[B]` and Sq queries; the number of keys of each sequence; whether there is a causal limit.
SPELLINGS = {
    "before the length": (lambda n, q: keys() < of_each(n), lambda n, q: n, False),
    "up to a position": (lambda n, q: keys() <= of_each(n), lambda n, q: n + 1, False),
    "the length is greater": (lambda n, q: of_each(n) > keys(), lambda n, q: n, False),
    "not behind": (lambda n, q: ~(keys() >= of_each(n)), lambda n, q: n, False),
    "int32": (lambda n, q: torch.arange(T, dtype=torch.int32) < of_each(n.int()), lambda n, q: n, False),
    "one token more": (lambda n, q: keys() < of_each(n) + 1, lambda n, q: n + 1, False),
    "a sum of two": (lambda n, q: keys() < of_each(n + n), lambda n, q: n + n, False),
    "two lengths": (lambda n, q: (keys() < of_each(n)) & (keys() < 5), lambda n, q: n.clamp(max=5), False),
    "a bias": (
        lambda n, q: torch.zeros(2, 1, q, T).masked_fill(keys() >= of_each(n), -math.inf),
        lambda n, q: n,
        False,
    ),
    "causal": (lambda n, q: keys() <= of_each(n) + rows(q), lambda n, q: n + q, True),
    "causal up to the length": (lambda n, q: keys() <= of_each(n) - q + rows(q), lambda n, q: n, True),
    "causal and a length": (
        lambda n, q: (keys() <= of_each(n) + rows(q)) & (keys() < of_each(n) + 1),
        lambda n, q: n + 1,
        True,
    ),
    "causal at a place": (
        lambda n, q: (keys() <= rows(q) + 6) & (keys() < of_each(n)),
        lambda n, q: n.clamp(max=6 + q),
        True,
    ),
}


def arguments(module):
    """Arguments of the one paged op: lengths, whether causal, mask, first positions; each is a node or a constant."""
    (paged,) = [node for node in module.graph.nodes if node.target in OPS.values()]
    names = [argument.name for argument in paged.target._schema.arguments]
    given = dict(zip(names, paged.args, strict=False)) | paged.kwargs
    return given["seq_lens"], given["causal"], given.get("mask"), given.get("first_positions")


def compiled(mask, queries, *lengths, path="absorbed"):
    """The graph after the passes, its inputs without the lengths, and its outcome.

    Asserts that it is right for all `lengths`, and that nothing is gathered.
    """
    tensors = (*inputs(queries=queries), torch.tensor(lengths[0]))

    def decode(q, pool, table, weight, lengths):
        return attend(q, pool[table].flatten(1, 2), weight, mask=mask(lengths, queries))

    module = capture(decode, *tensors)
    (outcome,) = rewrite(module, path)
    assert outcome.reason.endswith("reads the pages")
    assert gathered_elements(module) == 0
    for each in lengths:
        given = (*tensors[:-1], torch.tensor(each))
        exact = decode(*(t.double() if t.is_floating_point() else t for t in given))
        assert_as_close_as_eager(run(module, *given), decode(*given), exact)
    return module, tensors[:-1], outcome


@pytest.mark.diagonal
@pytest.mark.parametrize(("queries", "path"), [(1, "absorbed"), (3, "absorbed"), (3, "chunked")])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_lengths_reach_the_op(spelling, queries, path):
    mask, counts, causal = spelling
    module, tensors, _ = compiled(mask, queries, *LENGTHS, path=path)
    seq_lens, is_causal, tensor, first = arguments(module)
    assert tensor is None
    assert is_causal == (causal and queries > 1)
    assert (first is not None) == is_causal
    for lengths in map(torch.tensor, LENGTHS):
        expected = counts(lengths, queries).clamp(0, T)
        assert value_of(module, seq_lens, *tensors, lengths).tolist() == expected.tolist()


@pytest.mark.parametrize("path", OPS)
def test_a_number_of_tokens_that_is_a_symbol(path):
    tensors = (*inputs(queries=4), torch.tensor([7, 2]))

    def decode(q, pool, table, weight, lengths):
        seen = torch.arange(table.shape[1] * PAGE_SIZE) <= of_each(lengths) + rows(q.shape[2])
        return attend(q, pool[table].flatten(1, 2), weight, mask=seen)

    module = capture(decode, *tensors, symbolic=[(2,), (), (1,)])
    rewrite(module, path)
    assert arguments(module)[2] is None
    for pages, queries in ((3, 3), (2, 5)):
        q, pool, table, weight, lengths = *inputs(queries=queries), torch.tensor([1, 2])
        given = q, pool, table[:, :pages], weight, lengths
        exact = decode(*(t.double() if t.is_floating_point() else t for t in given))
        assert_as_close_as_eager(run(module, *given), decode(*given), exact)


NEAR_MISSES = {
    "other lengths for each query": lambda n, q: keys() < of_each(n) + 2 * rows(q),
    "backwards": lambda n, q: keys() <= of_each(n) - rows(q),
    "a window": lambda n, q: (keys() <= of_each(n) + rows(q)) & (keys() > of_each(n) + rows(q) - 3),
    "from a length on": lambda n, q: keys() >= of_each(n) - 1,
    "every other key": lambda n, q: keys() * 2 < of_each(n),
    "but for one key": lambda n, q: (keys() < of_each(n)) & (keys() != 1),
    "either of two": lambda n, q: (keys() < of_each(n)) | (keys() < 2),
    "a table of keys": lambda n, q: (keys() < of_each(n)) & (torch.arange(2 * T).view(2, 1, 1, T) % 3 != 0),
    "lengths of the heads": lambda n, q: keys() < torch.arange(1, 5)[:, None, None] + of_each(n),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("mask", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_no_number_of_keys_stays_a_mask(mask, path):
    module, _, _ = compiled(mask, 3, [7, 3], path=path)
    assert arguments(module)[2] is not None


@pytest.mark.parametrize("path", OPS)
def test_a_finite_number_stays_a_mask(path):
    """A query whose keys are all hidden by a finite number attends to all of them alike, which no length can say."""

    def mask(lengths, queries):
        return torch.zeros(2, 1, queries, T).masked_fill(keys() >= of_each(lengths), torch.finfo(torch.float32).min)

    module, _, _ = compiled(mask, 2, [0, 3], path=path)
    assert arguments(module)[2] is not None


def test_lengths_in_another_order():
    module, given, _ = compiled(lambda n, q: keys() < of_each(n.flip(0)), 1, [7, 2])
    assert value_of(module, arguments(module)[0], *given, torch.tensor([7, 2])).tolist() == [2, 7]


def test_one_length_for_all_sequences():
    module, given, _ = compiled(lambda n, q: (keys() < n[1])[None], 1, [7, 2])
    assert value_of(module, arguments(module)[0], *given, torch.tensor([7, 2])).tolist() == [2, 2]


@pytest.mark.parametrize("queries", [1, 3])
def test_one_sequence_and_a_length_that_is_a_number(queries):
    q, pool, table, weight = inputs(batch=1, queries=queries)

    def decode(q, pool, table, weight, length):
        seen = keys() <= length + rows(queries)
        return attend(q, pool[table].flatten(1, 2), weight, mask=seen)

    module = capture(decode, q, pool, table, weight, torch.tensor(6))
    rewrite(module)
    assert arguments(module)[2] is None
    for length in (-1, 0, 6, 11):
        given = q, pool, table, weight, torch.tensor(length)
        exact = decode(*(t.double() if t.is_floating_point() else t for t in given))
        assert_as_close_as_eager(run(module, *given), decode(*given), exact)


@pytest.mark.parametrize("offset", [-2, 0, 5, T - 3, T])
def test_a_causal_limit_anywhere(offset):
    module, _, outcome = compiled(lambda n, q: keys() <= rows(q) + offset, 3, [1, 1])
    assert outcome.mask == ("causal" if offset < T else "none")
    assert arguments(module)[2] is None
