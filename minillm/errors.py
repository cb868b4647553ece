"""The errors that users of the package catch. Each is a `ValueError` that names the value, the limit and the fix."""

from __future__ import annotations


class MinillmError(ValueError):
    """Base of all errors of this module."""


def first_line(problem: BaseException) -> str:
    """The first line of an error's text, at most 200 characters; of an error without text, the name of its class."""
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]


class ConfigError(MinillmError):
    """An option of `LLM(...)`, `SamplingParams(...)` or `speculative_config` has an invalid value."""


class UnknownOptionError(ConfigError):
    """An option that minillm does not have (vLLM may)."""


class UnsupportedError(ConfigError):
    """An option, or a combination of options, that this version or this machine does not support."""


class PromptError(MinillmError):
    """A prompt that cannot be run: empty, too long for the context, or with ids outside the vocabulary."""


class RequestTooLargeError(MinillmError):
    """A request that would not fit into the whole block pool even if it ran alone."""


class CheckpointError(MinillmError):
    """A model folder that cannot be read: missing, truncated, of an unknown architecture, or in an unsafe format."""


class TokenizerMismatchError(CheckpointError):
    """The draft model and the target have different vocabularies."""


BROKEN_DRAFTS = "the draft model gave NaN or infinite logits; check its checkpoint, or run it in float32"
"""The message of a `NonFiniteLogitsError` that ends drafting."""


class NonFiniteLogitsError(MinillmError):
    """The model's logits contain NaN or infinity, so no token can be sampled."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        """The sequence whose logits they are, where that is known. Other requests can go on without it."""


class EngineGenerateError(MinillmError):
    """A step failed, and with it the request that it failed for; if that is not known, all that were in the engine.
    The engine goes on."""


class EngineDeadError(MinillmError):
    """The engine loop of an `AsyncLLM` has ended, or a process of a tensor-parallel engine."""


class QueueOverflowError(MinillmError):
    """A request that would exceed the limit on unfinished requests; it may be sent again later."""


class DraftError(MinillmError):
    """Invalid drafts: wrong shapes, unknown tokens, or a token that has probability 0 in its own distribution."""


class TraceError(MinillmError):
    """A saved trace that cannot be replayed."""


class TrainingError(MinillmError):
    """A training stage whose input is missing, or whose saved state belongs to other inputs."""


class LessonError(MinillmError):
    """A malformed lesson or exercise, or a lesson cell that failed while the notebooks were built."""


class UnknownExerciseError(LessonError):
    """No exercise has this name."""


class ExerciseFailed(LessonError):
    """A learner's solution failed a check. Raised only with `MINILLM_STRICT=1`."""
