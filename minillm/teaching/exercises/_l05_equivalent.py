"""Spoilt references of lesson 5 that answer as the reference does, and why (see `minillm.teaching.mutants`)."""

NEVER_BELOW = "the smallest weight of a group counts as 0 at most, so the zero point is never below 0"
CAST_ALIKE = "float32 with float16 is computed in float32, so the cast is made in any case"
REPLACED = "the first exponent has an error below infinity, and replaces what is there at the start"
SAME_ORDER = "errors are only compared with each other, and all change alike"

_ZERO = "zero = (-low / scale.float()).round().clamp(0, 15)"
_CODES = "codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)"
_START = "best, least = ((0.0, torch.ones_like(mean)), float('inf'))"
_SQUARES = "(x / s @ rounded(weight * s).T - exact).square()"
_ERROR = f"error = {_SQUARES}.sum().item()"

EQUIVALENT = {
    "l05.quantise_groups": {
        f"{_ZERO} [0 -> -1]": NEVER_BELOW,
        f"{_ZERO} [scale.float() -> scale]": CAST_ALIKE,
        f"{_CODES} [scale.float() -> scale]": CAST_ALIKE,
    },
    "l05.awq_scale": {
        f"{_START} [(0.0, torch.ones_like(mean)) -> (torch.ones_like(mean), 0.0)]": REPLACED,
        f"{_START} [0.0 -> 1.0]": REPLACED,
        f"{_ERROR} [{_SQUARES}.sum().item() -> {_SQUARES}.sum()]": "a tensor of one number is compared alike",
        f"{_ERROR} [{_SQUARES}.sum -> {_SQUARES}.mean]": SAME_ORDER,
        f"{_ERROR} [x / s @ rounded(weight * s).T - exact -> exact - x / s @ rounded(weight * s).T]": SAME_ORDER,
        "if error < least: [error < least -> error <= least]": "of two exponents with one error either is the least",
    },
}
