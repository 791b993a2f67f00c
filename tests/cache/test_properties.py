"""Block tables over one pool against lists of numbers: done in any order, each sequence reads its own."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mla_compile.cache import BlockTable, PagePool, stack
from mla_compile.errors import FreedError, OutOfPagesError

LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE = 2, 2, 1, 14, 3


class Tables(RuleBasedStateMachine):
    """The pool beside `expected`: for each table the numbers of the tokens of each of its sequences."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE)
        self.expected: dict[BlockTable, list[list[int]]] = {}
        self.freed: list[BlockTable] = []
        self.count = 0

    @rule(target=tables, batch=st.integers(1, 3))
    def start(self, batch):
        table = BlockTable(self.pool, batch)
        self.expected[table] = [[] for _ in range(batch)]
        return table

    @rule(table=tables, count=st.integers(0, 8))
    def append(self, table, count):
        new = PAGE_SIZE * -(-table.length // PAGE_SIZE)
        least = table.batch * max(0, -(-(table.length + count - new) // PAGE_SIZE))
        copies = table.batch if table.length % PAGE_SIZE else 0
        try:
            table.extend(count)
        except OutOfPagesError:
            assert least + copies > self.pool.available
            return
        numbers = torch.arange(self.count, self.count + table.batch * count).view(table.batch, count)
        self.count += table.batch * count
        for layer in range(LAYERS):
            table.write(layer, token(numbers, layer))
        for sequence, more in zip(self.expected[table], numbers.tolist(), strict=True):
            sequence += more

    @rule(target=tables, table=tables, data=st.data())
    def fork(self, table, data):
        rows = data.draw(st.lists(st.integers(0, table.batch - 1), min_size=1, max_size=3))
        other = table.fork(torch.tensor(rows))
        self.expected[other] = [list(self.expected[table][row]) for row in rows]
        return other

    @rule(target=tables, table=consumes(tables), data=st.data())
    def reorder(self, table, data):
        rows = data.draw(st.lists(st.integers(0, table.batch - 1), min_size=table.batch, max_size=table.batch))
        other = table.fork(torch.tensor(rows))
        table.free()
        other.own()  # as many pages were dropped as are copied
        sequences = self.expected.pop(table)
        self.expected[other] = [list(sequences[row]) for row in rows]
        return other

    @rule(table=tables, data=st.data())
    def crop(self, table, data):
        length = data.draw(st.integers(0, table.length))
        table.crop(length)
        for sequence in self.expected[table]:
            del sequence[length:]

    @rule(target=tables, table=consumes(tables))
    def free(self, table):
        table.free()
        del self.expected[table]
        self.freed.append(table)
        return multiple()

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for table, sequences in self.expected.items():
            numbers = torch.tensor(sequences, dtype=torch.int64).view(table.batch, table.length)
            for layer in range(LAYERS):
                assert torch.equal(table.read(layer), token(numbers, layer))

    @invariant()
    def every_page_is_free_or_counted(self):
        held = [page for table in self.expected for page in table.pages[:, : table.used].flatten().tolist()]
        assert torch.equal(self.pool.references, torch.bincount(torch.tensor(held, dtype=torch.int64), minlength=PAGES))
        assert self.pool.available == PAGES - len(set(held))

    @invariant()
    def a_stack_reads_as_its_tables(self):
        if self.expected:
            pages, lengths = stack(list(self.expected))
            tokens = self.pool.layers[0][pages].flatten(1, 2) if int(lengths.min()) else None
            numbers = [sequence for sequences in self.expected.values() for sequence in sequences]
            assert lengths.tolist() == [len(sequence) for sequence in numbers]
            for row, sequence in enumerate(numbers if tokens is not None else []):
                assert torch.equal(tokens[row, : len(sequence)], token(torch.tensor(sequence), 0))

    @invariant()
    def what_was_freed_is_refused(self):
        for table in self.freed:
            with pytest.raises(FreedError):
                table.read(0)
            with pytest.raises(FreedError):
                table.extend(1)


def token(numbers, layer):
    """The token `[..., L + R]` of a number, another one in each layer."""
    return (numbers[..., None] * 10 + torch.arange(LATENT + ROPE) + 1000 * layer).float()


Tables.TestCase.settings = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTables = Tables.TestCase
