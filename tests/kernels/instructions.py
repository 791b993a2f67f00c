"""What machine code must have and must not: products on matrix units, nothing on the stack, waits in their places."""

from __future__ import annotations

import re
from itertools import pairwise

from .ahead import machine_of


def assert_clean(record, arch, stack=0, in_loop=0):
    assert record.shared <= machine_of(arch).shared_bytes
    assert record.stack <= stack
    assert record.spills_in_loop <= in_loop
    # The compiler may turn a kernel that cannot run into a trap, which spills nothing.
    assert matrix_unit(record.assembly), "no product on a matrix unit"


def matrix_unit(assembly):
    """The name of the matrix instruction in the assembly, or None."""
    names = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "v_mfma")
    return next((name for name in names if name in assembly), None)


def assert_warp_groups(record, stack=16):
    """Check the kernel for sm_90 whose warps have tasks of their own.

    Each of two consumer warp groups computes scores of 64 rows and 64 keys, and half of the sums by two products.
    """
    assert record.shared <= machine_of("sm_90").shared_bytes
    assert record.registers == 168  # per thread: the average of 384; a consumer's have 240
    assert record.stack <= stack  # numbers of a sequence, which the loop over its keys does not touch
    assert record.spills_in_loop == 0
    assert_consumers(record)
    assert record.whole["UTMALDG"] == 2 * (1 + 2)  # for each of two pages: one half; the other half, and the rope keys
    assert_all_warps_are_there_before_one_arrives(record.assembly, 2 * 6)  # of each consumer


def assert_clusters(record):
    """Check the same for programs of two thread blocks: copies go to both, which meet only when they begin and end."""
    assert_warp_groups(record, 48)
    copies = re.findall(r"cp\.async\.bulk\.tensor\S*", record.assembly)
    assert len(copies) == 2 * (1 + 2)
    assert all(copy.endswith(".multicast::cluster") for copy in copies)
    assert len(re.findall(r"barrier\.cluster\.wait", record.assembly)) == 1 + 3  # before and, of each partition, after
    remote = re.findall(r"mbarrier\.arrive\.shared::cluster", record.assembly)
    assert len(remote) == 2 * 2  # by each consumer, that there is room in both halves


def assert_key_rows(record, stack):
    """Check the kernels for sm_90 whose keys are the rows of products, of 16 or 32 rows of queries and heads.

    Each of two consumers computes scores of 64 keys, and all sums.
    """
    assert record.shared <= machine_of("sm_90").shared_bytes
    assert record.registers == 168  # per thread: the average of 384; a consumer's have 240
    assert record.stack <= stack
    products = (512 + 64) // 16 + 512 // 64 * (64 // 16)
    assert (record.loop["HGMMA"], record.whole["HGMMA"]) == (products, 2 * products)
    # Each begins products at most 18 times and waits for them at most 8 times, so that none is serialised.
    assert record.whole["WARPGROUP"] <= 2 * (18 + 8)


def assert_coded_key_rows(record):
    """Check that of FP8 among them: codes are read twice by matrix loads, and converted in registers."""
    assert_key_rows(record, 128)
    assert record.loop["LDSM"] == 2 * 64 * 512 // 512 // 4  # 512 bytes each, by four warps
    assert record.loop["F2FP"] <= 2 * 64 * 512 // 2 // 128 + 32  # two numbers each; scores and weights
    assert record.loop["STS"] + record.loop["STSM"] < 32  # converted numbers would take 32 more
    assert record.spills_in_loop <= 24


def assert_coded_warp_groups(record, named=False):
    """Check that of FP8 for more rows: one warp group computes scores of 64 keys, and two half of the sums each.

    Where registers do not suffice, the assembler waits after each product.
    """
    assert record.shared <= machine_of("sm_90").shared_bytes
    assert record.registers == 128  # per thread: the average of 512; there are 144, 168 and 168
    assert record.whole["HGMMA"] == (512 + 64) // 16 + 2 * (256 // 64 * 64 // 16)
    assert record.whole["WARPGROUP"] <= 17 + 2 * 24  # products are begun 9 and 16 times
    assert record.whole["UTMALDG"] == (0 if named else 4 + 1)
    assert_all_warps_are_there_before_one_arrives(record.assembly, 1 + 3 + 2 * 3)


def assert_tensor_memory(record):
    """Check that for sm_100: one warp issues all products, the scores of 128 rows and 64 keys, and half of the sums."""
    assert record.shared <= machine_of("sm_100").shared_bytes
    assert record.stack == 0
    assert record.whole["UTCHMMA"] == (512 + 64) // 16 + 64 // 16
    assert record.whole["UTCBAR"] == 2 * 2  # after each product: its result is there, its operands are free
    assert record.whole["UTMALDG"] == (512 + 64) // 64
    assert_all_warps_are_there_before_one_arrives(record.assembly, 2)


def assert_each_score_once_and_no_wait_between(record):
    """Check the loop over tiles of 64 keys, in which each of two warp groups computes half of the scores of 64 rows and
    half of the sums.

    Three products give scores, and each is waited for; two give sums, and go on during the next tile. Products that
    the assembler cannot prove safe it would serialise, with a wait after each instruction.
    """
    scores, sums = (512 + 64) // 16, 2 * 64 // 16
    assert record.loop["HGMMA"] == scores + sums
    assert record.loop["WARPGROUP"] <= 2 * (3 + 2)
    assert record.loop["LDGSTS"] == 64 * 576 * 2 / 16 / 256  # asynchronous copies of all keys, by 256 threads
    assert record.loop["LDG"] == 1  # the number of the next page


def assert_words(record, tiles):
    """Check the loop over tiles of keys in FP8 or INT8, in DeepSeek's sizes, for up to 16 rows.

    Codes, scales and rope keys are copied asynchronously. Scores and weights are written to shared memory, but no
    converted numbers, which would take 16 more instructions. Codes are read as key and as value, and for four of them
    at most one register is permuted, in INT8 two.
    """
    threads, groups = 32 * tiles.warps, 4
    codes, rope = (max(tiles.keys * row // 16 // threads, 1) for row in (512, 64 * 2))
    assert codes + rope + groups <= record.loop["LDGSTS"] <= codes + rope + 2 * groups
    assert record.loop["LDG"] == 1  # the number of the next page
    assert record.loop["STS"] + record.loop["STSM"] < 32
    assert record.loop["PRMT"] <= 128
    assert record.spills_in_loop == 0


def assert_consumers(record):
    scores, sums = (512 + 64) // 16, 2 * 64 // 16
    assert record.loop["HGMMA"] == scores + sums
    assert record.whole["HGMMA"] == 2 * (scores + sums)
    # Each consumer begins products five times and waits for them three times, so that none is serialised.
    assert record.whole["WARPGROUP"] == 2 * (5 + 3)


def assert_all_warps_are_there_before_one_arrives(assembly, count):
    """Check that each of `count` arrivals at a barrier directly follows a synchronisation of warps.

    One thread arrives for its warp group, so the other threads must have done what they have to do before.
    """
    kinds = r"\b(bar\.(?:warp\.)?sync|(?:ld|st)\.shared|stmatrix|wgmma\.(?:mma|wait)|tcgen05\.(?:ld|st|wait)"
    kinds += r"|mbarrier\.(?:arrive\.shared|try_wait))"
    order = re.findall(kinds, assembly)
    arrivals = [before for before, this in pairwise(order) if this == "mbarrier.arrive.shared"]
    assert len(arrivals) == count
    assert set(arrivals) <= {"bar.sync", "bar.warp.sync"}
