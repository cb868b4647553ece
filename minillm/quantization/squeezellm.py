"""SqueezeLLM: a codebook per output channel, and a few values kept as they are (Kim et al. 2023, arXiv:2306.07629).

Dense: each row has 2^bits centroids, placed by k-means in which a weight counts by its squared gradient on calibration
text, the diagonal of the Fisher information. So levels stand where mistakes would cost, not at equal distances.
Sparse: 0.45% of the values, the largest of the matrix, and 0.05%, those with the largest squared gradients, are taken
out before clustering and kept in fp16, in compressed rows (CSR). They are exact if the checkpoint was stored in fp16,
and in bf16 as far as fp16 reaches (2^-14 and above).

What it costs: 2^bits · 2 bytes of codebook per row (0.67 bits per weight at 384 columns and 4 bits, 0.06 at 4096), and
32 bits per sparse value, which is 0.16 bits per weight. Where it loses: on narrow layers the codebooks cost more than
the groups of `int4`, and a look-up per weight is slower than a product where the weights need not come from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import CheckpointError, ConfigError
from minillm.quantization.base import CODEBOOKS, SPARSE, WEIGHTS, LayerStatistics, Scheme, TensorSpec
from minillm.quantization.kmeans import SortedRows, nearest, settle
from minillm.quantization.packing import pack, packed_width, unpack

LEAST_WEIGHT = 1.0
"""A weight counts at least so many times its row's mean squared gradient. Gradients of some dozens of texts are noisy,
and small ones mean little: of 0.01, 0.1, 0.3 and 1, fitted on one half of the calibration prompts and judged on the
other, 1 was best in minicoder at 3 and at 4 bits, by 5% of the divergence."""


@dataclass(frozen=True)
class SqueezeLLM(Scheme):
    """Weights of 2 to 4 bits that point into a codebook per output channel, beside sparse exact values."""

    method: ClassVar[str] = "squeezellm"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    needs: ClassVar[str] = "gradients"
    bits: int = 4
    outliers: float = 0.0045
    """Share of the values that are kept exactly because they are large."""
    sensitive: float = 0.0005
    """Share that is kept exactly because the loss is sensitive to them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("outliers", "sensitive"):
            share = getattr(self, name)
            if not isinstance(share, int | float) or not 0 <= share <= 0.1:
                raise ConfigError(f"{name}={share!r} is a share of the weights and must be in [0, 0.1]")

    def num_sparse(self, num_weights: int) -> tuple[int, int]:
        """How many of so many weights are kept as outliers, and how many as sensitive ones."""
        return int(num_weights * self.outliers), int(num_weights * self.sensitive)

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Codes, codebooks, and CSR: row r owns the entries `sparse_rows[r]` … `sparse_rows[r + 1] - 1`."""
        kept = sum(self.num_sparse(out_features * in_features))
        packed = packed_width(in_features, self.bits)
        return {
            "qweight": TensorSpec((out_features, packed), torch.uint8, WEIGHTS),
            "codebooks": TensorSpec((out_features, 2**self.bits), torch.float16, CODEBOOKS),
            "sparse_rows": TensorSpec((out_features + 1,), torch.int32, SPARSE),
            "sparse_columns": TensorSpec((kept,), _column_dtype(in_features), SPARSE),
            "sparse_values": TensorSpec((kept,), torch.float16, SPARSE),
        }

    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        assert statistics.squared_gradients is not None
        fisher = statistics.squared_gradients.to(weight.device)
        kept = self.choose_sparse(weight, fisher)
        codebooks = _half(fit_codebooks(weight, importance(fisher).masked_fill(kept, 0), 2**self.bits))
        rows, columns = kept.nonzero(as_tuple=True)
        ends = torch.bincount(rows, minlength=weight.shape[0]).cumsum(0).to(torch.int32)
        return {
            "qweight": pack(nearest(weight, codebooks.float()).to(torch.uint8), self.bits),
            "codebooks": codebooks,
            "sparse_rows": torch.cat((ends.new_zeros(1), ends)),
            "sparse_columns": columns.to(_column_dtype(weight.shape[1])),
            "sparse_values": _half(weight[rows, columns]),
        }

    def choose_sparse(self, weight: Tensor, fisher: Tensor) -> Tensor:
        """Which values are kept as they are, `[out, in]` bool: the largest, then of the rest the most sensitive."""
        num_outliers, num_sensitive = self.num_sparse(weight.numel())
        kept = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        kept[weight.abs().flatten().topk(num_outliers).indices] = True
        kept[fisher.flatten().masked_fill(kept, -1).topk(num_sensitive).indices] = True
        return kept.view_as(weight)

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Each code's centroid, the sparse values in their places: `[out, in]`, fp32."""
        codes = unpack(tensors["qweight"], self.bits, in_features)
        weight = tensors["codebooks"].float().gather(1, codes.long())
        weight[_row_of_each(tensors["sparse_rows"]), tensors["sparse_columns"].long()] = tensors[
            "sparse_values"
        ].float()
        return weight

    def check(self, tensors: Mapping[str, Tensor], in_features: int) -> None:
        """As the base class, and that no sparse value points outside the matrix."""
        super().check(tensors, in_features)
        starts, columns = tensors["sparse_rows"], tensors["sparse_columns"]
        if starts[0] != 0 or starts[-1] != columns.numel() or (starts.diff() < 0).any():
            raise CheckpointError(f"sparse_rows does not divide {columns.numel()} entries; quantise the original again")
        if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < in_features:
            raise CheckpointError(f"sparse_columns points outside {in_features} columns; quantise the original again")


