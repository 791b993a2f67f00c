"""The number of parts into which keys are cut, and the choice of tiles."""

import pytest
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.parts import number_of_parts, number_of_pieces
from mla_compile.kernels._common.tiles import choose, columns, family

H200 = Machine("sm_90", 132)
ROW_KEYS = 64 * (1152 + 2048) / 1152  # the cost of the partial result of 64 rows


def parts(programs, keys, processors=132):
    return number_of_parts(programs, keys, 64, processors, ROW_KEYS)


def test_one_long_sequence_fills_the_machine():
    assert parts(1, 131072) >= 132
    assert 2 * parts(2, 131072) >= 132


def test_a_large_batch_pays_for_no_merge():
    assert parts(512, 4096) == 1
    assert parts(512, 131072) == 1


def test_a_batch_that_fills_the_machine_once_is_not_cut():
    assert parts(132, 8192) == 1


def test_parts_grow_with_the_keys_and_shrink_with_the_batch():
    by_keys = [parts(4, keys) for keys in (256, 1024, 4096, 16384, 65536)]
    by_batch = [parts(programs, 16384) for programs in (1, 4, 16, 64, 256)]
    assert by_keys == sorted(by_keys)
    assert by_batch == sorted(by_batch, reverse=True)


@pytest.mark.parametrize("hint", [2, 64, 900])
@pytest.mark.parametrize("count", [parts, lambda programs, _: number_of_pieces(programs, 132)])
def test_a_symbol_of_programs_fills_the_machine_whatever_it_turns_out_to_be(count, hint):
    env, source = ShapeEnv(), ConstantSource("programs")
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
    counted = count(env.create_symintnode(symbol, hint=hint, source=source), 16384)
    for programs in (2, 5, 64, 131, 132, 200, 5000):
        number = int(counted.node.expr.subs({symbol: programs}))
        assert number >= 1
        assert number == 1 or number * programs <= 4 * 132
        assert (number + 1) * programs > 132


def test_few_keys_are_one_part():
    assert parts(1, 0) == 1
    assert parts(1, 64) == 1


@pytest.mark.parametrize("rank", [1, 5, 16, 24, 33, 192, 256, 320, 512, 576, 1024])
def test_columns_hold_the_rank_in_two_powers_of_two(rank):
    first, second = columns(rank)
    assert first + second >= rank
    assert all(width == 0 or (width >= 16 and width & (width - 1) == 0) for width in (first, second))
    assert first + second < 2 * rank + 32


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        *((f"sm_{capability}", "sm_80") for capability in (80, 86, 89)),
        *((f"sm_{capability}", f"sm_{capability}") for capability in (90, 100, 120)),
        *(("sm_103", "sm_100"), ("sm_121", "sm_120")),
        *((arch, "gfx942") for arch in ("gfx942", "gfx90a")),
    ],
)
def test_families(arch, expected):
    assert family(Machine(arch, 100)) == expected


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rank", [16, 512, 1024, 2048])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_tiles_fit_shared_memory(arch, rank, itemsize):
    machine = Machine(arch, 100)
    for rows in (1, 16, 128, 2048):
        tiles = choose(machine, rows, rank, 64, itemsize, fp8=False)
        first, second = columns(rank)
        least = tiles.keys * tiles.stages == 16 and tiles.rows == 16
        buffers = tiles.stages if arch == "sm_90" and tiles.rows == 64 else max(tiles.stages - 1, 1)
        needed = (tiles.rows + tiles.keys * buffers) * (first + second + 64) * itemsize
        assert needed <= machine.shared_bytes or least


def test_all_heads_and_queries_of_a_small_group_share_one_tile():
    """For 16 heads of one query, or of four queries, keys are then read only once."""
    assert choose(H200, 16, 512, 64, 2, fp8=False).rows == 16
    assert choose(H200, 64, 512, 64, 2, fp8=False).rows == 64
