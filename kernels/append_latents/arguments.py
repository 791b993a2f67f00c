"""The arguments of `mla::append_latents` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import KernelError
from ...fp8 import FP8, RowLayout
from ..checks import INTEGERS, check_alike, check_rank, check_shapes

OP = "append_latents"


@dataclass(frozen=True)
class AppendLatents:
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    latent: Tensor
    k_rope: Tensor
    slots: Tensor
    rows: Tensor
    scale: Tensor | None = None

    def check(self) -> None:
        """Check shapes, dtypes and devices, and on CPU the slots. Raises: KernelError."""
        latent, k_rope, slots, rows, scale = self.latent, self.k_rope, self.slots, self.rows, self.scale
        check_rank(OP, "latent", latent, "tokens L")
        check_rank(OP, "k_rope", k_rope, "tokens R")
        check_rank(OP, "rows", rows, "pages page_size row")
        check_alike(OP, latent=latent, k_rope=k_rope)
        tokens, rank, rope = *latent.shape, k_rope.shape[1]
        width = rank + rope if scale is not None else RowLayout(rank, rope, k_rope.dtype).row_bytes
        dims = {"tokens": tokens, "R": rope, "pages": rows.shape[0], "page_size": rows.shape[1], "row": width}
        check_shapes(OP, dims, k_rope=(k_rope, "tokens R"), slots=(slots, "tokens"), rows=(rows, "pages page_size row"))
        dtypes: dict[str, tuple[Tensor, tuple[torch.dtype, ...]]] = {"slots": (slots, INTEGERS)}
        dtypes["rows"] = rows, (FP8 if scale is not None else torch.uint8,)
        if scale is not None:
            dtypes["scale"] = scale, (torch.float32,)
            if scale.numel() != 1:
                raise KernelError(f"mla::{OP}: expected one scale for all tokens, found {list(scale.shape)}")
        for name, (tensor, known) in dtypes.items():
            if tensor.dtype not in known or tensor.device != latent.device:
                raise KernelError(
                    f"mla::{OP}: expected {name} of {' or '.join(map(str, known))} on {latent.device}, "
                    f"found {tensor.dtype} on {tensor.device}"
                )
        places = rows.shape[0] * rows.shape[1]
        if slots.is_cpu and tokens and int(slots.max()) >= places:
            token = int(slots.argmax())
            raise KernelError(f"mla::{OP}: expected slots below {places}, found slots[{token}] = {int(slots[token])}")
        aligned = (*(stride % 4 == 0 for stride in rows.stride()[:2]), rows.storage_offset() % 4 == 0)
        if rows.stride(2) != 1 or (scale is None and not all(aligned)):
            raise KernelError(
                f"mla::{OP}: expected rows whose bytes are contiguous and start at a multiple of 4, "
                f"found strides {list(rows.stride())} and offset {rows.storage_offset()}"
            )
