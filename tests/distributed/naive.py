"""Attention to latents that are divided among ranks, written the naive way: gather all, then attend."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

N, L, P, R, V = 3, 16, 8, 4, 6
"""The heads and the widths of a layer."""
PAGE = 4
"""How many consecutive tokens a rank has, where tokens are divided page by page."""

MESH = []
"""The mesh of all ranks, once `meet` was called: Dynamo cannot trace its making."""


def meet():
    """Make the mesh of all ranks."""
    if not MESH:
        MESH.append(init_device_mesh("cpu", (dist.get_world_size(),)))


def functional(own):
    """Gather `[B, ...]` of each of k ranks to `[k B, ...]`."""
    return funcol.all_gather_tensor(own, 0, dist.group.WORLD)


def along_tokens(own):
    """Gather shares one after the other, joined along the tokens."""
    return funcol.all_gather_tensor(own, 1, dist.group.WORLD)


def tokens_first(own):
    """The same, gathered with tokens before sequences."""
    return functional(own.transpose(0, 1)).transpose(0, 1)


def into_tensor(own):
    """The same, by c10d's collective on a buffer."""
    out = own.new_empty(dist.get_world_size() * own.shape[1], own.shape[0], own.shape[2])
    dist.all_gather_into_tensor(out, own.transpose(0, 1).contiguous())
    return out.transpose(0, 1)


def list_of_tensors(own):
    """The same, by c10d's collective on a list."""
    outs = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, own)
    return torch.cat(outs, dim=1)


def redistributed(own):
    """The same, by redistributing a DTensor."""
    return (
        DTensor.from_local(own, MESH[0], [Shard(1)], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )


def by_token(own):
    """Gather shares that ranks have token by token."""
    ranks = functional(own).unflatten(0, (dist.get_world_size(), -1))
    return ranks.permute(1, 2, 0, 3).flatten(1, 2)


def by_page(own):
    """Gather shares that ranks have page by page."""
    ranks = functional(own.unflatten(1, (-1, PAGE))).unflatten(0, (dist.get_world_size(), -1))
    return ranks.permute(1, 2, 0, 3, 4).flatten(1, 3)


def paged(latent, k_rope):
    """A rank's share in a pool `[pages, PAGE, L + R]`, with pages in random order, and the block table."""
    rows = torch.cat([latent, k_rope], dim=-1).unflatten(1, (-1, PAGE))
    count = rows.shape[0] * rows.shape[1]
    table = torch.randperm(count, generator=torch.Generator().manual_seed(count)).view(rows.shape[:2])
    pool = torch.full((count + 1, *rows.shape[2:]), torch.nan, dtype=rows.dtype)
    pool[table] = rows
    return pool, table


def gathered(gather, first, second, *, pages):
    """Gather the latents and rope keys of all ranks, which are given as such or as a pool and a block table."""
    if pages:
        first, second = first[second].flatten(1, 2).split([L, R], dim=-1)
    return gather(first), gather(second)


def place(gather, tokens, rank, ranks):
    """The positions of a rank's tokens, of `tokens` in all."""
    if gather is by_token:
        return torch.arange(tokens).view(-1, ranks)[:, rank]
    if gather is by_page:
        return torch.arange(tokens).view(-1, ranks, PAGE)[:, rank].flatten()
    return torch.arange(tokens).view(ranks, -1)[rank]


def attend(q, latent, k_rope, kv_b, mask=None, kept=None):
    """q `[B, Sq, N, P + R]`, latent `[B, T, L]`, k_rope `[B, T, R]`, kv_b `[N (P + V), L]`: `[B, Sq, N, V]`.

    Queries attend to the first `kept` keys, or to all.
    """
    k_nope, v = (latent @ kv_b.T).unflatten(2, (-1, P + V)).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
    k, v = k[:, :kept], v[:, :kept]
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * (P + R) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bnst,btnv->bsnv", scores.softmax(-1), v)


def causal(queries, tokens):
    """The causal mask of queries that are the last tokens."""
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)


def up_to(lengths, queries, tokens):
    """The causal mask of queries that are the last tokens of sequences of given lengths."""
    last = lengths[:, None] - queries + torch.arange(queries)
    return (torch.arange(tokens) <= last[..., None])[:, None]


def make(seed, ranks, B, Sq, T, dtype=torch.float64, heads=N):
    """Random q, kv_b, and latents and rope keys of all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return normal(B, Sq, heads, P + R), normal(heads * (P + V), L) * L**-0.5, normal(B, T, L), normal(B, T, R)
