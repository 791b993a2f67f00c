"""Fixtures of the kernels' tests."""

import mla_compile.kernels.register  # noqa: F401  the ops under test
import pytest
import torch
from mla_compile.kernels.expanded_attention import native as expanded_attention
from mla_compile.kernels.latent_attention import native as latent_attention
from mla_compile.kernels.per_head_matmul import native as per_head_matmul


@pytest.fixture(autouse=True)
def one_thread():
    """Waking a second thread for tensors of a few hundred numbers costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_compiler(monkeypatch):
    """Native kernels cannot be built: what is left is made of ATen operations."""
    for module in (expanded_attention, latent_attention, per_head_matmul):
        monkeypatch.setattr(module, "load", lambda *_: None)


@pytest.fixture(params=["native", "aten"])
def implementation(request):
    """Both ways to compute an op on CPU."""
    if request.param == "aten":
        request.getfixturevalue("no_compiler")
    return request.param
