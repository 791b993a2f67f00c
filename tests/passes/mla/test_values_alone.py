"""Values that are an up-projection, beside keys that are not: few queries sum latents, and keys stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._sympy.value_ranges import ValueRanges

from mla_compile.passes.graph import rewriter
from mla_compile.passes.pipeline import Pipeline
from mla_compile.passes.text.sites import site_text
from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import DEVICE, capture, rewrite, run, shapes_of
from tests.passes.mla.test_near_misses import NEAR_MISSES, rotated
from tests.passes.spellings import SCALE, SQ, UNKNOWN, B, Function, N, P, T, V


def turned(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], cache: Callable[[Tensor], Tensor] = lambda c: c
) -> Function:
    """MLA whose keys are rotated after their up-projection, from the latent `cache(latent)`."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k, v = mla.up_projected(cache(latent), w_kv)
        return attend(rotated(mla.queries(x, w_q)[..., :P]), rotated(k), v)

    return attention


def values_left(module: fx.GraphModule) -> list[fx.Node]:
    """Tensors with the columns of the values for each head and key."""
    tensors = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    wide = {V, P + V, N * V, N * (P + V)}
    shapes = {node: node.meta["val"].shape for node in tensors}
    return [node for node, shape in shapes.items() if shape[-1:] and shape[-1] in wide and shape.numel() % (N * T) == 0]


def check(function: Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()) -> fx.GraphModule:
    """Assert that the path `values` is taken and the result right. Returns the rewritten graph."""
    module = capture(function, *tensors, symbolic=symbolic)
    assert symbolic or values_left(module)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "values")
    assert outcome.path == "values"
    assert outcome.reason.startswith("asked for by mla.path; keys as they are: expected ")
    check_right(before, run(module, *tensors))
    return module


UNSAVED = ["keys and values cached unfolded"]
"""Near misses that the path `values` does not take, either."""
OF_KEYS = {
    name: function
    for name, (function, _) in NEAR_MISSES.items()
    if "keys" in name and name not in [*UNSAVED, "keys of each head", "one key"]
}


@pytest.mark.parametrize("function", OF_KEYS.values(), ids=OF_KEYS)
def test_keys_may_be_anything(function: Function) -> None:
    check(function, mla.tensors())


