"""The keys of sequences of unequal lengths are shared out evenly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.parts import combination, number_of_pieces, shared_out
from mla_compile.kernels._common.tiles import choose
from tests.drawn import UNHURRIED

from .pieces import makespan, pieces

H200 = Machine("sm_90", 132)
LENGTHS = {
    "equal": [4096] * 64,
    "equal, more than fit": [4096] * 200,
    "equal, long": [131072] * 3,
    "one long among short": [131072] + [2048] * 63,
    "one short among long": [16] + [65536] * 15,
    "random": [random.Random(1).randrange(1, 8192) for _ in range(128)],
    "skewed": [int(2 ** random.Random(2 + i).uniform(4, 17)) for i in range(64)],
    "many short": [random.Random(3 + i).randrange(1, 600) for i in range(2000)],
}
TILES = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_no_processor_works_much_longer_than_all_on_average(lengths, heads, queries):
    rows = heads * queries
    tiles = choose(H200, rows, 512, 64, 2, fp8=False)
    row_tiles = -(-rows // tiles.rows)
    row_keys = tiles.rows * (1152 + 2048) / 1152
    work = shared_out(len(lengths), rows, row_tiles, H200.processors, row_keys / tiles.keys)
    counts = [-(-length // tiles.keys) for length in lengths]
    waves = -(-work.programs // H200.processors)
    on_average = (sum(counts) + work.own * len(lengths)) * row_tiles / H200.processors
    assert waves * makespan(counts, work.parts, work.own) <= 1.15 * on_average


@UNHURRIED
@given(tiles=TILES, parts=st.integers(1, 20), own=st.integers(1, 4))
def test_every_tile_of_keys_is_taken_once(tiles, parts, own):
    taken = [[0] * count for count in tiles]
    for piece in pieces(tiles, parts, own):
        for b, begin, end in piece:
            for place in range(begin, end):
                taken[b][place] += 1
    assert all(number == 1 for counts in taken for number in counts)
    seen = [b for piece in pieces(tiles, parts, own) for b, _, _ in piece]
    assert set(seen) == set(range(len(tiles)))  # those without keys too
    assert all(seen.count(b) == 1 for b, count in enumerate(tiles) if count == 0)


@UNHURRIED
@given(tiles=TILES, parts=st.integers(1, 20), own=st.integers(1, 4))
def test_what_is_cut_has_a_slot_for_each_part(tiles, parts, own):
    """A program begins at most one sequence that another continues, and continues at most one."""
    for piece in pieces(tiles, parts, own):
        assert sum(begin > 0 for _, begin, _ in piece) <= 1
        assert sum(begin == 0 and end < tiles[b] for b, begin, end in piece) <= 1


@UNHURRIED
@given(tiles=TILES, parts=st.integers(1, 20), own=st.integers(1, 4))
def test_no_program_takes_longer_than_its_piece_and_one_sequence_more(tiles, parts, own):
    least = max(-(-(sum(tiles) + own * len(tiles)) // parts), 4)
    assert makespan(tiles, parts, own) <= least + own


def test_sequences_that_each_fit_a_program_are_not_cut():
    assert pieces([8, 0, 9, 8, 9], 6, 4) == [[(0, 0, 8)], [(1, 0, 0)], [(2, 0, 9)], [(3, 0, 8)], [(4, 0, 9)], []]


@pytest.mark.parametrize("tiles", [1, 2, 5, 8, 34, 66, 100, 132, 150, 264])
def test_pieces_leave_few_processors_without_a_program(tiles):
    programs = number_of_pieces(tiles, 132) * tiles
    assert -(-programs // 132) * 132 <= 1.3 * programs


@pytest.mark.parametrize("batch", [1, 8, 64, 500])
@pytest.mark.parametrize("rows", [16, 128, 512])
def test_combining_has_programs_for_all_processors_and_not_many_more(batch, rows):
    work = shared_out(batch, rows, -(-rows // 64), 132, 3)
    shape = combination(work, rows, 512, 132)
    programs = work.combined * -(-rows // shape["ROWS"]) * shape["SPREAD"]
    least = max(4 * 132, work.combined * rows / 4)
    assert min(work.combined * rows * 4, 132) / 2 <= programs <= least
    assert 512 % (shape["COLUMNS"] * shape["SPREAD"]) == 0


@pytest.mark.parametrize(("batch", "parts"), [(1, 64), (8, 32), (64, 4)])
def test_combining_loads_as_many_parts_at_a_time_as_there_are(batch, parts):
    work = shared_out(batch, 16, 1, 132, 1)
    shape = combination(work, 16, 512, 132)
    assert shape["PARTS"] == parts
    assert shape["PARTS"] * shape["ROWS"] * shape["COLUMNS"] <= 4096
