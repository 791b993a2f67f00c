"""`examples/paged.py`: a step is right, and what it allocates does not depend on how large the pool is."""

import runpy
from pathlib import Path

import torch

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.memory import peak

EXAMPLE = Path(__file__).parents[2] / "examples" / "paged.py"


def test_a_step_writes_in_place_and_reads_what_its_sequences_have():
    example = runpy.run_path(str(EXAMPLE))
    layer = example["PagedMLA"]()
    exact_layer = example["PagedMLA"]().double()
    exact_layer.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="mla", fullgraph=True)
    taken = []
    for pages in (64, 2048, 4096):
        torch.manual_seed(0)
        pool = mla_compile.PagePool(1, layer.L, layer.R, pages, page_size=16)
        tables = example["sequences"](pool, [301, 46, 171])
        block_table, lengths = mla_compile.cache.stack(tables)
        x = torch.randn(3, 1, 256)
        before = pool.layers[0].clone()
        eager = layer(x, pool.layers[0], block_table, lengths)
        written, pool.layers[0][:] = pool.layers[0].clone(), before
        exact = exact_layer(x.double(), before.double(), block_table, lengths)
        result = compiled(x, pool.layers[0], block_table, lengths)
        assert_as_close_as_eager(result, eager, exact)
        torch.testing.assert_close(pool.layers[0], written)
        assert (pool.layers[0] != before).any(-1).sum() == 3
        layer_pool = pool.layers[0]
        taken.append(peak(lambda x=x, pool=layer_pool, table=block_table, n=lengths: compiled(x, pool, table, n)))
    assert taken[0] == taken[1] == taken[2] < pool.layers[0].nbytes / 10
    reports = mla_compile.reports()
    assert len(reports) <= 2
    for report in reports:
        assert report.sites[0].reason.endswith("reads the pages")


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "1 of 1 attentions rewritten" in capsys.readouterr().out
