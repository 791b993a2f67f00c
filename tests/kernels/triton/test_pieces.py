"""The share of the keys that each program of the Triton kernels finds from the lengths, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from mla_compile.kernels._common.launch import LEAST_TILES
from mla_compile.kernels._common.pieces import cut_in_pieces, measured, passed_by

from ..pieces import line
from .where import DEVICE, ON_GPU

pytestmark = [*ON_GPU]
KEYS = 16
CASES = {
    "cut": ([300, 0, 17, 64, 1000], 6, 2),
    "whole": ([300, 290, 0], 8, 2),
    "one": ([5000], 7, 1),
    "empty": ([0, 0, 0], 4, 3),
    "more than are looked at at a time": ([random.Random(i).randrange(90) for i in range(1100)], 9, 1),
    "one piece": ([40, 70], 1, 1),
}


@triton.jit
def _places(
    lengths, out, batch, parts, own, of_sequence, KEYS: tl.constexpr, LEAST: tl.constexpr, LENGTHS: tl.constexpr
):
    index = tl.program_id(0)
    total, longest = batch * 0, batch * 0
    for at in range(0, batch, LENGTHS):
        keys = tl.load(lengths + tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)).to(tl.int32)
        total, longest = measured(total, longest, keys, at, batch, KEYS, LENGTHS)
    payload, width = cut_in_pieces(total, longest, batch, parts, own, LEAST)
    count, begin, end = batch * 0, batch * 0, batch * 0
    following, behind, passed = batch * 0, batch * 0, batch * 0
    for at in range(0, batch, LENGTHS):
        keys = tl.load(lengths + tl.minimum(at + tl.arange(0, LENGTHS), batch - 1)).to(tl.int32)
        count, begin, end, following, behind, passed = passed_by(
            *(count, begin, end, following, behind, passed),
            *(keys, at, batch, own, payload, width, index, of_sequence != 0, KEYS, LENGTHS),
        )
    tl.store(out + index * 7, payload)
    tl.store(out + index * 7 + 1, width)
    tl.store(out + index * 7 + 2, count)
    tl.store(out + index * 7 + 3, begin)
    tl.store(out + index * 7 + 4, end)
    tl.store(out + index * 7 + 5, following)
    tl.store(out + index * 7 + 6, behind)


def places(lengths, parts, own, indices, of_sequence, at_a_time):
    out = torch.empty(indices, 7, dtype=torch.int32, device=DEVICE)
    given = torch.tensor(lengths, device=DEVICE)
    _places[(indices,)](
        *(given, out, len(lengths), parts, own, int(of_sequence)),
        KEYS=KEYS,
        LEAST=LEAST_TILES,
        LENGTHS=at_a_time,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out.tolist()


def expected(tiles, payload, places, until, before, end_of_piece):
    starts = [place for place in places[:until] if place < before]
    count = len(starts)
    begin = starts[-1] if starts else 0
    end = max((place + number for place, number in zip(starts, tiles, strict=False)), default=0)
    behind = sum(place < end_of_piece for place in places[:-1])
    return [count, begin, end, places[count] if count else 0, behind]


@pytest.mark.diagonal
@pytest.mark.parametrize("at_a_time", [32, 1024])
@pytest.mark.parametrize(("lengths", "parts", "own"), CASES.values(), ids=CASES)
def test_pieces(lengths, parts, own, at_a_time):
    tiles = [-(-length // KEYS) for length in lengths]
    payload, where = line(tiles, parts, own)
    for index, (found, _, *rest) in enumerate(places(lengths, parts, own, parts, False, at_a_time)):
        assert found == payload
        assert rest == expected(tiles, payload, where, len(tiles), index * payload, (index + 1) * payload)


@pytest.mark.diagonal
@pytest.mark.parametrize("at_a_time", [32, 1024])
@pytest.mark.parametrize(("lengths", "parts", "own"), CASES.values(), ids=CASES)
def test_sequences(lengths, parts, own, at_a_time):
    tiles = [-(-length // KEYS) for length in lengths]
    payload, where = line(tiles, parts, own)
    some = min(len(lengths), 5)
    for b, (found, _, *rest) in enumerate(places(lengths, parts, own, some, True, at_a_time)):
        assert found == payload
        assert rest == expected(tiles, payload, where, b + 1, 1 << 30, (b + 1) * payload)
