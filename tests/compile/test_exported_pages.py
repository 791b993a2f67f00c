"""Exported programs over a cache in pages: whichever path a run takes, it reads the pool and copies nothing of it."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import mla_compile
from mla_compile import exported
from mla_compile.cost import Device
from tests.errors import assert_as_close_as_eager
from tests.memory import peak

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")

N, L, P, R, V, PAGE_SIZE = 4, 32, 16, 8, 16, 16
COUNTING = Device("that only counts FLOPs", 1e9, 1e18)


class Paged(nn.Module):
    """The last Sq of `lengths` tokens of each sequence attend to all before them."""

    def __init__(self):
        super().__init__()
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)

    def forward(self, q, pool, table, lengths):
        latent, k_rope = pool[table].flatten(1, 2).split([L, R], dim=-1)
        k_nope, v = self.kv_b_proj(latent).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        last = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2])
        seen = (torch.arange(k.shape[2]) <= last[..., None])[:, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def inputs(queries, entries, pages=400):
    table = torch.randperm(pages)[: 2 * entries].view(2, entries)
    lengths = torch.tensor([entries * PAGE_SIZE, max(queries, entries * PAGE_SIZE - 19)])
    return torch.randn(2, N, queries, P + R), torch.randn(pages, PAGE_SIZE, L + R), table, lengths


@pytest.fixture(scope="module")
def programs():
    """The module, its rewritten program for any number of queries and pages, the lowered one, and the sites."""
    module = Paged().eval()
    shapes = {2: Dim("Sq", min=1, max=256)}, {0: Dim("pages", min=2)}, {1: Dim("entries", min=1, max=64)}, {}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported, "rates_of", lambda _: COUNTING)
        program = torch.export.export(module, inputs(3, 5), dynamic_shapes=shapes)
        program = mla_compile.rewrite(program, options={"mla.workspace_tokens": 64})
        return module, program, mla_compile.lower(program), mla_compile.last_report().sites


def check(run, module):
    exact = Paged().double()
    exact.load_state_dict(module.state_dict())
    results = []
    for queries, entries in ((1, 20), (40, 20), (200, 13), (3, 2)):
        given = inputs(queries, entries)
        results.append(
            (run(*given), module(*given), exact(*(t.double() if t.is_floating_point() else t for t in given)))
        )
    assert_as_close_as_eager(*(torch.cat([t.flatten() for t in kind]) for kind in zip(*results, strict=True)))


def ops_of(run, *given):
    """The paged ops that a run calls. An op that C++ dispatches may call its `_general` form, which is the same op."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(*given)
    names = {event.name for event in profiled.events() if event.name.startswith("mla::paged")}
    return {name.removesuffix("_general") for name in names}


def test_both_paths_read_the_pages(programs):
    module, program, _, (site,) = programs
    assert site.path == "absorbed or chunked"
    assert site.reason.endswith("reads the pages")
    run = program.module()
    check(run, module)
    ops = [ops_of(run, *inputs(queries, 20)) for queries in (1, 200)]
    assert ops == [{"mla::paged_latent_attention"}, {"mla::paged_expanded_attention"}]


def test_lowered(programs):
    module, _, lowered, _ = programs
    assert not any("mla." in str(node.target) for node in lowered.graph.nodes)
    check(lowered.module(), module)


@pytest.mark.parametrize("lowered", [False, True])
def test_memory_does_not_grow_with_the_pool(programs, lowered):
    run = programs[1 + lowered].module()
    for queries in (1, 200):
        taken = []
        for pages in (50, 5000):
            torch.manual_seed(0)
            q, pool, _, lengths = inputs(queries, 20, pages)
            given = q, pool, torch.randperm(50)[:40].view(2, 20), lengths
            taken.append(peak(lambda given=given: run(*given)))
        assert taken[0] == taken[1] < pool.nbytes


@pytest.mark.slow
def test_a_package(programs, tmp_path):
    module, _, lowered, _ = programs
    package = torch._inductor.aoti_compile_and_package(lowered, package_path=str(tmp_path / "paged.pt2"))
    check(torch._inductor.aoti_load_package(package), module)
