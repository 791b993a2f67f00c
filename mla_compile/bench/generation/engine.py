"""Time vLLM's engine with the same weights, in a process of its own, to compare a serving engine with `generate`.

The engine reads its prompts itself, so a workload that begins with a filled cache starts with a prefill. The engine's
steps are timed. Its log-probabilities after a prompt of `CHECK_TOKENS` are compared with float64.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mla_compile.bench.check import distance, too_far
from mla_compile.bench.generation.caches import PAGE_SIZE
from mla_compile.bench.generation.models import WholeModel
from mla_compile.bench.generation.ways import Batch, Result, Way
from mla_compile.bench.memory import too_much

CHECK_TOKENS = 128
ALONE = "vllm"
"""The way in which vLLM uses its own attention for CPUs, without this package as its plugin."""
REPLACED = "CPU_MLA"
"""The backend that the plugin replaces. Of itself vLLM takes another one, its own, on CPUs with AMX."""
REQUEST, ANSWER = "request.json", "answer.json"


def prompt(whole: WholeModel, tokens: int, seed: int = 2) -> Tensor:
    """Random token ids `[1, tokens]`."""
    return torch.randint(1, whole.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


def measure(
    model: Any, whole: WholeModel, batches: Sequence[Batch], way: Way, repeats: int, exact: Tensor, allowed: float
) -> list[Result]:
    """A result for each workload; `exact` are the log-probabilities `[1, vocabulary]` after the prompt of the check.

    `allowed` is the largest accepted distance of the engine's log-probabilities, relative to the largest of `exact`.
    """
    if find_spec("vllm") is None:
        return [Result(way, batch, "skipped", "vLLM is not installed") for batch in batches]
    reasons = {batch: too_much(_scores_bytes(whole, batch)) for batch in batches}
    skipped = [Result(way, batch, "skipped", reason) for batch, reason in reasons.items() if reason]
    batches = [batch for batch in batches if not reasons[batch]]
    return skipped + (_results(model, whole, batches, way, repeats, exact, allowed) if batches else [])


def _scores_bytes(whole: WholeModel, batch: Batch) -> int:
    """Bytes of a prompt's scores and softmax weights: on CPUs vLLM prefills MLA in one piece, in plain torch."""
    return 8 * whole.layer.N * batch.workload.keys**2


def _results(
    model: Any, whole: WholeModel, batches: Sequence[Batch], way: Way, repeats: int, exact: Tensor, allowed: float
) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (Path(folder) / REQUEST).write_text(json.dumps(_request(whole, batches, way, repeats)))
        command, environment = [sys.executable, "-m", __name__, folder], os.environ | _settings(whole, batches, way)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return [Result(way, batch, "failed", _why(done)) for batch in batches]
        checked, *answers = json.loads((Path(folder) / ANSWER).read_text())
    error = distance(torch.tensor([checked["logprobs"]]), exact)
    if error > allowed:
        return [Result(way, batch, "wrong", too_far(error, allowed), (), error) for batch in batches]
    return [
        Result(way, batch, "ok", checked["attention"], tuple(answer[batch.workload.kind]), error)
        for batch, answer in zip(batches, answers, strict=True)
    ]


def _why(ended: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed: the last error in its output, else the signal or status with which it ended."""
    if ended.returncode < 0:
        return f"the process was ended by {signal.Signals(-ended.returncode).name}"
    lines = [line for line in ended.stderr.splitlines() if re.match(r"(\(.*\) |\[.*\]: )?\w*(Error|Exception)\b", line)]
    return lines[-1] if lines else f"exit status {ended.returncode}"


def _request(whole: WholeModel, batches: Sequence[Batch], way: Way, repeats: int) -> dict[str, Any]:
    """The request to the process: the prompt of the check, and a different prompt for each sequence."""
    runs: list[dict[str, Any]] = [{"prompts": prompt(whole, CHECK_TOKENS).tolist(), "tokens": 1, "logprobs": True}]
    for batch in batches:
        prompts = [prompt(whole, batch.workload.keys, seed=2 + i)[0].tolist() for i in range(batch.size)]
        tokens = 2 + repeats if batch.workload.kind == "decode" else 1
        runs.append({"prompts": prompts, "tokens": tokens, "logprobs": False})
    return {
        "dtype": whole.layer.dtype,
        "max_model_len": 1 + max(len(run["prompts"][0]) + run["tokens"] for run in runs),
        "max_num_seqs": max(batch.size for batch in batches),
        "attention_backend": None if way.compiler == ALONE else REPLACED,
        "runs": runs,
    }


def _settings(whole: WholeModel, batches: Sequence[Batch], way: Way) -> dict[str, str]:
    """Environment variables for the process."""
    tokens = max(batch.size * (batch.workload.keys + PAGE_SIZE) for batch in batches)
    size = tokens * whole.layers * (whole.layer.L + whole.layer.R) * whole.layer.torch_dtype.itemsize
    settings = {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_KVCACHE_SPACE": str(1 + math.ceil(size / 2**30)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # compute in the process that takes the times
        "VLLM_NO_USAGE_STATS": "1",
    }
    return settings | ({"VLLM_PLUGINS": ""} if way.compiler == ALONE else {})


def main() -> None:
    """Serve the request in a folder, and write the answer beside it."""
    from vllm import LLM, SamplingParams

    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text())
    runs = request.pop("runs")
    llm = LLM(
        **request,
        model=str(folder),
        max_logprobs=-1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
    )
    attention = ", ".join(sorted(set(llm.collective_rpc(_attention)[0])))
    engine, answers = llm.llm_engine, []
    for number, run in enumerate(runs):
        parameters = SamplingParams(
            temperature=0,
            max_tokens=run["tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if run["logprobs"] else None,
        )
        for i, ids in enumerate(run["prompts"]):
            engine.add_request(f"{number}-{i}", {"prompt_token_ids": ids}, parameters)
        answers.append(_served(engine, len(run["prompts"])) | {"attention": attention})
    (folder / ANSWER).write_text(json.dumps(answers))


def _served(engine: Any, count: int) -> dict[str, Any]:
    """Seconds until every sequence has a token, seconds of each later step, and the first token's log-probabilities."""
    begun, prefill = set[str](), 0.0
    steps, logprobs = list[float](), list[float]()
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - start
        if len(begun) < count:
            prefill += seconds
            begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
        else:
            steps.append(seconds)
        if not logprobs and outputs and outputs[0].outputs[0].logprobs:
            first = outputs[0].outputs[0].logprobs[0]
            logprobs = [first[token].logprob for token in range(len(first))]
    return {"prefill": [prefill], "decode": steps[1:], "logprobs": logprobs}  # the first step may compile


def _attention(worker: Any) -> list[str]:
    """The names of the attention backends that the layers of a worker's model use."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    modules: list[nn.Module] = list(worker.model_runner.model.modules())
    return [module.get_attn_backend().get_name() for module in modules if isinstance(module, MLAAttention)]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # workers are sent one of our functions
    main()
