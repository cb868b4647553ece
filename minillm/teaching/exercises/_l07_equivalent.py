"""Mutants of lesson 7's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

SAME_LENGTH = "both lists have one entry per request"

_BOTH = "range(len(wanted) - 1, -1, -1), wanted"
_LOOP = f"for behind, tokens in zip({_BOTH}, strict=True):"

EQUIVALENT = {
    "l07.share_budget": {
        f"{_LOOP} [zip({_BOTH}, strict=True) -> zip({_BOTH})]": SAME_LENGTH,
        f"{_LOOP} [True -> False]": SAME_LENGTH,
    },
}
