"""Mutants of lesson 1's references that return the same answers, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "the tensor has one axis, so the first is the last"
ALL_KEPT = "all tokens are kept either way: no sum before a token reaches 1"
FEW_TOKENS = "with so few numbers every sort is stable, and float32 sums are exact enough"

EQUIVALENT = {
    "l01.sample_next": {
        "probs = torch.softmax(logits / temperature, dim=-1) [-1 -> 0]": ONE_AXIS,
        "probs = torch.softmax(logits / temperature, dim=-1) [1 -> 0]": ONE_AXIS,
        "before = ranked.cumsum(0) - ranked [0 -> -1]": ONE_AXIS,
        "cumulative = probs.double().cumsum(0) [0 -> -1]": ONE_AXIS,
        "if 0 < top_k < len(probs): [0 < top_k < len(probs) -> 0 < top_k <= len(probs)]": (
            "top_k = len(probs) keeps all tokens"
        ),
        "if top_p < 1: [-> if True:]": ALL_KEPT,
        "if top_p < 1: [top_p < 1 -> top_p <= 1]": ALL_KEPT,
        "if top_p < 1: [1 -> 2]": ALL_KEPT,
        "ranked, order = probs.sort(descending=True, stable=True) "
        "[probs.sort(descending=True, stable=True) -> probs.sort(descending=True)]": FEW_TOKENS,
        "ranked, order = probs.sort(descending=True, stable=True) [True -> False] #2": FEW_TOKENS,
        "cumulative = probs.double().cumsum(0) [probs.double() -> probs]": FEW_TOKENS,
    },
}
