"""Lesson 04, planted mistakes, each one edit of the reference, so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l04_reference import (
    cache_bytes,
    pack_int4,
    quantise_per_channel,
    quantise_symmetric,
    score_error_bound,
    unpack_int4,
)
from minillm.teaching.source import wrong_versions

SYMMETRIC = wrong_versions(
    quantise_symmetric,
    {
        "gives rows of zeros the scale 0, and all others the scale 1: the condition is inverted": (
            "amax == 0",
            "amax != 0",
        ),
        "divides levels by the largest number: the scale is inverted": ("amax / levels", "levels / amax"),
        "multiplies the largest number by levels instead of dividing": ("amax / levels", "amax * levels"),
        "rounds x without dividing it by the scale": ("(x / scale.float()[..., None])", "x"),
        "divides the scale by x instead of x by the scale": (
            "x / scale.float()[..., None]",
            "scale.float()[..., None] / x",
        ),
        "treats a row of very small numbers as a row of zeros": ("amax == 0", "amax < 5e-6"),
        "gives a row of zeros a scale other than 1": ("0, 1.0", "0, 2.0"),
        "gives the scale 1 to every row that has a zero, not only to rows of zeros": (
            "amax == 0",
            "(x == 0).any(-1)",
        ),
        "never gives the largest code: the limits are one level too narrow": (
            "clamp(-levels, levels)",
            "clamp(1 - levels, levels - 1)",
        ),
        "clamps all negative codes to 0: the lower limit is -levels": ("clamp(-levels", "clamp(0"),
    },
)

PACK = wrong_versions(
    pack_int4,
    {
        "sets the lowest four bits of every code (| 15) instead of keeping them (& 15)": ("& 15", "| 15"),
        "masks with 16, which is one bit; four bits are 15": ("& 15", "& 16"),
        "loses the lowest bit of each code (& 14); four bits are 15": ("& 15", "& 14"),
        "shifts by five bits instead of four": ("<< 4", "<< 5"),
        "uses the even codes for both halves": ("1::2", "::2"),
        "combines the halves by &, which keeps only bits that are set in both": ("| (nibbles", "& (nibbles"),
    },
)

UNPACK = wrong_versions(
    unpack_int4,
    {
        "sets the lowest four bits of every byte (| 15) instead of keeping them (& 15)": ("packed & 15", "packed | 15"),
        "masks the low half with 16, which is one bit; four bits are 15": ("& 15", "& 16"),
        "loses the lowest bit of the low half (& 14); four bits are 15": ("& 15", "& 14"),
        "shifts the high half down by five bits instead of four": (">> 4", ">> 5"),
        "shifts the high half down by three bits instead of four": (">> 4", ">> 3"),
        "shifts the high half up instead of down": ("packed >> 4", "packed << 4"),
        "does not shift the high half down": ("packed >> 4", "packed"),
        "adds 16 to the codes above 7 instead of subtracting 16": ("nibbles - 16", "nibbles + 16"),
        "subtracts 17 from the codes above 7 instead of 16": ("nibbles - 16", "nibbles - 17"),
        "subtracts the codes above 7 from 16, so that they lose their sign": ("nibbles - 16", "16 - nibbles"),
        "gives a sign to the high halves, and not to the low ones": (
            "nibbles > 7",
            "(nibbles > 7) & (torch.arange(nibbles.shape[-1]) % 2 == 1)",
        ),
        "gives a sign to the low halves, and not to the high ones": (
            "nibbles > 7",
            "(nibbles > 7) & (torch.arange(nibbles.shape[-1]) % 2 == 0)",
        ),
        "puts all low halves before all high halves": ("dim=-1", "dim=0"),
        "computes in uint8, which has no negative numbers: cast to int8 first": (".to(torch.int8)", ""),
    },
)

PER_CHANNEL = wrong_versions(
    quantise_per_channel,
    {
        "swaps minimum and maximum": (
            "grouped.amin(1), grouped.amax(1)",
            "grouped.amax(1), grouped.amin(1)",
        ),
        "uses the maximum for both limits": ("grouped.amin(1)", "grouped.amax(1)"),
        "uses the minimum for both limits": ("grouped.amax(1)", "grouped.amin(1)"),
        "multiplies the range by 15 instead of dividing": ("/ 15", "* 15"),
        "forgets to divide the range by 15": (" / 15", ""),
        "divides 15 by the range: the scale is inverted": (
            "(high - zero.float()) / 15",
            "15 / (high - zero.float())",
        ),
        "adds the zero point to the maximum; the range is their difference": ("high - zero", "high + zero"),
        "uses the maximum as the range, without subtracting the minimum": ("high - zero.float()", "high"),
        "subtracts the maximum from the minimum, so that no range is above 0": (
            "high - zero.float()",
            "zero.float() - high",
        ),
        "computes the scale from the exact minimum instead of the zero point as it is stored": (
            "high - zero.float()",
            "high - low",
        ),
        "divides by 14: sixteen codes have fifteen steps between them": ("/ 15", "/ 14"),
        "gives the scale 1 to channels that change, and 0 to those that do not": (
            "torch.where(scale > 0, scale, 1.0)",
            "torch.where(scale > 0, 1.0, scale)",
        ),
        "treats scales up to 1 as zero": ("scale > 0", "scale > 1"),
        "tests the range instead of the scale, which float16 can make 0": ("scale > 0", "high > low"),
        "lets a scale be negative, where float16 rounds the zero point above the maximum": (
            "torch.where(scale > 0, scale, 1.0)",
            "torch.where(scale == 0, 1.0, scale)",
        ),
        "gives a channel that never changes a scale other than 1": ("scale, 1.0", "scale, 2.0"),
        "never gives the code 0 (the lower limit is 1)": ("clamp(0, 15)", "clamp(1, 15)"),
        "lets codes fall to -1, which uint8 keeps as 255": ("clamp(0, 15)", "clamp(-1, 15)"),
        "lets codes rise to 16, which four bits do not hold": ("clamp(0, 15)", "clamp(0, 16)"),
        "never gives the code 15 (the upper limit is 14)": ("clamp(0, 15)", "clamp(0, 14)"),
        "multiplies by the scale instead of dividing": (
            "(grouped - zero.float()[:, None]) / scale",
            "(grouped - zero.float()[:, None]) * scale",
        ),
        "subtracts the zero point and does not divide by the scale": (
            "((grouped - zero.float()[:, None]) / scale.float()[:, None])",
            "(grouped - zero.float()[:, None])",
        ),
        "divides the scale by the distance from the zero point: the quotient is inverted": (
            "((grouped - zero.float()[:, None]) / scale.float()[:, None])",
            "(scale.float()[:, None] / (grouped - zero.float()[:, None]))",
        ),
        "adds the zero point instead of subtracting it": (
            "grouped - zero.float()[:, None]",
            "grouped + zero.float()[:, None]",
        ),
        "subtracts x from the zero point, so that every distance is negative": (
            "grouped - zero.float()[:, None]",
            "zero.float()[:, None] - grouped",
        ),
    },
)

BYTES = wrong_versions(
    cache_bytes,
    {
        "subtracts the bytes of the groups instead of adding them": (" + numbers", " - numbers"),
        "multiplies the bits by 8 instead of dividing: a byte has 8 bits": ("bits // 8", "bits * 8"),
        "divides the bits by 8 before it multiplies: 4 // 8 is 0": ("numbers * bits // 8", "numbers * (bits // 8)"),
        "leaves out the width of a head": (" * config.head_dim", ""),
        "leaves out layers, heads, keys and values: it counts one head": (
            "2 * config.num_layers * config.num_kv_heads * config.head_dim",
            "config.head_dim",
        ),
        "counts the keys of one layer: it leaves out the layers and the values": (
            "2 * config.num_layers * config.num_kv_heads * config.head_dim",
            "config.num_kv_heads * config.head_dim",
        ),
        "counts one bit for each code, whatever bits is": ("numbers * bits // 8", "numbers // 8"),
        "counts the bits of one code, and not of all": ("numbers * bits // 8", "bits // 8"),
        "counts three vectors of each token; there are a key and a value": ("2 * config", "3 * config"),
        "multiplies by group_size instead of dividing": (
            "numbers // group_size",
            "numbers * group_size",
        ),
        "uses group_size in place of group_bytes, so that every number costs one byte more": (
            "* group_bytes",
            "* group_size",
        ),
    },
)

BOUND = wrong_versions(
    score_error_bound,
    {
        "multiplies by 2 √d instead of dividing": ("/ (2", "* (2"),
        "forgets to divide by 2 √d": (" / (2 * q.shape[-1] ** 0.5)", ""),
        "divides by the scales of the keys; a larger scale means a larger error": (
            "* scale[None, :]",
            "/ scale[None, :]",
        ),
        "divides by 3 √d instead of 2 √d": ("(2 *", "(3 *"),
        "uses the number of queries as d": ("q.shape[-1]", "q.shape[0]"),
        "uses half of d instead of its square root (* 0.5 instead of ** 0.5)": ("** 0.5", "* 0.5"),
    },
)
