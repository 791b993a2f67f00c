"""`examples/aot`: unmodified DeepSeek-V3 as an exported program with any number of tokens and any cache, and in C++."""

import copy
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.hf.test_deepseek import build

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "examples" / "aot"
PROMPT = "import os\n\ndef read_file(path):\n"
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(FOLDER / "export.py"))


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_logits_and_caches(example, layers):
    model = build("v3", layers=layers)
    step, exact = example["Step"](model), example["Step"](copy.deepcopy(model).double())
    program = mla_compile.lower(mla_compile.rewrite(example["export"](model), options={"mla.strict": True}))
    assert mla_compile.last_report().rewritten == layers
    run = program.module()
    cache = tuple(torch.zeros(layers, 1, 0, width) for width in (16, 8))
    exact_cache = tuple(t.double() for t in cache)
    for queries in (6, 1, 1, 40, 1):
        ids = torch.randint(64, (1, queries))
        compiled, eager, right = run(ids, *cache), step(ids, *cache), exact(ids, *exact_cache)
        for outputs in zip(compiled, eager, right, strict=True):
            assert_as_close_as_eager(*outputs)
        cache, exact_cache = eager[1:], right[1:]


@pytest.mark.slow
def test_cpp_writes_what_eager_does(example, tmp_path, capfd):
    example["main"](tmp_path)
    assert "5 of 5 attentions rewritten" in capfd.readouterr().out
    prefix = torch.utils.cmake_prefix_path
    build_folder = tmp_path / "build"
    for command in (
        [shutil.which("cmake"), "-S", FOLDER, "-B", build_folder, f"-DCMAKE_PREFIX_PATH={prefix}"],
        [shutil.which("cmake"), "--build", build_folder],
    ):
        subprocess.run(command, check=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example["CHECKPOINT"])
    model = transformers.AutoModelForCausalLM.from_pretrained(example["CHECKPOINT"], dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False, eos_token_id=None)[0]
    files = [tmp_path / name for name in ("model.pt2", "libmla.so", "pieces.txt")]
    arguments = [*files, "60", *map(str, prompt["input_ids"][0].tolist())]
    written = subprocess.run([build_folder / "generate", *arguments], check=True, capture_output=True, text=True).stdout
    assert written == tokenizer.decode(ids) + f"\ncache: {len(ids) - 1} tokens\n"
