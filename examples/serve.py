"""An OpenAI-compatible server for a model with MLA: continuous batching over paged latents, compiled decoding.

Requests wait while the pool is full. If a client disconnects, its request is cancelled. Sampling is greedy. Under
torchrun the ranks share out the model's heads and experts, and the first rank answers requests.

Run: python examples/serve.py examples/tiny-deepseek-v3 --port 8000
     torchrun --nproc-per-node 2 examples/serve.py examples/tiny-deepseek-v3 --port 8000
     curl localhost:8000/v1/completions -d '{"prompt": "def read_file(path):", "max_tokens": 40}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import torch
import uvicorn
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from mla_compile import ContinuousModel, tp_plan

DEFAULTS: dict[str, Any] = {"temperature": 0, "n": 1, "best_of": 1, "echo": False}
DEFAULTS |= {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
DEFAULTS |= dict.fromkeys(("logprobs", "stop", "suffix", "tools"))
"""Fields that a request may contain, but only with these values, or empty ones where these are empty."""


class Engine:
    """Token ids in, token ids out, for many requests at a time."""

    def __init__(
        self,
        folder: str,
        pages: int,
        page_size: int,
        eager: bool = False,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        ranks = _shared_out(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=ranks)
        if ranks is None:  # a rank's part is already on its device
            model = model.to(device)
        self.model = ContinuousModel(model, pages, page_size)
        self.most = min(pages * page_size, self.model.config.max_position_embeddings)
        decode = None if eager else CompileConfig(backend="mla", mode="default", dynamic=True)
        eos = self.tokenizer.eos_token_id
        self.manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos),
            ContinuousBatchingConfig(max_batch_tokens=512, decode_compile_config=decode),
        )

    def check(self, prompt: Any, count: Any) -> None:
        """Refuse what could never run, as it would stop the engine and not only the request."""
        vocabulary = range(self.model.config.vocab_size)
        if not (isinstance(prompt, list) and prompt and all(type(t) is int and t in vocabulary for t in prompt)):
            raise HTTPException(400, f"expected a prompt: a text, or tokens from 0 to {vocabulary[-1]}")
        if type(count) is not int or count < 1:
            raise HTTPException(400, f"expected max_tokens to be a whole number of at least 1, found {count!r}")
        if len(prompt) + count > self.most:
            raise HTTPException(400, f"expected at most {self.most} tokens, found {len(prompt)} and {count} to write")

    async def write(self, prompt: list[int], count: int) -> AsyncGenerator[list[int]]:
        """Yield all tokens written so far, each time there is one more. Closing the generator cancels the request."""
        name, outputs = uuid.uuid4().hex, asyncio.Queue[Any]()
        self.manager.register_result_handler(name, outputs.put_nowait)
        finished = False
        try:
            if self.manager.add_request(prompt, request_id=name, max_new_tokens=count, streaming=True) is None:
                raise HTTPException(503, "the engine has stopped")
            while not finished:
                output = await outputs.get()
                if output.error is not None:
                    raise HTTPException(500, output.error)
                finished = output.is_finished()
                yield output.generated_tokens
        finally:
            if not finished:
                self.manager.cancel_request(name)
                self.manager.output_router.result_handlers.pop(name, None)

    def follow(self) -> None:
        """Run the requests of the first rank, until it stops."""
        for number in (signal.SIGINT, signal.SIGTERM):  # the first rank gets these too, and stops all ranks
            signal.signal(number, signal.SIG_IGN)
        self.manager.start()
        while self.manager.is_running():
            self.manager.get_result(timeout=1)  # discarded: the first rank answers


def _shared_out(folder: str) -> DistributedConfig | None:
    """How ranks share the model out: heads over all of them, and whole experts if it has any. None for one process."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks == 1:
        return None
    config = AutoConfig.from_pretrained(folder)
    experts = ranks if config.get_text_config().base_model_ep_plan else 1
    return DistributedConfig(tp_size=ranks, ep_size=experts, tp_plan=tp_plan(config))


