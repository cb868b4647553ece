"""`ChatTemplate`: the model's own way of writing a conversation as one prompt, if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from minillm.errors import CheckpointError, ConfigError
from minillm.serve.http_errors import ApiError
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

    @property
    def is_there(self) -> bool:
        """Whether the model can chat."""
        if self.source is not None:
            return True
        try:
            return bool(self.tokenizer.hf().chat_template)
        except CheckpointError:  # no tokenizer that transformers reads, so no template
            return False

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt for these messages. Raises `ApiError` if there is no template, or if it refuses them."""
        if not self.is_there:
            raise ApiError(
                f"{self.model!r} has no chat template, so it cannot chat; use /v1/completions, or start the server "
                "with --chat-template FILE"
            )
        try:
            tokenizer = self.tokenizer.hf()
        except CheckpointError as problem:  # the template is the server's own, so its tokenizer was not read before
            raise ApiError(str(problem), HTTPStatus.INTERNAL_SERVER_ERROR) from None
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
            )
        except TemplateSyntaxError as problem:
            message = f"the server's chat template is not valid Jinja: {problem.message}, line {problem.lineno}"
            raise ApiError(message, HTTPStatus.INTERNAL_SERVER_ERROR) from None
        except Exception as problem:  # templates call `raise_exception`; Jinja has errors of its own
            reason = " ".join(str(problem).split())
            raise ApiError(f"the chat template refuses these messages: {reason}", param="messages") from None
