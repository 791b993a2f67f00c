"""`examples/serve.py`, asked by the client of OpenAI over localhost."""

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).parents[1] / "examples"
CHECKPOINT = EXAMPLES / "tiny-deepseek-v3"
NAME = "tiny"


def load_example():
    spec = importlib.util.spec_from_file_location("serve", EXAMPLES / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Running:
    """The server, on a port that was free."""

    def __init__(self, pages, page_size, eager):
        serve = load_example()
        self.engine = serve.Engine(str(CHECKPOINT), pages, page_size, eager, dtype="float32")
        config = uvicorn.Config(serve.application(self.engine, NAME), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def address(self):
        return f"http://localhost:{self.server.servers[0].sockets[0].getsockname()[1]}/v1"

    def client(self):
        return openai.AsyncOpenAI(base_url=self.address(), api_key="none", timeout=600, max_retries=0)

    def unfinished(self):
        scheduler = self.engine.manager.batch_processor.scheduler
        return len(scheduler.active_requests) + len(scheduler.waiting_requests)


def test_model_and_pages_are_on_the_device_that_is_named():
    engine = load_example().Engine(str(CHECKPOINT), pages=4, page_size=8, eager=True, device="meta")
    tensors = [*engine.model.parameters(), *engine.model.pool.tensors]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.fixture(scope="module")
def running():
    with Running(pages=32, page_size=8, eager=True) as server:
        yield server


def prompts(count):
    """Of 1 to 73 tokens, each with 3 to 25 tokens to write."""
    lines = (EXAMPLES / "train_tiny.py").read_text().split("\n")
    lines = [line for line in lines if line.strip()]
    return [(lines[i], 3 + 17 * i % 23) for i in range(count)]


def one_by_one(engine, requests):
    model, expected = engine.model.model, []
    with torch.no_grad():
        for prompt, count in requests:
            inputs = engine.tokenizer(prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=count, do_sample=False)
            tokens = output[0, inputs.input_ids.shape[1] :]
            expected.append(engine.tokenizer.decode(tokens, skip_special_tokens=True))
    return expected


async def ask_all(running, requests, seconds_between=0.0):
    """The texts of all requests, half of them streamed. Two more requests are abandoned before they end."""

    async def ask(i, prompt, count):
        await asyncio.sleep(i * seconds_between)
        if i % 2:
            answer = await client.completions.create(model=NAME, prompt=prompt, max_tokens=count, temperature=0)
            assert answer.usage.completion_tokens <= count
            return answer.choices[0].text
        asked = {"stream": True, "stream_options": {"include_usage": i % 4 == 0}}
        stream = await client.completions.create(model=NAME, prompt=prompt, max_tokens=count, **asked)
        chunks = [chunk async for chunk in stream]
        if i % 4 == 0:
            last = chunks.pop()
            assert not last.choices
            assert 1 <= last.usage.completion_tokens <= count
        parts = [chunk.choices[0] for chunk in chunks]
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason in ("length", "stop")
        return "".join(part.text for part in parts)

    async def leave():
        stream = await client.completions.create(model=NAME, prompt="import", max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()

    async def leave_what_is_not_streamed():
        asking = client.completions.create(model=NAME, prompt="import", max_tokens=200)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.5)

    async with running.client() as client:
        asked = [ask(i, *request) for i, request in enumerate(requests)]
        return (await asyncio.gather(leave(), leave_what_is_not_streamed(), *asked))[2:]


def test_each_of_many_requests_gets_what_it_would_get_alone(running):
    """32 at a time, which need four times the pages that there are, and two that are abandoned."""
    requests = prompts(32)
    assert asyncio.run(ask_all(running, requests)) == one_by_one(running.engine, requests)
    deadline = time.monotonic() + 60
    while running.unfinished():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not running.engine.manager.output_router.result_handlers


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 300}, "expected at most 256 tokens, found 1 and 300 to write"),
        ({"max_tokens": 0}, "expected max_tokens to be a whole number of at least 1, found 0"),
        ({"logit_bias": {"5": 10}}, "expected logit_bias to be {}, found {'5': 10}"),
        ({"prompt": ""}, "expected a prompt: a text, or tokens from 0 to 1535"),
        ({"prompt": ["import", "os"]}, "expected a prompt: a text, or tokens from 0 to 1535"),
        ({"prompt": [5, 1536]}, "expected a prompt: a text, or tokens from 0 to 1535"),
        ({"temperature": 0.7}, "expected temperature to be 0, found 0.7"),
    ],
    ids=["too long", "none to write", "biased", "nothing", "several", "no token", "sampling"],
)
def test_what_it_cannot_do_is_refused_with_a_reason(running, more, message):
    async def ask():
        async with running.client() as client:
            await client.completions.create(**({"model": NAME, "prompt": "import"} | more))

    with pytest.raises(openai.BadRequestError, match=message):
        asyncio.run(ask())


