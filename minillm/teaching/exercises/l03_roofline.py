"""Lesson 03, heads, bytes and the roofline: requests that fit, intensity, the roof, MBU, and pooling heads."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises._facts import about_factor
from minillm.teaching.source import body_of, wrong_versions

# -------------------------------------------------------------------------------------------------- requests_that_fit


def requests_that_fit(memory: int, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> int:
    """Return how many requests of `num_tokens` tokens each fit into memory with their caches, beside the weights.

    `memory`, `weight_bytes` and `kv_bytes_per_token` are in bytes. All requests share the weights. A request whose last
    tokens would not fit is not counted.
    """
    left = memory - weight_bytes
    return max(0, left // (kv_bytes_per_token * num_tokens))


_ROOM = Exercise(
    name="l03.requests_that_fit",
    reference=requests_that_fit,
    cases=[
        Case("100 bytes, 40 of them weights, 3 tokens of 10 bytes each", (100, 40, 10, 3)),
        Case("a fraction of a request does not count", (100, 40, 2, 7)),
        Case("nearly one more", (100, 40, 7, 3)),
        Case("exactly one request fits", (100, 40, 6, 10)),
        Case("not even one request fits", (100, 40, 7, 10)),
        Case("the weights alone are too large", (100, 140, 2, 10)),
        Case("Llama-3-8B in bf16 on 80 GB, 4096 tokens each", (80 * 10**9, 16 * 10**9, 131_072, 4096)),
        Case("the same with a cache of 8 times as many bytes", (80 * 10**9, 16 * 10**9, 8 * 131_072, 4096)),
    ],
    hints=(
        "What is stored once, and what is stored once per request?",
        "The weights are stored once, so subtract them first. Each request then needs kv_bytes_per_token for each "
        "of its tokens. Divide and round down. What if the weights alone do not fit?",
        "left = ...; return max(0, left // (...))",
        body_of(requests_that_fit),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        requests_that_fit,
        {
            "forgets the weights": ("memory - weight_bytes", "memory"),
            "adds the weights to the memory": ("memory - weight_bytes", "memory + weight_bytes"),
            "subtracts the memory from the weights": ("memory - weight_bytes", "weight_bytes - memory"),
            "stores the weights once per request": (
                "left // (kv_bytes_per_token * num_tokens)",
                "memory // (weight_bytes + kv_bytes_per_token * num_tokens)",
            ),
            "counts tokens instead of requests": (" * num_tokens", ""),
            "counts one byte per token": ("kv_bytes_per_token * ", ""),
            "rounds up, so that the last request does not fit": (
                "left // (kv_bytes_per_token * num_tokens)",
                "-(-left // (kv_bytes_per_token * num_tokens))",
            ),
            "rounds to the nearest number, so that the last request may not fit": (
                "left // (kv_bytes_per_token * num_tokens)",
                "round(left / (kv_bytes_per_token * num_tokens))",
            ),
            "returns a fraction of a request": ("left //", "left /"),
            "returns a negative number when the weights alone do not fit": ("max(0, left", "max(left, left"),
            "lets one request fit where none does": ("max(0, left", "max(int(left > 0), left"),
            "returns one request too few": (
                "left // (kv_bytes_per_token * num_tokens)",
                "left // (kv_bytes_per_token * num_tokens) - 1",
            ),
            "adds the bytes per token and the number of tokens instead of multiplying": (
                "kv_bytes_per_token * num",
                "kv_bytes_per_token + num",
            ),
        },
    ),
)

# ----------------------------------------------------------------------------------------------- arithmetic_intensity


def arithmetic_intensity(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    """Return the operations per byte of y = x Wᵀ: x `[rows, in_features]`, W `[out_features, in_features]`.

    A multiplication and an addition are two operations. W and x are read once and y is written once, so with few rows
    it is close to 2 · rows / bytes_per_value, and it never exceeds 2 / bytes_per_value · in · out / (in + out).
    """
    operations = 2 * rows * in_features * out_features
    numbers = in_features * out_features + rows * (in_features + out_features)
    return operations / (numbers * bytes_per_value)


_INTENSITY = Exercise(
    name="l03.arithmetic_intensity",
    reference=arithmetic_intensity,
    cases=[
        Case("2 rows, 3 numbers in, 2 out, 1 byte each: 24 operations over 16 bytes", (2, 3, 2, 1)),
        Case("one row through a layer of 4 × 6, 4 bytes a number", (1, 4, 6, 4)),
        Case("8 rows through a projection of Llama-3-8B, bf16", (8, 4096, 4096, 2)),
        Case("4096 rows (a prompt) through the same", (4096, 4096, 4096, 2)),
    ],
    hints=(
        "Two counts, one division. How many multiplications and additions? Which tensors must be moved, and how large "
        "are they?",
        "Operations: y has rows × out_features numbers, each a sum of in_features products, so 2 × rows × in × out. "
        "Bytes: W once, however many rows there are; x once; y once.",
        "operations = 2 * ...; numbers = (size of W) + (size of x) + (size of y); return operations / (numbers * ...)",
        body_of(arithmetic_intensity),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        arithmetic_intensity,
        {
            "counts the bytes of the weights once per row; all rows share one reading": (
                "in_features * out_features + rows * (",
                "rows * (in_features * out_features + ",
            ),
            "counts multiplications and forgets the additions": ("2 * rows", "rows"),
            "counts the operations of one row only": ("2 * rows * in", "2 * in"),
            "counts the bytes of the weights only, which is wrong for many rows": (
                "numbers = in_features * out_features + rows * (in_features + out_features)",
                "numbers = in_features * out_features",
            ),
            "forgets the bytes of the weights": ("in_features * out_features + rows * (", "rows * ("),
            "counts input and output of one row only": ("+ rows * (", "+ ("),
            "divides by numbers instead of bytes": ("(numbers * bytes_per_value)", "numbers"),
            "multiplies by the bytes of a number instead of dividing": (
                "(numbers * bytes_per_value)",
                "numbers * bytes_per_value",
            ),
            "returns bytes per operation instead of operations per byte": (
                "operations / (numbers * bytes_per_value)",
                "(numbers * bytes_per_value) / operations",
            ),
            "forgets the bytes of the output": ("(in_features + out_features)", "in_features"),
            "forgets the bytes of the input": ("(in_features + out_features)", "out_features"),
            "multiplies input and output sizes where it should add them": (
                "(in_features + out_features)",
                "(in_features * out_features)",
            ),
            "returns operations, not operations per byte": (" / (numbers * bytes_per_value)", ""),
        },
    ),
)

# ------------------------------------------------------------------------------------------------ attention_intensity


def attention_intensity(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    """Return the operations per byte of attention over a long cache: 2 · group · num_new / bytes_per_value.

    Per cached token and KV head, 2 · head_dim numbers are read once. Each of the group · num_new queries that share
    them does 2 · head_dim operations for its score and 2 · head_dim for its share of the value. The softmax and the
    queries themselves are small beside a long cache and are left out. The length and the batch cancel.
    """
    return 2 * (num_heads // num_kv_heads) * num_new / bytes_per_value


_ATTENTION = Exercise(
    name="l03.attention_intensity",
    reference=attention_intensity,
    cases=[
        Case("one new token, every query head has its own KV head, 4 bytes a number", (5, 5, 1, 4)),
        Case("minicoder: 6 query heads over 2 KV heads, fp32", (6, 2, 1, 4)),
        Case("Llama-3-8B: 32 over 8, bf16", (32, 8, 1, 2)),
        Case("the same, verifying 4 drafts: 5 new tokens", (32, 8, 5, 2)),
        Case("multi-query attention over an INT8 cache", (16, 1, 1, 1)),
    ],
    hints=(
        "Look at one key and one value of one KV head. They are read once. How many queries use them, and how many "
        "operations is each use?",
        "A group of num_heads / num_kv_heads query heads shares each KV head, and each of them has num_new queries. "
        "A query does 2 d operations for q·k and 2 d for adding its share of v; the key and the value are 2 d "
        "numbers. The d cancels.",
        "return 2 * (query heads that share a KV head) * (new tokens that share a reading) / ...",
        body_of(attention_intensity),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        attention_intensity,
        {
            "counts one reading of the cache per query head; a group shares one reading": (
                "(num_heads // num_kv_heads) * ",
                "",
            ),
            "counts all query heads; only those of one group share a KV head": (
                "(num_heads // num_kv_heads)",
                "num_heads",
            ),
            "multiplies by the number of KV heads instead of the number of query heads that share one": (
                "(num_heads // num_kv_heads)",
                "num_kv_heads",
            ),
            "divides by the size of the group instead of multiplying": (
                "(num_heads // num_kv_heads)",
                "(num_kv_heads / num_heads)",
            ),
            "counts half of the operations: only the scores q·k, or only multiplications": ("2 * ", ""),
            "counts the operations twice, or only the bytes of the keys": ("2 * ", "4 * "),
            "counts one reading of the cache per new token; the new tokens of a request share one reading": (
                " * num_new",
                "",
            ),
            "divides by the new tokens instead of multiplying": ("* num_new", "/ num_new"),
            "divides by numbers instead of bytes": (" / bytes_per_value", ""),
            "multiplies by the bytes of a number instead of dividing": ("/ bytes_per_value", "* bytes_per_value"),
        },
    ),
)

# --------------------------------------------------------------------------------------------------------- attainable


def attainable(intensity: float, peak_rate: float, bandwidth: float) -> float:
    """The roofline: the most operations per second that a computation of this intensity reaches (Williams et al. 2009).

    `intensity` in operations per byte, `peak_rate` in operations per second, `bandwidth` in bytes per second.
    """
    return min(peak_rate, intensity * bandwidth)


_ATTAINABLE = Exercise(
    name="l03.attainable",
    reference=attainable,
    cases=[
        Case("half an operation per byte, 100 operations/s, 20 bytes/s", (0.5, 100.0, 20.0)),
        Case("exactly at the ridge", (5.0, 100.0, 20.0)),
        Case("far right of the ridge", (50.0, 100.0, 20.0)),
        Case("one row of bf16 on an H100 (data sheet)", (1.0, 989e12, 3.35e12)),
        Case("a machine with more bytes than operations per second", (0.5, 20.0, 100.0)),
    ],
    hints=(
        "Suppose the arithmetic were free. How many operations per second do the bytes allow? Now suppose the bytes "
        "were free.",
        "The bytes allow intensity times bandwidth. The arithmetic units allow peak_rate. Moving and computing "
        "overlap, so the slower one decides alone.",
        "return min(..., ...)",
        body_of(attainable),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        attainable,
        {
            "returns the higher of the two limits instead of the lower": ("min(", "max("),
            "has no flat part: it ignores peak_rate": (
                "min(peak_rate, intensity * bandwidth)",
                "intensity * bandwidth",
            ),
            "has no slope: it ignores the bandwidth": ("min(peak_rate, intensity * bandwidth)", "peak_rate"),
            "ignores the intensity": ("intensity * bandwidth", "bandwidth"),
            "adds the times for bytes and arithmetic, as if they did not overlap": (
                "min(peak_rate, intensity * bandwidth)",
                "1 / (1 / peak_rate + 1 / (intensity * bandwidth))",
            ),
            "divides the bandwidth by the intensity": ("intensity * bandwidth", "bandwidth / intensity"),
            "divides the intensity by the bandwidth": ("intensity * bandwidth", "intensity / bandwidth"),
            "returns the ridge (peak_rate / bandwidth)": (
                "min(peak_rate, intensity * bandwidth)",
                "peak_rate / bandwidth",
            ),
            "multiplies the peak rate by the intensity too": ("min(peak_rate,", "min(intensity * peak_rate,"),
        },
    ),
)

# ---------------------------------------------------------------------------------------------------------------- mbu


def mbu(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    """Return the model bandwidth utilisation of a decode step: bytes it must read / bytes its time allows.

    It is a share: 0.4 means 40%. It is above 1 if bytes came from elsewhere, such as the processor's cache. A step
    reads the weights once for the whole batch, and the cache of every request. The definition is MosaicML's (Agarwal et
    al. 2023), with a measured bandwidth in place of the data sheet's.
    """
    must_read = weight_bytes + batch * kv_bytes_per_request
    return must_read / (seconds_per_step * bandwidth)


_MBU = Exercise(
    name="l03.mbu",
    reference=mbu,
    cases=[
        Case("60 bytes of weights, 20 of cache, one request, 2 s per step, 100 bytes/s", (60.0, 20.0, 1, 2.0, 100.0)),
        Case("the same with four requests", (60.0, 20.0, 4, 2.0, 100.0)),
        Case("an empty cache", (60.0, 0.0, 4, 2.0, 100.0)),
        Case(
            "Llama-3-8B in bf16, 16 requests of 2048 tokens, 10 ms per step, 3.35 TB/s",
            (16e9, 2048 * 131_072.0, 16, 0.010, 3.35e12),
        ),
        Case("a model that stays in the processor's cache, faster than the memory allows", (90.0, 10.0, 3, 0.5, 100.0)),
    ],
    hints=(
        "The numerator: what must this step read? The denominator: what could have been read in the same time?",
        "One step serves the whole batch. The weights are read once for all of it, the cache once per request. In "
        "seconds_per_step the memory could have delivered seconds_per_step times bandwidth bytes.",
        "must_read = weight_bytes + ...; return must_read / (...)",
        body_of(mbu),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        mbu,
        {
            "leaves out the cache, which at long contexts has more bytes than the weights": (
                " + batch * kv_bytes_per_request",
                "",
            ),
            "leaves out the weights": ("weight_bytes + batch", "batch"),
            "counts the weights once per request; a batch shares one reading": (
                "weight_bytes + batch * kv_bytes_per_request",
                "batch * (weight_bytes + kv_bytes_per_request)",
            ),
            "counts the cache of one request only; every request has its own": ("batch * kv", "kv"),
            "divides the cache by the batch instead of multiplying": (
                "batch * kv_bytes_per_request",
                "kv_bytes_per_request / batch",
            ),
            "divides the bytes that could be read by those that must be, instead of the other way round": (
                "must_read / (seconds_per_step * bandwidth)",
                "(seconds_per_step * bandwidth) / must_read",
            ),
            "cuts the share off at 1, though bytes from a processor's cache can make it larger": (
                "return must_read / (seconds_per_step * bandwidth)",
                "return min(1.0, must_read / (seconds_per_step * bandwidth))",
            ),
            "returns percent instead of a share": ("return must_read", "return 100 * must_read"),
            "returns bytes per second: it does not divide by the bandwidth": (
                "(seconds_per_step * bandwidth)",
                "seconds_per_step",
            ),
            "forgets the time": ("(seconds_per_step * bandwidth)", "bandwidth"),
            "divides by the time and multiplies by the bandwidth (parentheses are missing)": (
                "(seconds_per_step * bandwidth)",
                "seconds_per_step * bandwidth",
            ),
            "treats seconds_per_step as milliseconds": ("(seconds_per_step *", "(seconds_per_step / 1000 *"),
        },
    ),
)

# ---------------------------------------------------------------------------------------------------- mean_pool_heads


def mean_pool_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return a key or value projection with fewer heads: each new head is the mean of a group of old ones.

    `weight`: `[num_heads * head_dim, hidden]`, one KV head after the other. `num_heads`: the KV heads that it has now,
    not the query heads; `num_kv_heads`: those that the result has, a divisor. Returns
    `[num_kv_heads * head_dim, hidden]`. Groups are consecutive heads, because query head h reads KV head
    h // (query heads per KV head). Source: Ainslie et al. 2023, section 2.1; they then train for 5% of the original
    steps.
    """
    heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))
    return heads.mean(dim=1).flatten(0, 1)


