"""The interface of all cache layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder


@dataclass(frozen=True)
class DequantizedRows:
    """The keys or values of one layer. Indexing by slots dequantises those slots only."""

    pools: Sequence[Tensor]
    """One tensor per part of a row: `[num_slots, num_kv_heads, …]`."""
    decode: Callable[..., Tensor]
    shape: tuple[int, int, int]
    """`(num_slots, num_kv_heads, head_dim)`, the shape of the dequantised keys or values."""

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """The dequantised keys or values in these slots, `[len(slots), num_kv_heads, head_dim]`."""
        if isinstance(slots, slice):
            return self.decode(*(pool[slots] for pool in self.pools))
        return self.decode(*(pool.index_select(0, slots) for pool in self.pools))


@dataclass(frozen=True)
class StoredRows:
    """How a paged layout stores keys and values, so that a fast path (an executor) can read and write them.

    A row is the key (or value) of one token and one KV head. In every tensor, slot s of layer l is at `[l, s]`.
    """

    format: str
    """`float`: unquantised. `int8`: codes and one scale. `int4`: two codes per byte, and a scale and a zero point for
    each group of `group_size` numbers. `two_level`: as `int4`, and two codes of the lower level per byte. An executor
    does not run over a cache whose format it does not know."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    """One tensor per part of a row (codes, scales, zero points): `[num_layers, num_slots, num_kv_heads, …]`."""
    group_size: int = 0
    dequantise: Callable[..., Tensor] | None = None
    """Dequantises rows: one tensor per part → `[…, head_dim]`. None: the rows are not quantised."""

    def layer(self, layer: int, head_dim: int) -> tuple[Tensor | DequantizedRows, Tensor | DequantizedRows]:
        """The keys and the values of a layer as attention reads them, indexed by slot: `[num_slots, num_kv_heads,
        head_dim]` each. Keys are rotated. Nothing is copied."""
        keys, values = ([part[layer] for part in parts] for parts in (self.keys, self.values))
        if self.dequantise is None:
            return keys[0], values[0]
        shape = (*keys[0].shape[:2], head_dim)
        return DequantizedRows(keys, self.dequantise, shape), DequantizedRows(values, self.dequantise, shape)


_READS_AND_WRITES = {"__init__", "prepare", "attend", "row_fields", "encode", "decode", "ops"}
"""What determines how a layout stores rows and what attention reads."""


def _overrides(cls: type, attribute: str, names: Set[str]) -> bool:
    """Whether a class that comes before the one that defines `attribute`, in the order of `cls.__mro__`, defines one of
    `names`."""
    before = takewhile(lambda base: attribute not in vars(base), cls.__mro__)
    return any(names & vars(base).keys() for base in before)


class KVCache(ABC):
    """A layout of keys and values. It also computes attention, so the model does not depend on how they are stored.

    A layout is built as `Layout(config, num_blocks, block_size, dtype, device, **options)`. Its options are its
    keyword-only parameters; they come from the entries of `kv_cache_config` other than `layout`. It raises
    `ConfigError` for an invalid option.
    """

    whole_sequences: ClassVar[bool] = False
    """Whether a block holds one whole request, up to the engine's context. The block table of a request then has one
    entry, and the layout decides how much memory the block really uses."""
    supports_prefix_sharing: ClassVar[bool] = True
    """Whether two requests may read the same block."""
    keeps_every_token: ClassVar[bool] = True
    """Whether a token's keys and values stay until its request ends. A window, for instance, drops the oldest."""
    supports_trees: ClassVar[bool] = False
    """Whether the layout supports draft trees: attention with `Batch.tree`, and `move_tokens`. Not inherited by a
    subclass with another `attend`."""
    ops: Mapping[str, Callable[..., Any]] = {}
    """The operations that the layout calls, by name; `LLM(ops={...})` replaces them."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset what a subclass inherits but may no longer keep, unless it defines it itself: `stored_rows` if it
        changes how rows are stored or read, or has an `__init__` or `prepare` that may, because a fast path would then
        read wrong values, and `supports_trees` if it has another `attend`, which may not know `Batch.tree`. What it has
        from a mixin counts as its own."""
        super().__init_subclass__(**options)
        if _overrides(cls, "supports_trees", {"attend"}):
            cls.supports_trees = False
        if _overrides(cls, "stored_rows", _READS_AND_WRITES):
            cls.stored_rows = KVCache.stored_rows  # type: ignore[method-assign]

    @abstractmethod
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> None: ...

    @classmethod
    @abstractmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """Most bytes that one block needs over all layers: keys, values, scales and zero points."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Store the new keys and values, then compute causal attention of each query over its request's tokens.

        `q`: `[num_tokens, num_heads, head_dim]`; `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`. Returns like `q`.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that this cache uses now, including scales and zero points."""

    @property
    def model_bytes(self) -> int:
        """Bytes of what `prepare` made from the model. They do not grow with the tokens."""
        return 0

    @property
    def max_rollback(self) -> int | None:
        """Most tokens that can be rolled back from the end of a request; None: any number.

        None also promises that an interrupted step can be run again, with other new tokens. With a number, all requests
        are computed again from their first token after an interrupt.
        """
        return None

    def stored_rows(self) -> StoredRows | None:
        """How rows are stored, for fast paths that do not call `attend`; None: all access goes through `attend`."""
        return None

    def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:  # noqa: B027
        """Called once, before the first step, with the model whose keys and values are stored: for a layout that
        compresses by what it finds in the weights, in the keys and values of calibration texts, or in what tokens say.

        Raises `UnsupportedError` for a model that it cannot serve, `ConfigError` if it needs `texts` and there are
        none."""

    def draft_view(self) -> KVCache:
        """The cache that a drafter reads and writes in the memory of this one: this cache, or one that reads less of
        each row. What a drafter stores is overwritten before this cache reads it."""
        return self

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the keys and values in the slots `sources` to the slots `targets`. All are read before any is written.

        This turns the accepted path of a draft tree into a chain. Only layouts with `supports_trees` need it.
        """
        raise NotImplementedError(f"{type(self).__name__} supports no draft trees, so it cannot move tokens")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks: `pairs` are (source, target), copied in order (copy on write).

        Only layouts with `supports_prefix_sharing` need it.
        """
        raise NotImplementedError(f"{type(self).__name__} shares no blocks, so it cannot copy them")

    def free(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Called with blocks that have become empty: no request owns them, and the prefix cache does not keep them. A
        layout that allocates on demand frees their memory."""


class SequenceKVCache(KVCache):
    """The base of layouts that store each request in one piece: a block holds one request, up to the engine's
    context."""

    whole_sequences = True
    supports_prefix_sharing = False

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, **options: Any) -> int:
        """`max_block_bytes` of a cache with these options, built without memory."""
        return cls(config, 1, block_size, dtype, torch.device("meta"), **options).max_block_bytes

    @property
    @abstractmethod
    def max_block_bytes(self) -> int:
        """Most bytes that one request needs over all layers; see `KVCache.bytes_per_block`."""
