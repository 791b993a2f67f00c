"""Fit latency and bandwidth between processes, and test whether they predict which mesh exchanges fastest.

    python -m mla_compile.bench.link MODEL_DIR_OR_CONFIG --ranks 4 --batch 16

Gloo processes on this machine call the collectives of `mla_compile.cluster` with several sizes, and latency and
bandwidth are fitted to their times. Then, for several meshes, the processes exchange exactly what a decode step does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ..cluster.exchanges import exchanges
from ..cluster.link import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Exchange, Link
from ..cluster.mesh import Mesh
from ..cluster.model import Model, read_model
from ..cluster.stage import stages
from ..text_table import aligned

SIZES = (256, 4096, 65536, 2**20)
"""The sizes in bytes of the tensors for the fit of latency and bandwidth."""
FLOAT = 4


@dataclass(frozen=True)
class Measured:
    """The exchanges of a mesh in a step, and their measured time."""

    mesh: Mesh
    exchanges: tuple[Exchange, ...]
    seconds: float
    """The median over the steps."""


def measure(model: Model, meshes: Sequence[Mesh], ranks: int, batch: int, repeats: int) -> tuple[Link, list[Measured]]:
    """The fitted link, and the result for each mesh of `ranks` devices, measured with one process per device."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        arguments = ranks, str(Path(folder) / "store"), result, model, list(meshes), batch, repeats
        spawn(_one, arguments, nprocs=ranks)
        link, seconds = torch.load(result, weights_only=False)
    lists = [_of_mesh(model, mesh, batch, link) for mesh in meshes]
    return link, [Measured(*found) for found in zip(meshes, lists, seconds, strict=True)]


def fit(samples: Sequence[tuple[Exchange, float]]) -> Link:
    """The link that minimises the squared relative error of the predicted seconds of exchanges."""
    rows = torch.tensor([[e.calls * e.messages, e.calls * e.received] for e, _ in samples], dtype=torch.float64)
    seconds = torch.tensor([seconds for _, seconds in samples], dtype=torch.float64)
    relative = rows / seconds[:, None]
    scale = relative.norm(dim=0)  # numbers of messages and of bytes differ in magnitude
    latency, byte = (
        torch.linalg.lstsq(relative / scale, torch.ones(len(samples), 1, dtype=torch.float64)).solution
        / (scale[:, None])
    )
    return Link(1 / byte.item(), latency.item())


def _one(rank: int, ranks: int, store: str, result: Path, model: Model, meshes: list[Mesh], batch: int, n: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    groups = {
        size: [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)][rank // size]
        for size in range(2, ranks + 1)
        if ranks % size == 0
    }
    kinds = ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL
    samples = []
    for exchange in [Exchange(kind, size, bytes_, 1) for kind in kinds for size in groups for bytes_ in SIZES]:
        samples.append((exchange, _median(_call(exchange, groups), n)))
    link = fit(samples)
    settled = [link]
    dist.broadcast_object_list(settled)  # each rank fitted its own link, but all must choose the same exchanges
    calls = [[_call(e, groups) for e in _of_mesh(model, mesh, batch, settled[0])] for mesh in meshes]
    rounds: list[list[float]] = [[] for _ in meshes]
    for _ in range(n):
        for found, several in zip(rounds, calls, strict=True):
            found.append(_seconds(several))
    if rank == 0:
        torch.save((settled[0], [statistics.median(found) for found in rounds]), result)
    dist.barrier()
    dist.destroy_process_group()


def _of_mesh(model: Model, mesh: Mesh, batch: int, link: Link) -> tuple[Exchange, ...]:
    sequences = -(-batch // (mesh.dp * mesh.pp))
    return tuple(e for stage in stages(model, mesh.pp) for e in exchanges(model, mesh, stage, sequences, link))


def _call(exchange: Exchange, groups: dict[int, dist.ProcessGroup]) -> Callable[[], None]:
    """A function that makes all calls of an exchange, in each group of consecutive ranks."""
    group, ranks = groups[exchange.ranks], exchange.ranks
    elements = max(ranks, round(exchange.size / FLOAT))
    own, parts = torch.ones(elements), torch.ones(elements // ranks * ranks)
    of_all = torch.ones(ranks, elements)
    first, second = dist.get_global_rank(group, 0), dist.get_global_rank(group, 1)

    def all_to_all(whole: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(whole)
        dist.all_to_all_single(received, whole, group=group)
        return received

    kinds: dict[str, Callable[[], object]] = {
        ALL_REDUCE: lambda: dist.all_reduce(own, group=group),
        ALL_GATHER: lambda: dist.all_gather(list(of_all.unbind()), own, group=group),
        # gloo implements reduce-scatter by an all-reduce, which receives twice the bytes.
        REDUCE_SCATTER: lambda: all_to_all(of_all).sum(0),
        ALL_TO_ALL: lambda: all_to_all(parts),
        SEND: lambda: dist.send(own, second, group) if dist.get_rank() == first else dist.recv(own, first, group),
    }
    one = kinds[exchange.kind]

    def call() -> None:
        for _ in range(exchange.calls):
            one()

    return call


def _seconds(calls: Sequence[Callable[[], None]]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for call in calls:
        call()
    dist.barrier()
    return time.perf_counter() - begin


def _median(call: Callable[[], None], repeats: int) -> float:
    call()
    return statistics.median(_seconds([call]) for _ in range(repeats))


def as_text(link: Link, found: Sequence[Measured]) -> str:
    """The link, and a table of the meshes, the fastest first."""
    cells = [["mesh", "calls", "received", "predicted ms", "measured ms"]]
    for one in sorted(found, key=lambda one: one.seconds):
        received = sum(e.calls * e.received for e in one.exchanges)
        predicted = sum(map(link.seconds, one.exchanges))
        calls = sum(e.calls for e in one.exchanges)
        line = [str(one.mesh), str(calls), f"{received:,.0f}"]
        cells.append([*line, f"{1000 * predicted:.2f}", f"{1000 * one.seconds:.2f}"])
    heading = f"{link.bandwidth / 1e9:.3g} GB/s, {1e6 * link.latency:.3g} us"
    return "\n".join([heading, "", *aligned(cells, "<>")])


def meshes_of(ranks: int) -> list[Mesh]:
    """Four meshes with different exchanges: TP alone, TP with DCP, TP with DP, and EP."""
    half = ranks // 2
    return [
        Mesh(ranks, 1, 1, 1, 1),
        Mesh(ranks, ranks, 1, 1, 1),
        Mesh(half, 1, 2, 1, 1),
        Mesh(1, 1, ranks, ranks, 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mla_compile.bench.link")
    parser.add_argument("model", type=Path, help="a directory with a config.json, or the file itself")
    parser.add_argument("--ranks", type=int, default=4, help="processes, an even number (default: 4)")
    parser.add_argument("--batch", type=int, default=16, help="sequences (default: 16)")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each (default: 9)")
    arguments = parser.parse_args()
    model = read_model(arguments.model)
    link, found = measure(model, meshes_of(arguments.ranks), arguments.ranks, arguments.batch, arguments.repeats)
    print(as_text(link, found))


if __name__ == "__main__":
    main()
