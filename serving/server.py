"""The server process: load, compile everything, then listen."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import jax
import uvicorn
from fastapi import FastAPI
from jax.sharding import AxisType, Mesh

import glm_jax
from glm_jax.chat import ChatTemplate
from glm_jax.generation_config import load_sampling_defaults
from serving.api.app import create_app
from serving.api.service import Service
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.engine_thread import EngineThread

logger = logging.getLogger(__name__)
WATCH_S = 0.5


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The flags that are not the engine's; see `python -m glm_jax.serve --help`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = "bfloat16"
    served_model_names: tuple[str, ...] = ()
    api_key: str | None = None
    chat_template: str | None = None
    tensor_parallel_size: int = 1
    enable_prompt_tokens_details: bool = False
    log_level: str = "info"


def run(server: ServerConfig, engine: EngineConfig) -> int:
    """Serves until interrupted; returns the exit code, 1 if the engine died.

    The port is taken first, so that a taken one is known before a long load, and listened on last, so that
    whoever can connect gets answers without waiting for a compiler. Raises OSError for a port that cannot be
    bound, ValueError for limits or a model that cannot be served.
    """
    with _bound_socket(server.host, server.port) as bound:
        model = glm_jax.load(server.model, dtype=server.dtype, mesh=_mesh(server.tensor_parallel_size))
        made = Engine(model, engine)
        logger.info("memory of one device:\n%s", made.plan.table(engine.block_size))
        start = time.monotonic()
        logger.info("%d programs ready in %.1f s", made.warm_up(), time.monotonic() - start)
        thread = EngineThread(made)
        thread.start()
        template = model.tokenizer.chat_template if model.tokenizer else None
        if server.chat_template is not None:
            template = ChatTemplate(Path(server.chat_template).read_text(encoding="utf-8"))
        service = Service(
            engine=AsyncEngine(thread),
            names=server.served_model_names or (server.model,),
            chat_template=template,
            sampling_defaults=load_sampling_defaults(model.source) if model.source else {},
            prompt_tokens_details=server.enable_prompt_tokens_details,
        )
        try:
            return _listen(create_app(service, server.api_key), thread, bound, server.log_level)
        finally:
            thread.stop()


def _mesh(devices: int) -> Mesh | None:
    """The first devices on one axis; None for a single one. ValueError if there are not so many."""
    if devices == 1:
        return None
    if not 1 <= devices <= jax.device_count():
        raise ValueError(
            f"tensor_parallel_size must be 1 to {jax.device_count()} devices here, got {devices}"
        )
    return jax.make_mesh((devices,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def _listen(app: FastAPI, thread: EngineThread, bound: socket.socket, log_level: str) -> int:
    server = uvicorn.Server(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=5))

    async def watch() -> None:
        while thread.alive:
            await asyncio.sleep(WATCH_S)
        server.should_exit = True

    @contextlib.asynccontextmanager
    async def watched(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch())
        yield
        task.cancel()

    app.router.lifespan_context = watched
    server.run(sockets=[bound])
    return 1 if thread.error is not None else 0
