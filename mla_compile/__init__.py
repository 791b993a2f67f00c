"""The `torch.compile` backend "mla": naively written Multi-head Latent Attention runs absorbed, chunked or sparse."""

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


def __getattr__(name: str) -> Any:
    if name == "PagedLatentCache":  # a transformers Cache, which takes seconds to import: only when asked for
        from .cache.latent_cache import PagedLatentCache

        return PagedLatentCache
    if name == "LatentCache":
        from .cache.growing import LatentCache

        return LatentCache
    if name == "ContinuousModel":
        from .cache.continuous import ContinuousModel

        return ContinuousModel
    if name in ("lower", "rewrite"):  # these import Inductor
        from . import exported

        return getattr(exported, name)
    if name == "build_library":
        from .kernels.library import build_library

        return build_library
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
