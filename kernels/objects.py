"""Compile C++ into object files, and link these into one library, for `library.py`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from .native import SETTINGS


def compile_object(name: str, text: str, folder: str) -> str:
    """Compile C++ that may use torch's headers; the path of the object file. Raises: CppCompileError."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder

    source = Path(folder) / f"{name}.cpp"
    source.write_text(text)
    with config.patch(SETTINGS):
        builder = CppBuilder(name, [str(source)], _options(compile_only=True), output_dir=folder)
        builder.build()
    return str(builder.get_target_file_path())


def link(objects: list[str], path: Path) -> None:
    """Link object files and torch's libraries into a shared library. Raises: CppCompileError."""
    from torch._inductor.cpp_builder import CppBuilder

    with tempfile.TemporaryDirectory() as folder:
        builder = CppBuilder("library", objects, _options(compile_only=False), output_dir=folder)
        builder.build()
        shutil.copyfile(builder.get_target_file_path(), path)


def _options(compile_only: bool) -> Any:
    from torch._inductor.cpp_builder import CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=True, shared=True, compile_only=compile_only)
