"""The HTTP application over an engine on the fake device, in process or on a loopback port."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from serving.api.app import create_app
from serving.api.service import Service
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.engine_thread import EngineThread
from tests.serving.fake_device import FakeDevice
from tests.serving.tiny_text import EOS, TOKENIZER, weightless_model


class TextDevice(FakeDevice):
    """Answers with a fixed text, then end-of-text for ever; each step takes `pause_s` seconds."""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        ids = TOKENIZER.encode(text)

        def next_token(tokens: Sequence[int], seed: int) -> int:
            # Prompts in these tests end in the assistant marker, which no answer contains.
            marker = len(tokens) - 1 - list(tokens[::-1]).index(TOKENIZER.id_of("<|assistant|>"))
            done = len(tokens) - 1 - marker
            return ids[done] if done < len(ids) else EOS

        super().__init__(8, next_token)
        self.pause_s = pause_s


def engine_thread(device: FakeDevice, **limits: Any) -> EngineThread:
    config = EngineConfig(**{"block_size": 8, "snapshot_spacing": 64, "max_num_seqs": 4, **limits})
    thread = EngineThread(Engine(weightless_model(), config, runner=device))
    thread.start()
    return thread


def application(thread: EngineThread, *, api_key: str | None = None, **options: object) -> FastAPI:
    service = Service(
        engine=AsyncEngine(thread),
        names=("fake", "alias"),
        chat_template=TOKENIZER.chat_template,
        **{"sampling_defaults": {"temperature": 0.0}, "prompt_tokens_details": True, **options},
    )
    return create_app(service, api_key)


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves on a free loopback port; yields the base address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def idle(thread: EngineThread, timeout_s: float = 2.0) -> bool:
    """Whether everything is free within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stats = thread.engine.stats()
        if not stats["running"] + stats["waiting"] and stats["free_blocks"] == stats["total_blocks"]:
            return not thread._listeners
        time.sleep(0.01)
    return False
