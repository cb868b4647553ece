"""Which options of the engine, its cache and its speculative method do not go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minillm.cache.base import KVCache
from minillm.config import CacheConfig, EngineArgs
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.drafter import Drafter, TargetInfo


def check_layout_options(args: EngineArgs, layout: type[KVCache], cache: CacheConfig) -> None:
    """Raise `UnsupportedError` for options that the cache layout does not support."""
    if layout.whole_sequences and args.block_size is not None:
        raise UnsupportedError(
            f"block_size={args.block_size} is not supported by cache layout {cache.name!r}, which stores each request "
            "in one piece; leave it out"
        )
    if args.enable_prefix_caching and not layout.supports_prefix_sharing:
        raise UnsupportedError(
            f"enable_prefix_caching=True is not supported by cache layout {cache.name!r}, whose rows belong to one "
            "request; leave it out, or use layout 'paged'"
        )
    _check_ops(layout, args.ops or {}, cache)


def _check_ops(made: KVCache | type[KVCache], ops: Mapping[str, Callable[..., Any]], cache: CacheConfig) -> None:
    for name in ops:
        if name not in made.ops:
            raise UnsupportedError(
                f"ops={{{name!r}: …}} is not called by cache layout {cache.name!r}; it can replace: "
                f"{', '.join(made.ops) or 'nothing'}"
            )


def replace_ops(made: KVCache, ops: Mapping[str, Callable[..., Any]], cache: CacheConfig) -> None:
    """Replace ops that the cache calls. Raises `UnsupportedError` for an op that it does not call."""
    _check_ops(made, ops, cache)
    made.ops = {**made.ops, **ops}


def check_rollback(made: KVCache, cache: CacheConfig, speculative: SpeculativeConfig | None) -> None:
    """Raise `UnsupportedError` for more drafts than the cache can roll back."""
    if speculative is None or made.max_rollback is None:
        return
    if made.max_rollback < speculative.max_drafts:
        lower = "lower it, " if made.max_rollback else ""
        raise UnsupportedError(
            f"num_speculative_tokens={speculative.max_drafts} is not supported by cache layout "
            f"{cache.name!r}, which can roll back {made.max_rollback} tokens; {lower}raise the layout's spare (kivi: "
            "rollback), or use layout 'paged'"
        )


def check_speculation(layout: type[KVCache], cache: CacheConfig, speculative: SpeculativeConfig | None) -> None:
    """Raise `UnsupportedError` for a speculative method that the cache layout cannot serve."""
    if speculative is None:
        return
    if speculative.needs_blocks and layout.whole_sequences:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} reads the blocks of the target's cache, and layout "
            f"{cache.name!r} stores each request in one piece; use layout 'paged'"
        )
    if speculative.proposes_trees and not layout.supports_trees:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} drafts trees, which cache layout {cache.name!r} cannot "
            "verify; use layout 'paged'"
        )


def check_drafters(target: TargetInfo, speculative: SpeculativeConfig | None) -> None:
    """Let the options of the method and of its fallback check the target. Raises subclasses of `ValueError`."""
    while speculative is not None:
        if hasattr(speculative.options, "check_target"):
            check_num_drafts(speculative, speculative.options.check_target(target))
        speculative = speculative.fallback


def check_num_drafts(speculative: SpeculativeConfig, most: int | None) -> None:
    """Raise `ConfigError` if a method cannot propose as many drafts per round as it shall. `most`: what it can."""
    wanted = speculative.num_speculative_tokens
    if wanted is not None and most is not None and wanted > most:
        raise ConfigError(
            f"num_speculative_tokens={wanted} is more than this {speculative.drafter_cls.__name__} can propose per "
            f"round, {most}; lower it"
        )


def check_windows(model: ModelConfig, speculative: SpeculativeConfig | None) -> None:
    """Raise `UnsupportedError` for a method that drafts trees for a model with a sliding window."""
    if speculative is not None and speculative.proposes_trees and model.has_windows:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} drafts trees, which are not verified in a model with a "
            f"sliding window (here {model.sliding_window} tokens); use a method that drafts chains, like 'draft_model'"
        )


def check_reading(drafter: Drafter | None, made: KVCache, cache: CacheConfig) -> None:
    """Raise `UnsupportedError` for a drafter that reads the target's keys, if the cache does not store them as rows."""
    if drafter is not None and drafter.reads_target_cache and made.stored_rows() is None:
        raise UnsupportedError(
            f"{type(drafter).__name__} reads the target's keys, and cache layout {cache.name!r} stores them in a way "
            "of its own; use layout 'paged'"
        )
