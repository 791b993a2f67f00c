"""Fixtures for the tests of the kernels."""

import pytest
import torch

import mla_compile.kernels.register  # noqa: F401  the ops under test
from mla_compile.coded import HELD
from mla_compile.kernels import compiled, dispatcher, native
from mla_compile.kernels.append_latents.arguments import AppendLatents
from mla_compile.kernels.expanded_attention import native as expanded_native
from mla_compile.kernels.latent_attention import native as latent_native
from mla_compile.kernels.merge_states.arguments import MergeStates
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_latent_attention import native as paged_native
from mla_compile.kernels.per_head_matmul import native as matmul_native
from mla_compile.kernels.sparse_latent_attention import native as sparse_native

from .recorded import recorded


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: for tensors of a few hundred numbers, waking a second one costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def no_kernel_cache(tmp_path_factory):
    """Use an empty Triton cache, so that kernels are compiled from their present source."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture
def no_compiler(monkeypatch):
    """Let no C++ kernel be built, so that ops are computed by ATen operations."""
    monkeypatch.setattr(native, "load", lambda *_: None)


DISPATCHED = (torch.float32, torch.bfloat16, torch.float16, *HELD)


@pytest.fixture(autouse=True)
def nothing_dispatched():
    """Take back the C++ kernels that an earlier test, which compiled a model, gave to torch's dispatcher."""
    if dispatcher.take_over.cache_info().currsize:
        withdraw()


def withdraw():
    """Take all C++ kernels back from torch's dispatcher."""
    for dtype in DISPATCHED[:3]:
        for keys in ((dtype, dtype), *((coded, rope) for coded in HELD for rope in (dtype, coded))):
            dispatcher.provide("latent_attention", (dtype, *keys), None)
        dispatcher.provide("per_head_matmul", (dtype,), None)
        dispatcher.provide("widened_matmul", (dtype,), None)
        for keys in {dtype, torch.float32}:
            dispatcher.provide("expanded_attention", (dtype, keys), None)


@pytest.fixture
def dispatched():
    """As in compiled graphs: torch's dispatcher calls C++ code, which calls the kernels."""
    compiled.begin(DISPATCHED)
    compiled.make_ready(DISPATCHED)
    assert dispatcher.take_over() is not None
    yield
    withdraw()


@pytest.fixture(params=["dispatched", "native", "aten"])
def implementation(request):
    """Each way to compute an op on CPU: C++ called by the dispatcher, C++ called from Python, ATen operations."""
    if request.param == "aten":
        request.getfixturevalue("no_compiler")
    if request.param == "dispatched":
        request.getfixturevalue("dispatched")
    return request.param


@pytest.fixture
def launches():
    """The Triton launches of a test, recorded instead of made, as for tensors without values."""
    with recorded() as found:
        yield found


@pytest.fixture
def no_python(monkeypatch, dispatched):
    """Torch calls C++, and an error is raised if a general implementation, in Python, is called."""

    def called(*arguments):
        raise AssertionError("the general implementation was called")

    monkeypatch.setattr(latent_native, "are_many", called)
    monkeypatch.setattr(matmul_native, "_suits", called)
    monkeypatch.setattr(expanded_native, "attend_in_chunks", called)
    for module in (paged_native, sparse_native):
        monkeypatch.setattr(module, "Cached", called)
    for bundle in (AppendLatents, MergeStates, PagedExpandedAttention):
        monkeypatch.setattr(bundle, "check", called)
