"""Our warp-specialised kernels in Gluon (`paged_latent_attention.gluon`, `sparse_latent_attention.gluon`).

Those for sm_90 come before the Triton kernel: on an H200 they take 0.49 to 1.0 of its time. Those for sm_100 and for
clusters of thread blocks have not run on a GPU yet, so they have to be asked for. Like other projects' kernels, all are
used only after they agreed with the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...asked import AUTO, GLUON
from ...int4 import PACKED
from .implementation import Function, Implementation
from .named import Named
from .pages import Paged, Takes

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention
    from ..sparse_latent_attention.arguments import SparseLatentAttention

_TILE = 64
"""Keys that are loaded at a time."""
_WIDTHS = 512, 64
"""L and R."""
_FEW_HEADS = 16
"""For so many heads named keys are left to the Triton kernel."""
_SCALES = (1, 2, 4)
"""How many scales each token may have."""


@dataclass(frozen=True)
class _Boxes(Takes):
    """Requires pages of which 64 rows can be copied at once."""

    more_than: int = 0
    """Heads and queries."""
    triton: str | None = None
    """The oldest Triton that it needs, if it needs more than Gluon."""

    def refusal(self, problem: Paged) -> str | None:
        why = super().refusal(problem)
        if why is not None:
            return why
        if not problem.in_boxes:
            return "takes rows of pages at multiples of 16 bytes, found another layout"
        if problem.page_size % _TILE and not problem.one_page:
            return f"takes pages of a multiple of {_TILE} tokens, found {problem.page_size}"
        if self.triton and _numbers(version("triton")) < _numbers(self.triton):
            return f"needs Triton {self.triton} or newer, found {version('triton')}"
        if problem.rows <= self.more_than:
            return f"takes more than {self.more_than} heads and queries, found {problem.rows}"
        codes = problem.codes
        if codes is not None and codes.dtype == PACKED:
            return "does not take latents in INT4"
        if codes is not None and codes.rope_too:
            return "does not take rope keys in FP8 or INT8"
        if codes is not None and codes.groups not in _SCALES:
            return f"takes 1, 2 or 4 scales for each token, found {codes.groups}"
        return None


def _numbers(of_version: str) -> list[int]:
    return [int(part) for part in of_version.split(".")[:2]]


def _row(
    name: str,
    architecture: str,
    asked_by: tuple[str, ...],
    function: str = "paged_latent_attention_gluon",
    **limits: Any,
) -> Implementation[PagedLatentAttention]:
    def attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = getattr(module, function)(x)
        return result

    return Implementation(
        name=name,
        homes=("mla_compile.kernels.paged_latent_attention.gluon",),
        functions=(Function(function, positional=1),),
        attend=attend,
        architectures=(architecture,),
        limits=_Boxes(dtypes=(torch.bfloat16,), widths=_WIDTHS, one_row=False, **limits),
        first_on=(architecture,),
        asked_by=asked_by,
        by_the_host=True,
    )


HOPPER = _row("Gluon", "sm_90", (AUTO, GLUON), codes=True)
CLUSTERS = _row(
    *("Gluon in clusters", "sm_90", (GLUON,), "paged_latent_attention_in_clusters"),
    codes=False,
    more_than=_TILE,  # a thread block takes so many
    triton="3.9",
)
TENSOR_MEMORY = _row("Gluon in tensor memory", "sm_100", (GLUON,), codes=False)


@dataclass(frozen=True)
class _Names:
    """Takes FP8 or INT8 for many heads."""

    def refusal(self, problem: Named) -> str | None:
        """Why it does not take a problem; None where it does."""
        codes = problem.codes
        if problem.has_mask:
            return "does not take a mask"
        if codes is None or codes.dtype == PACKED or codes.rope_too or problem.dtype != torch.bfloat16:
            return "takes latents in FP8 or INT8 and all else in bfloat16, found another dtype"
        if problem.widths != _WIDTHS:
            return f"takes L, R = {_WIDTHS[0]}, {_WIDTHS[1]}, found {problem.widths[0]}, {problem.widths[1]}"
        if problem.heads <= _FEW_HEADS:
            return f"takes more than {_FEW_HEADS} heads, found {problem.heads}"
        if codes.groups not in _SCALES:
            return f"takes 1, 2 or 4 scales for each token, found {codes.groups}"
        if not problem.aligned:
            return "takes rows of the cache at multiples of 16 bytes, found another layout"
        return None


def _attend_named(module: Any, x: SparseLatentAttention) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = module.sparse_latent_attention_gluon(x)
    return result


HOPPER_NAMED: Implementation[SparseLatentAttention] = Implementation(
    name="Gluon",
    homes=("mla_compile.kernels.sparse_latent_attention.gluon",),
    functions=(Function("sparse_latent_attention_gluon", positional=1),),
    attend=_attend_named,
    architectures=("sm_90",),
    limits=_Names(),
    first_on=("sm_90",),
    asked_by=(AUTO, GLUON),
    by_the_host=True,
)
