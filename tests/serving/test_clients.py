"""A listening server and real clients: the openai package, and sockets that close at any moment."""

import random
import socket
import time
from collections.abc import Iterator

import openai
import pytest

from serving.engine_thread import EngineThread
from tests.serving.http_server import TextDevice, application, engine_thread, idle, listening

TEXT = "An answer \U0001f600 of some length. " * 3
CHAT = (
    b'{"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true, "max_tokens": 400, "stream": %s}'
)


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    made = engine_thread(TextDevice(TEXT, pause_s=0.002), max_num_seqs=4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def base(thread: EngineThread) -> Iterator[str]:
    with listening(application(thread)) as address:
        yield address


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=30)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="fake", messages=messages)
    assert whole.choices[0].message.content == TEXT and whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be between 0 and 2") as caught:
        client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], temperature=3
        )
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


def test_the_first_text_does_not_wait_for_the_last(client: openai.OpenAI) -> None:
    start = time.monotonic()
    stream = client.completions.create(
        model="fake", prompt="x<|assistant|>", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(text for chunk in stream if (text := chunk.choices[0].text))
    early = time.monotonic() - start
    rest = "".join(chunk.choices[0].text for chunk in stream)
    assert first + rest == TEXT
    assert early < (time.monotonic() - start) / 2


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_clients_that_leave_free_everything(thread: EngineThread, base: str, stream: bytes) -> None:
    chance = random.Random(int(stream == b"true"))
    port = int(base.rsplit(":", 1)[1])
    body = CHAT % stream
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    generated = thread.engine.stats()["generation_tokens"]
    open_sockets = []
    for _ in range(30):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        open_sockets.append((time.monotonic() + chance.random() * 0.3, client))
    for leave, client in sorted(open_sockets, key=lambda entry: entry[0]):
        time.sleep(max(0.0, leave - time.monotonic()))
        client.close()
    assert idle(thread, timeout_s=1.0)
    # 30 answers of 400 tokens were asked for; those abandoned must not have been generated.
    assert thread.engine.stats()["generation_tokens"] - generated < 30 * 400 / 4
