"""Heads shared out over two processes by transformers' tensor parallelism: each rank's attention is rewritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.errors import assert_as_close_as_eager

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from tests.hf import families
from tests.hf.families import FAMILIES, SHARED_OUT
from tests.hf.tensor_parallel import RANKS, generate

PROJECTIONS = "q_proj", "q_b_proj", "q_gate_proj", "kv_b_proj", "o_proj"


def case(family, plan="ours", experts=False, prompts=()):
    return {"family": family, "plan": plan, "experts": experts, "prompts": prompts}


def run(folder, cases, models):
    """For each case, what each rank found. The ranks load the models from disk."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.hf.tensor_parallel", folder]
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(r)], cwd=root, env=environment, **pipes) for r in range(RANKS)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(outputs)
    return list(zip(*(torch.load(folder / f"{rank}.pt") for rank in range(RANKS)), strict=True))


def assert_each_has_its_heads(model, ranks):
    """Check that tokens are those of one process, that logits are as close to float64 as eager's, and that each of k
    ranks has N / k heads in 1 / k of the bytes."""
    ids = torch.arange(2, 102)[None] % 60
    expected, _ = generate(model, ids)
    whole = {name: p.nbytes for name, p in model.named_parameters()}
    others = "indexer", "vision_tower"
    of_heads = [
        name
        for name in whole
        if "self_attn" in name and name.split(".")[-2] in PROJECTIONS and not any(part in name for part in others)
    ]
    heads = model.config.get_text_config().num_attention_heads
    exact = families.exact(model)
    for rank in ranks:
        (tokens, eager), (compiled_tokens, compiled) = rank["eager"], rank["compiled"]
        assert torch.equal(tokens, expected)
        assert torch.equal(compiled_tokens, expected)
        with torch.no_grad():
            assert_as_close_as_eager(compiled, eager, exact(tokens[:, :-1]).logits[:, -len(eager) :].transpose(0, 1))
        assert {n for _, n, _ in rank["sites"]} == {f"{heads // RANKS}"}
        paths = {path for path, *_ in rank["sites"]}
        assert ("sparse" in paths) == hasattr(model.config.get_text_config(), "index_topk")
        assert paths - {"sparse"} in (set(), {"chunked", "absorbed"})
        assert not any("replicated" in reason for *_, reason in rank["sites"])
        assert of_heads
        assert {name: rank["bytes"][name] * RANKS for name in of_heads} == {name: whole[name] for name in of_heads}


@pytest.mark.slow
def test_v3s_heads_are_shared_out_and_left_whole_by_transformers_own_plan(tmp_path):
    """Under continuous batching too, where the first rank decides what all write."""
    config = transformers.DeepseekV3Config(**families.PLAIN | families.EXPERTS | {"num_hidden_layers": 1})
    config.first_k_dense_replace = 0
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    prompts = [[5, 6, 7, 8, 9], [10, 11]], [[12, 13, 14], [15]]
    cases = [case("deepseek_v3", experts=True), case("deepseek_v3", "auto"), case("deepseek_v3", prompts=prompts)]
    ours, auto, served = run(tmp_path, cases, {"deepseek_v3": model})
    assert_each_has_its_heads(model, ours)
    for rank in auto:
        [(path, n, reason)] = rank["sites"]
        assert (path, n) == ("chunked", "4")
        assert reason.endswith("; N replicated over tp=2")
    alone = [generate(model, torch.tensor([prompt]))[0][0, len(prompt) :].tolist() for prompt in prompts[0]]
    assert list(served) == [alone] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED_OUT)
def test_the_heads_of_every_family_are_shared_out(tmp_path, family):
    """Also with expert parallelism, where transformers has rules for it."""
    model = families.build(FAMILIES[family], FAMILIES[family].attentions[0])
    whole = [False, True] if model.config.get_text_config().base_model_ep_plan else [False]
    for ranks in run(tmp_path, [case(family, experts=experts) for experts in whole], {family: model}):
        assert_each_has_its_heads(model, ranks)
