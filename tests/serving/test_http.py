"""The HTTP API in process: shapes of bodies and errors, the order of chunks, defaults, keys and ids."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from serving.engine_thread import EngineThread
from tests.serving.http_server import TextDevice, application, engine_thread, idle
from tests.serving.tiny_text import TOKENIZER

TEXT = "Hello, žluťoučký \U0001f600 Question: more"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    made = engine_thread(TextDevice(TEXT), max_model_len=128)
    yield made
    assert idle(made)
    made.stop()


def call(
    thread: EngineThread, method: str, path: str, *, app_options: dict | None = None, **request: object
) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(application(thread, **(app_options or {})))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def chat(thread: EngineThread, **body: object) -> httpx.Response:
    return call(thread, "POST", "/v1/chat/completions", json={**HELLO, **body})


def events(response: httpx.Response) -> list[dict]:
    """The parsed events of a stream that ends as it must."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def test_a_chat(thread: EngineThread) -> None:
    response = chat(thread)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert (
        body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "fake"
    )
    choice = body["choices"][0]
    assert choice["index"] == 0 and choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == TEXT
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    prompt = len(TOKENIZER.encode("<|user|>hi<|assistant|>"))
    generated = len(TOKENIZER.encode(TEXT)) + 1  # the end token counts
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_comes_in_the_order_clients_rely_on(thread: EngineThread) -> None:
    chunks = events(chat(thread, stream=True, stream_options={"include_usage": True}))
    first, *middle, last, usage = chunks
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (first["id"], first["created"], "fake", "chat.completion.chunk")
    }
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(
        c["choices"][0]["finish_reason"] is None and c["choices"][0]["delta"]["content"] for c in middle
    )
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", None)
    assert usage["choices"] == [] and usage["usage"] == chat(thread).json()["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    joined = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert joined == TEXT
    assert not any("�" in c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 20},
        {"stop": ["Question:", "</s>", "<|im_end|>"]},
        {"stop": "\U0001f600 Q", "include_stop_str_in_output": True},
        {"max_tokens": len("Hello, žluťoučký ".encode()) + 2},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"ignore_eos": True, "max_completion_tokens": 60, "max_tokens": 1},
    ],
)
def test_streams_say_what_whole_answers_say(thread: EngineThread, options: dict) -> None:
    whole = chat(thread, **options).json()
    parts = events(chat(thread, stream=True, stream_options={"include_usage": True}, **options))
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in parts[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
    assert parts[-1]["usage"] == whole["usage"]


def test_what_ends_an_answer(thread: EngineThread) -> None:
    stopped = chat(thread, stop=["Question:"]).json()["choices"][0]
    assert stopped["message"]["content"] == TEXT[: TEXT.index("Question:")]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "Question:")
    cut = chat(thread, max_tokens=5).json()
    assert cut["choices"][0]["message"]["content"] == "Hello"
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 5)
    exact = chat(thread, max_completion_tokens=60, ignore_eos=True).json()
    assert (exact["choices"][0]["finish_reason"], exact["usage"]["completion_tokens"]) == ("length", 60)


