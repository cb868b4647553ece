"""The options of speculative decoding, validated before any model is loaded.

Names follow vLLM, and so do defaults unless a docstring says otherwise. `adaptive`, `disable_by_batch_size`,
`fallback`, `fallback_below`, `lossy`, `posterior_…` and `rejection_sample_method="typical"` are not vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from minillm.config import at_least, reject_unknown
from minillm.errors import ConfigError, UnsupportedError
from minillm.speculative.block_verification import BlockRule
from minillm.speculative.drafter import Drafter, NoOptions
from minillm.speculative.methods import METHODS
from minillm.speculative.rejection_sampler import EXACT, AcceptRule, Rule
from minillm.speculative.synthetic import SyntheticRule
from minillm.speculative.typical import typical_rule

RULES: dict[str, Rule] = {"standard": EXACT, "block": BlockRule()}
ADAPTIVE = True
"""Whether the number of drafts adapts where `adaptive` is not given."""

MOST_DRAFTS = 1024
"""Per round and request; more than any method could get accepted."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are proposed and judged: vLLM's `speculative_config`."""

    method: str | type[Drafter] = "draft_model"
    """One of `METHODS`, or a `Drafter` class."""
    options: Any = field(default_factory=NoOptions)
    """An instance of the method's `Options`. In the user's dict, its fields are next to those of this class."""
    num_speculative_tokens: int | None = None
    """Most drafts per round; None: the method's default. (In vLLM it has a default only if the draft's config has.)"""
    rejection_sample_method: str | AcceptRule = "standard"
    """`standard`: token-by-token rejection sampling; `block`: block verification of chains, as exact and accepts more;
    `synthetic`: accepts at given rates, to measure the engine; `typical`: accepts what the target finds likely, which
    changes the distribution of sampled text; or an `AcceptRule`, which may be lossy."""
    lossy: bool = False
    """Must be True for `typical`."""
    posterior_threshold: float | None = None
    """For `typical`: ε; None: 0.09."""
    posterior_alpha: float | None = None
    """For `typical`: δ; None: 0.3."""
    synthetic_acceptance_rates: Sequence[float] | None = None
    """For `synthetic`, per position: the probability that all drafts up to this one are accepted."""
    synthetic_acceptance_length: float | None = None
    """For `synthetic`, instead of the rates: tokens per round on average, the target's own token included."""
    adaptive: bool = field(default_factory=lambda: ADAPTIVE)
    """Whether each request gets as many drafts as pay, at most `num_speculative_tokens`; False: always so many, as
    `synthetic` does unless told otherwise: fewer drafts than rates would give shorter rounds than asked for. A
    request that samples with its own `seed` always gets all of them, so that its text can be repeated as long as the
    block pool and `max_num_batched_tokens` have room for them and `disable_by_batch_size` does not forbid them; other
    sampled text may differ from run to run, because the costs are measured. Greedy text is always the same in the
    compiled step of the CPU, except where a branching tree is judged with rounded weights. There, on a GPU, and with
    `enforce_eager` the number of rows may change the last bits of logits: of two tokens with nearly equal logits it may
    be the other.
    How many drafts pay is learnt from all requests, whatever their `cache_salt`: the numbers of drafts and the times of
    one tenant depend a little on how far the drafts of others were accepted. With False they do not."""
    disable_by_batch_size: int | None = None
    """No drafts in a step with more running and waiting requests than this. A large batch already saturates the
    processor, so verifying rejected drafts costs more than accepted ones save. None: no limit by batch size."""
    fallback: SpeculativeConfig | None = None
    """The method that drafts where this one proposes too little; minillm's own. In the user's dict, a dict too."""
    fallback_below: int = 1
    """Fewer drafts than this are too few. 1: the fallback drafts only where there are none."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "disable_by_batch_size"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("fallback_below", self.fallback_below, 1)
        if self.fallback is None and self.fallback_below != 1:
            raise ConfigError(f"fallback_below={self.fallback_below} needs 'fallback', the method that then drafts")
        if self.fallback_below > self.max_own_drafts:
            raise ConfigError(
                f"fallback_below={self.fallback_below} is more than {_name(self.method)!r} ever drafts, "
                f"{self.max_own_drafts}; lower it"
            )
        rule = self.rejection_sample_method
        if not isinstance(rule, AcceptRule) and rule not in (*RULES, "synthetic", "typical"):
            raise UnsupportedError(
                f"rejection_sample_method={rule!r} is not available; use 'standard', 'block', 'synthetic' or "
                "'typical', or pass an AcceptRule"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive={self.adaptive!r} must be True or False")
        if self.max_drafts > MOST_DRAFTS:
            raise ConfigError(
                f"speculative method {_name(self.method)!r} would propose up to {self.max_drafts} drafts per round; "
                f"give at most num_speculative_tokens={MOST_DRAFTS}"
            )
        if rule == "block" and self.proposes_trees:
            raise UnsupportedError(
                f"rejection_sample_method='block' judges chains, but method {self.method_name!r} drafts trees; use "
                "'standard'"
            )
        self._check_synthetic()
        self._check_typical()

    @property
    def drafter_cls(self) -> type[Drafter]:
        """The `Drafter` class of the method."""
        return find_method(self.method)

    @property
    def accept_rule(self) -> Rule:
        """The rule that decides which drafts are accepted."""
        rule = self.rejection_sample_method
        if rule == "synthetic":
            rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
            return SyntheticRule(tuple(rates)) if rates else SyntheticRule.of_length(length, self.max_drafts)
        if rule == "typical":
            return typical_rule(self.posterior_threshold, self.posterior_alpha)
        return rule if isinstance(rule, AcceptRule) else RULES[rule]

    def _check_typical(self) -> None:
        """Raise `ConfigError` for `typical` without `lossy`, or its options with another rule."""
        if self.rejection_sample_method == "typical":
            if self.lossy is not True:
                raise ConfigError(
                    "rejection_sample_method='typical' changes the distribution of sampled text; add 'lossy': True, or "
                    "use 'standard' or 'block', which do not"
                )
            _ = self.accept_rule  # checks the numbers
            return
        given = {name: getattr(self, name) for name in ("posterior_threshold", "posterior_alpha")}
        given["lossy"] = self.lossy or None
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name}={value!r} is for rejection_sample_method='typical', not for "
                    f"{self.rejection_sample_method!r}; leave it out, or choose 'typical'"
                )

    def _check_synthetic(self) -> None:
        """Raise `ConfigError` for rates without the method or the method without rates."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            for name, value in (("rates", rates), ("length", length)):
                if value is not None:
                    raise ConfigError(
                        f"synthetic_acceptance_{name}={value!r} is for rejection_sample_method='synthetic', not for "
                        f"{self.rejection_sample_method!r}; leave it out, or choose 'synthetic'"
                    )
            return
        if (rates is None) == (length is None):
            raise ConfigError(
                "rejection_sample_method='synthetic' needs either synthetic_acceptance_rates or "
                f"synthetic_acceptance_length, but they are {rates!r} and {length!r}"
            )
        if self.proposes_trees:
            raise UnsupportedError(
                f"rejection_sample_method='synthetic' accepts drafts by their position in a chain, but method "
                f"{self.method_name!r} drafts trees; use another method"
            )
        if rates is not None and (not isinstance(rates, list | tuple) or len(rates) != self.max_drafts):
            raise ConfigError(
                f"synthetic_acceptance_rates={rates!r} must list one number for each of {self.max_drafts} drafts"
            )
        _ = self.accept_rule  # checks the numbers

    @property
    def method_name(self) -> str:
        """The name of the method, or of its class; with a fallback, of both."""
        return _name(self.method) + (f", then {self.fallback.method_name}" if self.fallback else "")

    @property
    def model(self) -> str | None:
        """The draft model, if the method or its fallback has one."""
        return getattr(self.options, "model", None) or (self.fallback.model if self.fallback else None)

    @property
    def proposes_trees(self) -> bool:
        """Whether the method or its fallback may propose trees."""
        return self.drafter_cls.proposes_trees or bool(self.fallback and self.fallback.proposes_trees)

    @property
    def needs_blocks(self) -> bool:
        """Whether the method or its fallback reads the blocks of the target's cache."""
        return self.drafter_cls.needs_blocks or bool(self.fallback and self.fallback.needs_blocks)

    @property
    def max_own_drafts(self) -> int:
        """Most drafts per round of the method itself."""
        return self.num_speculative_tokens or self.drafter_cls.default_num_drafts(self.options)

    @property
    def max_drafts(self) -> int:
        """Most drafts per round."""
        return max(self.max_own_drafts, self.fallback.max_drafts if self.fallback else 0)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Read vLLM's dict. A key that is unknown or belongs to another method is an error."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config={given!r} must be a dict, such as {{'method': 'ngram'}}")
        method = given.get("method", "draft_model")
        drafter = find_method(method)
        shared = {f.name for f in fields(cls)} - {"options"}
        own = _option_names(drafter)
        for name, value in given.items():
            if name in shared | own:
                continue
            if owners := [other for other, its in METHODS.items() if name in _option_names(its)]:
                raise ConfigError(
                    f"{name}={value!r} is for speculative method {_any_of(owners)}, but the method is "
                    f"{_name(method)!r}; leave one of them out"
                )
        reject_unknown("speculative_config", given, shared.union(own, *map(_option_names, METHODS.values())))
        options = drafter.Options(**{name: value for name, value in given.items() if name in own})
        settings = {name: value for name, value in given.items() if name in shared}
        if settings.get("rejection_sample_method") == "synthetic":
            settings.setdefault("adaptive", False)
        if (fallback := settings.get("fallback")) is not None:
            settings["fallback"] = cls._read_fallback(fallback, settings.get("adaptive", ADAPTIVE))
        return cls(**settings, options=options)

    @classmethod
    def _read_fallback(cls, given: object, adaptive: bool) -> SpeculativeConfig:
        if not isinstance(given, Mapping) or "method" not in given:
            raise ConfigError(f"fallback={given!r} must be a dict with the 'method' that drafts and its options")
        for name in ("rejection_sample_method", "disable_by_batch_size", "adaptive"):
            if name in given:
                raise ConfigError(f"{name}={given[name]!r} holds for all drafts; move it out of 'fallback'")
        return cls.from_dict({**given, "adaptive": adaptive})


def find_method(method: str | type[Drafter]) -> type[Drafter]:
    """The drafter class of a method. Raises `UnsupportedError` for an unknown method, `ConfigError` for a class that
    lacks a method of the interface."""
    found = method if isinstance(method, type) else METHODS.get(method) if isinstance(method, str) else None
    if found is None or not issubclass(found, Drafter):
        raise UnsupportedError(
            f"speculative method {method!r} is not available; use {_any_of(METHODS)}, or pass a Drafter class"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(
            f"drafter {found.__name__} does not define {', '.join(missing)}; see minillm.speculative.drafter"
        )
    return found


def _option_names(drafter: type[Drafter]) -> set[str]:
    return {f.name for f in fields(drafter.Options)}


def _name(method: str | type) -> str:
    return method if isinstance(method, str) else method.__name__


def _any_of(names: Iterable[str]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last
