"""The documentation is true: its code runs, its commands print what it shows, its reasons are the passes' own."""

import argparse
import ast
import contextlib
import dataclasses
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from mla_compile import cli, errors
from mla_compile.options import MOST_TOKENS, Options

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
README = ROOT / "README.md"
SLOW = {"serving"}
"""Pages whose code compiles a model five times."""
NEWER = {"tensor-parallel": "5.19"}
"""Pages whose code asks for a later transformers than the first that is supported."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"`(expected .*?)`", re.DOTALL)


def blocks(page, language):
    """A page's blocks of a language, each after empty lines, so that its line numbers are those of the page."""
    text = page.read_text()
    return [
        "\n" * (text[: found.start()].count("\n") + 1) + found[2]
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def with_code(language, pages):
    """Those of some pages that have blocks of a language."""
    marks = {name: [pytest.mark.slow] for name in SLOW}
    return [pytest.param(p, id=p.stem, marks=marks.get(p.stem, [])) for p in pages if blocks(p, language)]


@pytest.fixture
def at_root(tmp_path, monkeypatch):
    """A directory that looks like the checkout's root and can be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("page", with_code("python", PAGES))
def test_the_code_runs(page, at_root, without_codegen):
    if page.stem in NEWER:
        pytest.importorskip("transformers", NEWER[page.stem])
    namespace = {"__name__": page.stem}
    with torch.enable_grad():  # as in a process of the reader's own
        for block in blocks(page, "python"):
            exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", with_code("console", [README, *PAGES]))
def test_commands_print_what_is_shown(page, at_root, without_codegen):
    for block in blocks(page, "console"):
        command, _, shown = block.strip().partition("\n")
        assert command.startswith("$ mla-compile ")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main(shlex.split(command)[2:]) == 0
        assert re.fullmatch(pattern(shown), squeezed(printed.getvalue())), printed.getvalue()


def squeezed(text):
    """Lines without the spaces that align them."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def pattern(shown):
    """What matches a text in which `...` stands for anything in a line, or, alone in one, for any lines."""
    lines = []
    for line in squeezed(shown).splitlines():
        words = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
        lines.append(r"(?:.*\n)*?.*" if line == "..." else words)
    return "\n".join(lines)


def test_every_link_leads_somewhere():
    for page in [*PAGES, README]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if target.startswith("https://"):
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def anchors(page):
    """The names that links give to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_links_every_page():
    readme = README.read_text()
    assert [page.name for page in PAGES if f"(docs/{page.name})" not in readme] == []


def test_every_command_is_documented():
    text = (ROOT / "docs" / "quick-start.md").read_text()
    section = text.partition("## The commands")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `mla-compile (\w+)", section, re.MULTILINE)
    subparsers = argparse.ArgumentParser().add_subparsers()
    for command in cli.COMMANDS:
        command.add_parser(subparsers)
    assert named == list(subparsers.choices)


def test_every_option_is_documented():
    text = (ROOT / "docs" / "options.md").read_text()
    documented = re.findall(r"^\| `mla\.(\w+)` \| `(.*?)` \|", text, re.MULTILINE)
    assert {name: ast.literal_eval(default) for name, default in documented} == dataclasses.asdict(Options())


def test_the_most_tokens_are_documented():
    text = (ROOT / "docs" / "options.md").read_text()
    (power,) = re.findall(r"from 1 to `2\*\*(\d+) - 1`", text)
    assert 2 ** int(power) - 1 == MOST_TOKENS


def test_every_exception_is_documented():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| `([\w`, ]+)` \| \S", text, re.MULTILINE)
    raised = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert dict(documented) == {
        name: "`, `".join(base.__name__ for base in kind.__bases__) for name, kind in raised.items()
    }


def literal(node):
    """A string of the source, `…` in place of what it formats."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (literal(node.left) or "…") + (literal(node.right) or "…")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def sources_reasons():
    """Every sentence that begins with "expected" in the passes: they are the reasons of refusals."""
    found = set()
    for path in sorted([*(ROOT / "passes").rglob("*.py"), *(ROOT / "mla_compile" / "training").rglob("*.py")]):
        inner = set()
        for node in ast.walk(ast.parse(path.read_text())):  # outer nodes come first
            text = literal(node) if node not in inner else None
            if text is not None and text.startswith("expected "):
                inner.update(ast.walk(node))
                found.add(text.partition(";")[0])
    return found


def test_every_reason_is_documented_and_occurs_in_the_passes():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented = {" ".join(reason.split()) for reason in REASON.findall(text)}
    reasons = sources_reasons()
    assert len(reasons) > 30

    def alike(reason, other):
        return reason.rstrip("… ") == other.rstrip("… ")

    assert [r for r in reasons if not any(alike(r, d) for d in documented)] == []
    assert [d for d in documented if not any(alike(r, d) for r in reasons)] == []


def test_the_map_has_every_room_and_every_module_of_kernels():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The map")[2].partition("\n## ")[0]
    rooms = [*(ROOT / "passes").glob("*/__init__.py"), *(ROOT / "kernels").glob("_common/__init__.py")]
    modules = [p for folder in ("passes", "kernels") for p in (ROOT / folder).glob("*.py") if p.stem != "__init__"]
    named = [*(f"`{room.parent.name}/`" for room in rooms), *(f"`{module.name}`" for module in modules)]
    assert len(named) > 30
    assert [name for name in named if name not in text] == []


def test_every_replacement_in_others_code_is_listed():
    text = (ROOT / "docs" / "architecture.md").read_text()
    replacing = re.compile(r"mock\.patch|\[method-assign\]|_missing_ = |register_kernels\(")
    files = [path for path in sorted((ROOT / "mla_compile").rglob("*.py")) if replacing.search(path.read_text())]
    assert len(files) > 5
    assert [path.name for path in files if f"](../{path.relative_to(ROOT)})" not in text] == []


def ways_to_read_keys():
    """What classes of stored keys, and of exchanges between ranks, say in a report: `words` and `otherwise`."""
    paths = ROOT / "passes"
    for path in [*sorted((paths / "caches").glob("*.py")), paths / "paths" / "exchange.py"]:
        for kind in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)):
            for each in kind.body:
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                if any(isinstance(t, ast.Name) and t.id in ("words", "otherwise") for t in targets):
                    yield literal(each.value)


def test_every_way_to_read_keys_is_documented():
    text = " ".join((ROOT / "docs" / "reading-a-report.md").read_text().split())
    words = {way for way in ways_to_read_keys() if way}
    assert len(words) > 5
    assert [way for way in words if f"`{way}`" not in text] == []


def test_every_note_occurs_in_the_backend():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = text.partition("## Nothing was looked at")[2].partition("\n## ")[0]
    notes = re.findall(r"^- `(.*?)`", section, re.MULTILINE)
    source = (ROOT / "mla_compile" / "compilation.py").read_text()
    assert len(notes) == 6
    assert [note for note in notes if f'"{note}"' not in source] == []


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b", "a b", True),
        ("a ... d", "a b c d", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...", "a\nb", True),
        ("a\nb", "a\nc", False),
        ("a", "a\nb", False),
    ],
)
def test_what_is_shown_matches_what_is_printed(shown, printed, same):
    assert bool(re.fullmatch(pattern(shown), squeezed(printed))) is same
