"""Makers for the lessons 01 to 05."""

from __future__ import annotations

import torch

from minillm.models.config import ModelConfig
from minillm.teaching.drives.l05 import round_in_groups_of_4
from minillm.teaching.exercise import Case
from minillm.teaching.exercises._l05_reference import w8a8_linear
from minillm.teaching.variants.random_numbers import Draw, Maker


def _attention(d: Draw) -> Case:
    tokens, kv_heads, group, width = d.int(2, 5), d.int(1, 2), d.int(1, 3), 2 * d.int(1, 3)
    q, k, v = d.normal(tokens, kv_heads * group, width), *d.normal(2, tokens, kv_heads, width)
    return Case(f"{tokens} tokens, {kv_heads * group} query heads, {kv_heads} KV heads of width {width}", (q, k, v))


def _rope(d: Draw) -> Case:
    tokens, heads, pairs = d.int(2, 4), d.int(1, 3), d.int(1, 3)
    positions = torch.tensor(sorted(d.some(range(60), tokens)))
    freqs = torch.tensor([d.float(0.01, 1.0) for _ in range(pairs)])
    label = f"{tokens} tokens of {heads} heads, {pairs} pairs"
    return Case(label, (d.normal(tokens, heads, 2 * pairs), positions, freqs))


def _sampling(d: Draw) -> Case:
    uniforms = tuple(d.float(0.001, 0.999) for _ in range(8))
    temperature, top_k, top_p = d.one_of(0.0, 0.7, 1.3), d.one_of(0, 2, 3), d.one_of(1.0, 0.91, 0.57)
    label = f"temperature {temperature}, top_k = {top_k}, top_p = {top_p}"
    logits = d.normal(d.int(5, 8))
    if temperature and top_k and d.one_of(True, False):
        logits, label = logits.round(), label + ", some tokens equally probable"
    return Case(label, (logits, uniforms, temperature, top_k, top_p))


def _generate(d: Draw) -> Case:
    prompt, most, eos = [d.int(0, 9) for _ in range(d.int(2, 6))], d.int(2, 7), d.int(0, 9)
    return Case(f"at most {most} tokens after a prompt of {len(prompt)}", (prompt, most, eos))


def _work(d: Draw) -> Case:
    prompt, new = d.int(2, 300), d.int(2, 80)
    return Case(f"{new} tokens after a prompt of {prompt}", (prompt, new))


def _append(d: Draw) -> Case:
    capacity = d.int(4, 9)
    past = d.int(0, capacity - 1)
    new = d.int(1, capacity - past + d.one_of(0, 0, 1))
    return Case(f"{new} tokens after {past}, room for {capacity}", (capacity, past, new))


def _mask(d: Draw) -> Case:
    new, past = d.int(1, 5), d.int(1, 7)
    return Case(f"{new} tokens after {past}", (new, past))


def config_of(d: Draw) -> ModelConfig:
    """A model of drawn sizes."""
    kv_heads, head_dim = d.int(1, 8), 8 * d.int(1, 16)
    heads = kv_heads * d.int(2, 6)
    hidden = 64 * d.int(1, 40)
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=d.int(2, 60),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )


def _kv_bytes(d: Draw) -> Case:
    config, width = config_of(d), d.one_of(1, 2, 4)
    return Case(f"{config.num_layers} layers, {config.num_kv_heads} KV heads, {width} bytes", (config, width))


def _capacity(d: Draw) -> Case:
    every = d.int(1, 9)
    capacity = every * d.int(0, 4)
    past, new = d.int(0, capacity), d.int(1, 20)
    return Case(f"{new} tokens after {past} in a buffer of {capacity}, r = {every}", (capacity, past, new, every))


def _best_r(d: Draw) -> Case:
    numbers = d.int(30, 900), d.float(0.5, 4), d.float(0.5, 4), d.float(0, 30)
    return Case(f"{numbers[0]} tokens, other costs", numbers)


def _requests(d: Draw) -> Case:
    weights, per_token, tokens = d.int(1, 500), d.int(1, 9), d.int(1, 40)
    memory = weights + per_token * tokens * d.int(0, 9) + d.int(0, per_token * tokens - 1)
    return Case("other bytes", (memory, weights, per_token, tokens))


def _intensity(d: Draw) -> Case:
    return Case("other sizes", (d.int(1, 64), d.int(4, 900), d.int(4, 900), d.one_of(1, 2, 4)))


def _attention_intensity(d: Draw) -> Case:
    kv_heads = d.int(1, 8)
    return Case("other heads", (kv_heads * d.int(1, 8), kv_heads, d.int(1, 6), d.one_of(1, 2, 4)))


