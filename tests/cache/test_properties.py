"""Block tables over one pool against lists of numbers: after any operations, each sequence reads its own tokens."""

import contextlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mla_compile.cache import BlockTable, FP8PagePool, PagePool, stack
from mla_compile.cache.fixed_table import FixedTable
from mla_compile.errors import CacheMismatchError, FreedError, OutOfPagesError
from mla_compile.fp8 import quantised, quantised_by
from mla_compile.scales import scaled_up
from tests.drawn import UNHURRIED

LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE = 2, 2, 1, 14, 3


class Tables(RuleBasedStateMachine):
    """The pool beside `expected`: for each table the numbers of the tokens of each of its sequences."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool = self.new_pool()
        self.expected: dict[BlockTable, list[list[int]]] = {}
        self.freed: list[BlockTable] = []
        self.count = 0

    def new_pool(self):
        return PagePool(LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE)

    def kept(self, tokens, layer):
        """Tokens of a layer as the pool gives them back."""
        return tokens

    @rule(target=tables, batch=st.integers(1, 3))
    def start(self, batch):
        table = BlockTable(self.pool, batch)
        self.expected[table] = [[] for _ in range(batch)]
        return table

    @rule(target=tables, batch=st.integers(1, 2), width=st.integers(1, 3))
    def start_with_all_pages(self, batch, width):
        try:
            table = FixedTable(self.pool, batch, width)
        except OutOfPagesError:
            assert batch * width > self.pool.available
            return multiple()
        self.expected[table] = [[] for _ in range(batch)]
        return table

    @rule(table=tables, count=st.integers(0, 8))
    def append(self, table, count):
        if self.extended(table, count):
            numbers = torch.arange(self.count, self.count + table.batch * count).view(table.batch, count)
            self.count += table.batch * count
            for layer in range(LAYERS):
                table.write(layer, token(numbers, layer))
            for sequence, more in zip(self.expected[table], numbers.tolist(), strict=True):
                sequence += more

    def extended(self, table, count):
        """Whether there was room for more tokens."""
        if isinstance(table, FixedTable):
            if room := table.length + count <= table.room:
                table.extend(count)
            else:
                with pytest.raises(CacheMismatchError):
                    table.extend(count)
            return room
        new = PAGE_SIZE * -(-table.length // PAGE_SIZE)
        least = table.batch * max(0, -(-(table.length + count - new) // PAGE_SIZE))
        copies = table.batch if table.length % PAGE_SIZE else 0
        try:
            table.extend(count)
        except OutOfPagesError:
            assert least + copies > self.pool.available
            return False
        return True

    @rule(target=tables, table=tables, data=st.data())
    def fork(self, table, data):
        rows = data.draw(st.lists(st.integers(0, table.batch - 1), min_size=1, max_size=3))
        try:
            other = table.fork(torch.tensor(rows))
        except OutOfPagesError:
            assert isinstance(table, FixedTable)
            return multiple()
        self.expected[other] = [list(self.expected[table][row]) for row in rows]
        return other

    @rule(target=tables, table=consumes(tables), data=st.data())
    def select(self, table, data):
        batch = table.batch
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
        try:
            other = table.select(torch.tensor(rows))
        except OutOfPagesError:
            assert isinstance(table, FixedTable)
            assert len(rows) != batch
            return table
        with contextlib.suppress(OutOfPagesError):  # other forks may hold what was not freed
            other.own()
        sequences = self.expected.pop(table)
        self.expected[other] = [list(sequences[row]) for row in rows]
        if other is not table:
            self.freed.append(table)
        return other

    @rule(table=tables, data=st.data())
    def crop(self, table, data):
        length = data.draw(st.integers(0, table.length))
        try:
            table.crop(length)
        except OutOfPagesError:
            assert isinstance(table, FixedTable)
            return
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
                assert torch.equal(table.read(layer), self.kept(token(numbers, layer), layer))

    @invariant()
    def every_page_is_free_or_counted(self):
        held = [page for table in self.expected for page in table.pages[:, : table.used].flatten().tolist()]
        assert torch.equal(self.pool.references, torch.bincount(torch.tensor(held, dtype=torch.int64), minlength=PAGES))
        assert self.pool.available == PAGES - len(set(held))

    @invariant()
    def a_stack_reads_as_its_tables(self):
        if self.expected:
            pages, lengths = stack(list(self.expected))
            tokens = torch.cat(self.pool.keys(0, pages), dim=-1).flatten(1, 2) if int(lengths.min()) else None
            numbers = [sequence for sequences in self.expected.values() for sequence in sequences]
            assert lengths.tolist() == [len(sequence) for sequence in numbers]
            for row, sequence in enumerate(numbers if tokens is not None else []):
                assert torch.equal(tokens[row, : len(sequence)], self.kept(token(torch.tensor(sequence), 0), 0))

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


class FP8Tables(Tables):
    """Latents in FP8, a scale for each token; rope keys as they are."""

    def new_pool(self):
        return FP8PagePool(LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE)

    def kept(self, tokens, layer):
        latent, k_rope = tokens.split([LATENT, ROPE], dim=-1)
        return torch.cat([scaled_up(*quantised(latent), tokens.dtype), k_rope], dim=-1)


class ScaledTables(Tables):
    """Latents and rope keys in FP8, one scale for all tokens of a layer."""

    SCALES = torch.tensor([7.0, 5.0])

    def new_pool(self):
        return FP8PagePool(LAYERS, LATENT, ROPE, PAGES, PAGE_SIZE, scale=self.SCALES)

    def kept(self, tokens, layer):
        scale = self.SCALES[layer : layer + 1]
        return scaled_up(quantised_by(tokens, scale), scale, tokens.dtype)


def few(examples):
    return settings(
        UNHURRIED,
        derandomize=True,
        max_examples=examples,
        stateful_step_count=20,
    )


Tables.TestCase.settings = few(60)
FP8Tables.TestCase.settings = ScaledTables.TestCase.settings = few(20)
TestTables, TestFP8Tables, TestScaledTables = Tables.TestCase, FP8Tables.TestCase, ScaledTables.TestCase
