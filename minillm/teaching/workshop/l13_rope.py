"""Lesson 13: keys before RoPE, what an absorbed key projection forgets, and scores by looking codes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache.commvq import CommVQKVCache
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.ops.rerotation import rerotate
from minillm.quantization.codebooks import GROUP, BinaryCodebook, CommutingCodebook, pair_groups
from minillm.quantization.vector_kmeans import vector_kmeans

Absorb = Callable[[Tensor, Tensor], Tensor]
"""The exercise `absorb_centres`."""


def before_rope(rows: Tensor, frequencies: Tensor) -> Tensor:
    """Queries or keys of the positions 0, 1, 2, … with their rotation undone: `[n, heads, head_dim]`."""
    return rerotate(rows, frequencies, -torch.arange(len(rows)))


def lost_share(rows: Tensor, basis: Tensor) -> float:
    """‖rows - rows · B Bᵀ‖² / ‖rows‖² of `rows` `[n, kv_size]` and a basis B `[kv_size, rank]`."""
    return float((rows - rows @ basis @ basis.T).square().sum() / rows.square().sum())


def error_by_distance(
    queries: Tensor, keys: Tensor, basis: Tensor, frequencies: Tensor, distances: Sequence[int]
) -> list[float]:
    """How wrong scores are if the basis of keys is absorbed into the query, and RoPE is left out.

    `queries`, `keys`: with RoPE, `[n, heads, head_dim]`. For each distance the error over the second half of the text,
    as a share of the scores that restored and rotated keys give.
    """
    count, num_kv = len(queries), keys.shape[1]
    group = queries.shape[1] // num_kv
    coordinates = before_rope(keys, frequencies).flatten(1) @ basis
    restored = rerotate((coordinates @ basis.T).unflatten(1, (num_kv, -1)), frequencies, torch.arange(count))
    absorbed = torch.einsum(
        "nhd,hdr->nhr",
        before_rope(queries, frequencies),
        basis.unflatten(0, (num_kv, -1)).repeat_interleave(group, 0),
    )
    found = []
    for distance in distances:
        at = torch.arange(max(count // 2, distance), count)
        right = torch.einsum("nhd,nhd->nh", queries[at], restored[at - distance].repeat_interleave(group, 1))
        wrong = torch.einsum("nhr,nr->nh", absorbed[at], coordinates[at - distance])
        found.append(float((wrong - right).norm() / right.norm()))
    return found


def pairs_of(keys: Tensor) -> Tensor:
    """The pairs of channels that RoPE turns together: `[n, heads, d]` → `[heads · d / 2, n, 2]`."""
    return keys.unflatten(2, (2, -1)).permute(1, 3, 0, 2).flatten(0, 1)


def clustered(points: Tensor, centres: int) -> tuple[Tensor, Tensor]:
    """k-means of every pair by itself: centres `[pairs, centres, 2]`, and the share of the squared length that is lost,
    `[pairs]`. `points`: `[pairs, n, 2]`."""
    found, labels = vector_kmeans(points, centres)
    lost = (points - found.gather(1, labels.unsqueeze(2).expand_as(points))).square().sum((1, 2))
    return found, lost / points.square().sum((1, 2))


def trained_once(model: Decoder, texts: CalibrationTexts, bits: int) -> type[CommVQKVCache]:
    """The layout `commvq` with codebooks that are trained now, for up to `bits` bits.

    Stages are trained one after the other, so those of fewer bits are the first ones of more bits.
    """
    most = CommVQKVCache(model.config, 1, 1, torch.float32, torch.device("cpu"), bits=bits)
    most.prepare(model, texts)

    class TrainedCommVQ(CommVQKVCache):
        def prepare(self, model: Decoder, texts: CalibrationTexts | None = None) -> None:
            """See `CommVQKVCache.prepare`."""
            self.codebooks = {True: [], False: []}
            for book in most.codebooks[True]:
                self.codebooks[True].append(CommutingCodebook(book.mean, torch.cat(book.stages[: self.bits], 1)))
            for book in most.codebooks[False]:
                self.codebooks[False].append(BinaryCodebook(book.mean, *(part[: self.bits] for part in book.parts)))

    return TrainedCommVQ


def looked_up_scores(absorb: Absorb, cache: Any, layer: int, query: Tensor, num_tokens: int) -> Tensor:
    """The scores of one query of KV head 0 with the first `num_tokens` tokens of a `commvq` cache, without decoding a
    key: `[num_tokens]`.

    `query`: `[head_dim]`, with RoPE. For each group of channels and each stage, `absorb` makes the table of the query
    and all centres; a token takes the entries of its codes, times its own cosines and sines. The mean is one more
    centre, which all tokens share.
    """
    book = cache.codebooks[True][layer]
    codes = cache.keys[layer][:num_tokens].view(num_tokens, cache.config.num_kv_heads, -1)[:, 0].long()
    angles = cache.positions[:num_tokens, None].double() * cache.frequencies.double()
    turns = torch.stack((angles.cos(), angles.sin())).float()  # [2, tokens, d / 2]
    table = absorb(query, book.mean[0]).expand(-1, num_tokens, -1).clone()
    parts = pair_groups(query.view(1, 1, -1)).squeeze(1)  # [groups, GROUP]
    of_stages = codes.chunk(len(book.stages), dim=1)
    for centres, chosen in zip(book.stages, of_stages, strict=True):
        for group, part in enumerate(parts):
            pairs = slice(group * GROUP // 2, (group + 1) * GROUP // 2)
            table[:, :, pairs] += absorb(part, centres[group].float())[:, chosen[:, group]]
    return (turns * table).sum((0, 2))
