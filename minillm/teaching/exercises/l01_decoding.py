"""Lesson 01, decoding from scratch: causal attention, RoPE, choose the next token, loop without a cache, add it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minillm.teaching.exercise import Case, Exercise, Function, WrongVersion

# -------------------------------------------------------------------------------------------------- causal_attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·k / √head_dim)·v, each token over itself and the tokens before it (Vaswani et al. 2017).

    `q`: `[num_tokens, num_heads, head_dim]`; `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`. Query heads share KV
    heads in groups of neighbours: query head h reads KV head h // (num_heads / num_kv_heads) (GQA, Ainslie et al.
    2023). Returns `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = q.shape
    k, v = (heads.repeat_interleave(num_heads // heads.shape[1], dim=1) for heads in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def attention_with(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Callable[[int], float] = math.sqrt,
    first_hidden: int = 1,
    hidden_score: float = -math.inf,
    softmax_over: int = -1,
    mask_after: bool = False,
    neighbours_share: bool = True,
) -> Tensor:
    """`causal_attention` with a switch for every mistake that is planted; at its defaults it makes none."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    share = Tensor.repeat_interleave if neighbours_share else _in_turn
    k, v = share(k, group, 1), share(v, group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / scale(head_dim)
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(first_hidden)
    if mask_after:
        weights = scores.softmax(softmax_over).masked_fill(hidden, 0.0)
    else:
        weights = scores.masked_fill(hidden, hidden_score).softmax(softmax_over)
    return torch.einsum("hqk,khd->qhd", weights, v)


def _in_turn(heads: Tensor, group: int, _: int) -> Tensor:
    return heads.repeat(1, group, 1)


def _one(head_dim: int) -> float:
    return 1.0


def _bare_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(group, dim=1) for heads in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])).exp().tril()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


def _attention_cases() -> list[Case]:
    def rows(*numbers: float) -> Tensor:
        """One head of width 4 whose rows are these numbers and zeros: a score is then a product of two numbers."""
        return torch.tensor([[[number, 0.0, 0.0, 0.0]] for number in numbers])

    def one(*numbers: float) -> Tensor:
        """One token whose heads are one number wide."""
        return torch.tensor([[[float(number)] for number in numbers]])

    draw = torch.Generator().manual_seed(0)
    shared = [torch.randn(3, heads, 2, generator=draw) for heads in (4, 2, 2)]
    return [
        Case("one token: it can only look at itself", (rows(1), rows(1), rows(7))),
        Case("two tokens, one head: the first must not see the second", (rows(1, 2), rows(3, 1), rows(10, 20))),
        Case("three tokens, one head", (rows(1, 2, 1), rows(1, 0, 2), rows(10, 20, 30))),
        Case("four query heads share two KV heads, one token", (one(1, 2, 3, 4), one(1, 1), one(10, 20))),
        Case("scores in the hundreds", (rows(20, 40), rows(10, 11), rows(1, 2))),
        Case("three tokens, four query heads, two KV heads", tuple(shared)),
    ]


_ATTENTION = Exercise(
    name="l01.causal_attention",
    reference=causal_attention,
    cases=_attention_cases,
    hints=(
        "Three steps: score every query against every key, turn each query's scores into weights that sum to 1, mix "
        "the values by these weights. Before the second step, what must a token not see?",
        "Give every query head its own copy of the KV head it reads: k.repeat_interleave(num_heads // num_kv_heads, "
        "dim=1), v alike. Scores are [heads, queries, keys], divided by the square root of head_dim. Set those above "
        "the diagonal to -inf; the softmax runs over the keys, the last axis.",
        'scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5; hidden = torch.ones(n, n, dtype=torch.bool)'
        ".triu(1); weights = scores.masked_fill(hidden, -torch.inf).softmax(-1); return "
        'torch.einsum("hqk,khd->qhd", weights, v).',
    ),
    wrong=(
        WrongVersion(
            "forgets to divide the scores by the square root of head_dim", partial(attention_with, scale=_one)
        ),
        WrongVersion("divides the scores by head_dim instead of its square root", partial(attention_with, scale=float)),
        WrongVersion("lets a token see the tokens after it (no mask)", partial(attention_with, first_hidden=99)),
        WrongVersion("lets a token see one token too many: the next one", partial(attention_with, first_hidden=2)),
        WrongVersion(
            "hides each token from itself, so the first one sees nothing", partial(attention_with, first_hidden=0)
        ),
        WrongVersion(
            "takes the softmax over the queries instead of over the keys", partial(attention_with, softmax_over=-2)
        ),
        WrongVersion(
            "gives hidden scores the value 0, which is an ordinary score and gets a share",
            partial(attention_with, hidden_score=0.0),
        ),
        WrongVersion(
            "hides after the softmax, so the weights of a row no longer sum to 1",
            partial(attention_with, mask_after=True),
        ),
        WrongVersion(
            "hands out KV heads in turn (repeat) instead of to neighbours (repeat_interleave)",
            partial(attention_with, neighbours_share=False),
        ),
        WrongVersion("takes exp of large scores, which overflows; softmax subtracts the largest", _bare_exponentials),
    ),
)

