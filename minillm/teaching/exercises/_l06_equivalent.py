"""Spoilt references of lesson 6 that answer as the reference does, and why (see `minillm.teaching.mutants`)."""

EQUIVALENT = {
    "l06.own_block": {
        "for pool in (keys, values): [(keys, values) -> (values, keys)]": "both are copied, in either order",
    },
}
