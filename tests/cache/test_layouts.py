"""Which layouts there are, and what is refused: by name, with the value, the limit and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM
from minillm.batch import Batch
from minillm.cache.base import KVCache
from minillm.cache.layouts import LAYOUTS, find_layout
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_two_level import PagedTwoLevelKVCache
from minillm.config import CacheConfig
from minillm.errors import ConfigError, UnknownOptionError, UnsupportedError
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from tests.cache.runs import draft_of
from tests.conftest import TinyPair

WHOLE = {name for (name, _), layout in LAYOUTS.items() if layout.whole_sequences}
"""Layouts that store each request in one place."""


def test_some_layouts_store_whole_requests_and_some_store_blocks() -> None:
    assert {"contiguous", "kivi"} < WHOLE < {name for name, _ in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS, ids=str)
def test_a_layout_is_found_by_name(name: tuple[str, str]) -> None:
    assert find_layout(CacheConfig(*name)) is LAYOUTS[name]


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_layout_of_whole_requests_shares_no_prefixes(name: str) -> None:
    assert not LAYOUTS[name, "auto"].supports_prefix_sharing


@pytest.mark.parametrize(
    "config, error, words",
    [
        ({"layout": "rowwise"}, UnsupportedError, r"cache layout 'rowwise'.*not available; there are: .*contiguous"),
        (
            {"layout": "contiguous", "window": 8},
            UnknownOptionError,
            r"no option 'window'; it has: growth, layout, rows",
        ),
        ({"layout": "window", "sinks": 4}, UnknownOptionError, r"no option 'sinks'; it has: layout, spare, window"),
        ({"layout": "contiguous", "growth": "double"}, ConfigError, r"'double' must be one of preallocated, concat"),
        ({"layout": "contiguous", "rows": 8}, ConfigError, r"rows=8 has no effect with growth='preallocated'"),
        ({"layout": "contiguous", "growth": "every", "rows": 0}, ConfigError, r"rows=0 must be .* at least 1"),
        ({"layout": "contiguous", "growth": "every", "rows": True}, ConfigError, r"rows=True must be"),
        ({"layout": "contiguous", "growth": "every", "rows": 257}, ConfigError, r"rows=257 is over the 256 rows"),
        ({"layout": "window", "window": 0}, ConfigError, r"window=0 must be .* at least 1"),
        ({"layout": "window", "window": 8.5}, ConfigError, r"window=8.5 must be"),
        ({"layout": "window", "spare": -1}, ConfigError, r"spare=-1 must be .* at least 0"),
        ({"layout": "window", "window": 10**20}, ConfigError, r"window=10{20} must be at most 2147483647"),
        ({"layout": "anchors", "spare": 10**20}, ConfigError, r"spare=10{20} must be at most 2147483647"),
        ({"layout": "sinks", "sinks": 0}, ConfigError, r"sinks=0 must be .* at least 1"),
        ({"layout": "sinks", "window": None}, ConfigError, r"window=None must be"),
        ({"layout": "sinks", "spare": "16"}, ConfigError, r"spare='16' must be"),
    ],
)
def test_options_that_make_no_sense(tiny: TinyPair, config: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(str(tiny.target), kv_cache_config=config)


@pytest.mark.parametrize("layout", sorted(WHOLE))
@pytest.mark.parametrize(
    "options, words",
    [
        ({"enable_prefix_caching": True}, r"enable_prefix_caching=True is not supported by .*leave it out"),
        ({"block_size": 16}, r"block_size=16 is not supported by cache layout .*leave it out"),
        ({"kv_cache_dtype": "int8"}, r"cache layout .*with kv_cache_dtype='int8' is not available"),
        (
            {"ops": {"paged_attention": print}},
            r"'paged_attention'.* is not called by cache layout .*it can replace: nothing",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_layout_of_whole_requests_cannot_do(
    tiny: TinyPair, layout: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        LLM(str(tiny.target), kv_cache_config={"layout": layout}, **options)


@pytest.mark.parametrize("layout", sorted(WHOLE))
def test_the_engine_gives_every_running_request_one_place(tiny: TinyPair, layout: str) -> None:
    llm = LLM(str(tiny.target), kv_cache_config={"layout": layout}, max_num_seqs=5, speculative_config=draft_of(tiny))
    assert llm.engine.pool.num_blocks == 5
    assert llm.engine.pool.block_size == llm.max_model_len == 256


def test_a_dtype_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=\['int8'\] must be a name"):
        find_layout(CacheConfig(dtype=["int8"]))


class NoCache:
    """No layout."""


@pytest.mark.parametrize("layout", [dict, NoCache])
def test_a_class_that_is_no_layout_is_refused(layout: type) -> None:
    with pytest.raises(ConfigError, match=f"cache layout {layout.__name__} is no KVCache class; derive it from"):
        find_layout(CacheConfig(layout))  # type: ignore[arg-type]


class NoBytes(KVCache):
    """A layout that forgets a method."""

    def __init__(self, *args: Any) -> None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return q

    @property
    def num_bytes(self) -> int:
        return 0


def test_a_layout_class_that_lacks_a_method_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"^cache layout NoBytes does not define bytes_per_block; see minillm.cache"):
        find_layout(CacheConfig(NoBytes))


def test_a_layout_class_takes_no_dtype_of_the_cache() -> None:
    with pytest.raises(UnsupportedError, match=r"'int8' has no effect on cache layout PagedKVCache, .*; leave it out"):
        find_layout(CacheConfig(PagedKVCache, dtype="int8"))


class Windowed(PagedKVCache):
    """A layout whose `__init__` changes what attention reads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.windows = [64] * len(self.windows)


class WindowedByPrepare(PagedKVCache):
    """A layout whose `prepare` changes what attention reads."""

    def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:
        self.windows = [64] * len(self.windows)


class ReadsTwice:
    """A mixin that changes what attention reads, and knows no draft trees."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return 2 * super().attend(layer, q, k, v, batch)  # type: ignore[misc]


class Mixed(ReadsTwice, PagedKVCache):
    """A layout that has its `attend` from a mixin."""


class Renamed(PagedKVCache):
    """A layout that changes nothing."""


@pytest.mark.parametrize("layout", [Windowed, WindowedByPrepare, Mixed])
def test_a_fast_path_does_not_read_the_rows_of_a_layout_that_may_read_others(layout: type[PagedKVCache]) -> None:
    config, device = ModelConfig(97, 64, 96, 3, 4, 2, 32, 64), torch.device("cpu")
    assert layout(config, 4, 4, torch.float32, device).stored_rows() is None
    assert layout.supports_trees is (layout is not Mixed)


def test_a_layout_that_says_how_its_rows_are_stored_is_read_by_a_fast_path() -> None:
    config, device = ModelConfig(97, 64, 96, 3, 4, 2, 32, 64), torch.device("cpu")
    assert Renamed(config, 4, 4, torch.float32, device).stored_rows().format == "float" and Renamed.supports_trees
    view = PagedTwoLevelKVCache(config, 4, 4, torch.float32, device).draft_view()
    assert view.stored_rows().format == "int4"
