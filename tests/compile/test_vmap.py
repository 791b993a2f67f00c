"""`torch.vmap` of an attention is one attention, of tensors with one dimension more."""

import pytest
import torch
import torch.nn.functional as F

import mla_compile

B, N, S, T, L, P, V = 2, 4, 3, 7, 8, 6, 5


def attend(q, latent, w_uk, w_uv, mask=None):
    """`q` [..., N, S, P] over `latent` [..., T, L]."""
    k = torch.einsum("...tl,npl->...ntp", latent, w_uk)
    v = torch.einsum("...tl,nvl->...ntv", latent, w_uv)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def over_batch(q, latent, w_uk, w_uv, mask):
    return torch.vmap(lambda q, latent: attend(q, latent, w_uk, w_uv))(q, latent)


def over_batch_with_a_mask_each(q, latent, w_uk, w_uv, mask):
    return torch.vmap(lambda q, latent, mask: attend(q, latent, w_uk, w_uv, mask))(q, latent, mask)


def over_heads(q, latent, w_uk, w_uv, mask):
    def head(q, w_uk, w_uv):
        return F.scaled_dot_product_attention(q, latent @ w_uk.T, latent @ w_uv.T)

    return torch.vmap(head, in_dims=(1, 0, 0), out_dims=1)(q, w_uk, w_uv)


def over_batches(q, latent, w_uk, w_uv, mask):
    """Two batches of queries over the same latents, under one mask."""
    both = torch.stack([q, -q], dim=1)
    whole = torch.vmap(lambda q: attend(q, latent, w_uk, w_uv, mask[:1, None]), in_dims=1)(both)
    return whole.transpose(0, 1)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("mapped", [over_batch, over_batch_with_a_mask_each, over_heads, over_batches])
def test_vmap_is_one_attention(mapped):
    shapes = (B, N, S, P), (B, T, L), (N, P, L), (N, V, L)
    inputs = *map(torch.randn, shapes), torch.rand(B, S, T) < 0.7
    inputs[-1][..., 0] = True
    exact = mapped(*(t.double() if t.is_floating_point() else t for t in inputs))
    torch.testing.assert_close(torch.compile(mapped, backend="mla")(*inputs).double(), exact, rtol=1e-5, atol=1e-5)
    (site,) = mla_compile.last_report().sites
    assert site.rewritten
