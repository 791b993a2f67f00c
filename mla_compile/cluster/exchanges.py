"""The exchanges between the devices of a mesh in a decode step.

Attention and MLP end in an all-reduce over the tensor-parallel ranks. Under DCP, queries are all-gathered, and outputs
and their log-sum-exps go through an all-to-all (`mla_compile.passes.paths.exchange` counts the same bytes). Where
experts are split over several groups, each rank contributes a part of its group's tokens, by the faster of two ways:
all-gather all tokens and reduce-scatter the outputs, or send each token to its experts and back.
"""

from __future__ import annotations

from collections.abc import Iterator

from .link import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Exchange, Link
from .mesh import Mesh
from .model import Model
from .stage import Stage

ACTIVATION, LSE = 2, 4
"""Bytes per element of activations, and per log-sum-exp."""


def exchanges(model: Model, mesh: Mesh, stage: Stage, sequences: int, link: Link) -> Iterator[Exchange]:
    """The exchanges for `sequences` in the layers of a stage; none on a mesh of one device."""
    state = sequences * model.hidden * ACTIVATION
    layers = stage.layers
    summed = 2 * layers + stage.first  # attention and MLP of each layer, and the embedding
    if mesh.groups > 1:
        summed -= stage.routed
        yield from experts(model, mesh, stage.routed, sequences, link)
    if mesh.dcp > 1:
        heads = sequences * model.sizes.N // mesh.tp
        latents = model.sizes.L * ACTIVATION
        yield Exchange(ALL_GATHER, mesh.dcp, heads * (latents + model.sizes.R * ACTIVATION), layers)
        yield Exchange(ALL_TO_ALL, mesh.dcp, mesh.dcp * heads * (latents + LSE), layers)
    if mesh.tp > 1:
        yield Exchange(ALL_REDUCE, mesh.tp, state, summed)
        if stage.last:
            yield Exchange(ALL_GATHER, mesh.tp, sequences * model.vocabulary * ACTIVATION / mesh.tp, 1)
    if mesh.pp > 1:  # states and residual from the previous stage, a part from each of its ranks
        yield Exchange(SEND, 2, 2 * state / mesh.tp, 1)


def experts(model: Model, mesh: Mesh, layers: int, sequences: int, link: Link) -> list[Exchange]:
    """The exchanges of `layers` whose experts are split over several groups."""
    part = sequences * model.hidden * ACTIVATION / mesh.tp
    gathered = [Exchange(kind, mesh.ep, part, layers) for kind in (ALL_GATHER, REDUCE_SCATTER)]
    sent = [Exchange(ALL_TO_ALL, mesh.ep, part * model.experts_of_token, 2 * layers)]
    chosen = min(gathered, sent, key=lambda several: sum(map(link.seconds, several)))
    whole = [Exchange(ALL_GATHER, mesh.tp, part, layers)] if mesh.tp > 1 else []
    return chosen + whole
