"""Options and modes that are none: refused with the nearest right one, or with what was expected."""

import json

import pytest
import torch

import mla_compile
from mla_compile.options import parse
from tests.models import HIDDEN, Combined, L, R


def inputs():
    return torch.randn(1, 1, HIDDEN), (torch.randn(1, 40, L), torch.randn(1, 40, R))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mla.pth": "auto"}, "unknown option 'mla.pth': the nearest is 'mla.path'"),
        ({"max_autotun": True}, "unknown option 'max_autotun': the nearest is 'max_autotune'"),
        ({"cpp_wrapper": "False"}, "cpp_wrapper: expected a value of type bool, found 'False'"),
        ({"mla.path": "fast"}, "mla.path: expected one of auto, absorbed, chunked, values, off, found 'fast'"),
        ({"mla.workspace_tokens": 0}, "expected a whole number of keys from 1 to 2147483647, found 0"),
        ({"mla.workspace_tokens": 2**63}, "expected a whole number of keys from 1 to 2147483647, found 92233720368547"),
        ({"mla.keys_stay": "yes"}, "mla.keys_stay: expected True or False, found 'yes'"),
        (
            {"mla.link": (0.0, 0.0)},
            "mla.link: expected a pair of positive numbers, bytes/s and seconds, found (0.0, 0.0)",
        ),
        (
            {"mla.rates": (1e12, 0)},
            "mla.rates: expected a pair of positive numbers, FLOP/s and bytes/s, found (1000000000000.0, 0)",
        ),
        (
            {"mla.rates": [1e12]},
            "mla.rates: expected a pair of positive numbers, FLOP/s and bytes/s, found (1000000000000.0,)",
        ),
        ({1: 2}, "expected names of options that are strings, found 1"),
        ({"mla.strict": 1}, "mla.strict: expected True or False, found 1"),
        ({"mla.kernels": "cuda"}, "mla.kernels: expected auto, triton or gluon, found 'cuda'"),
    ],
)
def test_a_wrong_option_is_refused_with_the_nearest_right_one(options, message):
    compiled = torch.compile(Combined(), backend="mla", options=options)
    with pytest.raises(Exception, match="OptionError") as caught:
        compiled(*inputs())
    assert message in str(caught.value)


def test_a_mode_that_is_no_string_is_refused():
    with pytest.raises(mla_compile.OptionError, match=r"mode: expected a string, found \['default'\]"):
        parse(None, ["default"])


def test_pairs_of_numbers_may_be_lists():
    options, _ = parse(json.loads('{"mla.rates": [1e12, 1e11], "mla.link": [5e10, 0]}'), None)
    assert (options.rates, options.link) == ((1e12, 1e11), (5e10, 0))
    assert options == parse({"mla.rates": (1e12, 1e11), "mla.link": (5e10, 0)}, None)[0]


def test_a_wrong_mode_is_refused():
    with pytest.raises(Exception, match="Unrecognized mode=fastest"):
        torch.compile(Combined(), backend="mla", mode="fastest")(*inputs())
