"""Lesson 02, the KV cache: append rows, mask with an offset, count bytes, grow the buffer, choose how often to grow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.teaching.exercise import Case, Exercise, Function, WrongVersion

# ---------------------------------------------------------------------------------------------------------- append_kv


def append_kv(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Write new rows after the `past` rows that are there, in place, and return views of all valid rows.

    `cache_k`, `cache_v`: `[capacity, num_kv_heads, head_dim]`; `new_k`, `new_v`: `[num_new, num_kv_heads, head_dim]`.
    Returns two `[past + num_new, num_kv_heads, head_dim]`. Raises `ValueError` if the rows do not fit.
    """
    end = past + new_k.shape[0]
    if end > cache_k.shape[0]:
        raise ValueError(f"{end} rows do not fit into a cache of {cache_k.shape[0]}")
    cache_k[past:end] = new_k
    cache_v[past:end] = new_v
    return cache_k[:end], cache_v[:end]


HEADS, WIDTH = 2, 3


def _use_append(append: Function, capacity: int, past: int, num_new: int) -> dict[str, object]:
    """Row i of the keys is filled with i + 1, row i of the values with 10 · (i + 1), rows not yet written with 0.

    So a counterexample is a few lists of numbers, and it can say whether the rows returned *are* the cache.
    """
    cache_k, cache_v = (torch.cat((_rows(0, past, s), torch.zeros(capacity - past, HEADS, WIDTH))) for s in (1, 10))
    raised = "nothing"
    try:
        returned = append(cache_k, cache_v, past, _rows(past, num_new, 1), _rows(past, num_new, 10))
    except ValueError:
        raised, returned = "ValueError", (None, None)
    keys, values = returned
    views = _same_memory(keys, cache_k) and _same_memory(values, cache_v)
    return {
        "raised": raised,
        "keys": _read(keys),
        "values": _read(values),
        "memory": "no rows" if keys is None else "views of the cache" if views else "copies",
        "cache_k": _read(cache_k),
        "cache_v": _read(cache_v),
    }


def _rows(first: int, count: int, scale: int) -> Tensor:
    numbers = scale * torch.arange(first + 1, first + count + 1).float()
    return numbers.view(-1, 1, 1).repeat(1, HEADS, WIDTH)


def _read(rows: object) -> object:
    """The number that fills each row, or `rows` as it is if it is not made of such rows."""
    if not isinstance(rows, Tensor) or rows.shape[1:] != (HEADS, WIDTH):
        return rows
    filled = torch.equal(rows, rows[:, :1, :1].expand_as(rows))
    return [int(number) for number in rows[:, 0, 0]] if filled else rows


