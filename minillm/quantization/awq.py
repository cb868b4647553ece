"""AWQ: round to nearest, after scaling up the weights of important channels (Lin et al. 2023, arXiv:2306.00978).

A weight is as important as the activations it multiplies. Scaling input channel j of W by s_j and its activations by
1/s_j changes nothing before rounding. After rounding, it divides the channel's error by s_j, as long as the scaled
channel does not enlarge the range of its group. AWQ sets s_j = mean|x_j|^a and searches a = 0, 0.05, … 1 for the least
‖Q(W s)(x / s) − W x‖² on a sample of calibration inputs. Then, as in the authors' code, it clips each group to the
share of its range that minimises the error on the sample: few weights are clipped, all others get finer steps. The
search includes plain rounding (a = 0 without clipping), so on that sample AWQ is never worse.

Where it wins: models with outlier channels. Minicoder has few (the most active channel is 33 times the median one in
one layer, and 11 times at most in all others), so at 4 bits nearly all of its gain comes from clipping.

Where the 1/s_j goes: the paper folds it into the preceding norm or linear. Here each layer stores it as `input_scales`,
which is exact for all four linears. Folding is not. In grouped-query attention several query heads share one value
head, so v_proj's rows cannot absorb a separate scale for each input channel of o_proj. And a norm's weight rounded to
the model's dtype would no longer be the exact inverse of s. The cost is one multiplication per input value and 4 bytes
per input channel (0.02 to 0.08 bits per weight in minicoder, less in any wider model).
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
"""The values of a in the search."""
SHRINKS = tuple(1 - i / 20 for i in range(11))
"""The shares of a group's range in the search: 1, 0.95, … 0.5."""


@dataclass(frozen=True)
class AWQ(Int4):
    """Group-wise weights of 3 or 4 bits, with input channels scaled by the magnitude of their activations."""

    method: ClassVar[str] = "awq"
    allowed_bits: ClassVar[tuple[int, ...]] = (3, 4)
    needs: ClassVar[str] = "inputs"

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """The tensors of `int4`, and `input_scales`: `[in]` fp32, the factors 1/s on the input."""
        more = {"input_scales": TensorSpec((in_features,), torch.float32, INPUT_SCALES)}
        return super().tensors(out_features, in_features) | more

    def _quantize(self, weight: Tensor, statistics: LayerStatistics) -> dict[str, Tensor]:
        inputs, mean_abs = statistics.inputs, statistics.mean_abs
        assert inputs is not None  # `Scheme.quantize` has checked it
        if mean_abs is None:
            mean_abs = inputs.abs().mean(0)

        def error(tensors: Mapping[str, Tensor]) -> float:
            return self.output_error(weight, tensors, inputs)

        best = min((self.scaled(weight, channel_scales(mean_abs, a)) for a in EXPONENTS), key=error)
        return min(best, self.clipped(weight, best["input_scales"], inputs), key=error)

    def scaled(self, weight: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Quantise `weight` (`[out, in]`) with its input channels multiplied by `scales` (`[in]`, fp32)."""
        # The stored tensor is 1/scales, so the weights are divided by exactly this rounded inverse.
        inverse = 1 / scales
        return {**self.round_to_nearest(weight / inverse), "input_scales": inverse}

    def clipped(self, weight: Tensor, inverse: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        """As `scaled` by 1/`inverse`, with each group's range clipped for the least error of its part of the output."""
        scaled = weight / inverse
        grouped_inputs = in_groups(inputs * inverse, self.group_size)
        gram = torch.einsum("ngi,ngj->gij", grouped_inputs, grouped_inputs)
        errors = []
        for shrink in SHRINKS:
            codes, scales, zeros = quantize_groups(scaled, self.bits, self.group_size, shrink)
            error = in_groups(dequantize_groups(codes, scales, zeros, self.group_size) - scaled, self.group_size)
            errors.append((torch.einsum("ogi,gij->ogj", error, gram) * error).sum(2))
        best = torch.tensor(SHRINKS, device=weight.device)[torch.stack(errors).argmin(dim=0)]
        return {**self.round_to_nearest(scaled, best), "input_scales": inverse}

    def output_error(self, weight: Tensor, tensors: Mapping[str, Tensor], inputs: Tensor) -> float:
        """Return ‖Ŵ x − W x‖² summed over `inputs` (`[rows, in]`); Ŵ is the matrix that `tensors` represent."""
        error = self.dequantize(tensors, weight.shape[1]) - weight
        return (inputs @ error.T).square().sum(dtype=torch.float64).item()

    def dequantize(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        """Return (q - z)·s_group / s_channel: `[out, in]`, fp32. The matrix includes the scaling of the inputs."""
        return super().dequantize(tensors, in_features) * tensors["input_scales"]


def channel_scales(mean_abs: Tensor, exponent: float) -> Tensor:
    """Return mean|x|^a per input channel (`[in]`), divided by √(largest · smallest) to centre the scales on 1.

    The minimum of 1e-4 is that of the authors' code; a channel that is always 0 in calibration would get the scale 0.
    """
    scales = mean_abs.pow(exponent).clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()
