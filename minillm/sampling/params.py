"""The sampling parameters of one request, validated on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum
from functools import cached_property, wraps
from numbers import Integral, Real
from typing import Any

import numpy as np

from minillm.errors import ConfigError, UnknownOptionError, UnsupportedError

MAX_N = 16384
MAX_BIAS = 1e30
"""Far from the largest float32, 3e38, also after a repetition penalty."""
GREEDY_BELOW = 1e-5
"""Temperatures below this mean 0. vLLM 0.32 instead raises temperatures between 0 and 0.01 to 0.01."""


class RequestOutputKind(Enum):
    """Which outputs `LLMEngine.step` returns for a request, under vLLM's names. `DELTA` is not supported."""

    CUMULATIVE = 0
    """After each step that changed it, the whole output so far."""
    DELTA = 1
    FINAL_ONLY = 2
    """Only the finished output."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled: vLLM's fields and defaults, and its limits except for `repetition_penalty` and
    `logit_bias`.

    The constructor raises `ConfigError` for a value out of range and `UnknownOptionError` for an unknown field. Unlike
    vLLM's, parameters cannot be changed, because a running request holds them: to assign raises `ConfigError`.
    """

    n: int = 1
    """Number of completions per prompt."""
    temperature: float = 1.0
    """0: greedy, always the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities add up to at least this."""
    top_k: int = 0
    """Keep this many of the most likely tokens. 0 or -1: all tokens."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the most likely token's."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or the output: positive logits are divided by this, negative ones multiplied. From 0.001
    to 1000, so that no logit becomes infinite; vLLM takes any number above 0."""
    seed: int | None = None
    """None or -1: the engine chooses one."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as fit into the context and the block pool."""
    min_tokens: int = 0
    """End-of-text and stop tokens cannot be chosen before the output has this many tokens."""
    logprobs: int | None = None
    """How many of the most likely tokens to report at each position, in addition to the chosen one; -1: all tokens."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens. From -`MAX_BIAS` to `MAX_BIAS`, so that no logit becomes infinite."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens can be chosen. None: all."""
    bad_words: Sequence[str] | None = None
    """Texts that the output must not contain, as the tokenizer writes them (`minillm.sampling.bad_words`)."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """For `LLMEngine` and `AsyncLLM`; `LLM.generate` always returns finished outputs."""

    def __post_init__(self) -> None:
        check_params(self)
        settled: dict[str, Any] = {"seed": None if self.seed == -1 else self.seed}
        if not isinstance(self.stop, str | None):
            settled["stop"] = tuple(self.stop)  # the caller may change the list
        if self.stop_token_ids is not None:
            settled["stop_token_ids"] = tuple(map(int, self.stop_token_ids))
        if self.allowed_token_ids is not None:
            settled["allowed_token_ids"] = tuple(map(int, self.allowed_token_ids))
        if self.bad_words is not None:
            settled["bad_words"] = tuple(self.bad_words)
        if self.logit_bias is not None:
            settled["logit_bias"] = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        for name, (kind, _, _) in _LIMITS.items():
            value = settled.get(name, getattr(self, name))
            if value is not None and type(value) not in (int, float):  # NumPy's integers overflow in sums
                settled[name] = int(value) if kind is Integral else float(value)
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def clone(self) -> SamplingParams:
        """The object itself, which nobody can change; in vLLM a copy."""
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set. The engine adds the model's end-of-text tokens, unless `ignore_eos` is set."""
        return frozenset(self.stop_token_ids or ())

    @cached_property
    def sorted_allowed_token_ids(self) -> np.ndarray:
        """`allowed_token_ids`, each once, `[num_allowed]` int64; empty if all tokens are allowed."""
        return np.unique(np.array(self.allowed_token_ids or (), np.int64))

    @property
    def is_greedy(self) -> bool:
        """Whether sampling always takes the most likely token; top-k, top-p and min-p then have no effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set, so that the probabilities depend on the tokens used so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether anything but `min_tokens` changes the logits, so that greedy may not take the model's most likely
        token: penalties, biases, forbidden tokens."""
        is_limited = self.allowed_token_ids is not None
        return self.has_penalties or is_limited or bool(self.logit_bias) or bool(self.bad_words)

    def num_settled(self, text: str) -> int:
        """How many characters of an unfinished output's `text` no later token can take back.

        A stop string is cut from the text, so the last characters, which may be the start of one, are not settled.
        """
        held_back = 0 if self.include_stop_str_in_output else max(map(len, self.stop_strings), default=1) - 1
        return max(0, len(text) - held_back)


def _name_unknown_options(cls: type[SamplingParams]) -> None:
    """Make the constructor raise `UnknownOptionError` for an unknown field, and `ConfigError` for a value without a
    name, in place of `TypeError`."""
    construct = cls.__init__
    known = [field.name for field in fields(cls)]

    @wraps(construct)
    def init(self: SamplingParams, *values: Any, **options: Any) -> None:
        if values:
            raise ConfigError(f"SamplingParams({values[0]!r}): give options by name: SamplingParams(temperature=…)")
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                fix = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
                raise UnknownOptionError(f"SamplingParams has no option {name!r}: {fix}")
        construct(self, **options)

    cls.__init__ = init  # type: ignore[method-assign]