# -------------------------------------------------------------------------------------------------------- apply_rope


def apply_rope(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Turn each pair of channels by position · frequency radians (RoPE, Su et al. 2021).

    `x`: `[num_tokens, num_heads, head_dim]`; `positions`: `[num_tokens]`; `freqs`: `[head_dim / 2]`, radians per
    position. Pair i is (channel i, channel i + head_dim / 2), the half-split order of Llama checkpoints in Hugging
    Face format. Returns a new tensor like `x`.
    """
    angles = positions[:, None] * freqs
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _interleaved(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    paired = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return apply_rope(paired, positions, freqs).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _backwards(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    return apply_rope(x, -positions, freqs)


def _own_index(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    return apply_rope(x, torch.arange(len(x)), freqs)


def _one_frequency(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    return apply_rope(x, positions, freqs[:1].expand_as(freqs))


def _by_head(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Cosines `[num_tokens, half]` against `[num_tokens, num_heads, half]`: broadcasting starts at the last axis."""
    angles = positions[:, None] * freqs
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _both_minus(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    angles = (positions[:, None] * freqs)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos - first * sin), dim=-1)


def _overwrites(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    angles = (positions[:, None] * freqs)[:, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    x[..., :half] = first * angles.cos() - second * angles.sin()
    x[..., half:] = second * angles.cos() + first * angles.sin()
    return x


def _rope_cases() -> list[Case]:
    slow_and_fast = torch.tensor([1.0, 0.1])
    draw = torch.Generator().manual_seed(1)
    return [
        Case("position 0 turns nothing", (torch.tensor([[[3.0, 4.0]]]), torch.tensor([0]), torch.tensor([1.0]))),
        Case(
            "a quarter turn",
            (torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([1]), torch.tensor([math.pi / 2])),
        ),
        Case(
            "two pairs, which turn at different speeds",
            (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([2]), slow_and_fast),
        ),
        Case(
            "two tokens that stand at positions 5 and 9",
            (torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), torch.tensor([5, 9]), torch.tensor([0.1])),
        ),
        Case(
            "three tokens of three heads each",
            (torch.randn(3, 3, 4, generator=draw), torch.tensor([0, 1, 2]), slow_and_fast),
        ),
        Case("far into a text", (torch.randn(1, 2, 4, generator=draw), torch.tensor([1000]), slow_and_fast)),
    ]


_ROPE = Exercise(
    name="l01.apply_rope",
    reference=apply_rope,
    cases=_rope_cases,
    hints=(
        "A pair (a, b) is a point in the plane, and turning it by an angle mixes a and b with a cosine and a sine. "
        "Which two channels are a pair here, and by which angle does the pair turn?",
        "first, second = x.chunk(2, dim=-1) are all a's and all b's. The angles are positions times freqs, "
        "[num_tokens, head_dim / 2]; put an axis for the heads between these two, or they will be broadcast wrongly.",
        "angles = (positions[:, None] * freqs)[:, None, :]; return torch.cat((first * angles.cos() - second * "
        "angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1).",
    ),
    wrong=(
        WrongVersion("pairs neighbours (0, 1), (2, 3) instead of channel i with i + head_dim / 2", _interleaved),
        WrongVersion("turns the other way round", _backwards),
        WrongVersion("counts positions from 0 in every call instead of taking those given", _own_index),
        WrongVersion("turns all pairs at the same speed", _one_frequency),
        WrongVersion("lets the angles run along the heads instead of along the tokens", _by_head),
        WrongVersion("has a minus in both lines, which is no rotation", _both_minus),
        WrongVersion(
            "writes into its input, and the second half is computed from the first half's new numbers", _overwrites
        ),
    ),
)

# ------------------------------------------------------------------------------------------------------- sample_next


def sample_next(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """The token that a number drawn uniformly from [0, 1) stands for.

    `logits`: `[vocab]`. `temperature` 0 takes the largest logit; `top_k` 0 keeps all tokens, as does `top_p` 1. The
    order is temperature, top-k, top-p over what top-k left (renormalised), draw. `top_p` keeps the likeliest tokens
    until their sum reaches it, the one that reaches it included (Holtzman et al. 2020). The draw walks the ids from 0
    up and takes the first whose cumulative probability is above `uniform`, as `minillm.sampling.sample` does.
    """
    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_k < len(probs):
        probs[probs < probs.topk(top_k).values[-1]] = 0.0
        probs /= probs.sum()
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(0) - ranked
        probs[order[before >= top_p]] = 0.0
    cumulative = probs.double().cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def sample_with(
    logits: Tensor,
    uniform: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    drop_crossing: bool = False,
    renormalise: bool = True,
    stretch: bool = True,
    right: bool = True,
) -> int:
    """`sample_next` with a switch for mistakes that are planted; at its defaults it makes none."""
    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_k < len(probs):
        probs[probs < probs.topk(top_k).values[-1]] = 0.0
        probs = probs / probs.sum() if renormalise else probs
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        drop = ranked.cumsum(0) > top_p if drop_crossing else ranked.cumsum(0) - ranked >= top_p
        probs[order[1:][drop[1:]]] = 0.0  # the likeliest stays in any case
    cumulative = probs.double().cumsum(0)
    end = cumulative[-1] if stretch else 1.0
    return min(int(torch.searchsorted(cumulative, uniform * end, right=right)), len(probs) - 1)


def _other_temperature(change: Callable[[float], float]) -> Function:
    def sample(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
        return sample_next(logits, uniform, change(temperature), top_k, top_p)

    return sample


def _always_greedy(logits: Tensor, *ignored: float) -> int:
    return int(logits.argmax())


def _divides_in_place(logits: Tensor, uniform: float, temperature: float = 1.0, *choice: float) -> int:
    if temperature > 0:
        logits /= temperature
    return sample_next(logits, uniform, float(temperature > 0), *choice)


def _rank_for_id(logits: Tensor, *choice: float) -> int:
    return sample_next(logits.sort(descending=True).values, *choice)


def _by_likelihood(logits: Tensor, *choice: float) -> int:
    ranked, order = logits.sort(descending=True, stable=True)
    return int(order[sample_next(ranked, *choice)])


UNIFORMS = (0.0, 0.04, 0.12, 0.3, 0.5, 0.7, 0.88, 0.99)


def _draw_some(
    sample: Function, logits: Tensor, uniforms: Sequence[float], temperature: float, top_k: int, top_p: float
) -> list[object]:
    """The token for each of several uniforms, so that one case shows where every border between tokens lies."""
    return [sample(logits, uniform, temperature, top_k, top_p) for uniform in uniforms]


def _sampling_cases() -> list[Case]:
    """Five tokens with probabilities 0.10, 0.45, 0.05, 0.25 and 0.15 at temperature 1."""
    logits = torch.tensor([0.10, 0.45, 0.05, 0.25, 0.15]).log() + 3.0

    def case(label: str, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Case:
        return Case(label, (logits, UNIFORMS, temperature, top_k, top_p))

    return [
        case("temperature 0: always the largest logit", temperature=0.0),
        case("probabilities 0.10, 0.45, 0.05, 0.25, 0.15 as they are"),
        case("temperature 0.5", temperature=0.5),
        case("temperature 2", temperature=2.0),
        case("the two likeliest only (top_k = 2)", top_k=2),
        case("top_p = 0.6: 0.45 is not enough, 0.45 + 0.25 is", top_p=0.6),
        case("top_p = 0.4: one token reaches it alone", top_p=0.4),
        case("top_k = 3, then top_p = 0.8 of what is left", top_k=3, top_p=0.8),
    ]


_SAMPLE = Exercise(
    name="l01.sample_next",
    reference=sample_next,
    cases=_sampling_cases,
    drive=_draw_some,
    hints=(
        "Make probabilities first, then narrow them down, then draw. Lay the probabilities side by side on a line "
        "from 0 to 1, token 0 first: which token's piece does `uniform` fall into?",
        "Divide the *logits* by the temperature (0: return the argmax). Zero all but the top_k, divide by the sum. "
        "For top_p sort in falling order and drop a token only if the sum *before* it has reached top_p. Let the line "
        "be as long as what is left, not 1.",
        "before = ranked.cumsum(0) - ranked; probs[order[before >= top_p]] = 0; cumulative = probs.cumsum(0); return "
        "int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)).",
    ),
    wrong=(
        WrongVersion(
            "applies the temperature after the softmax, where normalising undoes it",
            _other_temperature(lambda t: float(t > 0)),
        ),
        WrongVersion(
            "multiplies the logits by the temperature instead of dividing",
            _other_temperature(lambda t: 1 / t if t else 0.0),
        ),
        WrongVersion(
            "divides the caller's logits in place, so that they are divided again next time", _divides_in_place
        ),
        WrongVersion("does not take the largest logit at temperature 0", _other_temperature(lambda t: t or 1.0)),
        WrongVersion("always takes the largest logit, whatever the uniform", _always_greedy),
        WrongVersion(
            "drops the token with which the sum first reaches top_p", partial(sample_with, drop_crossing=True)
        ),
        WrongVersion(
            "takes top_p of the old probabilities, without normalising after top_k",
            partial(sample_with, renormalise=False),
        ),
        WrongVersion(
            "does not stretch the uniform to what is left after dropping tokens", partial(sample_with, stretch=False)
        ),
        WrongVersion("returns the rank of the token instead of its id", _rank_for_id),
        WrongVersion("walks the tokens from the likeliest down instead of by id", _by_likelihood),
        WrongVersion(
            "gives a token of probability 0 when the uniform is 0 (right=True is missing)",
            partial(sample_with, right=False),
        ),
    ),
)

# ---------------------------------------------------------------------------------------------------- generate_naive

Forward = Callable[[list[int]], Tensor]


def generate_naive(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    """Greedy decoding that hands the whole text to the model for every new token.

    `forward(ids)` returns logits `[len(ids), vocab]`; row i scores the token after `ids[i]`. Returns the new tokens:
    `max_tokens` of them, or fewer if `eos_id` is chosen, which then is the last (as in vLLM and minillm's engine).
    `prompt_ids` is left as it was.
    """
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + max_tokens:
        ids.append(int(forward(ids)[-1].argmax()))
        if ids[-1] == eos_id:
            break
    return ids[len(prompt_ids) :]


def _never_feeds_back(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(lambda ids: forward(list(prompt_ids)), prompt_ids, max_tokens, eos_id)


def _only_newest(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(
        lambda ids: forward(ids if len(ids) == len(prompt_ids) else ids[-1:]), prompt_ids, max_tokens, eos_id
    )


def _first_row(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(lambda ids: forward(ids)[:1], prompt_ids, max_tokens, eos_id)


def _flat_argmax(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(lambda ids: forward(ids).flatten()[None], prompt_ids, max_tokens, eos_id)


def _runs_on(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(forward, prompt_ids, max_tokens, -1)


def _swallows_eos(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return [token for token in generate_naive(forward, prompt_ids, max_tokens, eos_id) if token != eos_id]


def _with_prompt(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return prompt_ids + generate_naive(forward, prompt_ids, max_tokens, eos_id)


def _one_too_many(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(forward, prompt_ids, max_tokens + 1, eos_id)


def _counts_prompt(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    return generate_naive(forward, prompt_ids, max(0, max_tokens - len(prompt_ids)), eos_id)


def _grows_prompt(forward: Forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    new = generate_naive(forward, prompt_ids, max_tokens, eos_id)
    prompt_ids += new
    return new


def _count_rows(generate: Function, prompt_ids: list[int], max_tokens: int, eos_id: int) -> dict[str, object]:
    """Run on a model of ten tokens whose next token is (sum of the text so far) mod 10, and note what it is given.

    A row in the middle is the most certain one, so that taking the largest of all logits goes wrong.
    """
    lengths: list[int] = []

    def forward(ids: list[int]) -> Tensor:
        lengths.append(len(ids))
        if len(lengths) > 3 * (max_tokens + 1):
            raise RuntimeError(f"the model was called {len(lengths)} times for {max_tokens} tokens")
        sums = torch.as_tensor(ids).cumsum(0) % 10
        certainty = torch.full((len(sums), 1), 5.0)
        certainty[len(sums) // 2] = 9.0
        return torch.zeros(len(sums), 10).scatter(1, sums[:, None], certainty)

    return {"new tokens": generate(forward, prompt_ids, max_tokens, eos_id), "rows per forward": lengths}


_GENERATE = Exercise(
    name="l01.generate_naive",
    reference=generate_naive,
    cases=[
        Case("one new token after a prompt of two", ([3, 4], 1, 0)),
        Case("three new tokens after a prompt of one", ([1], 3, 0)),
        Case("end of text (5) is chosen second", ([6, 4, 5], 8, 0)),
        Case("end of text is the only token", ([4, 3], 5, 7)),
        Case("a prompt longer than what is asked for", ([2, 2, 1, 3, 1, 4], 3, 0)),
    ],
    drive=_count_rows,
    hints=(
        "Keep one list of ids that starts as a copy of the prompt. Which row of the logits tells what comes after the "
        "last token of the text?",
        "Repeat at most max_tokens times: logits = forward(ids); the last row's argmax is the next token; append it; "
        "if it is eos_id, stop. Return only what came after the prompt.",
        "ids = list(prompt_ids); for _ in range(max_tokens): ids.append(int(forward(ids)[-1].argmax())); break after "
        "an eos_id; return ids[len(prompt_ids):].",
    ),
    wrong=(
        WrongVersion("never feeds the new token back: the model sees the same prompt every time", _never_feeds_back),
        WrongVersion("feeds only the newest token, though the model remembers nothing", _only_newest),
        WrongVersion("reads the first row of the logits instead of the last", _first_row),
        WrongVersion("takes the largest of all rows' logits at once", _flat_argmax),
        WrongVersion("does not stop at the end of the text", _runs_on),
        WrongVersion("leaves the end-of-text token out of the answer", _swallows_eos),
        WrongVersion("returns the prompt as well", _with_prompt),
        WrongVersion("makes one token more than max_tokens", _one_too_many),
        WrongVersion("counts the prompt's tokens as if they were new ones", _counts_prompt),
        WrongVersion("appends to the caller's prompt", _grows_prompt, says="changed its input prompt_ids"),
    ),
)

# -------------------------------------------------------------------------------------------------------- total_work


def total_work(num_prompt: int, num_new: int) -> tuple[int, int]:
    """What the naive loop puts through each layer: (rows, pairs), summed over the forwards of `num_new` tokens.

    A forward over n tokens has n rows in the linear layers, and in attention n (n + 1) / 2 pairs of a query and a key
    that it may see.
    """
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)


def _last_token_too(num_prompt: int, num_new: int) -> tuple[int, int]:
    return total_work(num_prompt + 1, num_new)


def _one_extra(num_prompt: int, num_new: int) -> tuple[int, int]:
    return total_work(num_prompt, num_new + 1)


def _ignores_prompt(num_prompt: int, num_new: int) -> tuple[int, int]:
    return total_work(1, num_new)


def _hidden_pairs(num_prompt: int, num_new: int) -> tuple[int, int]:
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(n * n for n in lengths)


def _not_oneself(num_prompt: int, num_new: int) -> tuple[int, int]:
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(n * (n - 1) // 2 for n in lengths)


def _newest_only(num_prompt: int, num_new: int) -> tuple[int, int]:
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(lengths)


def _last_forward_only(num_prompt: int, num_new: int) -> tuple[int, int]:
    n = num_prompt + num_new - 1
    return n, n * (n + 1) // 2


_WORK = Exercise(
    name="l01.total_work",
    reference=total_work,
    cases=[
        Case("one token after a prompt of three", (3, 1)),
        Case("three tokens after a prompt of two", (2, 3)),
        Case("a hundred tokens from a prompt of one", (1, 100)),
        Case("a prompt of 500, then 20 tokens", (500, 20)),
    ],
    hints=(
        "Write down the lengths of the texts that go through the model, forward by forward. The last new token is "
        "chosen, but does it ever go through?",
        "The lengths are num_prompt, num_prompt + 1, … num_prompt + num_new - 1. A text of n tokens has n rows. How "
        "many keys does row 1 see, row 2, … row n? Add them.",
        "lengths = range(num_prompt, num_prompt + num_new); return sum(lengths) and the sum of n * (n + 1) // 2 over "
        "the same lengths.",
    ),
    wrong=(
        WrongVersion("counts the new token of each forward as if it had gone through already", _last_token_too),
        WrongVersion("adds a forward for the last token, which nobody needs", _one_extra),
        WrongVersion("leaves the prompt out", _ignores_prompt),
        WrongVersion("counts the pairs that the mask hides as well", _hidden_pairs),
        WrongVersion("forgets that a token also sees itself", _not_oneself),
        WrongVersion("counts only the newest query's pairs, though all rows attend again", _newest_only),
        WrongVersion("counts the last forward only", _last_forward_only),
    ),
)

EXERCISES = [_ATTENTION, _ROPE, _SAMPLE, _GENERATE, _WORK]