def _diagnose_pooling(attempt: Attempt) -> str | None:
    """Whether the shape, the range, the overall mean or the grouping is wrong."""
    got, (weight, _, _) = attempt.got, attempt.case.args
    if not isinstance(got, Tensor):
        return None
    if got.shape != attempt.expected.shape:
        return "your matrix must have num_kv_heads times head_dim rows: which axis did you average, which did you join?"
    if got.max() > weight.max() or got.min() < weight.min():
        return "your matrix has numbers outside the range of the old heads, which a mean cannot have"
    if not torch.allclose(got.mean(), weight.mean(), rtol=1e-3):
        return "the mean of your heads is not the mean of the old heads: some count too much, or are left out"
    return "your numbers are means of the wrong rows: average the same channel of all heads of one group"


def _pool_cases() -> list[Case]:
    def numbered(heads: int, head_dim: int, hidden: int) -> Tensor:
        """Row c of head h holds 10 · h² + c, and j / 8 more in column j: no two groups have the same mean."""
        rows = 10 * torch.arange(heads).square().unsqueeze(1) + torch.arange(head_dim)
        return rows.flatten().unsqueeze(1) + torch.arange(hidden) / 8

    return [
        Case("4 heads of width 2 become 2", (numbered(4, 2, 1), 4, 2)),
        Case("6 heads become 1: multi-query attention", (numbered(6, 2, 3), 6, 1)),
        Case("6 heads become 3, hidden size 5", (numbered(6, 4, 5), 6, 3)),
        Case("3 heads stay 3", (numbered(3, 2, 2), 3, 3)),
        Case("4 heads in descending order become 2", (numbered(4, 2, 1).flip(0), 4, 2)),
    ]


