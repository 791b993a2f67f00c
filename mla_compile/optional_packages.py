"""Packages that only some commands need: there, or an error in one line that says what to install."""

from __future__ import annotations

import importlib


def require(module: str, extra: str, user: str) -> None:
    """Import a module of one of our extras.

    Raises: ImportError, naming the extra and the `user`, who needs it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'mla-compile[{extra}]'") from error
