"""A call in a CUDA graph, by stand-ins for torch's graphs and streams: what does not compute the result is no graph."""

import contextlib
import warnings

import pytest
import torch

from mla_compile.bench.captured import captured


class Stream:
    def wait_stream(self, other):
        pass


class Cuda:
    """What `torch.cuda` is asked for. `replay` is what a graph does, `ending` what ends a capture."""

    def __init__(self):
        self.stream, self.capturing, self.synchronized = Stream(), False, 0
        self.first = self.stream
        self.replay = self.ending = lambda: None

    @contextlib.contextmanager
    def graph(self, graph):
        self.stream, self.capturing = Stream(), True
        try:
            yield
        finally:
            self.capturing = False
            self.ending()  # as torch's, it leaves the stream in place if this fails
            self.stream = self.first

    def synchronize(self):
        self.synchronized += 1

    def set_stream(self, stream):
        self.stream = stream


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()

    class Graph:
        def replay(self):
            fake.replay()

    for name in ("graph", "synchronize", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.stream)
    return fake


def test_a_graph_that_computes_the_result_is_replayed(cuda, capsys):
    o, replayed = torch.empty(3), []

    def replay():
        replayed.append(1)
        o.fill_(2.0)

    cuda.replay = replay
    again = captured(lambda: o.fill_(2.0))
    assert replayed == [1]
    again()
    assert replayed == [1, 1]
    assert o.tolist() == [2.0] * 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("written", [0, 2])
def test_a_graph_that_leaves_some_of_the_result_is_not(cuda, capsys, written):
    o = torch.empty(3)
    cuda.replay = lambda: o[:written].fill_(2.0)
    assert captured(lambda: o.fill_(2.0)) is None
    assert capsys.readouterr().err == "  timed without a CUDA graph: the graph does not write all of the result\n"


def test_a_call_that_must_not_be_captured_leaves_an_empty_graph_of_which_nobody_hears(cuda, capsys):
    """As vLLM's kernel did, which made numbers on the host."""

    def call():
        if cuda.capturing:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return torch.ones(3)

    cuda.ending = lambda: warnings.warn("The CUDA Graph is empty. This usually means that", UserWarning, stacklevel=1)
    assert captured(call) is None
    assert capsys.readouterr().err == (
        "  timed without a CUDA graph: RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph "
        "capture\n"
    )
    assert cuda.synchronized == 1


def test_what_comes_next_runs_where_the_caller_was(cuda):
    def fail():
        raise RuntimeError("operation failed due to a previous error during capture")

    cuda.ending = fail
    assert captured(lambda: torch.ones(3)) is None
    assert cuda.stream is cuda.first


def test_a_call_that_fails_by_itself_fails(cuda):
    def call():
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        captured(call)


@pytest.mark.gpu
def test_on_a_gpu():
    x, o = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    again = captured(lambda: torch.neg(x, out=o))
    o.zero_()
    again()
    assert (o == -1).all()
    assert captured(lambda: x * torch.tensor(2.0, device="cuda")) is None
    assert captured(lambda: x + 1) is not None, "a capture that failed spoilt the next"
