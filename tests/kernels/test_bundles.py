"""A bundle of arguments mirrors its op's schema: the same names in the same order with the same defaults."""

from dataclasses import MISSING, fields

import pytest
import torch

from mla_compile import ops

from .bundles import BUNDLES


@pytest.mark.parametrize("op", BUNDLES)
def test_fields_are_those_of_the_schema(op):
    schema = getattr(torch.ops.mla, op).default._schema
    expected = [(a.name, a.default_value if a.has_default_value() else MISSING) for a in schema.arguments]
    assert [(field.name, field.default) for field in fields(BUNDLES[op])] == expected


def test_every_op_has_one():
    assert set(BUNDLES) == set(ops.__all__) - {"sealed_attention"}
