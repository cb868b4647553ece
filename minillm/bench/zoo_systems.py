"""The systems of `bench zoo`: every lossy cache technique with options that bring it to a share of float16's bytes.

A technique maps a budget to options, or to None where it has none that small. Techniques with a few fixed sizes take
the largest that fits. The bytes in the result are counted on a real cache (`zoo_cache.stored_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.errors import ConfigError

BUDGETS = (0.125, 0.25, 0.375, 0.5)
TOLERANCE = 1.05
"""A system counts for a budget if it takes at most this multiple of it."""
ANCHOR_SHARE = 0.1
"""About how many tokens of Python code end a line; what is held is counted on the texts."""


@dataclass(frozen=True)
class Setting:
    """What a technique is asked for."""

    budget: float
    """Share of the bytes of a prompt in float16."""
    prompt_len: int
    head_dim: int
    kv_size: int
    """Numbers of one token's key in a layer, all KV heads together."""
    num_layers: int

    @property
    def tokens(self) -> int:
        """How many whole tokens the budget holds."""
        return int(self.budget * self.prompt_len)


Options = dict[str, Any]


@dataclass(frozen=True)
class Technique:
    """One way to make a cache smaller."""

    name: str
    at: Callable[[Setting], Options | None]
    """Options of `LLM` that fit the budget best; None: there are none that small."""
    own: Options | None = None
    """Options at the size that its paper or this project recommends, measured in addition."""
    reads_less: bool = False
    """Whether its budget is what a decode step reads, because it stores everything."""


@dataclass(frozen=True)
class ZooSystem:
    """A technique at a budget, or at its own size (`budget` None)."""

    technique: str
    budget: float | None
    options: Options | None
    """None: the technique has no options that small."""
    reads_less: bool = False

    @property
    def name(self) -> str:
        """`snapkv 25%`, or the technique's name at its own size."""
        return self.technique if self.budget is None else f"{self.technique} {self.budget:.1%}".replace(".0%", "%")


def _int8(setting: Setting) -> Options | None:
    share = (setting.head_dim + 2) / (2 * setting.head_dim)
    return {"kv_cache_dtype": "int8"} if share <= setting.budget * TOLERANCE else None


def _int4(setting: Setting) -> Options | None:
    for group in (8, 16, 32, 64):
        if setting.head_dim % group == 0 and (0.5 + 4 / group) / 2 <= setting.budget * TOLERANCE:
            return {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": group}}
    return None


def _kivi(setting: Setting) -> Options | None:
    group, length = 32, setting.prompt_len
    quantised = (0.5 + 4 / group) / 2
    residual = round((setting.budget - quantised) * length / (1 - quantised))
    if residual < group or residual > length:
        return None
    return {"kv_cache_config": {"layout": "kivi", "group_size": group, "residual": residual, "rollback": 0}}


def _window(setting: Setting) -> Options | None:
    return {"kv_cache_config": {"layout": "window", "window": setting.tokens, "spare": 0}} if setting.tokens else None


def _sinks(setting: Setting) -> Options | None:
    window = setting.tokens - 4
    return {"kv_cache_config": {"layout": "sinks", "sinks": 4, "window": window, "spare": 0}} if window > 0 else None


def _lorc(setting: Setting) -> Options | None:
    numbers = setting.budget * setting.kv_size - 1 / setting.num_layers  # a position is stored with each token: 4 bytes
    share = int(numbers) / setting.kv_size
    return {"kv_cache_config": {"layout": "lorc", "key_share": share, "value_share": share}} if share > 0 else None


def _commvq(setting: Setting) -> Options | None:
    position = 4 / (2 * setting.num_layers * setting.kv_size)  # bytes per number
    bits = int(8 * (2 * setting.budget * TOLERANCE - position))
    return {"kv_cache_config": {"layout": "commvq", "bits": min(bits, 8)}} if bits > 0 else None


def _think(setting: Setting) -> Options | None:
    window, length = _prompt_window(setting), setting.prompt_len
    share = 2 * (setting.budget * length - window) / (length - window) - 1
    share = max(share, 1 / setting.head_dim)
    fits = (window + (length - window) * (1 + share) / 2) / length <= setting.budget * TOLERANCE
    return {"kv_cache_config": {"layout": "think", "key_share": share, "window": window}} if fits else None


def _snapkv(setting: Setting) -> Options | None:
    window = _prompt_window(setting)
    if setting.tokens <= window:
        return None
    return {"kv_cache_config": {"layout": "snapkv", "budget": setting.tokens, "window": window}}


def _anchors(setting: Setting) -> Options | None:
    """A window of what is left of the budget if `ANCHOR_SHARE` of all tokens are anchors."""
    window = int((setting.budget - ANCHOR_SHARE) * setting.prompt_len)
    return {"kv_cache_config": {"layout": "anchors", "window": window, "spare": 0}} if window > 0 else None


def _squeezed(setting: Setting) -> Options | None:
    """The threshold is calibrated later, see `zoo_cache.calibrated`."""
    window = _prompt_window(setting)
    return {"kv_cache_config": {"layout": "squeezed", "cluster_share": 0.05, "window": window}}


def _prompt_window(setting: Setting) -> int:
    """Last tokens of a prompt that stay whole: 32, fewer if they would take more than a quarter of the budget."""
    return max(1, min(32, setting.tokens // 4))


TECHNIQUES = (
    Technique("int8", _int8),
    Technique("int4", _int4),
    Technique("two levels", lambda _: None, {"kv_cache_config": {"layout": "paged_two_level"}}),
    Technique("kivi", _kivi),
    Technique("lorc", _lorc),
    Technique("commvq", _commvq),
    Technique("window", _window),
    Technique("sinks", _sinks),
    Technique("think", _think, {"kv_cache_config": {"layout": "think", "key_share": 0.6}}),
    Technique("snapkv", _snapkv),
    Technique("anchors", _anchors),
    Technique("squeezed", _squeezed, reads_less=True),
)


def list_systems(
    setting_of: Callable[[float], Setting], budgets: Sequence[float], names: Sequence[str] | None = None
) -> list[ZooSystem]:
    """Every technique, or those of `names`, at each budget and at its own size.

    Raises `ConfigError` for an unknown name.
    """
    known = [technique.name for technique in TECHNIQUES]
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigError(f"unknown techniques {', '.join(unknown)}; there are: {', '.join(known)}")
    found = []
    for technique in TECHNIQUES:
        if names is None or technique.name in names:
            at = [(budget, technique.at(setting_of(budget))) for budget in sorted(budgets)]
            if technique.own is not None:
                at.append((None, technique.own))
            found += [ZooSystem(technique.name, budget, options, technique.reads_less) for budget, options in at]
    return found
