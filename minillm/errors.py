"""Every way minillm says no. All are `ValueError`s that name the value, the limit and the fix."""

from __future__ import annotations


class MinillmError(ValueError):
    """Base of all errors that minillm raises on purpose."""


class ConfigError(MinillmError):
    """An option of `LLM(...)`, `SamplingParams(...)` or `speculative_config` has a value that makes no sense."""


class UnknownOptionError(ConfigError):
    """An option that minillm does not have (vLLM may)."""


class UnsupportedError(ConfigError):
    """A known option, or a combination of options, that this version or this machine cannot do."""


class PromptError(MinillmError):
    """A prompt that cannot be run: empty, too long for the context, or with ids outside the vocabulary."""


class RequestTooLargeError(MinillmError):
    """A request that would not fit into the whole block pool even if it ran alone."""


class CheckpointError(MinillmError):
    """A model folder that cannot be read: missing, truncated, of an unknown architecture, or in an unsafe format."""


class TokenizerMismatchError(CheckpointError):
    """The draft model does not speak the target's tokens."""


class NonFiniteLogitsError(MinillmError):
    """The model produced NaN or infinity; no token can be chosen from that."""


class DraftError(MinillmError):
    """Drafts that contradict themselves: wrong shapes, unknown tokens, or a token its own distribution rules out."""


class TraceError(MinillmError):
    """A saved trace that cannot be replayed."""


class TrainingError(MinillmError):
    """A training stage that lacks its input, or whose saved state was made from other inputs."""


class LessonError(MinillmError):
    """A lesson or an exercise that is written wrongly, or a lesson cell that failed while the notebooks were built."""


class UnknownExerciseError(LessonError):
    """A name that no exercise has."""


class ExerciseFailed(LessonError):
    """A check that did not pass, raised only when `MINILLM_STRICT=1`."""
