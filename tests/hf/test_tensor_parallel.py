"""Heads shared out over processes by transformers' tensor parallelism: each rank's attention is rewritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.errors import assert_as_close_as_eager

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

WORKER = Path(__file__).with_name("tensor_parallel.py")


def test_each_rank_attends_with_its_own_heads(tmp_path):
    config = transformers.DeepseekV2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    )
    model = transformers.DeepseekV2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER, tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    exact_model = model.double()
    for rank in ranks:
        paths = ["chunked", "absorbed", "absorbed"]  # prefill, the second token, and all others
        assert rank["sites"] == [(path, "2") for path in paths]
        (tokens, eager), (compiled_tokens, compiled) = rank["eager"], rank["compiled"]
        assert torch.equal(compiled_tokens, tokens)
        with torch.no_grad():
            exact = exact_model(tokens[:, :-1]).logits[:, -len(eager) :].transpose(0, 1)
        assert_as_close_as_eager(compiled, eager, exact)
