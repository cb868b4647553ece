"""All cache layouts by name, and the choice of one by the engine's options."""

from __future__ import annotations

import inspect

from minillm.cache.anchors import AnchorsKVCache
from minillm.cache.base import KVCache
from minillm.cache.commvq import CommVQKVCache
from minillm.cache.contiguous import ContiguousKVCache
from minillm.cache.kivi import KiviKVCache
from minillm.cache.lorc import LorcKVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.cache.paged_two_level import PagedTwoLevelKVCache
from minillm.cache.sinks import SinksKVCache
from minillm.cache.snapkv import SnapKVCache
from minillm.cache.squeezed import SqueezedKVCache
from minillm.cache.think import ThinkKVCache
from minillm.cache.window import WindowKVCache
from minillm.config import CacheConfig, reject_unknown
from minillm.errors import ConfigError, UnsupportedError

LAYOUTS: dict[tuple[str, str], type[KVCache]] = {
    ("paged", "auto"): PagedKVCache,
    ("paged", "int8"): PagedInt8KVCache,
    ("paged", "int4"): PagedInt4KVCache,
    ("paged_two_level", "auto"): PagedTwoLevelKVCache,
    ("lorc", "auto"): LorcKVCache,
    ("commvq", "auto"): CommVQKVCache,
    ("kivi", "auto"): KiviKVCache,
    ("contiguous", "auto"): ContiguousKVCache,
    ("window", "auto"): WindowKVCache,
    ("sinks", "auto"): SinksKVCache,
    ("think", "auto"): ThinkKVCache,
    ("snapkv", "auto"): SnapKVCache,
    ("squeezed", "auto"): SqueezedKVCache,
    ("anchors", "auto"): AnchorsKVCache,
}
"""`(layout, kv_cache_dtype)` → class. `auto` is the model's dtype, except for KIVI, which is always INT4, the two
levels of four bits, and the codes of CommVQ."""


def find_layout(cache: CacheConfig) -> type[KVCache]:
    """Return the layout class that `cache` selects.

    Raises `ConfigError` for a layout that is no name and no complete class, `UnsupportedError` for an unsupported pair
    of layout and dtype, `UnknownOptionError` for an option that the layout does not have.
    """
    if not isinstance(cache.layout, str | type):
        raise ConfigError(f"cache layout {cache.layout!r} must be a name, or a KVCache class")
    if isinstance(cache.layout, type) and not issubclass(cache.layout, KVCache):
        raise ConfigError(
            f"cache layout {cache.layout.__name__} is no KVCache class; derive it from minillm.cache.base.KVCache"
        )
    if isinstance(cache.layout, type) and (missing := sorted(cache.layout.__abstractmethods__)):
        raise ConfigError(
            f"cache layout {cache.layout.__name__} does not define {', '.join(missing)}; see minillm.cache.base"
        )
    if not isinstance(cache.dtype, str):
        raise ConfigError(f"kv_cache_dtype={cache.dtype!r} must be a name: 'auto', 'int8' or 'int4'")
    if isinstance(cache.layout, type) and cache.dtype != "auto":
        raise UnsupportedError(
            f"kv_cache_dtype={cache.dtype!r} has no effect on cache layout {cache.layout.__name__}, which decides "
            "itself how it stores; leave it out"
        )
    chosen = cache.layout if isinstance(cache.layout, type) else LAYOUTS.get((cache.layout, cache.dtype))
    if chosen is None:
        pairs = ", ".join(f"{layout} with {dtype}" for layout, dtype in sorted(LAYOUTS))
        raise UnsupportedError(
            f"cache layout {cache.layout!r} with kv_cache_dtype={cache.dtype!r} is not available; there are: {pairs}"
        )
    parameters = inspect.signature(chosen).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    reject_unknown(f"kv_cache_config for layout {cache.name!r}", cache.options, known | {"layout"})
    return chosen
