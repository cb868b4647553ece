"""Mutants of lesson 5's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

NEVER_BELOW = "the smallest weight of a group counts as 0 at most, so the zero point is never below 0"
CAST_ALIKE = "an operation of float32 with float16 casts to float32 anyway"
REPLACED = "the first exponent has an error below infinity, so it replaces the initial value"
SAME_ORDER = "errors are only compared with each other, and all change in the same way"

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
        f"{_ERROR} [{_SQUARES}.sum().item() -> {_SQUARES}.sum()]": "a tensor of one number compares as the number does",
        f"{_ERROR} [{_SQUARES}.sum -> {_SQUARES}.mean]": SAME_ORDER,
        f"{_ERROR} [x / s @ rounded(weight * s).T - exact -> exact - x / s @ rounded(weight * s).T]": SAME_ORDER,
        "if error < least: [error < least -> error <= least]": "of two exponents with the same error, either is right",
    },
}
