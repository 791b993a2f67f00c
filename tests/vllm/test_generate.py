"""vLLM with this project's kernels writes what transformers writes, in one process and with heads and tokens divided.

Needs vLLM for CPUs: `make vllm` makes an environment of its own and runs this there.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

PROMPTS = [[1, 17, 5, 92, 33], [2, 8, 8, 61, 7, 7, 40, 120, 9, 3, 55], list(range(3, 40)), list(range(3, 100))]
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A DeepSeek-V2 of two layers in float32, with latents as wide as vLLM wants, and what transformers writes with it.

    Rope is stretched (yarn), as in all of DeepSeek's models: with plain rope, vLLM 0.32 on CPUs gives other logits than
    transformers from the second token on, whatever the backend.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "deepseek_v2",
        architectures=["DeepseekV2ForCausalLM"],
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        intermediate_size=256,
        vocab_size=128,
        max_position_embeddings=2560,
        rope_parameters=ROPE,
        initializer_range=0.1,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path, [_continued(model, prompt) for prompt in PROMPTS]


def _continued(model, prompt):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def run(checkpoint, answer, **options):
    command = [sys.executable, str(Path(__file__).with_name("generate.py"))]
    # On a CPU with AMX, vLLM takes another one unless it is asked for that which the plugin replaces.
    asked = {"attention_backend": "CPU_MLA"}
    options = {"dtype": "float32", "max_model_len": 128, "block_size": 16, **asked, **options}
    return subprocess.run(
        [*command, str(checkpoint), json.dumps(options), json.dumps(PROMPTS), str(answer)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def write(checkpoint, tmp_path_factory):
    """A function that gives the answer for some options, from one run for all tests that ask for the same."""

    @functools.cache
    def written(**options):
        answer = tmp_path_factory.mktemp("answer") / "answer.json"
        done = run(checkpoint[0], answer, **options)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads(answer.read_text())

    return written


HEADS = {"tensor_parallel_size": 2}
TOKENS = {**HEADS, "decode_context_parallel_size": 2}
FEW_PAGES = {"num_gpu_blocks_override": 5}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_transformers(checkpoint, write, ranks):
    found = write(tensor_parallel_size=ranks)
    assert found["backends"] == [["MLA_COMPILE"] * 2] * ranks
    assert found["tokens"] == checkpoint[1]


def test_prompts_may_be_read_in_pieces(checkpoint, write):
    """The longest has 97 tokens. Each later piece attends to those before it too."""
    found = write(max_num_batched_tokens=32, max_num_seqs=4, enable_prefix_caching=False)
    assert found["backends"] == [["MLA_COMPILE"] * 2]
    assert found["tokens"] == checkpoint[1]


def test_ranks_that_share_out_tokens_write_the_same_and_have_room_for_twice_as_many(checkpoint, write):
    heads, tokens = write(**HEADS), write(**TOKENS)
    assert tokens["backends"] == [["MLA_COMPILE"] * 2] * 2
    assert tokens["tokens"] == checkpoint[1]
    assert tokens["bytes"] == heads["bytes"]
    assert tokens["room"] == 2 * heads["room"]


def test_a_sequence_too_long_for_the_pages_of_a_rank_fits_into_those_of_two(checkpoint, write, tmp_path):
    """The longest has 121 tokens, five pages 80. Turns are whole pages: the second rank has none of the first 16."""
    refused = run(checkpoint[0], tmp_path / "answer.json", **HEADS, **FEW_PAGES)
    assert refused.returncode != 0
    assert "max seq len (128)" in refused.stdout + refused.stderr
    found = write(**TOKENS, **FEW_PAGES, cp_kv_cache_interleave_size=16)
    assert found["tokens"] == checkpoint[1]


def test_without_the_plugin_vllm_takes_its_own(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    answer = tmp_path / "answer.json"
    done = run(checkpoint[0], answer)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert json.loads(answer.read_text())["backends"] == [["CPU_MLA"] * 2]
