"""Questions on the lessons 01 to 03."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instructors.exam.question import Answer, Numbers, Question
from minillm.models.config import ModelConfig
from minillm.sampling import SamplingParams
from minillm.sampling.host import SamplingRow, probs_from_logits
from minillm.teaching.exercises.l02_kv_cache import shape
from minillm.teaching.variants.random_numbers import Draw

Function = Callable[..., Any]
GIB = 1 << 30
GB = 10**9


def _work(d: Draw) -> Numbers:
    return {"prompt": d.int(40, 400), "new": d.int(8, 60)}


def _work_answer(total_work: Function, prompt: int, new: int) -> Answer:
    rows, pairs = total_work(prompt, new)
    return {"rows without a cache": rows, "pairs without a cache": pairs, "rows with a cache": prompt + new - 1}


def _sampling(d: Draw) -> Numbers:
    percent = d.some(range(6, 25), 4)
    while 100 - sum(percent) in percent:
        percent = d.some(range(6, 25), 4)
    percent.insert(d.int(0, 4), 100 - sum(percent))
    # Ends that no sum of whole percents can meet, so that no rounding decides.
    return {
        "percent": percent,
        "top_k": d.int(3, 4),
        "top_p": d.one_of(0.555, 0.655, 0.755, 0.855),
        "uniform": d.int(0, 999) / 1000 + 0.0007,
    }


def _sampling_answer(sample_next: Function, percent: list[int], top_k: int, top_p: float, uniform: float) -> Answer:
    logits = torch.tensor(percent, dtype=torch.float64).log().float()
    probs = probs_from_logits(logits[None], [SamplingRow(SamplingParams(top_k=top_k, top_p=top_p))])[0]
    token = sample_next(logits, uniform, 1.0, top_k, top_p)
    return {"tokens that can be drawn": probs.nonzero().flatten().tolist(), "token": token}


def model_sizes(d: Draw) -> Numbers:
    """The sizes of a model that decide on the bytes of its cache."""
    kv_heads = d.one_of(2, 4, 8)
    sizes = {"heads": kv_heads * d.int(2, 8), "kv_heads": kv_heads, "head_dim": d.one_of(64, 96, 128)}
    return {"layers": d.int(16, 80), **sizes}


def _kv_bytes(d: Draw) -> Numbers:
    sizes = model_sizes(d)
    return {
        **sizes,
        "hidden": sizes["heads"] * (sizes["head_dim"] + 64),
        "bytes_per_number": d.one_of(1, 2, 4),
        "tokens": 1024 * d.int(4, 64),
    }


def config_of(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """A model of these sizes, 64 wider per head than its heads need: a formula that divides is wrong for it."""
    return shape(layers, heads * (head_dim + 64), heads, kv_heads, head_dim)


def _kv_bytes_answer(
    kv_bytes_per_token: Function,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    bytes_per_number: int,
    tokens: int,
) -> Answer:
    each = kv_bytes_per_token(config_of(layers, heads, kv_heads, head_dim), bytes_per_number)
    return {"bytes per token": each, "GiB": each * tokens / GIB}


def _growth(d: Draw) -> Numbers:
    return {"prompt": d.int(10, 60), "new": d.int(20, 90), "every": d.int(7, 24)}


def _growth_answer(next_capacity: Function, prompt: int, new: int, every: int) -> Answer:
    capacity, copied = next_capacity(0, 0, prompt, every)
    allocations = 1
    for past in range(prompt, prompt + new):
        larger, rows = next_capacity(capacity, past, 1, every)
        allocations += larger != capacity
        capacity, copied = larger, copied + rows
    return {"allocations": allocations, "rows copied": copied, "unused rows": capacity - prompt - new}


def _mask(d: Draw) -> Numbers:
    return {"past": d.int(20, 300), "new": d.int(5, 40)}


def _mask_answer(offset_mask: Function, past: int, new: int) -> Answer:
    mask = offset_mask(new, past)
    return {"rows": mask.shape[0], "columns": mask.shape[1], "visible pairs": int(mask.sum())}


def _requests(d: Draw) -> Numbers:
    return {
        "memory": d.one_of(24, 40, 48, 80),
        "weights": d.int(60, 180) / 10,
        "kib": d.one_of(48, 64, 96, 128, 160),
        "tokens": 512 * d.int(2, 16),
    }


def _requests_answer(requests_that_fit: Function, memory: int, weights: float, kib: int, tokens: int) -> Answer:
    return {"requests": requests_that_fit(memory * GB, round(weights * GB), kib * 1024, tokens)}


def _linear(d: Draw) -> Numbers:
    return {
        "rows": d.one_of(1, 4, 16, 64, 512, 2048),
        "inputs": 1024 * d.int(1, 8),
        "outputs": 1024 * d.int(1, 14),
        "peak": d.int(40, 400),
        "bandwidth": d.int(400, 3000),
    }


def _linear_answer(intensity: Function, rows: int, inputs: int, outputs: int, peak: int, bandwidth: int) -> Answer:
    from minillm.teaching.registry import find

    value = intensity(rows, inputs, outputs, 2)
    ridge = peak * 1e12 / (bandwidth * 1e9)
    rate = find("l03.attainable").reference(value, peak * 1e12, bandwidth * 1e9)
    return {
        "operations per byte": float(value),
        "limited by": "memory" if value < ridge else "arithmetic",
        "least microseconds": 2 * rows * inputs * outputs / rate * 1e6,
    }


def _heads(d: Draw) -> Numbers:
    kv_heads = d.one_of(1, 2, 4, 8)
    return {"heads": kv_heads * d.int(2, 8), "kv_heads": kv_heads, "drafts": d.int(1, 7)}


def _heads_answer(attention_intensity: Function, heads: int, kv_heads: int, drafts: int) -> Answer:
    return {
        "decoding": float(attention_intensity(heads, kv_heads, 1, 2)),
        "verifying": float(attention_intensity(heads, kv_heads, drafts + 1, 2)),
        "decoding, INT8 cache": float(attention_intensity(heads, kv_heads, 1, 1)),
    }


QUESTIONS = [
    Question(
        "01.work",
        5,
        "A model decodes greedily **without** a KV cache: it runs the whole text through the model for every new "
        "token. The prompt has {prompt} tokens, {new} new tokens are generated. How many rows (tokens) go through "
        "the linear layers in all, and how many query–key pairs does one layer's causal attention compute per head? "
        "How many rows would go through the model with a KV cache?",
        _work,
        _work_answer,
        "Forward i runs prompt + i rows, i = 0 … new − 1, and n (n + 1) / 2 pairs for n rows. With a cache every token "
        "but the last new one goes through once.",
        "l01.total_work",
    ),
    Question(
        "01.sampling",
        5,
        "The model's probabilities for the tokens 0 to 4 are {percent} percent, in this order. Temperature 1, top-k = "
        "{top_k}, then top-p = {top_p}, in vLLM's order, with the probabilities renormalised after top-k. Which tokens "
        "can be drawn? Which one does the uniform number {uniform} draw, if tokens are laid side by side by their id?",
        _sampling,
        _sampling_answer,
        "top-k keeps the k largest and renormalises; top-p keeps the largest ones up to and including that with which "
        "the sum reaches p; what remains is renormalised; the draw takes the first id whose cumulative probability "
        "exceeds the number.",
        "l01.sample_next",
    ),
    Question(
        "02.kv_bytes",
        4,
        "A model has {layers} layers, the hidden size {hidden}, {heads} query heads and {kv_heads} KV heads of width "
        "{head_dim}. Its KV cache stores {bytes_per_number} byte(s) per number. How many bytes does one token add to "
        "the cache? How many GiB (2³⁰ bytes) does one request of {tokens} tokens need?",
        _kv_bytes,
        _kv_bytes_answer,
        "2 (key and value) · layers · KV heads · width · bytes. Query heads store nothing.",
        "l02.kv_bytes_per_token",
    ),
    Question(
        "02.growth",
        6,
        "A cache in one contiguous buffer starts empty. When rows do not fit, a new buffer is allocated whose size "
        "is the smallest multiple of {every} that holds them, and the old rows are copied. A prompt of {prompt} "
        "tokens is stored at once, then {new} tokens one by one. How many allocations are there, how many rows are "
        "copied in all, and how many rows of the last buffer are unused?",
        _growth,
        _growth_answer,
        "The buffer grows at each multiple of r that the length passes, and each time copies all rows so far.",
        "l02.next_capacity",
    ),
    Question(
        "02.mask",
        4,
        "{past} tokens are cached; the next chunk of the prompt has {new} tokens. What is the shape of the attention "
        "mask of this step (rows: queries, columns: keys), and how many of its entries allow attention?",
        _mask,
        _mask_answer,
        "Each new token sees all cached tokens, itself and the new ones before it: new · past + new (new + 1) / 2.",
        "l02.offset_mask",
    ),
    Question(
        "03.requests",
        4,
        "A GPU has {memory} GB (10⁹ bytes). The weights take {weights} GB, the cache {kib} KiB (1024 bytes) per token. "
        "How many requests of {tokens} tokens each fit?",
        _requests,
        _requests_answer,
        "Subtract the weights, which all requests share; divide by the bytes of one request; round down.",
        "l03.requests_that_fit",
    ),
    Question(
        "03.roofline",
        7,
        "A linear layer with {inputs} inputs and {outputs} outputs multiplies {rows} row(s); all numbers have 2 "
        "bytes. The machine does {peak} · 10¹² operations and reads {bandwidth} · 10⁹ bytes per second. What is the "
        "arithmetic intensity (weights, inputs and outputs moved once), what limits the layer, memory or arithmetic, "
        "and how many microseconds does it take at least?",
        _linear,
        _linear_answer,
        "2 · rows · in · out operations over 2 · (in · out + rows · (in + out)) bytes; compare with peak / bandwidth; "
        "divide the operations by the lower of peak and intensity · bandwidth.",
        "l03.arithmetic_intensity",
    ),
    Question(
        "03.heads",
        5,
        "A model has {heads} query heads over {kv_heads} KV head(s) and a cache in bfloat16. The context is long. "
        "How many operations per byte does attention do when it decodes one token? When it verifies {drafts} "
        "draft(s), that is {drafts} + 1 tokens, in one forward? When it decodes over an INT8 cache (scales not "
        "counted)?",
        _heads,
        _heads_answer,
        "2 · (query heads per KV head) · (new tokens) / (bytes per number): everything that shares one reading.",
        "l03.attention_intensity",
    ),
]
