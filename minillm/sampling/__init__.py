"""From logits to tokens: the user's sampling parameters (`params`), applied on the CPU (`host`) or a GPU (`device`).

`host` is the reference. `device` applies the same rules without waiting for results; tests compare it with `host`.
"""

from minillm.sampling.host import (
    Draw,
    SamplingRow,
    allowed_tokens,
    argmax,
    biases_of,
    check_rows,
    choose,
    logprobs_of,
    probs_from_logits,
    sample,
    uniform,
    uniforms,
    used_tokens,
)
from minillm.sampling.params import RequestOutputKind, SamplingParams

__all__ = [
    "Draw",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingRow",
    "allowed_tokens",
    "biases_of",
    "check_rows",
    "choose",
    "argmax",
    "logprobs_of",
    "probs_from_logits",
    "sample",
    "uniform",
    "uniforms",
    "used_tokens",
]
