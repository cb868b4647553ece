"""The options of an engine, checked before anything is loaded. Names follow vLLM, and so do defaults that do not
depend on the size of the machine."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from minillm.errors import ConfigError, UnknownOptionError

P = ParamSpec("P")
R = TypeVar("R")

POLICIES = ("fcfs", "priority")
DISTRIBUTED_BACKENDS = (None, "mp", "external_launcher")
DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"float": "float32", "half": "float16"} | {f"torch.{name}": name for name in DTYPES[1:]}
"""vLLM's other names for a dtype, and PyTorch's own dtypes as `str` writes them."""
DEFAULT_IF_NONE = {"max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"}
"""Options that are None by default in vLLM, which then chooses them by device and model."""


@dataclass(frozen=True)
class EngineArgs:
    """All options of an engine, for `LLM(model, ...)` and `LLMEngine.from_engine_args`. Others raise
    `UnknownOptionError`."""

    model: str
    """A bundled name (`minicoder`), a local Hugging Face folder, or a hub id."""
    dtype: str = "auto"
    """`auto`: float32 on a CPU; on a GPU the checkpoint's dtype (float16 if the GPU has no bfloat16). Others:
    `DTYPES`, `DTYPE_ALIASES` and PyTorch's own."""
    device: str = "auto"
    """`auto`: a GPU if PyTorch can use one, else the CPU."""
    seed: int = 0
    quantization: str | None = None
    """How weights are stored: `int8`, `w8a8`, `int4`, `awq`, `squeezellm`; None: as in the checkpoint."""
    kv_cache_dtype: str = "auto"
    """How keys and values are stored: `int8`, `int4`; `auto`: in `dtype`."""
    kv_cache_config: Mapping[str, Any] | None = None
    """A cache layout and its options, such as `{"layout": "sinks", "window": 252}`: see `minillm.cache.layouts`."""
    block_size: int | None = None
    """Tokens per cache block; None: 16, or the size that the cache layout needs."""
    num_kv_blocks: int | None = None
    """Size of the block pool; None: from `kv_cache_memory_bytes`, or from the free memory of the device."""
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    """Longest prompt plus completion in tokens; None: the model's context."""
    max_num_seqs: int = 64
    """Most requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool | None = None
    """Keep full blocks of finished requests and share them by content; None: if the cache layout can."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens that one request may prefill in a step, which leaves budget for others; 0: no limit."""
    scheduling_policy: str = "fcfs"
    """`fcfs`: first come, first served; `priority`: lower `priority` first, then order of arrival."""

    tensor_parallel_size: int = 1
    """Processes that the model is split over, each with a part of every layer: see `minillm.parallel`."""
    distributed_executor_backend: str | None = None
    """`mp`: this process starts the others; `external_launcher`: torchrun has. None: the second under torchrun."""
    enforce_eager: bool = False
    """Run each step in plain PyTorch. Otherwise an executor runs it: compiled on a CPU, kernels and graphs on a GPU."""
    speculative_config: Mapping[str, Any] | None = None
    """How tokens are drafted, with vLLM's option names: see `minillm.speculative.config`."""
    scheduler_cls: type | None = None
    block_pool_cls: type | None = None
    """Classes that replace `Scheduler` and `BlockPool`."""
    ops: Mapping[str, Callable[..., Any]] | None = None
    """Functions that replace the cache layout's operations: `{"paged_attention": function}`."""

    def __post_init__(self) -> None:
        for f in fields(self):
            given = plain(getattr(self, f.name))
            if given is None and f.name in DEFAULT_IF_NONE:
                given = f.default
            object.__setattr__(self, f.name, DTYPE_ALIASES.get(str(given), given) if f.name == "dtype" else given)
        for name in ("enforce_eager", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.enable_prefix_caching, bool | None):
            raise ConfigError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be True, False or None")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        for name in ("kv_cache_config", "speculative_config", "ops"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a dict or None")
        for name in ("scheduler_cls", "block_pool_cls"):
            if not isinstance(getattr(self, name), type | None):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a class or None")
        for name, function in (self.ops or {}).items():
            if not callable(function):
                raise ConfigError(f"ops[{name!r}]={function!r} must be a function")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            at_least(name, getattr(self, name), 1)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts into chunks, but "
                "chunked prefill is disabled; enable it or leave the threshold out"
            )
        if self.scheduling_policy not in POLICIES:
            raise ConfigError(f"scheduling_policy={self.scheduling_policy!r} must be one of {', '.join(POLICIES)}")
        if self.distributed_executor_backend not in DISTRIBUTED_BACKENDS:
            raise ConfigError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} must be 'mp', 'external_launcher' "
                "or None"
            )
        for name in ("block_size", "num_kv_blocks", "kv_cache_memory_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_memory_bytes={self.kv_cache_memory_bytes} "
                "both size the pool; give one of them"
            )
        share("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}, so "
                "not every running request could get one token a step; raise the first or lower the second"
            )

    def check_against_context(self, context: int) -> int:
        """The engine's `max_model_len` for a model with this `context`. Raises `ConfigError` if options do not fit."""
        length = self.max_model_len or context
        if length > context:
            raise ConfigError(f"max_model_len={length} is over the model's context of {context} tokens; lower it")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < length:
            raise ConfigError(
                f"without chunked prefill a prompt of up to {length} tokens must fit into one step, but "
                f"max_num_batched_tokens={self.max_num_batched_tokens}; raise it or enable chunked prefill"
            )
        return length

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineArgs:
        """Raises `UnknownOptionError` for an unknown option, `ConfigError` for an invalid value."""
        reject_unknown("LLM", options, {f.name for f in fields(cls)} - {"model"})
        return cls(plain(model), **options)


