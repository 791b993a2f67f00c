"""Fixtures of the kernels' tests."""

import mla_compile.kernels.register  # noqa: F401  the ops under test
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Waking a second thread for tensors of a few hundred numbers costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
