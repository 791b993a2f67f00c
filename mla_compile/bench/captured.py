"""Capture a call in a CUDA graph, so that it is timed as a decode step runs: without the host's time for launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from mla_compile.bench.modes import summary
from mla_compile.bench.progress import log


def captured(call: Callable[[], Tensor]) -> Callable[[], object] | None:
    """A function that replays a call; None if no graph computes its result, with a line of progress that says why.

    A graph without work would be replayed in no time. So it is first replayed over a result full of NaN, all of which
    it has to overwrite.
    """
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        call()
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a call that fails at once leaves such a one
            with torch.cuda.graph(graph):
                result = call()
        torch.cuda.set_stream(before)
        result.fill_(torch.nan)
        graph.replay()
        why = "the graph does not write all of the result" if result.isnan().any() else None
    except Exception as failure:  # the call has just run, so that any error is one of capturing it
        torch.cuda.set_stream(before)  # torch goes on with its own stream where a capture cannot be ended
        torch.cuda.synchronize()
        why = summary(failure)
    if why is None:
        return graph.replay
    log(f"  timed without a CUDA graph: {why}")
    return None
