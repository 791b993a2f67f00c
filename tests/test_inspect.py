"""`mla-compile inspect`: files, page, drawings and costs."""

import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn

from mla_compile import cli, device
from mla_compile.cost import Device
from mla_compile.inspect.card import lines_of, sketches
from mla_compile.inspect.collect import STAGES, compilations
from mla_compile.inspect.costs import Model
from mla_compile.inspect.folder import write
from mla_compile.inspect.layers import arrange
from mla_compile.inspect.page import Inspection, groups_of
from mla_compile.inspect.sketch import entrances
from mla_compile.passes.paths.fastest import fastest
from mla_compile.report import Report
from mla_compile.rewriting import AFTER, BEFORE
from tests.hf.families import FAMILIES, build
from tests.models import HIDDEN, Combined, L, N, P, R, Separate, V

DEVICE = Device("d", flops_per_s=1e11, bytes_per_s=1e10)


def interpreted(module, inputs, **kwargs):
    return make_boxed_func(module.forward)


def looked_into(module, tokens, past, **kwargs):
    """The compilations of one call of a plain module, without generating code."""
    cache = module.empty_cache(1)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        if past:
            _, cache = module(torch.randn(1, past, HIDDEN), cache)
        return compilations(module, f"{tokens} after {past}", torch.randn(1, tokens, HIDDEN), cache, **kwargs)


def inspection(*found):
    return Inspection("model", found, DEVICE, workspace_tokens=1024)


@pytest.fixture(scope="module")
def decode():
    torch._dynamo.reset()
    torch.manual_seed(0)
    (compilation,) = looked_into(Combined(), 1, 12)
    return compilation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command writes for a tiny model of transformers."""
    torch._dynamo.reset()
    out, checkpoint = (tmp_path_factory.mktemp("inspect") / name for name in ("out", "tiny"))
    build(FAMILIES["minicpm3"], "sdpa").save_pretrained(checkpoint)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        patched.setattr(device, "measured", lambda *_: DEVICE)
        assert cli.main(["inspect", str(checkpoint), "--out", str(out), "--tokens", "24"]) == 0
    return out


class Page(HTMLParser):
    """A page's text, links, addresses of what it loads, and open tags."""

    def __init__(self, text):
        super().__init__()
        self.words, self.links, self.loaded, self.open = "", [], [], []
        self.ids = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.links += [attributes["href"]] if tag == "a" else []
        self.loaded += [attributes[k] for k in ("src", "srcset", "data") if k in attributes] + ([tag] * (tag == "link"))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_folder_has_every_graph_and_the_report(folder):
    steps = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert steps == ["00-prefill-of-24-tokens", "01-decode-after-24-tokens"]
    for step in steps:
        names = {path.name for path in (folder / step).iterdir()}
        graphs = {f"{i}_{stage}.py" for i, stage in enumerate(STAGES) if stage != "mla_launches"}  # which is a GPU's
        assert names >= graphs | {"proofs.txt", "report.txt"}
    before, after = ((folder / steps[1] / f"{i}_{s}.py").read_text() for i, s in ((1, BEFORE), (2, AFTER)))
    assert before.count("torch.ops.mla.sealed_attention") == 2
    assert after.count("torch.ops.mla.latent_attention") == 2
    assert "sealed_attention" not in after
    report = Report.from_json((folder / "report.json").read_text())
    assert [site.path for site in report.sites] == ["chunked"] * 2 + ["absorbed"] * 2
    assert str(report) == (folder / "report.txt").read_text().rstrip("\n")


def test_proofs_name_the_latent(folder):
    text = (folder / "01-decode-after-24-tokens" / "proofs.txt").read_text()
    assert re.search(r"latent +`\w+` \(cat", text)
    assert re.search(r"latent\[\w+, t, l\] += ", text)
    assert re.search(r"W_UK +`\w+` \(placeholder\)", text)


