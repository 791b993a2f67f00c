"""Schedulers of transformers' engine that take up waiting requests even if all running ones were cancelled.

When running requests no longer fit together, the engine puts some of them back, and takes up none until one finishes.
If those that go on are cancelled, none finishes: as of transformers 5.24, all others would then wait forever.
"""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler


class _Resuming(Scheduler):
    """What is different in such a scheduler."""

    def clear_cancelled_requests(self) -> Any:
        """As in transformers."""
        cancelled = super().clear_cancelled_requests()
        if not self.active_requests:
            self.block_new_requests = False
        return cancelled


def resuming(name: str) -> str:
    """The name of such a scheduler, as for a `ContinuousBatchingConfig`, that otherwise does what `name` does.

    It is `name` itself if the engine knows none of that name: the engine then warns.
    """
    if name not in SCHEDULER_MAPPING:
        return name
    own = f"resuming_{name}"
    known = SCHEDULER_MAPPING[name]
    SCHEDULER_MAPPING.setdefault(own, type(f"Resuming{known.__name__}", (_Resuming, known), {}))
    return own
