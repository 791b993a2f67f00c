"""FlashInfer's workspace: one for each device and stream, and none made in a graph that is captured."""

import pytest
import torch

from mla_compile.kernels.implementations import flashinfer

CPU = torch.device("cpu")


@pytest.fixture
def workspace(monkeypatch):
    """A function that asks for the workspace on a stream."""
    monkeypatch.setattr(flashinfer, "_workspaces", {})
    monkeypatch.setattr(flashinfer, "_WORKSPACE", 8)

    def ask(stream, device=CPU, captured=False):
        monkeypatch.setattr(flashinfer, "_stream", lambda _: (stream, captured))
        return flashinfer._workspace(device)

    return ask


def test_a_stream_has_one_workspace_of_zeros(workspace):
    first = workspace(0)
    assert first.tolist() == [0] * 8
    assert workspace(0) is first


def test_two_streams_and_two_devices_share_none(workspace):
    first = workspace(0)
    assert workspace(7) is not first
    assert workspace(0, torch.device("meta")) is not first
    assert workspace(0) is first


def test_a_captured_graph_makes_none_that_was_made_before(workspace):
    first, second = workspace(0), workspace(7)
    assert workspace(8, captured=True) is first
    assert workspace(7, captured=True) is second
    assert all(workspace(8) is not made for made in (first, second))


def test_a_captured_graph_without_a_warm_up_makes_one(workspace):
    assert workspace(8, captured=True).tolist() == [0] * 8
