"""Mutants of lesson 13's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

SAME_AXES = "the mean over two axes does not depend on their order"
LAST = "the scores have two axes, and sorting takes the last one without being asked"
STABLE = "on a CPU, PyTorch sorts equal values stably without being asked"
FIRST_VECTORS = "the additional vectors of a full U come last, and are cut off"
NORM = "a norm does not depend on the sign"

_OF_QUERIES = "of_queries = queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))"
_SORT = "(of_queries * of_keys).argsort(dim=1, descending=True, stable=True)"
_SVD = "basis = torch.linalg.svd(weight, full_matrices=False).U[:, :rank]"
_ERROR = "errors.append(float((rotation @ matrix - matrix @ rotation).norm() / matrix.norm()))"

EQUIVALENT = {
    "l13.kept_channels": {
        f"{_OF_QUERIES} [(0, 2) -> (2, 0)]": SAME_AXES,
        f"best = {_SORT}[:, :count] [{_SORT} -> {_SORT.replace('dim=1, ', '')}]": LAST,
        f"best = {_SORT}[:, :count] [{_SORT} -> {_SORT.replace(', stable=True', '')}]": STABLE,
        f"best = {_SORT}[:, :count] [True -> False] #2": STABLE,
        "return best.sort(dim=1).values [best.sort(dim=1) -> best.sort()]": LAST,
    },
    "l13.low_rank": {
        f"{_SVD} [torch.linalg.svd(weight, full_matrices=False) -> torch.linalg.svd(weight)]": FIRST_VECTORS,
        f"{_SVD} [False -> True]": FIRST_VECTORS,
    },
    "l13.commutation_error": {
        f"{_ERROR} [rotation @ matrix - matrix @ rotation -> matrix @ rotation - rotation @ matrix]": NORM,
    },
}