@pytest.mark.parametrize("more", [{"stop": []}, {"logprobs": False}, {"tools": [], "n": 1}, {"suffix": ""}])
def test_what_asks_for_nothing_is_taken(running, more):
    body = json.dumps({"prompt": "import", "max_tokens": 1, **more}).encode()
    with urllib.request.urlopen(f"{running.address()}/completions", body) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("more", [{"stop": ["a"]}, {"logprobs": 1}, {"n": 0}])
def test_what_asks_for_something_else_is_not(running, more):
    body = json.dumps({"prompt": "import", "max_tokens": 1, **more}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{running.address()}/completions", body)
    with refused.value:
        assert json.load(refused.value)["error"]["message"].startswith(f"expected {next(iter(more))} to be")


NO_REQUESTS = {
    "text": b"import",
    "list": b"[1, 2]",
    "pairs": b'[["prompt", "import"]]',
    "a word for a number": b'{"prompt": "import", "max_tokens": "3"}',
    "a word for false": b'{"prompt": "import", "stream": "false"}',
    "a list of options": b'{"prompt": "import", "stream": true, "stream_options": [1]}',
    "no prompt": b'{"messages": 3}',
    "half a character": b'{"prompt": "\\ud800", "max_tokens": 2}',
    "nested": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_what_is_no_request_is_refused_too(running, body):
    asked = urllib.request.Request(f"{running.address()}/completions", body)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["message"].startswith("expected")
    refused.value.close()


def test_models_are_listed_and_a_chat_needs_a_template(running, monkeypatch):
    async def ask():
        async with running.client() as client:
            names = [model.id async for model in client.models.list()]
            chat = {"model": NAME, "messages": [{"role": "user", "content": "import os"}], "max_tokens": 6}
            with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
                await client.chat.completions.create(**chat)
            template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            monkeypatch.setattr(running.engine.tokenizer, "chat_template", template)
            answer = await client.chat.completions.create(**chat)
            stream = await client.chat.completions.create(**chat, stream=True)
            streamed = "".join([chunk.choices[0].delta.content async for chunk in stream])
            return names, answer.choices[0].message.content, streamed

    names, answered, streamed = asyncio.run(ask())
    assert names == [NAME]
    assert [answered] == [streamed] == one_by_one(running.engine, [("import os", 6)])


@pytest.mark.slow
def test_compiled_decoding_answers_the_same():
    requests = prompts(64)
    with Running(pages=32, page_size=8, eager=False) as running:
        assert asyncio.run(ask_all(running, requests, seconds_between=0.2)) == one_by_one(running.engine, requests)


@pytest.mark.slow
def test_under_torchrun_ranks_share_the_heads_and_the_first_answers(running, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--port", str(port), "--pages", "32", "--page-size", "8", "--dtype", "float32", "--eager"]
    command = [*launch, EXAMPLES / "serve.py", CHECKPOINT, *options]
    requests = prompts(8)
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}) as ranks,
    ):
        try:
            answers = [_answer(ranks, port, *request) for request in requests]
        finally:
            ranks.terminate()
    written = (tmp_path / "log").read_text()
    assert answers == one_by_one(running.engine, requests), written
    assert "Application shutdown complete" in written
    assert "forcefully" not in written  # as torchrun ends a rank that does not stop


def _answer(ranks, port, prompt, count):
    """What the server answers, once there is one."""
    body = json.dumps({"prompt": prompt, "max_tokens": count}).encode()
    asked = urllib.request.Request(f"http://localhost:{port}/v1/completions", body)
    while ranks.poll() is None:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(asked, timeout=300) as answer:
            return json.load(answer)["choices"][0]["text"]
        time.sleep(0.5)
    return None
