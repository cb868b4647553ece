"""Mutants of lesson 17's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

EQUIVALENT = {
    "l17.tiled_lse": {
        "for first in range(0, len(y), tile): [range(0, len(y), tile) -> range(0, len(y) + 1, tile)]": (
            "a tile without rows has the log-sum-exp -inf, which adds nothing"
        ),
        "lse = torch.logaddexp(lse, part) [torch.logaddexp(lse, part) -> torch.logaddexp(part, lse)]": (
            "the order of the two does not matter"
        ),
    },
    "l17.backward_in_chunks": {
        "past = kept[:start].detach().requires_grad_() [kept[:start].detach() -> kept[:start]]": (
            "kept has no graph, so there is nothing to detach from"
        ),
    },
    "l17.centroid_step": {
        "for index in nearest.unique(): [nearest.unique() -> nearest]": (
            "moves the same centroid to the same place once per point"
        ),
    },
}
