"""Our warp-specialised kernels in Gluon (`paged_latent_attention.gluon`).

The one for sm_90 comes before the Triton kernel where a sequence has 64 rows or more: on an H200 it takes 0.65 to 0.9
of its time. The one for sm_100 has not run on a GPU yet, so it has to be asked for. Like other projects' kernels, both
are used only after they agreed with the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...asked import AUTO, GLUON
from .implementation import Function, Implementation
from .pages import Paged, Takes

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

_TILE = 64
"""Keys that are loaded at a time; also the rows of a program on sm_90."""


@dataclass(frozen=True)
class _Matrices(Takes):
    """Requires latents and rope keys to be rows of a matrix each, which are loaded in tiles of 64."""

    def refusal(self, problem: Paged) -> str | None:
        why = super().refusal(problem)
        if why is not None:
            return why
        if not problem.matrices:
            return "takes pages a whole number of rows apart, at multiples of 16 bytes, found another layout"
        if problem.page_size % _TILE and not problem.one_page:
            return f"takes pages of a multiple of {_TILE} tokens, found {problem.page_size}"
        return None


def _attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = module.paged_latent_attention_gluon(x)
    return result


def _row(name: str, architecture: str, asked_by: tuple[str, ...]) -> Implementation[PagedLatentAttention]:
    return Implementation(
        name=name,
        homes=("mla_compile.kernels.paged_latent_attention.gluon",),
        functions=(Function("paged_latent_attention_gluon", positional=1),),
        attend=_attend,
        architectures=(architecture,),
        limits=_Matrices(dtypes=(torch.bfloat16,), widths=(512, 64), one_row=False),
        first_on=(architecture,),
        first_from=_TILE,  # with fewer rows the Triton kernel, which adapts to them, is as fast or faster
        asked_by=asked_by,
        by_the_host=True,
    )


WARP_GROUPS = _row("Gluon", "sm_90", (AUTO, GLUON))
TENSOR_MEMORY = _row("Gluon in tensor memory", "sm_100", (GLUON,))
