"""Spoilt references of lesson 1 that answer as the reference does, and why (see `minillm.teaching.mutants`)."""

ONE_AXIS = "the tensor has one axis, so the first is the last"
ALL_KEPT = "all tokens are kept either way: no sum in front of a token reaches 1"
FEW_TOKENS = "so few numbers are sorted in a stable way, and summed exactly enough, in any case"

EQUIVALENT = {
    "l01.sample_next": {
        "probs = torch.softmax(logits / temperature, dim=-1) [-1 -> 0]": ONE_AXIS,
        "probs = torch.softmax(logits / temperature, dim=-1) [1 -> 0]": ONE_AXIS,
        "before = ranked.cumsum(0) - ranked [0 -> -1]": ONE_AXIS,
        "cumulative = probs.double().cumsum(0) [0 -> -1]": ONE_AXIS,
        "if 0 < top_k < len(probs): [0 < top_k < len(probs) -> 0 < top_k <= len(probs)]": (
            "keeping as many tokens as there are keeps all"
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
