"""Ops in C++ as torch's dispatcher calls them: no Python runs between two kernels of a compiled step."""

from .dispatcher import begin, general, provide, take_over

__all__ = ["begin", "general", "provide", "take_over"]
