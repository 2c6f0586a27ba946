"""The routes."""

import importlib.metadata
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from glm_jax.errors import RequestError
from serving.api import chat, completions, errors
from serving.api.disconnect import ClientGoneError, EventStream, until_disconnect
from serving.api.middleware import ApiKey, RequestId
from serving.api.protocol import ChatCompletionBody, CompletionBody
from serving.api.service import Service, frames_until_done
from serving.engine_thread import EngineDeadError

CLIENT_GONE_STATUS = 499  # nobody reads it; it is what proxies log for this


def _json_only(request: Request) -> None:
    """RequestError for a body that is not declared as JSON."""
    declared = request.headers.get("content-type", "")
    if declared.split(";")[0].strip().lower() != "application/json":
        raise RequestError(f"Unsupported Media Type: content-type must be application/json, got {declared!r}")


def create_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application over a running engine."""
    app = FastAPI(title="glm_jax", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(RequestId)

    def check_alive() -> None:
        if not service.engine.alive:
            raise EngineDeadError("the engine has stopped")

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("glm-jax")}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name)

    @app.post("/v1/chat/completions", dependencies=[Depends(_json_only)], response_model=None)
    async def chat_completions(body: ChatCompletionBody, request: Request) -> Response:
        check_alive()
        prepared = await chat.prepare(service, body)
        head = chat.head(service, request.state.request_id)
        if body.stream:
            return EventStream(frames_until_done(chat.chunks(service, prepared, body, head)))
        try:
            await until_disconnect(request.receive, service.finish([prepared]))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE_STATUS)
        return JSONResponse(chat.full_response(service, prepared, head))

    @app.post("/v1/completions", dependencies=[Depends(_json_only)], response_model=None)
    async def text_completions(body: CompletionBody, request: Request) -> Response:
        check_alive()
        prepared = await completions.prepare(service, body)
        head = completions.head(service, request.state.request_id)
        if body.stream:
            return EventStream(frames_until_done(completions.chunks(service, prepared, body, head)))
        try:
            await until_disconnect(request.receive, service.finish(prepared))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE_STATUS)
        return JSONResponse(completions.full_response(service, prepared, body, head))

    return app


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "glm_jax",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
        "permission": [],
    }
