"""Write tokens with vLLM in a process of its own: `generate.py CHECKPOINT OPTIONS PROMPTS ANSWER`.

OPTIONS and PROMPTS are JSON. The file ANSWER gets JSON: the name of the backend of every layer and the bytes of its
pages, by worker; for how many tokens there is room; and the tokens after each prompt.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def layers(worker):
    """The name of the backend of each layer of a worker's model, and the bytes of its pages."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layers = [module for module in worker.model_runner.model.modules() if isinstance(module, MLAAttention)]
    return [(layer.get_attn_backend().get_name(), layer.kv_cache.nbytes) for layer in layers]


def main() -> None:
    from vllm import LLM, SamplingParams

    checkpoint, options, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    model = LLM(model=checkpoint, skip_tokenizer_init=True, enforce_eager=True, seed=0, **options)
    workers = model.collective_rpc(layers)
    room = model.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    parameters = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    backends = [[name for name, _ in worker] for worker in workers]
    pages = [[nbytes for _, nbytes in worker] for worker in workers]
    answer = {"backends": backends, "bytes": pages, "room": room, "tokens": tokens}
    Path(sys.argv[4]).write_text(json.dumps(answer))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `layers` is sent to the workers
    main()