class Writing:
    """One completion: the tokens of one request, and the API's answers about them."""

    def __init__(self, engine: Engine, name: str, chat: bool, prompt: list[int], count: int) -> None:
        self.engine, self.prompt, self.count, self.chat = engine, prompt, count, chat
        self.tokens: list[int] = []
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    @property
    def text(self) -> str:
        return str(self.engine.tokenizer.decode(self.tokens, skip_special_tokens=True))

    @property
    def reason(self) -> str:
        return "stop" if self.tokens[-1] == self.engine.tokenizer.eos_token_id else "length"

    @property
    def usage(self) -> dict[str, int]:
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.tokens)}
        return usage | {"total_tokens": sum(usage.values())}

    def answer(self, text: str, reason: str | None, chunk: bool = False) -> dict[str, Any]:
        """A whole completion, or a chunk of one."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if not self.chat:
            return {**self.head, "object": "text_completion", "choices": [{**choice, "text": text}]}
        message = {"delta" if chunk else "message": {"role": "assistant", "content": text}}
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {**self.head, "object": kind, "choices": [choice | message]}

    async def whole(self, request: Request) -> Response:
        """Answer once with the whole text, unless the client disconnects first."""

        async def collect() -> None:
            async for tokens in self.engine.write(self.prompt, self.count):
                self.tokens = tokens

        writing = asyncio.create_task(collect())
        leaving = asyncio.create_task(_disconnected(request))
        await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not writing.done():
            writing.cancel()
            return Response(status_code=499)
        writing.result()
        return JSONResponse(self.answer(self.text, self.reason) | {"usage": self.usage})

    async def stream(self, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events. A character whose bytes are incomplete waits for the rest."""
        sent = 0
        async with contextlib.aclosing(self.engine.write(self.prompt, self.count)) as written:
            async for tokens in written:
                self.tokens = tokens
                text = self.text.rstrip("\ufffd")
                if len(text) > sent:
                    yield _event(self.answer(text[sent:], None, chunk=True))
                    sent = len(text)
        yield _event(self.answer(self.text[sent:], self.reason, chunk=True))
        if with_usage:
            yield _event(self.answer("", None, chunk=True) | {"choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def application(engine: Engine, name: str) -> Starlette:
    """The server: `/v1/models`, `/v1/completions`, and `/v1/chat/completions` if the tokenizer has a chat template."""

    def tokens_of(body: dict[str, Any], chat: bool) -> Any:
        tokenizer = engine.tokenizer
        if not chat:
            prompt = body.get("prompt")
            return tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        if tokenizer.chat_template is None:
            raise HTTPException(400, "expected a tokenizer with a chat template: use /v1/completions")
        if not isinstance(body.get("messages"), list):
            raise HTTPException(400, "expected a list of messages")
        return tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)

    async def complete(request: Request) -> Response:
        try:
            body, chat = await request.json(), "chat" in request.url.path
        except (TypeError, ValueError, RecursionError) as error:
            raise HTTPException(400, f"expected a JSON object: {error}") from error
        if not isinstance(body, dict):
            raise HTTPException(400, f"expected a JSON object, found a {type(body).__name__}")
        if not isinstance(body.get("stream") or False, bool):
            raise HTTPException(400, f"expected stream to be true or false, found {body['stream']!r}")
        if not isinstance(streaming := body.get("stream_options") or {}, dict):
            raise HTTPException(400, f"expected stream_options to be an object, found {streaming!r}")
        for key, value in DEFAULTS.items():
            if body.get(key) not in (None, value) and (body[key] or value):
                raise HTTPException(400, f"expected {key} to be {value}, found {body[key]!r}")
        counts = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
        try:
            prompt, count = tokens_of(body, chat), (counts or [16])[0]
        except (TypeError, ValueError, TemplateError) as error:
            raise HTTPException(400, f"expected text that the tokenizer takes: {error}") from error
        engine.check(prompt, count)
        writing = Writing(engine, name, chat, prompt, count)
        if body.get("stream"):
            written = writing.stream(bool(streaming.get("include_usage")))
            return StreamingResponse(written, media_type="text/event-stream")
        return await writing.whole(request)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "mla_compile"}]})

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": {"message": error.detail, "type": "invalid_request_error"}}, error.status_code)

    @contextlib.asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        engine.manager.start()
        yield
        await asyncio.to_thread(engine.manager.stop, hard_stop=True)

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse}, lifespan=running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--dtype", default="auto", help="of the model and its cache (as in its files)")
    present = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=present, help="of one process (a GPU if there is one)")
    chosen = parser.parse_args()
    engine = Engine(chosen.model, chosen.pages, chosen.page_size, chosen.eager, chosen.dtype, chosen.device)
    if engine.manager.is_tp_driver:
        uvicorn.run(application(engine, chosen.model), port=chosen.port)
    else:
        engine.follow()


if __name__ == "__main__":
    main()
