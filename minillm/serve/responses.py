"""The bodies of the server's answers, with OpenAI's field names, whole and in chunks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "abort"]


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int
    """Tokens whose keys and values were found in the prefix cache."""


class Usage(BaseModel):
    """The tokens of a request, over all its prompts and choices; in a chunk with a choice, those of that choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of_choice(cls, num_prompt_tokens: int, num_completion_tokens: int) -> Usage:
        """The tokens of one choice so far."""
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of `/v1/completions`: one entry per token."""

    text_offset: list[int]
    """Where each token begins in the choice's text, in characters of the tokens before it."""
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One completion of one prompt, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, or a chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(BaseModel):
    """One token that was possible at a position."""

    token: str
    logprob: float
    bytes: list[int]
    """The token's UTF-8 bytes, perhaps only part of a character."""


class ChosenLogprob(TokenLogprob):
    """The token that was chosen at a position, and the most likely ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[ChosenLogprob]


class Message(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer to a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(BaseModel):
    """The next piece of one answer to a chat."""

    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of the answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """With the role, in the first chunk of each choice."""


class ModelCard(BaseModel):
    """One name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minillm"
    root: str
    """The bundled name, folder or hub id that was loaded."""
    max_model_len: int
    """Longest prompt plus completion, in tokens."""


class ModelList(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def event(chunk: BaseModel) -> str:
    """A chunk as a server-sent event, with the fields that were set, null or not."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


END = "data: [DONE]\n\n"
"""The last event of every stream."""
