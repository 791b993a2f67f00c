"""Measured rates: stored once, read by later processes, and measured again if the file is bad."""

import json
from dataclasses import asdict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile import device as device_module
from mla_compile.cost import Device
from mla_compile.device import measured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def rates(monkeypatch):
    """Stand-ins for the measurements; a list of their calls."""
    calls = []
    monkeypatch.setattr(device_module, "_gemm_rate", lambda *_: calls.append("gemm") or 123456.0)
    monkeypatch.setattr(device_module, "_copy_rate", lambda *_: calls.append("copy") or 98765.0)
    return calls


def stored_file(own_cache):
    (path,) = (own_cache / "mla_compile").glob("*.json")
    return path


def test_rates_are_those_of_a_computer():
    rates = measured(CPU, torch.float32)
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
    assert f"{torch.get_num_threads()} threads" in rates.name


def test_rates_are_rounded_to_two_digits_and_stored(own_cache, rates):
    name = measured(CPU, torch.float32).name
    assert json.loads(stored_file(own_cache).read_text()) == {
        "name": name,
        "flops_per_s": 120000.0,
        "bytes_per_s": 99000.0,
    }


def test_the_second_process_reads_what_the_first_measured(own_cache, rates):
    first = measured(CPU, torch.float32)
    assert measured(CPU, torch.float32) == first
    assert rates == ["gemm", "copy"]
    changed = Device(first.name, 1.0, 2.0)
    stored_file(own_cache).write_text(json.dumps(asdict(changed)))
    assert measured(CPU, torch.float32) == changed


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"name": "x", "flops_per_s": "?", "bytes_per_s": 1}', '{"name": "other"}', "\x00\xff"],
)
def test_a_bad_file_is_measured_again(own_cache, rates, content):
    first = measured(CPU, torch.float32)
    stored_file(own_cache).write_bytes(content.encode("latin-1"))
    assert measured(CPU, torch.float32) == first
    assert rates == ["gemm", "copy"] * 2
    assert json.loads(stored_file(own_cache).read_text())["name"] == first.name


@pytest.mark.parametrize("rate", ["0", "-1", "NaN", "Infinity"])
def test_an_impossible_rate_is_measured_again(own_cache, rates, rate):
    first = measured(CPU, torch.float32)
    stored_file(own_cache).write_text(f'{{"name": "{first.name}", "flops_per_s": {rate}, "bytes_per_s": 1}}')
    assert measured(CPU, torch.float32) == first


def test_dtype_and_threads_have_files_of_their_own(own_cache, rates):
    measured(CPU, torch.float32)
    measured(CPU, torch.float64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        measured(CPU, torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert len(list((own_cache / "mla_compile").glob("*.json"))) == 3


@pytest.mark.parametrize("library", [True, False])
def test_products_that_are_widened_have_the_rate_of_float32(own_cache, rates, monkeypatch, library):
    monkeypatch.setattr(device_module, "has_products", lambda dtype: library or dtype.itemsize > 2)
    assert measured(CPU, torch.bfloat16) == measured(CPU, torch.float32)
    assert rates.count("gemm") == len(list((own_cache / "mla_compile").glob("*.json"))) == (2 if library else 1)


def test_measures_real_tensors_while_a_graph_is_traced(own_cache, monkeypatch):
    monkeypatch.setattr(device_module, "GEMM_SIZES", (16,))
    monkeypatch.setattr(device_module, "COPY_BYTES", 2**20)
    seen = []
    monkeypatch.setattr(device_module, "_synchronize", lambda _: seen.append(torch.ones(1)))
    with FakeTensorMode():
        measured(CPU, torch.float32)
    assert seen
    assert not any(isinstance(tensor, torch._subclasses.FakeTensor) for tensor in seen)


def test_the_random_state_stays(monkeypatch):
    monkeypatch.setattr(device_module, "GEMM_SIZES", (16,))
    before = torch.get_rng_state()
    measured(CPU, torch.float32)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_dtype_has_a_rate(monkeypatch, dtype):
    monkeypatch.setattr(device_module, "GEMM_SIZES", (16,))
    assert device_module._gemm_rate(CPU, dtype) > 0


def test_the_gemm_rate_is_that_of_the_best_size_tried(monkeypatch):
    seconds = iter([0.002, 0.002, 0.004, 0.003, 0.3, 0.2, 0.4])  # of two libraries
    monkeypatch.setattr(device_module, "_products", lambda *_: [torch.mm, torch.matmul])
    monkeypatch.setattr(device_module, "_best_seconds", lambda *_: next(seconds))
    assert device_module._gemm_rate(CPU, torch.float32) == 2 * 512**3 / 0.003
    assert next(seconds) == 0.4, "1024 took longer than GEMM_SECONDS, so 2048 was not tried"


@pytest.mark.parametrize(("device", "copies"), [(CPU, 1), (torch.device("meta"), device_module.COPIES)])
def test_the_copy_rate_is_that_of_the_copies_that_were_waited_for(monkeypatch, device, copies):
    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **kwargs or {})

    def seconds(_, call):
        with Ops():
            call()
        return 0.5

    called = []
    monkeypatch.setattr(device_module, "COPY_BYTES", 2**20)
    monkeypatch.setattr(device_module, "_best_seconds", seconds)
    assert device_module._copy_rate(device) == copies * 2 * 2**20 / 0.5
    assert called == [torch.ops.aten.copy_.default] * copies


def test_a_device_whose_module_names_none_is_named_by_its_type(own_cache, rates):
    assert measured(torch.device("mps"), torch.float32).name == "mps"
    assert json.loads(stored_file(own_cache).read_text())["name"] == "mps"


def test_rates_are_assumed_while_no_memory_is_free_and_not_stored(own_cache, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(device_module, "_copy_rate", full)
        patched.setattr(device_module, "GEMM_SIZES", (16,))
        assumed = measured(CPU, torch.float32)
    assert (assumed.flops_per_s, assumed.bytes_per_s) == device_module.ASSUMED_CPU
    assert list((own_cache / "mla_compile").glob("*.json")) == []
    assert measured(CPU, torch.float32) != assumed


@pytest.mark.parametrize(
    ("dtype", "rates"), [(torch.bfloat16, device_module.ASSUMED_HALF), (torch.float32, device_module.ASSUMED)], ids=str
)
def test_a_device_that_computes_nothing_has_assumed_rates(dtype, rates):
    assert measured(torch.device("meta"), dtype) == Device("meta", *rates)


@pytest.mark.usefixtures("without_codegen")
def test_a_graph_on_meta_compiles():
    assert torch.compile(lambda x: x + 1, backend="mla")(torch.ones(3, device="meta")).shape == (3,)


def test_integer_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"at least two bytes to measure the device with, found torch\.int32"):
        measured(CPU, torch.int32)
