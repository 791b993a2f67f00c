"""Our warp-specialised kernels in Gluon (`paged_latent_attention.gluon`), which no GPU has run yet.

So they have to be asked for and, like another project's kernel, are used only after they agreed with the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...asked import GLUON
from .implementation import Function, Implementation
from .pages import Paged, Takes

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention


@dataclass(frozen=True)
class _WholeRowsApart(Takes):
    """Also requires pages to be a whole number of rows apart, so that all rows form one matrix."""

    def refusal(self, problem: Paged) -> str | None:
        why = super().refusal(problem)
        if why is None and not problem.rows_apart:
            return "takes pages a whole number of rows apart, found another distance"
        return why


def _attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = module.paged_latent_attention_gluon(x)
    return result


WARP_GROUPS = Implementation(
    name="Gluon",
    homes=("mla_compile.kernels.paged_latent_attention.gluon",),
    functions=(Function("paged_latent_attention_gluon", positional=1),),
    attend=_attend,
    architectures=("sm_90", "sm_100"),
    limits=_WholeRowsApart(dtypes=(torch.bfloat16,), widths=(512, 64), page_sizes=(64,)),
    # Whoever asks for it gets it, unless there are fewer rows than its programs take: the Triton kernel adapts to
    # those.
    first_on=("sm_90", "sm_100"),
    first_from=64,
    asked_by=GLUON,
)
