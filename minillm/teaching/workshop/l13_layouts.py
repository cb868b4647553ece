"""Lesson 13: the engine's compressing layouts with a function of the learner inside, and with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.cache.base import KVCache
from minillm.cache.compressed_prompt import LayerRows, Parts
from minillm.cache.lorc import LorcKVCache, projection
from minillm.cache.sequence_rows import packed_attention
from minillm.cache.squeezed import SqueezedKVCache
from minillm.cache.think import ThinkKVCache, channel_scores
from minillm.models.decoder import Decoder
from minillm.ops.paged_attention import additive_mask, pack_queries, unpack_outputs

ChannelChoice = Callable[[Tensor, Tensor, int], Tensor]
"""The exercise `kept_channels`."""
LowRank = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""The exercise `low_rank`."""
ClusterChoice = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""The exercise `kept_clusters`."""


def options(layout: str | type[KVCache], **chosen: Any) -> dict[str, Any]:
    """Options of `LLM` for a cache layout, by name or as a class."""
    return {"kv_cache_config": {"layout": layout, **chosen}}


def think_with(choice: ChannelChoice) -> type[ThinkKVCache]:
    """The layout `think`, with channels from `choice`."""

    class Think(ThinkKVCache):
        def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
            """See `ThinkKVCache.compress`."""
            if self.num_channels == self.config.head_dim:
                return None
            old = len(keys) - self.window
            channels = choice(queries.float(), keys.float(), self.num_channels)
            return channels.to(torch.int16), keys[:old].gather(2, channels.expand(old, -1, -1)), values[:old].clone()

    return Think


def lorc_with(low_rank: LowRank) -> type[LorcKVCache]:
    """The layout `lorc`, with singular vectors from `low_rank`."""

    class Lorc(LorcKVCache):
        def prepare(self, model: Decoder, *rest: Any) -> None:
            """See `LorcKVCache.prepare`."""
            super().prepare(model, *rest)
            for is_key, pools in ((True, self.keys), (False, self.values)):
                for layer, pool in enumerate(pools):
                    weight, _ = projection(model, layer, is_key)
                    self.bases[is_key][layer] = low_rank(weight, out_projection(model, layer), pool.shape[1])[0]

    return Lorc


def out_projection(model: Decoder, layer: int) -> Tensor:
    """What a layer's output projection does with each query head: `[num_heads, hidden, head_dim]`, fp32."""
    weight = model.layers[layer].o_proj.weight.detach().float()
    return weight.unflatten(1, (model.config.num_heads, -1)).transpose(0, 1)


def squeezed_with(choice: ClusterChoice) -> type[SqueezedKVCache]:
    """The layout `squeezed`, with clusters from `choice`."""

    class Squeezed(SqueezedKVCache):
        def attention(self, layer: int, q: Tensor, rows: LayerRows, hidden: Tensor | None) -> Tensor:
            """See `SqueezedKVCache.attention`."""
            if not rows.parts:
                return super().attention(layer, q, rows, hidden)
            centroids, sizes, labels, old_keys, old_values = rows.parts
            clusters = kept(choice, q, centroids, sizes, self.threshold)
            tokens = clusters.gather(2, labels.long().unsqueeze(1).expand(-1, len(q), -1))
            self.rows_read += torch.stack((tokens.sum(), torch.tensor(tokens.numel())))
            whole = tokens.new_zeros(len(q), len(rows.keys)) if hidden is None else hidden
            gone = torch.cat((~tokens, whole.expand(len(tokens), -1, -1)), dim=2)
            mask = additive_mask(gone, q.shape[1] // len(tokens), q.dtype).transpose(0, 1)
            keys, values = torch.cat((old_keys, rows.keys)), torch.cat((old_values, rows.values))
            keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
            return unpack_outputs(packed_attention(pack_queries(q, 1, len(tokens)), keys, values, mask), len(q))

    return Squeezed


def kept(choice: ClusterChoice, q: Tensor, centroids: Tensor, sizes: Tensor, threshold: float) -> Tensor:
    """What `choice` keeps for each KV head and query: `[num_kv_heads, queries, clusters]`, bool. Clusters without
    tokens are hidden from it, and never kept.

    `q`: `[queries, num_heads, head_dim]`; `centroids`: `[num_kv_heads, clusters, head_dim]`; `sizes`: `[num_kv_heads,
    clusters]`.
    """
    found = torch.zeros(len(centroids), len(q), centroids.shape[1], dtype=torch.bool)
    for head, queries in enumerate(q.float().unflatten(1, (len(centroids), -1)).transpose(0, 1)):
        filled = sizes[head] > 0
        for i, of_token in enumerate(queries):
            found[head, i, filled] = choice(
                of_token, centroids[head, filled].float(), sizes[head, filled].float(), threshold
            )
    return found


# ------------------------------------------------------------------------------------------- layouts with one mistake


def least_used(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Keeps the channels with the lowest scores."""
    return channel_scores(queries, keys).argsort(dim=1, stable=True)[:, :count].sort(dim=1).values


class ZeroedChannels(ThinkKVCache):
    """Sets the channels to 0 instead of leaving them out."""

    def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
        """See `ThinkKVCache.compress`."""
        parts = super().compress(layer, queries, keys, values)
        return None if parts is None else super().restore(layer, parts)

    def restore(self, layer: int, parts: Parts) -> tuple[Tensor, Tensor]:
        """See `ThinkKVCache.restore`."""
        keys, values = parts
        return keys, values


class LatentsAfterRope(LorcKVCache):
    """Compresses keys as they come, with RoPE in them."""

    def rotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """See `PagedLatentKVCache.rotate`: neither undone nor applied."""
        return keys