_POOL = Exercise(
    name="l03.mean_pool_heads",
    reference=mean_pool_heads,
    cases=_pool_cases,
    hints=(
        "Which rows of the matrix belong to head 0? Which query heads will have to share one KV head afterwards?",
        "Give the rows three names: group, member of the group, channel (weight.unflatten or view). Average over the "
        "members only: channel 0 with channel 0, never with channel 1. Then join groups and channels again.",
        "heads = weight.unflatten(0, (groups, members of a group, -1)); return heads.mean(dim=...).flatten(0, 1)",
        body_of(mean_pool_heads),
    ),
    fallback_diagnosis=_diagnose_pooling,
    wrong=wrong_versions(
        mean_pool_heads,
        {
            "groups heads 0, 2, … and 1, 3, …; a group consists of neighbours": (
                "(num_kv_heads, num_heads // num_kv_heads, -1))\n    return heads.mean(dim=1)",
                "(num_heads // num_kv_heads, num_kv_heads, -1))\n    return heads.mean(dim=0)",
            ),
            "keeps the first head of each group and drops the others": (".mean(dim=1)", "[:, 0]"),
            "keeps the last head of each group and drops the others": (".mean(dim=1)", "[:, -1]"),
            "adds the heads of a group without dividing": (".mean(dim=1)", ".sum(dim=1)"),
            "takes the largest number of a group instead of the mean": (".mean(dim=1)", ".amax(dim=1)"),
            "takes the median of a group instead of the mean": (".mean(dim=1)", ".median(dim=1).values"),
            "averages neighbouring rows, which are channels of one head": (
                "heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))\n"
                "    return heads.mean(dim=1).flatten(0, 1)",
                "return weight.unflatten(0, (-1, num_heads // num_kv_heads)).mean(dim=1)",
            ),
            "averages over the channels instead of the heads of a group": ("mean(dim=1)", "mean(dim=2)"),
            "averages over the groups instead of the heads of a group": ("mean(dim=1)", "mean(dim=0)"),
            "divides by the number of all heads instead of the heads of a group": (
                ".mean(dim=1)",
                ".sum(dim=1).div(num_heads)",
            ),
            "takes the first heads of the matrix and drops the rest": (
                "heads.mean(dim=1).flatten(0, 1)",
                "weight[: len(weight) * num_kv_heads // num_heads]",
            ),
            "keeps the old number of heads, equal within each group: no byte is saved": (
                ".mean(dim=1).flatten(0, 1)",
                ".mean(dim=1, keepdim=True).expand_as(heads).flatten(0, 2)",
            ),
            "returns [heads, head_dim, hidden] instead of one matrix": (".flatten(0, 1)", ""),
        },
    ),
)

EXERCISES = [_ROOM, _INTENSITY, _ATTENTION, _ATTAINABLE, _MBU, _POOL]
