"""Keys that are gathered from ranks stay where they are: each rank attends to its own, and outputs are exchanged."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.debug import CommDebugMode

import mla_compile
import mla_compile.kernels.register
from mla_compile.options import Options
from mla_compile.passes.paths.exchange import (
    Gathered,
    InLatentSpace,
    OutsideOfWeights,
    ScatteredAndGathered,
    ToOwnHeads,
)
from mla_compile.passes.pipeline import Pipeline
from tests.distributed import naive
from tests.distributed.processes import in_processes
from tests.errors import assert_as_close_as_eager
from tests.without_codegen import without_codegen

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="torch 2.11 traces all_gather_tensor along the first dimension of contiguous tensors only",
)
B, T = 3, 96
RATES = 1e12, 1e11
ATOL = 8 * torch.finfo(torch.float32).eps
"""Even in float64, parts are merged by log-sum-exps in float32, which are below 8 here: the weight of a part may be off
by half an eps of that, and outputs are below 2."""


def collectives_of(graph):
    """For each collective of a graph, its name and the bytes that a rank receives from others."""
    found = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", None) == "_c10d_functional" and "wait" not in str(node.target):
            ranks = dist.get_world_size()
            found.append((node.target._opname, node.meta["val"].nbytes * (ranks - 1) // ranks))
    return found


def rewritten(function, case, inputs):
    """What the passes make of a function: outcome, collectives in the graph and in a run, and the result of the run."""
    seen = {}

    def compiler(module, _):
        agreement = Options(same_on_ranks=case.same, keys_stay=case.stay, link=case.link, rates=RATES).agreement
        (result,) = Pipeline(agreement.device, case.path, agreement=agreement)(module)
        seen["outcome"], seen["graph"] = (result.outcome.path, result.outcome.reason), collectives_of(module.graph)
        seen["ops"] = {str(node.target) for node in module.graph.nodes}

        def run(*arguments):
            with CommDebugMode() as counted:
                outputs = fx.Interpreter(module).run(*arguments)  # the mode's own hooks fail on a module
            seen["counted"] = sorted((str(op), count) for op, count in counted.get_comm_counts().items())
            return outputs

        return run

    torch._dynamo.reset()
    seen["result"] = torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*inputs)
    return seen


def share_out(gather, seed, heads, B, Sq, T, dtype):
    """The operands with this rank's share of the keys, and all keys; queries are a rank's own if its seed is."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, _, latent, k_rope = naive.make(0, ranks, B, Sq, T, dtype)
    q, kv_b, _, _ = naive.make(seed, ranks, B, Sq, T, dtype, naive.N * (ranks if heads in ("queries", "all") else 1))
    if heads == "weights":
        _, kv_b, _, _ = naive.make(1, ranks, B, Sq, T, dtype, naive.N * ranks)
    own = naive.place(gather, T, rank, ranks)
    return (q, latent[:, own], k_rope[:, own], kv_b), (latent, k_rope)


def own_heads(heads, q, kv_b):
    """This rank's heads of the queries and weights, where it has those of all heads."""
    rank = dist.get_rank()
    mine = slice(rank * naive.N, rank * naive.N + naive.N)
    if heads in ("weights", "queries"):
        kv_b = kv_b.unflatten(0, (-1, naive.P + naive.V))[mine].flatten(0, 1)
    return q[:, :, mine] if heads == "queries" else q, kv_b


@dataclass(frozen=True)
class Case:
    """A spelling of the gather in `naive`, `mla.same_on_ranks`, and how the function attends."""

    spelling: str
    same: str = "program"
    Sq: int = 1
    mask: str = "none"
    dtype: torch.dtype = torch.float64
    T: int = T
    pages: bool = False
    """Whether a rank has its share in pages, which it reads before the ranks gather."""
    path: str = "auto"
    kept: int | None = None
    """How many of the gathered keys are attended to, the first ones: ranks gather whole turns of each."""
    stay: bool = False
    """Whether keys stay even if outputs have more bytes (`mla.keys_stay`)."""
    heads: str = "own"
    """What a rank has besides its own heads, which it attends with: nothing (`own`), the `weights` of all heads, or the
    `queries` of all heads too; or `all`: it attends with all heads."""
    link: tuple[float, float] | None = None
    compiled: bool = False
    """Whether the function is also compiled by `torch.compile`."""
    code: bool = False
    """Whether Inductor then generates code, which takes seconds, instead of running the graph as it is."""


