"""Costs against counts of the products themselves, crossovers against arithmetic, decisions against the roofline."""

from fractions import Fraction
from itertools import product

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_compile.cost import Cost, Device, Dims, Named, predicted_seconds
from mla_compile.passes.paths.absorbed import Absorbed
from mla_compile.passes.paths.absorbed import absorbed_cost as absorbed
from mla_compile.passes.paths.as_written import expanded_cost as expanded
from mla_compile.passes.paths.chunked import chunked_cost as chunked
from mla_compile.passes.paths.fastest import fastest as choose
from mla_compile.passes.paths.sparse import Sparse
from mla_compile.passes.paths.sparse import sparse_cost as sparse
from tests.drawn import UNHURRIED

V3 = {"N": 128, "L": 512, "P": 128, "R": 64, "V": 128}
CPU = Device("cpu", 1.4e11, 1.3e10)
SMALL = Dims(B=2, Sq=2, T=5, N=3, L=4, P=2, R=1, V=3)
FEW = Named(2048, causal=True)
Sq, T = sympy.symbols("s0 s1", integer=True, positive=True)
QUERIES = sympy.Symbol("Sq", positive=True)
"""The unknown of `crossover_queries`; its `T` may be written in terms of it."""


def count_flops(dims: Dims, causal: bool, absorb: bool) -> int:
    """Count the multiply-adds of the products one by one."""
    multiply_adds = 0
    for _b, _n in product(range(dims.B), range(dims.N)):
        for _token, _l in product(range(dims.Sq if absorb else dims.T), range(dims.L)):
            multiply_adds += dims.P + dims.V
        for query, key in product(range(dims.Sq), range(dims.T)):
            if not causal or key <= dims.T - dims.Sq + query:
                multiply_adds += 2 * dims.L + dims.R if absorb else dims.P + dims.R + dims.V
    return 2 * multiply_adds


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_products(causal):
    assert absorbed(SMALL, 2, causal=causal).flops == count_flops(SMALL, causal, absorb=True)
    assert expanded(SMALL, 2, causal=causal).flops == count_flops(SMALL, causal, absorb=False)
    assert chunked(SMALL, 2, 3, causal=causal).flops == count_flops(SMALL, causal, absorb=False)


def test_bytes_are_those_of_the_tensors():
    weights, latent_cache, query, output = 3 * 4 * (2 + 3), 2 * 5 * (4 + 1), 2 * 2 * 3 * (2 + 1), 2 * 2 * 3 * 3
    once = weights + latent_cache + query + output
    latent_query_and_output = 2 * (2 * 2 * 3 * 4)
    keys, values = 2 * 3 * 5 * (2 + 1), 2 * 3 * 5 * 3
    nope_keys = 2 * 3 * 5 * 2
    assert absorbed(SMALL, 2).bytes == 2 * (once + 2 * latent_query_and_output)
    assert expanded(SMALL, 2).bytes == 2 * (once + 2 * (keys + values))
    one_more_chunk = weights + query + 4 * output
    assert chunked(SMALL, 2, 4).bytes == 2 * (once + 2 * (nope_keys + values) + one_more_chunk)


def test_chunks_are_never_counted_short():
    costs = [chunked(Dims(1, 1, tokens, 1, 1, 1, 1, 1), 1, 4).bytes for tokens in (4, 5)]
    per_token, per_chunk = 2 + 2 * 2, 2 + 2 + 4
    once = 2 + 2 + 1
    assert costs[1] == once + 5 * per_token + per_chunk
    assert once + 4 * per_token < costs[0] < once + 4 * per_token + per_chunk


def test_per_cached_token_figures_of_the_design():
    def difference(cost, tokens):
        return cost(Dims(B=1, Sq=1, T=tokens + 1, **V3)) - cost(Dims(B=1, Sq=1, T=tokens, **V3))

    per_token_expanding = difference(lambda d: expanded(d, 2).flops, 100)
    per_token_scores = 2 * 128 * (128 + 64 + 128)
    assert per_token_expanding - per_token_scores == pytest.approx(33.6e6, rel=2e-3)
    assert difference(lambda d: absorbed(d, 2).flops, 100) == pytest.approx(0.28e6, rel=2e-2)
    assert difference(lambda d: absorbed(d, 2).bytes, 100) == 1152


