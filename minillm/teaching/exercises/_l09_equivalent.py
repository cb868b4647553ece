"""Mutants of lesson 9 that give the same answers as the reference, and why (see `minillm.teaching.mutants`)."""

from minillm.teaching.exercises._l08_equivalent import CAST_ALIKE, ONE_AXIS, without_other

NOTHING_SUMMED = "a part without keys: its numerator is 0 and its lse -inf, whatever positive number the sum is"
NOT_STORED = "the padding heads of a group are not stored"
FORGOTTEN = "the first block multiplies the initial value by exp(-inf), which is 0"
MASKED = "the scores of rows that do not exist become -inf, whatever their keys are"
NO_WEIGHT = "rows that do not exist have the weight 0"
IS_FLOAT32 = "queries are float32 here"

_Q = "tl.load(q_ptr + q_at, mask=is_head, other=0.0)"
_K = "tl.load(k_ptr + at, mask=exists[:, None], other=0.0)"
_V = "tl.load(v_ptr + at, mask=exists[:, None], other=0.0)"
_K8 = "tl.load(k_ptr + at, mask=exists[:, None], other=0)"
_V8 = "tl.load(v_ptr + at, mask=exists[:, None], other=0)"
_K_SCALE = "tl.load(k_scale_ptr + slot, mask=exists, other=0.0)"
_V_SCALE = "tl.load(v_scale_ptr + slot, mask=exists, other=0.0)"


def _without_cast(load: str) -> str:
    return f"[{load}.to(tl.float32) -> {load}]"


def _loaded(name: str, load: str, others: tuple[str, ...], why: str, undefined: bool = True) -> dict[str, str]:
    """Mutants of `name = <load>.to(tl.float32)`: without the cast, with another `other`, and if masked lanes may be
    `undefined` (NaN) without any."""
    line = f"{name} = {load}.to(tl.float32)"
    alike = {f"{line} {_without_cast(load)}": CAST_ALIKE}
    if undefined:
        alike[f"{line} {without_other(load)}"] = why
    return alike | {f"{line} [{other}]": why for other in others}


_FLOAT, _BYTE = ("0.0 -> 1.0",), ("0 -> 1", "0 -> -1")
EQUIVALENT = {
    "l09.decode_kernel": {
        f"q = {_Q}.to(tl.float32) * scale {_without_cast(_Q)}": IS_FLOAT32,
        f"q = {_Q}.to(tl.float32) * scale {without_other(_Q)}": NOT_STORED,
        f"q = {_Q}.to(tl.float32) * scale [0.0 -> 1.0]": NOT_STORED,
        "total = tl.full((PAD_GROUP,), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        "out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        **_loaded("k", _K, _FLOAT, MASKED),
        **_loaded("v", _V, _FLOAT, NO_WEIGHT, undefined=False),
    },
    "l09.split_kernel": {
        "total = tl.full((PAD_GROUP,), 0.0, tl.float32) [0.0 -> 1.0]": f"{FORGOTTEN}; {NOTHING_SUMMED}",
        "divisor = tl.where(total == 0.0, 1.0, total) [1.0 -> 2.0]": NOTHING_SUMMED,
        **_loaded("k", _K, _FLOAT, MASKED),
        **_loaded("v", _V, _FLOAT, NO_WEIGHT, undefined=False),
    },
    "l09.int8_kernel": {
        "total = tl.full((PAD_GROUP,), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        "out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32) [0.0 -> 1.0]": FORGOTTEN,
        **_loaded("k", _K8, _BYTE, MASKED),
        **_loaded("v", _V8, _BYTE, NO_WEIGHT),
        **_loaded("k_scale", _K_SCALE, _FLOAT, MASKED),
        **_loaded("v_scale", _V_SCALE, _FLOAT, NO_WEIGHT, undefined=False),
    },
    "l09.merge_kernel": {
        "weight = tl.exp(lse - tl.max(lse, 0)) [0 -> -1]": ONE_AXIS,
        "out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0) [0 -> -1] #2": ONE_AXIS,
    },
}
