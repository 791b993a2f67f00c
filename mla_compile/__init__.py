"""The `torch.compile` backend "mla": naively written Multi-head Latent Attention runs absorbed, chunked or sparse."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cache import BlockTable, FP8PagePool, INT4PagePool, INT8PagePool, PagePool
from .dynamo.known_to_accelerate import register_with_accelerate
from .errors import (
    CacheError,
    CacheMismatchError,
    ConfigError,
    FreedError,
    KernelError,
    MlaCompileError,
    OptionError,
    OutOfPagesError,
    PageIndexError,
    PassesError,
    StrictError,
    VerifyError,
)
from .explaining import explain
from .options import Options
from .parallel.tensor_parallel import tp_plan
from .passes.outcome import Outcome
from .report import Report, last_report, reports
from .version import __version__

if TYPE_CHECKING:
    from .cache.continuous import ContinuousModel
    from .cache.growing import LatentCache
    from .cache.latent_cache import PagedLatentCache
    from .exported import lower, rewrite
    from .kernels.library import build_library

__all__ = [
    "BlockTable",
    "CacheError",
    "CacheMismatchError",
    "ConfigError",
    "ContinuousModel",
    "FP8PagePool",
    "FreedError",
    "INT4PagePool",
    "INT8PagePool",
    "KernelError",
    "LatentCache",
    "MlaCompileError",
    "OptionError",
    "Options",
    "OutOfPagesError",
    "Outcome",
    "PageIndexError",
    "PagePool",
    "PagedLatentCache",
    "PassesError",
    "Report",
    "StrictError",
    "VerifyError",
    "__version__",
    "build_library",
    "explain",
    "last_report",
    "lower",
    "register_with_accelerate",
    "reports",
    "rewrite",
    "tp_plan",
]


_IMPORTED_LATER = {
    "ContinuousModel": ".cache.continuous",
    "LatentCache": ".cache.growing",
    "PagedLatentCache": ".cache.latent_cache",
    "build_library": ".kernels.library",
    "lower": ".exported",
    "rewrite": ".exported",
}
"""Names by the modules that have them, which are imported only when asked for: the caches import transformers, the
others Inductor, and both take seconds."""


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_LATER:
        return getattr(import_module(_IMPORTED_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_LATER})