def joint(add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    """One weight for keys and values, with a bias: `add(bias, rows of the latent, weight)`."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        rows = add(torch.arange(w_kv.shape[1]).to(w_kv).sin(), latent.flatten(0, 1), w_kv)
        k, v = rows.view(*latent.shape[:2], N, P + V).transpose(1, 2).split([P, V], dim=-1)
        seen = torch.arange(T) < torch.tensor([4, 0])[:B, None, None, None]
        return mla.sealed(mla.queries(x, w_q)[..., :P], rotated(k), v, seen)

    return attention


@pytest.mark.parametrize(
    "function", [joint(torch.addmm), joint(lambda bias, a, b: a @ b + bias)], ids=["addmm", "a sum"]
)
@pytest.mark.parametrize("symbolic", [(), UNKNOWN], ids=["static", "symbolic"])
def test_a_bias_of_keys_and_values_is_added_to_the_keys_that_are_left(
    function: Function, symbolic: Sequence[Sequence[int]]
) -> None:
    module = capture(function, *mla.tensors(), symbolic=symbolic)
    assert symbolic or values_left(module)
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, "values")
    assert outcome.path == "values"
    check_right(before, run(module, *mla.tensors()))
    assert symbolic or not values_left(module)


OTHERS = ["a mixture of experts", "keys of each head", "one key", *UNSAVED]
OF_VALUES = [*(name for name in NEAR_MISSES if "value" in name and name not in OTHERS), *OTHERS]


@pytest.mark.parametrize("name", OF_VALUES)
def test_values_have_to_be_an_up_projection(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    module = capture(function, *mla.tensors())
    code = module.code
    (outcome,) = rewrite(module, "values")
    assert (outcome.path, module.code) == ("unchanged", code)
    assert reason in outcome.reason


def static(latent: Tensor) -> Tensor:
    return torch.zeros_like(latent).slice_scatter(latent[:, : T - 2], 1, 2, T)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(T) < torch.tensor([4, 0])[:, None, None, None]
    return mla.sealed(q, k, v * 0.5 + torch.arange(V).double(), mask)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sink = torch.arange(N).double()[:, None, None].expand(B, N, q.shape[2], 1)
    return torch.cat([q @ k.mT * SCALE, sink], -1).softmax(-1)[..., :-1] @ v


def with_a_bias_a_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mla.sealed(q, k, v, torch.arange(N * SQ * T).double().view(N, SQ, T).sin())


def by_half_of_the_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Twice as many query heads as key and value heads."""
    return mla.sealed(
        torch.cat([q, q * 2], 1).unflatten(1, (2, N)).transpose(1, 2).flatten(1, 2), k, v, enable_gqa=True
    )


def by_half_of_the_heads_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = torch.stack([q, q * 2], 2)  # [B, N, 2, Sq, P]
    seen = torch.arange(T) <= torch.arange(q.shape[3])[:, None] + 2
    scores = (q @ k[:, :, None].mT * SCALE).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


def one_latent_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mla.softmax(q, k, v[:1])


ATTENTIONS: dict[str, Function] = {
    "sealed": turned(mla.sealed),
    "by hand": turned(mla.softmax),
    "causal": turned(lambda q, k, v: mla.sealed(q, k, v, causal=True)),
    "a scale and a bias on values, and a row that sees nothing": turned(biased),
    "a mask that is added": turned(with_a_bias_a_head),
    "sinks": turned(with_sinks),
    "a soft cap": turned(lambda q, k, v: mla.softmax(q, k, v, lambda s: 2 * torch.tanh(s / 2))),
    "grouped heads": turned(by_half_of_the_heads),
    "grouped heads by hand": turned(by_half_of_the_heads_by_hand),
    "values of the first sequence for all": turned(one_latent_for_all),
    "two products": turned(lambda q, k, v: ((q @ k.mT + q.cos() @ k.sin().mT) * SCALE).softmax(-1) @ v),
    "a static cache": turned(mla.sealed, static),
    "a cache that grows": turned(mla.sealed, lambda c: torch.cat([c[:, 1:], c[:, :1]], 1)),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("queries", [1, SQ])
@pytest.mark.parametrize("function", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_may_be_written_in_any_way(function: Function, queries: int) -> None:
    if queries == 1 and function is ATTENTIONS["a mask that is added"]:
        pytest.skip("its mask is of three queries")
    module = check(function, mla.tensors(queries=queries))
    assert not values_left(module)


@pytest.mark.parametrize("name", ["sealed", "by hand", "causal", "a cache that grows"])
def test_sizes_may_be_symbols(name: str) -> None:
    module = check(ATTENTIONS[name], mla.tensors(), UNKNOWN)
    assert any(isinstance(size, torch.SymInt) for n in module.graph.nodes if n.op == "placeholder"
               for size in getattr(n.meta["val"], "shape", ()))  # fmt: skip


def test_a_product_that_is_computed_twice_is_computed_for_the_keys_anyway() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k, _ = mla.up_projected(latent, w_kv)
        _, v = mla.up_projected(latent, w_kv)
        return mla.sealed(mla.queries(x, w_q)[..., :P], rotated(k), v)

    module = capture(attention, *mla.tensors())
    code = module.code
    (outcome,) = rewrite(module, "values")
    assert (outcome.path, module.code) == ("unchanged", code)


def decode(queries: int, keys: int, wide: int = 64) -> tuple[Tensor, ...]:
    shapes = (1, 8, queries, 32), (1, keys, wide), (8 * 32, wide), (8 * 32, wide)
    return tuple(torch.randn(shape) for shape in shapes)


def of_one_latent(q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    k, v = ((latent @ w.T).unflatten(-1, (8, 32)).transpose(1, 2) for w in (w_uk, w_uv))
    return mla.sealed(q, F.rms_norm(k, (32,)), v)


def test_few_queries_take_it_and_many_stay_as_they_are() -> None:
    """Per query and key, sums of latents take L = 64 multiply-adds, values L V / Sq + V: as many where Sq is 64."""
    paths = {}
    for queries in (1, 4, 16, 128, 512):
        module = capture(of_one_latent, *decode(queries, 512))
        code = module.code
        (outcome,) = rewrite(module, "auto")
        paths[queries] = outcome.path
        assert (module.code == code) == (outcome.path == "unchanged")
        assert "an up-projection of each head times `" in outcome.reason
        assert outcome.reason.startswith(f"few queries meet many keys (Sq={queries}, T=512); keys as they are: expected"
                                         if outcome.rewritten else "expected keys")  # fmt: skip
    assert paths == {1: "values", 4: "values", 16: "values", 128: "unchanged", 512: "unchanged"}


def test_many_queries_of_any_number_add_no_guard() -> None:
    """Attention over hidden states without a cache, as in most models that are not MLA."""
    module = capture(of_one_latent, *decode(40, 40, 256), symbolic=[(2,), (1,)])
    before = len(shapes_of(module).guards)
    (outcome,) = rewrite(module, "auto")
    assert outcome.path == "unchanged"
    assert len(shapes_of(module).guards) == before


def test_few_of_any_number_say_where_that_holds() -> None:
    (outcome,) = rewrite(capture(of_one_latent, *decode(2, 512), symbolic=[(2,), (1,)]), "auto")
    assert outcome.path == "values"
    assert outcome.guards


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_who_asks_for_another_path_does_not_get_it(path: str) -> None:
    (outcome,) = rewrite(capture(of_one_latent, *decode(1, 512)), path)
    assert outcome.path == "unchanged"


def test_a_graph_on_another_device_or_that_is_trained_stays() -> None:
    module = capture(of_one_latent, *(t.to("meta") for t in decode(1, 512)))
    (outcome,) = rewrite(module, "auto")
    assert outcome.path == "unchanged"
    assert "; values alone are absorbed only on cpu, not on meta, at " in outcome.reason
    (result,) = Pipeline(DEVICE, training=True)(capture(of_one_latent, *decode(1, 512)))
    assert result.outcome.path == "unchanged"
    assert "; values alone are absorbed only without gradients, at " in result.outcome.reason


def test_nothing_is_said_of_values_where_they_would_stay_on_a_cpu_too() -> None:
    module = capture(of_one_latent, *(t.to("meta") for t in decode(512, 512)))
    (outcome,) = rewrite(module, "auto")
    (result,) = Pipeline(DEVICE, training=True)(capture(of_one_latent, *decode(512, 512)))
    assert not [o for o in (outcome, result.outcome) if "values alone" in o.reason]


@pytest.mark.parametrize(("most", "path"), [(32, "values"), (64, "unchanged")])
def test_a_program_of_any_number_takes_it_where_scores_are_never_more_than_values(most: int, path: str) -> None:
    """Values have 32 columns per head; the example has 2 queries."""
    module = capture(of_one_latent, *decode(2, 512), symbolic=[(2,), (1,)])
    queries, keys = (n.meta["val"].shape[i].node.expr for n, i in zip(module.graph.nodes, (2, 1), strict=False))
    ranges = {queries: ValueRanges(1, most), keys: ValueRanges(64, 4096)}
    (result,) = Pipeline(DEVICE, ranges=ranges)(module)
    assert result.outcome.path == path
    if path == "values":
        assert "in the exported example, right for all sizes; keys as they are: " in result.outcome.reason
    else:
        assert (
            "; values alone are not absorbed either, as some declared sizes have more scores than values"
            in result.outcome.reason
        )


def test_the_report_says_what_would_absorb_keys() -> None:
    module = capture(of_one_latent, *decode(1, 512))
    (result,) = Pipeline(DEVICE)(module)
    assert result.outcome.hint.startswith("to have keys absorbed too, norm the latent before the up-projection")
    text = site_text(result.site)
    assert "\nk[0, n, t, p]" in text
    assert "= 0.176777 * sum_p q k" in text
    assert "(sum_l latent w_uv)" in text


def test_shared_code_is_that_of_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of two layers differ only in what they read: the layers share code, which reads the keys of each."""

    def layers(q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        first = of_one_latent(q.cos(), latent.sin(), w_uk, w_uv)
        return of_one_latent(first.sin(), latent.cos(), w_uv, w_uk)

    traced = []
    graph_of = rewriter.graph_of
    monkeypatch.setattr(rewriter, "graph_of", lambda *args: traced.append(args) or graph_of(*args))
    tensors = tuple(t.double() for t in decode(1, 64))
    module = capture(layers, *tensors)
    before = run(module, *tensors)
    assert [outcome.path for outcome in rewrite(module, "values")] == ["values", "values"]
    assert len(traced) == 1
    check_right(before, run(module, *tensors))
