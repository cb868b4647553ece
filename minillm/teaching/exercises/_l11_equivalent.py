"""Mutants of lesson 11's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

EMPTY = "the slice from token -1 on ends before it begins: it is empty and matches nothing"
SYMMETRIC = "the minimum of p and q does not depend on their order"
MATRIX = "logits are a matrix, whose last dimension is dimension 1"

_STARTS = "for start in range(len(token_ids) - n - 1, -1, -1):"
_P_Q = "(target_logits.softmax(-1), draft_logits.softmax(-1))"

EQUIVALENT = {
    "l11.ngram_propose": {
        f"{_STARTS} [range(len(token_ids) - n - 1, -1, -1) -> range(len(token_ids) - n - 1, -1 - 1, -1)]": EMPTY,
        f"{_STARTS} [-1 -> -2]": EMPTY,
    },
    "l11.distil_loss": {
        f"p, q = {_P_Q} [{_P_Q} -> (draft_logits.softmax(-1), target_logits.softmax(-1))]": SYMMETRIC,
        f"p, q = {_P_Q} [-1 -> 1]": MATRIX,
        f"p, q = {_P_Q} [-1 -> 1] #2": MATRIX,
        "return -torch.minimum(p, q).sum(-1).log().mean() [-1 -> 1]": MATRIX,
    },
}
