"""AWQ: round to nearest, after making the weights that matter larger (Lin et al. 2023, arXiv:2306.00978).

A weight matters as much as the activations it meets. Scaling input channel j of W by s_j and its activations by 1/s_j
changes nothing before rounding; after it, the channel's rounding error is divided by s_j, as long as the channel does
not widen its group. AWQ takes s_j = mean|x_j|^a and tries a = 0, 0.05, … 1 for the least ‖Q(W s)(x / s) − W x‖² on a
sample of calibration inputs. Then, as the authors' code does, each group's range is narrowed to the share of it that
serves the sample best: few weights are cut off, all others get finer steps. a = 0 with whole ranges is plain rounding
and is among what is tried, so on that sample AWQ never does worse than it.

Where it wins: models with outlier channels. Minicoder has few (its most active channels are 1.5 to 20 times the
median), so at 4 bits nearly all of its gain comes from the narrowed ranges.

Where the 1/s_j goes: the paper folds it into the norm or linear before. Here each layer keeps it, as `input_scales`,
because that is exact for all four linears alike. Folding is not: grouped-query attention has several query heads behind
one value head, so o_proj cannot have a scale per input channel that v_proj's rows could take over, and a norm's weight
rounded to the model's dtype would no longer be the inverse of s. The price is one product per input number and 4 bytes
per input channel (0.02 to 0.08 bits per weight in minicoder, less in anything wider).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minillm.quantization.base import INPUT_SCALES, LayerStatistics, TensorSpec
from minillm.quantization.groups import dequantize_groups, in_groups, quantize_groups
from minillm.quantization.int4 import Int4

EXPONENTS = tuple(i / 20 for i in range(21))
"""The values of a that are tried."""
SHRINKS = tuple(1 - i / 20 for i in range(11))
"""The shares of a group's range that are tried, 1 to 0.5."""


@dataclass(frozen=True)
class AWQ(Int4):
    """Weights of 4 or 3 bits in groups, input channels scaled by how large their activations are."""

    method: ClassVar[str] = "awq"
    allowed_bits: ClassVar[tuple[int, ...]] = (3, 4)
    needs: ClassVar[str] = "inputs"

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Those of `int4`, and `input_scales`: `[in]` fp32, by which the input is multiplied (1/s)."""
        more = {"input_scales": TensorSpec((in_features,), torch.float32, INPUT_SCALES)}
        return super().tensors(out_features, in_features) | more

    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        inputs, mean_abs = statistics.inputs, statistics.mean_abs
        assert inputs is not None and mean_abs is not None

        def error(tensors: Mapping[str, Tensor]) -> float:
            return self.output_error(weight, tensors, inputs)

        best = min((self.scaled(weight, channel_scales(mean_abs, a)) for a in EXPONENTS), key=error)
        return min(best, self.clipped(weight, best["input_scales"], inputs), key=error)

    def scaled(self, weight: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Round `weight` (`[out, in]`) with its input channels multiplied by `scales` (`[in]`, fp32)."""
        # What is stored is the inverse, so the inverse of what is stored is what the weights must be scaled by.
        inverse = 1 / scales
        return {**self.round_to_nearest(weight / inverse), "input_scales": inverse}

    def clipped(self, weight: Tensor, inverse: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        """As `scaled` by 1/`inverse`, each group's range narrowed to what suits its own share of the output best."""
        scaled = weight / inverse
        seen = in_groups(inputs * inverse, self.group_size)
        gram = torch.einsum("ngi,ngj->gij", seen, seen)
        errors = []
        for shrink in SHRINKS:
            codes, scales, zeros = quantize_groups(scaled, self.bits, self.group_size, shrink)
            error = in_groups(dequantize_groups(codes, scales, zeros, self.group_size) - scaled, self.group_size)
            errors.append((torch.einsum("ogi,gij->ogj", error, gram) * error).sum(2))
        best = torch.tensor(SHRINKS, device=weight.device)[torch.stack(errors).argmin(dim=0)]
        return {**self.round_to_nearest(scaled, best), "input_scales": inverse}

    def output_error(self, weight: Tensor, tensors: Mapping[str, Tensor], inputs: Tensor) -> float:
        """‖Ŵ x − W x‖² summed over `inputs` (`[rows, in]`), Ŵ being what `tensors` stand for."""
        error = self.dequantize(tensors, weight.shape[1]) - weight
        return (inputs @ error.T).square().sum(dtype=torch.float64).item()

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """(q - z)·s_group / s_channel: `[out, in]`, fp32. The scaling of the inputs is taken into the matrix."""
        return super().dequantize(tensors, in_features) * tensors["input_scales"]


def channel_scales(mean_abs: Tensor, exponent: float) -> Tensor:
    """mean|x|^a per input channel (`[in]`), divided by √(largest · smallest) so that they lie around 1.

    A channel that calibration never saw active would get 0; it gets the 1e-4 of the authors' code.
    """
    scales = mean_abs.pow(exponent).clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()
