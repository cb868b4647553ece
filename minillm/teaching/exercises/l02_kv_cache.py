"""Lesson 02, the KV cache: append rows, mask with an offset, count bytes, grow the buffer, choose how often to grow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.teaching.drives.l02 import NO_ROW, use_append
from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion
from minillm.teaching.exercises._facts import about_factor
from minillm.teaching.source import body_of, wrong_versions

# ---------------------------------------------------------------------------------------------------------- append_kv


def append_kv(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Write new rows after the first `past` rows, in place, and return views of all valid rows.

    `cache_k`, `cache_v`: `[capacity, num_kv_heads, head_dim]`; `new_k`, `new_v`: `[num_new, num_kv_heads, head_dim]`.
    Unused rows hold any numbers, such as those of an earlier text; those after the new rows stay as they were. Returns
    two views `[past + num_new, num_kv_heads, head_dim]`. Raises `ValueError` if not all new rows fit, and then leaves
    both caches as they were.
    """
    end = past + new_k.shape[0]
    if end > cache_k.shape[0]:
        raise ValueError(f"{end} rows do not fit into a cache of {cache_k.shape[0]}")
    cache_k[past:end] = new_k
    cache_v[past:end] = new_v
    return cache_k[:end], cache_v[:end]


def _concatenates(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((cache_k[:past], new_k)), torch.cat((cache_v[:past], new_v))


def _writes_what_fits(
    cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor
) -> tuple[Tensor, Tensor]:
    room = max(0, len(cache_k) - past)
    cache_k[past : past + room][: len(new_k)] = new_k[:room]
    cache_v[past : past + room][: len(new_v)] = new_v[:room]
    return append_kv(cache_k, cache_v, past, new_k, new_v)


def _diagnose_append(attempt: Attempt) -> str | None:
    """Whether the error, the contents of the caches, or the returned rows are wrong."""
    got, expected = attempt.got, attempt.expected
    if got["raised"] != expected["raised"]:
        return f"your function raises {got['raised']} here, but should raise {expected['raised']}"
    for part, what in (("cache_k", "the cache of keys"), ("cache_v", "the cache of values")):
        if NO_ROW in got[part]:
            return f"in {what} a row has the numbers of no old or new row: each head and channel keeps its place"
        if got[part] != expected[part]:
            return f"your function must leave the old rows, the new ones, and then the unused ones unchanged in {what}"
    if got["memory"] != expected["memory"]:
        return "your function does not return a view of the cache of keys and then a view of the cache of values"
    return "your function writes the right rows, but does not return exactly the valid ones"


_APPEND = Exercise(
    name="l02.append_kv",
    reference=append_kv,
    cases=[
        Case("the first token", (3, 0, 1)),
        Case("one token after two", (4, 2, 1)),
        Case("a prompt of three tokens", (4, 0, 3)),
        Case("two tokens at once after one, filling the cache", (3, 1, 2)),
        Case("one token more than fits", (2, 2, 1)),
        Case("two tokens, of which one fits: neither may be written", (3, 2, 2)),
    ],
    run_case=use_append,
    hints=(
        "The cache is a table whose first rows are in use. How many are in use? Where does the next row go?",
        "The new rows go to rows past to past + num_new - 1. Assign to a slice; do not build a new tensor. "
        "A slice beyond the end is shortened silently, so compare the end with the capacity first.",
        "end = past + new_k.shape[0]; if ...: raise ValueError(...); cache_k[...:...] = new_k, the same for v; "
        "return cache_k[...], cache_v[...]",
        body_of(append_kv),
    ),
    fallback_diagnosis=_diagnose_append,
    wrong=(
        *wrong_versions(
            append_kv,
            {
                "returns the whole cache, empty rows included": (
                    "return cache_k[:end], cache_v[:end]",
                    "return cache_k, cache_v",
                ),
                "returns only the new rows": (
                    "return cache_k[:end], cache_v[:end]",
                    "return cache_k[past:end], cache_v[past:end]",
                ),
                "returns copies instead of views": (
                    "return cache_k[:end], cache_v[:end]",
                    "return cache_k[:end].clone(), cache_v[:end].clone()",
                ),
                "returns the values before the keys": (
                    "return cache_k[:end], cache_v[:end]",
                    "return cache_v[:end], cache_k[:end]",
                ),
                "returns one row too few": (
                    "return cache_k[:end], cache_v[:end]",
                    "return cache_k[: end - 1], cache_v[: end - 1]",
                ),
                "keeps only the last of several new tokens": (
                    "end = past + new_k.shape[0]",
                    "new_k, new_v = new_k[-1:], new_v[-1:]; end = past + 1",
                ),
                "loses a row without an error when the cache is full": ("if end > cache_k.shape[0]:", "if False:"),
                "writes before it knows that all new rows fit: it checks too late, or only for a full cache": (
                    "if end > cache_k.shape[0]:",
                    "if past >= cache_k.shape[0]:",
                ),
                "raises an error when the last row of the cache would be filled": ("end > cache_k", "end >= cache_k"),
                "writes at row 0 instead of after the first past rows": (
                    "cache_k[past:end] = new_k\n    cache_v[past:end] = new_v",
                    "cache_k[: len(new_k)] = new_k\n    cache_v[: len(new_v)] = new_v",
                ),
                "stores the keys in both caches": ("= new_v", "= new_k"),
                "stores keys and values in each other's cache": (
                    "cache_k[past:end] = new_k\n    cache_v[past:end] = new_v",
                    "cache_k[past:end] = new_v\n    cache_v[past:end] = new_k",
                ),
                "forgets to write the values": (
                    "cache_v[past:end] = new_v",
                    "pass",
                ),
                "forgets to write the keys": ("cache_k[past:end] = new_k", "pass"),
                "adds the new rows to the old numbers in the unused rows (+=)": (
                    "cache_k[past:end] = new_k\n    cache_v[past:end] = new_v",
                    "cache_k[past:end] += new_k\n    cache_v[past:end] += new_v",
                ),
                "ignores past and counts the rows that are not 0; unused rows hold old numbers": (
                    "end = past + new_k.shape[0]",
                    "past = int(cache_k.flatten(1).any(1).sum()); end = past + new_k.shape[0]",
                ),
                "changes the unused rows after the new ones": (
                    "return cache_k[:end], cache_v[:end]",
                    "cache_k[end:], cache_v[end:] = 0, 0; return cache_k[:end], cache_v[:end]",
                ),
            },
        ),
        WrongVersion("builds a new tensor (torch.cat) and leaves the cache as it was", _concatenates),
        WrongVersion("writes the rows that fit before it raises the error", _writes_what_fits),
    ),
)

# -------------------------------------------------------------------------------------------------------- offset_mask


def offset_mask(num_new: int, past: int) -> Tensor:
    """Which key each new token may see: bool `[num_new, past + num_new]`, True = may see.

    New token i is at position past + i and sees every key up to and including its own.
    """
    positions = past + torch.arange(num_new)
    return torch.arange(past + num_new)[None, :] <= positions[:, None]


def _diagnose_mask(attempt: Attempt) -> str | None:
    """Whether the shape, the columns of the cached tokens or the triangle of the new ones is wrong."""
    got, expected, past = attempt.got, attempt.expected, attempt.case.args[1]
    if not isinstance(got, Tensor) or got.dtype != expected.dtype:
        return None
    if got.shape != expected.shape:
        return "your mask must have one row for each new token and one column for each key, cached or new"
    if not got[:, :past].all():
        return "your function hides a cached key, but every new token comes after all of them and sees them"
    if not got[:, past:].diagonal().all():
        return "your function hides a new token from itself"
    return "your function lets a new token see one that comes after it, or hides one that comes before"


_MASK = Exercise(
    name="l02.offset_mask",
    reference=offset_mask,
    cases=[
        Case("a prompt of one token", (1, 0)),
        Case("a prompt of three tokens, nothing cached", (3, 0)),
        Case("one token after four: a decode step", (1, 4)),
        Case("two tokens after three: the next chunk of a prompt", (2, 3)),
    ],
    hints=(
        "Number the keys from 0. What is the position of the first new token if past tokens are cached?",
        "Row i belongs to position past + i; column j is key j. Row i may see column j when j is not later than it.",
        "positions = ...; return torch.arange(past + num_new)[None, :] <= ...",
        body_of(offset_mask),
    ),
    fallback_diagnosis=_diagnose_mask,
    wrong=wrong_versions(
        offset_mask,
        {
            "starts the triangle in the top left corner, as if nothing were cached": (
                "positions = past + torch.arange(num_new)",
                "positions = torch.arange(num_new)",
            ),
            "counts positions from past + 1, so a new token sees the next one": (
                "= past + torch",
                "= past + 1 + torch",
            ),
            "lets a new token see the new tokens after it": (
                "<= positions[:, None]",
                "< past + num_new + 0 * positions[:, None]",
            ),
            "hides each token from itself": ("<= positions", "< positions"),
            "returns True for hidden keys instead of visible ones": ("<= positions", "> positions"),
            "shows later keys and hides earlier ones": ("<= positions", ">= positions"),
            "leaves out the columns of the cached tokens": (
                "torch.arange(past + num_new)[None, :]",
                "torch.arange(past, past + num_new)[None, :]",
            ),
            "exchanges rows and columns": (
                "torch.arange(past + num_new)[None, :] <= positions[:, None]",
                "torch.arange(past + num_new)[:, None] <= positions[None, :]",
            ),
            "returns 0 and -inf (to be added to the scores) instead of True and False": (
                "return torch.arange(past + num_new)[None, :] <= positions[:, None]",
                "return torch.zeros(num_new, past + num_new).masked_fill("
                "torch.arange(past + num_new)[None, :] > positions[:, None], -torch.inf)",
            ),
        },
    ),
)

# ------------------------------------------------------------------------------------------------ kv_bytes_per_token


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes that one token adds to the cache: a key and a value, for every layer and every KV head."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value


def shape(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """Return a `ModelConfig` with these sizes; its other fields do not matter for the cache."""
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )


LLAMA_2_70B = shape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128)
LLAMA_3_8B = shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128)
QWEN_3_06B = shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128)
"""Its head_dim is larger than hidden_size / num_heads = 64, so a formula that divides is wrong for it."""


