"""The options of speculation, checked once, before anything is loaded. Names and defaults follow vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from minillm.config import at_least, in_range, reject_unknown
from minillm.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made: vLLM's `speculative_config`. An option that is None has its method's default."""

    method: str | type = "draft_model"
    """One of `METHODS`, or a `Drafter` class."""
    model: str | None = None
    quantization: str | None = None
    """How the draft's weights are kept (`int8`, `w8a8`, …): a draft need not be exact."""
    num_speculative_tokens: int | None = None
    """Most tokens that are guessed at a time; None: 4, and for `suffix` as many as its depth."""
    draft_sample_method: str = "probabilistic"
    """`probabilistic` samples drafts from the draft's own distribution, `greedy` takes its likeliest token."""
    rejection_sample_method: str = "standard"
    disable_by_batch_size: int | None = None
    """Nobody drafts in a step in which more requests than this run or wait: where a batch keeps the processor busy,
    checking guesses that fail costs more than it saves. None: drafts always."""
    prompt_lookup_min: int | None = None
    """`ngram`: so many tokens at least have to match; None: as many as `prompt_lookup_max`."""
    prompt_lookup_max: int | None = None
    """`ngram`: so many at most are looked for; None: as many as `prompt_lookup_min`, and 5 if that is None, too."""
    suffix_decoding_max_tree_depth: int | None = None
    """`suffix`: longer matches count as ones of so many tokens; None: 24."""
    suffix_decoding_max_cached_requests: int | None = None
    """`suffix`: outputs of so many earlier requests with the same salt are searched, too; None: 10,000; 0: none."""
    suffix_decoding_max_spec_factor: float | None = None
    """`suffix`: a match of n tokens allows for so many times n guesses; None: 1."""
    suffix_decoding_min_token_prob: float | None = None
    """`suffix`: guesses go on as long as they are likelier than this, judged by how often they came; None: 0.1."""

    def __post_init__(self) -> None:
        for name in (
            "num_speculative_tokens", "disable_by_batch_size", "prompt_lookup_min", "prompt_lookup_max",
            "suffix_decoding_max_tree_depth",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.suffix_decoding_max_cached_requests is not None:
            at_least("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        in_range("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, None)
        in_range("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1)
        self._check_method()
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ConfigError(f"draft_sample_method={self.draft_sample_method!r} must be 'greedy' or 'probabilistic'")
        if self.rejection_sample_method != "standard":
            raise UnsupportedError(
                f"rejection_sample_method={self.rejection_sample_method!r} is not available; use 'standard'"
            )

    def _check_method(self) -> None:
        """Raise if the method is none of ours, or an option is another's."""
        if isinstance(self.method, str) and self.method not in METHODS:
            raise UnsupportedError(
                f"speculative method {self.method!r} is not available; use {_any_of(METHODS)}, or pass a Drafter class"
            )
        for owner, names in METHODS.items():
            for name in names:
                if getattr(self, name) is not None and self.method != owner:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} is for speculative method {owner!r}, and the method is "
                        f"{self.method_name!r}; leave one of them out"
                    )
        if self.method == "draft_model" and not self.model:
            raise ConfigError("speculative method 'draft_model' needs 'model', for example 'minicoder-draft'")
        shortest, longest = self.lookup
        if shortest > longest:
            raise ConfigError(f"prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}")

    @property
    def method_name(self) -> str:
        """The method in a word, a class by its name."""
        return self.method if isinstance(self.method, str) else self.method.__name__

    @property
    def max_drafts(self) -> int:
        """Most tokens that are guessed at a time."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return self.suffix_decoding_max_tree_depth or 24 if self.method == "suffix" else 4

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that method `ngram` matches."""
        given = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or given, self.prompt_lookup_max or given

    @property
    def suffix_options(self) -> dict[str, Any]:
        """What was said about method `suffix`, by the names that its drafter has for it."""
        said = {name.removeprefix("suffix_decoding_"): getattr(self, name) for name in METHODS["suffix"]}
        return {name: value for name, value in said.items() if value is not None}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Read vLLM's dict; a key that minillm does not know is an error, never ignored."""
        reject_unknown("speculative_config", options, {f.name for f in fields(cls)})
        return cls(**options)


METHODS: dict[str, tuple[str, ...]] = {
    "draft_model": ("model", "quantization"),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}
"""Ways of drafting, and the options that are theirs alone."""


def _any_of(names: Iterable[str]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"
