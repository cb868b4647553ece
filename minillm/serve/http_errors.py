"""Errors as OpenAI's API writes them: `{"error": {"message": …, "type": …, "param": …, "code": 400}}`.

The types are like those of vLLM's own checks, and its 401 has no such body. A request to an engine that has ended is
answered 503 here, 500 there.
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from minillm.errors import EngineDeadError, EngineGenerateError, MinillmError, QueueOverflowError

logger = logging.getLogger(__name__)

TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
RETRY_AFTER_S = "1"
"""What a request that is answered 503 is told to wait."""
UNEXPECTED = "the server failed while it worked on the request; its log says why"
MAX_LISTED, MAX_WHERE = 5, 100
"""Of what is wrong with a body: so many errors are listed, and so many characters of each field's name."""
NOT_AN_OBJECT = "the body must be a JSON object in UTF-8, sent with the header 'Content-Type: application/json'"


class ApiError(MinillmError):
    """A request that the server refuses, with its HTTP status and the field that is wrong."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def status_of(problem: Exception) -> HTTPStatus:
    """The HTTP status for an error of the engine: the client's fault, full, or broken."""
    if isinstance(problem, ApiError):
        return problem.status
    if isinstance(problem, QueueOverflowError | EngineDeadError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(problem, MinillmError) and not isinstance(problem, EngineGenerateError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(message: str, status: HTTPStatus, param: str | None = None) -> dict[str, object]:
    """The JSON of an error. Half a surrogate pair, which cannot be sent, is written as an escape."""
    message = message.encode("utf-8", "backslashreplace").decode()
    kind = TYPES.get(status, "InternalServerError" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


def error_event(problem: Exception) -> str:
    """An error in the middle of a stream, as a server-sent event. What is not minillm's own error is logged."""
    if not isinstance(problem, MinillmError):
        logger.error("A stream failed.", exc_info=problem)
    message = str(problem) if isinstance(problem, MinillmError) else UNEXPECTED
    return f"data: {json.dumps(error_body(message, status_of(problem)))}\n\n"


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    def respond(message: str, status: HTTPStatus, param: str | None = None) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER_S} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        return JSONResponse(error_body(message, status, param), status, headers)

    @app.exception_handler(MinillmError)
    async def of_minillm(request: Request, problem: MinillmError) -> JSONResponse:
        return respond(str(problem), status_of(problem), getattr(problem, "param", None))

    @app.exception_handler(RequestValidationError)
    async def of_fields(request: Request, problem: RequestValidationError) -> JSONResponse:
        return respond(*describe(problem))

    @app.exception_handler(StarletteHTTPException)
    async def of_http(request: Request, problem: HTTPException) -> JSONResponse:
        response = respond(_with_fix(app, request, problem), HTTPStatus(problem.status_code))
        response.headers.update(problem.headers or {})
        return response

    @app.exception_handler(Exception)
    async def of_server(request: Request, problem: Exception) -> JSONResponse:
        return respond(UNEXPECTED, HTTPStatus.INTERNAL_SERVER_ERROR)


def _with_fix(app: FastAPI, request: Request, problem: HTTPException) -> str:
    """What is wrong with a request that reached no endpoint, and what this server takes."""
    path, allowed = request.url.path, (problem.headers or {}).get("Allow", "")
    if problem.status_code == HTTPStatus.NOT_FOUND:
        paths = ", ".join(route.path_format for route in app.routes if isinstance(route, APIRoute))
        return f"there is no path {path}; this server has {paths}"
    if problem.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{path} does not take {request.method}; use {allowed}"
    if problem.status_code == HTTPStatus.BAD_REQUEST:  # a body that the framework cannot read
        return f"{NOT_AN_OBJECT}; it cannot be read: {problem.__cause__}"
    return str(problem.detail)


def describe(problem: RequestValidationError) -> tuple[str, HTTPStatus, str | None]:
    """What is wrong with a body: the message, the status, and the first field that is wrong."""
    errors = problem.errors()
    if errors and errors[0]["type"] == "json_invalid":
        return f"{NOT_AN_OBJECT}; it is not JSON: {errors[0]['ctx']['error']}", HTTPStatus.BAD_REQUEST, None
    parts, fields = [], []
    for error in errors:
        if tuple(error["loc"]) == ("body",):
            return NOT_AN_OBJECT, HTTPStatus.BAD_REQUEST, None
        where = ".".join(str(part) for part in error["loc"] if part != "body")
        fields.append(where.split(".")[0])
        where = where if len(where) <= MAX_WHERE else f"{where[:MAX_WHERE]}…"
        parts.append(f"{where}: {error['msg']}" if where else str(error["msg"]))
    parts = [*dict.fromkeys(parts)]
    more = [f"and {len(parts) - MAX_LISTED} more"] if len(parts) > MAX_LISTED else []
    return (
        "; ".join([*parts[:MAX_LISTED], *more]),
        HTTPStatus.BAD_REQUEST,
        next((name for name in fields if name), None),
    )