def importance(fisher: Tensor) -> Tensor:
    """How much each weight counts in clustering: its squared gradient, but at least `LEAST_WEIGHT` of its row's mean.

    Rows without any gradient count all their weights alike.
    """
    mean = fisher.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, torch.maximum(fisher, LEAST_WEIGHT * mean), torch.ones_like(fisher))


def fit_codebooks(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    """For each row of `weight` (`[out, in]`) the centroids with the least Σ counts · (weight − centroid)²: `[out, k]`.

    k-means finds the best answer near where it starts, so it starts from equal distances, as plain rounding has them,
    and from equal shares of the values and of their counts; each row keeps its best. Values that count 0 are ignored.
    """
    starts = (
        _equal_distances(weight, counts, num_centroids),
        _equal_shares(weight, (counts > 0).double(), num_centroids),
        _equal_shares(weight, counts.double(), num_centroids),
    )
    rows = SortedRows(weight, counts)
    found = [settle(rows, start) for start in starts]
    best = torch.stack([objectives[-1] for _, objectives in found]).argmin(dim=0)
    choices = torch.stack([centroids for centroids, _ in found])
    return choices[best, torch.arange(len(best), device=weight.device)]


def _equal_distances(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    counted = weight.masked_fill(counts == 0, 0)
    low, high = counted.amin(dim=1, keepdim=True), counted.amax(dim=1, keepdim=True)
    return low + (high - low) * torch.linspace(0, 1, num_centroids, device=weight.device)


def _equal_shares(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    values, order = weight.sort(dim=1)
    shares = counts.gather(1, order).cumsum(1)
    wanted = (torch.arange(num_centroids, device=weight.device) + 0.5) / num_centroids
    at = torch.searchsorted(shares, shares[:, -1:] * wanted)
    return values.gather(1, at.clamp_max(weight.shape[1] - 1))


def _row_of_each(starts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())


def _column_dtype(in_features: int) -> torch.dtype:
    return torch.int16 if in_features <= 2**15 else torch.int32


def _half(values: Tensor) -> Tensor:
    half = values.half()
    if not torch.isfinite(half).all():
        raise CheckpointError(f"a weight of {values.abs().max():.3g} is over 65504, the largest that fp16 can hold")
    return half