@torch.no_grad()
def attend_in_shares(case):
    """On one rank: what the passes make, what torch.compile with the backend does, eager, and the exact result."""
    gather, Sq, T = getattr(naive, case.spelling), case.Sq, case.T
    seed = 1 if case.same == "queries" else 1 + dist.get_rank()
    (q, latent, k_rope, kv_b), whole = share_out(gather, seed, case.heads, B, Sq, T, case.dtype)
    keys = T if case.kept is None else case.kept
    lengths = torch.tensor([keys, keys // 2 + 1, Sq])
    given = (lengths,) if case.mask == "lengths" else ()
    latent, k_rope = naive.paged(latent, k_rope) if case.pages else (latent, k_rope)

    def hidden(*given):
        if case.mask == "lengths":
            return naive.up_to(*given, Sq, keys)
        return naive.causal(Sq, keys) if case.mask == "causal" else None

    def function(q, latent, k_rope, kv_b, *given):
        shares = naive.gathered(gather, latent, k_rope, pages=case.pages)
        q, kv_b = own_heads(case.heads, q, kv_b)
        return naive.attend(q, *shares, kv_b, hidden(*given), case.kept)

    inputs = q, latent, k_rope, kv_b, *given
    found = rewritten(function, case, inputs)
    found |= {"eager": function(*inputs)}
    q, kv_b = own_heads(case.heads, q, kv_b)
    found |= {"exact": naive.attend(*(t.double() for t in (q, *whole, kv_b)), hidden(*given), case.kept)}
    if case.compiled:
        torch._dynamo.reset()
        options = {"mla.same_on_ranks": case.same, "mla.path": case.path, "mla.keys_stay": case.stay}
        options |= {"mla.link": case.link, "mla.rates": RATES}
        with contextlib.nullcontext() if case.code else without_codegen():
            found["compiled"] = torch.compile(function, backend="mla", options=options)(*inputs)
        site = mla_compile.last_report().sites[0]
        assert (site.path, site.reason) == found["outcome"]
    return found


def assert_right(found):
    for result in found.keys() & {"result", "compiled"}:
        if found[result].dtype == torch.float64:
            torch.testing.assert_close(found[result], found["exact"], rtol=0, atol=ATOL)
        else:
            assert_as_close_as_eager(found[result], found["eager"], found["exact"])


def assert_exchanged(found, expected="absorbed", ranks=2):
    assert_right(found)
    path, reason = found["outcome"]
    assert path == expected
    assert f"{ranks} ranks attend to their own keys and exchange outputs" in reason


def bytes_of_gathered_queries(Sq, element, ranks=2):
    """What a rank receives: the queries of others, and from each of them the outputs for its own queries."""
    rows = (ranks - 1) * B * Sq * naive.N
    return [
        ("all_gather_into_tensor", rows * (naive.L + naive.R) * element),
        ("all_to_all_single", rows * (naive.L * element + 4)),
    ]


SPELLED = {
    name: Case(name) for name in ("along_tokens", "tokens_first", "into_tensor", "list_of_tensors", "redistributed")
}
MASKED = {
    f"{layout}, {mask}, {Sq} queries": Case(layout, "masks", Sq, mask)
    for layout in ("along_tokens", "by_token", "by_page")
    for mask in ("causal", "lengths")
    for Sq in (1, 3)
}
SOON = ("along_tokens, causal, 3", "along_tokens, lengths, 1", "by_token, causal, 1", "by_token, lengths, 3")
SOON += ("by_page, causal, 1", "by_page, lengths, 3")
MASKED["with generated code"] = Case("by_page", "masks", 3, "lengths", compiled=True, code=True)
SLOW_MASKED = [name for name in MASKED if not name.startswith(SOON)]
"""Each two values of layout, mask and number of queries occur together in a case that is not slow."""
SAME_QUERIES = {mask: Case("by_token", "queries", 2, mask) for mask in ("none", "causal", "lengths")}
HALF = {
    str(dtype): Case("along_tokens", dtype=dtype, compiled=dtype == torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32)
}
PAGED = {
    f"{layout}, {mask}, {same}, {Sq} queries": Case(layout, same, Sq, mask, pages=True, compiled=Sq == 1)
    for layout, mask, same, Sq in (
        ("by_page", "none", "program", 1),
        ("along_tokens", "lengths", "masks", 3),
        ("by_page", "lengths", "queries", 3),
        ("by_token", "causal", "program", 2),
    )
}
CHUNKED = {"chunked": Case("by_token", "queries", 4, "causal", path="chunked")}
NARROW, FAR = (1e6, 0.0), (1e15, 1.0)
"""A link on which only bytes count, and one on which only messages do."""
FORMS = {
    "weights of all heads": (Case("by_page", "masks", 3, "causal", heads="weights", link=NARROW), OutsideOfWeights),
    "the same, chunked": (
        Case("by_page", "masks", 3, "causal", heads="weights", link=NARROW, path="chunked"),
        OutsideOfWeights,
    ),
    "weights of all heads, and messages are what counts": (
        Case("by_page", "masks", 3, "lengths", heads="weights", link=FAR),
        InLatentSpace,
    ),
    "the link is not known": (Case("by_page", "masks", 3, heads="weights"), InLatentSpace),
    "weights that may not be the same": (Case("by_page", "program", 3, heads="weights", link=NARROW), InLatentSpace),
    "queries of all heads": (
        Case("by_token", "queries", 2, "lengths", heads="queries", pages=True),
        ToOwnHeads,
    ),
    "no fewer bytes with two ranks": (Case("by_page", "queries", 2, "causal", heads="all", link=NARROW), Gathered),
    "messages are what counts": (Case("by_page", "queries", 2, "causal", heads="all", link=FAR), Gathered),
}
CUT = {
    f"{layout}, {mask}, {same}, {Sq} of {kept} of {tokens}": Case(
        layout, same, Sq, mask, T=tokens, pages=pages, path=path, kept=kept, stay=True, compiled=kept == 7
    )
    for layout, same, Sq, mask, tokens, kept, pages, path in (
        ("by_page", "program", 3, "none", 96, 41, False, "absorbed"),
        ("by_token", "masks", 3, "causal", 96, 41, False, "absorbed"),
        ("along_tokens", "masks", 2, "lengths", 96, 50, False, "absorbed"),
        ("along_tokens", "masks", 2, "lengths", 96, 40, False, "absorbed"),  # all on the first rank
        ("by_page", "queries", 3, "lengths", 96, 41, True, "absorbed"),
        ("by_page", "queries", 7, "causal", 8, 7, True, "chunked"),  # a first prompt
        ("by_page", "queries", 3, "causal", 8, 3, True, "chunked"),  # all on the first rank
    )
}
SLOW_FORMS = "the same, chunked", "weights that may not be the same", "messages are what counts"
SLOW_FORMS += ("weights of all heads, and messages are what counts",)


def but_for_slow(cases, *slow):
    """The parameters of a test, of which those of these names are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[pytest.mark.slow] * (name in slow)
        )
        for name, case in cases.items()
    ]


UNPROVED = {
    "mla.same_on_ranks is nothing": Case("along_tokens", "nothing"),
    "other ranks may have other masks (mla.same_on_ranks)": Case("along_tokens", "program", 1, "lengths"),
}
SHORT = {"that moves fewer bytes than exchanging outputs": Case("along_tokens", "program", 1, "none", T=4)}
CASES = [*(SPELLED | MASKED).values(), *(SAME_QUERIES | HALF | PAGED | CHUNKED | CUT | UNPROVED | SHORT).values()]
CASES += [case for case, _ in FORMS.values()]


def all_cases(cases):
    naive.meet()
    return [attend_in_shares(case) for case in cases]


@pytest.fixture(scope="module")
def found(request):
    """What each of two ranks found of each case of the tests that run."""
    of_tests = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = {call.params["case"] for call in of_tests if call is not None}
    cases = [case for case in CASES if case in asked]
    return {case: results for case, *results in zip(cases, *in_processes(all_cases, 2, cases), strict=True)}


@pytest.mark.parametrize("case", SPELLED.values(), ids=SPELLED)
def test_any_spelling_of_the_gather(found, case):
    sizes = {"B": B, "Sq": 1, "T": T, "N": naive.N, "L": naive.L, "P": naive.P, "R": naive.R, "V": naive.V}
    formula = InLatentSpace("group", 2).received(sizes, 8)
    for one in found[case]:
        assert_exchanged(one)
        assert one["graph"] == bytes_of_gathered_queries(1, 8)
        assert sum(received for _, received in one["graph"]) == formula
        assert one["counted"] == [
            ("c10d_functional.all_gather_into_tensor", 1),
            ("c10d_functional.all_to_all_single", 1),
        ]


@pytest.mark.parametrize("case", but_for_slow(MASKED, *SLOW_MASKED))
def test_masks_are_told_by_position(found, case):
    """Also for ranks without keys: not every rank has one of the last sequence's one or three tokens."""
    for one in found[case]:
        assert_exchanged(one)
        assert one["graph"] == bytes_of_gathered_queries(case.Sq, 8)


@pytest.mark.parametrize("case", but_for_slow(SAME_QUERIES, "causal"))
def test_queries_that_all_ranks_have_are_not_sent(found, case):
    for one in found[case]:
        assert_exchanged(one)
        assert one["graph"] == [("all_gather_into_tensor", B * case.Sq * naive.N * (naive.V * 8 + 4))]


@pytest.mark.parametrize("case", HALF.values(), ids=HALF)
def test_narrower_numbers(found, case):
    for one in found[case]:
        assert_exchanged(one)
        assert one["graph"] == bytes_of_gathered_queries(1, case.dtype.itemsize)


@pytest.mark.parametrize("case", but_for_slow(PAGED, "by_page, lengths, queries, 3 queries"))
def test_pages_are_read_where_they_are(found, case):
    for one in found[case]:
        assert_exchanged(one)
        assert "mla.paged_latent_attention.default" in one["ops"]


@pytest.mark.parametrize("case", CHUNKED.values(), ids=CHUNKED)
def test_many_queries_are_chunked(found, case):
    for one in found[case]:
        assert_exchanged(one, "chunked")
        assert "mla.expanded_attention.default" in one["ops"]


def assert_form(one, case, form, ranks):
    """Check the form of the exchange: a run has the collectives of the graph, and these the bytes of the formula."""
    assert_exchanged(one, "chunked" if case.path == "chunked" else "absorbed", ranks)
    heads = naive.N * (ranks if case.heads == "all" else 1)
    sizes = {"B": B, "Sq": case.Sq, "T": case.T, "N": heads, "L": naive.L, "P": naive.P, "R": naive.R, "V": naive.V}
    of_all = () if form in (InLatentSpace, Gathered, ScatteredAndGathered) else (None,)
    exchange = form("group", ranks, *of_all)
    assert one["outcome"][1].count(exchange.words)
    assert sum(received for _, received in one["graph"]) == exchange.received(sizes, 8)
    assert len(one["graph"]) == exchange.calls
    assert one["counted"] == sorted((f"c10d_functional.{name}", 1) for name, _ in one["graph"])


@pytest.mark.parametrize(("case", "form"), but_for_slow(FORMS, *SLOW_FORMS))
def test_forms_of_the_exchange(found, case, form):
    for one in found[case]:
        assert_form(one, case, form, 2)


@pytest.mark.parametrize("case", but_for_slow(CUT, *list(CUT)[::2]))
def test_keys_that_are_the_first_of_what_is_gathered(found, case):
    for one in found[case]:
        assert_exchanged(one, case.path)
        outputs = [("all_gather_into_tensor", B * case.Sq * naive.N * (naive.V * 8 + 4))]
        assert one["graph"] == (outputs if case.same == "queries" else bytes_of_gathered_queries(case.Sq, 8))


FOUR = Case("by_page", "masks", 3, "lengths"), Case("along_tokens", "queries"), Case("by_token", "program", pages=True)


@pytest.mark.slow
def test_four_ranks():
    cases = [*FOUR, *(case for case, _ in FORMS.values())]
    cases_of_ranks = list(zip(cases, *in_processes(all_cases, 4, cases), strict=True))
    forms = FORMS | {"no fewer bytes with two ranks": (None, ScatteredAndGathered)}
    for (case, *of_ranks), (_, form) in zip(cases_of_ranks[len(FOUR) :], forms.values(), strict=True):
        for one in of_ranks:
            assert_form(one, case, form, 4)
    for case, *of_ranks in cases_of_ranks[: len(FOUR)]:
        for one in of_ranks:
            assert_exchanged(one, ranks=4)
            outputs = [("all_gather_into_tensor", 3 * B * case.Sq * naive.N * (naive.V * 8 + 4))]
            expected = outputs if case.same == "queries" else bytes_of_gathered_queries(case.Sq, 8, 4)
            assert one["graph"] == expected


@pytest.mark.parametrize(("why", "case"), (UNPROVED | SHORT).items(), ids=UNPROVED | SHORT)
def test_keys_are_gathered_otherwise(found, why, case):
    for one in found[case]:
        assert_right(one)
        assert one["outcome"][1].endswith(f"gathers keys: {why}")
        assert one["graph"] == [("all_gather_into_tensor", B * case.T // 2 * width * 8) for width in (naive.L, naive.R)]