def _same_memory(rows: object, cache: Tensor) -> bool:
    return isinstance(rows, Tensor) and rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def _whole_cache(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    append_kv(cache_k, cache_v, past, new_k, new_v)
    return cache_k, cache_v


def _concatenates(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((cache_k[:past], new_k)), torch.cat((cache_v[:past], new_v))


def _last_only(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    return append_kv(cache_k, cache_v, past, new_k[-1:], new_v[-1:])


def _silent(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    end = past + new_k.shape[0]
    cache_k[past:end] = new_k
    cache_v[past:end] = new_v
    return cache_k[:end], cache_v[:end]


def _from_zero(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    append_kv(cache_k, cache_v, 0, new_k, new_v)
    end = past + new_k.shape[0]
    return cache_k[:end], cache_v[:end]


def _keys_twice(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    return append_kv(cache_k, cache_v, past, new_k, new_k)


_APPEND = Exercise(
    name="l02.append_kv",
    reference=append_kv,
    cases=[
        Case("the first token of all", (3, 0, 1)),
        Case("one token after two", (4, 2, 1)),
        Case("a prompt of three tokens", (4, 0, 3)),
        Case("two tokens at once after one, filling the cache", (3, 1, 2)),
        Case("one token more than fits", (2, 2, 1)),
    ],
    drive=_use_append,
    hints=(
        "The cache is a long empty table of which the first `past` rows are in use. Where does the next row go?",
        "The new rows take the places past … past + num_new - 1. Assign to a slice; do not build a new tensor. "
        "A slice that reaches beyond the end is cut short without a word, so compare the end with the capacity first.",
        "end = past + new_k.shape[0]; raise ValueError if end > cache_k.shape[0]; then cache_k[past:end] = new_k, "
        "the same for v, and return cache_k[:end], cache_v[:end].",
    ),
    wrong=(
        WrongVersion("returns the whole cache, empty rows included", _whole_cache),
        WrongVersion("builds a new tensor (torch.cat) and leaves the cache as it was", _concatenates),
        WrongVersion("keeps only the last of several new tokens", _last_only),
        WrongVersion("loses a row without an error when the cache is full", _silent),
        WrongVersion("writes at row 0 instead of after the past rows", _from_zero),
        WrongVersion("stores the keys in both caches", _keys_twice),
    ),
)

# -------------------------------------------------------------------------------------------------------- offset_mask


def offset_mask(num_new: int, past: int) -> Tensor:
    """Which key each new token may see: bool `[num_new, past + num_new]`, True = may see.

    New token i sits at position past + i and sees every key up to and including its own.
    """
    positions = past + torch.arange(num_new)
    return torch.arange(past + num_new)[None, :] <= positions[:, None]


def _top_left(num_new: int, past: int) -> Tensor:
    return torch.ones(num_new, past + num_new, dtype=torch.bool).tril()


def _sees_everything(num_new: int, past: int) -> Tensor:
    return torch.ones(num_new, past + num_new, dtype=torch.bool)


def _hides_itself(num_new: int, past: int) -> Tensor:
    return torch.ones(num_new, past + num_new, dtype=torch.bool).tril(past - 1)


def _inverted(num_new: int, past: int) -> Tensor:
    return ~offset_mask(num_new, past)


def _square(num_new: int, past: int) -> Tensor:
    return torch.ones(num_new, num_new, dtype=torch.bool).tril()


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
        "Number the keys from 0. At which position does the first *new* token sit, if `past` tokens are cached?",
        "Row i belongs to position past + i; column j is key j. Row i may see column j when j is not later than it.",
        "Compare torch.arange(past + num_new)[None, :] with (past + torch.arange(num_new))[:, None] using <=.",
    ),
    wrong=(
        WrongVersion("lets the triangle start in the top left corner, as if nothing were cached", _top_left),
        WrongVersion("lets a new token see the new tokens after it", _sees_everything),
        WrongVersion("hides each token from itself", _hides_itself),
        WrongVersion("marks what is hidden instead of what may be seen", _inverted),
        WrongVersion("leaves out the columns of the cached tokens", _square),
    ),
)

# ------------------------------------------------------------------------------------------------ kv_bytes_per_token


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes that one token adds to the cache: a key and a value, for every layer and every KV head."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value


def shape(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """A `ModelConfig` of which only what matters for the cache is chosen (Llama's other numbers stay plausible)."""
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
"""Its heads are wider than hidden / heads = 64: a formula that divides gets this one wrong."""


def _query_heads(config: ModelConfig, bytes_per_value: int) -> int:
    return 2 * config.num_layers * config.num_heads * config.head_dim * bytes_per_value


def _keys_only(config: ModelConfig, bytes_per_value: int) -> int:
    return config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value


def _one_layer(config: ModelConfig, bytes_per_value: int) -> int:
    return 2 * config.num_kv_heads * config.head_dim * bytes_per_value


def _divides(config: ModelConfig, bytes_per_value: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * (config.hidden_size // config.num_heads) * bytes_per_value


def _always_fp16(config: ModelConfig, bytes_per_value: int) -> int:
    return kv_bytes_per_token(config, 2)


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
        "Each layer stores one key and one value per *KV* head, and each has `head_dim` numbers. Query heads store "
        "nothing: several of them read the same key.",
        "Multiply 2 (K and V), config.num_layers, config.num_kv_heads, config.head_dim and bytes_per_value.",
    ),
    wrong=(
        WrongVersion("counts every query head, though only the KV heads are stored", _query_heads),
        WrongVersion("counts the keys and forgets the values", _keys_only),
        WrongVersion("counts one layer only", _one_layer),
        WrongVersion("takes hidden_size / num_heads for the width of a head", _divides),
        WrongVersion("always counts two bytes a number", _always_fp16),
    ),
)

# ------------------------------------------------------------------------------------------------------ next_capacity


def next_capacity(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    """The capacity needed before `num_new` rows go in after `past`, and how many rows move to get there.

    A cache that has room stays as it is and moves nothing. One that has not is replaced by the smallest multiple of
    `every` rows that holds all of them, and the `past` rows are copied over. So `every=1` is `torch.cat` and `every`
    as long as the whole sequence is preallocation (the spectrum of BMC, Ramachandran et al. 2025).
    """
    needed = past + num_new
    if needed <= capacity:
        return capacity, 0
    return math.ceil(needed / every) * every, past


def _one_portion(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    return (capacity, 0) if past + num_new <= capacity else (capacity + every, past)


def _too_early(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    needed = past + num_new
    return (capacity, 0) if needed < capacity else ((needed // every + 1) * every, past)


def _moves_capacity(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    grown, copied = next_capacity(capacity, past, num_new, every)
    return grown, capacity if copied else 0


def _moves_nothing(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    return next_capacity(capacity, past, num_new, every)[0], 0


def _moves_always(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    return next_capacity(capacity, past, num_new, every)[0], past


def _rounds_down(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    needed = past + num_new
    return (capacity, 0) if needed <= capacity else (needed // every * every, past)


_CAPACITY = Exercise(
    name="l02.next_capacity",
    reference=next_capacity,
    cases=[
        Case("the first token into nothing, r = 4", (0, 0, 1, 4)),
        Case("room for one more", (8, 5, 1, 8)),
        Case("the last free row", (8, 7, 1, 8)),
        Case("a full buffer, r = 8", (8, 8, 1, 8)),
        Case("concat: r = 1", (5, 5, 1, 1)),
        Case("a prompt of 21 tokens, r = 8", (0, 0, 21, 8)),
        Case("five tokens where three fit, r = 4", (8, 5, 5, 4)),
    ],
    hints=(
        "Two situations: the rows fit, or they do not. What does each cost in copied rows?",
        "needed = past + num_new. If needed <= capacity nothing changes. Otherwise round `needed` *up* to a multiple "
        "of `every` (a prompt can need several portions at once); what must move is only what was written.",
        "return (capacity, 0) if it fits, else (math.ceil(needed / every) * every, past).",
    ),
    wrong=(
        WrongVersion("grows by one portion, however many are needed", _one_portion),
        WrongVersion("grows while one row is still free", _too_early),
        WrongVersion("copies the empty rows of the old buffer too", _moves_capacity),
        WrongVersion("forgets that the rows must be copied into the new buffer", _moves_nothing),
        WrongVersion("copies the past rows at every step, room or not", _moves_always),
        WrongVersion("rounds down, so that the rows do not fit", _rounds_down),
    ),
)

# ------------------------------------------------------------------------------------------------------------- best_r


def best_r(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    """The r that makes N²/(2r)·copy + N·r/2·pad + N/r·allocation smallest, kept within 1 … N.

    Setting the derivative by r to zero gives r* = √((N·copy + 2·allocation) / pad). When an unused row costs nothing,
    the sum falls with every larger r, so the answer is N: preallocate. Derived here in the spirit of BMC's model.
    """
    if pad_cost == 0:
        return float(num_tokens)
    r = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost)
    return min(max(r, 1.0), float(num_tokens))


def _no_root(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    if pad_cost == 0:
        return float(num_tokens)
    return min(max((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost, 1.0), float(num_tokens))


def _upside_down(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    r = math.sqrt(pad_cost / (num_tokens * copy_cost + 2 * allocation_cost))
    return min(max(r, 1.0), float(num_tokens))


def _ignores_allocation(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    return best_r(num_tokens, copy_cost, pad_cost, 0.0)


def _half_allocation(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    return best_r(num_tokens, copy_cost, pad_cost, allocation_cost / 2)


def _unbounded(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    if pad_cost == 0:
        return math.inf
    return math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost)


_BEST_R = Exercise(
    name="l02.best_r",
    reference=best_r,
    cases=[
        Case("copying a row costs as much as attending over it, allocation is free", (100, 1.0, 1.0, 0.0)),
        Case("an allocation costs as much as copying 48 rows", (100, 1.0, 1.0, 48.0)),
        Case("unused rows cost nothing", (100, 1.0, 0.0, 5.0)),
        Case("copies cost almost nothing, unused rows a lot", (100, 0.001, 10.0, 0.0)),
    ],
    hints=(
        "The copies fall with r, the unused rows grow with r. The best r is where the total stops falling.",
        "Total(r) = (N²·copy/2 + N·allocation)/r + (N·pad/2)·r. Differentiate, set to zero, solve for r². Then think "
        "of the ends: r below 1 or above N makes no sense, and pad may be 0.",
        "r = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost), clamped to 1 … num_tokens; "
        "return num_tokens when pad_cost is 0.",
    ),
    wrong=(
        WrongVersion("forgets the square root", _no_root),
        WrongVersion("has the fraction upside down", _upside_down),
        WrongVersion("leaves out the cost of allocating", _ignores_allocation),
        WrongVersion("counts each allocation once, where the derivative gives 2 · allocation", _half_allocation),
        WrongVersion("lets r leave the range 1 … N", _unbounded),
    ),
)

EXERCISES = [_APPEND, _MASK, _BYTES, _CAPACITY, _BEST_R]
