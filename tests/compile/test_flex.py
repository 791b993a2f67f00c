"""flex_attention is rewritten: the passes read its score and mask functions."""

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import mla_compile
from mla_compile import compilation
from mla_compile.dynamo.flex import _is_element_by_element

B, N, P, R, V, L, S = 2, 4, 6, 2, 5, 8, 9
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
SLOPES = torch.linspace(0.1, 0.9, N)
NEAR = torch.rand(S, S, generator=torch.Generator().manual_seed(0)) < 0.8
PADDED = torch.arange(S) >= torch.tensor([[0], [3]])


class Layer(nn.Module):
    def __init__(self, groups=1):
        super().__init__()
        self.groups = groups
        self.w_uk, self.w_uv = nn.Parameter(torch.randn(N, P, L)), nn.Parameter(torch.randn(N, V, L))

    def forward(self, q, latent, k_rope, **functions):
        k = torch.einsum("btl,npl->bntp", latent, self.w_uk)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        v = torch.einsum("btl,nvl->bntv", latent, self.w_uv)
        return flex_attention(q, k, v, enable_gqa=self.groups > 1, **functions)


def as_transformers_writes_it(b, h, i, j):
    """A causal mask and one of padding, joined with a mask that is true everywhere."""
    return b.new_ones((), dtype=torch.bool) & (j + 0 <= i + 0).to(b.device) & PADDED[b, j].to(b.device)


def masked(function):
    return {"block_mask": create_block_mask(function, None, None, S, S, device="cpu")}


WAYS = {
    "nothing": ({}, "none"),
    "causal": (masked(lambda b, h, i, j: i >= j), "causal"),
    "window": (masked(lambda b, h, i, j: (i >= j) & (i - j < 4)), "causal + window"),
    "documents": (masked(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]), "tensor"),
    "a table": (masked(lambda b, h, i, j: NEAR[i, j] | (i == j)), "tensor"),
    "padding": ({"block_mask": create_block_mask(as_transformers_writes_it, B, None, S, S, device="cpu")}, None),
    "blocks": (masked(lambda b, h, i, j: i // 4 >= j // 4), "tensor"),
    "a bias": ({"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i)}, None),
    "a soft cap": ({"score_mod": lambda s, b, h, i, j: 5 * torch.tanh(s / 5)}, None),
    "both": (masked(lambda b, h, i, j: i >= j) | {"score_mod": lambda s, b, h, i, j: s * 0.5 + SLOPES[h]}, None),
}


def inputs(heads=N):
    return torch.randn(B, heads, S, P + R), torch.randn(B, S, L), torch.randn(B, S, R)


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["auto", "absorbed"])
@pytest.mark.parametrize("way", WAYS)
def test_flex_attention_is_rewritten(way, path):
    functions, mask = WAYS[way]
    layer, given = Layer(), inputs()
    expected = layer.double()(*(t.double() for t in given), **functions)
    compiled = torch.compile(layer.float(), backend="mla", options={"mla.path": path})
    torch.testing.assert_close(compiled(*given, **functions).double(), expected, rtol=1e-4, atol=1e-5)
    (site,) = mla_compile.last_report().sites
    assert site.rewritten, site.reason
    assert mask is None or site.mask == mask


@pytest.mark.usefixtures("without_codegen")
def test_two_query_heads_for_each_of_the_keys():
    layer, given = Layer(groups=2), inputs(2 * N)
    functions, _ = WAYS["causal"]
    expected = layer.double()(*(t.double() for t in given), **functions)
    compiled = torch.compile(layer.float(), backend="mla")
    torch.testing.assert_close(compiled(*given, **functions).double(), expected, rtol=1e-4, atol=1e-5)
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
def test_flex_attention_whose_lse_is_read_stays_unchanged():
    layer, given = Layer(), inputs()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="found flex_attention"):
        torch.compile(layer, backend="mla", options={"mla.strict": True})(*given, return_aux=AuxRequest(lse=True))


def test_functions_that_look_at_more_than_one_element_stay():
    def written(source):
        graph = symbolic_trace(source).graph
        (table,) = [node for node in graph.nodes if node.name == "table"]
        table.meta["example_value"] = torch.randn(S, S)
        return _is_element_by_element(graph, [table])

    assert written(lambda s, b, h, i, j, table: s + table[i, j] * (i - j))
    assert not written(lambda s, b, h, i, j, table: s + table[i].sum())
    assert not written(lambda s, b, h, i, j, table: s.view(1, 1))
    assert not written(lambda s, b, h, i, j, table: torch.cumsum(s, 0))


@pytest.mark.usefixtures("without_codegen")
def test_flex_attention_that_is_no_mla_is_left_to_inductor():
    q, k, v = (torch.randn(B, N, S, P) for _ in range(3))
    compiled = torch.compile(lambda *t: flex_attention(*t, **WAYS["causal"][0]), backend="mla")
    torch.testing.assert_close(compiled(q, k, v), flex_attention(q, k, v, **WAYS["causal"][0]))
    report = mla_compile.last_report()
    assert report.rewritten == 0
    assert "flex_attention" in report.sites[0].reason


@pytest.mark.usefixtures("without_codegen")
def test_a_bug_in_writing_it_out_leaves_it_to_inductor(monkeypatch):
    monkeypatch.setattr(compilation, "write_out", lambda module: {}["missing"])
    layer, given = Layer(), inputs()
    with pytest.warns(UserWarning, match="KeyError: 'missing'. The graph is left"):
        o = torch.compile(layer, backend="mla")(*given)
    torch.testing.assert_close(o, layer(*given))
    assert not mla_compile.last_report().rewritten
