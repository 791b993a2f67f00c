"""A bundle is its op's schema: the same names in the same order with the same defaults."""

from dataclasses import MISSING, fields

import pytest
import torch

from mla_compile.kernels.append_latents.arguments import AppendLatents
from mla_compile.kernels.merge_states.arguments import MergeStates
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.per_head_matmul.arguments import PerHeadMatmul

BUNDLES = {
    "append_latents": AppendLatents,
    "merge_states": MergeStates,
    "paged_latent_attention": PagedLatentAttention,
    "per_head_matmul": PerHeadMatmul,
}


@pytest.mark.parametrize("op", BUNDLES)
def test_fields_are_those_of_the_schema(op):
    schema = getattr(torch.ops.mla, op).default._schema
    expected = [(a.name, a.default_value if a.has_default_value() else MISSING) for a in schema.arguments]
    assert [(field.name, field.default) for field in fields(BUNDLES[op])] == expected
