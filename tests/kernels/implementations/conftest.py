"""Stand-ins for other projects' packages, which a test may install."""

import sys
from pathlib import Path

import pytest

from mla_compile.kernels._common import tuning
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.implementations import choose, packages

INSTALLED = Path(__file__).with_name("installed")


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A function that begins anew, as in a new process, with the packages in some folders of `installed`."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    names: set[str] = set()
    # Packages that this machine has do not count.
    monkeypatch.setattr(packages, "_exists", lambda top: top == "torch" or top in names)

    def forget():
        for module in [module for module in sys.modules if module.partition(".")[0] in names]:
            del sys.modules[module]
        for cached in (packages.is_installed, packages.found, packages.versions, packages.packages_by_module):
            cached.cache_clear()
        choose.any_installed.cache_clear()
        monkeypatch.setattr(choose, "CHOICES", Plans())
        monkeypatch.setattr(choose, "_TRIED", {})
        monkeypatch.setattr(tuning, "_KNOWN", {})

    def begin(*folders):
        forget()
        names.clear()
        for folder in folders:
            names.update(entry.stem for entry in (INSTALLED / folder).iterdir())
            monkeypatch.syspath_prepend(str(INSTALLED / folder))

    begin()
    yield begin
    forget()