_BYTES = Exercise(
    name="l02.kv_bytes_per_token",
    reference=kv_bytes_per_token,
    cases=[
        Case("one layer, two query heads that share one KV head of width 4, fp16", (shape(1, 8, 2, 1, 4), 2)),
        Case("minicoder in fp32", (shape(8, 384, 6, 2, 64), 4)),
        Case("Qwen3-0.6B in bf16", (QWEN_3_06B, 2)),
        Case("Llama-2-70B in fp16", (LLAMA_2_70B, 2)),
        Case("Llama-2-70B with an INT8 cache, scales not counted", (LLAMA_2_70B, 1)),
    ],
    hints=(
        "What exactly is stored for one token? Count the numbers first, then multiply by the size of one.",
        "Each layer stores one key and one value per KV head, and each has head_dim numbers. Query heads store "
        "nothing: several of them read the same key.",
        "return 2 * (number of layers) * (number of heads that store) * (numbers in a head) * bytes_per_value",
        body_of(kv_bytes_per_token),
    ),
    fallback_diagnosis=about_factor,
    wrong=wrong_versions(
        kv_bytes_per_token,
        {
            "counts every query head, though only the KV heads are stored": ("config.num_kv_heads", "config.num_heads"),
            "multiplies by the number of query heads per KV head instead of the number of KV heads": (
                "config.num_kv_heads",
                "(config.num_heads // config.num_kv_heads)",
            ),
            "counts one head only": ("config.num_kv_heads * ", ""),
            "counts the keys and forgets the values": ("2 * ", ""),
            "counts one layer only": ("config.num_layers * ", ""),
            "uses hidden_size / num_heads as the width of a head instead of head_dim": (
                "config.head_dim",
                "(config.hidden_size // config.num_heads)",
            ),
            "uses hidden_size as the width of a head instead of head_dim": ("config.head_dim", "config.hidden_size"),
            "leaves out the width of a head": ("config.head_dim * ", ""),
            "counts numbers instead of bytes": (" * bytes_per_value", ""),
            "always counts two bytes a number": ("bytes_per_value", "2"),
            "counts bits instead of bytes": ("bytes_per_value", "8 * bytes_per_value"),
            "divides by the bytes of a number instead of multiplying": ("* bytes_per_value", "// bytes_per_value"),
        },
    ),
)

