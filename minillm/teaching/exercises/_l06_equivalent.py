"""Mutants of lesson 6's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

EQUIVALENT = {
    "l06.own_block": {
        "for pool in (keys, values): [(keys, values) -> (values, keys)]": "both are copied, in either order",
    },
}
