"""Keys and values that are up-projected from a latent each, side by side in one tensor."""

from __future__ import annotations

from torch import Tensor

from ..errors import KernelError


def latents_of(latent: Tensor, w_uk: Tensor | None, w_uv: Tensor | None) -> tuple[Tensor, Tensor]:
    """What keys and what values are made of: all columns of `latent`, or its first and its last ones.

    w_uk `[., ., Lk]`, w_uv `[., ., Lv]`; None where keys or values are the latent itself.
    """
    if w_uk is None or w_uv is None or w_uk.shape[2] == w_uv.shape[2] == latent.shape[-1]:
        return latent, latent
    of_keys, of_values = latent.split([w_uk.shape[2], w_uv.shape[2]], dim=-1)
    return of_keys, of_values


def check_ranks(op: str, rank: int, w_uk: Tensor, w_uv: Tensor) -> dict[str, int]:
    """The sizes `Lk` and `Lv` of latents of `rank` columns: L both, or L in sum. Raises: KernelError."""
    of_keys, of_values = w_uk.shape[2], w_uv.shape[2]
    if of_keys == of_values == rank or of_keys + of_values == rank:
        return {"Lk": of_keys, "Lv": of_values}
    raise KernelError(
        f"mla::{op}: expected w_uk [N, P, L] and w_uv [N, V, L] of L = {rank}, or of two sizes that add up to it, "
        f"found {of_keys} and {of_values}"
    )