# ------------------------------------------------------------------------------------------------------ next_capacity


def next_capacity(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    """Return the capacity needed to add `num_new` rows after `past`, and how many rows are copied to reach it.

    A cache with enough room stays unchanged, and 0 rows are copied. Otherwise the new capacity is the smallest multiple
    of `every` that holds all rows, and the `past` rows are copied. So `every=1` is `torch.cat`, and `every` as large as
    the whole sequence is preallocation (the range that BMC describes, Ramachandran et al. 2025).
    """
    needed = past + num_new
    if needed <= capacity:
        return capacity, 0
    return -(-needed // every) * every, past  # rounded up


def _diagnose_capacity(attempt: Attempt) -> str | None:
    """Whether the capacity or the number of copied rows is wrong."""
    got, (capacity, past, num_new, every) = attempt.got, attempt.case.args
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(number, int) for number in got)):
        return None
    if got[0] == attempt.expected[0]:
        return "your capacity is right, but the number of copied rows is wrong"
    if got[0] < past + num_new:
        return f"your buffer of {got[0]} rows cannot hold the {past + num_new} that are needed"
    if got[0] < capacity:
        return "your buffer becomes smaller, though the rows fit into the old one"
    if got[0] % every and got[0] != capacity:
        return "your capacity is not a multiple of every"
    return "your buffer is larger than needed"


