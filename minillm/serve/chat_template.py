"""`ChatTemplate`: the model's own way of writing a conversation as one prompt, if it has one."""

from __future__ import annotations

from functools import cached_property
from http import HTTPStatus
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from minillm.errors import CheckpointError, ConfigError
from minillm.serve.http_errors import ApiError
from minillm.serve.requests import ChatRequest
from minillm.tokenizer import Tokenizer


def read_template(file: str | Path | None) -> str | None:
    """The text of a template's file; None without a file. Raises `ConfigError` if it cannot be read."""
    if file is None:
        return None
    try:
        if Path(file).exists() and not Path(file).is_file():
            raise ConfigError(f"the chat template {file} is not a regular file; name another")
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the chat template {file} cannot be read ({problem}); name another") from None


class ChatTemplate:
    """The Jinja template of the checkpoint's tokenizer, or of a file. transformers renders it, sandboxed."""

    def __init__(self, tokenizer: Tokenizer, model: str, file: str | Path | None = None) -> None:
        """`file` replaces the checkpoint's template. Raises `ConfigError` if it cannot be read."""
        self.model = model
        self.tokenizer = tokenizer
        self.source = read_template(file)

    @cached_property
    def _hf(self) -> Any:
        """The tokenizer as a transformers object, or the `CheckpointError` if it cannot be read, which is found out
        only once."""
        try:
            return self.tokenizer.hf()
        except CheckpointError as problem:
            return problem

    def render(self, body: ChatRequest) -> str:
        """The prompt for the messages of a request.

        Raises `ApiError` if there is no template, if the tokenizer cannot be read, or if the template refuses them.
        """
        if isinstance(self._hf, CheckpointError):
            raise ApiError(str(self._hf), HTTPStatus.INTERNAL_SERVER_ERROR)
        if self.source is None and not self._hf.chat_template:
            raise ApiError(
                f"{self.model!r} has no chat template, so it cannot chat; use /v1/completions, or start the server "
                "with --chat-template FILE"
            )
        variables = body.chat_template_kwargs or {}
        for name in ("self", "messages", "conversations", *signature(self._hf.apply_chat_template).parameters):
            if name in variables:
                raise ApiError(
                    f"chat_template_kwargs has {name!r}; it is for the template's own variables, such as "
                    "enable_thinking: leave it out",
                    param="chat_template_kwargs",
                )
        messages = [message.for_template() for message in body.messages]
        try:
            return str(
                self._hf.apply_chat_template(
                    messages,
                    chat_template=self.source,
                    add_generation_prompt=body.add_generation_prompt,
                    tokenize=False,
                    **variables,
                )
            )
        except TemplateSyntaxError as problem:
            message = f"the server's chat template is not valid Jinja: {problem.message}, line {problem.lineno}"
            raise ApiError(message, HTTPStatus.INTERNAL_SERVER_ERROR) from None
        except Exception as problem:  # templates call `raise_exception`; Jinja has errors of its own
            reason = " ".join(str(problem).split())
            raise ApiError(f"the chat template refuses these messages: {reason}", param="messages") from None
