"""Mutants of lesson 2's references that return the same answers, and why (see `minillm.teaching.mutants`)."""

SAME_ROWS = "keys and values have the same number of rows"

EQUIVALENT = {
    "l02.append_kv": {
        "end = past + new_k.shape[0] [new_k -> new_v]": SAME_ROWS,
        "if end > cache_k.shape[0]: [cache_k -> cache_v]": SAME_ROWS,
    },
}