def crossover_queries(T, L, P, V):
    """Query tokens at which absorbing and expanding take equally many FLOPs; fewer favour absorbing.

    `T` is the key tokens in all: a number, a symbol, `sympy.oo`, or an expression in `QUERIES` where the context rather
    than the total is given (`QUERIES + 1000`; with no context `QUERIES`). None if they are nowhere equal, for instance
    with no context, where expanding always wins. `B`, `N` and `R` cancel.
    """
    total = sympy.Symbol("T", positive=True)
    dims = Dims(B=1, Sq=QUERIES, T=total, N=1, L=L, P=P, R=0, V=V)
    difference = absorbed(dims, 1).flops - expanded(dims, 1).flops
    if T is sympy.oo:
        solutions = [sympy.limit(s, total, sympy.oo) for s in sympy.solve(difference, QUERIES)]
    else:
        solutions = sympy.solve(difference.subs(total, T), QUERIES)
    possible = [s for s in solutions if s.is_positive is not False and s.is_finite is not False]
    return possible[0] if possible else None


@pytest.mark.parametrize(
    ("total", "queries"),
    [
        pytest.param(QUERIES + 1000, 148.588, id="context 1000"),
        pytest.param(1000, 145.786, id="1000 tokens in all"),
        pytest.param(sympy.oo, 512 / 3, id="long context"),
    ],
)
def test_crossover_of_deepseek_v3(total, queries):
    assert float(crossover_queries(total, L=512, P=128, V=128)) == pytest.approx(queries, abs=1e-3)


def test_crossover_is_the_formula_of_the_design():
    L, P, V, tokens = sympy.symbols("L P V T", positive=True)
    c = L * (P + V) / (2 * L - P - V)
    assert sympy.simplify(crossover_queries(tokens, L, P, V) - c * tokens / (c + tokens)) == 0


def test_no_crossover():
    assert crossover_queries(QUERIES, L=512, P=128, V=128) is None, "no context: expanding always wins"
    assert crossover_queries(1000, L=100, P=128, V=128) is None, "narrow latent: absorbing always wins"


def test_roofline_is_the_slower_of_compute_and_memory():
    device = Device("d", flops_per_s=10.0, bytes_per_s=5.0)
    assert predicted_seconds(Cost(sympy.Integer(100), sympy.Integer(20)), device) == 10.0
    assert predicted_seconds(Cost(sympy.Integer(100), sympy.Integer(60)), device) == 12.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_device_rates_are_checked(rate):
    with pytest.raises(ValueError, match="expected a positive and finite bytes_per_s, found "):
        Device("d", 1.0, rate)


def test_workspace_and_element_size_are_checked():
    with pytest.raises(ValueError, match="workspace_tokens: expected at least 1, found 0"):
        chunked(SMALL, 2, 0)
    with pytest.raises(ValueError, match="element_size: expected at least 1 byte, found 0"):
        absorbed(SMALL, 0)


def test_decode_absorbs_and_prefill_expands():
    assert choose(Dims(B=1, Sq=1, T=4096, **V3), CPU, 4, 4096).path == "absorbed"
    assert choose(Dims(B=1, Sq=4096, T=4096, **V3), CPU, 4, 4096).path == "chunked"


def test_numbers_need_no_conditions():
    assert choose(Dims(B=1, Sq=1, T=4096, **V3), CPU, 4, 4096).conditions == ()


def test_prefill_without_context_expands_at_any_length():
    decision = choose(Dims(B=1, Sq=Sq, T=Sq, **V3), CPU, 4, 4096, {Sq: 1024})
    assert decision.path == "chunked"
    assert decision.conditions == ()


