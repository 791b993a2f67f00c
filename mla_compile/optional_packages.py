"""Require packages that only some commands need; if one is missing, a one-line error says what to install."""

from __future__ import annotations

import importlib


def require(module: str, extra: str, user: str) -> None:
    """Import a module that belongs to one of our extras.

    Raises: ImportError, naming the extra and the `user` that needs it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'mla-compile[{extra}]'") from error