_CAPACITY = Exercise(
    name="l02.next_capacity",
    reference=next_capacity,
    cases=[
        Case("the first token into an empty cache, r = 4", (0, 0, 1, 4)),
        Case("room for one more", (8, 5, 1, 8)),
        Case("the last free row", (8, 7, 1, 8)),
        Case("a full buffer, r = 8", (8, 8, 1, 8)),
        Case("concat: r = 1", (5, 5, 1, 1)),
        Case("a prompt of 21 tokens, r = 8", (0, 0, 21, 8)),
        Case("five tokens where three fit, r = 4", (8, 5, 5, 4)),
        Case("a buffer with far more room than needed stays as it is, r = 8", (32, 3, 1, 8)),
        Case("a full buffer whose size is not a multiple of r = 4", (6, 6, 1, 4)),
        Case("a prompt that fills the first buffer, r = 8", (0, 0, 8, 8)),
        Case("preallocate: r = 384", (0, 0, 1, 384)),
    ],
    hints=(
        "Two situations: the rows fit, or they do not. What does each cost in copied rows?",
        "needed = past + num_new. If needed <= capacity nothing changes. Otherwise round needed up to a multiple "
        "of every (a prompt can need more than one); only the rows in use must be copied.",
        "needed = past + num_new; if ...: return capacity, 0; return (needed rounded up to a multiple of every), ...",
        body_of(next_capacity),
    ),
    fallback_diagnosis=_diagnose_capacity,
    wrong=wrong_versions(
        next_capacity,
        {
            "grows by every rows, even if more are needed": ("-(-needed // every) * every", "capacity + every"),
            "grows to exactly what is needed, not to a multiple of every": ("-(-needed // every) * every", "needed"),
            "rounds up the number of new rows instead of all rows": ("-needed //", "-num_new //"),
            "adds every rows even if needed is already a multiple": (
                "-(-needed // every) * every",
                "(needed // every + 1) * every",
            ),
            "grows while the last row is still free": ("needed <= capacity", "needed < capacity"),
            "shrinks a buffer that has more room than needed": ("needed <= capacity:", "needed == capacity:"),
            "never grows": ("needed <= capacity:", "True:"),
            "copies the empty rows of the old buffer too": ("every, past", "every, capacity"),
            "copies the new rows too, which are not written yet": ("every, past", "every, needed"),
            "forgets that the rows must be copied into the new buffer": ("every, past", "every, 0"),
            "copies the past rows at every step, even if there is room": ("capacity, 0", "capacity, past"),
            "rounds down, so that the rows do not fit": ("-(-needed // every)", "needed // every"),
            "adds 0.5 and calls round, which takes a half to the even number: too many rows for some multiples": (
                "-(-needed // every)",
                "round(needed / every + 0.5)",
            ),
            "adds a share below 1 and rounds down, so that a smaller share of a buffer is lost": (
                "-(-needed // every)",
                "int(needed / every + 0.99)",
            ),
            "returns the number of multiples of every instead of rows": ("// every) * every", "// every)"),
        },
    ),
)

# ------------------------------------------------------------------------------------------------------------- best_r


