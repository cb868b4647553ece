"""Mutants of lesson 12's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

ALL_STAY = "with as many blocks as may stay, both branches keep all of them"
ITERATED = "the indices are only counted and iterated, which a range allows, too"
SCALED = "the mean is the sum over a number that is the same for all blocks, so their order does not change"
STABLE = "on a CPU, PyTorch sorts equal values stably without being asked"

_KEPT = "kept = [0, *range(newest - most + 1, newest)] if newest > most else list(range(newest))"
_BLOCKS = "F.pad(of_tokens, (0, count * block_size - len(of_tokens))).view(count, block_size)"
_SORT = "of_blocks[:count - window].argsort(descending=True"
_BEST = f"best = {_SORT}, stable=True)[:most - window]"

EQUIVALENT = {
    "l12.sink_view": {
        f"{_KEPT} [newest > most -> newest >= most]": ALL_STAY,
        f"{_KEPT} [list(range(newest)) -> range(newest)]": ITERATED,
    },
    "l12.snapkv_blocks": {
        "if count <= most: [count <= most -> count < most]": ALL_STAY,
        "of_tokens = attention.sum(0) [attention.sum -> attention.mean]": SCALED,
        f"of_blocks = {_BLOCKS}.sum(1) [{_BLOCKS}.sum -> {_BLOCKS}.mean]": SCALED,
        f"{_BEST} [{_SORT}, stable=True) -> {_SORT})]": STABLE,
        f"{_BEST} [True -> False] #2": STABLE,
    },
}
