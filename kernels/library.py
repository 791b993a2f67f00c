"""Build the C++ ops into one shared library, for programs that run without Python.

objects      one kernel each, for an op and dtypes, under a name of its own
library.cpp  `dispatcher.cpp`, the schemas of its ops as in `mla_compile.ops`, and code that provides those kernels
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike, cpu_count, fspath
from pathlib import Path

import torch

from mla_compile import ops

from ..errors import OptionError
from . import dispatcher, native, objects
from .compiled import of_attention, of_numbers
from .expanded_attention import native as expanded_attention
from .latent_attention import cached
from .per_head_matmul import native as per_head_matmul
from .progress import submit
from .widened_matmul import native as widened_matmul

OPS = tuple(op for op in ops.__all__ if op != "sealed_attention" and not op.endswith("_backward"))
"""The ops that `dispatcher.cpp` registers."""


@dataclass(frozen=True)
class Kernel:
    """A C++ kernel of an op, for tensors of some dtypes."""

    op: str
    dtypes: tuple[torch.dtype, ...]
    recipe: native.Recipe

    @property
    def name(self) -> str:
        """The name of its function in the library, without the prefix and suffix."""
        return "_".join([self.op, *(native.TYPES[dtype] for dtype in self.dtypes)])

    @property
    def text(self) -> str:
        """Its C++ source, with functions renamed so that no other kernel has the same."""
        sources, _, defines = self.recipe
        names = (f"{word} mla_{self.name}_{word}" for word in ("kernel", "bytes_of_a_key"))
        return native.text_of(sources, (*defines, *names))

    @property
    def declared(self) -> str:
        """C++ that declares its functions."""
        of_the_op = "".join(word.capitalize() for word in self.op.split("_"))
        more = f"extern const int64_t mla_{self.name}_bytes_of_a_key;" if self.op == "expanded_attention" else ""
        return f'extern "C" {{ {of_the_op}Kernel mla_{self.name}_kernel; {more} }}'

    @property
    def provided(self) -> str:
        """C++ that provides it to the dispatcher."""
        places = [str(dispatcher.PLACES.index(dtype)) for dtype in self.dtypes]
        if self.op == "expanded_attention":  # the kernel tells the dtype of its keys: its queries', or float32
            itemsize = self.dtypes[0].itemsize
            places.append(f"mla_{self.name}_bytes_of_a_key == {itemsize} ? {places[0]} : 0")
        return f"provide_{self.op}({', '.join(places)}, code_of(mla_{self.name}_kernel));"


def build_library(path: str | PathLike[str], dtypes: Iterable[torch.dtype] = (torch.float32,)) -> None:
    """Write a shared library with the mla ops that lowered programs may keep, for CPU tensors of some dtypes.

    `torch.ops.load_library(path)`, or `dlopen` in a process without Python, registers the ops; `mla_compile` need not
    be installed there. The library is for this machine's CPU and this version of torch, and computes the ops that
    `lower(program, kernels=True)` leaves in a program.

    dtypes are torch.float32, bfloat16 and float16, and also float8_e4m3fn or int8 for caches in those, and uint8 for
    caches in INT4.

    Raises:
        OptionError: for other dtypes, or if none of the first three is given.
        torch._inductor.exc.CppCompileError: where there is no compiler, or it fails.
    """
    dtypes = list(dtypes)
    unknown = [dtype for dtype in dtypes if dtype not in native.TYPES]
    if unknown or not of_numbers(dtypes):
        raise OptionError(
            f"expected dtypes among {', '.join(map(str, native.TYPES))}, at least one of them "
            f"wider than a byte, found {dtypes}"
        )
    kernels = list(_kernels(dtypes))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cpu_count()) as pool:
        texts = {"mla_library": _registering(kernels)} | {kernel.name: kernel.text for kernel in kernels}
        tasks = [submit(pool, partial(objects.compile_object, *text, folder)) for text in texts.items()]
        compiled = [task.result() for task in tasks]
        objects.link(compiled, Path(fspath(path)))


def _kernels(dtypes: list[torch.dtype]) -> Iterator[Kernel]:
    for triple in of_attention(dtypes):
        yield Kernel("latent_attention", triple, cached.KERNELS.recipe(*triple))
    for dtype in of_numbers(dtypes):
        yield Kernel("expanded_attention", (dtype,), expanded_attention.KERNELS.recipe(dtype))
        yield Kernel("per_head_matmul", (dtype,), per_head_matmul.KERNELS.recipe(dtype))
        yield Kernel("widened_matmul", (dtype,), widened_matmul.KERNELS.recipe(dtype))


def _registering(kernels: list[Kernel]) -> str:
    schemas = (f'{{"mla::{op}", "{op}{ops.schema_of(op)}"}}' for op in OPS)
    (tags,) = {tuple(sorted(tag.name for tag in getattr(torch.ops.mla, op).default.tags)) for op in OPS}
    macros = {
        "SCHEMAS": ", ".join(schemas),
        "TAGS": ", ".join(f"at::Tag::{tag}" for tag in tags),
        "KERNELS_DECLARED": " ".join(kernel.declared for kernel in kernels),
        "KERNELS_PROVIDED": " ".join(kernel.provided for kernel in kernels),
    }
    sources = (*dispatcher.SOURCES, dispatcher.SOURCES[-1].with_name("library.cpp"))
    return native.text_of(sources, [f"{name} {text}" for name, text in macros.items()])
