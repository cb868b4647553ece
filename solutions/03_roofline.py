# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 3. Heads, bytes and the roofline
#
# **Question.** *Which is this machine short of when it writes a token, arithmetic or bytes? And what do fewer KV heads
# buy?*
#
# A processor does two things at once: it fetches numbers from memory and it computes with them. Whichever takes longer
# decides the time, and the other one waits. So before making anything faster, find out which one it is. Halving the
# arithmetic of work that waits for memory buys nothing at all.
#
# In this lesson you count both for every part of a model, measure what your machine can do at most, and draw the one
# picture that holds the two together. Then you use it: you take a trained model, merge its KV heads, run it in the
# engine, and see what that saves, what it breaks, and when nobody would notice either.
#
# You need to know what the KV cache stores (lesson 2). Everything runs on a laptop's CPU.

# %%
import os

import torch

from minillm import LLM
from minillm.teaching import check, hint, predict, reveal, use

name = os.environ.get("MINILLM_MODEL", "minicoder")  # any Llama, Mistral, Qwen or SmolLM checkpoint works too
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
options = {
    "dtype": "float32",
    "device": "cpu",
    "enforce_eager": True,  # plain PyTorch: what is counted here is what runs
    "num_kv_blocks": 64,
    "block_size": 16,
    "max_num_batched_tokens": 512,
}
llm = LLM(name, **options)
model = llm.engine.runner.model
config = model.config
print(
    f"{name}: {config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} query heads over "
    f"{config.num_kv_heads} KV heads of width {config.head_dim}"
)

# %% [markdown]
# ## The question, in numbers
#
# Two ways of using the same model. *Decoding* runs one new token through all layers. *Prefill* runs a whole prompt, here
# 256 tokens. Count what each must do:
#
# * **operations**: a weight is multiplied and added once per row, so 2 per weight and row. Attention takes
#   $4 \cdot \text{width}$ for every query head and every key it looks at: half for the score, half for the value.
#   (Norms, RoPE and the softmax are small beside these and are left out in the whole lesson.)
# * **bytes**: every weight must be fetched once, and so must the cache. With 4-byte numbers.

# %%
from minillm.models.decoder import Decoder

matrices = [p for layer in model.layers for p in layer.parameters() if p.ndim == 2]
weights_per_row = sum(p.numel() for p in matrices)


def weight_bytes(model: Decoder) -> int:
    """What one step reads of the weights: all layers and the unembedding (of the embedding, a few rows only)."""
    return 4 * (sum(p.numel() for p in model.layers.parameters()) + model.lm_head.weight.numel())


