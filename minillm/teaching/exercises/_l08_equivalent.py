"""Mutants of lesson 8 that give the same answers as the reference, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "the block has one axis: axis 0 is axis -1"
NOT_STORED = "the value of masked lanes is neither stored nor summed"
CAST_ALIKE = "the other operand is float32, so the cast happens in any case"

_STORE_SOFTMAX = "tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)"
_WEIGHT = "tl.load(weight_ptr + column, mask=inside, other=0.0)"
_CODES = "tl.load(codes_ptr + place, mask=inside, other=0)"
_SCALE = "tl.load(scale_ptr + row, mask=row < rows, other=0.0)"
_STORE_CODES = "tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)"


def without_other(load: str) -> str:
    """The edit that leaves out the `other` of a load."""
    return f"[{load} -> {load.rpartition(', other=')[0]})]"


EQUIVALENT = {
    "l08.softmax_kernel": {
        "e = tl.exp(x - tl.max(x, 0)) [0 -> -1]": ONE_AXIS,
        f"{_STORE_SOFTMAX} [0 -> -1]": ONE_AXIS,
    },
    "l08.rms_norm_kernel": {
        f"weight = {_WEIGHT}.to(tl.float32) [{_WEIGHT}.to(tl.float32) -> {_WEIGHT}]": CAST_ALIKE,
        f"weight = {_WEIGHT}.to(tl.float32) {without_other(_WEIGHT)}": NOT_STORED,
        f"weight = {_WEIGHT}.to(tl.float32) [0.0 -> 1.0]": NOT_STORED,
        "mean = tl.sum(x * x, 0) / columns [0 -> -1]": ONE_AXIS,
    },
    "l08.dequantise_kernel": {
        f"codes = {_CODES} {without_other(_CODES)}": NOT_STORED,
        f"codes = {_CODES} [0 -> 1]": NOT_STORED,
        f"codes = {_CODES} [0 -> -1]": NOT_STORED,
        f"scale = {_SCALE} {without_other(_SCALE)}": NOT_STORED,
        f"scale = {_SCALE} [0.0 -> 1.0]": NOT_STORED,
        f"{_STORE_CODES} [codes.to(tl.float32) -> codes]": CAST_ALIKE,
        f"{_STORE_CODES} [scale.to(tl.float32) -> scale]": CAST_ALIKE,
    },
}
