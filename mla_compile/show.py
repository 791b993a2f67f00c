"""Let the graphs be seen: depyf writes what goes through here into its folder, tlparse finds it in torch's trace."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx
from torch._dynamo import utils as dynamo_utils

_dynamo_utils: Any = dynamo_utils  # neither function is in its module's stubs
_logging: Any = torch._logging
_log = logging.getLogger(__name__)


def show(name: str, module: fx.GraphModule) -> None:
    """Offer a graph under a name: to depyf, to the structured trace and, at level DEBUG, to the log of this module."""
    _log.debug("%s", _dynamo_utils.lazy_format_graph_code(name, module))
    _logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: module.print_readable(print_output=False, include_stride=True, include_device=True),
    )