def test_decode_needs_one_bound():
    decision = choose(Dims(B=1, Sq=1, T=T + 1, **V3), CPU, 4, 4096, {T: 1024})
    assert decision.path == "absorbed"
    assert decision.conditions == (T >= 3,)


def test_bounds_reach_up_to_where_the_choice_changes():
    dims = Dims(B=1, Sq=Sq, T=5000, **V3)
    decision = choose(dims, CPU, 4, 4096, {Sq: 8})
    (condition,) = decision.conditions
    assert decision.path == "absorbed"
    assert condition.rel_op == "<="
    last = int(condition.rhs)
    assert choose(Dims(B=1, Sq=last, T=5000, **V3), CPU, 4, 4096).path == "absorbed"
    assert choose(Dims(B=1, Sq=last + 1, T=5000, **V3), CPU, 4, 4096).path == "chunked"


def test_a_symbol_without_hint_is_named():
    with pytest.raises(ValueError, match=r"expected a hint for every symbol of the dims, found none for \['s1'\]"):
        choose(Dims(B=1, Sq=Sq, T=Sq + T, **V3), CPU, 4, 4096, {Sq: 1})


def test_sparse_flops_and_bytes_are_those_of_the_products_and_tensors():
    """Two named keys of five cost as much as a dense context of two, except that each query gathers its own."""
    few = Dims(**{**vars(SMALL), "T": 2})
    assert sparse(SMALL, 2, 2).flops == absorbed(few, 2).flops
    keys, indices = 2 * 2 * (4 + 1), 8 * 2 * 2 * 2
    assert sparse(SMALL, 2, 2).bytes == absorbed(few, 2).bytes + 2 * keys + indices
    assert not sparse(Dims(B=1, Sq=1, T=T, **V3), 2, 2048).bytes.free_symbols


def test_few_named_keys_of_many_are_sparse_and_all_or_most_of_them_dense():
    def path(Sq, T, topk, causal=False):
        return choose(Dims(B=1, Sq=Sq, T=T, **V3), CPU, 2, 1024, named=Named(topk, causal)).path

    assert path(1, 65536, 2048) == path(1, 65536, 2048, causal=True) == "sparse"
    assert path(1, 2048, 2048) == "absorbed"
    assert path(1, 2000, 2048) == "absorbed"
    assert path(4096, 65536, 2048) == "sparse"
    assert path(4096, 4096, 2048) == "chunked"
    assert path(8192, 8192, 2048) == path(16384, 16384, 2048, causal=True) == "sparse"
    assert path(8192, 8192, 2048, causal=True) == "chunked"  # half of all pairs, at a third of the width


def test_as_many_named_keys_as_there_are_is_dense_at_any_length():
    decision = choose(Dims(B=1, Sq=1, T=T, **V3), CPU, 2, 1024, {T: 1024}, named=Named(T, causal=True))
    assert (decision.path, decision.conditions) == ("absorbed", (T >= 4,))


def test_a_sparse_decode_says_from_what_length_on():
    decision = choose(Dims(B=1, Sq=1, T=T, **V3), CPU, 2, 1024, {T: 65536}, named=FEW)
    (condition,) = decision.conditions
    assert decision.path == "sparse"
    assert choose(Dims(B=1, Sq=1, T=int(condition.rhs) - 1, **V3), CPU, 2, 1024, named=FEW).path == "absorbed"


def test_attention_absorbed_by_hand_has_no_keys_to_expand():
    dims = Dims(B=1, Sq=4096, T=4096, **V3)
    assert choose(dims, CPU, 4, 1024, paths=[Absorbed(), Sparse()]).path == "absorbed"
    assert choose(dims, CPU, 4, 1024, named=Named(64, causal=True), paths=[Absorbed(), Sparse()]).path == "sparse"