def _attainable(d: Draw) -> Case:
    return Case("another machine", (d.float(0.1, 20), d.float(50, 500), d.float(10, 90)))


def _mbu(d: Draw) -> Case:
    return Case("another step", (d.float(10, 900), d.float(1, 90), d.int(2, 16), d.float(0.5, 9), d.float(100, 900)))


def _pool(d: Draw) -> Case:
    kv_heads, group, width, hidden = d.int(1, 3), d.int(2, 4), d.int(2, 4), d.int(1, 5)
    heads = kv_heads * group
    return Case(f"{heads} heads of width {width} become {kv_heads}", (d.normal(heads * width, hidden), heads, kv_heads))


def _symmetric(d: Draw) -> Case:
    levels = d.one_of(127, 7, 31)
    x = d.normal(d.int(2, 4), d.int(1, 3), d.int(3, 8)) * d.float(0.1, 20)
    return Case(f"shape {list(x.shape)}, levels = {levels}", (x, levels))


def _pack(d: Draw) -> Case:
    return Case("other codes", (d.integers(-8, 7, d.int(2, 3), 2 * d.int(2, 4), dtype=torch.int8),))


def _unpack(d: Draw) -> Case:
    return Case("other bytes", (d.integers(0, 255, d.int(2, 3), d.int(2, 4), dtype=torch.uint8),))


def _per_channel(d: Draw) -> Case:
    size = d.int(2, 4)
    x = d.normal(size * d.int(1, 3), d.int(1, 2), d.int(1, 3)) * d.float(0.5, 9) + d.float(-3, 3)
    return Case(f"shape {list(x.shape)}, groups of {size}", (x, size))


def _cache_bytes(d: Draw) -> Case:
    config = config_of(d)
    return Case("another model", (config, d.one_of(4, 8), d.one_of(8, config.head_dim), d.one_of(2, 4)))


def _error_bound(d: Draw) -> Case:
    return Case("other queries", (d.normal(d.int(2, 3), d.int(2, 5)), d.normal(d.int(2, 4)).abs() + 0.01))


def _rows(d: Draw) -> Case:
    return Case("another matrix", (d.normal(d.int(2, 5), d.int(3, 7)) * d.float(0.1, 30),))


def _w8a8(d: Draw) -> Case:
    while True:
        out, inputs = d.int(2, 5), d.int(3, 30)
        codes, scale = d.integers(-127, 127, out, inputs, dtype=torch.int8), d.normal(out).abs() + 0.01
        x = d.normal(d.int(2, 4), inputs) * d.float(0.1, 9)
        sizes = w8a8_linear(x, codes, scale).abs()
        if sizes.amin() > 0.01 * sizes.amax():  # a sum that nearly cancels depends on the order of its terms
            return Case(f"{inputs} inputs, {out} outputs", (x, codes, scale))


def _groups(d: Draw) -> Case:
    size = d.one_of(2, 4, 8)
    return Case(f"groups of {size}", (d.normal(d.int(2, 3), size * d.int(2, 3)) * d.float(0.1, 9), size))


def _awq(d: Draw) -> Case:
    grid = tuple(sorted(d.some((0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0), 4)))
    x = d.normal(12, 8) * torch.tensor([d.float(0.1, 9) for _ in range(8)])
    return Case("other channels", (d.normal(6, 8), x, round_in_groups_of_4, grid))


def _outliers(d: Draw) -> Case:
    return Case("another matrix", (d.normal(d.int(4, 9), d.int(4, 9)), d.one_of(0.1, 0.25, 0.4)))


MAKERS: dict[str, Maker] = {
    "l01.causal_attention": _attention,
    "l01.apply_rope": _rope,
    "l01.sample_next": _sampling,
    "l01.generate_naive": _generate,
    "l01.total_work": _work,
    "l02.append_kv": _append,
    "l02.offset_mask": _mask,
    "l02.kv_bytes_per_token": _kv_bytes,
    "l02.next_capacity": _capacity,
    "l02.best_r": _best_r,
    "l03.requests_that_fit": _requests,
    "l03.arithmetic_intensity": _intensity,
    "l03.attention_intensity": _attention_intensity,
    "l03.attainable": _attainable,
    "l03.mbu": _mbu,
    "l03.mean_pool_heads": _pool,
    "l04.quantise_symmetric": _symmetric,
    "l04.pack_int4": _pack,
    "l04.unpack_int4": _unpack,
    "l04.quantise_per_channel": _per_channel,
    "l04.cache_bytes": _cache_bytes,
    "l04.score_error_bound": _error_bound,
    "l05.quantise_rows": _rows,
    "l05.w8a8_linear": _w8a8,
    "l05.quantise_groups": _groups,
    "l05.awq_scale": _awq,
    "l05.split_outliers": _outliers,
}
