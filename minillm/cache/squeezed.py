"""Fewer keys read: each query looks centroids up and attends to the clusters that matter (Squeezed Attention: Hooper et
al. 2024).

    offline    k-means over the normalised keys of the prompt, per KV head: about one centroid for 20 tokens
    per query  S_i = exp(q · C_i / √d) / Σ_j N_j exp(q · C_j / √d)       C_i: mean key of cluster i, N_i: its tokens

S_i estimates the attention weight of one key of cluster i: q · C_i is the mean score of its keys. Clusters above one
threshold are kept, the same threshold in all layers and heads, so heads that attend to much read much. Attention over
the keys that are kept is exact. The fixed prefix of the paper is here the prompt without its last `window` tokens.

**This layout stores more, not less**: all keys and values, and the centroids. What falls is what a decode step would
read: the centroids, and the rows of the kept clusters (`share_read` counts these rows). This PyTorch version gathers
nothing: it masks the other clusters, so it saves no time either.

Differences from the paper. The threshold is a multiple of 1 / n, the weight of each of n keys under uniform attention,
so that one value suits prompts of all lengths; 0 keeps everything. Query heads of one KV head share what is loaded:
their S_i are averaged. The paper also has a second level of centroids over centroids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.compressed_prompt import CompressedPromptKVCache, LayerRows, Parts
from minillm.cache.layout_options import MOST, check_share
from minillm.cache.sequence_rows import packed_attention
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import additive_mask, pack_queries, unpack_outputs
from minillm.quantization.vector_kmeans import cluster_means, cluster_sizes, vector_kmeans


class SqueezedKVCache(CompressedPromptKVCache):
    """`threshold`: keep clusters whose keys get at least this multiple of a uniform weight. `cluster_share`: centroids
    per token of the prompt."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        threshold: float = 0.5,
        cluster_share: float = 0.05,
        window: int = 32,
    ) -> None:
        _check(threshold, cluster_share)
        super().__init__(config, num_blocks, block_size, dtype, device, window=window)
        self.threshold, self.cluster_share = threshold, cluster_share
        self.rows_read = torch.zeros(2, dtype=torch.int64, device=device)
        """Clustered rows that queries have read, and those they would read without centroids; per KV head and query."""

    @property
    def max_block_bytes(self) -> int:
        """Bytes of a request as long as the context: whole rows, observed queries, centroids, sizes and labels."""
        config = self.config
        centroid = config.head_dim * self.dtype.itemsize + 4
        more = num_clusters(self.max_rows, self.cluster_share) * centroid + self.max_rows * torch.int32.itemsize
        return super().max_block_bytes + config.num_layers * config.num_kv_heads * more

    @property
    def share_read(self) -> float:
        """The share of clustered rows that queries behind their prompts have read; 1 if there were none."""
        read, stored = self.rows_read.tolist()
        return read / stored if stored else 1.0

    def compress(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Parts | None:
        """See `CompressedPromptKVCache.compress`: centroids `[KV heads, clusters, head_dim]`, sizes `[KV heads,
        clusters]`, the cluster of each token `[KV heads, tokens]`, and all keys and values."""
        old = len(keys) - self.window
        keys, values = keys[:old].clone(), values[:old].clone()
        points = keys.transpose(0, 1).to(torch.promote_types(keys.dtype, torch.float32))
        count = num_clusters(old, self.cluster_share)
        directions, labels = vector_kmeans(F.normalize(points, dim=-1), count)
        centroids = cluster_means(points, labels, torch.zeros_like(directions))
        return centroids.to(keys.dtype), cluster_sizes(labels, count).int(), labels.int(), keys, values

    def attention(self, layer: int, q: Tensor, rows: LayerRows, hidden: Tensor | None) -> Tensor:
        """See `CompressedPromptKVCache.attention`."""
        if not rows.parts:
            return super().attention(layer, q, rows, hidden)
        centroids, sizes, labels, old_keys, old_values = rows.parts
        scores = cluster_scores(q, centroids, sizes).gather(2, labels.long().unsqueeze(1).expand(-1, len(q), -1))
        kept = scores * len(old_keys) >= self.threshold
        self.rows_read += torch.stack((kept.sum(), torch.tensor(kept.numel(), device=kept.device)))
        whole = kept.new_zeros(len(q), len(rows.keys)) if hidden is None else hidden
        gone = torch.cat((~kept, whole.expand(len(kept), -1, -1)), dim=2)
        num_kv = len(kept)
        mask = additive_mask(gone, q.shape[1] // num_kv, q.dtype).transpose(0, 1)  # a mask for each KV head
        keys, values = torch.cat((old_keys, rows.keys)), torch.cat((old_values, rows.values))
        keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
        return unpack_outputs(packed_attention(pack_queries(q, 1, num_kv), keys, values, mask), len(q))


def cluster_scores(q: Tensor, centroids: Tensor, sizes: Tensor) -> Tensor:
    """S_i of each KV head, query and cluster, averaged over the query heads of the KV head: `[KV heads, queries,
    clusters]`, at least fp32. 0 for an empty cluster.

    `q`: `[queries, num_heads, head_dim]`; `centroids`: `[KV heads, clusters, head_dim]`; `sizes`: `[KV heads,
    clusters]`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(1, (len(centroids), -1))
    scores = torch.einsum("qkgd,kcd->kgqc", grouped, centroids.to(dtype)) * q.shape[2] ** -0.5
    scores = scores.masked_fill((sizes == 0)[:, None, None], float("-inf"))
    total = (scores + sizes.to(dtype).log()[:, None, None]).logsumexp(-1, keepdim=True)
    return (scores - total).exp().mean(1)


def num_clusters(num_tokens: int, cluster_share: float) -> int:
    """How many clusters so many tokens get."""
    return max(1, round(num_tokens * cluster_share))


def _check(threshold: float, cluster_share: float) -> None:
    check_share("cluster_share", cluster_share)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= MOST:
        raise ConfigError(f"kv_cache_config: threshold={threshold!r} must be a number of at least 0 and at most {MOST}")
