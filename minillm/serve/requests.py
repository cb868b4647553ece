"""The bodies of `/v1/completions` and `/v1/chat/completions`: OpenAI's fields, and those that vLLM adds to them.

As in vLLM, a field that nobody knows is ignored (and logged at level DEBUG), because clients send fields of newer APIs.
A field that OpenAI or vLLM has and minillm lacks is refused if its value asks for something of the answer. Those in
`IGNORED` ask for nothing of it.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from minillm.chat_template import ChatTemplate
from minillm.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from minillm.sampling import RequestOutputKind, SamplingParams
from minillm.serve.http_errors import ApiError

logger = logging.getLogger(__name__)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Field → the values, besides null, that ask for nothing."""
IGNORED = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("return_token_offsets", "safety_identifier", "service_tier", "store"),
    }
)
"""Fields about OpenAI's own service: its books, its caches, its price. And one for endpoints of vLLM that do not
generate."""
MAX_STOPS = 4
"""The most stop strings, as in OpenAI's API and by default in vLLM: each costs a search at every token."""
MAX_PROMPTS = 1024
"""The most prompts of one request: each has a stream of its own until all have ended."""

# A list is read up to its first wrong item: an error for each of a million items would fill the memory.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TOKEN_IDS = TypeAdapter(TokenIds)
BIASES = TypeAdapter(Annotated[list[float], Field(fail_fast=True)])


def up_to_first_wrong(value: object) -> object:
    """`value`; of a mapping with an entry that is no token id with a bias, that entry alone, for the error."""
    if isinstance(value, dict):
        try:
            TOKEN_IDS.validate_python(list(value))
            BIASES.validate_python(list(value.values()))
        except ValidationError as problem:
            [index] = problem.errors()[0]["loc"]
            return dict([list(value.items())[int(index)]])
    return value


LogitBias = Annotated[dict[int, float], BeforeValidator(up_to_first_wrong)]  # a mapping has no `fail_fast`


class StreamOptions(BaseModel):
    """When a stream reports token counts."""

    include_usage: bool | None = False
    """In a last chunk without choices."""
    continuous_usage_stats: bool | None = False
    """With `include_usage`: in every chunk, those of its choice (vLLM's extension)."""


class GenerationRequest(BaseModel):
    """The fields that both kinds of requests share. None: the value in the checkpoint's `generation_config.json`, or
    else the default of `SamplingParams`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Ignored, as in vLLM."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: LogitBias | None = None
    """Each is taken as at least -100 and at most 100, as in vLLM."""
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    return_token_ids: bool | None = None

    def check_fields(self, scheduling_policy: str) -> None:
        """Raise `ApiError` for a field that minillm lacks, too many stop strings, options of a stream without a stream,
        and a priority that the engine's `scheduling_policy` would ignore."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value is not None and value not in UNSUPPORTED[name]:
                    raise ApiError(f"{name} is not supported; leave it out", param=name)
            elif name not in IGNORED:
                logger.debug("The request has a field %r, which is ignored.", name)
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ApiError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed: leave some out, or use "
                "stop_token_ids",
                param="stop",
            )
        if self.stream_options and self.stream_options.model_fields_set and not self.stream:
            raise ApiError("stream_options need stream=true", param="stream_options")
        if self.priority and scheduling_policy != "priority":
            raise ApiError(
                f"priority={self.priority} has no effect under the scheduling policy {scheduling_policy!r}; leave it "
                "out, or start the server with --scheduling-policy priority",
                param="priority",
            )

    def sampling_params(self, defaults: SamplingParams, max_tokens: int | None, **own: Any) -> SamplingParams:
        """The parameters of the request; `own` are those of its kind, `defaults` give what it leaves out. Raises
        `ConfigError` for a bad value."""
        given = {
            name: getattr(defaults if getattr(self, name) is None else self, name)
            for name in (
                *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
                *("repetition_penalty", "skip_special_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
            )
        }
        return SamplingParams(
            **given,
            **own,
            seed=self.seed,
            # in this order nan stays, and is refused
            logit_bias={token: max(min(bias, 100.0), -100.0) for token, bias in (self.logit_bias or {}).items()}
            or None,
            stop=self.stop or None,  # clients send [] for none
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=RequestOutputKind.CUMULATIVE if self.stream else RequestOutputKind.FINAL_ONLY,
        )

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk carries the token counts. As in vLLM, `continuous_usage_stats` alone does nothing."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    """A text or token ids, or several of either; each gets `n` choices."""
    suffix: str | None = None
    """The text after the gap; the model fills the gap between `prompt` and `suffix`."""
    max_tokens: int | None = 16
    """0 with `echo` returns the prompt alone. None: 16."""
    logprobs: int | None = Field(default=None, ge=-1)
    """How many of the most likely tokens to report at each position; -1: all, if the server sets no limit."""
    echo: bool | None = False
    """Start each choice with the prompt."""
    add_special_tokens: bool = True
    """Whether a prompt given as text gets the tokenizer's special tokens, such as the beginning of text."""
    best_of: int | None = None
    """Refused unless it equals `n`: nothing ranks candidates here."""


class ChatMessage(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Parts | None = None


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    """The older name of `max_completion_tokens`. Neither: what the checkpoint's `generation_config.json`
    names, or as many as fit into the context and the block pool."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=-1)
    add_generation_prompt: bool = True
    """Without it, too, the role of the answer is "assistant"; in vLLM it is that of the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking` for Qwen3 and SmolLM3."""
    add_special_tokens: bool = False
    """Whether the text of the chat template, which has special tokens of its own, gets those of the tokenizer, too."""
    echo: bool | None = False
    """Refused."""

    def prompt_text(self, template: ChatTemplate) -> str:
        """The prompt for the messages.

        Raises `UnsupportedError` if there is no template, `ApiError` if the checkpoint's is broken or refuses them.
        """
        try:
            return template.render(
                [message.model_dump() for message in self.messages],
                add_generation_prompt=self.add_generation_prompt,
                variables=self.chat_template_kwargs,
            )
        except UnsupportedError:
            raise
        except CheckpointError as problem:
            raise ApiError(str(problem), HTTPStatus.INTERNAL_SERVER_ERROR) from None
        except ConfigError as problem:
            raise ApiError(str(problem), param="chat_template_kwargs") from None
        except PromptError as problem:
            raise ApiError(str(problem), param="messages") from None