def test_the_page_loads_nothing_and_its_links_lead_somewhere(folder):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.loaded == []
    assert "http" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert "url(" not in text
    assert "@import" not in text
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (folder / link).is_file()


def test_the_page_shows_each_kind_of_attention(folder):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert "4 of 4 attentions rewritten: 2 absorbed, 2 chunked." in page.words
    for words in ("Attentions 0, 1", "Attentions 2, 3", "latent attention", "chunked attention", "as written"):
        assert words in page.words
    drawings = re.findall(r'<svg class="sketch".*?</svg>', text, flags=re.DOTALL)
    panels = re.findall(r'<svg class="panel".*?</svg>', text, flags=re.DOTALL)
    assert len(drawings) == 4  # before and after, of two kinds
    assert len(panels) == 8  # own context and three others
    assert sum("circle" in panel for panel in panels) == 2  # where the attention itself stands
    for svg in (*drawings, *panels):
        ElementTree.fromstring(svg)


def test_shapes_stand_on_the_arrows(decode):
    before, after = sketches(groups_of(decode, 0)[0])
    shapes = {arrow.shape for arrow in before.arrows if arrow.kind == "expanded"}
    assert shapes == {f"[1, {N}, 13, {width}]" for width in (P, V, P + R)}
    assert before.expanded_bytes == 4 * N * 13 * (P + R + V)
    assert after.expanded_bytes == 0
    assert {box.title for box in after.boxes.values()} >= {"latent", "rope key", "W_UK", "W_UV", "latent attention"}
    (latent,) = (arrow for arrow in after.arrows if after.boxes[arrow.start].title == "latent")
    assert (latent.shape, latent.bytes) == (f"[1, 13, {L}]", 4 * 13 * L)


def test_softmax_by_hand_is_drawn_whole():
    (compilation,) = looked_into(Separate(), 2, 3)
    (group,) = groups_of(compilation, 0)
    before, _ = sketches(group)
    titles = [box.title for box in before.boxes.values()]
    assert titles.count("softmax") == 1
    assert {"latent", "rope key", "W_UK", "W_UV", "query", "mask"} <= set(titles)


def test_weights_in_few_bits_come_in_with_their_scales():
    class FewBits(nn.Module):
        def __init__(self, weight):
            super().__init__()
            scales = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("scales", scales)
            self.register_buffer("weight", (weight / scales).round().to(torch.int8))

        def forward(self, latent):
            return F.linear(latent, self.weight.float()) * self.scales[:, 0]

    layer = Combined()
    layer.kv_b_proj = FewBits(layer.kv_b_proj.weight.detach())
    (compilation,) = looked_into(layer, 1, 12)
    (group,) = groups_of(compilation, 0)
    assert group.outcome.path == "absorbed"
    for drawn in sketches(group):
        titles = [box.title for box in drawn.boxes.values() if box.entrance]
        assert any(title.startswith("scales of") for title in titles)
        assert "latent" in titles


def test_empty_columns_are_not_drawn():
    class WithoutRope(nn.Module):
        def forward(self, q, latent, weight, rope):
            k, v = F.linear(latent, weight).unflatten(-1, (2, 8)).transpose(1, 2).split([4, 4], dim=-1)
            k = torch.cat([k, rope.cos()[:, None].expand(-1, 2, -1, -1)], dim=-1)
            return F.scaled_dot_product_attention(q, k, v)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        sizes = (1, 2, 1, 4), (1, 9, 5), (16, 5), (1, 9, 0)
        (compilation,) = compilations(WithoutRope(), "call", *map(torch.randn, sizes))
    before, _ = sketches(groups_of(compilation, 0)[0])
    assert {box.title for box in before.boxes.values() if box.entrance} == {"latent", "W_UK, W_UV", "query", "output"}


