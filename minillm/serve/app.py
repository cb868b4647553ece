"""The HTTP application: which path does what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from minillm.async_llm import AsyncLLM
from minillm.chat_template import ChatTemplate
from minillm.serve.chat import ChatJob
from minillm.serve.completions import CompletionJob
from minillm.serve.disconnects import unless_disconnected
from minillm.serve.http_errors import ApiError, install_error_handlers
from minillm.serve.metrics import ServerMetrics
from minillm.serve.middleware import install_checks
from minillm.serve.requests import ChatRequest, CompletionRequest
from minillm.serve.responses import ModelCard, ModelList
from minillm.serve.settings import ServerSettings
from minillm.version import __version__


def build_app(engine: AsyncLLM, settings: ServerSettings, template: ChatTemplate | None = None) -> FastAPI:
    """An application that serves `engine`, and shuts it down when it ends itself.

    `template`: how to write a chat; None: the checkpoint's own, if it has one.
    """
    started = int(time.time())
    root = engine.llm_engine.model
    metrics = ServerMetrics(engine, settings.model_names[0])
    chats = template or ChatTemplate(engine.llm_engine.engine.tokenizer, root)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.shutdown)

    app = FastAPI(title="minillm", version=__version__, lifespan=lifespan)
    install_error_handlers(app)
    install_checks(app, settings)

    def check_model(name: str | None) -> None:
        if name is not None and name not in settings.model_names:
            names = ", ".join(settings.model_names)
            message = f"the model {name!r} does not exist; this server has {names}"
            raise ApiError(message, HTTPStatus.NOT_FOUND, "model")

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=started, root=root, max_model_len=engine.llm_engine.max_model_len)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts, or fill the gap before `suffix`."""
        check_model(body.model)
        job = await asyncio.to_thread(CompletionJob, engine, settings, body)  # it may tokenise a long text
        return await unless_disconnected(request, job.respond())

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        check_model(body.model)
        job = await asyncio.to_thread(ChatJob, engine, settings, chats, body)  # the first one loads the template
        return await unless_disconnected(request, job.respond())

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The names of the served model."""
        return ModelList(data=[card(name) for name in settings.model_names])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard | ModelList:
        """One name of the served model; all of them for `/v1/models/`."""
        if not name:
            return await models()
        check_model(name)
        return card(name)

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, 503 when it has ended."""
        await engine.check_health()
        return Response()

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counts and times in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app
