"""What the plugin registers with vLLM, as a fake vLLM records it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mla_compile import vllm as plugin

PATH = "mla_compile.vllm.backend.MLACompileBackend"


@pytest.fixture
def listening(monkeypatch):
    """A function that installs a fake vLLM of a version, on a CPU or not, and returns what is registered with it."""

    def install(version, *, cpu):
        told = []
        registry = SimpleNamespace(CPU_MLA="its reference")
        modules = {
            "vllm": {"__version__": version},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backends": {},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": registry,
                "register_backend": lambda backend, path: told.append((backend, path)),
            },
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        return told

    return install


def test_on_a_cpu_it_takes_the_place_of_the_reference(listening):
    told = listening("0.32.0+cpu", cpu=True)
    plugin.register()
    assert told == [("MLA_COMPILE", PATH), ("its reference", PATH)]


def test_elsewhere_it_is_one_more(listening):
    told = listening("0.32.1", cpu=False)
    plugin.register()
    assert told == [("MLA_COMPILE", PATH)]


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0"])
def test_another_version_is_left_alone(listening, caplog, version):
    told = listening(version, cpu=True)
    with caplog.at_level("INFO", logger="mla_compile.vllm"):
        plugin.register()
    assert told == []
    assert f"expected vLLM 0.32, found {version}" in caplog.text