def operations(rows: int, pairs: int, logits: int) -> int:
    """`rows` through the layers, `pairs` of a query and a key it sees, `logits` rows over the vocabulary."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * weights_per_row * rows + attention + 2 * config.vocab_size * config.hidden_size * logits


context = 256
cache_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * context
moved = weight_bytes(model) + cache_bytes
decode_work = operations(rows=1, pairs=context, logits=1)
prefill_work = operations(rows=context, pairs=context * (context + 1) // 2, logits=1)
print("                           million operations   million bytes   operations per byte")
for label, work in (("decode 1 token after 256", decode_work), ("prefill 256 tokens", prefill_work)):
    print(f"{label:25} {work / 1e6:19,.0f} {moved / 1e6:15,.1f} {work / moved:21,.2f}")

# %% [markdown]
# The bytes are the same. The operations differ by a factor of two hundred. Decoding does about **half an operation for
# every byte it fetches**, prefill more than a hundred. That last column is called *arithmetic intensity*, and it is a
# property of the work. How many operations a machine can do in the time it fetches a byte is a property of the machine.
# Comparing the two answers the question.
#
# ## Predict
#
# 1. You push more and more rows through one linear layer (4-byte weights). At first additional rows are free, because
#    the time goes into fetching the weights. **From how many rows on does the arithmetic take longer** on this machine?
# 2. *Model bandwidth utilisation* is the share of the memory's speed that decoding really uses. **How many percent**
#    does this model reach here, one request at a time?
# 3. minicoder codes unseen Python at about 1.2 bits per byte; guessing uniformly among its 4096 tokens would cost about
#    4. You replace the two KV heads of every layer by one, their average, without any training. **How many bits per
#    byte** then?

# %%
predict("l03.rows", None, unit="rows")
predict("l03.mbu", None, unit="percent")
predict("l03.mqa", None, unit="bits per byte")

# %% [markdown]
# ## Build
#
# ### Exercise 1: bytes of a cache
#
# Lesson 2 counted one token. Now a batch of texts, and models whose query heads share KV heads. Three names for one
# idea: **MHA** (multi-head attention) has a KV head for every query head; **GQA** (grouped-query attention) has one for
# every group of query heads; **MQA** (multi-query attention) has a single one.

# %%
from minillm.models.config import ModelConfig


def kv_bytes(config: ModelConfig, num_tokens: int, batch: int, bytes_per_value: int) -> int:
    """Bytes of the keys and values of `batch` texts of `num_tokens` tokens each, over all layers.

    config: has num_layers, hidden_size, num_heads (of the queries), num_kv_heads and head_dim; you need only some

    Example: 1 layer, 6 query heads over 2 KV heads of width 4, one text of one token, 4 bytes a number: 64 bytes.
    """
    ### BEGIN SOLUTION
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value
    return batch * num_tokens * per_token
    ### END SOLUTION


# %%
check("l03.kv_bytes")

# %% [markdown]
# Stuck? `hint("l03.kv_bytes", 1)`, then 2, then 3: each says more.
#
# Hold your count against the engine's own, and against a tutorial that is often cited. It says that Llama-2-70B has
# "roughly 80 GB of KV cache" at 4096 tokens, "often exceeding the model weights", and its formula multiplies by
# `n_heads`.

# %%
from dataclasses import replace

from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B

count_bytes = use("l03.kv_bytes")
with llm.trace() as trace:
    pass
[started] = trace.events
print(
    f"engine: {started.num_blocks} blocks of {started.block_size} tokens take {64 * started.bytes_per_block:,} bytes; "
    f"your count: {count_bytes(config, 64 * 16, 1, 4):,}"
)
full_heads = replace(LLAMA_2_70B, num_kv_heads=LLAMA_2_70B.num_heads)
print("\nLlama-2-70B, fp16, 4096 tokens                   1 text      64 texts")
for label, shape in (("as it is: 8 KV heads", LLAMA_2_70B), ("if it were MHA: 64 (the formula)", full_heads)):
    one, many = (count_bytes(shape, 4096, batch, 2) for batch in (1, 64))
    print(f"{label:40} {one / 1e9:11.2f} GB {many / 1e9:10.1f} GB")
print(f"{'its weights, 69 billion in fp16':40} {69 * 2:11.2f} GB")

# %% [markdown]
# So: 1.34 GB for one text, 10.7 GB by the tutorial's own formula, and 80 GiB (85.9 GB) only for 64 texts at once. Nor
# would 80 GB exceed the weights, which have 138.
#
# ### Exercise 2: intensity of a linear layer
#
# $y = xW^\top$ for `rows` rows at once. Count the operations, count the bytes that must travel at least once (the
# weights, the input, the output), divide.


# %%
def arithmetic_intensity(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    """Operations per byte of y = x·Wᵀ; a multiplication and an addition are two operations.

    x: [rows, in_features], W: [out_features, in_features], y: [rows, out_features]

    Example: 2 rows, 3 in, 2 out, one byte a number: 24 operations over 6 + 6 + 4 = 16 bytes, so 1.5.
    """
    ### BEGIN SOLUTION
    operations = 2 * rows * in_features * out_features
    numbers = in_features * out_features + rows * (in_features + out_features)
    return operations / (numbers * bytes_per_value)
    ### END SOLUTION


# %%
check("l03.arithmetic_intensity")

# %% tags=["expected"] alt="Operations per byte against rows, both logarithmic. All lines rise as straight lines, about 2 per row divided by the bytes of a number, and then flatten: minicoder's small layer near 150, Llama-3-8B's in bf16 only beyond 1000. A dashed line marks the ridge of an H100 at 295."
from minillm.viz.charts import Axis, LineChart, Series

intensity_of = use("l03.arithmetic_intensity")
H100_BANDWIDTH, H100_RATE = 3.35e12, 989e12  # quoted: NVIDIA's data sheet, SXM, dense bf16
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
layers = {
    "minicoder's gate and up, fp32": (384, 1536, 4),
    "Llama-3-8B's gate, bf16": (4096, 14336, 2),
    "the same, INT8": (4096, 14336, 1),
}
for label, (fan_in, fan_out, width) in layers.items():
    one, many = (intensity_of(rows, fan_in, fan_out, width) for rows in (1, 4096))
    print(f"{label:30} 1 row: {one:5.2f} operations per byte; 4096 rows: {many:7.1f}")
LineChart(
    "Rows share one reading of the weights (counted)",
    Axis("rows", log=True, ticks=ROWS),
    Axis("operations per byte", log=True),
    [Series(label, ROWS, [intensity_of(n, *shape) for n in ROWS]) for label, shape in layers.items()]
    + [Series("ridge of an H100: 295", ROWS, [H100_RATE / H100_BANDWIDTH] * len(ROWS), style="modelled")],
    "Intensity rises in proportion to the rows, then flattens once the rows themselves outweigh the weights.",
)

# %% [markdown]
# With few rows it is simply $2 \cdot \text{rows} / \text{bytes}$: one row of fp32 does half an operation per byte,
# whatever the size of the layer. **Rows are what a batch buys**: eight requests decoding together are eight rows over
# one reading of the weights. So are the 256 tokens of a prompt, and the drafts of lesson 10.
#
# ### Exercise 3: intensity of attention
#
# Now the other half of the bytes. One new token of one request looks at its whole cache. Per cached token and KV head,
# a key and a value are fetched: `2 · head_dim` numbers. How many operations are done with them? Every query that shares
# this KV head makes a score (a product of `head_dim` numbers) and adds a share of the value (again `head_dim`).


# %%
def attention_intensity(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    """Operations per byte of attention over a long cache.

    num_new: new tokens of a request that look at the same cache in one step: 1 when decoding, γ + 1 when γ drafts are
    verified. Leave out the softmax, and the bytes of the queries: both are small beside a long cache.

    Example: one new token, MHA, 4 bytes a number: 0.5.
    """
    ### BEGIN SOLUTION
    return 2 * (num_heads // num_kv_heads) * num_new / bytes_per_value
    ### END SOLUTION


# %%
check("l03.attention_intensity")

# %%
attention_of = use("l03.attention_intensity")
kinds = [  # query heads, KV heads, bytes of a number
    ("Llama-2-7B, MHA, fp16", 32, 32, 2),
    ("Llama-3-8B, GQA, bf16", 32, 8, 2),
    ("Llama-2-70B, GQA, fp16", 64, 8, 2),
    ("Llama-3-8B's heads, INT8 cache", 32, 8, 1),
    ("32 heads over 1, MQA, bf16", 32, 1, 2),
    (f"{name}, fp32", config.num_heads, config.num_kv_heads, 4),
]
print("attention, operations per byte        1 new token   5 new tokens (4 drafts)")
for label, heads, kv_heads, width in kinds:
    print(f"{label:35} {attention_of(heads, kv_heads, 1, width):13.1f} {attention_of(heads, kv_heads, 5, width):16.1f}")

# %% [markdown]
# Look at what is **not** among the parameters of your function: the length of the context, and the batch. Twice the
# context is twice the operations over twice the bytes. Another request brings another cache, which nobody shares. A
# batch makes the linear layers denser and leaves attention exactly where it was. Only three things move it: query heads
# that share a KV head, new tokens that share a reading, and smaller numbers.
#
# ### Exercise 4: the roof
#
# A machine moves `bandwidth` bytes per second and does `peak_rate` operations per second, both at the same time. Work
# comes with an intensity. How many operations per second can it reach?


# %%
def attainable(intensity: float, peak_rate: float, bandwidth: float) -> float:
    """Operations per second that work of this intensity can reach at most.

    intensity: operations per byte; peak_rate: operations per second; bandwidth: bytes per second

    Example: half an operation per byte on a machine of 100 operations/s and 20 bytes/s: 10.
    """
    ### BEGIN SOLUTION
    return min(peak_rate, intensity * bandwidth)
    ### END SOLUTION


# %%
check("l03.attainable")

# %% [markdown]
# That is the whole **roofline model** (Williams, Waterman and Patterson 2009). On logarithmic axes it looks like a roof:
# a slope where bytes are short, a flat part where arithmetic is short, and a *ridge* between them. Here is a data centre
# GPU, an H100, with the work of Llama-3-8B on it. Nothing here was measured: the roof is *quoted* from the data sheet
# (dashed), and the points are *modelled* by your functions (hollow), so they lie on the roof by construction. What
# counts is how far left or right they are.

# %% tags=["expected"] alt="Roofline of an H100, ridge at 295 operations per byte. On the slope, from left to right: attention with 32, 8 and 1 KV heads at 1, 4 and 32 operations per byte; linear layers of 1, 16, 64 and 256 rows; whole decode steps of 1 and 64 requests. Only 2048 rows of a prompt lie right of the ridge."
from minillm.teaching.exercises.l02_kv_cache import LLAMA_3_8B
from minillm.viz.roofline import Point, Roof, Roofline

roof_of = use("l03.attainable")


def modelled(group: str, label: str, intensity: float) -> Point:
    """A point that reaches the H100's roof."""
    return Point(label, intensity, roof_of(intensity, H100_RATE, H100_BANDWIDTH), "modelled", group)