def test_what_is_computed_twice_comes_in_once():
    class Twice(nn.Module):
        def forward(self, q, past, weight):
            k, v = (F.linear(past.tanh(), w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weight)
            return F.scaled_dot_product_attention(q, k, v)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        (compilation,) = compilations(Twice(), "call", *map(torch.randn, ((1, 2, 1, 4), (1, 9, 5), (2, 8, 5))))
    before, _ = sketches(groups_of(compilation, 0)[0])
    titles = [box.title for box in before.boxes.values() if box.entrance]
    assert titles.count("latent") == 2
    assert "tanh" not in {box.title for box in before.boxes.values()}


def test_boxes_do_not_overlap_and_arrows_go_down(decode):
    for drawn in sketches(groups_of(decode, 0)[0]):
        layout = arrange(drawn)
        places = list(layout.places.values())
        for i, a in enumerate(places):
            assert a.width / 2 <= a.x <= layout.width - a.width / 2 + 1e-6
            for b in places[:i]:
                assert a.y != b.y or abs(a.x - b.x) > (a.width + b.width) / 2
        for arrow in drawn.arrows:
            assert layout.places[arrow.start].y < layout.places[arrow.end].y


def test_code_of_an_attention_is_of_it_alone(decode):
    before, _ = sketches(groups_of(decode, 0)[0])
    lines = lines_of(decode.graphs[BEFORE], before.nodes)
    assert len(lines) == len(before.nodes)
    assert lines[-1].startswith("sealed_attention")
    assert not any("rsqrt" in line for line in lines)  # the norm is before the latent


def test_costs_are_those_that_decided(decode):
    (outcome,) = decode.report.sites
    proved = decode.of(outcome)
    assert {name: str(size) for name, size in proved.sizes.items()} == outcome.shapes
    costs = Model.of(proved, DEVICE, 1024).paths(outcome, proved.named)
    assert [cost.path for cost in costs] == ["as written", "chunked", "absorbed"]
    assert [cost.path for cost in costs if cost.chosen] == ["absorbed"]
    assert min(costs[1:], key=lambda cost: cost.seconds).path == fastest(proved.dims, DEVICE, 4, 1024).path


def test_curves_cross_where_the_choice_changes(decode):
    (outcome,) = decode.report.sites
    model = Model.of(decode.of(outcome), DEVICE, 1024)
    curves = model.curves()
    assert [curve.context for curve in curves] == [12, 1024, 8192, 65536]
    assert [curve.here is not None for curve in curves] == [True, False, False, False]
    for curve in curves:
        for point in curve.points:
            assert point.faster == ("absorbed" if point.queries < (curve.crossing or 10**9) else "chunked")
        if curve.crossing and curve.crossing > 1:
            assert model._at(curve.context, curve.crossing - 1).faster == "absorbed"
            assert model._at(curve.context, curve.crossing).faster == "chunked"


def test_what_stays_unchanged_says_why(tmp_path, without_codegen):
    class Plain(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    for _ in range(2):  # the second time there is a stored report, and the passes run all the same
        torch._dynamo.reset()
        (compilation,) = compilations(Plain(), "call", *(torch.randn(1, 2, 5, 8) for _ in range(3)))
        assert list(compilation.graphs) == ["dynamo", BEFORE]
    write(inspection(compilation), tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    assert "0 of 1 attentions rewritten" in page.words
    assert "expected values that are an up-projection of a latent" in page.words
    assert "Before" not in page.words


def test_what_stays_unchanged_says_how_far_it_was_traced(tmp_path, without_codegen):
    class Nonlinear(Combined):
        def forward(self, x, cache):
            latent = self.kv_a_proj(x)[..., :L]
            k, v = self.kv_b_proj(latent).view(1, -1, N, P + V).transpose(1, 2).split([P, V], dim=-1)
            k = k.tanh()
            return F.scaled_dot_product_attention(k, k, v)

    (compilation,) = compilations(Nonlinear(), "call", torch.randn(1, 5, HIDDEN), None)
    write(inspection(compilation), tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    (outcome,) = compilation.report.sites
    assert outcome.path == "unchanged"
    assert outcome.remedy
    assert f"To have it rewritten, {outcome.remedy}" in page.words
    assert f"back to {outcome.trail[-1]}" in page.words


def test_values_alone_have_a_card_without_other_paths(tmp_path, without_codegen):
    class Turned(nn.Module):
        def forward(self, q, latent, w):
            k, v = (latent @ w).view(1, -1, N, P + V).transpose(1, 2).split([P, V], dim=-1)
            return F.scaled_dot_product_attention(q, k.tanh(), v)

    (compilation,) = compilations(
        Turned(), "call", torch.randn(1, N, 1, P), torch.randn(1, 99, L), torch.randn(L, N * (P + V))
    )
    write(inspection(compilation), tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    (outcome,) = compilation.report.sites
    assert outcome.path == "values"
    assert "none: keys stay what the graph computes" in page.words
    assert "keys as they are: expected keys of which some columns" in page.words


def test_a_graph_without_attention_has_no_card(tmp_path):
    (compilation,) = compilations(nn.Linear(2, 2), "call", torch.ones(1, 2))
    assert len(compilation.code) == 1
    write(inspection(compilation), tmp_path)
    assert "0 of 0 attentions rewritten" in Page((tmp_path / "index.html").read_text()).words
    assert "async_compile" in (tmp_path / "00-call" / "5_inductor.py").read_text()


def test_graphs_of_one_call_are_told_apart(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Combined(), Combined()])

        def forward(self, x, cache):
            x, _ = self.layers[0](x, cache)
            torch._dynamo.graph_break()
            return self.layers[1](x, cache)

    cache = tuple(torch.randn(1, 12, width) for width in (L, R))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        found = compilations(Twice(), "call", torch.randn(1, 1, HIDDEN), cache)
    assert [compilation.title for compilation in found] == ["call, graph 1 of 2", "call, graph 2 of 2"]
    write(inspection(*found), tmp_path)
    assert (tmp_path / "01-call-graph-2-of-2" / f"2_{AFTER}.py").is_file()
    assert "2 of 2 attentions rewritten" in Page((tmp_path / "index.html").read_text()).words


def test_symbolic_sizes_have_numbers_too():
    module, x = Combined(), torch.randn(1, 1, HIDDEN)
    cache = tuple(torch.randn(1, 12, width) for width in (L, R))
    for tensor in cache:
        torch._dynamo.mark_dynamic(tensor, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mla_compile.inductor.codegen.compile_fx_inner", interpreted)
        (compilation,) = compilations(module, "call", x, cache)
    (outcome,) = compilation.report.sites
    assert not outcome.shapes["T"].isdecimal()
    assert compilation.of(outcome).sizes["T"] == 13
    before, _ = sketches(groups_of(compilation, 0)[0])
    assert before.expanded_bytes == 4 * N * 13 * (P + R + V)


def test_generated_code_is_kept_also_of_what_was_compiled_before():
    torch.manual_seed(0)
    module, x, cache = Combined(), torch.randn(1, 1, HIDDEN), tuple(torch.randn(1, 12, width) for width in (L, R))
    with torch.no_grad():
        torch.compile(module, backend="mla")(x, cache)
    torch._dynamo.reset()
    (compilation,) = compilations(module, "call", x, cache)
    assert len(compilation.code) == 1, compilation.report
    (code,) = compilation.code
    assert "mla.latent_attention" in code
    assert entrances(compilation.of(compilation.report.sites[0]))


def test_the_compilation_is_afresh_however_often_the_module_was_compiled():
    """torch no longer compiles code that it has compiled as often as its limit allows."""
    module = Combined()
    with torch._dynamo.config.patch(recompile_limit=1):
        for past in (5, 9):
            assert len(looked_into(module, 1, past)) == 1


def test_a_missing_extra_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "depyf", None)
    assert cli.main(["inspect", "model", "--out", str(tmp_path), "--depyf"]) == 2
    assert "pip install 'mla-compile[inspect]'" in capsys.readouterr().err
