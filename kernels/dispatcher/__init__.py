"""Ops registered with torch's dispatcher in C++, so that no Python runs between two kernels of a compiled step."""

from .dispatcher import PLACES, SOURCES, begin, general, provide, take_over
from .taken import takes

__all__ = ["PLACES", "SOURCES", "begin", "general", "provide", "take_over", "takes"]
