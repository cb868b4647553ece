"""Lesson 05, mistakes that learners make, planted so that a check can name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l05_reference import (
    Rounding,
    awq_scale,
    quantise_groups,
    quantise_rows,
    split_outliers,
    w8a8_linear,
)

# ------------------------------------------------------------------------------------------------------ quantise_rows

Rows = tuple[Tensor, Tensor]


def _by_scale(weight: Tensor, scale: Tensor, round_: Callable[[Tensor], Tensor] = torch.round) -> Rows:
    """Codes for a given scale per row; 1 where it is 0."""
    scale = torch.where(scale == 0, 1.0, scale)
    return round_(weight / scale[:, None]).clamp(-128, 127).to(torch.int8), scale


def _per_tensor(weight: Tensor) -> Rows:
    return _by_scale(weight, (weight.abs().amax() / 127).expand(len(weight)).clone())


def _per_column(weight: Tensor) -> Rows:
    codes, scale = quantise_rows(weight.T.contiguous())
    return codes.T.contiguous(), scale


def _divides_by_zero(weight: Tensor) -> Rows:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().nan_to_num().to(torch.int8), scale


def _multiplies(weight: Tensor) -> Rows:
    _, scale = quantise_rows(weight)
    return (weight * scale[:, None]).round().to(torch.int8), scale


def _inverse_scale(weight: Tensor) -> Rows:
    codes, scale = quantise_rows(weight)
    return codes, 1 / scale


def _limited(least: float) -> Callable[[Tensor], Rows]:
    return lambda weight: _by_scale(weight, weight.abs().amax(1).clamp_min(least) / 127)


def _stores_a_limited_scale(weight: Tensor) -> Rows:
    codes, scale = quantise_rows(weight)
    return codes, scale.clamp_min(1e-5)


ROWS = (
    WrongVersion("uses one scale for the whole matrix", _per_tensor),
    WrongVersion("uses one scale per input (column) instead of per output (row)", _per_column),
    WrongVersion("divides by 128, for which int8 has no positive code", lambda w: _by_scale(w, w.abs().amax(1) / 128)),
    WrongVersion("divides by 255, as if there were 255 positive codes", lambda w: _by_scale(w, w.abs().amax(1) / 255)),
    WrongVersion("forgets to divide the largest weight by 127", lambda w: _by_scale(w, w.abs().amax(1))),
    WrongVersion("gives a row of zeros the scale 0, so that 0/0 becomes a code", _divides_by_zero),
    WrongVersion(
        "limits all scales from below by a small constant; only a row of zeros gets the scale 1",
        lambda w: _by_scale(w, (w.abs().amax(1) / 127).clamp_min(1e-5)),
    ),
    WrongVersion("limits the scale from below, by 1e-8 / 127; a row of zeros must get the scale 1", _limited(1e-8)),
    WrongVersion("limits the scale from below, by 1e-5 / 127; a row of zeros must get the scale 1", _limited(1e-5)),
    WrongVersion("stores a scale limited from below; the codes use the exact one", _stores_a_limited_scale),
    WrongVersion("truncates instead of rounding", lambda w: _by_scale(w, w.abs().amax(1) / 127, torch.trunc)),
    WrongVersion("rounds down instead of to nearest", lambda w: _by_scale(w, w.abs().amax(1) / 127, torch.floor)),
    WrongVersion(
        "uses the largest weight instead of the largest absolute value", lambda w: _by_scale(w, w.amax(1) / 127)
    ),
    WrongVersion(
        "uses the smallest absolute weight instead of the largest", lambda w: _by_scale(w, w.abs().amin(1) / 127)
    ),
    WrongVersion(
        "uses the mean of the absolute weights instead of the largest", lambda w: _by_scale(w, w.abs().mean(1) / 127)
    ),
    WrongVersion("multiplies by the scale instead of dividing", _multiplies),
    WrongVersion("returns 127 / amax, the inverse of the scale", _inverse_scale),
    WrongVersion("returns the scale first and the codes second", lambda w: quantise_rows(w)[::-1]),
    WrongVersion(
        "returns codes in float32 instead of int8", lambda w: (quantise_rows(w)[0].float(), quantise_rows(w)[1])
    ),
)

# -------------------------------------------------------------------------------------------------------- w8a8_linear


def _int8_sum(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = quantise_rows(x)
    wrapped = ((x_codes.int() @ codes.int().T + 128) % 256 - 128).to(torch.int8)
    return wrapped * x_scale[:, None] * scale


def _rescaled(rescale: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The right sums, and `rescale(sums, x_scale, scale)` after them."""

    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        x_codes, x_scale = quantise_rows(x)
        return rescale(x_codes.float() @ codes.float().T, x_scale, scale)

    return product


