"""`ChatTemplate`: writes a conversation as one prompt, by the checkpoint's Jinja template or another."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from minillm.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from minillm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of the parts of a message's content that are text, as in vLLM, and the field that holds it."""


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
        """`file` replaces the checkpoint's template. Raises `ConfigError` if it cannot be read or is no valid Jinja."""
        self.model = model
        self.tokenizer = tokenizer
        self.source = read_template(file)
        if self.source is not None:
            try:
                self._apply(self.source, [{"role": "user", "content": ""}])
            except TemplateSyntaxError as problem:
                raise ConfigError(f"the chat template {file} {_not_jinja(problem)}; name another") from None
            except Exception:  # it may refuse this message and take others; a broken tokenizer is reported by a chat
                pass

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation.

        `template`: Jinja that replaces the one of the file or the checkpoint. `add_generation_prompt`: end with the
        beginning of an answer. `continue_final_message`: end inside the last message. `tools` and `variables`, such as
        `enable_thinking`, are passed to the template.

        Raises `UnsupportedError` if there is no template, `CheckpointError` if the checkpoint's tokenizer or template
        is broken, `PromptError` if a message has the wrong form or the template refuses it, and `ConfigError` for the
        other arguments.
        """
        hf = self.tokenizer.hf()
        template = self.source if template is None else template
        if template is None and not hf.chat_template:
            raise UnsupportedError(
                f"{self.model!r} has no chat template, so it cannot chat; give one (chat_template=… of LLM.chat, "
                "--chat-template FILE of a server), or complete a text instead"
            )
        if template is not None and not isinstance(template, str):
            raise ConfigError(f"chat_template={template!r} must be the text of a Jinja template")
        if add_generation_prompt and continue_final_message:
            raise ConfigError("continue_final_message=True needs add_generation_prompt=False")
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise ConfigError(f"chat_template_kwargs={variables!r} must be a mapping of names to values")
        if tools is not None and not isinstance(tools, Sequence):
            raise ConfigError(f"tools={tools!r} must be a list of mappings")
        for name in ("self", "messages", "conversations", *signature(hf.apply_chat_template).parameters):
            if name in variables and name != "documents":  # which transformers passes to the template
                raise ConfigError(
                    f"chat_template_kwargs has {name!r}; it is for the template's own variables, such as "
                    "enable_thinking: leave it out"
                )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise PromptError(f"a conversation must be a list of at least one message, not {messages!r}")
        written = [message_for_template(message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            return self._apply(template, written, tools=tools, **options, **variables)
        except TemplateSyntaxError as problem:
            if template is None:
                raise CheckpointError(
                    f"the checkpoint's chat template {_not_jinja(problem)}; fix it, or give another"
                ) from None
            raise ConfigError(f"the chat template {_not_jinja(problem)}") from None
        except Exception as problem:  # templates call `raise_exception`; Jinja has errors of its own
            reason = " ".join(str(problem).split())
            raise PromptError(f"the chat template refuses these messages: {reason}") from None

    def _apply(self, template: str | None, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        return str(
            self.tokenizer.hf().apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
        )


def _not_jinja(problem: TemplateSyntaxError) -> str:
    return f"is not valid Jinja: {problem.message}, line {problem.lineno}"


def message_for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API as chat templates read it, as in vLLM.

    The parts of its content are joined by line ends; a part whose text is null is left out. Other fields are passed
    only where templates know them, and not if they are null, because templates ask whether a field is there. The
    arguments of a tool call become a mapping, and reasoning gets both of its names.

    Raises `PromptError` for a message without a role, a part that is not text, or a tool call of another form.
    """
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise PromptError(f"message {message!r} must be a mapping with a 'role' and its 'content'")
    written: dict[str, Any] = {"role": role, "content": _text_of(message.get("content"))}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, Sequence):
                raise PromptError(f"tool_calls={calls!r} must be a list")
            written["tool_calls"] = [_call_for_template(call) for call in calls]
        given = (message.get(name) for name in ("reasoning", "reasoning_content"))
        if (reasoning := next((text for text in given if text is not None), None)) is not None:
            written |= {"reasoning": reasoning, "reasoning_content": reasoning}
    own = {"tool": "tool_call_id", "developer": "tools"}.get(role, "")
    written |= {own: message[own]} if message.get(own) is not None else {}
    return written | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def _text_of(content: object) -> str:
    """The text of a message's content, which is a text, a list of parts, or None."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise PromptError(f"the content of a message must be text or a list of parts, not {type(content).__name__}")
    texts = map(_text_of_part, content)
    return "\n".join(text for text in texts if text is not None)


def _text_of_part(part: Mapping[str, Any]) -> str | None:
    """The text of one part of a message's content; None if it is null."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise PromptError(f"a message has a part of type {kind!r}; this model reads text")
    text = part.get(TEXT_PARTS[kind])
    if text is not None and not isinstance(text, str):
        raise PromptError(f"a part of type {kind!r} needs a string as its text, not {type(text).__name__}")
    return text


def _call_for_template(call: object) -> dict[str, Any]:
    """A tool call with its arguments, which OpenAI's API writes as JSON, as a mapping.

    What is no JSON object becomes an empty one, as in vLLM: it is history, which the caller cannot repair.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise PromptError(f"tool call {call!r} must be a mapping of type 'function' with a 'function'")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        logger.warning("The arguments of a call of %r are no JSON object; the template gets {}.", function.get("name"))
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
