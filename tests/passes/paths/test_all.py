"""The list of paths: each has its own cost, one that is added is known everywhere, and an unknown name is refused."""

from __future__ import annotations

import copy

import pytest
import sympy
from torch import fx

from mla_compile.cost import Cost, Dims, Named
from mla_compile.inspect.costs import style
from mla_compile.options import Options
from mla_compile.passes.paths import all as every
from mla_compile.passes.paths.absorbed import Absorbed, absorbed_cost
from mla_compile.passes.paths.chunked import chunked_cost
from mla_compile.passes.paths.fastest import fastest
from mla_compile.passes.paths.sparse import sparse_cost
from mla_compile.passes.pipeline import Pipeline
from tests.passes.checks import check_right
from tests.passes.graphs import DEVICE, capture, rewrite, run
from tests.passes.spellings import naive, softmax, tensors

DIMS = Dims(B=2, Sq=2, T=500, N=3, L=4, P=2, R=1, V=3)


@pytest.mark.parametrize(
    "ask",
    [
        every.path_named,
        lambda name: Pipeline(DEVICE, name)(fx.GraphModule({}, fx.Graph())),
        lambda name: Options(path=name),
    ],
    ids=["by name", "of the pipeline", "of the options"],
)
def test_an_unknown_path_is_refused_with_those_that_there_are(ask) -> None:
    with pytest.raises(ValueError, match=r"absorbed, .*chunked") as raised:
        ask("sparce")
    assert "'sparce'" in str(raised.value)


def test_each_path_has_its_own_cost() -> None:
    costs = {path.name: path.cost(DIMS, 2, 100, Named(7, causal=False)) for path in every.PATHS}
    assert costs == {
        "absorbed": absorbed_cost(DIMS, 2),
        "opaque": absorbed_cost(DIMS, 2),
        "chunked": chunked_cost(DIMS, 2, 100),
        "by heads": chunked_cost(DIMS, 2, 100),
        "sparse": sparse_cost(DIMS, 2, 7),
        "values": every.path_named("values").cost(DIMS, 2, 1, None),
    }
    assert len(set(costs.values())) == 4


def test_where_few_keys_are_named_other_paths_compute_what_a_causal_limit_leaves() -> None:
    costs = {path.name: path.cost(DIMS, 2, 100, Named(7, causal=True)) for path in every.PATHS}
    assert costs == {
        "absorbed": absorbed_cost(DIMS, 2, causal=True),
        "opaque": absorbed_cost(DIMS, 2, causal=True),
        "chunked": chunked_cost(DIMS, 2, 100, causal=True),
        "by heads": chunked_cost(DIMS, 2, 100, causal=True),
        "sparse": sparse_cost(DIMS, 2, 7),
        "values": every.path_named("values").cost(DIMS, 2, 1, None),
    }


def test_the_sparse_path_has_no_cost_without_a_number_of_keys() -> None:
    with pytest.raises(ValueError, match="takes a number of named keys"):
        every.path_named("sparse").cost(DIMS, 2, 100, None)


class Free(Absorbed):
    """The absorbed path under another name, at no cost."""

    name = "free"
    why = "it costs nothing"

    def cost(self, *args) -> Cost:
        return Cost(sympy.Integer(0), sympy.Integer(0))


@pytest.fixture
def one_more(monkeypatch) -> None:
    monkeypatch.setattr(every, "PATHS", (*every.PATHS, Free()))


@pytest.mark.usefixtures("one_more")
@pytest.mark.parametrize(("wanted", "why"), [("free", "asked for by mla.path"), ("auto", "it costs nothing (Sq=")])
def test_one_more_path_is_one_more_entry(wanted: str, why: str) -> None:
    traced = capture(lambda *args: softmax(*naive(*args)), *tensors())
    before = run(traced, *tensors())
    module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    (outcome,) = rewrite(module, wanted)
    assert outcome.path == "free"
    assert outcome.reason.startswith(why)
    check_right(before, run(module, *tensors()))


@pytest.mark.usefixtures("one_more")
def test_one_more_path_may_be_asked_for_and_is_shown() -> None:
    assert Options(path="free").path == "free"
    assert fastest(DIMS, DEVICE, 4, 1024).path == "free"
    assert style("free") == "absorbs"
    assert style("unchanged") == ""