def _one_activation_scale(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = _per_tensor(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale


def _nan_for_zeros(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_scale = x.abs().amax(1, keepdim=True) / 127
    return ((x / x_scale).round() @ codes.float().T) * x_scale * scale


def _not_rounded(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (x @ codes.float().T) * scale


def _multiplied_in(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        x_codes, x_scale = quantise_rows(x)
        return (x_codes.to(dtype) @ codes.to(dtype).T).float() * x_scale[:, None] * scale

    return product


def _by_activation_scale(
    scale_of: Callable[[Tensor], Tensor], store: Callable[[Tensor], Tensor] = lambda codes: codes
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Rounds each token by `scale_of(its largest absolute value)`; `store` changes the codes."""

    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        x_scale = scale_of(x.abs().amax(1, keepdim=True))
        x_scale = torch.where(x_scale == 0, 1.0, x_scale)
        return (store((x / x_scale).round()) @ codes.float().T) * x_scale * scale

    return product


def _truncated(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_scale = quantise_rows(x)[1][:, None]
    return ((x / x_scale).trunc() @ codes.float().T) * x_scale * scale


def _per_channel_of_x(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    x_codes, x_scale = _per_column(x)
    return ((x_codes * x_scale) @ codes.float().T) * scale


LINEAR = (
    WrongVersion("accumulates in int8, which overflows", _int8_sum),
    WrongVersion("accumulates in int16, which overflows", _multiplied_in(torch.int16)),
    WrongVersion("multiplies in float16, which rounds sums above 2048 and ends at 65504", _multiplied_in(torch.half)),
    WrongVersion("forgets the scale of the activations", _rescaled(lambda y, sx, sw: y * sw)),
    WrongVersion("forgets the scale of the weights", _rescaled(lambda y, sx, sw: y * sx[:, None])),
    WrongVersion("forgets both scales", _rescaled(lambda y, sx, sw: y)),
    WrongVersion(
        "swaps the scales: a token's scale belongs to a row of the result, an output's to a column",
        _rescaled(lambda y, sx, sw: y * sx * sw[:, None]),
    ),
    WrongVersion("divides by the scales instead of multiplying", _rescaled(lambda y, sx, sw: y / sx[:, None] / sw)),
    WrongVersion("adds the scales instead of multiplying them", _rescaled(lambda y, sx, sw: y * (sx[:, None] + sw))),
    WrongVersion("rounds all tokens by one scale, so a token depends on its neighbours", _one_activation_scale),
    WrongVersion("rounds each channel of x by its own scale, which cannot be moved out of the sum", _per_channel_of_x),
    WrongVersion("leaves the activations in floating point", _not_rounded),
    WrongVersion("truncates the activations instead of rounding", _truncated),
    WrongVersion("divides a token of zeros by its scale of 0", _nan_for_zeros),
    WrongVersion(
        "divides the largest activation by 128, and clamps the code 128 to 127",
        _by_activation_scale(lambda amax: amax / 128, lambda codes: codes.clamp_max(127)),
    ),
    WrongVersion(
        "divides the largest activation by 128, so that the largest code is 128, which int8 stores as -128",
        _by_activation_scale(lambda amax: amax / 128, lambda codes: torch.where(codes == 128, -128.0, codes)),
    ),
    WrongVersion(
        "divides the largest activation by 128, so that the largest code is 128, which is no int8",
        _by_activation_scale(lambda amax: amax / 128),
    ),
    WrongVersion(
        "limits the scales of tokens from below, which is too coarse for tokens of small numbers",
        _by_activation_scale(lambda amax: (amax / 127).clamp_min(1e-5)),
    ),
    WrongVersion(
        "limits the largest activation from below before dividing it by 127: too coarse for tokens of small numbers",
        _by_activation_scale(lambda amax: amax.clamp_min(1e-5) / 127),
    ),
    WrongVersion(
        "limits the scales of tokens from below, if only by a number such as 1e-8: only a token of zeros needs another",
        _by_activation_scale(lambda amax: (amax / 127).clamp_min(1e-8)),
    ),
    WrongVersion(
        "does not transpose the weight",
        lambda x, codes, scale: quantise_rows(x)[0].float() @ codes.float() * quantise_rows(x)[1][:, None] * scale,
    ),
    WrongVersion("returns [out, tokens] instead of [tokens, out]", lambda *args: w8a8_linear(*args).T),
)

# ---------------------------------------------------------------------------------------------------- quantise_groups

Groups = tuple[Tensor, Tensor, Tensor]


def _coded(
    weight: Tensor,
    low: Tensor,
    high: Tensor,
    steps: int = 15,
    round_: Callable[[Tensor], Tensor] = torch.round,
    clamp: tuple[int, int] = (0, 15),
) -> Groups:
    """Codes for given ends of each group (`[out, groups]`)."""
    grouped = weight.unflatten(1, (low.shape[1], -1))
    scale = ((high - low) / steps).half()
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (round_(grouped / scale.float()[..., None]) + zero[..., None]).clamp(*clamp)
    return codes.flatten(1).int().to(torch.uint8), scale, zero.to(torch.uint8)


def _ends(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    grouped = weight.unflatten(1, (-1, group_size))
    return grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)


def _along_outputs(weight: Tensor, group_size: int) -> Groups:
    codes, scale, zero = quantise_groups(weight.T.contiguous(), group_size)
    return codes.T.contiguous(), scale.T.contiguous(), zero.T.contiguous()


def _strided(weight: Tensor, group_size: int) -> Groups:
    order = torch.arange(weight.shape[1]).view(group_size, -1).T.flatten()
    codes, scale, zero = quantise_groups(weight[:, order], group_size)
    return codes[:, order.argsort()], scale, zero


def _whole_rows(weight: Tensor, group_size: int) -> Groups:
    groups = weight.shape[1] // group_size
    low, high = (end.expand(-1, groups) for end in _ends(weight, weight.shape[1]))
    return _coded(weight, low, high)


def _symmetric(weight: Tensor, group_size: int) -> Groups:
    amax = weight.abs().unflatten(1, (-1, group_size)).amax(2)
    return _coded(weight, -amax, amax)


def _without_zero(weight: Tensor, group_size: int) -> Groups:
    grouped = weight.unflatten(1, (-1, group_size))
    return _coded(weight, grouped.amin(2), grouped.amax(2))


def _not_added(weight: Tensor, group_size: int) -> Groups:
    _, scale, zero = quantise_groups(weight, group_size)
    codes = (weight.unflatten(1, (-1, group_size)) / scale.float()[..., None]).round().int()
    return (codes % 256).flatten(1).to(torch.uint8), scale, zero  # negative codes wrap


def _not_added_and_cut(weight: Tensor, group_size: int) -> Groups:
    _, scale, zero = quantise_groups(weight, group_size)
    codes = (weight.unflatten(1, (-1, group_size)) / scale.float()[..., None]).round().clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero


def _from_the_minimum(weight: Tensor, group_size: int) -> Groups:
    _, scale, zero = quantise_groups(weight, group_size)
    grouped, (low, _) = weight.unflatten(1, (-1, group_size)), _ends(weight, group_size)
    codes = ((grouped - low[..., None]) / scale.float()[..., None]).round().clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero


def _scale_of_zero(weight: Tensor, group_size: int) -> Groups:
    codes, scale, zero = quantise_groups(weight, group_size)
    low, high = _ends(weight, group_size)
    return codes, torch.where(high > low, scale, 0.0), zero


def _exact_scale(weight: Tensor, group_size: int) -> Groups:
    low, high = _ends(weight, group_size)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((weight.unflatten(1, (-1, group_size)) / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    stored = scale.half()
    return codes.flatten(1).to(torch.uint8), torch.where(stored > 0, stored, 1.0), zero.to(torch.uint8)


def _zero_not_clamped(weight: Tensor, group_size: int) -> Groups:
    codes, scale, zero = quantise_groups(weight, group_size)
    grouped, zero = weight.unflatten(1, (-1, group_size)), (-_ends(weight, group_size)[0] / scale.float()).round()
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def _changed(change: Callable[[Tensor, Tensor, Tensor], tuple]) -> Callable[[Tensor, int], tuple]:
    return lambda weight, group_size: change(*quantise_groups(weight, group_size))


GROUPS = (
    WrongVersion("groups the outputs of a column instead of the inputs of a row", _along_outputs),
    WrongVersion("puts every n-th weight into a group instead of neighbours", _strided),
    WrongVersion("uses one scale for the whole row", _whole_rows),
    WrongVersion(
        "counts 16 steps; between 16 levels there are 15", lambda w, size: _coded(w, *_ends(w, size), steps=16)
    ),
    WrongVersion("divides by 255, as for 8 bits", lambda w, size: _coded(w, *_ends(w, size), steps=255)),
    WrongVersion("makes the range symmetric, so that some levels lie outside the range of the weights", _symmetric),
    WrongVersion("does not extend the range to contain 0, so that the zero point is clamped", _without_zero),
    WrongVersion("forgets to add the zero point, so that negative codes wrap around", _not_added),
    WrongVersion("forgets to add the zero point, so that negative weights become code 0", _not_added_and_cut),
    WrongVersion(
        "rounds the distance from the minimum, so that 0 need not be a level: round w / s, then add the zero point",
        _from_the_minimum,
    ),
    WrongVersion("keeps a scale of 0 for a group of zeros", _scale_of_zero),
    WrongVersion(
        "stores a scale limited from below; the codes use the exact one",
        _changed(lambda codes, scale, zero: (codes, scale.clamp_min(1e-5), zero)),
    ),
    WrongVersion("computes codes with the exact scale, and stores one rounded to float16", _exact_scale),
    WrongVersion(
        "does not clamp the codes to at most 15: rounding can give 16",
        lambda w, size: _coded(w, *_ends(w, size), clamp=(0, 255)),
    ),
    WrongVersion(
        "does not clamp the codes to 0 … 15",
        lambda w, size: _coded(w, *_ends(w, size), clamp=(-255, 255)),
    ),
    WrongVersion("does not clamp the zero point to 0 … 15", _zero_not_clamped),
    WrongVersion(
        "truncates the codes instead of rounding",
        lambda w, size: _coded(w, *_ends(w, size), round_=torch.trunc),
    ),
    WrongVersion(
        "returns the scale in float32; it is stored in float16",
        _changed(lambda codes, scale, zero: (codes, scale.float(), zero)),
    ),
    WrongVersion("swaps scale and zero point", _changed(lambda codes, scale, zero: (codes, zero, scale))),
    WrongVersion(
        "returns the codes in groups, [out, groups, group_size], instead of [out, in]",
        _changed(lambda codes, scale, zero: (codes.unflatten(1, (scale.shape[1], -1)), scale, zero)),
    ),
)

# ---------------------------------------------------------------------------------------------------------- awq_scale

Searching = Callable[[Tensor, Tensor, Rounding, Sequence[float]], tuple]


def _search(
    output: Callable[[Tensor, Tensor, Rounding, Tensor], Tensor] = lambda w, x, q, s: (x / s) @ q(w * s).T,
    size: Callable[[Tensor], Tensor] = lambda x: x.abs().mean(0),
    scale: Callable[[Tensor, float], Tensor] = lambda size, a: size.pow(a).clamp_min(1e-4),
    exact: Callable[[Tensor, Tensor, Rounding], Tensor] = lambda w, x, q: x @ w.T,
    choose: Callable[..., tuple[float, Tensor]] = min,
) -> Searching:
    """The search with one part replaced."""

    def search(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
        right = exact(weight, x, rounded)
        scales = [(a, scale(size(x), a)) for a in exponents]
        return choose(scales, key=lambda f: (output(weight, x, rounded, f[1]) - right).square().sum().item())

    return search


def _mean_of_tokens(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    a, _ = awq_scale(weight, x, rounded, exponents)
    return a, x.abs().mean(1).pow(a).clamp_min(1e-4)


AWQ = (
    WrongVersion(
        "divides the weights by s and multiplies x: the important channels get fewer levels",
        _search(output=lambda w, x, q, s: (x * s) @ q(w / s).T),
    ),
    WrongVersion(
        "multiplies the weights by s, but does not divide x by it, so that s does not cancel",
        _search(output=lambda w, x, q, s: x @ q(w * s).T),
    ),
    WrongVersion("rounds the weights before scaling them", _search(output=lambda w, x, q, s: (x / s) @ (q(w) * s).T)),
    WrongVersion("keeps the a with the largest error", _search(choose=max)),
    WrongVersion(
        "compares weights instead of outputs",
        _search(output=lambda w, x, q, s: q(w * s) / s, exact=lambda w, x, q: w),
    ),
    WrongVersion(
        "compares with the output of rounded weights, not of the original ones",
        _search(exact=lambda w, x, q: x @ q(w).T),
    ),
    WrongVersion("takes the last exponent without comparing", _search(choose=lambda scales, key: scales[-1])),
    WrongVersion("takes the first exponent without comparing", _search(choose=lambda scales, key: scales[0])),
    WrongVersion(
        "averages x with its signs, so that a channel around 0 seems inactive", _search(size=lambda x: x.mean(0).abs())
    ),
    WrongVersion("uses the largest |x| of a channel instead of the mean", _search(size=lambda x: x.abs().amax(0))),
    WrongVersion("averages over the channels of a token instead of over tokens", _mean_of_tokens),
    WrongVersion(
        "lets s become 0 for a channel that is never active; the limit is 1e-4",
        _search(scale=lambda size, a: size.pow(a)),
    ),
    WrongVersion(
        "limits the mean to at least 1e-4, and not its power",
        _search(scale=lambda size, a: size.clamp_min(1e-4).pow(a)),
    ),
    WrongVersion(
        "multiplies the mean by a instead of raising it to the power a",
        _search(scale=lambda size, a: (size * a).clamp_min(1e-4)),
    ),
    WrongVersion("returns s first and a second", lambda *args: awq_scale(*args)[::-1]),
    WrongVersion("returns 1 / s instead of s", lambda *args: (awq_scale(*args)[0], 1 / awq_scale(*args)[1])),
)

# ----------------------------------------------------------------------------------------------------- split_outliers

Split = tuple[Tensor, Tensor]


def _by_mask(weight: Tensor, kept: Tensor) -> Split:
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)


def _by_size(size: Callable[[Tensor], Tensor], count: Callable[[float], int] = int) -> Callable[[Tensor, float], Split]:
    """Split off the `count(share · numel)` weights with the largest `size(weight)`."""

    def split(weight: Tensor, share: float) -> Split:
        chosen = min(count(share * weight.numel()), weight.numel())
        kept = torch.zeros(weight.numel(), dtype=torch.bool)
        kept[size(weight).flatten().topk(chosen).indices] = True
        return _by_mask(weight, kept.view_as(weight))

    return split


def _per_row(weight: Tensor, share: float) -> Split:
    columns = weight.abs().topk(int(share * weight.shape[1]), dim=1).indices
    return _by_mask(weight, torch.zeros_like(weight, dtype=torch.bool).scatter(1, columns, True))


def _near_the_largest(weight: Tensor, share: float) -> Split:
    return _by_mask(weight, weight.abs() > (1 - share) * weight.abs().max())


def _all_that_tie(weight: Tensor, share: float) -> Split:
    count = int(share * weight.numel())
    limit = weight.abs().flatten().topk(count).values[-1] if count else float("inf")
    return _by_mask(weight, weight.abs() >= limit)


def _none_that_tie(weight: Tensor, share: float) -> Split:
    ranked = weight.abs().flatten().sort(descending=True).values
    return _by_mask(weight, weight.abs() > ranked[min(int(share * weight.numel()), len(ranked) - 1)])


def _clips(weight: Tensor, share: float) -> Split:
    dense, sparse = split_outliers(weight, share)
    limit = dense.abs().max()
    return weight.clamp(-limit, limit), sparse


OUTLIERS = (
    WrongVersion(
        "leaves the outliers in the dense part too, so that they count twice",
        lambda weight, share: (weight.clone(), split_outliers(weight, share)[1]),
    ),
    WrongVersion(
        "removes the outliers and does not store them in the sparse part",
        lambda weight, share: (split_outliers(weight, share)[0], torch.zeros_like(weight)),
    ),
    WrongVersion("chooses by value instead of magnitude, and misses negative outliers", _by_size(lambda w: w)),
    WrongVersion("splits off the smallest weights", _by_size(lambda w: -w.abs())),
    WrongVersion("splits off one weight too many", _by_size(torch.abs, lambda wanted: int(wanted) + 1)),
    WrongVersion("rounds the number of outliers up; int() rounds down", _by_size(torch.abs, math.ceil)),
    WrongVersion("rounds the number of outliers to the nearest; int() rounds down", _by_size(torch.abs, round)),
    WrongVersion("uses share as a percentage", _by_size(torch.abs, lambda wanted: int(wanted / 100))),
    WrongVersion("applies the share to every row instead of to the whole matrix", _per_row),
    WrongVersion("splits off all weights near the largest one instead of a share of the weights", _near_the_largest),
    WrongVersion("splits off all weights that are as large as the last outlier: more than the share", _all_that_tie),
    WrongVersion(
        "splits off only weights larger than the next one: fewer than the share if some are equal", _none_that_tie
    ),
    WrongVersion("clips the outliers in the dense part instead of leaving 0", _clips),
    WrongVersion("swaps the dense and the sparse part", lambda *args: split_outliers(*args)[::-1]),
)
