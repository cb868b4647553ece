"""Mutants of lesson 9 that give the same answers as the reference, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "the block has one axis: axis 0 is axis -1"
NOT_STORED = "the padding heads of a group are not stored"
FORGOTTEN = "the first block multiplies the initial value by exp(-inf), which is 0"
MASKED = "the scores of rows that do not exist become -inf, whatever their keys are"
NO_WEIGHT = "rows that do not exist have the weight 0"
LOADS_ZERO = "without `other` the interpreter loads 0 into masked lanes; on a GPU the value is undefined"
CAST_ALIKE = "the other operand is float32, so the cast happens in any case"
IS_FLOAT32 = "queries are float32 here"

_Q = "tl.load(q_ptr + q_at, mask=is_head, other=0.0)"
_K = "tl.load(k_ptr + at, mask=exists[:, None], other=0.0)"
_V = "tl.load(v_ptr + at, mask=exists[:, None], other=0.0)"


def _without_other(load: str) -> str:
    return f"[{load} -> {load.rpartition(', other=')[0]})]"


def _without_cast(load: str) -> str:
    return f"[{load}.to(tl.float32) -> {load}]"


EQUIVALENT = {
    "l09.decode_kernel": {
        f"q = {_Q}.to(tl.float32) * scale {_without_cast(_Q)}": IS_FLOAT32,
        f"q = {_Q}.to(tl.float32) * scale {_without_other(_Q)}": NOT_STORED,
        f"q = {_Q}.to(tl.float32) * scale [0.0 -> 1.0]": NOT_STORED,
        "total = tl.full((PAD_GROUP,), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        "out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        f"k = {_K}.to(tl.float32) {_without_cast(_K)}": CAST_ALIKE,
        f"k = {_K}.to(tl.float32) {_without_other(_K)}": MASKED,
        f"k = {_K}.to(tl.float32) [0.0 -> 1.0]": MASKED,
        f"v = {_V}.to(tl.float32) {_without_cast(_V)}": CAST_ALIKE,
        f"v = {_V}.to(tl.float32) {_without_other(_V)}": LOADS_ZERO,
        f"v = {_V}.to(tl.float32) [0.0 -> 1.0]": NO_WEIGHT,
    },
    "l09.merge_kernel": {
        "weight = tl.exp(lse - tl.max(lse, 0)) [0 -> -1]": ONE_AXIS,
        "out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0) [0 -> -1] #2": ONE_AXIS,
    },
}
