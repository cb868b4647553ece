"""Lesson 03, heads, bytes and the roofline: cache bytes, arithmetic intensity, the roof, MBU, and pooling heads."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B, QWEN_3_06B, shape

LLAMA_2_7B = shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128)
"""Multi-head: every query head has a KV head of its own."""
MINICODER = shape(layers=8, hidden=384, heads=6, kv_heads=2, head_dim=64)

# ----------------------------------------------------------------------------------------------------------- kv_bytes


def kv_bytes(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    """Bytes of the keys and values of `batch` texts of `num_tokens` tokens each, over all layers.

    Query heads store nothing, so their number does not appear: that is what grouped-query attention saves
    (Ainslie et al. 2023).
    """
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value
    return batch * num_tokens * per_token


def _every_query_head(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    return 2 * config.num_layers * config.num_heads * config.head_dim * bytes_per_value * num_tokens * batch


def _group_size(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    group = config.num_heads // config.num_kv_heads
    return 2 * config.num_layers * group * config.head_dim * bytes_per_value * num_tokens * batch


def _hidden_over_heads(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    width = config.hidden_size // config.num_heads
    return 2 * config.num_layers * config.num_kv_heads * width * bytes_per_value * num_tokens * batch


def _one_text(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    return kv_bytes(config, num_tokens, 1, bytes_per_value)


def _keys_only(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    return kv_bytes(config, num_tokens, batch, bytes_per_value) // 2


_KV_BYTES = Exercise(
    name="l03.kv_bytes",
    reference=kv_bytes,
    cases=[
        Case("1 layer, 6 query heads over 2 KV heads of width 4, 1 token, fp32", (shape(1, 24, 6, 2, 4), 1, 1, 4)),
        Case("minicoder, 8 texts of 100 tokens, fp32", (MINICODER, 100, 8, 4)),
        Case("Qwen3-0.6B (wide heads), 1 text of 10 tokens, bf16", (QWEN_3_06B, 10, 1, 2)),
        Case("Llama-2-7B: as many KV heads as query heads", (LLAMA_2_7B, 4096, 1, 2)),
        Case("Llama-2-70B, 64 texts of 4096 tokens, fp16", (LLAMA_2_70B, 4096, 64, 2)),
    ],
    hints=(
        "Start with one token in one layer. Which heads leave something behind: those that ask, or those that answer?",
        "Per token and layer: a key and a value for each of config.num_kv_heads, each config.head_dim numbers wide. "
        "Layers, tokens and texts all multiply, because nothing is shared between them.",
        "return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value * num_tokens * batch",
    ),
    wrong=(
        WrongVersion("counts every query head, though only the KV heads are stored", _every_query_head),
        WrongVersion("multiplies by the size of a group instead of the number of groups", _group_size),
        WrongVersion("takes hidden_size / num_heads for the width of a head", _hidden_over_heads),
        WrongVersion("counts one text only: a batch shares weights, never keys and values", _one_text),
        WrongVersion("counts the keys and forgets the values", _keys_only),
    ),
)

# ----------------------------------------------------------------------------------------------- arithmetic_intensity


def arithmetic_intensity(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    """Operations per byte of y = x Wᵀ: x `[rows, in_features]`, W `[out_features, in_features]`.

    A multiplication and an addition are two operations. W and x are read once and y is written once, so with few rows
    it is close to 2 · rows / bytes_per_value, and it never exceeds 2 / bytes_per_value · in · out / (in + out).
    """
    operations = 2 * rows * in_features * out_features
    numbers = in_features * out_features + rows * (in_features + out_features)
    return operations / (numbers * bytes_per_value)


def _weights_per_row(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    return arithmetic_intensity(1, in_features, out_features, bytes_per_value)


def _multiplications_only(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    return arithmetic_intensity(rows, in_features, out_features, bytes_per_value) / 2


def _weights_only(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    return 2 * rows / bytes_per_value


def _per_number(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    return arithmetic_intensity(rows, in_features, out_features, 1)


def _bytes_per_operation(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    return 1 / arithmetic_intensity(rows, in_features, out_features, bytes_per_value)


def _input_only(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    numbers = in_features * out_features + rows * in_features
    return 2 * rows * in_features * out_features / (numbers * bytes_per_value)


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
        "Two counts, one division. How many multiplications and additions? Which tensors must travel, and how large "
        "are they?",
        "Operations: each of the rows · out_features results is a sum of in_features products, so 2 · rows · in · out. "
        "Bytes: W once, however many rows there are; x once; y once.",
        "return 2 * rows * in_features * out_features / (bytes_per_value * (in_features * out_features + rows * "
        "(in_features + out_features)))",
    ),
    wrong=(
        WrongVersion("reads the weights again for every row, so that rows share nothing", _weights_per_row),
        WrongVersion("counts multiplications and forgets the additions", _multiplications_only),
        WrongVersion("counts the bytes of the weights only, which breaks down for many rows", _weights_only),
        WrongVersion("divides by numbers instead of bytes", _per_number),
        WrongVersion("is upside down: bytes per operation", _bytes_per_operation),
        WrongVersion("forgets that the result must be written", _input_only),
    ),
)

# ------------------------------------------------------------------------------------------------ attention_intensity


def attention_intensity(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    """Operations per byte of attention over a long cache: 2 · group · num_new / bytes_per_value.

    Per cached token and KV head, 2 · head_dim numbers are read once. Each of the group · num_new queries that share
    them makes 2 · head_dim operations for its score and 2 · head_dim for its share of the value. The softmax and the
    queries themselves are small beside a long cache and are left out. Neither the length nor the batch appears.
    """
    return 2 * (num_heads // num_kv_heads) * num_new / bytes_per_value


def _own_copy(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    return 2 * num_new / bytes_per_value


def _all_heads(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    return 2 * num_heads * num_new / bytes_per_value


def _kv_heads(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    return 2 * num_kv_heads * num_new / bytes_per_value


def _scores_only(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    return (num_heads // num_kv_heads) * num_new / bytes_per_value


def _read_per_token(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    return 2 * (num_heads // num_kv_heads) / bytes_per_value


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
        "A group of num_heads / num_kv_heads query heads shares each KV head, and each of them asks num_new questions. "
        "A question costs 2·d operations for q·k and 2·d for adding its share of v; the key and the value are 2·d "
        "numbers. The d cancels.",
        "return 2 * (num_heads // num_kv_heads) * num_new / bytes_per_value",
    ),
    wrong=(
        WrongVersion("lets each query head read a copy of its own: the group shares one reading", _own_copy),
        WrongVersion("counts all query heads, though only those of a group share a KV head", _all_heads),
        WrongVersion("multiplies by the number of KV heads; what counts is how many queries share each", _kv_heads),
        WrongVersion("counts the scores q·k and forgets the sum over the values", _scores_only),
        WrongVersion("reads the cache again for every new token of a request", _read_per_token),
    ),
)

# --------------------------------------------------------------------------------------------------------- attainable


def attainable(intensity: float, peak_rate: float, bandwidth: float) -> float:
    """The roofline: operations per second that work of this intensity can reach (Williams et al. 2009).

    `intensity` in operations per byte, `peak_rate` in operations per second, `bandwidth` in bytes per second.
    """
    return min(peak_rate, intensity * bandwidth)


def _better_of_both(intensity: float, peak_rate: float, bandwidth: float) -> float:
    return max(peak_rate, intensity * bandwidth)


def _never_flat(intensity: float, peak_rate: float, bandwidth: float) -> float:
    return intensity * bandwidth


def _always_flat(intensity: float, peak_rate: float, bandwidth: float) -> float:
    return peak_rate


def _one_after_the_other(intensity: float, peak_rate: float, bandwidth: float) -> float:
    return 1 / (1 / peak_rate + 1 / (intensity * bandwidth))


def _divides(intensity: float, peak_rate: float, bandwidth: float) -> float:
    return min(peak_rate, bandwidth / intensity)


_ATTAINABLE = Exercise(
    name="l03.attainable",
    reference=attainable,
    cases=[
        Case("half an operation per byte, 100 operations/s, 20 bytes/s", (0.5, 100.0, 20.0)),
        Case("exactly at the ridge", (5.0, 100.0, 20.0)),
        Case("far right of the ridge", (50.0, 100.0, 20.0)),
        Case("one row of bf16 on an H100 (data sheet)", (1.0, 989e12, 3.35e12)),
    ],
    hints=(
        "Suppose the arithmetic were free. How many operations per second do the bytes allow? Now suppose the bytes "
        "were free.",
        "The bytes allow intensity · bandwidth. The arithmetic units allow peak_rate. Moving and computing overlap, so "
        "the slower one decides alone.",
        "return min(peak_rate, intensity * bandwidth)",
    ),
    wrong=(
        WrongVersion("takes the higher of the two limits; the lower one binds", _better_of_both),
        WrongVersion("has no flat part: enough bytes do not make arithmetic units faster", _never_flat),
        WrongVersion("has no slope: it ignores the bytes", _always_flat),
        WrongVersion("adds the two times, as if nothing were computed while bytes move", _one_after_the_other),
        WrongVersion("divides the bandwidth by the intensity", _divides),
    ),
)

# ---------------------------------------------------------------------------------------------------------------- mbu


def mbu(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    """Model bandwidth utilisation of one decode step, 0 to 1: bytes it must read / bytes that fit into its time.

    A step reads the weights once for the whole batch and every request's cache for itself. The definition is
    MosaicML's (Agarwal et al. 2023), with a measured bandwidth in place of the data sheet's.
    """
    must_read = weight_bytes + batch * kv_bytes_per_request
    return must_read / (seconds_per_step * bandwidth)


def _no_cache(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return weight_bytes / (seconds_per_step * bandwidth)


def _weights_per_request(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return batch * (weight_bytes + kv_bytes_per_request) / (seconds_per_step * bandwidth)


def _one_cache(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return (weight_bytes + kv_bytes_per_request) / (seconds_per_step * bandwidth)


def _inverted(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return 1 / mbu(weight_bytes, kv_bytes_per_request, batch, seconds_per_step, bandwidth)


def _percent(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return 100 * mbu(weight_bytes, kv_bytes_per_request, batch, seconds_per_step, bandwidth)


def _rate_only(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    return (weight_bytes + batch * kv_bytes_per_request) / seconds_per_step


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
    ],
    hints=(
        "The top of the fraction: what must this step read? The bottom: what could have been read in the same time?",
        "One step serves the whole batch. The weights are read once for all of it, the cache once per request. In "
        "seconds_per_step the memory could have delivered seconds_per_step · bandwidth bytes.",
        "return (weight_bytes + batch * kv_bytes_per_request) / (seconds_per_step * bandwidth)",
    ),
    wrong=(
        WrongVersion("leaves out the cache, which at long contexts outweighs the weights", _no_cache),
        WrongVersion("reads the weights once per request; a batch shares one reading", _weights_per_request),
        WrongVersion("reads one request's cache only; every request has its own", _one_cache),
        WrongVersion("is upside down: time needed is not the top of the fraction", _inverted),
        WrongVersion("gives percent instead of a share between 0 and 1", _percent),
        WrongVersion("gives bytes per second and does not divide by the bandwidth", _rate_only),
    ),
)

# ---------------------------------------------------------------------------------------------------- mean_pool_heads


def mean_pool_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Fewer heads for a key or value projection: each new head is the mean of a group of old ones.

    `weight`: `[num_heads * head_dim, hidden]`, head after head; `num_kv_heads` divides `num_heads`. Returns
    `[num_kv_heads * head_dim, hidden]`. Groups are consecutive heads, because query head h reads KV head
    h // (num_heads / num_kv_heads). Ainslie et al. 2023, section 2.1; they then train 5% more.
    """
    heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))
    return heads.mean(dim=1).flatten(0, 1)


