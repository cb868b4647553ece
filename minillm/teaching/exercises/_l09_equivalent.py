"""Spoilt references of lesson 9 that answer as the reference does, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "a block of one axis: the first is the last"
NOT_STORED = "the heads that pad a group are not stored"
FORGOTTEN = "the first block multiplies what was there before by exp(-inf), which is 0"
MASKED = "the scores of rows that do not exist become -inf, whatever was loaded"
NO_WEIGHT = "rows that do not exist have the weight 0"
LOADS_ZERO = "the interpreter loads 0 where nothing is named; what a GPU loads is not defined"
CAST_ALIKE = "with float32 it is computed in float32, so the cast is made in any case"
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