def best_r(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    """Return the r between 1 and N for which N²/(2r)·copy + N·r/2·pad + N/r·allocation is smallest.

    Setting the derivative by r to zero gives r* = √((N·copy + 2·allocation) / pad). If an unused row costs nothing, the
    sum falls as r grows, so the answer is N: preallocate. The cost model follows BMC's; the formula is derived here.
    """
    if pad_cost == 0:
        return float(num_tokens)
    r = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost)
    return min(max(r, 1.0), float(num_tokens))


def _diagnose_best_r(attempt: Attempt) -> str | None:
    """Whether the answer is out of range, too small or too large."""
    got, expected, num_tokens = attempt.got, attempt.expected, attempt.case.args[0]
    if not isinstance(got, (int, float)) or isinstance(got, bool):
        return None
    if not 1 <= got <= num_tokens:
        return f"your r is not between 1 and {num_tokens}"
    side = "smaller" if got < expected else "larger"
    return f"your r is {side} than the best one: put both into cost(r), and compare your derivative term by term"


_BEST_R = Exercise(
    name="l02.best_r",
    reference=best_r,
    cases=[
        Case("copying a row costs as much as attending over it, allocation is free", (100, 1.0, 1.0, 0.0)),
        Case("an allocation costs as much as copying 48 rows", (100, 1.0, 1.0, 48.0)),
        Case("an unused row costs four times as much as copying one", (100, 1.0, 4.0, 0.0)),
        Case("a best r that is not a whole number: it is not rounded", (50, 3.0, 1.0, 0.0)),
        Case("a long text", (1000, 1.0, 2.7, 25.0)),
        Case("unused rows cost nothing", (100, 1.0, 0.0, 5.0)),
        Case("copies cost almost nothing, unused rows a lot: not below 1", (100, 0.001, 10.0, 0.0)),
        Case("unused rows cost almost nothing: not above the length of the text", (100, 1.0, 0.0001, 0.0)),
    ],
    hints=(
        "Copies cost less as r grows, unused rows cost more. The best r is where the total stops falling.",
        "Total(r) = (N² copy/2 + N allocation) / r + (N pad/2) r. Differentiate, set to zero, solve for r². Then "
        "consider the extremes: r below 1 or above N makes no sense, and pad may be 0.",
        "if pad_cost == 0: return ...; r = math.sqrt((...) / pad_cost); return min(max(r, ...), ...)",
        body_of(best_r),
    ),
    fallback_diagnosis=_diagnose_best_r,
    wrong=wrong_versions(
        best_r,
        {
            "forgets the square root": ("math.sqrt", ""),
            "has the fraction upside down": (
                "(num_tokens * copy_cost + 2 * allocation_cost) / pad_cost",
                "pad_cost / (num_tokens * copy_cost + 2 * allocation_cost)",
            ),
            "ignores pad_cost": (" / pad_cost", ""),
            "multiplies by pad_cost instead of dividing": (" / pad_cost", " * pad_cost"),
            "leaves out the cost of allocating": (" + 2 * allocation_cost", ""),
            "uses allocation_cost once; the derivative has it twice": (
                "2 * allocation_cost",
                "allocation_cost",
            ),
            "leaves out the cost of copying": ("num_tokens * copy_cost + ", ""),
            "leaves out the length of the text": ("num_tokens * copy_cost", "copy_cost"),
            "uses num_tokens squared; dividing by the N of the pad term leaves num_tokens": (
                "num_tokens * copy_cost",
                "num_tokens**2 * copy_cost",
            ),
            "rounds to a whole number": (
                "return min(max(r, 1.0), float(num_tokens))",
                "return float(round(min(max(r, 1.0), float(num_tokens))))",
            ),
            "rounds down to a whole number": (
                "return min(max(r, 1.0), float(num_tokens))",
                "return float(int(min(max(r, 1.0), float(num_tokens))))",
            ),
            "lets r fall below 1": ("max(r, 1.0)", "r"),
            "lets r exceed the length of the text": ("min(max(r, 1.0), float(num_tokens))", "max(r, 1.0)"),
            "uses max instead of min for the upper limit, so that r is never below num_tokens": (
                "min(max(r, 1.0)",
                "max(max(r, 1.0)",
            ),
            "returns 1 (grow at every token) when unused rows are free": ("return float(num_tokens)\n", "return 1.0\n"),
        },
    ),
)

EXERCISES = [_APPEND, _MASK, _BYTES, _CAPACITY, _BEST_R]