def _refuse_assignment(cls: type[SamplingParams]) -> None:
    """Raise `ConfigError` in place of the `FrozenInstanceError` of a frozen dataclass, which names no fix. A subclass
    may have attributes of its own, as in any frozen dataclass."""
    options = {f.name for f in fields(cls)}

    def assign(self: SamplingParams, name: str, value: object) -> None:
        if name in options:
            fix = f"dataclasses.replace(params, {name}={value!r})"
            raise ConfigError(f"SamplingParams cannot be changed; make others: {fix}")
        if type(self) is cls:
            raise ConfigError(f"SamplingParams has no option {name!r}: it has {', '.join(sorted(options))}")
        object.__setattr__(self, name, value)

    cls.__setattr__ = assign  # type: ignore[method-assign]


_name_unknown_options(SamplingParams)
_refuse_assignment(SamplingParams)


_LIMITS: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "n": (Integral, f"an integer from 1 to {MAX_N}", lambda v: 1 <= v <= MAX_N),
    "temperature": (Real, "a number from 0 (take the most likely token) to 2", lambda v: 0 <= v <= 2),
    "top_p": (Real, "a number above 0 and up to 1 (all tokens)", lambda v: 0 < v <= 1),
    "top_k": (Integral, "a positive integer, or 0 or -1 for all tokens", lambda v: v >= -1),
    "min_p": (Real, "a number from 0 (all tokens) to 1", lambda v: 0 <= v <= 1),
    "presence_penalty": (Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    "frequency_penalty": (Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    "repetition_penalty": (Real, "a number from 0.001 to 1000; 1 changes nothing", lambda v: 0.001 <= v <= 1000),
    "seed": (Integral, "an integer, or None", lambda v: True),
    "max_tokens": (Integral, "an integer from 1, or None for as many as fit", lambda v: v >= 1),
    "min_tokens": (Integral, "an integer from 0", lambda v: v >= 0),
    "logprobs": (Integral, "an integer from 0, -1 for the whole vocabulary, or None", lambda v: v >= -1),
    "prompt_logprobs": (Integral, "an integer from 0, -1 for the whole vocabulary, or None", lambda v: v >= -1),
}
"""Numeric field → its type, its limits in words, and the check. NaN fails every comparison."""
_MAY_BE_NONE = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def check_params(params: SamplingParams) -> None:
    """Raise `ConfigError` for an invalid value, with the field, the value and the limit."""
    for name, (kind, limit, within) in _LIMITS.items():
        value = getattr(params, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or not within(value):
            raise ConfigError(f"{name}={value!r}: must be {limit}")
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise ConfigError(f"{name}={getattr(params, name)!r}: must be True or False")
    if not isinstance(params.output_kind, RequestOutputKind):
        raise ConfigError(f"output_kind={params.output_kind!r}: must be a RequestOutputKind")
    if params.output_kind is RequestOutputKind.DELTA:
        raise UnsupportedError("output_kind=DELTA is not supported; take CUMULATIVE and compare with the last output")
    _check_stops(params)
    _check_tokens(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ConfigError(f"min_tokens={params.min_tokens}: must not be above max_tokens={params.max_tokens}")
    if params.n > 1 and params.is_greedy:
        raise ConfigError(
            f"n={params.n}: must be 1 at temperature={params.temperature}, where all completions would be the same; "
            "raise the temperature"
        )


def _check_stops(params: SamplingParams) -> None:
    stop, ids = params.stop, params.stop_token_ids
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not _is_sequence_of(strings, lambda s: isinstance(s, str) and s):
        raise ConfigError(f"stop={stop!r}: must be a string or a sequence of strings, none of them empty, or None")
    if strings and not params.detokenize:
        raise ConfigError(f"stop={stop!r}: needs detokenize=True, because stop strings are found in the text")
    if not _is_sequence_of(() if ids is None else ids, _is_token_id):
        raise ConfigError(f"stop_token_ids={ids!r}: must be a sequence of integers from 0, or None")


def _check_tokens(params: SamplingParams) -> None:
    """Check what forbids tokens or makes them likelier."""
    allowed, bad_words, biases = params.allowed_token_ids, params.bad_words, params.logit_bias
    if allowed is not None and not (_is_sequence_of(allowed, _is_token_id) and len(allowed)):
        raise ConfigError(
            f"allowed_token_ids={allowed!r}: must be a sequence of at least one integer from 0, or None for all tokens"
        )
    words = () if bad_words is None else bad_words
    if isinstance(words, str) or not _is_sequence_of(words, lambda word: isinstance(word, str) and word):
        raise ConfigError(f"bad_words={bad_words!r}: must be a sequence of strings, none of them empty, or None")
    if biases is not None and not (isinstance(biases, Mapping) and all(map(_is_bias, biases.items()))):
        raise ConfigError(
            f"logit_bias={biases!r}: must map token ids, integers from 0, to numbers from {-MAX_BIAS:g} to "
            f"{MAX_BIAS:g}, or be None; allowed_token_ids and bad_words forbid tokens"
        )


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, bias = item
    return _is_token_id(token) and isinstance(bias, Real) and not isinstance(bias, bool) and abs(bias) <= MAX_BIAS


def _is_token_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _is_sequence_of(values: Any, good: Callable[[Any], Any]) -> bool:
    return isinstance(values, Sequence) and all(map(good, values))