def whole_step(batch: int, context: int) -> float:
    """Operations per byte of one decode step of Llama-3-8B: 8 billion weights in bf16, and every request's cache."""
    attention = 4 * 32 * 32 * 128 * context * batch
    return (2 * 8e9 * batch + attention) / (2 * 8e9 + count_bytes(LLAMA_3_8B, context, batch, 2))


Roofline(
    "Llama-3-8B on an H100: where the work lies",
    Roof("H100 (data sheet)", H100_BANDWIDTH, H100_RATE, "quoted"),
    [modelled("attention, by KV heads", f"{n} KV heads", attention_of(32, n, 1, 2)) for n in (32, 8, 1)]
    + [
        modelled("linear layers, by rows", "1 row" if n == 1 else f"{n} rows", intensity_of(n, 4096, 14336, 2))
        for n in (1, 16, 64, 256, 2048)
    ]
    + [modelled("decode step at 4096 tokens, by batch", f"batch {n}", whole_step(n, 4096)) for n in (1, 64)],
)

# %% [markdown]
# On an H100 a byte is as expensive as **295 operations**. One request at a time uses a three-hundredth of its arithmetic
# units, and everything that decoding does, even 64 requests together, lies on the slope. That is why so much of this
# course is about bytes. Note also that 64 requests do not move the whole step 64 times as far to the right, only about
# twenty times: at 4096 tokens each, their caches weigh twice as much as the weights, and caches are not shared.
#
# Your machine is another machine. Measure it.
#
# ## See
#
# ### The ceilings of this machine
#
# Never from a data sheet: one large copy (every byte is read and written), and one product of two large matrices. This
# is what `minillm doctor --measure` does. One thread, because everything below runs on one.

# %% tags=["nbval-ignore-output"]
from minillm.ceilings import copy_bandwidth, matmul_rate

bandwidth = copy_bandwidth("cpu", repeats=5, num_bytes=2**27)
rate = matmul_rate("cpu", torch.float32, repeats=5)
here = Roof("this machine, one thread", bandwidth.median, rate.median)
print(f"copy bandwidth: {bandwidth}")
print(f"matrix product: {rate}")
print(f"ridge: {here.ridge:.2f} operations per byte")
reveal("l03.rows", round(here.ridge * 4 / 2, 1))  # intensity = 2 · rows / 4 bytes

# %% [markdown]
# A handful of rows. A CPU core has far less arithmetic per byte than a GPU, so it is short of bytes for a much shorter
# stretch: a batch of 64, which an H100 hardly notices, is right of the ridge here. **The answer to our question depends
# on the machine, and nothing but measuring it will tell.**
#
# ### Measured points
#
# Now the model's own layers, in the engine's own code:
#
# * its linear layers, with 1 to 64 rows. There are several copies of them, one after the other, so that the weights come
#   from memory and not from the processor's cache;
# * its attention, 8 requests decoding, with 64 to 512 tokens behind them.
#
# The place of a point from left to right is counted by your functions. Only its height is measured.

# %% tags=["nbval-ignore-output"]
import itertools
import statistics
import time
from collections.abc import Callable

from minillm.cache.paged import PagedKVCache
from minillm.models.runner import ModelRunner, Segment
from minillm.ops.linear import Linear, linear

# CPU time of this thread, so that whatever else runs on the machine does not count (Windows counts it too coarsely).
clock = time.thread_time if os.name == "posix" else time.perf_counter


