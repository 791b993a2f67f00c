"""The warp-specialised kernel of mla::paged_latent_attention: on a Hopper GPU, or its Python emulated without one."""

import pytest
import torch

from mla_compile.kernels.paged_latent_attention import gluon, paged_latent_attention_reference, warp_groups
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

from ..emulated import Emulated
from ..errors import assert_as_close_as
from ..paged import make_paged
from .where import INTERPRETED, ON_GPU, machine, to_device

pytestmark = [*ON_GPU]


def run(x, causal, monkeypatch, seed=0):
    if INTERPRETED:
        emulated = Emulated(warp_groups, warp_groups.attend_pages, seed)
        monkeypatch.setattr(gluon, "attend_pages", emulated)
    elif machine().arch != "sm_90":
        pytest.skip("for sm_90")
    bundle = PagedLatentAttention(*to_device(x.arguments), causal, x.scale)
    return [t.cpu() for t in gluon.paged_latent_attention_gluon(bundle, machine())]


def assert_right(x, causal, monkeypatch, seed=0):
    o, lse = run(x, causal, monkeypatch, seed)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


# lengths, queries and heads
CASES = {
    "one key": ([1], 1, 64),
    "odd lengths": ([130, 63, 65, 0, 1], 1, 16),
    "two tiles of rows": ([200], 1, 128),
    "rows to spare": ([70, 128], 3, 30),
    "fewer keys than queries": ([1, 3], 4, 16),
    "one sequence, cut": ([1500], 1, 16),
    "several, cut": ([900, 40, 700, 0, 333], 1, 16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_any_length(case, monkeypatch):
    lengths, queries, heads = case
    assert_right(make_paged(lengths, (queries, heads, 512, 64), 64, torch.bfloat16), True, monkeypatch)