sizes = st.integers(1, 5000)
widths = st.integers(1, 40).map(lambda n: 16 * n)
rates = st.tuples(st.integers(10, 99), st.integers(7, 14)).map(lambda r: r[0] * 10.0 ** r[1])
devices = st.builds(Device, st.just("d"), rates, rates)
shapes = st.sampled_from(
    [
        {"B": 1, "Sq": 1, "T": T + 1},
        {"B": 1, "Sq": T, "T": T},
        {"B": 1, "Sq": Sq, "T": 4096},
        {"B": 1, "Sq": Sq, "T": Sq + T},
        {"B": Sq, "Sq": 1, "T": T},
        {"B": Sq, "Sq": T, "T": T},
        {"B": 3, "Sq": Sq, "T": 2 * T + Sq},
        {"B": 1, "Sq": 4, "T": 8 * sympy.floor(T / 8) + 8},
    ]
)


def roofline_path(dims, device, element_size, workspace_tokens, topk=None, causal=False):
    def seconds(cost):
        flops, moved = (Fraction(int(x.p), int(x.q)) for x in (cost.flops, cost.bytes))
        return max(flops / Fraction(device.flops_per_s), moved / Fraction(device.bytes_per_s))

    costs = {
        "absorbed": absorbed(dims, element_size, causal=causal),
        "chunked": chunked(dims, element_size, workspace_tokens, causal=causal),
    }
    if topk is not None:
        costs["sparse"] = sparse(dims, element_size, topk)
    return min(costs, key=lambda path: seconds(costs[path]))


@settings(UNHURRIED, max_examples=75)
@given(
    shape=shapes,
    fixed=st.fixed_dictionaries({"N": st.integers(1, 128), "L": widths, "P": widths, "R": widths, "V": widths}),
    device=devices,
    element_size=st.sampled_from([1, 2, 4]),
    workspace_tokens=sizes,
    topk=st.sampled_from([None, 1, 64, 2048, T]),
    causal=st.booleans(),
    hints=st.tuples(sizes, sizes),
    points=st.lists(st.tuples(sizes, sizes), min_size=8, max_size=8),
)
def test_where_the_conditions_hold_the_roofline_agrees(
    shape, fixed, device, element_size, workspace_tokens, topk, causal, hints, points
):
    dims = Dims(**shape, **fixed)
    symbols = set().union(*(sympy.sympify(size).free_symbols for size in (*shape.values(), topk or 1)))
    given_hints = dict(zip((Sq, T), hints, strict=True))
    decision = choose(dims, device, element_size, workspace_tokens, given_hints, named=topk and Named(topk, causal))
    causal = causal and topk is not None
    if topk is not None and topk == shape["T"]:
        topk = None  # every key is named

    def at(point):
        values = dict(zip((Sq, T), point, strict=True))
        holds = all(condition.subs(values) == True for condition in decision.conditions)  # noqa: E712
        numbers = {name: int(sympy.sympify(size).subs(values)) for name, size in shape.items()}
        named = None if topk is None else int(sympy.sympify(topk).subs(values))
        return holds, roofline_path(Dims(**numbers, **fixed), device, element_size, workspace_tokens, named, causal)

    assert at(hints) == (True, decision.path)
    for condition in decision.conditions:
        assert condition.free_symbols <= symbols
        assert condition.free_symbols
        polynomial = sympy.Poly(condition.lhs - condition.rhs)
        assert all(coefficient.is_Integer for coefficient in polynomial.coeffs())
    near = [tuple(max(1, h + d) for h in hints) for d in (-1, 1)]
    for point in points + near:
        holds, path = at(point)
        assert path == decision.path or not holds


@settings(UNHURRIED, max_examples=40)
@given(device=devices, hint=sizes, queries=st.integers(1, 600))
def test_bounds_on_one_symbol_are_the_widest(device, hint, queries):
    """The first integer outside of each bound has the other choice."""
    decision = choose(Dims(B=1, Sq=queries, T=T + queries, **V3), device, 2, 1024, {T: hint})
    for condition in decision.conditions:
        outside = int(condition.rhs) + (1 if condition.rel_op == "<=" else -1)
        dims = Dims(B=1, Sq=queries, T=outside + queries, **V3)
        assert roofline_path(dims, device, 2, 1024) != decision.path
