"""Compile in background threads, and say on a terminal how far that is."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

R = TypeVar("R")
_log = logging.getLogger(__name__)


def submit(pool: ThreadPoolExecutor, task: Callable[[], R]) -> Future[R]:
    """Run a task in another thread under the caller's settings of Inductor, which torch keeps in context variables."""
    return pool.submit(copy_context().run, task)


class Progress:
    """Background compilations, with a progress line on a terminal."""

    def __init__(self) -> None:
        self.begun = self.done = 0
        self.start = 0.0
        self.pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="mla_compile")

    def submit(self, compile: Callable[[], None]) -> Future[None]:
        """Inductor's `submit_fn`, called for what is not on disk yet."""
        if self.begun == self.done:
            self.begun, self.done, self.start = 0, 0, time.perf_counter()
        self.begun += 1
        self._show()
        future = submit(self.pool, compile)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, _: Future[None]) -> None:
        self.done += 1
        self._show()

    def _show(self) -> None:
        if not sys.stderr.isatty():
            if self.begun == 1 and self.done == 0:
                _log.info("compiling C++ kernels for this CPU: once for this machine and version")
            return
        over = self.done == self.begun
        line = f"mla_compile: compiling C++ kernels for this CPU, once: {self.done} of {self.begun}"
        tail = f", {time.perf_counter() - self.start:.0f} s\n" if over else ""
        print(f"\r{line}{tail}", end="", file=sys.stderr, flush=True)