@dataclass(frozen=True)
class CacheConfig:
    """How keys and values are stored: `kv_cache_dtype` (as in vLLM) and `kv_cache_config` (minillm's own)."""

    layout: str | type = "paged"
    """A name of `minillm.cache.layouts.LAYOUTS`, or a `KVCache` class."""
    dtype: str = "auto"
    """`auto`: the model's; `int8` or `int4`: quantised."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the layout's class."""

    @property
    def name(self) -> str:
        """The layout in a word or two, such as `paged` or `paged int8`."""
        layout = self.layout.__name__ if isinstance(self.layout, type) else self.layout
        return layout if self.dtype == "auto" else f"{layout} {self.dtype}"

    @classmethod
    def from_options(cls, kv_cache_dtype: str, kv_cache_config: Mapping[str, Any] | None) -> CacheConfig:
        """Read the two options of `LLM`. All keys of `kv_cache_config` except `layout` are options of the layout."""
        options = dict(kv_cache_config or {})
        return cls(options.pop("layout", "paged"), kv_cache_dtype, options)


def plain(value: Any) -> Any:
    """An option as Python's own type: a path as text, an integer of NumPy as `int`; also inside of a mapping."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return value


def reject_unknown(where: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Raise `UnknownOptionError` naming the first option in `options` that is not `known`."""
    for name in options:
        if name not in known:
            raise UnknownOptionError(f"{where} has no option {name!r}; it has: {', '.join(sorted(known))}")


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: an unknown keyword argument raises `UnknownOptionError` in place of `TypeError`."""
    known = set(inspect.signature(function).parameters) - {"self", "cls"}
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*values: P.args, **options: P.kwargs) -> R:
        reject_unknown(name, options, known)
        return function(*values, **options)

    return checked


EngineArgs.__init__ = refuses_unknown(EngineArgs.__init__)  # type: ignore[method-assign]


def at_least(name: str, value: Any, limit: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `limit`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < limit:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {limit}")


def share(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number above 0 and at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} must be a number above 0 and at most 1")


def in_range(name: str, value: Any, most: float | None) -> None:
    """Raise `ConfigError` unless `value` is a number >= 0, and <= `most` if that is given."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (most is not None and value > most):
        raise ConfigError(
            f"{name}={value!r} must be a finite number of at least 0" + (f" and at most {most}" if most else "")
        )
