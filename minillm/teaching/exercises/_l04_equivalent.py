"""Mutants of lesson 4's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

NEVER_BEYOND = "bfloat16 changes a scale by 0.2% at most, so 127 becomes 127.25 at most, which rounds to 127"
CAST_ALIKE = "an operation of float32 with a 16-bit type casts to float32 anyway"
TWO_AXES = "q has two axes, so the second is the last"

_ROUNDED = "(x / scale.float()[..., None]).round()"
_SYMMETRIC = f"codes = {_ROUNDED}.clamp(-levels, levels)"
_PER_CHANNEL = "codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp(0, 15)"
_BOUND = "return q.abs().sum(-1)[:, None] * scale[None, :] / (2 * q.shape[-1] ** 0.5)"

EQUIVALENT = {
    "l04.quantise_symmetric": {
        f"{_SYMMETRIC} [{_ROUNDED}.clamp(-levels, levels) -> {_ROUNDED}]": NEVER_BEYOND,
        f"{_SYMMETRIC} [scale.float() -> scale]": CAST_ALIKE,
    },
    "l04.quantise_per_channel": {
        "scale = ((high - zero.float()) / 15).half() [zero.float() -> zero]": CAST_ALIKE,
        f"{_PER_CHANNEL} [scale.float() -> scale]": CAST_ALIKE,
        f"{_PER_CHANNEL} [zero.float() -> zero]": CAST_ALIKE,
    },
    "l04.score_error_bound": {
        f"{_BOUND} [-1 -> 1]": TWO_AXES,
        f"{_BOUND} [-1 -> 1] #2": TWO_AXES,
    },
}
