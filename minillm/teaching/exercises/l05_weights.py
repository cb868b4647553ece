"""Lesson 05, INT8 weights: round rows, multiply whole numbers, round groups, scale channels, set outliers apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion

Rounding = Callable[[Tensor], Tensor]
"""A matrix `[out, in]` to the matrix that is left after quantising it and back."""

# ------------------------------------------------------------------------------------------------------ quantise_rows


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One symmetric INT8 scale per output channel: codes `[out, in]` int8 within ±127, scale `[out]` float32.

    `weight`: `[out, in]` float32. |weight - codes · scale| ≤ scale / 2; a row of zeros has the scale 1.
    """
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax() / 127).expand(len(weight)).clone()
    scale = torch.where(scale == 0, 1.0, scale)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _per_column(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = quantise_rows(weight.T.contiguous())
    return codes.T.contiguous(), scale


def _levels_128(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 128)
    return (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale


def _divides_by_zero(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().nan_to_num().to(torch.int8), scale


def _truncates(weight: Tensor) -> tuple[Tensor, Tensor]:
    _, scale = quantise_rows(weight)
    return (weight / scale[:, None]).to(torch.int8), scale


def _without_abs(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _scale_direction(attempt: Attempt) -> str | None:
    """`quantise_rows`: a scale of the wrong length says which direction was taken."""
    got = attempt.got
    if isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], Tensor) and got[1].ndim > 1:
        return "the scale has one number per row, [out], without a second dimension (keepdim)"
    return None


_ROWS = Exercise(
    name="l05.quantise_rows",
    reference=quantise_rows,
    diagnose=_scale_direction,
    cases=lambda: [
        Case("one row", (torch.tensor([[12.7, -3.04, 0.26]]),)),
        Case("two rows, one small and one large", (torch.tensor([[1.27, 0.4, -0.3], [50.8, -9.0, 3.1]]),)),
        Case("the largest weight of a row is negative", (torch.tensor([[0.5, -2.54], [0.31, 1.27]]),)),
        Case("a row of zeros", (torch.tensor([[0.0, 0.0, 0.0], [1.27, 0.52, -0.33]]),)),
        Case("as many inputs as outputs", (_random(6, 6) * torch.logspace(-1, 1, 6)[:, None],)),
    ],
    hints=(
        "An output is the product of one row with the input. What must all weights of a sum have in common, so that "
        "the scale can be multiplied in once, after the sum?",
        "amax = weight.abs().amax(1): one number per row. scale = amax / 127, but 1 where amax is 0. The codes are "
        "weight / scale, rounded.",
        "scale = torch.where(amax == 0, 1.0, amax / 127); return (weight / scale[:, None]).round().to(torch.int8), "
        "scale.",
    ),
    wrong=(
        WrongVersion("has one scale for the whole matrix", _per_tensor),
        WrongVersion("has one scale per input (column) instead of per output (row)", _per_column),
        WrongVersion("divides by 128, for which int8 has no positive code", _levels_128),
        WrongVersion("gives a row of zeros the scale 0, so that 0/0 becomes a code", _divides_by_zero),
        WrongVersion("cuts off the fraction instead of rounding", _truncates),
        WrongVersion("looks for the largest weight without taking absolute values", _without_abs),
    ),
)

# -------------------------------------------------------------------------------------------------------- w8a8_linear


def w8a8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Round each token by its own scale, multiply whole numbers, rescale: `[tokens, in]` → `[tokens, out]`, float32.

    `codes` (`[out, in]` int8, within ±127) and `scale` (`[out]`) are a weight as `quantise_rows` keeps it. The sums are
    taken in float32, where whole numbers are exact up to 2^24: up to 1040 columns.
    """
    x_codes, x_scale = quantise_rows(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale


def _int8_sum(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = quantise_rows(x)
    wrapped = ((x_codes.int() @ codes.int().T + 128) % 256 - 128).to(torch.int8)
    return wrapped * x_scale[:, None] * scale


def _no_activation_scale(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (quantise_rows(x)[0].float() @ codes.float().T) * scale


def _no_weight_scale(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = quantise_rows(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None]


def _one_activation_scale(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = _per_tensor(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale


def _float_activations(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (x @ codes.float().T) * scale


def _nan_for_zeros(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_scale = x.abs().amax(1, keepdim=True) / 127
    return ((x / x_scale).round() @ codes.float().T) * x_scale * scale


def _linear_cases() -> list[Case]:
    weight = quantise_rows(torch.tensor([[1.27, 0.4], [0.3, -2.54]]))
    wide = quantise_rows(_random(3, 40, seed=1))
    large = quantise_rows(torch.full((2, 700), 0.5))
    two_sizes = torch.cat((_random(1, 40, seed=2), 50 * _random(1, 40, seed=3)))
    return [
        Case("one token, two inputs, two outputs", (torch.tensor([[1.0, -0.37]]), *weight)),
        Case("a small token beside a large one", (two_sizes, *wide)),
        Case("a token of zeros, as padding is", (torch.stack((torch.zeros(40), _random(40, seed=4))), *wide)),
        Case("as many tokens as outputs", (_random(3, 40, seed=5), *wide)),
        Case("700 columns that all add up", (torch.full((1, 700), 3.0), *large)),
    ]


_LINEAR = Exercise(
    name="l05.w8a8_linear",
    reference=w8a8_linear,
    cases=_linear_cases,
    hints=(
        "A token is a row of numbers, and you have a function that rounds rows. What remains is a product of codes "
        "and two scales.",
        "Σ (cx·sx)(cw·sw) = sx·sw·Σ cx·cw, where sx belongs to the token (a row of the result) and sw to the output "
        "(a column). The sum does not fit into int8: 127 · 127 alone is 16129. Convert the codes first.",
        "x_codes, x_scale = quantise_rows(x); return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale.",
    ),
    wrong=(
        WrongVersion("adds up in int8, which overflows", _int8_sum),
        WrongVersion("forgets the scale of the activations", _no_activation_scale),
        WrongVersion("forgets the scale of the weights", _no_weight_scale),
        WrongVersion("rounds all tokens by one scale, so a token depends on its neighbours", _one_activation_scale),
        WrongVersion("leaves the activations in floating point", _float_activations),
        WrongVersion("divides a token of zeros by its scale of 0", _nan_for_zeros),
    ),
)

# ---------------------------------------------------------------------------------------------------- quantise_groups


def quantise_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of 16 levels; each `group_size` neighbours of a row share a scale and a zero point.

    `weight`: `[out, in]` float32, `in` a multiple of `group_size`. Returns codes `[out, in]` uint8 (0 … 15), scale
    `[out, groups]` float16 and zero `[out, groups]` uint8, the code that stands for 0; weight ≈ (codes - zero) · scale.
    A scale that float16 makes 0 becomes 1. (The engine rounds its scale up instead of to nearest.)
    """
    grouped = weight.unflatten(1, (-1, group_size))
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scale = ((high - low) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0).half()
    step = scale.float()
    zero = (-low / step).round().clamp(0, 15)
    codes = ((grouped / step[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def restore_groups(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The matrix `[out, in]` float32 that codes, scales and zero points of `quantise_groups` stand for."""
    grouped = codes.unflatten(1, (scale.shape[1], -1)).float()
    return ((grouped - zero[..., None]) * scale.float()[..., None]).flatten(1)


def _coded(weight: Tensor, low: Tensor, high: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes for given ends of each group (`[out, groups]`)."""
    grouped = weight.unflatten(1, (low.shape[1], -1))
    scale = ((high - low) / steps).half()
    scale = torch.where(scale > 0, scale, 1.0).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def _ends(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, group_size))
    return grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)


def _along_outputs(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = quantise_groups(weight.T.contiguous(), group_size)
    return codes.T.contiguous(), scale.T.contiguous(), zero.T.contiguous()


def _whole_rows(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.shape[1] // group_size
    low, high = (end.expand(-1, groups) for end in _ends(weight, weight.shape[1]))
    return _coded(weight, low, high, 15)


def _sixteen_steps(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _coded(weight, *_ends(weight, group_size), 16)


def _symmetric(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    amax = weight.abs().unflatten(1, (-1, group_size)).amax(2)
    return _coded(weight, -amax, amax, 15)


def _without_zero(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, group_size))
    return _coded(weight, grouped.amin(2), grouped.amax(2), 15)


def _wraps(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, zero = quantise_groups(weight, group_size)
    grouped = weight.unflatten(1, (-1, group_size))
    codes = (grouped / scale.float()[..., None]).round().int()  # the zero point is not added: negative codes wrap
    return (codes % 256).flatten(1).to(torch.uint8), scale, zero


def _scale_of_zero(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = quantise_groups(weight, group_size)
    low, high = _ends(weight, group_size)
    return codes, torch.where(high > low, scale, 0.0).half(), zero


_GROUPS = Exercise(
    name="l05.quantise_groups",
    reference=quantise_groups,
    cases=lambda: [
        Case("one group, from -0.5 to 1", (torch.tensor([[-0.5, 1.0, 0.23, 0.0]]), 4)),
        Case(
            "two groups of a row, one of small weights", (torch.tensor([[0.01, -0.04, 0.11, 0.02, 1.5, -0.6, 0, 1]]), 4)
        ),
        Case("a group in which all weights are positive", (torch.tensor([[0.8, 1.0, 0.94, 1.5]]), 4)),
        Case("a group of zeros", (torch.tensor([[0.0, 0.0, 1.5, -0.41]]), 2)),
        Case("eight outputs, eight inputs, groups of 4", (_random(8, 8, seed=6), 4)),
    ],
    hints=(
        "Sixteen levels must reach from the smallest to the largest weight of each group, and 0 must be one of them. "
        "How many steps lie between sixteen levels?",
        "grouped = weight.unflatten(1, (-1, group_size)). Per group: low = min and at most 0, high = max and at least "
        "0, scale = (high - low) / 15 in float16 (1 if that is 0), zero = round(-low / scale), code = round(w / scale) "
        "+ zero, both kept within 0 … 15.",
        "low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0); scale = ((high - low) / 15).half(); "
        "codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).flatten(1).",
    ),
    wrong=(
        WrongVersion("groups the outputs of a column instead of the inputs of a row", _along_outputs),
        WrongVersion("has one scale for the whole row", _whole_rows),
        WrongVersion("counts 16 steps; between 16 levels there are 15", _sixteen_steps),
        WrongVersion("makes the range symmetric, so that levels lie where no weight is", _symmetric),
        WrongVersion("does not widen the range to contain 0, so the zero point is cut off", _without_zero),
        WrongVersion("forgets to add the zero point, so that negative codes wrap around", _wraps),
        WrongVersion("keeps a scale of 0 for a group of zeros", _scale_of_zero),
    ),
)

# ---------------------------------------------------------------------------------------------------------- awq_scale


def awq_scale(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    """The exponent a, and s = mean|x|^a per input channel, with the least ‖Q(W s)(x / s) − W x‖².

    AWQ (Lin et al. 2023, arXiv:2306.00978). `weight`: `[out, in]`; `x`: `[tokens, in]`, a sample of inputs; `rounded`
    is Q. Returns (a, s `[in]`). A channel that was never active gets at least 1e-4.
    """
    mean, exact = x.abs().mean(0), x @ weight.T
    best, least = (0.0, torch.ones_like(mean)), float("inf")
    for a in exponents:
        s = mean.pow(a).clamp_min(1e-4)
        error = ((x / s) @ rounded(weight * s).T - exact).square().sum().item()
        if error < least:
            best, least = (a, s), error
    return best


def _search(
    weight: Tensor, x: Tensor, exponents: Sequence[float], output: Callable[[Tensor], Tensor], mean: Tensor
) -> tuple[float, Tensor]:
    """The grid search with the mistakes left to `output(s)` and `mean`."""
    exact = x @ weight.T
    scales = [(a, mean.pow(a).clamp_min(1e-4)) for a in exponents]
    return min(scales, key=lambda found: (output(found[1]) - exact).square().sum().item())


def _divides_weights(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    return _search(weight, x, exponents, lambda s: (x * s) @ rounded(weight / s).T, x.abs().mean(0))


def _keeps_x(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    return _search(weight, x, exponents, lambda s: x @ rounded(weight * s).T, x.abs().mean(0))


def _worst(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    exact, mean = x @ weight.T, x.abs().mean(0)
    scales = [(a, mean.pow(a).clamp_min(1e-4)) for a in exponents]
    return max(scales, key=lambda f: ((x / f[1]) @ rounded(weight * f[1]).T - exact).square().sum().item())


def _weight_error(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    mean = x.abs().mean(0)
    scales = [(a, mean.pow(a).clamp_min(1e-4)) for a in exponents]
    return min(scales, key=lambda found: (rounded(weight * found[1]) / found[1] - weight).square().sum().item())


def _largest_exponent(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    return exponents[-1], x.abs().mean(0).pow(exponents[-1]).clamp_min(1e-4)


def _mean_without_abs(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    return _search(weight, x, exponents, lambda s: (x / s) @ rounded(weight * s).T, x.mean(0).abs())


def _mean_of_tokens(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    a, _ = awq_scale(weight, x, rounded, exponents)
    return a, x.abs().mean(1).pow(a).clamp_min(1e-4)


def rounded_in_fours(weight: Tensor) -> Tensor:
    """INT4 in groups of 4 and back, for the cases."""
    return restore_groups(*quantise_groups(weight, 4))


GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def _awq_cases() -> list[Case]:
    one_large = torch.tensor([1.0, 1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    steps = torch.tensor([0.1, 8.0, 0.3, 2.0, 0.5, 1.0, 4.0, 0.2])
    dead = torch.tensor([1.0, 1.0, 5.0, 0.0, 1.0, 3.0, 1.0, 2.0])

    def case(label: str, seed: int, weights: Tensor | float, inputs: Tensor | float, grid: Sequence[float]) -> Case:
        weight, x = _random(6, 8, seed=seed) * weights, _random(12, 8, seed=seed + 1) * inputs
        return Case(label, (weight, x, rounded_in_fours, grid))

    return [
        case("one input channel is much larger", 7, 1.0, one_large, GRID),
        case("channels of all sizes", 9, 1.0, steps, GRID),
        case("small weights meet large inputs", 9, steps.pow(-0.7), steps, GRID),
        case("only a = 0: nothing is scaled", 11, 1.0, 1.0, (0.0,)),
        case("one channel is never active", 13, 1.0, dead, GRID),
        case("all channels alike", 15, 1.0, 1.0, GRID),
    ]


_AWQ = Exercise(
    name="l05.awq_scale",
    reference=awq_scale,
    cases=_awq_cases,
    hints=(
        "If W is multiplied by s column by column, and x divided by it, the product is the same before rounding. So "
        "try several s, round, and keep the one whose *outputs* are nearest to x @ weight.T.",
        "For each a: s = mean|x|^a per channel (a mean over tokens, at least 1e-4), then the error of "
        "(x / s) @ rounded(weight * s).T against x @ weight.T, squared and summed. Return the (a, s) with the least.",
        "s = x.abs().mean(0).pow(a).clamp_min(1e-4); error = ((x / s) @ rounded(weight * s).T - x @ weight.T)"
        ".square().sum().",
    ),
    wrong=(
        WrongVersion(
            "divides the weights by s and multiplies x: the important channels get fewer levels", _divides_weights
        ),
        WrongVersion("multiplies the weights but forgets to divide x", _keeps_x),
        WrongVersion("keeps the a with the largest error", _worst),
        WrongVersion("compares weights with weights, where outputs count", _weight_error),
        WrongVersion("takes the largest exponent without trying the others", _largest_exponent),
        WrongVersion("averages x with its signs, so that a channel around 0 looks idle", _mean_without_abs),
        WrongVersion("averages over the channels of a token instead of over tokens", _mean_of_tokens),
    ),
)

# ----------------------------------------------------------------------------------------------------- split_outliers


def split_outliers(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Set the int(share · numel) weights of the largest magnitude apart: (dense, sparse), both `[out, in]`.

    `dense` has 0 in their places, `sparse` has 0 everywhere else, so dense + sparse is `weight` (SqueezeLLM's
    dense-and-sparse decomposition, Kim et al. 2023).
    """
    kept = torch.zeros(weight.numel(), dtype=torch.bool)
    kept[weight.abs().flatten().topk(int(share * weight.numel())).indices] = True
    kept = kept.view_as(weight)
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)


def _kept_twice(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return weight.clone(), split_outliers(weight, share)[1]


def _kept_nowhere(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    dense, sparse = split_outliers(weight, share)
    return dense, torch.zeros_like(sparse)


def _by_mask(weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.zeros(weight.numel(), dtype=torch.bool)
    kept[indices] = True
    kept = kept.view_as(weight)
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)


def _signed(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return _by_mask(weight, weight.flatten().topk(int(share * weight.numel())).indices)


def _smallest(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return _by_mask(weight, weight.abs().flatten().topk(int(share * weight.numel()), largest=False).indices)


def _per_row(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    columns = weight.abs().topk(int(share * weight.shape[1]), dim=1).indices
    indices = columns + torch.arange(len(weight))[:, None] * weight.shape[1]
    return _by_mask(weight, indices.flatten())


def _threshold(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    kept = weight.abs() > (1 - share) * weight.abs().max()
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)


def _clips(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    dense, sparse = split_outliers(weight, share)
    limit = dense.abs().max()
    return weight.clamp(-limit, limit), sparse


_OUTLIERS = Exercise(
    name="l05.split_outliers",
    reference=split_outliers,
    cases=lambda: [
        Case("one of four", (torch.tensor([[0.1, 9.0], [0.3, -0.2]]), 0.25)),
        Case("the largest is negative", (torch.tensor([[0.1, 0.9], [-7.0, -0.2]]), 0.25)),
        Case("both outliers in one row", (torch.tensor([[0.1, 9.0, -8.0, 0.2], [0.3, 0.2, 0.1, 0.4]]), 0.25)),
        Case("2% of a larger matrix", (_random(10, 20, seed=17), 0.02)),
        Case("none at all", (torch.tensor([[0.1, 0.9], [0.3, -0.2]]), 0.0)),
    ],
    hints=(
        "Which weights force a coarse scale on all others? Those go into one matrix, everything else into the other; "
        "where one has a weight, the other has 0.",
        "Count: int(share * weight.numel()), over the whole matrix. Find the places of the largest absolute values "
        "with weight.abs().flatten().topk(count).indices and make a boolean mask.",
        "kept = torch.zeros(weight.numel(), dtype=torch.bool); kept[indices] = True; kept = kept.view_as(weight); "
        "return weight.masked_fill(kept, 0), weight.masked_fill(~kept, 0).",
    ),
    wrong=(
        WrongVersion("leaves the outliers in the dense part too, so that they count twice", _kept_twice),
        WrongVersion("takes the outliers out and keeps them nowhere", _kept_nowhere),
        WrongVersion("chooses by value instead of magnitude and misses negative outliers", _signed),
        WrongVersion("sets the smallest weights apart", _smallest),
        WrongVersion("takes the share from every row instead of from the whole matrix", _per_row),
        WrongVersion("takes what is near the largest value instead of a share of the weights", _threshold),
        WrongVersion("clips the outliers in the dense part instead of leaving 0", _clips),
    ),
)


EXERCISES = [_ROWS, _LINEAR, _GROUPS, _AWQ, _OUTLIERS]
