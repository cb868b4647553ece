"""Spoilt references of lesson 9 that answer as the reference does, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "a block of one axis: the first is the last"

EQUIVALENT = {
    "l09.merge_kernel": {
        "weight = tl.exp(lse - tl.max(lse, 0)) [0 -> -1]": ONE_AXIS,
        "out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0) [0 -> -1] #2": ONE_AXIS,
    },
}