def in_turn(runs: dict[object, Callable[[], object]], rounds: int = 5) -> dict[object, float]:
    """Median seconds of each run, taken A B C A B C …, so that a slow moment hits all of them. One round warms up."""
    seconds = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for key, run in runs.items():
            began = clock()
            run()
            if turn:
                seconds[key].append(clock() - began)
    return {key: statistics.median(each) for key, each in seconds.items()}


shapes_of_weights = [tuple(m.weight.shape) for m in model.layers.modules() if isinstance(m, Linear)]


def time_linears(rows_tried: tuple[int, ...]) -> dict[int, float]:
    """Seconds for one pass through all linear layers, for each number of rows."""
    num_copies = 1 + int(128e6 // (4 * weights_per_row))
    numbers = torch.randn(num_copies * weights_per_row)  # values do not matter for the time, where they lie does
    parts = numbers.split([fan_out * fan_in for fan_out, fan_in in shapes_of_weights] * num_copies)
    weights = [part.view(shape) for part, shape in zip(parts, shapes_of_weights * num_copies, strict=True)]
    inputs = {(rows, fan_in): torch.randn(rows, fan_in) for rows in rows_tried for _, fan_in in shapes_of_weights}
    runs = {rows: lambda rows=rows: [linear(inputs[rows, w.shape[1]], w) for w in weights] for rows in rows_tried}
    return {rows: seconds / num_copies for rows, seconds in in_turn(runs).items()}


def linear_bytes(rows: int) -> float:
    """Bytes that the linear layers of one copy must move."""
    return sum(2 * rows * a * b / intensity_of(rows, b, a, 4) for a, b in shapes_of_weights)


def decoding(model: Decoder, batch: int, context: int) -> tuple[ModelRunner, list[Segment]]:
    """The engine's runner with a cache of random numbers, and `batch` requests whose next token is number `context`."""
    blocks = -(-context // 16)
    cache = PagedKVCache(model.config, batch * blocks, 16, torch.float32, torch.device("cpu"))
    cache.keys.normal_()
    cache.values.normal_()
    tables = [list(range(r * blocks, (r + 1) * blocks)) for r in range(batch)]
    return ModelRunner(model, cache, 16), [Segment([5], context - 1, table) for table in tables]


def attention_only(model: Decoder, batch: int, context: int) -> Callable[[], object]:
    """The attention of all layers for one decode step, and nothing else."""
    runner, segments = decoding(model, batch, context)
    step, shape = runner.batch(segments), model.config
    q = torch.randn(batch, shape.num_heads, shape.head_dim)
    new = torch.randn(batch, shape.num_kv_heads, shape.head_dim)
    return lambda: [runner.cache.attend(layer, q, new, new, step) for layer in range(shape.num_layers)]


def attention_point(model: Decoder, batch: int, context: int, seconds: float, label: str) -> Point:
    """Where a measured attention lies."""
    shape = model.config
    work = 4 * shape.num_layers * shape.num_heads * shape.head_dim * context * batch
    intensity = attention_of(shape.num_heads, shape.num_kv_heads, 1, 4)
    return Point(label, intensity, work / seconds, group="attention of 8 requests")


rows_tried, contexts = (1, 2, 4, 8, 16, 32, 64), [n for n in (64, 256, 512) if n <= config.max_position_embeddings]
took = time_linears(rows_tried)
linear_points = []
for rows in rows_tried:
    work = 2 * rows * weights_per_row
    point = Point(f"{rows}", work / linear_bytes(rows), work / took[rows], group="linear layers, by rows")
    linear_points.append(point)
attended = in_turn({n: attention_only(model, 8, n) for n in contexts})
attention_points = [attention_point(model, 8, n, attended[n], f"{n} tokens") for n in contexts]
print("time against 1 row, linear layers: " + ", ".join(f"{n} rows {took[n] / took[1]:.1f}×" for n in rows_tried[1:]))
Roofline(f"The parts of {name} on this machine", here, linear_points + attention_points)

# %% [markdown]
# What to see, from left to right:
#
# * **The linear layers climb along the slope.** The first few additional rows cost almost nothing: read the line above
#   the picture. That is bytes being short. Right of the ridge every further row has its price, and 64 rows cost several
#   times what one costs. That is arithmetic being short. (Around the ridge a point is furthest from the roof: both limits
#   nearly bind there, and real code overlaps them less than perfectly.)
# * **Attention stands still.** Its three points lie exactly above each other. A longer context moves none of them to
#   the right, as you counted.
# * **Attention is far below the roof.** The dotted line is what is lost. Its bytes are few, but this PyTorch version
#   first gathers every request's blocks into one tensor (it writes and reads them once more), and then makes many tiny
#   products. A roof says what is possible. That a point is far below it says: *here is something to win, and it is not
#   less arithmetic*. (Lesson 9 builds the kernel that walks the blocks in place.)
#
# ### Exercise 5: model bandwidth utilisation
#
# Parts are one thing, a whole step another. If decoding is short of bytes, one number says how well an engine does it:
# of all bytes that could have been fetched in the time of a step, how many *had to be*?


# %%
def mbu(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    """Model bandwidth utilisation of one decode step for `batch` requests, between 0 and 1.

    weight_bytes: of the whole model; kv_bytes_per_request: of one request's cache; bandwidth: bytes per second

    Example: 60 bytes of weights, 20 of cache, one request, 2 seconds, 100 bytes per second: 80 of 200, so 0.4.
    """
    ### BEGIN SOLUTION
    must_read = weight_bytes + batch * kv_bytes_per_request
    return must_read / (seconds_per_step * bandwidth)
    ### END SOLUTION


# %%
check("l03.mbu")

# %% [markdown]
# ## Measure
#
# ### Whole steps
#
# Decoding with one request and with eight, at two contexts, and the prefill of 256 tokens. Plain PyTorch, one thread.

# %% tags=["nbval-ignore-output"]
utilisation = use("l03.mbu")


def step(model: Decoder, batch: int, context: int) -> Callable[[], object]:
    """One whole decode step."""
    runner, segments = decoding(model, batch, context)
    return lambda: runner.run(segments)


def prefill(model: Decoder, tokens: int) -> Callable[[], object]:
    """A whole prompt at once."""
    runner, [segment] = decoding(model, 1, tokens)
    return lambda: runner.run([Segment([5] * tokens, 0, segment.block_table)])


shapes = [(batch, context) for batch in (1, 8) for context in contexts[1:]]
took = in_turn({**{shape: step(model, *shape) for shape in shapes}, "prefill": prefill(model, 256)})
whole = []
print("                    million bytes      ms   bandwidth used (MBU)   arithmetic used")
for batch, context in shapes:
    per_request, seconds = count_bytes(config, context, 1, 4), took[batch, context]
    work = operations(batch, batch * context, batch)
    needed = weight_bytes(model) + batch * per_request
    share = utilisation(weight_bytes(model), per_request, batch, seconds, here.bandwidth)
    whole.append(Point(f"{batch} × {context}", work / needed, work / seconds, group="decode step: batch × context"))
    print(
        f"{batch} × {context:4} tokens {needed / 1e6:17.1f} {1000 * seconds:7.1f} {share:18.0%} "
        f"{work / seconds / here.rate:21.0%}"
    )
whole.append(Point("256 tokens", prefill_work / moved, prefill_work / took["prefill"], group="prefill"))
reveal("l03.mbu", round(100 * utilisation(weight_bytes(model), cache_bytes, 1, took[1, 256], here.bandwidth)))
Roofline(f"Whole steps of {name} on this machine", here, linear_points + whole)

# %% [markdown]
# Prefill is near the flat part: it is short of arithmetic, and everything that saves bytes leaves it cold. But
# decoding uses neither the bandwidth nor the arithmetic well. So what *is* it short of?
#
# The roofline knows two limits. A step has a third cost that is neither: it makes some five hundred calls into PyTorch,
# and each takes microseconds to start, however little it does. To see that, keep the number of layers and change the
# width (random weights do for timing):


# %% tags=["nbval-ignore-output"]
def of_width(hidden: int) -> Decoder:
    """As many layers as the real model, of another width, with random weights."""
    heads, kv_heads = hidden // 64, max(1, hidden // 192)
    shape = replace(
        config, hidden_size=hidden, intermediate_size=2 * hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=64
    )
    return Decoder(shape)


widths = (64, 192, 384, 576)
sized = {width: model if width == config.hidden_size else of_width(width) for width in widths}
took = in_turn({width: step(sized[width], 1, 256) for width in widths})
megabytes = [weight_bytes(sized[width]) / 1e6 for width in widths]
reached = [
    utilisation(weight_bytes(sized[w]), count_bytes(sized[w].config, 256, 1, 4), 1, took[w], here.bandwidth)
    for w in widths
]
smallest = took[64] / took[384]
print(
    f"a step of the smallest model, with {megabytes[0] / megabytes[2]:.0%} of the bytes, takes {smallest:.0%} of the time"
)
del sized
LineChart(
    "One request, 256 tokens: share of the bandwidth used, on this machine",
    Axis("million bytes of weights", log=True, ticks=tuple(round(m, 1) for m in megabytes)),
    Axis("MBU in percent"),
    [Series("measured, 8 layers of growing width", megabytes, [100 * r for r in reached])],
    "Small models use little of the bandwidth, because starting each operation costs more than its bytes; it grows with size.",
)

# %% [markdown]
# There is the third limit. **A small model in an interpreter is short of neither arithmetic nor bytes: it waits for
# operations to be started.** The cure is to start fewer of them: fused kernels, compiled steps, CUDA graphs. (The engine
# has a compiled step for the CPU; `enforce_eager=True` keeps it out of this lesson, and lesson 15 brings it.) Only when
# that is done, or the model is large, is MBU near what the memory can do, and then bytes are all that counts. (On an
# A100, gpt-fast reports 72% for a 7B model in bf16, compiled. Quoted, not measured here.)
#
# So the answer has three parts. *Prefill*: arithmetic. *Decoding a large model*: bytes. *Decoding a small one without
# fusing anything*: neither.
#
# ### Exercise 6: fewer heads
#
# Fewer KV heads are fewer bytes in the cache and a higher intensity of attention. Can you take them away from a model
# that is already trained? The recipe of the GQA paper (Ainslie et al. 2023): replace each group of KV heads by
# their **mean**. A projection's matrix holds its heads one after the other, `head_dim` rows each. Query head `h` will read
# KV head `h // (num_heads / num_kv_heads)`, so a group is made of neighbours.


# %%
from torch import Tensor


def mean_pool_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The matrix of a key or value projection with fewer heads: each new head is the mean of a group of old ones.

    weight:  [num_heads * head_dim, hidden], head after head; num_kv_heads divides num_heads
    returns: [num_kv_heads * head_dim, hidden]

    Example, one number per row, 4 heads of width 2 to 2: [0, 1, 10, 11, 40, 41, 90, 91] becomes [5, 6, 65, 66].
    """
    ### BEGIN SOLUTION
    heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))
    return heads.mean(dim=1).flatten(0, 1)
    ### END SOLUTION


# %%
check("l03.mean_pool_heads")

# %% [markdown]
# Your function now makes real checkpoints: a folder with `config.json` and weights, which the engine loads like any
# other. First the case where nothing may be lost. Give every query head a KV head of its own by *repeating* the ones it
# has: that is a true MHA checkpoint of 6 KV heads, three of them equal each time. Pool it back to 2.

# %%
import math
import shutil
import tempfile
from pathlib import Path

from minillm import SamplingParams
from minillm.bench.prompts import held_out_prompts
from minillm.models.loading import resolve, save_llama, stored_tensors
from minillm.models.names import stored_parts

pool = use("l03.mean_pool_heads")
workshop = tempfile.TemporaryDirectory()
Conversion = Callable[[Tensor, int, int], Tensor]


def repeat_heads(weight: Tensor, num_heads: int, num_copies: int) -> Tensor:
    """The opposite: `[num_heads * head_dim, hidden]` → `[num_copies * head_dim, hidden]`, each head several times."""
    return weight.unflatten(0, (num_heads, -1)).repeat_interleave(num_copies // num_heads, 0).flatten(0, 1)


def with_kv_heads(model: Decoder, num_kv_heads: int, conversion: Conversion) -> Decoder:
    """The same model with its key and value projections converted to that many heads."""
    converted = Decoder(replace(model.config, num_kv_heads=num_kv_heads))
    parts = stored_parts(converted.config)
    for tensor_name, tensor in stored_tensors(model):
        if "k_proj" in tensor_name or "v_proj" in tensor_name:
            tensor = conversion(tensor, model.config.num_kv_heads, num_kv_heads)
        parts[tensor_name].of(converted).copy_(tensor)
    return converted


def checkpoint(model: Decoder, folder: str) -> Path:
    """Write `model` beside a copy of the tokenizer, as a folder that any engine loads."""
    path = Path(workshop.name) / folder
    weights = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(resolve(name), path, ignore=weights, dirs_exist_ok=True)
    save_llama(model, path, torch.float32)
    return path


def engine(model: Decoder, folder: str) -> LLM:
    """An engine that runs `model` from such a folder."""
    path = checkpoint(model, folder)
    del model  # the engine loads its own copy from the folder
    return LLM(str(path), **options)


def write(llm: LLM) -> list[int]:
    """24 tokens, greedy."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return llm.generate("def read_lines(path):\n", params, use_tqdm=False)[0].outputs[0].token_ids


def bits_per_byte(llm: LLM, num_prompts: int = 32) -> float:
    """How many bits the model needs for each byte of code that it was not trained on; lower is better."""
    prompts = [p.prompt for p in held_out_prompts(num_prompts)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nats = size = 0
    for output in outputs:
        ids = output.prompt_token_ids[1:]  # nothing predicts the first token
        nats -= sum(row[token].logprob for token, row in zip(ids, output.prompt_logprobs[1:], strict=True))
        size += len(llm.engine.tokenizer.decode(ids).encode())
    return nats / math.log(2) / size


mha = with_kv_heads(model, config.num_heads, repeat_heads)
back = with_kv_heads(mha, config.num_kv_heads, pool)
original, pooled_back = write(llm), write(engine(back, "pooled_back"))
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
print(f"{config.num_kv_heads} KV heads → {config.num_heads} (repeated) → {config.num_kv_heads} (pooled)")
print(f"weights equal to the last bit: {same}; same 24 tokens from the engine: {pooled_back == original}")
del back

# %% [markdown]
# Equal heads pool without loss. Now heads that differ: minicoder's 2 KV heads become 1, which all 6 query heads share.
# Beside your mean, three other ways: keep the first head of each group, add the heads up, and start with random numbers.


# %%
def first_head(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))[:, 0].flatten(0, 1)


def sum_of_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).sum(1).flatten(0, 1)


def random_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    noise = torch.randn(
        num_kv_heads * weight.shape[0] // num_heads, *weight.shape[1:], generator=torch.Generator().manual_seed(0)
    )
    return noise * weight.std()


print(f"{'':30} KV bytes per token   bits per byte")
print(f"{f'{name}, {config.num_kv_heads} KV heads':30} {count_bytes(config, 1, 1, 4):18,} {bits_per_byte(llm):15.2f}")
conversions = {"mean": pool, "first head": first_head, "sum": sum_of_heads, "random": random_heads}
after = {}
for label, conversion in conversions.items():
    after[label] = bits_per_byte(engine(with_kv_heads(model, 1, conversion), f"mqa_{label}"))
    size = count_bytes(replace(config, num_kv_heads=1), 1, 1, 4)
    print(f"{f'1 KV head, {label}':30} {size:18,} {after[label]:15.2f}")
reveal("l03.mqa", round(after["mean"], 2))

# %% [markdown]
# **Half the bytes, and a much worse model.** The order is the paper's: the mean is the best start, then one of the heads,
# then random numbers. But it is a *start*. The paper goes on training for 5% of the original steps after pooling, and
# only then reports quality close to the original. Here nothing was trained, and nobody would use the result. (The sum is
# a mistake, and yet it is not far behind the mean. Remember it for *Break it*.) Random
# heads leave a model that is hardly better than guessing uniformly.
#
# So fewer heads are a decision for those who train a model. What does it buy those who run it?
#
# ### What fewer heads buy
#
# Three models that differ only in their KV heads: 6 (MHA), 2 (as it is) and 1 (MQA). First attention alone, on the
# roofline:

# %% tags=["nbval-ignore-output"]
mqa = with_kv_heads(model, 1, pool)
family = {config.num_heads: mha, config.num_kv_heads: model, 1: mqa}
longest = contexts[-1]
attended = in_turn({n: attention_only(each, 8, longest) for n, each in family.items()})
points = [attention_point(each, 8, longest, attended[n], f"{n} KV") for n, each in family.items()]
print(
    f"attention of 8 requests at {longest} tokens, against {config.num_heads} KV heads: "
    + ", ".join(f"{n} KV {attended[config.num_heads] / attended[n]:.1f}× faster" for n in list(family)[1:])
)
Roofline("The same attention with fewer KV heads, on this machine", here, points)

# %% [markdown]
# The points move to the right, and up: the same operations over fewer bytes. (The gain can exceed the ratio of
# the bytes: this kernel copies what it gathers and makes one product per KV head, and the smallest cache may fit into the
# processor's own.)
#
# Now the whole step, where attention is only a part. Each line is the time with 6 KV heads divided by the time with
# fewer. Dashed: what the bytes alone would give.

# %% tags=["nbval-ignore-output"]
longer = [16, *contexts]
batches = (1, 8)
took = {}
for batch, context in itertools.product(batches, longer):  # one after the other, so that few caches are in memory
    took |= in_turn({(n, batch, context): step(each, batch, context) for n, each in family.items()}, rounds=7)


def gain(n: int, batch: int, context: int) -> float:
    """How many times faster a step is with n KV heads than with one for each query head."""
    return took[config.num_heads, batch, context] / took[n, batch, context]


def byte_gain(n: int, batch: int, context: int) -> float:
    """The same, if bytes were all that counts."""
    large, small = (weight_bytes(m) + count_bytes(m.config, context, batch, 4) for m in (mha, family[n]))
    return large / small


LineChart(
    "A whole decode step against the same model with 6 KV heads, on this machine",
    Axis("context in tokens", log=True, ticks=tuple(longer)),
    Axis("times faster"),
    [Series(f"{n} KV, batch {b}", longer, [gain(n, b, c) for c in longer]) for b in batches for n in list(family)[1:]]
    + [Series("1 KV, batch 8, bytes alone", longer, [byte_gain(1, 8, c) for c in longer], style="modelled")],
    "Fewer KV heads buy little for one request or a short context, and more as batch and context grow.",
)

# %% [markdown]
# **Where fewer heads win, and where they lose.**
#
# * They win where the cache is most of the bytes: many requests, long contexts. Since a batch shares the weights but not
#   the caches, the larger the batch, the more of the bytes are cache.
# * They buy next to nothing for one short request: there the weights are all the bytes. Nor for prefill, which is short
#   of arithmetic and does the same arithmetic with any number of KV heads.
# * They also buy *room*, whatever the speed: half the bytes per token are twice the requests in the same memory. Often
#   that is the larger gain (lesson 7).
# * Past the ridge they buy nothing more. Count: with `group = num_heads / num_kv_heads` and 5 tokens to verify, fp32
#   attention of minicoder as MQA has an intensity of 15, on this kind of CPU far right of the ridge.
# * They cost quality, which must be trained back, and at one KV head they cannot be split over several GPUs: each gets
#   a copy.
#
# ## Break it
#
# ### A point above the roof
#
# Here is the sum of two vectors, written to a third: one operation for 12 bytes, far left on the slope. Once with vectors
# of 32 MB, and once with vectors of 128 KB, again and again. **Guess** where the second point will lie.


# %% tags=["nbval-ignore-output"]
def additions(length: int, repeats: int) -> Callable[[], object]:
    a, b, c = torch.randn(3, length)
    return lambda: [torch.add(a, b, out=c) for _ in range(repeats)]


sizes = {"32 MB": (2**23, 1), "128 KB, again and again": (2**15, 2**9)}
took = in_turn({label: additions(*size) for label, size in sizes.items()})
points = [
    Point(label, 1 / 12, length * repeats / took[label], group="a + b") for label, (length, repeats) in sizes.items()
]
Roofline("The same work twice", here, points)

# %% [markdown]
# The small vectors never leave the processor's own cache, so the slope, which was measured in main memory, does not hold
# for them. Whoever times one layer in a loop measures *this*, and then finds in the whole model, where other weights
# push it out in between, a fraction of that speed. That is why the measurement above took several copies of the layers.
# **A point well above the roof is always a mistake in one of three numbers**: the bytes (they came from elsewhere), the
# time, or the roof. (The large vectors may lie a little above it: the roof was measured by a copy, half of whose bytes are
# written, and reading is a little faster than writing.)
#
# ### Wrong ways to pool
#
# Five conversions of heads; the first is right. Three checks that you might write: the checkpoint loads and runs; the
# lossless case (6 equal heads in threes, pooled to 2) writes the same 24 tokens; the bits per byte of the real
# conversion, 2 → 1. **Guess** which of the wrong ones passes which check.


# %%
def strided_groups(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Groups heads 0, 2, 4 and 1, 3, 5 instead of 0, 1, 2 and 3, 4, 5."""
    return weight.unflatten(0, (num_heads // num_kv_heads, num_kv_heads, -1)).mean(0).flatten(0, 1)


def neighbouring_rows(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Averages rows that follow each other: channels of one head, instead of the same channel of several heads."""
    return weight.unflatten(0, (-1, num_heads // num_kv_heads)).mean(1)


after["strided groups"] = bits_per_byte(engine(with_kv_heads(model, 1, strided_groups), "mqa_strided"))
after["neighbouring rows"] = bits_per_byte(engine(with_kv_heads(model, 1, neighbouring_rows), "mqa_rows"))
wrong = {
    "first head": first_head,
    "sum": sum_of_heads,
    "strided groups": strided_groups,
    "neighbouring rows": neighbouring_rows,
}
print(
    f"{'':20} it runs   {config.num_heads} equal → {config.num_kv_heads}: same tokens   {config.num_kv_heads} → 1: bits per byte"
)
for label, conversion in {"mean": pool, **wrong}.items():
    tokens = write(engine(with_kv_heads(mha, config.num_kv_heads, conversion), label.replace(" ", "_")))
    print(f"{label:20} {'yes':>7} {'same' if tokens == original else 'DIFFERS':>25} {after[label]:27.2f}")

# %% [markdown]
# * **It runs** proves nothing: every one has the right shape.
# * **The lossless case** catches what mixes the wrong things or the wrong scale. It cannot catch *first head*: of equal
#   heads, any one is the mean.
# * **The real conversion** catches *first head*, but not *strided groups*: with a single group there is nothing to
#   confuse. And a number alone would not have told that *sum* is wrong: it looks like a slightly worse recipe.
#
# No single check catches all four. The exercise's own check holds every number against the reference, and tells them
# apart.
#
# ### Fewer heads by editing a number
#
# The same tutorial sets `config.num_key_value_heads = 8` ("Original: 64") before it loads Llama-2-70B, and reports
# eightfold savings. Two tests: what does that model have to begin with, and what happens to a true MHA checkpoint when
# only the number is changed?

# %%
import json

from minillm.errors import CheckpointError
from minillm.models.loading import load_model

print(f"Llama-2-70B: {LLAMA_2_70B.num_heads} query heads, {LLAMA_2_70B.num_kv_heads} KV heads")
folder = checkpoint(mha, "edited")
stored = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps({**stored, "num_key_value_heads": config.num_kv_heads}))
try:
    load_model(folder, torch.float32)
except CheckpointError as problem:
    print(f"CheckpointError: {problem}".replace(str(folder), "the edited checkpoint"))
workshop.cleanup()

# %% [markdown]
# It already has 8, so setting 8 changes nothing and saves nothing. (The line that prints the saving divides two numbers
# of the configuration, 8 by 64; it would print 12.50% in any case.) And on a model that does have a KV head per query
# head, the matrices do not fit. transformers stops there too; with `ignore_mismatched_sizes=True` it goes on and fills the
# matrices with random numbers. You have seen what random heads are worth.
#
# ### "Sub-100 ms inference"
#
# Another tutorial promises it in its title and never says what is meant: the first token, every token, or a whole
# answer? A roofline gives the floor for one token at least: the bytes of the weights, divided by the bandwidth.
# *Quoted* bandwidths, *modelled* times, one request, an empty cache:

# %%
gpus = {"A100 80 GB": 2.04e12, "H100": H100_BANDWIDTH}
print("ms per token, at least     " + "".join(f"{gpu:>12}" for gpu in gpus) + "     tokens in 100 ms on the last")
for label, size in (("Llama-3-8B, bf16", 16e9), ("Llama-2-70B, fp16", 138e9), ("Llama-2-70B, INT8", 69e9)):
    floors = [1000 * size / speed for speed in gpus.values()]
    print(f"{label:27}" + "".join(f"{floor:12.1f}" for floor in floors) + f"{100 / floors[-1]:20.1f}")

# %% [markdown]
# With a 70B model at 16 bits and the bandwidth of one GPU (into which it does not even fit), 100 ms are two tokens. Say
# *time to first token* and *time per output token*, for how many tokens of prompt, on which machine; lesson 15 does.
#
# ## In the field
#
# | where | what |
# |---|---|
# | Llama-2-70B, Llama-3, Mistral, Qwen2 and 3 | trained with GQA, most of them with 8 KV heads: `num_key_value_heads` in `config.json` |
# | vLLM | `ModelConfig.get_num_kv_heads`: per GPU, KV heads / tensor-parallel size, and never less than 1: with more GPUs than KV heads they are copied |
# | FlashAttention, FlashInfer | all query heads of a group in one tile, so that the group really shares one reading; our `paged_attention` packs them into one product |
# | transformers, eager attention | `repeat_kv` writes the repeated heads out before the product: the cache is small, the bytes moved are not |
# | llama.cpp | `attention.head_count_kv` in the GGUF file |
# | gpt-fast | prints the bandwidth achieved after each run: MBU without the division |
# | DeepSeek's MLA | goes the other way: all heads, made from one small latent per token (low rank is in lesson 13) |
#
# **Papers.** Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
# Architectures*. Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need* (MQA, and the count of
# exercise 3). Ainslie et al. 2023, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
# Checkpoints*. MBU: Agarwal et al. 2023, *LLM Inference Performance Engineering: Best Practices*.
#
# **Claims, and what is so.**
#
# | claim | what is so | tested where |
# |---|---|---|
# | Llama-2-70B: 80 GB of cache at 4096 tokens, often more than the weights | 1.34 GB; 10.7 GB with all query heads; 80 GiB for 64 texts; the weights have 138 GB | exercise 1 |
# | `num_key_value_heads = 8` on it saves 8× | it has 8; on an MHA checkpoint the shapes do not fit | Fewer heads by editing a number |
# | GQA: pool by the mean, it beats one head and random heads | the same order here, but unusable without the further training that the paper adds | exercise 6 |
# | sub-100 ms inference | undefined; at least 41 ms per token for a 70B model in fp16 on one H100's bandwidth | the last table |
#
# ## Recap
#
# 1. Work has an intensity (operations per byte), a machine has a ridge. Left of it bytes are short, right of it
#    arithmetic.
# 2. A linear layer has $2 \cdot \text{rows} / \text{bytes}$: batches, prompts and drafts move it to the right. Attention
#    has $2 \cdot \text{group} \cdot \text{new tokens} / \text{bytes}$: neither context nor batch moves it.
# 3. Prefill is short of arithmetic, decoding of bytes; and a small model of neither, as long as every operation is
#    started on its own.
# 4. MBU says how much of the bandwidth a step really uses. Measure the bandwidth, count weights once and every cache.
# 5. Fewer KV heads save cache bytes where the cache is most of the bytes, and quality must be trained back.
#
# **Next:** lesson 4 keeps all heads and makes the numbers themselves smaller.
