"""SqueezeLLM: a codebook per output channel, and a few unquantised values (Kim et al. 2023, arXiv:2306.07629).

Dense: each row has 2^bits centroids, found by k-means. The k-means weight of a value is its squared gradient on
calibration text, the diagonal of the Fisher information. So the levels are placed where errors cost most, not at equal
distances. Sparse: the largest 0.45% of the matrix's values and the 0.05% with the largest squared gradients are removed
before clustering and stored in fp16, as compressed sparse rows (CSR). They are exact if the checkpoint was stored in
fp16, and for bf16 within the range of fp16 (2^-14 and above).

Cost: 2^bits · 2 bytes of codebook per row (0.67 bits per weight at 384 columns and 4 bits, 0.06 at 4096), and 32 bits
per sparse value, which is 0.16 bits per weight. Where it loses: on narrow layers the codebooks take more than the
groups of `int4`, and a look-up per weight is slower than a product if the weights are already in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.errors import CheckpointError, ConfigError
from minillm.quantization.base import CODEBOOKS, SPARSE, WEIGHTS, LayerStatistics, Scheme, TensorSpec
from minillm.quantization.kmeans import SortedRows, nearest, run_kmeans
from minillm.quantization.packing import pack, packed_width, unpack

MIN_IMPORTANCE = 1.0
"""The minimum k-means weight of a value, as a multiple of its row's mean squared gradient. Gradients of some dozens of
texts are noisy, and small ones mean little. Of 0.01, 0.1, 0.3 and 1, fitted on one half of the calibration prompts and
evaluated on the other, 1 was best in minicoder at 3 and at 4 bits, by 5% of the divergence."""


@dataclass(frozen=True)
class SqueezeLLM(Scheme):
    """Weights of 2 to 4 bits, indices into a codebook per output channel, plus sparse fp16 values."""

    method: ClassVar[str] = "squeezellm"
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    needs: ClassVar[str] = "gradients"
    bits: int = 4
    outliers: float = 0.0045
    """Share of the values stored in fp16 because they are large."""
    sensitive: float = 0.0005
    """Share of the values stored in fp16 because the loss is sensitive to them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("outliers", "sensitive"):
            share = getattr(self, name)
            if not isinstance(share, int | float) or not 0 <= share <= 0.1:
                raise ConfigError(f"{name}={share!r} is a share of the weights and must be in [0, 0.1]")

    def num_sparse(self, num_weights: int) -> tuple[int, int]:
        """Return how many of `num_weights` weights are stored as outliers, and how many as sensitive values."""
        return int(num_weights * self.outliers), int(num_weights * self.sensitive)

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Codes, codebooks, and CSR: row r has the entries `sparse_rows[r]` … `sparse_rows[r + 1] - 1`."""
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
        codebooks = _to_fp16(fit_codebooks(weight, importance(fisher).masked_fill(kept, 0), 2**self.bits))
        rows, columns = kept.nonzero(as_tuple=True)
        ends = torch.bincount(rows, minlength=weight.shape[0]).cumsum(0).to(torch.int32)
        return {
            "qweight": pack(nearest(weight, codebooks.float()).to(torch.uint8), self.bits),
            "codebooks": codebooks,
            "sparse_rows": torch.cat((ends.new_zeros(1), ends)),
            "sparse_columns": columns.to(_column_dtype(weight.shape[1])),
            "sparse_values": _to_fp16(weight[rows, columns]),
        }

    def choose_sparse(self, weight: Tensor, fisher: Tensor) -> Tensor:
        """Return a mask of the sparse values, `[out, in]` bool: the largest, then the most sensitive of the rest."""
        num_outliers, num_sensitive = self.num_sparse(weight.numel())
        kept = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
        kept[weight.abs().flatten().topk(num_outliers).indices] = True
        kept[fisher.flatten().masked_fill(kept, -1).topk(num_sensitive).indices] = True
        return kept.view_as(weight)

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Return the centroid of each code, with the sparse values inserted: `[out, in]`, fp32."""
        codes = unpack(tensors["qweight"], self.bits, in_features)
        weight = tensors["codebooks"].float().gather(1, codes.long())
        weight[_row_indices(tensors["sparse_rows"]), tensors["sparse_columns"].long()] = tensors[
            "sparse_values"
        ].float()
        return weight

    def check(self, tensors: Mapping[str, Tensor], in_features: int) -> None:
        """As in the base class; also raise `CheckpointError` if a sparse index is outside the matrix."""
        super().check(tensors, in_features)
        starts, columns = tensors["sparse_rows"], tensors["sparse_columns"]
        if starts[0] != 0 or starts[-1] != columns.numel() or (starts.diff() < 0).any():
            raise CheckpointError(
                f"sparse_rows is not a partition of {columns.numel()} entries; quantise the original again"
            )
        if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < in_features:
            raise CheckpointError(f"sparse_columns points outside {in_features} columns; quantise the original again")


def importance(fisher: Tensor) -> Tensor:
    """Return the k-means weight of each value: its squared gradient, at least `MIN_IMPORTANCE` times its row's mean.

    In a row without any gradient all values have the same weight.
    """
    mean = fisher.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, torch.maximum(fisher, MIN_IMPORTANCE * mean), torch.ones_like(fisher))


def fit_codebooks(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    """Return centroids `[out, k]` that minimise Σ counts · (weight − centroid)² in each row of `weight` (`[out, in]`).

    k-means finds a local minimum, so it runs from three starts: equal distances, as in plain rounding, quantiles of the
    values, and quantiles weighted by `counts`. Each row takes its best result. Values with count 0 are ignored.
    """
    starts = (
        _uniform_centroids(weight, counts, num_centroids),
        _quantile_centroids(weight, (counts > 0).double(), num_centroids),
        _quantile_centroids(weight, counts.double(), num_centroids),
    )
    rows = SortedRows(weight, counts)
    found = [run_kmeans(rows, start) for start in starts]
    best = torch.stack([objectives[-1] for _, objectives in found]).argmin(dim=0)
    choices = torch.stack([centroids for centroids, _ in found])
    return choices[best, torch.arange(len(best), device=weight.device)]


def _uniform_centroids(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    counted = weight.masked_fill(counts == 0, 0)
    low, high = counted.amin(dim=1, keepdim=True), counted.amax(dim=1, keepdim=True)
    return low + (high - low) * torch.linspace(0, 1, num_centroids, device=weight.device)


def _quantile_centroids(weight: Tensor, counts: Tensor, num_centroids: int) -> Tensor:
    values, order = weight.sort(dim=1)
    cumulative = counts.gather(1, order).cumsum(1)
    quantiles = (torch.arange(num_centroids, device=weight.device) + 0.5) / num_centroids
    columns = torch.searchsorted(cumulative, cumulative[:, -1:] * quantiles)
    return values.gather(1, columns.clamp_max(weight.shape[1] - 1))


def _row_indices(starts: Tensor) -> Tensor:
    """Return the row of each sparse entry, given the CSR row starts."""
    return torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())


def _column_dtype(in_features: int) -> torch.dtype:
    return torch.int16 if in_features <= 2**15 else torch.int32


def _to_fp16(values: Tensor) -> Tensor:
    half = values.half()
    if not torch.isfinite(half).all():
        raise CheckpointError(f"a weight of {values.abs().max():.3g} is over 65504, the largest fp16 number")
    return half
