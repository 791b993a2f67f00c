"""Values that are an up-projection of a latent, beside keys that are not known to be one.

    value[b, n, t, v]          = sum_l latent[b, t, l] W_UV[n, v, l]
    sum_t weight[t] value[t]   = W_UV (sum_t weight[t] latent[t])

Keys are whatever the graph computes: rotated or normed after their up-projection, for instance. The weights come from
them; the values only have to be linear in what is summed over the keys.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..algebra.terms import Axis
from ..attention.attention import Attention, Score
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .computed import computed
from .kept_columns import kept_columns
from .prove import prove
from .readable import is_held
from .site import Piece, Site
from .values import readings


def prove_or_values_alone(attention: Attention, trace: Trace) -> Site:
    """The site that an attention is, or that of its values alone if no more can be proved.

    Raises:
        Refusal: that of `prove`, if it is neither.
    """
    try:
        return prove(attention, trace)
    except Refusal as refusal:
        return values_alone(attention, trace, refusal)


def values_alone(attention: Attention, trace: Trace, why: Refusal) -> Site:
    """The site of an attention whose keys stay as they are, for the reason `why`.

    Raises:
        Refusal: `why`, if its values have no latent, or if it is not known that anything is saved without values.
    """
    if not attention.keys or attention.packed is not None:
        raise why
    values = next(readings(attention))
    if values.made is None or values.w_uv is None or not math.isfinite(values.scale):
        raise why
    rows = {*attention.rows}
    own = values.w_uv.axes & rows
    of_keys = set[Axis]().union(*(score.key.axes for score in attention.scores)) & rows
    batch = values.latent.read.axes & rows
    tokens = {*attention.queries} if attention.queries is not None else rows - own - of_keys - batch
    if own & batch or tokens & (own | of_keys | batch):
        raise why
    pieces = [computed(Piece(s.query, s.key, s.summed, s.scale)) for s in attention.scores]
    if attention.opaque is None:
        attention = replace(attention, scores=tuple(Score(p.query, p.key, p.summed, p.scale) for p in pieces))
    reads = [values.latent.read, values.w_uv, *values.biases]
    reads += [read for p in pieces for read in (p.query.read, p.key.read) if attention.opaque is None]
    if not all(map(is_held, reads)):
        raise why
    return Site(
        attention,
        batch=tuple(axis for axis in attention.rows if axis in batch),
        tokens=tuple(axis for axis in attention.rows if axis in tokens),
        heads=tuple(axis for axis in attention.rows if axis not in batch | tokens),
        rank=values.rank,
        latent=values.latent,
        nope=pieces[0],
        ropes=(),
        w_uk=None,
        w_uv=values.w_uv,
        biases=values.biases,
        value_scale=values.scale,
        unproved_keys=why,
        kept=kept_columns(values.made, attention, trace, why),
    )
