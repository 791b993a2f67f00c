"""Measure how much memory a call takes from torch's allocator, generated code and custom ops included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak(call: Callable[[], object]) -> int:
    """The most bytes, among those that a call allocates, that exist at the same time.

    The profiler's operator events do not show this: each reports what it allocates minus what it frees, which hides
    temporaries.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    records = profiled.profiler.kineto_results.events()
    changes = [(r.start_ns(), r.nbytes()) for r in records if r.name() == "[memory]"]
    most = now = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return most
