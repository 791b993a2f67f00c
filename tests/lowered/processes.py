"""Run each program in a process of its own: a crash is the outcome of that program alone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from .choices import Program

SECONDS = 900
"""How long a program may say nothing before it counts as hanging."""
_PRELOADED = ["tests.lowered.processes", "tests.lowered.run", "torch._inductor.compile_fx", "torch._inductor.package"]


def outcomes(programs: Iterable[Program], processes: int) -> Iterator[tuple[Program, str]]:
    """Each program with what went wrong with it, or nothing; as many at a time as `processes`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda program: (program, outcome(program, context)), programs)


def outcome(program: Program, context: multiprocessing.context.BaseContext) -> str:
    """What went wrong with a program, and where; nothing if it is right at all its sizes."""
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_child, args=(program, folder, sender))
        process.start()
        sender.close()
        said = "start"
        try:
            while receiver.poll(SECONDS):
                said = receiver.recv()
            process.kill()
            ended = f"said nothing for {SECONDS} s"
        except EOFError:
            process.join()
            ended = "" if process.exitcode == 0 else _how_it_ended(process.exitcode or 0)
        process.join()
        stack = (Path(folder) / "stack").read_text() if (Path(folder) / "stack").exists() else ""
    if not ended:
        return ""
    return f"{ended}, at: {said}" + (f"\n{stack}" if stack else "")


def _child(program: Program, folder: str, sender: Connection) -> None:
    with (Path(folder) / "stack").open("w") as stack:
        faulthandler.enable(stack)
        try:
            from .run import run

            run(program, Path(folder), sender.send)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            sender.send(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")
            sys.exit(1)


def _how_it_ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else "wrong"