def _strided_groups(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_heads // num_kv_heads, num_kv_heads, -1)).mean(dim=0).flatten(0, 1)


def _first_of_group(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))[:, 0].flatten(0, 1)


def _sums(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).sum(dim=1).flatten(0, 1)


def _neighbouring_channels(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (-1, num_heads // num_kv_heads)).mean(dim=1)


def _keeps_the_shape(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    pooled = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).mean(dim=1, keepdim=True)
    return pooled.expand(-1, num_heads // num_kv_heads, -1, -1).flatten(0, 2)


def _not_flattened(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).mean(dim=1)


def _pool_cases() -> list[Case]:
    def numbered(heads: int, head_dim: int, hidden: int) -> Tensor:
        """Row c of head h holds 10 · h² + c in every column: no two groups have the same mean."""
        rows = 10 * torch.arange(heads).square().unsqueeze(1) + torch.arange(head_dim)
        return rows.float().flatten().unsqueeze(1).repeat(1, hidden)

    return [
        Case("4 heads of width 2 become 2", (numbered(4, 2, 1), 4, 2)),
        Case("6 heads become 1: multi-query attention", (numbered(6, 2, 3), 6, 1)),
        Case("6 heads become 3, hidden size 5", (numbered(6, 4, 5), 6, 3)),
        Case("3 heads stay 3", (numbered(3, 2, 2), 3, 3)),
    ]


_POOL = Exercise(
    name="l03.mean_pool_heads",
    reference=mean_pool_heads,
    cases=_pool_cases,
    hints=(
        "Which rows of the matrix belong to head 0? Which query heads will have to share one KV head afterwards?",
        "Give the rows three names: group, member of the group, channel (weight.unflatten or view). Average over the "
        "members only: channel 0 with channel 0, never with channel 1. Then join groups and channels again.",
        "heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)); "
        "return heads.mean(dim=1).flatten(0, 1)",
    ),
    wrong=(
        WrongVersion("groups heads 0, 2, … and 1, 3, …; heads that share are neighbours", _strided_groups),
        WrongVersion("keeps the first head of each group and drops the others", _first_of_group),
        WrongVersion("adds the heads of a group without dividing", _sums),
        WrongVersion("averages neighbouring rows, so it mixes channels of one head", _neighbouring_channels),
        WrongVersion("keeps as many heads as before, though equal ones: no byte is saved", _keeps_the_shape),
        WrongVersion("returns [heads, width, hidden]; the checkpoint wants one matrix", _not_flattened),
    ),
)

EXERCISES = [_KV_BYTES, _INTENSITY, _ATTENTION, _ATTAINABLE, _MBU, _POOL]
