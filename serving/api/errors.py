"""Every failure as OpenAI clients read it: `{"error": {"message", "type", "param", "code"}}`."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from glm_jax.errors import RequestError
from serving.engine_thread import EngineDeadError
from serving.errors import QueueFullError


class UnknownModelError(Exception):
    """The request names a model that this server does not serve."""


def error_body(message: str, kind: str, status: int, parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}


def error_response(message: str, kind: str, status: int, parameter: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, kind, status, parameter), status)


def install(app: FastAPI) -> None:
    """Registers the handlers."""

    @app.exception_handler(RequestError)
    async def bad_request(_: Request, error: RequestError) -> JSONResponse:
        return error_response(str(error), "BadRequestError", 400, error.parameter)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"] if part != "body")
        message = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())
        return error_response(message, "Bad Request", 400, path or None)

    @app.exception_handler(UnknownModelError)
    async def unknown_model(_: Request, error: UnknownModelError) -> JSONResponse:
        return error_response(str(error), "NotFoundError", 404, "model")

    @app.exception_handler(EngineDeadError)
    async def dead(_: Request, error: EngineDeadError) -> JSONResponse:
        return error_response(str(error), "InternalServerError", 500)

    @app.exception_handler(QueueFullError)
    async def full(_: Request, error: QueueFullError) -> JSONResponse:
        return error_response(str(error), "ServiceUnavailableError", 503)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        kind = HTTPStatus(error.status_code).phrase
        return error_response(str(error.detail), kind, error.status_code)
