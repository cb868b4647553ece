"""Lesson 01, decoding from scratch: causal attention, RoPE, sampling, the loop without a cache, and its work."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.drives.l01 import count_rows, draw_some
from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion
from minillm.teaching.source import body_of, edited, wrong_versions

# -------------------------------------------------------------------------------------------------- causal_attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·k / √head_dim)·v, each token over itself and the tokens before it (Vaswani et al. 2017).

    `q`: `[num_tokens, num_heads, head_dim]`; `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`. Query heads share KV
    heads in groups of neighbours: query head h reads KV head h // (num_heads / num_kv_heads) (GQA, Ainslie et al.
    2023). Returns `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / head_dim**0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def _attention_cases() -> list[Case]:
    def rows(*numbers: float) -> Tensor:
        """Return one head of width 4. Each row is a number and three zeros, so a score is a product of two numbers."""
        return torch.tensor([[[number, 0.0, 0.0, 0.0]] for number in numbers])

    def one(*numbers: float) -> Tensor:
        """Return one token with heads of width 1."""
        return torch.tensor([[[float(number)] for number in numbers]])

    draw = torch.Generator().manual_seed(0)
    shared = [torch.randn(3, heads, 2, generator=draw) for heads in (6, 2, 2)]
    return [
        Case("one token: it can only look at itself", (rows(1), rows(1), rows(7))),
        Case("two tokens, one head: the first must not see the second", (rows(1, 2), rows(3, 1), rows(10, 20))),
        Case("three tokens, one head", (rows(1, 2, 1), rows(1, 0, 2), rows(10, 20, 30))),
        Case("six query heads share two KV heads, one token", (one(1, 2, 3, 4, 5, 6), one(1, 1), one(10, 20))),
        Case("scores in the hundreds", (rows(20, 40), rows(10, 11), rows(1, 2))),
        Case(
            "scores far below zero: hidden tokens must still get no weight",
            (rows(40_000, 40_000), rows(-10, -11), rows(1, 2)),
        ),
        Case("three tokens, six query heads, two KV heads", tuple(shared)),
    ]


def _diagnose_attention(attempt: Attempt) -> str | None:
    """Return the first property of attention that the answer violates."""
    got, (_, _, values) = attempt.got, attempt.case.args
    if not isinstance(got, Tensor) or got.shape != attempt.expected.shape:
        return None
    if got.isnan().any():
        return (
            "your function returns NaN: 0 times inf (a mask of 0 and 1 multiplied by -inf; use masked_fill), all "
            "scores of a token at -inf, or an exp that overflowed"
        )
    group = got.shape[1] // values.shape[1]
    own, low, high = (x.repeat_interleave(group, dim=-2) for x in (values[0], values.amin(0), values.amax(0)))
    if (got < low - 1e-4).any() or (got > high + 1e-4).any():
        return "your function returns numbers outside the range of the values, which an average cannot give"
    if not torch.allclose(got[0], own, atol=1e-4):
        return "your function does not give the first token its own value, though it sees nothing else"
    return "your function averages the values with wrong weights: check the scale of the scores, mask and softmax axis"


_ATTENTION = Exercise(
    name="l01.causal_attention",
    reference=causal_attention,
    cases=_attention_cases,
    fallback_diagnosis=_diagnose_attention,
    hints=(
        "Three steps: score every query against every key, turn each query's scores into weights that sum to 1, "
        "average the values with these weights. Before the second step, which keys must a token not see?",
        "Give every query head its own copy of the KV head it reads: k.repeat_interleave(num_heads // num_kv_heads, "
        "dim=1), the same for v. Scores are [heads, queries, keys], divided by the square root of head_dim. Set those "
        "above the diagonal to -inf; the softmax runs over the keys, the last axis.",
        'scores = torch.einsum("qhd,khd->hqk", q, keys) / ...; hidden = torch.ones(n, n, dtype=torch.bool).triu(...); '
        'weights = scores.masked_fill(hidden, ...).softmax(...); return torch.einsum("hqk,khd->qhd", weights, values)',
        body_of(causal_attention),
    ),
    wrong=wrong_versions(
        causal_attention,
        {
            "forgets to divide the scores by the square root of head_dim": (" / head_dim**0.5", ""),
            "divides the scores by head_dim instead of its square root": ("head_dim**0.5", "head_dim"),
            "multiplies the scores by the square root of head_dim instead of dividing": ("/ head_dim", "* head_dim"),
            "lets a token see the tokens after it (no mask)": (".triu(1)", ".triu(num_tokens)"),
            "lets a token see the next token too": (".triu(1)", ".triu(2)"),
            "hides each token from itself, so the first one sees nothing": (".triu(1)", ".triu(0)"),
            "hides the tokens before each token instead of those after it": (".triu(1)", ".tril(-1)"),
            "inverts the mask: hides the tokens that may be seen, and shows the others": (".triu(1)", ".tril()"),
            "takes the softmax over the queries instead of over the keys": (".softmax(-1)", ".softmax(-2)"),
            "takes the softmax over the heads instead of over the keys": (".softmax(-1)", ".softmax(0)"),
            "forgets the softmax: uses the scores as weights": (".softmax(-1)", ""),
            "sets hidden scores to 0, which still gets weight in the softmax; -inf gets none": (
                "-torch.inf",
                "0.0",
            ),
            "sets hidden scores to a number such as -100, and other scores can be lower; only -inf never gets weight": (
                "-torch.inf",
                "-100.0",
            ),
            "sets hidden scores to +inf instead of -inf": ("-torch.inf", "torch.inf"),
            "hides after the softmax, so the weights of a row no longer sum to 1": (
                "scores.masked_fill(hidden, -torch.inf).softmax(-1)",
                "scores.softmax(-1).masked_fill(hidden, 0.0)",
            ),
            "lets query heads read KV heads alternately (repeat); neighbours must share one (repeat_interleave)": (
                "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
                "k.repeat(1, group, 1), v.repeat(1, group, 1)",
            ),
            "leaves keys or values with fewer heads than the queries have (repeat_interleave runs along dim=1)": (
                "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
                "k, v",
            ),
            "repeats every KV head num_heads times instead of num_heads // num_kv_heads times": (
                "num_heads // k.shape[1]",
                "num_heads",
            ),
            "swaps keys and values": ("keys, values = k", "values, keys = k"),
            "mixes the keys instead of the values": ("weights, values", "weights, keys"),
            "scores keys against keys, without the queries": ("q, keys)", "keys, keys)"),
            "scores the queries against the values instead of the keys": ("q, keys)", "q, values)"),
            "scores the queries against themselves": ("q, keys)", "q, q)"),
            "takes exp of large scores, which overflows; torch.softmax subtracts the largest first": (
                "weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)",
                "weights = scores.exp().tril(); weights = weights / weights.sum(-1, keepdim=True)",
            ),
        },
    ),
)

# -------------------------------------------------------------------------------------------------------- apply_rope


def apply_rope(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Rotate each pair of channels by position · frequency radians (RoPE, Su et al. 2021).

    `x`: `[num_tokens, num_heads, head_dim]`; `positions`: `[num_tokens]`; `freqs`: `[head_dim / 2]`, radians per
    position. Pair i is (channel i, channel i + head_dim / 2), the half-split order of Llama checkpoints in Hugging
    Face format. Returns a new tensor like `x`.
    """
    angles = positions[:, None] * freqs  # [num_tokens, head_dim / 2]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]  # the same for every head
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def interleaved_rope(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of the other convention: pair i is (channel 2 i, channel 2 i + 1). Wrong for Llama checkpoints."""
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return apply_rope(halves, positions, freqs).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _overwrites(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    angles = (positions[:, None] * freqs)[:, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    x[..., :half] = first * angles.cos() - second * angles.sin()
    x[..., half:] = second * angles.cos() + first * angles.sin()
    return x


def _rope_cases() -> list[Case]:
    fast_and_slow = torch.tensor([1.0, 0.1])
    draw = torch.Generator().manual_seed(1)
    return [
        Case("position 0 rotates nothing", (torch.tensor([[[3.0, 4.0]]]), torch.tensor([0]), torch.tensor([1.0]))),
        Case(
            "a quarter turn",
            (torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([1]), torch.tensor([math.pi / 2])),
        ),
        Case(
            "two pairs, which rotate at different speeds",
            (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([2]), fast_and_slow),
        ),
        Case(
            "two tokens at positions 5 and 9",
            (torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), torch.tensor([5, 9]), torch.tensor([0.1])),
        ),
        Case(
            "three tokens of three heads each",
            (torch.randn(3, 3, 4, generator=draw), torch.tensor([0, 1, 2]), fast_and_slow),
        ),
        Case(
            "position 1000",
            (torch.randn(1, 2, 6, generator=draw), torch.tensor([1000]), torch.tensor([1.0, 0.1, 0.01])),
        ),
    ]


def _diagnose_rope(attempt: Attempt) -> str | None:
    """Whether the shape, the length of a pair (which a rotation keeps) or the angle is wrong."""
    got, x = attempt.got, attempt.case.args[0]
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return "your function does not return a tensor of the shape of x: join the halves along the channels"
    lengths = [torch.stack(each.chunk(2, dim=-1)).norm(dim=0) for each in (x, got)]
    if not torch.allclose(*lengths, rtol=1e-3, atol=1e-4):
        return (
            "your function changes the length of a pair, which no rotation does: compare both halves with the formula"
        )
    return "your function rotates the pairs, but by another angle than position times frequency"


_ROPE = Exercise(
    name="l01.apply_rope",
    reference=apply_rope,
    cases=_rope_cases,
    fallback_diagnosis=_diagnose_rope,
    hints=(
        "A pair (a, b) is a point in the plane. Rotating it by an angle combines a and b with a cosine and a sine. "
        "Which two channels are a pair here, and what is the angle?",
        "first, second = x.chunk(2, dim=-1) are all a's and all b's. The angles are positions times freqs, "
        "[num_tokens, head_dim / 2]; insert an axis for the heads between these two, or they broadcast wrongly.",
        "angles = (positions[:, None] * freqs)[:, None, :]; first, second = x.chunk(2, dim=-1); "
        "return torch.cat((..., ...), dim=-1), first the formula for a, then the formula for b",
        body_of(apply_rope),
    ),
    wrong=(
        WrongVersion("pairs neighbours (0, 1), (2, 3) instead of channel i with i + head_dim / 2", interleaved_rope),
        *wrong_versions(
            apply_rope,
            {
                "rotates in the wrong direction": (
                    "first * cos - second * sin, second * cos + first * sin",
                    "first * cos + second * sin, second * cos - first * sin",
                ),
                "counts positions from 0 in every call instead of using the argument positions": (
                    "positions[:, None]",
                    "torch.arange(len(x))[:, None]",
                ),
                "uses the first frequency for all pairs": (" * freqs", " * freqs[:1].expand_as(freqs)"),
                "leaves out the frequencies and rotates every pair by one radian per position": (
                    " * freqs",
                    " * torch.ones_like(freqs)",
                ),
                "adds position and frequency instead of multiplying": ("* freqs", "+ freqs"),
                "divides the position by the frequency": ("* freqs", "/ freqs"),
                "takes the angles for degrees": (
                    "positions[:, None] * freqs",
                    "torch.deg2rad(positions[:, None] * freqs)",
                ),
                "broadcasts the angles along the heads instead of along the tokens": (
                    "angles.cos()[:, None, :], angles.sin()[:, None, :]",
                    "angles.cos(), angles.sin()",
                ),
                "swaps cosine and sine": ("cos, sin =", "sin, cos ="),
                "subtracts in both halves, which is not a rotation": ("second * cos + first", "second * cos - first"),
                "adds in both halves, which is not a rotation": ("first * cos - second", "first * cos + second"),
                "forgets the sine in the first half": ("first * cos - second * sin,", "first * cos,"),
                "forgets the sine in the second half": ("second * cos + first * sin)", "second * cos)"),
                "leaves the second half as it was": ("second * cos + first * sin)", "second)"),
                "leaves the first half as it was": ("first * cos - second * sin,", "first,"),
                "returns the halves in the wrong order": (
                    "first * cos - second * sin, second * cos + first * sin",
                    "second * cos + first * sin, first * cos - second * sin",
                ),
                "splits the heads in two halves instead of the channels": ("x.chunk(2, dim=-1)", "x.chunk(2, dim=1)"),
                "splits the tokens in two halves instead of the channels": ("x.chunk(2, dim=-1)", "x.chunk(2, dim=0)"),
                "joins the halves along the tokens: the channels are the last axis": (
                    "first * sin), dim=-1",
                    "first * sin), dim=0",
                ),
                "joins the halves along the heads: the channels are the last axis": (
                    "first * sin), dim=-1",
                    "first * sin), dim=1",
                ),
            },
        ),
        WrongVersion(
            "writes into its input, so the second half is computed from the new numbers of the first", _overwrites
        ),
    ),
)

# ------------------------------------------------------------------------------------------------------- sample_next


def sample_next(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """Return the token that `uniform`, a random number from [0, 1), selects.

    `logits`: `[vocab]`. `temperature` 0 takes the largest logit. `top_k` 0, or the size of the vocabulary or more,
    keeps all tokens, as does `top_p` 1. The order is: temperature, top-k, renormalise, top-p, draw. `top_k` also keeps
    tokens that are as probable as the k-th. `top_p` keeps the most probable tokens, of equal ones the lower id first,
    up to and including the one with which their sum reaches it (Holtzman et al. 2020). The draw takes the lowest id
    whose cumulative probability is above `uniform`, as `minillm.sampling.sample` does.
    """
    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_k < len(probs):
        probs[probs < probs.topk(top_k).values[-1]] = 0
        probs = probs / probs.sum()
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(0) - ranked
        probs[order[before >= top_p]] = 0
    cumulative = probs.double().cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def _always_greedy(logits: Tensor, *ignored: float) -> int:
    return int(logits.argmax())


def _rank_for_id(logits: Tensor, *choice: float) -> int:
    order = logits.argsort(descending=True)
    return int((order == sample_next(logits, *choice)).nonzero())


def _by_likelihood(logits: Tensor, *choice: float) -> int:
    ranked, order = logits.sort(descending=True, stable=True)
    return int(order[sample_next(ranked, *choice)])


UNIFORMS = (0.0, 0.04, 0.12, 0.3, 0.5, 0.7, 0.88, 0.99)


def _sampling_cases() -> list[Case]:
    """Five tokens with probabilities 0.10, 0.45, 0.05, 0.25 and 0.15 at temperature 1; equal ones in the last two."""
    logits = torch.tensor([0.10, 0.45, 0.05, 0.25, 0.15]).log() + 3.0

    def case(label: str, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Case:
        return Case(label, (logits, UNIFORMS, temperature, top_k, top_p))

    return [
        case("temperature 0: always the largest logit", temperature=0.0),
        case("probabilities 0.10, 0.45, 0.05, 0.25, 0.15 as they are"),
        case("temperature 0.5", temperature=0.5),
        case("temperature 2", temperature=2.0),
        case("only the most probable token (top_k = 1)", top_k=1),
        case("only the two most probable (top_k = 2)", top_k=2),
        case("only the three most probable (top_k = 3)", top_k=3),
        case("top_k = 9, more than there are tokens, keeps all", top_k=9),
        case("top_p = 0.6: 0.45 is not enough, 0.45 + 0.25 is", top_p=0.6),
        case("top_p = 0.4: one token reaches it alone", top_p=0.4),
        case("top_k = 3, then top_p = 0.8 of what is left", top_k=3, top_p=0.8),
        case("temperature 2, then top_p = 0.6", temperature=2.0, top_p=0.6),
        Case("four equal tokens, top_p = 0.5: two of them reach it exactly", (torch.zeros(4), UNIFORMS, 1.0, 0, 0.5)),
        Case(
            "probabilities 0.4, 0.2, 0.2, 0.2: top_k = 2 keeps all tokens that are as probable as the second",
            (torch.tensor([2.0, 1.0, 1.0, 1.0]).log(), UNIFORMS, 1.0, 2, 1.0),
        ),
    ]


def _diagnose_sampling(attempt: Attempt) -> str | None:
    """Whether the answer draws tokens that must be dropped, or never draws one that must be kept."""
    got, expected = attempt.got, attempt.expected
    if any(token is None for token in got):
        return "your function returns None for some of these uniforms: a path through it ends without a return value"
    if not all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in got):
        return "your function does not return a token id as an int: convert a tensor with int(...)"
    surplus, missing = sorted(set(got) - set(expected)), sorted(set(expected) - set(got))
    if surplus:
        return f"your function can return token {surplus[0]}, which should have been dropped"
    if missing:
        return f"your function never returns token {missing[0]}, which at least one of these uniforms should select"
    return "your function keeps the right tokens, but their parts of the line have wrong lengths or a wrong order"


_SAMPLE = Exercise(
    name="l01.sample_next",
    reference=sample_next,
    cases=_sampling_cases,
    run_case=draw_some,
    fallback_diagnosis=_diagnose_sampling,
    hints=(
        "Compute the probabilities first, then drop tokens, then draw. Lay the probabilities side by side on a line "
        "from 0 to 1, token 0 first: on which token's part does the uniform number fall?",
        "Divide the logits, not the probabilities, by the temperature (0: return the argmax). Set all but the top_k to "
        "zero, divide by the sum. For top_p sort in descending order and drop a token only if the sum before it "
        "has reached top_p. The line is as long as the sum of what is left, which may be less than 1.",
        "probs = torch.softmax(...); if 0 < top_k < len(probs): probs[probs < (the top_k-th largest)] = 0 and divide "
        "by the sum; if top_p < 1: ranked, order = probs.sort(descending=True, stable=True), before = (the sum "
        "before each), probs[order[...]] = 0; return int(torch.searchsorted(probs.cumsum(0), ..., right=True))",
        body_of(sample_next),
    ),
    wrong=(
        *wrong_versions(
            sample_next,
            {
                "applies the temperature after the softmax, where normalising undoes it": (
                    "torch.softmax(logits / temperature, dim=-1)",
                    "torch.softmax(logits, dim=-1) / temperature",
                ),
                "multiplies the logits by the temperature instead of dividing": ("logits / temp", "logits * temp"),
                "divides the caller's logits in place, so that the next call divides them again": (
                    "logits / temperature",
                    "logits.div_(temperature)",
                ),
                "uses the logits as probabilities: the softmax is missing": (
                    "torch.softmax(logits / temperature, dim=-1)",
                    "logits / temperature",
                ),
                "does not take the largest logit at temperature 0": (
                    "return int(logits.argmax())",
                    "temperature = 1.0",
                ),
                "takes the smallest logit at temperature 0": ("logits.argmax", "logits.argmin"),
                "ignores top_k": ("0 < top_k", "0 > top_k"),
                "ignores top_k = 1, as if it meant all tokens": ("0 < top_k", "1 < top_k"),
                "drops tokens that are as probable as the top_k-th": (
                    "probs[probs < probs.topk(top_k).values[-1]]",
                    "probs[probs.argsort(descending=True, stable=True)[top_k:]]",
                ),
                "keeps one token fewer than top_k": ("< probs.topk", "<= probs.topk"),
                "keeps one token more than top_k": ("topk(top_k)", "topk(top_k + 1)"),
                "drops the top_k most probable tokens instead of keeping them": (
                    "probs[probs < probs.topk",
                    "probs[probs >= probs.topk",
                ),
                "keeps only the most probable token, whatever top_k is": (".values[-1]", ".values[0]"),
                "does not allow top_k above the size of the vocabulary": ("0 < top_k < len(probs)", "0 < top_k"),
                "applies top_p before top_k, or does not divide what top_k keeps by its sum first": (
                    "probs = probs / probs.sum()",
                    "pass",
                ),
                "ignores top_p": ("top_p < 1:", "top_p < 0:"),
                "drops the token with which the sum first reaches top_p": (
                    "ranked.cumsum(0) - ranked",
                    "ranked.cumsum(0)",
                ),
                "drops the token with which the sum first reaches top_p, unless it is the first": (
                    "before = ranked.cumsum(0) - ranked",
                    "before = ranked.cumsum(0); before[0] = 0",
                ),
                "adds the least probable tokens first for top_p": ("descending=True", "descending=False"),
                "keeps one token too many when the sum before it is exactly top_p (> instead of >=)": (
                    "before >= top_p",
                    "before > top_p",
                ),
                "drops the tokens that top_p should keep, and keeps the others": ("before >= top_p", "before < top_p"),
                "compares each probability with top_p instead of their running sum": (
                    "before = ranked.cumsum(0) - ranked",
                    "before = 1 - ranked",
                ),
                "does not multiply the uniform by the sum of the probabilities that are left": (
                    "uniform * cumulative[-1]",
                    "uniform",
                ),
                "returns a token of probability 0 when the uniform is 0 (right=True is missing)": (", right=True", ""),
                "gives a uniform on the border of two tokens to the left one": (", right=True", ", right=uniform == 0"),
            },
        ),
        WrongVersion(
            "applies the temperature after top-k and top-p, so that these keep other tokens",
            edited(
                sample_next,
                ("logits / temperature", "logits"),
                ("probs.double()", "(probs.double() ** (1 / temperature))"),
            ),
        ),
        WrongVersion("always takes the largest logit, whatever the uniform", _always_greedy),
        WrongVersion("returns the rank of the token instead of its id", _rank_for_id),
        WrongVersion("orders the tokens on the line by probability instead of by id", _by_likelihood),
    ),
)

# ---------------------------------------------------------------------------------------------------- generate_naive

Forward = Callable[[list[int]], Tensor]


def generate_naive(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    """Greedy decoding that runs the whole text through the model for every new token.

    `forward(ids)` returns logits `[len(ids), vocab]`; row i scores the token after `ids[i]`. Returns `max_tokens` new
    tokens, or fewer if `eos_id` is chosen, which is then the last of them (as in vLLM and minillm's engine).
    `prompt_ids` is not changed, and an `eos_id` inside it does not stop the loop.
    """
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(forward(ids)[-1].argmax()))
        if ids[-1] == eos_id:
            break
    return ids[len(prompt_ids) :]


def _grows_prompt(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    new = generate_naive(forward, prompt_ids, max_tokens, eos_id)
    prompt_ids += new
    return new


def _drops_eos(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    new = generate_naive(forward, prompt_ids, max_tokens, eos_id)
    return new[:-1] if new[-1:] == [eos_id] else new


def _diagnose_loop(attempt: Attempt) -> str | None:
    """Whether the number of calls, their inputs or the returned tokens are wrong."""
    expected, got = attempt.expected, attempt.got
    if not isinstance(got["new tokens"], (list, tuple)):
        return None
    calls, should = len(got["rows per forward"]), len(expected["rows per forward"])
    if calls != should and got["new tokens"] == expected["new tokens"]:
        return f"your tokens are right, but the model is called {calls} times instead of {should}: once per token"
    if calls != should:
        return f"your function calls the model {calls} times instead of {should}: check what ends the loop"
    if got["rows per forward"] != expected["rows per forward"]:
        return "your function does not pass the prompt and all new tokens to the model"
    if isinstance(got["new tokens"], list) and len(got["new tokens"]) != len(expected["new tokens"]):
        return "your function calls the model correctly, but returns another part of the list than the new tokens"
    if not all(isinstance(token, int | np.integer) for token in got["new tokens"]):
        return "your function returns tokens that are not ints: convert a tensor with int(...)"
    return "your function calls the model correctly, but chooses other tokens than the argmax of the last row"


_GENERATE = Exercise(
    name="l01.generate_naive",
    reference=generate_naive,
    cases=[
        Case("one new token after a prompt of two", ([3, 4], 1, 0)),
        Case("three new tokens after a prompt of one", ([1], 3, 0)),
        Case("end of text (here id 0) is chosen second", ([6, 4, 5], 8, 0)),
        Case("end of text (here id 7) is the only token", ([4, 3], 5, 7)),
        Case("a prompt longer than the new tokens", ([2, 2, 1, 3, 1, 4], 3, 0)),
        Case("a prompt that holds the end-of-text token (here id 0), as between two documents", ([3, 0, 4], 3, 0)),
        Case("a prompt that ends with the end-of-text token (here id 0)", ([3, 0], 3, 0)),
        Case("max_tokens is 0", ([1, 2], 0, 0)),
    ],
    run_case=count_rows,
    fallback_diagnosis=_diagnose_loop,
    hints=(
        "Keep one list of ids that starts as a copy of the prompt. Which row of the logits scores the token after the "
        "last token of the text?",
        "Repeat at most max_tokens times: logits = forward(ids); the last row's argmax is the next token; append it; "
        "if it is eos_id, stop. Return only what came after the prompt.",
        "ids = list(prompt_ids); for _ in range(max_tokens): ids.append(int(forward(ids)[...].argmax())), and break "
        "if ...; return ids[...:]",
        body_of(generate_naive),
    ),
    wrong=(
        *wrong_versions(
            generate_naive,
            {
                "never feeds the new token back: the model sees the same prompt every time": (
                    "forward(ids)",
                    "forward(prompt_ids)",
                ),
                "passes only the newest token, but the model has no cache": (
                    "forward(ids)",
                    "forward(ids if len(ids) == len(prompt_ids) else ids[-1:])",
                ),
                "reads the first row of the logits instead of the last": ("forward(ids)[-1]", "forward(ids)[0]"),
                "reads the second-to-last row of the logits": ("forward(ids)[-1]", "forward(ids)[-2:][0]"),
                "takes the largest of all rows' logits at once": ("forward(ids)[-1]", "forward(ids)"),
                "takes the smallest logit instead of the largest": ("argmax", "argmin"),
                "does not stop at the end of the text": ("if ids[-1] == eos_id:", "if False:"),
                "stops at the first token that is not the end of the text": ("ids[-1] == eos_id", "ids[-1] != eos_id"),
                "stops after one token, whatever it is": ("if ids[-1] == eos_id:", "if True:"),
                "stops because the prompt holds the end-of-text token": ("ids[-1] == eos_id", "eos_id in ids"),
                "does not start if the prompt ends with the end-of-text token": (
                    "range(max_tokens)",
                    "range(max_tokens if ids[-1] != eos_id else 0)",
                ),
                "returns the prompt as well": ("ids[len(prompt_ids) :]", "ids"),
                "leaves out the first new token": ("len(prompt_ids) :", "len(prompt_ids) + 1 :"),
                "returns the prompt's last token as well": ("len(prompt_ids) :", "len(prompt_ids) - 1 :"),
                "generates one token more than max_tokens": ("range(max_tokens)", "range(max_tokens + 1)"),
                "generates one token fewer than max_tokens": ("range(max_tokens)", "range(max_tokens - 1)"),
                "counts the prompt's tokens as new tokens": (
                    "range(max_tokens)",
                    "range(max_tokens - len(ids))",
                ),
            },
        ),
        WrongVersion("leaves the end-of-text token out of the answer", _drops_eos),
        WrongVersion(
            "appends to the caller's prompt",
            _grows_prompt,
            expected_message="changed its input prompt_ids",
        ),
    ),
)

# -------------------------------------------------------------------------------------------------------- total_work


def total_work(num_prompt: int, num_new: int) -> tuple[int, int]:
    """Return (rows, pairs) of one layer in the naive loop, summed over the forwards for `num_new` tokens.

    A forward over n tokens has n rows in the linear layers, and in attention n (n + 1) / 2 pairs of a query and a key
    that it may see.
    """
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)


def _diagnose_work(attempt: Attempt) -> str | None:
    """Whether the rows, the pairs or both are wrong."""
    expected, got = attempt.expected, attempt.got
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(number, int | np.integer) for number in got)):
        return "your function does not return two ints: each is a sum, and // halves without making a float"
    wrong = [name for name, e, g in zip(("rows", "pairs"), expected, got, strict=True) if e != g]
    if len(wrong) == 2:
        return "your function returns both numbers wrong: write down the lengths of the texts, forward by forward"
    right = "rows" if wrong == ["pairs"] else "pairs"
    return f"your function returns the right {right} and wrong {wrong[0]}, so its lengths are right"


_WORK = Exercise(
    name="l01.total_work",
    reference=total_work,
    cases=[
        Case("one token after a prompt of three", (3, 1)),
        Case("three tokens after a prompt of two", (2, 3)),
        Case("a hundred tokens from a prompt of one", (1, 100)),
        Case("a prompt of 500, then 20 tokens", (500, 20)),
        Case("no new tokens", (5, 0)),
    ],
    fallback_diagnosis=_diagnose_work,
    hints=(
        "Write down the lengths of the texts that go through the model, forward by forward. The last new token is "
        "chosen, but does it ever go through?",
        "The lengths are num_prompt, num_prompt + 1, … num_prompt + num_new - 1. A text of n tokens has n rows. How "
        "many keys does row 1 see, row 2, … row n? Add them.",
        "lengths = range(..., ...); return sum(lengths), sum(... for n in lengths)",
        body_of(total_work),
    ),
    wrong=wrong_versions(
        total_work,
        {
            "counts in each forward the new token that it only produces": (
                "range(num_prompt, num_prompt + num_new)",
                "range(num_prompt + 1, num_prompt + num_new + 1)",
            ),
            "adds a forward over the last new token, which is not needed": ("+ num_new)", "+ num_new + 1)"),
            "counts one forward too few": ("+ num_new)", "+ num_new - 1)"),
            "leaves the prompt out": ("num_prompt, num_prompt + num_new", "1, 1 + num_new"),
            "counts the prompt token by token, as if it had been generated": (
                "range(num_prompt, ",
                "range(1, ",
            ),
            "counts the pairs that the mask hides as well": ("n * (n + 1) // 2", "n * n"),
            "forgets that a token also sees itself": ("(n + 1)", "(n - 1)"),
            "takes half of the square; the diagonal counts in full": ("n * (n + 1) // 2", "n * n // 2"),
            "forgets to halve n (n + 1)": ("n * (n + 1) // 2", "n * (n + 1)"),
            "counts only the newest query's pairs, though every row attends again": ("n * (n + 1) // 2", "n"),
            "counts the last forward only": (
                "range(num_prompt, num_prompt + num_new)",
                "range(num_prompt, num_prompt + num_new)[-1:]",
            ),
            "gives (pairs, rows) instead of (rows, pairs)": (
                "sum(lengths), sum(n * (n + 1) // 2 for n in lengths)",
                "sum(n * (n + 1) // 2 for n in lengths), sum(lengths)",
            ),
            "exchanges the prompt's length and the number of new tokens": (
                "range(num_prompt, num_prompt + num_new)",
                "range(num_new, num_new + num_prompt)",
            ),
        },
    ),
)

EXERCISES = [_ATTENTION, _ROPE, _SAMPLE, _GENERATE, _WORK]
