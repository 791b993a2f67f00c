"""torch.compile(model, backend="mla"): Multi-head Latent Attention written naively, run absorbed or chunked."""

from .errors import KernelError, MlaCompileError, OptionError, StrictError, VerifyError
from .options import Options
from .passes.outcome import Outcome
from .report import Report, explain, last_report, reports
from .version import __version__

__all__ = [
    "KernelError",
    "MlaCompileError",
    "OptionError",
    "Options",
    "Outcome",
    "Report",
    "StrictError",
    "VerifyError",
    "__version__",
    "explain",
    "last_report",
    "reports",
]
