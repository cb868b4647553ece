"""Lesson 05, planted mistakes, each one edit of the reference, so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l05_reference import (
    awq_scale,
    quantise_groups,
    quantise_rows,
    split_outliers,
    w8a8_linear,
)
from minillm.teaching.source import wrong_versions

ROWS = wrong_versions(
    quantise_rows,
    {
        "uses the smallest absolute weight of a row as its largest, without clamping the codes": (
            "amax(1)",
            "amin(1)",
        ),
        "uses the largest weight without absolute values, so that codes wrap around": ("weight.abs()", "weight"),
        "gives rows of zeros the scale 0, and all others the scale 1: the condition is inverted": (
            "amax == 0",
            "amax != 0",
        ),
        "treats a row of very small weights as a row of zeros": ("amax == 0", "amax < 5e-5"),
        "gives a row of zeros a scale other than 1": ("0, 1.0", "0, 2.0"),
        "multiplies the largest weight by 127 instead of dividing": ("amax / 127", "amax * 127"),
        "divides 127 by the largest weight: the scale is inverted": ("amax / 127", "127 / amax"),
        "divides by 128, so that the largest code is 128, which int8 stores as -128": ("/ 127", "/ 128"),
        "divides by 126, and so leaves out the codes 127 and -127": ("/ 127", "/ 126"),
        "rounds the weights without dividing them by the scale": ("(weight / scale[:, None])", "weight"),
        "divides the scale by the weights: the quotient is inverted": (
            "weight / scale[:, None]",
            "scale[:, None] / weight",
        ),
    },
)

LINEAR = wrong_versions(
    w8a8_linear,
    {
        "divides by the scales of the weights, and multiplies by those of the tokens": ("] * scale", "] / scale"),
        "divides by the scales of the tokens, and multiplies by those of the weights": (
            "* x_scale[:, None]",
            "/ x_scale[:, None]",
        ),
        "multiplies the scales, and leaves out the product of the codes": (
            "(x_codes.float() @ codes.float().T) * ",
            "",
        ),
    },
)

GROUPS = wrong_versions(
    quantise_groups,
    {
        "swaps the smallest and the largest weight of a group": ("low, high =", "high, low ="),
        "starts the range at the smallest weight, even if that is above 0": (".clamp_max(0)", ""),
        "ends the range at the largest weight, even if that is below 0": (".clamp_min(0)", ""),
        "extends every range down to -1 at least; 0 is enough": ("clamp_max(0)", "clamp_max(-1)"),
        "extends every range up to 1 at least; 0 is enough": ("clamp_min(0)", "clamp_min(1)"),
        "uses the largest weight of a group as its smallest": ("amin(2)", "amax(2)"),
        "uses the smallest weight of a group as its largest": ("amax(2)", "amin(2)"),
        "multiplies the range by 15 instead of dividing": ("/ 15", "* 15"),
        "forgets to divide the range by 15": (" / 15", ""),
        "divides 15 by the range: the scale is inverted": ("(high - low) / 15", "15 / (high - low)"),
        "adds the two ends; the range is their difference": ("high - low", "high + low"),
        "uses the largest weight as the range, without subtracting the smallest": ("high - low", "high"),
        "subtracts the largest from the smallest, so that no range is above 0": ("high - low", "low - high"),
        "counts 14 steps; between 16 levels there are 15": ("/ 15", "/ 14"),
        "gives the scale 1 to groups of weights, and 0 to groups of zeros": (
            "torch.where(scale > 0, scale, 1.0)",
            "torch.where(scale > 0, 1.0, scale)",
        ),
        "treats scales up to 1 as zero": ("scale > 0", "scale > 1"),
        "tests the range instead of the scale, which float16 can make 0": ("scale > 0", "high > low"),
        "gives a group of zeros a scale other than 1": ("scale, 1.0", "scale, 2.0"),
        "never gives the zero point 0 (its lower limit is 1)": (
            "scale.float()).round().clamp(0, 15)",
            "scale.float()).round().clamp(1, 15)",
        ),
        "lets the zero point rise to 16, which four bits do not hold": (
            "scale.float()).round().clamp(0, 15)",
            "scale.float()).round().clamp(0, 16)",
        ),
        "never gives the zero point 15 (its upper limit is 14)": (
            "scale.float()).round().clamp(0, 15)",
            "scale.float()).round().clamp(0, 14)",
        ),
        "does not round the zero point to nearest": ("scale.float()).round().clamp", "scale.float()).clamp"),
        "multiplies by the scale to find the zero point, instead of dividing": ("-low / scale", "-low * scale"),
        "uses the smallest weight as the zero point, without dividing by the scale": (
            "(-low / scale.float())",
            "(-low)",
        ),
        "gives every group the zero point 0: check its sign, its quotient and its limits": ("-low", "low"),
        "never gives the code 0 (the lower limit is 1)": ("None]).clamp(0, 15)", "None]).clamp(1, 15)"),
        "never gives the code 15 (the upper limit is 14)": ("None]).clamp(0, 15)", "None]).clamp(0, 14)"),
        "subtracts the zero point instead of adding it": ("+ zero[", "- zero["),
        "adds the zero point to weights that are not rounded": (
            "(grouped / scale.float()[..., None]).round()",
            "(grouped / scale.float()[..., None])",
        ),
        "multiplies the weights by the scale instead of dividing": ("grouped / scale", "grouped * scale"),
        "rounds the weights without dividing them by the scale": ("(grouped / scale.float()[..., None])", "grouped"),
        "divides the scale by the weights: the quotient is inverted": (
            "grouped / scale.float()[..., None]",
            "scale.float()[..., None] / grouped",
        ),
    },
)

AWQ = wrong_versions(
    awq_scale,
    {
        "averages x with its signs, so that a mean below 0 has no power a (NaN)": ("x.abs()", "x"),
        "never accepts a candidate: it returns the initial values": ("error < least", "error > least"),
        "starts with a least error that all candidates may exceed; start with infinity": ('float("inf")', "100.0"),
        "does not raise the mean to the power a, so that all candidates are alike": (".pow(a)", ""),
        "limits s to at least 2e-4; the limit is 1e-4": ("1e-4", "2e-4"),
        "adds errors with their signs, so that they cancel out; add their squares": (".square()", ""),
        "compares the largest errors; it must be the sums of the squares": (".square().sum()", ".abs().amax()"),
        "does not subtract the exact output, so that small outputs win instead of small errors": ("- exact", "+ exact"),
        "divides s by x instead of x by s": ("(x / s)", "(s / x)"),
    },
)

OUTLIERS = wrong_versions(
    split_outliers,
    {
        "finds no outliers, whatever the share is": ("int(share * weight.numel())", "0"),
        "treats all weights as outliers, whatever the share is": ("int(share * weight.numel())", "weight.numel()"),
        "uses indices within a row (topk without flatten) as indices into the whole matrix": (".flatten()", ""),
        "leaves all weights in the sparse part": ("weight.masked_fill(~kept, 0.0)", "weight"),
        "puts 1 in the dense part where the outliers were, instead of 0": ("(kept, 0.0)", "(kept, 1.0)"),
        "puts 1 instead of 0 in the sparse part where no outlier is": ("(~kept, 0.0)", "(~kept, 1.0)"),
        "returns the dense part twice": ("~kept", "kept"),
    },
)