def test_continuous_usage(thread: EngineThread) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(chat(thread, stream=True, max_tokens=3, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == sorted(
        chunk["usage"]["completion_tokens"] for chunk in chunks
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_unknown_fields_are_ignored(thread: EngineThread) -> None:
    response = chat(
        thread, user="x", metadata={"a": 1}, store=True, service_tier="auto", parallel_tool_calls=True
    )
    assert response.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature must be between 0 and 2, got -1"),
        ({"temperature": 2.5}, "temperature", "got 2.5"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "top_p must be above 0 and at most 1, got 0"),
        ({"top_k": -2}, "top_k", "top_k must be at least -1, got -2"),
        ({"min_p": 2}, "min_p", "min_p must be between 0 and 1, got 2"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n", "n must be between 1 and 128, got 0"),
        ({"n": 2}, "n", "n must be 1 when using greedy sampling, got 2"),
        ({"stop": ["a", ""]}, "stop", "not empty"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs is not supported by this server, got 3"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be of type text, json_object"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs", "exactly one of"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens must be between 0 and 3, got 9"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be between -2 and 2, got 3"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "token id 300 is outside the vocabulary"),
        ({"tools": []}, "tools", "at least 1 item"),
        ({"tools": [{"type": "function"}]}, "tool_choice", "tool_choice must be 'none', got 'auto'"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role", "required"),
        ({"messages": None}, "messages", "list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "content parts of type 'image_url' are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 200}]},
            "prompt",
            "maximum context length is 128 tokens",
        ),
        ({"messages": [{"role": "user", "content": "x" * 126}]}, "prompt", "your prompt contains 128 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(thread: EngineThread, body: dict, parameter: str, message: str, stream: bool) -> None:
    response = chat(thread, stream=stream, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == parameter
    assert error["code"] == 400 and error["type"] in ("BadRequestError", "Bad Request")
    assert idle(thread)


def test_stream_options_need_a_stream(thread: EngineThread) -> None:
    error = chat(thread, stream_options={"include_usage": True}).json()["error"]
    assert (error["param"], error["code"]) == ("stream_options", 400)


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        ("{", {"content-type": "application/json"}, "JSON"),
        ("[]", {"content-type": "application/json"}, "dictionary"),
        ("{}", {"content-type": "application/json"}, "required"),
        (json.dumps(HELLO), {"content-type": "text/plain"}, "Unsupported Media Type"),
        (json.dumps(HELLO), {}, "Unsupported Media Type"),
    ],
)
def test_bodies_that_are_not_json_requests(
    thread: EngineThread, content: str, headers: dict, message: str
) -> None:
    response = call(thread, "POST", "/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_models(thread: EngineThread) -> None:
    listed = call(thread, "GET", "/v1/models").json()
    assert listed["object"] == "list" and [entry["id"] for entry in listed["data"]] == ["fake", "alias"]
    assert listed["data"][0]["object"] == "model" and listed["data"][0]["max_model_len"] == 128
    assert call(thread, "GET", "/v1/models/alias").json()["id"] == "alias"
    for response in (call(thread, "GET", "/v1/models/other"), chat(thread, model="other")):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert chat(thread, model="alias").json()["model"] == "fake"


def test_what_is_not_there(thread: EngineThread) -> None:
    assert call(thread, "GET", "/nowhere").json()["error"]["code"] == 404
    assert call(thread, "GET", "/v1/chat/completions").json()["error"]["code"] == 405


def test_health_and_version(thread: EngineThread) -> None:
    health = call(thread, "GET", "/health")
    assert (health.status_code, health.content) == (200, b"")
    assert call(thread, "GET", "/version").json()["version"]


def test_request_ids_come_back(thread: EngineThread) -> None:
    response = call(thread, "POST", "/v1/chat/completions", json=HELLO, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "chatcmpl-abc-1"
    assert chat(thread).headers["x-request-id"] != chat(thread).headers["x-request-id"]


def test_api_key(thread: EngineThread) -> None:
    key = {"api_key": "secret"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        response = call(thread, "POST", "/v1/chat/completions", json=HELLO, headers=headers, app_options=key)
        assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    right = {"authorization": "Bearer secret"}
    assert call(thread, "GET", "/v1/models", headers=right, app_options=key).status_code == 200
    assert call(thread, "GET", "/health", app_options=key).status_code == 200
    # Without a key on the server any bearer is welcome, an empty one too.
    assert call(thread, "GET", "/v1/models", headers={"authorization": "Bearer "}).status_code == 200


def test_the_checkpoints_sampling_defaults(thread: EngineThread) -> None:
    hot = {"app_options": {"sampling_defaults": {"temperature": 1.0}}}
    ask = {**HELLO, "n": 2, "max_tokens": 2}
    assert call(thread, "POST", "/v1/chat/completions", json=ask, **hot).status_code == 200
    cold = call(thread, "POST", "/v1/chat/completions", json={**ask, "temperature": 0}, **hot)
    assert "greedy" in cold.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(thread: EngineThread, stream: bool) -> None:
    prompts = ["a<|assistant|>", "bb<|assistant|>"]
    body = {"prompt": prompts, "max_tokens": 5, "echo": True, "stream": stream}
    response = call(thread, "POST", "/v1/completions", json=body)
    choices = (
        [choice for chunk in events(response) for choice in chunk["choices"]]
        if stream
        else response.json()["choices"]
    )
    for index, prompt in enumerate(("a", "bb")):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt + "Hello"
        assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "The decoder prompt cannot be empty"),
        ([], "at least one prompt"),
        ([[]], "The decoder prompt cannot be empty"),
        ([300], "token id 300 is outside the vocabulary"),
        (["x", "y" * 128], "maximum context length is 128"),
        (5, "prompt"),
    ],
)
def test_bad_prompts(thread: EngineThread, prompt: object, message: str) -> None:
    response = call(thread, "POST", "/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert idle(thread)


def test_completions_by_token_ids_default_to_sixteen_tokens(thread: EngineThread) -> None:
    body = {"prompt": TOKENIZER.encode("x<|assistant|>"), "ignore_eos": True}
    assert call(thread, "POST", "/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_says_so(stream: bool) -> None:
    device = TextDevice(TEXT)
    device.fail_at = 4
    thread = engine_thread(device)
    response = chat(thread, stream=stream)
    if stream:
        *_, last = events(response)
        assert last["error"]["code"] == 500
    else:
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "InternalServerError"
    assert call(thread, "GET", "/health").status_code == 503
    assert chat(thread).status_code == 500
    assert "the device is gone" in str(thread.error)


def test_a_full_queue_is_a_503() -> None:
    device = TextDevice(TEXT, pause_s=0.01)
    thread = engine_thread(device, max_num_seqs=1, max_num_queued_reqs=1)
    app = application(thread)

    async def crowd() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
            bodies = [{**HELLO, "max_tokens": 10, "stream": stream} for stream in (False, True) * 3]
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))

    responses = asyncio.run(crowd())
    refused = [response for response in responses if response.status_code != 200]
    assert 0 < len(refused) < len(responses)
    for response in refused:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, 503)
        assert error["type"] == "ServiceUnavailableError" and "1 requests are waiting" in error["message"]
    assert idle(thread)
    thread.stop()


@pytest.mark.parametrize(
    "structure",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "boolean"}},
            }
        },
        {"structured_outputs": {"choice": ["true", "false"]}},
    ],
)
def test_structured_answers(thread: EngineThread, structure: dict) -> None:
    response = chat(thread, **structure, max_tokens=20)
    assert response.json()["choices"][0]["message"]["content"] in ("true", "false")
