"""Mutants of lesson 15 that give the same answers as the reference, and why (see `minillm.teaching.mutants`)."""

_SUM = "fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)"
_SWAPPED = "fma(splat(x[k]), load(panels, (panel * columns + k) * LANES), sums)"

EQUIVALENT = {
    "l15.panel_product": {
        f"sums = {_SUM} [{_SUM} -> {_SWAPPED}]": "the factors of a product may be swapped",
    },
}
