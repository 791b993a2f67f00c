"""Find other projects' modules, none of which is required, and check them against the signatures that were read."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from .implementation import Function, Implementation


@dataclass(frozen=True)
class Found:
    """A module that has an implementation, or why there is none."""

    module: ModuleType | None
    package: str
    """The package's name and version."""
    why: str = ""


@functools.cache
def is_installed(implementation: Implementation) -> bool:
    """Whether a package that may have it is installed; nothing is imported."""
    return any(_exists(home.partition(".")[0]) for home in implementation.homes)


@functools.cache
def found(implementation: Implementation) -> Found:
    """The first installed home that can be imported and whose functions take our arguments.

    Imports it, once. Warns if homes are installed but none is suitable.
    """
    reasons = []
    for home in implementation.homes:
        top = home.partition(".")[0]
        if not _exists(top):
            continue
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if not home.startswith(error.name or home):
                reasons.append(f"{home} does not import: {error}")
            continue  # a package without it
        except Exception as error:  # importing another project may raise anything
            reasons.append(f"{home} does not import: {type(error).__name__}: {error}")
            continue
        why = mismatch(module, implementation.functions)
        if why is None:
            return Found(module, _versioned(top))
        reasons.append(why)
    if not reasons:
        return Found(None, "", "is not installed")
    why = "; ".join(reasons)
    warnings.warn(f"{implementation.name} is not used: {why}", stacklevel=2)
    return Found(None, "", f"is not used: {why}")


@functools.cache
def versions(implementations: tuple[Implementation, ...]) -> tuple[str, ...]:
    """Names and versions of the installed packages among the homes of these implementations."""
    tops = dict.fromkeys(home.partition(".")[0] for each in implementations for home in each.homes)
    return tuple(_versioned(top) for top in tops if _exists(top))


def mismatch(module: ModuleType, functions: Sequence[Function]) -> str | None:
    """Why a module's functions do not take the arguments that they would be given; None if they do."""
    for function in functions:
        name = f"{module.__name__}.{function.name}"
        try:
            signature = inspect.signature(getattr(module, function.name))
        except AttributeError:
            return f"{name} is not there"
        except (TypeError, ValueError):
            return f"{name} has no signature to check"
        try:
            signature.bind(*[None] * function.positional, **dict.fromkeys(function.arguments))
        except TypeError as error:
            return f"{name} has another signature than expected: {error}"
    return None


def _exists(top: str) -> bool:
    return importlib.util.find_spec(top) is not None


def _versioned(top: str) -> str:
    try:
        return f"{top} {importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:  # it has another name than its module, or none
        names = packages_by_module().get(top, [])
    return " ".join([top, *(importlib.metadata.version(name) for name in names[:1])])


@functools.cache
def packages_by_module() -> Mapping[str, list[str]]:
    """The names of packages by those of their modules. Reads the files of all packages, which can take seconds."""
    return importlib.metadata.packages_distributions()
