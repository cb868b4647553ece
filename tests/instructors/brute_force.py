"""Every answer of an exam by brute force: the slow and obvious way, without the code that computes the key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

from instructors.exam.question import Answer


def work(prompt: int, new: int) -> Answer:
    rows = pairs = 0
    for length in range(prompt, prompt + new):
        rows += length
        pairs += sum(1 for query in range(length) for _ in range(query + 1))
    return {"rows without a cache": rows, "pairs without a cache": pairs, "rows with a cache": prompt + (new - 1)}


def draw(weights: dict[int, Fraction], uniform: float) -> int:
    """The token at `uniform` of the line on which the tokens lie side by side."""
    point, end = Fraction(str(round(uniform, 4))) * sum(weights.values()), Fraction(0)
    for token in sorted(weights):
        end += weights[token]
        if point < end:
            return token
    raise AssertionError(uniform)


def sampling(percent: list[int], top_k: int, top_p: float, uniform: float) -> Answer:
    ranked = sorted(range(5), key=lambda token: -percent[token])[:top_k]
    total, kept, reached = sum(percent[token] for token in ranked), {}, Fraction(0)
    for token in ranked:
        if reached < Fraction(str(top_p)):
            kept[token] = Fraction(percent[token])
        reached += Fraction(percent[token], total)
    return {"tokens that can be drawn": sorted(kept), "token": draw(kept, uniform)}


def kv_bytes(
    layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, bytes_per_number: int, tokens: int
) -> Answer:
    each = sum(bytes_per_number * head_dim for _ in range(layers) for _ in range(kv_heads) for _ in "kv")
    return {"bytes per token": each, "GiB": each * tokens / 1024**3}


def growth(prompt: int, new: int, every: int) -> Answer:
    buffer: list[int | None] = []
    rows = allocations = copied = 0
    for arriving in [prompt, *[1] * new]:
        if rows + arriving > len(buffer):
            size = next(size for size in range(every, 10_000, every) if size >= rows + arriving)
            old, buffer = buffer, [None] * size
            buffer[:rows] = old[:rows]
            allocations, copied = allocations + 1, copied + rows
        for row in range(rows, rows + arriving):
            buffer[row] = row
        rows += arriving
    return {"allocations": allocations, "rows copied": copied, "unused rows": buffer.count(None)}


def mask(past: int, new: int) -> Answer:
    visible = sum(column <= past + row for row in range(new) for column in range(past + new))
    return {"rows": new, "columns": past + new, "visible pairs": visible}


def requests(memory: int, weights: float, kib: int, tokens: int) -> Answer:
    left, count = round(memory * 1e9) - round(weights * 1e9), 0
    while left >= kib * 1024 * tokens:
        left, count = left - kib * 1024 * tokens, count + 1
    return {"requests": count}


def roofline(rows: int, inputs: int, outputs: int, peak: int, bandwidth: int) -> Answer:
    operations = rows * outputs * (2 * inputs)
    moved = 2 * (inputs * outputs + rows * inputs + rows * outputs)
    computing, moving = operations / (peak * 1e6), moved / (bandwidth * 1e3)  # microseconds
    limit = "memory" if moving > computing else "arithmetic"
    return {
        "operations per byte": operations / moved,
        "limited by": limit,
        "least microseconds": max(computing, moving),
    }


def heads(heads: int, kv_heads: int, drafts: int) -> Answer:
    def per_byte(new: int, width: int) -> float:
        d = 64
        operations = sum(2 * d + 2 * d for query_head in range(heads) for _ in range(new))
        return operations / (kv_heads * 2 * d * width)

    return {"decoding": per_byte(1, 2), "verifying": per_byte(drafts + 1, 2), "decoding, INT8 cache": per_byte(1, 1)}


def codes(row: list[float]) -> Answer:
    scale = max(map(abs, row)) / 7
    best = [min(range(-7, 8), key=lambda code: abs(code * scale - x)) for x in row]
    error = max(abs(code * scale - x) for code, x in zip(best, row, strict=True))
    return {"scale": scale, "codes": best, "largest error": round(error, 4)}


def packed(codes: list[int]) -> Answer:
    bits = [f"{code % 16:04b}" for code in codes]
    return {"bytes, hexadecimal": [f"{int(bits[1] + bits[0], 2):02x}", f"{int(bits[3] + bits[2], 2):02x}"]}


def cache_bytes(layers: int, heads: int, kv_heads: int, head_dim: int, group: int) -> Answer:
    numbers = len([0 for _ in range(2 * layers * kv_heads * head_dim)])
    groups = len(range(0, numbers, group))
    return {"bytes per token": numbers // 2 + 4 * groups, "bits per number": (4 * numbers + 32 * groups) / numbers}


def w8a8(x: list[float], codes: list[int], scale: float) -> Answer:
    step = max(map(abs, x)) / 127
    y = sum(round(value / step) * code for value, code in zip(x, codes, strict=True)) * step * scale
    return {"scale of the token": step, "y": y}


def group_bits(billions: float, group: int) -> Answer:
    bits = (4 * group + 16 + 8) / group
    return {"bits per weight": bits, "GB": billions * bits / 8, "times smaller than float16": 16 / bits}


def slots(table: list[int], size: int, start: int, count: int) -> Answer:
    every = [slot for block in table for slot in range(block * size, (block + 1) * size)]
    return {"slots": every[start : start + count]}


def waste(lengths: list[int], size: int, longest: int) -> Answer:
    blocks = sum(len(range(0, length, size)) for length in lengths)
    empty = blocks * size - sum(lengths)
    reserved = longest * len(lengths)
    return {
        "blocks": blocks,
        "slots without a token": empty,
        "percent of the slots without a token": 100 * empty / (blocks * size),
        "the same percentage if the longest text were reserved": 100 * (reserved - sum(lengths)) / reserved,
    }


def prefix(size: int, common: int, second: int, first: int) -> Answer:
    blocks = 0
    while (blocks + 1) * size <= common and (blocks + 1) * size < second:
        blocks += 1
    return {"blocks found": blocks, "tokens computed": second - blocks * size}


def copy_on_write(prompt: int, samples: int, stored: int, size: int) -> Answer:
    """Which tokens does each block hold? Blocks with the same tokens of the prompt only are one."""
    texts = [[("prompt", i) for i in range(prompt)] + [(s, i) for i in range(stored)] for s in range(samples)]
    blocks = {tuple(text[i : i + size]) for text in texts for i in range(0, len(text), size)}
    apart = sum(len(range(0, len(text), size)) for text in texts)
    return {
        "blocks": len(blocks),
        "blocks copied": (samples - 1) * (prompt % size > 0),
        "blocks without sharing": apart,
    }


def batching(lengths: list[int], seats: int) -> Answer:
    static = sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        while waiting and len(running) < seats:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return {"static": static, "continuous": steps}


def budget(wanted: list[int], budget: int) -> Answer:
    shares = [1] * len(wanted)  # everyone's one token first, then by urgency
    left = budget - len(wanted)
    for i, most in enumerate(wanted):
        while left > 0 and shares[i] < most:
            shares[i], left = shares[i] + 1, left - 1
    return {"tokens of each": shares}


def admission(waiting: list[int], budget: int, seats: int, free: int, size: int) -> Answer:
    shares: list[int] = []
    for tokens in waiting:
        blocks = len(range(0, tokens, size))
        if len(shares) >= seats or blocks > free or budget <= 0:
            break
        shares.append(min(tokens, budget))
        free, budget = free - blocks, budget - shares[-1]
    return {"tokens of the admitted": shares}


def lanes(rows: int, columns: int, block: int) -> Answer:
    lanes = [
        column + lane < columns for _ in range(rows) for column in range(0, columns, block) for lane in range(block)
    ]
    return {"programs": len(lanes) // block, "masked lanes": lanes.count(False)}


def fusion(millions: int, bandwidth: int, operations: int) -> Answer:
    once = millions * 1e6 * (4 + 4)
    return {
        "MB, one kernel": once / 1e6,
        "MB, one operation after the other": operations * once / 1e6,
        "least microseconds, one kernel": once / (bandwidth * 1e9) * 1e6,
    }


def merge(scores_a: list[int], values_a: list[int], scores_b: list[int], values_b: list[int]) -> Answer:
    scores, values = scores_a + scores_b, values_a + values_b
    weights = [math.exp(score - max(scores)) for score in scores]
    out = sum(w * v for w, v in zip(weights, values, strict=True))
    return {"m": max(scores), "l": sum(weights), "o": out, "attention": out / sum(weights)}


def accept(p: list[int], q: list[int], draft: int) -> Answer:
    chances = [min(Fraction(1), Fraction(a, b)) for a, b in zip(p, q, strict=True)]
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    return {
        "chance of this draft": float(chances[draft]),
        "chance of any draft": sum(min(a, b) for a, b in zip(p, q, strict=True)) / 100,
        "residual": [a / sum(left) for a in left],
    }


def chain(drafts: list[int], q: list[list[int]], p: list[list[int]], uniforms: list[float]) -> Answer:
    exact = [Fraction(str(round(u, 4))) for u in uniforms]
    committed = []
    for i, x in enumerate(drafts):
        if exact[i] >= Fraction(p[i][x], q[i][x]):
            left = {t: Fraction(max(0, p[i][t] - q[i][t])) for t in range(3)}
            return {"tokens": [*committed, draw(left, uniforms[2])]}
        committed.append(x)
    return {"tokens": [*committed, draw({t: Fraction(p[2][t]) for t in range(3)}, uniforms[2])]}


def rollback(text: int, drafts: int, accepted: int) -> Answer:
    target = ["text"] * text + ["good"] * accepted + ["bad"] * (drafts - accepted)
    draft = target[:-1]
    return {
        "rows of the target": sum(row != "bad" for row in target),
        "rows of the draft": sum(row != "bad" for row in draft),
        "tokens of the round": accepted + 1,
    }


def speed_up(alphas: list[float], count: int, c: float, v: float) -> Answer:
    tokens = 0.0
    for accepted in range(count + 1):  # exactly so many, and one of the target
        ends = 1 - alphas[accepted] if accepted < count else 1
        tokens += (accepted + 1) * math.prod(alphas[:accepted]) * ends
    return {"tokens per round": tokens, "speed-up": tokens / (count * c + v)}


def best_gamma(alpha: float, c: float, v: list[float]) -> Answer:
    speeds = {g: sum(alpha**i for i in range(g + 1)) / (g * c + v[g]) for g in range(5)}
    return {"drafts per round": max(speeds, key=speeds.__getitem__)}


def ngram(tokens: list[int], longest: int, count: int) -> Answer:
    matches = [
        (n, end)
        for n in range(1, longest + 1)
        for end in range(n, len(tokens))
        if tokens[end - n : end] == tokens[len(tokens) - n :]
    ]
    if not matches:
        return {"drafts": []}
    _, end = max(matches)
    return {"drafts": list(itertools.islice(itertools.cycle(tokens[end:]), count))}


def tree(parents: list[int], draft: int) -> Answer:
    def path(i: int) -> set[int]:
        return {-1} if i == -1 else {i} | path(parents[i])

    return {
        "visible (-1: the root)": sorted(path(draft)),
        "entries of the mask that are true": sum(len(path(i)) for i in range(-1, len(parents))),
    }


def break_even(billions: int, kib: int, mega: float, rows: int, peak: int, bandwidth: float) -> Answer:
    def waits(context: float) -> bool:
        operations = rows * (2 * billions * 1e9 + context * mega * 1e6)
        return context * kib * 1024 / (bandwidth * 1e12) > operations / (peak * 1e12)

    low, high = 0.0, 1e15
    if not waits(high):
        return {"tokens": math.inf}
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if waits(middle) else (middle, high)
    return {"tokens": high}


def sink_view(table: list[int], size: int, tokens: int, most: int) -> Answer:
    newest = (tokens - 1) // size
    full = list(range(newest))
    kept = full if len(full) <= most else [0, *(full[-(most - 1) :] if most > 1 else [])]
    seen = [i for block in [*kept, newest] for i in range(block * size, min(tokens, (block + 1) * size))]
    return {
        "blocks read": [table[block] for block in [*kept, *range(newest, len(table))]],
        "index of the newest token": seen.index(tokens - 1),
        "tokens left out": tokens - len(seen),
    }


def channels(q: list[int], k: list[int], count: int) -> Answer:
    ranked = sorted(range(4), key=lambda i: -(q[i] ** 2 * k[i] ** 2))
    return {"channels": sorted(ranked[:count])}


def low_rank(kv_heads: int, head_dim: int, rank: int) -> Answer:
    keys = values = kv_heads * head_dim
    together = 100 * (keys + rank) / (keys + values)
    return {"percent, values at this rank": 100 * rank / values, "percent, keys and values": together}


def load(kib: int, bandwidth: float, latency: int, milliseconds: float) -> Answer:
    def loading_wins(tokens: float) -> bool:
        return latency + tokens * kib * 1024 / (bandwidth * 1e6) < tokens * milliseconds

    low, high = 0.0, 1e15
    if not loading_wins(high):
        return {"tokens": math.inf}
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if loading_wins(middle) else (middle, high)
    return {"tokens": high}


def split(tokens: int, kv: int, hidden: int, bandwidth: int, microseconds: int) -> Answer:
    def milliseconds(l: int) -> Fraction:  # noqa: E741
        link = Fraction(1024, bandwidth * 10**6)
        return l * hidden * link + max(Fraction(l * microseconds, 1000), (tokens - l) * kv * link)

    best = min(range(tokens + 1), key=milliseconds)
    return {"tokens to recompute": best, "milliseconds": float(milliseconds(best))}


def next_limit(prefill: int, target: int, python: int, factor: int, limit: int) -> Answer:
    after = prefill + python + target / factor
    needed = next(f / 1000 for f in range(1, 10**6) if prefill + python + target / (f / 1000) <= limit)
    before = prefill + target + python
    return {"milliseconds": after, "speed-up": before / after, "factor needed for the limit": needed}


def calls(calls: int, each: int, mb: int, rate: int, giga: int) -> Answer:
    moving, computing = mb / rate, float(giga)  # both in milliseconds: MB per GB/s, 10⁹ operations at 10¹² per second
    return {
        "milliseconds": calls * each / 1000 + max(moving, computing),
        "without the calls": max(moving, computing),
    }


def all_reduce(size: int, kib: int, gigabytes: int, microseconds: int, layers: int) -> Answer:
    once, chunk = 0.0, kib * 1024 / size
    for _ in ("collect", "hand out"):
        for _ in range(size - 1):
            once += microseconds + chunk / gigabytes / 1000  # bytes over 10⁹ bytes per second, in µs
    return {"microseconds for one": once, "milliseconds for a step": 2 * layers * once / 1000}


def heads_of_a_rank(heads: int, kv_heads: int, size: int, rank: int) -> Answer:
    own = [head for head in range(heads) if head * size // heads == rank]
    read = sorted({head * kv_heads // heads for head in own})
    return {"query heads": own, "KV heads": read}


def structures(rows: int, columns: int, blocks: int, rank: int) -> Answer:
    numbers = sum(rows // blocks * rank for _ in range(blocks)) + sum(columns // blocks * rank for _ in range(blocks))
    numbers += sum(rank for _ in range(blocks) for _ in range(blocks))
    fitting = [r for r in range(1, rows) if r * rows + r * columns <= numbers]
    return {
        "numbers of BLAST": numbers,
        "percent of the matrix": numbers / rows / columns * 100,
        "rank of an SVD with at most as many": fitting[-1],
    }


def signs_and_exact(row: list[int], count: int) -> Answer:
    sizes = sorted(abs(w) for w in row)
    rest, limit = sizes[: len(row) - count], sizes[len(row) - count]
    scale = sum(rest) / len(rest)
    exact = [(w - scale if w > 0 else w + scale) if abs(w) >= limit else 0.0 for w in row]
    return {"scale": scale, "exact part": exact}


BRUTE: dict[str, Callable[..., Answer]] = {
    "01.work": work,
    "01.sampling": sampling,
    "02.kv_bytes": kv_bytes,
    "02.growth": growth,
    "02.mask": mask,
    "03.requests": requests,
    "03.roofline": roofline,
    "03.heads": heads,
    "04.codes": codes,
    "04.packing": packed,
    "04.cache_bytes": cache_bytes,
    "05.w8a8": w8a8,
    "05.group_bits": group_bits,
    "06.slots": slots,
    "06.waste": waste,
    "06.prefix": prefix,
    "06.copy_on_write": copy_on_write,
    "07.batching": batching,
    "07.budget": budget,
    "07.admission": admission,
    "08.lanes": lanes,
    "08.fusion": fusion,
    "09.merge": merge,
    "10.accept": accept,
    "10.round": chain,
    "10.rollback": rollback,
    "11.speed_up": speed_up,
    "11.best_gamma": best_gamma,
    "11.ngram": ngram,
    "11.tree": tree,
    "12.break_even": break_even,
    "12.sink_view": sink_view,
    "13.channels": channels,
    "13.low_rank": low_rank,
    "14.load": load,
    "14.split": split,
    "15.next_limit": next_limit,
    "15.calls": calls,
    "16.all_reduce": all_reduce,
    "16.heads": heads_of_a_rank,
    "17.structures": structures,
    "17.signs": signs_and_exact,
}
