"""With heads divided along one dim of a mesh and tokens along another, ranks generate what one process does."""

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mla_compile
from mla_compile import PagedLatentCache
from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted
from tests.distributed.processes import in_processes
from tests.distributed.test_shared_cache import PAGE, build, generated

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

HEADS = 8
LAYOUTS = {
    "two ranks of tokens by two of heads": ("tp", "queries", 4),
    "four ranks of heads, of which two share tokens": ("cp_tp", "masks", 2),
}
"""The dim of the mesh along which heads are divided, `mla.same_on_ranks`, and the heads of a rank."""
STYLES = {
    "self_attn.q_b_proj": ColwiseParallel,
    "self_attn.kv_b_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def on_each_rank():
    """For each layout, tokens of one process and of ranks, eager and compiled; sites; pages in use; weights' sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    mesh._flatten("cp_tp")
    codegen.compile_fx_inner = interpreted
    found = []
    with functorch_config.patch(enable_autograd_cache=False), torch.no_grad():
        for heads, same, _ in LAYOUTS.values():
            torch._dynamo.reset()
            model = build(layers=1, heads=HEADS)
            whole = PagedLatentCache.of(model, 60, PAGE)
            expected = generated(model, whole, True, "greedy")
            for layer in model.model.layers:
                parallelize_module(layer, mesh[heads], {name: style() for name, style in STYLES.items()})
            eager = generated(model, PagedLatentCache.of(model, 30, PAGE, mesh=mesh["cp"]), True, "greedy")
            before = len(mla_compile.reports())
            model.compile(backend="mla", options={"mla.same_on_ranks": same, "mla.keys_stay": True})
            cache = PagedLatentCache.of(model, 30, PAGE, mesh=mesh["cp"])
            compiled = generated(model, cache, True, "greedy")
            sites = [site for report in mla_compile.reports()[before:] for site in report.sites]
            weights = {
                name.split(".")[-2]: (parameter.numel(), parameter.to_local().numel())
                for name, parameter in model.named_parameters()
                if isinstance(parameter, DTensor)
            }
            described = [(site.path, site.shapes["N"], site.reason) for site in sites]
            pages = cache.table.used, whole.table.used
            found.append(((expected, eager, compiled), described, pages, weights))
    return found


@pytest.fixture(scope="module")
def found():
    return in_processes(on_each_rank, 4)


@pytest.mark.parametrize(("index", "layout"), list(enumerate(LAYOUTS.values())), ids=LAYOUTS)
def test_tokens_are_those_of_one_process_and_each_rank_has_its_share(found, index, layout):
    _, _, heads = layout
    for of_rank in found:
        (expected, eager, compiled), sites, (used, of_all), weights = of_rank[index]
        assert torch.equal(eager, expected)
        assert torch.equal(compiled, expected)
        assert sites
        assert all("2 ranks attend to their own keys and exchange outputs" in reason for *_, reason in sites)
        assert {n for _, n, _ in sites} == {f"{heads}"}
        assert used == -(-of_all // 2)
        assert weights.keys() == {name.split(".")[-1] for name in STYLES}
        assert {whole // own for whole, own in weights.values()} == {HEADS // heads}
