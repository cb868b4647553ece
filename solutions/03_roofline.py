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
# **Question.** *What limits this machine when it generates a token, arithmetic or memory? And what do fewer KV heads
# gain?*
#
# A processor does two things at the same time: it fetches numbers from memory and computes with them. The slower of the
# two decides the time. So before you make anything faster, find out which one it is. If a computation waits for memory,
# halving its arithmetic gains nothing.
#
# In this lesson you count both for every part of a model, measure the limits of your machine, and draw both in one
# chart, the **roofline**. Then you take a trained model, merge its KV heads, run it in the engine, and see what that
# saves and what it costs.
#
# You need to know what the [KV cache](glossary.md#kv-cache) stores (lesson 2). Everything runs on a laptop's CPU.

# %%
import os

import torch

from minillm import LLM
from minillm.teaching import check, claim, hint, predict, reveal, use

name = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
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
# A model runs in two ways. **[Decode](glossary.md#decode)** runs one new token through all layers.
# **[Prefill](glossary.md#prefill)** runs a whole prompt, here 256 tokens. Count what each must do:
#
# * **operations**: every weight is multiplied and added once per row (the vector of one token), so 2 operations per
#   weight and row. Attention takes $4 \cdot \text{width}$ operations for every query head and every key it is compared
#   with: half for the score, half for the value. (Norms, RoPE and the softmax are small beside these and are left out
#   in the whole lesson.)
# * **bytes**: every weight and every number in the cache must be fetched once, at 4 bytes each.

# %%
from minillm.teaching.roofline_parts import bits_per_byte, kv_bytes, operations, weight_bytes, weights_per_row

context = 256
moved = weight_bytes(model) + kv_bytes(config, context)
decode_work = operations(model, rows=1, pairs=context, logits=1)
prefill_work = operations(model, rows=context, pairs=context * (context + 1) // 2, logits=1)
print("                           million operations   million bytes   operations per byte")
for label, work in (("decode the 256th token", decode_work), ("prefill 256 tokens", prefill_work)):
    print(f"{label:25} {work / 1e6:19,.0f} {moved / 1e6:15,.1f} {work / moved:21,.2f}")
claim(
    "Prefill does more than a hundred times as many operations with the same bytes.", prefill_work > 100 * decode_work
)

# %% [markdown]
# Decoding does about **half an operation for every byte it fetches**, prefill more than a hundred. This ratio (the last
# column) is the **[arithmetic intensity](glossary.md#arithmetic-intensity)**. It is a property of the computation. How
# many operations a machine can do in the time in which it fetches a byte is a property of the machine. Comparing the
# two answers the question.
#
# ## Predict
#
# 1. You run more and more rows through one linear layer (4-byte weights). At first additional rows are free, because
#    fetching the weights takes all the time. **From how many rows on does the arithmetic take longer** on this machine?
# 2. **[Model bandwidth utilisation](glossary.md#mbu)** (MBU) is the share of the memory bandwidth that decoding really
#    uses. **How many percent** does this model reach here, one request at a time, in plain PyTorch?
# 3. The cell below prints how many [bits for each byte](glossary.md#bits-per-byte) of held-out Python this model needs.
#    Guessing uniformly among 4096 tokens of about three bytes each would take about 4. You replace the two KV heads of
#    every layer by one, their average, without any training. **How many bits per byte** then?

# %%
before = bits_per_byte(llm)
print(f"{name} with {config.num_kv_heads} KV heads: {before:.2f} bits per byte")
predict("l03.rows", None, unit="rows")
predict("l03.mbu", None, unit="percent")
predict("l03.mqa", None, unit="bits per byte")

# %% [markdown]
# ## Build
#
# ### Exercise 1: room for requests
#
# Lesson 2 counted the cache of one token: 2 · layers · KV heads · width · bytes. The number of KV heads has three
# cases: **[MHA](glossary.md#mha-mqa)** (multi-head attention) has a KV head for every query head;
# **[GQA](glossary.md#gqa)** (grouped-query attention) has one for every group of query heads; **MQA** (multi-query
# attention) has a single one. With fewer KV heads, more requests fit into memory beside the weights, and requests that
# run together share one reading of the weights. How many requests fit?


# %%
def requests_that_fit(memory: int, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> int:
    """Return how many requests of num_tokens tokens each fit into memory with their caches, beside the weights.

    memory, weight_bytes, kv_bytes_per_token: in bytes; all requests share the weights
    returns: whole requests only; 0 if not even the weights fit

    Example: 100 bytes, 40 of them weights, 3 tokens of 10 bytes each: two requests take 60 bytes, so 2.
    """
    ### BEGIN SOLUTION
    left = memory - weight_bytes
    return max(0, left // (kv_bytes_per_token * num_tokens))
    ### END SOLUTION


# %%
check("l03.requests_that_fit")

# %% [markdown]
# Stuck? `hint("l03.requests_that_fit", 1)`, then 2, 3 and 4: where to look, which operation, the shape of the code, the
# solution.
#
# Compare with the engine's own pool of blocks. Then see how many requests fit on one GPU of 80 GB (a quoted size) with
# Llama-3-8B in bf16 (two bytes a number), for several numbers of KV heads:

# %%
from dataclasses import replace

from minillm.teaching.exercises.l02_kv_cache import LLAMA_3_8B

fit = use("l03.requests_that_fit")
with llm.trace() as trace:
    pass
[started] = trace.events
pool_bytes = started.num_blocks * started.bytes_per_block
claim(
    "The engine's 64 blocks of 16 tokens have room for 4 requests of 256 tokens.",
    fit(pool_bytes, 0, kv_bytes(config, 1), 256) == 64 * 16 // 256 == 4,
)
print("\nLlama-3-8B, 8192 tokens each, 80 GB   KV bytes per token   requests that fit")
room = {}
for kv_heads, width in ((32, 2), (8, 2), (1, 2), (8, 1)):
    per_token = kv_bytes(replace(LLAMA_3_8B, num_kv_heads=kv_heads), 1, 1, width)
    room[kv_heads, width] = fit(80 * 10**9, 16 * 10**9, per_token, 8192)
    print(f"KV heads: {kv_heads:2}, {8 * width:2} bits a number {per_token:26,} {room[kv_heads, width]:19,}")
claim("A quarter of the KV heads makes room for about four times the requests.", 3.5 < room[8, 2] / room[32, 2] < 4.5)

# %% [markdown]
# ### Exercise 2: intensity of a linear layer
#
# $y = xW^\top$ for `rows` rows at once. Count the operations, count the bytes that must be moved at least once (the
# weights, the input, the output), and divide. (In the chart below, *gate* and *up* are matrices of the MLP, lesson 1.)


# %%
def arithmetic_intensity(rows: int, in_features: int, out_features: int, bytes_per_value: int) -> float:
    """Return the operations per byte of y = x·Wᵀ; a multiplication and an addition are two operations.

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

# %% tags=["expected"] alt="Operations per byte against rows, both logarithmic. All lines rise as straight lines, about 2 per row divided by the bytes of a number, and then flatten: minicoder's small layer near 150, Llama-3-8B's in bf16 only beyond 1000. A dashed line marks the ridge of an H100 in bf16 at 295."
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
    + [Series("ridge of an H100 in bf16: 295", ROWS, [H100_RATE / H100_BANDWIDTH] * len(ROWS), style="modelled")],
    "Intensity rises in proportion to the rows, then flattens once the rows themselves outweigh the weights.",
)

# %% [markdown]
# With few rows the intensity is simply $2 \cdot \text{rows} / \text{bytes per number}$: one row of fp32 does half an
# operation per byte, whatever the size of the layer. **A batch adds rows**: eight requests decoding together are eight
# rows that share one reading of the weights. The 256 tokens of a prompt are also rows that share it, and so are the
# draft tokens of [speculative decoding](glossary.md#speculative-decoding).
#
# (The dashed line is the ridge of products in bf16; exercise 4 explains it. It also holds for INT8 *weights* that are
# dequantised to bf16 first. With INT8 *products*, which an H100 does twice as fast (data sheet), the ridge is at 591, and
# INT8 needs about as many rows as bf16. The fp32 line is there for its shape: fp32 products are slower, so their ridge is
# further to the left.)
#
# ### Exercise 3: intensity of attention
#
# Now the bytes of the cache. One new token of one request is compared with its whole cache. Per cached token and KV
# head, a key and a value are fetched: `2 · head_dim` numbers. How many operations use them? Every query that shares
# this KV head computes a score (a product of `head_dim` numbers) and adds a share of the value (again `head_dim`
# numbers).


# %%
def attention_intensity(num_heads: int, num_kv_heads: int, num_new: int, bytes_per_value: int) -> float:
    """Return the operations per byte of attention over a long cache.

    num_new: new tokens of a request that share one reading of its cache in a step: 1 when decoding, γ + 1 when γ draft
    tokens are verified. Leave out the softmax and the bytes of the queries: both are small beside a long cache.

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
# Note what is **not** among the parameters of your function: the length of the context, and the batch. Twice the
# context is twice the operations over twice the bytes. Another request brings a cache of its own. So a batch of
# different texts raises the intensity of the linear layers and not that of attention. Three things raise that of
# attention: query heads that share a KV head, new tokens that share a reading, and fewer bytes per number. (Requests
# that begin with the same text can also share the reading of that part, with a kernel made for it; lesson 11 quotes
# what it saves.)
#
# ### Exercise 4: the roof
#
# A machine moves `bandwidth` bytes per second and does `peak_rate` operations per second, both at the same time. How
# many operations per second can a computation of a given intensity reach?


# %%
def attainable(intensity: float, peak_rate: float, bandwidth: float) -> float:
    """Return the most operations per second that a computation of this intensity can reach.

    intensity: operations per byte; peak_rate: operations per second; bandwidth: bytes per second

    Example: half an operation per byte on a machine of 100 operations/s and 20 bytes/s: 10.
    """
    ### BEGIN SOLUTION
    return min(peak_rate, intensity * bandwidth)
    ### END SOLUTION


# %%
check("l03.attainable")

# %% [markdown]
# That is the whole **[roofline model](glossary.md#roofline)** (Williams, Waterman and Patterson 2009). On logarithmic
# axes it looks like a roof: a slope where memory is the limit, a flat part where arithmetic is the limit, and between
# them the **[ridge](glossary.md#ridge)**, the intensity at which both limits are equal. Here is a data centre GPU, an
# H100, with the parts of Llama-3-8B. Nothing here was measured: the roof is *quoted* from the data sheet (dashed), and
# the points are *modelled* by your functions (hollow), so they lie on the roof by construction. Only their position
# from left to right matters.

# %% tags=["expected"] alt="Roofline of an H100, ridge at 295 operations per byte. On the slope, from left to right: attention with 32, 8 and 1 KV heads at 1, 4 and 32 operations per byte; linear layers of 1, 16, 64 and 256 rows; whole decode steps of 1 and 64 requests. Only 2048 rows of a prompt lie right of the ridge."
from minillm.viz.charts.roofline import Point, Roof, Roofline

roof_of = use("l03.attainable")
READ_8B = 7.5e9  # weights of Llama-3-8B that a step reads: all but the input embedding, of which it reads one row


def modelled(group: str, label: str, intensity: float) -> Point:
    """Return a point on the H100's roof."""
    return Point(label, intensity, roof_of(intensity, H100_RATE, H100_BANDWIDTH), "modelled", group)


def whole_step(batch: int, context: int) -> float:
    """Return the operations per byte of one decode step of Llama-3-8B: its bf16 weights and all caches."""
    attention = 4 * 32 * 32 * 128 * context * batch
    return (2 * READ_8B * batch + attention) / (2 * READ_8B + kv_bytes(LLAMA_3_8B, context, batch, 2))


ridge = H100_RATE / H100_BANDWIDTH
print(
    f"ridge: {ridge:.0f} operations per byte; a step of 64 requests has "
    f"{whole_step(64, 4096) / whole_step(1, 4096):.0f} times the intensity of a step of one"
)
claim("A decode step of 64 requests is still left of the ridge.", whole_step(64, 4096) < ridge)
claim(
    "64 caches of 4096 tokens have more than twice the bytes of these weights.",
    2 < kv_bytes(LLAMA_3_8B, 4096, 64, 2) / (2 * READ_8B) < 2.5,
)
Roofline(
    "The parts of Llama-3-8B on an H100",
    Roof("H100 (data sheet)", H100_BANDWIDTH, H100_RATE, "quoted"),
    [
        modelled("attention, by KV heads", f"{n} KV head{'s' if n > 1 else ''}", attention_of(32, n, 1, 2))
        for n in (32, 8, 1)
    ]
    + [
        modelled("linear layers, by rows", "1 row" if n == 1 else f"{n} rows", intensity_of(n, 4096, 14336, 2))
        for n in (1, 16, 64, 256, 2048)
    ]
    + [modelled("decode step at 4096 tokens, by batch", f"batch {n}", whole_step(n, 4096)) for n in (1, 64)],
)

# %% [markdown]
# On an H100, fetching one byte takes as long as **295 operations**. Decoding one request at 4096 tokens can use about one
# part in 270 of its arithmetic, and all parts of decoding, even for 64 requests together, lie on the slope. That is why
# so much of this course is about bytes. Note also that 64 requests do not move the whole step 64 times as far to the
# right: at 4096 tokens each, their caches have more than twice the bytes of the weights, and each is read for one
# request only.
#
# Your machine has other limits. Measure them.
#
# ## See
#
# ### The limits of this machine
#
# Measure the roof: do not take it from a data sheet or from one kernel alone. The roof is what the *fastest* kernel
# reaches that the engine can use. For the bytes, a large copy is timed, and a large sum, which only reads. For the
# arithmetic, up to three kernels are timed: `torch.mm`; on x86 processors also oneDNN, Intel's library of kernels, with
# packed weights, that is, reordered once into the order in which its kernel reads them (there the engine's linear
# layers use it from 4 rows on); and where numba is installed, the product of the compiled step, which keeps a small
# tile (a rectangle) of the result in registers (lesson 15). The best of each counts. `minillm doctor --measure` does
# the same with all threads. The cell uses one, because everything below runs on one.

# %% tags=["nbval-ignore-output"]
from minillm.doctor.machine_limits import matmul_rate, memory_bandwidth

bandwidth = memory_bandwidth("cpu", repeats=5, num_bytes=2**27)
rate = matmul_rate("cpu", torch.float32, repeats=5)
here = Roof("this machine, one thread", bandwidth.median, rate.median)
print(f"memory bandwidth: {bandwidth}")
print(f"matrix product:   {rate}")
print(f"ridge: {here.ridge:.2f} operations per byte")
claim("The ridge of this core is far left of an H100's.", here.ridge < ridge / 4, measured=True)
reveal("l03.rows", round(here.ridge * 4 / 2, 1))  # intensity = 2 · rows / 4 bytes

# %% [markdown]
# A CPU core does far fewer operations per byte than a GPU, so its ridge is at a lower intensity. 64 rows through a
# linear layer are left of the ridge on an H100. Through minicoder's gate and up they do about 26 operations per byte
# (first chart): if the ridge printed above is lower, they are right of it here. **The answer to our question depends on
# the machine, so measure it.**
#
# ### Measured points
#
# Now the model's own layers, in the engine's own code:
#
# * its linear layers, with 1 to 64 rows. Several copies of them run one after the other, so that the weights come from
#   memory and not from the processor's cache;
# * its attention, with 8 requests decoding, at contexts of 64 to 512 tokens.
#
# The position of a point from left to right is counted by your functions. Only its height is measured.

# %%
import itertools
from functools import partial

from minillm.bench.timing import time_in_turn, medians
from minillm.teaching.roofline_parts import attention_only, linear_shapes, time_linears


def linear_bytes(rows: int) -> float:
    """Return the bytes that all linear layers must move, by your function."""
    return sum(2 * rows * a * b / intensity_of(rows, b, a, 4) for a, b in linear_shapes(model))


def attention_point(shape, batch: int, context: int, seconds: float, label: str) -> Point:
    """Return a measured point of attention: its intensity by your function, its rate from the measured time."""
    work = 4 * shape.num_layers * shape.num_heads * shape.head_dim * context * batch
    intensity = attention_of(shape.num_heads, shape.num_kv_heads, 1, 4)
    return Point(label, intensity, work / seconds, group="attention of 8 requests")


# %% tags=["nbval-ignore-output"]
rows_tried, contexts = (1, 2, 4, 8, 16, 32, 64), [n for n in (64, 256, 512) if n <= config.max_position_embeddings]
took = time_linears(model, rows_tried)
linear_points = []
for rows in rows_tried:
    work = 2 * rows * weights_per_row(model)
    point = Point(f"{rows}", work / linear_bytes(rows), work / took[rows], group="linear layers, by rows")
    linear_points.append(point)
attended = medians(time_in_turn({n: attention_only(model, 8, n) for n in contexts}))
attention_points = [attention_point(config, 8, n, attended[n], f"{n} tokens") for n in contexts]
shares = {rows: p.rate / here.attainable(p.intensity) for rows, p in zip(rows_tried, linear_points, strict=True)}
print("share of the roof, linear layers, by rows: " + ", ".join(f"{n}: {share:.0%}" for n, share in shares.items()))
print("time against 1 row, linear layers: " + ", ".join(f"{n} rows {took[n] / took[1]:.1f}×" for n in rows_tried[1:]))
claim("Four rows take less than 1.8 times as long as two.", took[4] < 1.8 * took[2], measured=True)
claim("64 rows take more than twice as long as one.", took[64] > 2 * took[1], measured=True)
farthest = min(p.rate / here.attainable(p.intensity) for p in attention_points)
claim(
    "Attention is farther below the roof than the linear layers at 64 rows.",
    farthest < shares[64],
    measured=True,
)
Roofline(f"The parts of {name} on this machine", here, linear_points + attention_points)

# %% [markdown]
# What the picture shows, from left to right:
#
# * **The linear layers follow the slope.** The first few additional rows cost little (see the lines above the picture):
#   memory is the limit. (One row and two take the same time for another reason: the engine computes a single row as two
#   equal ones, because that is faster than a product of a matrix and a vector. So compare two with four.) Right of the
#   ridge every further row takes more time: arithmetic is the limit.
# * **They lie below the roof, on the slope too.** The roof is what the fastest kernel reaches, often a copy, which does
#   nothing but move bytes. A product of a few rows also multiplies and adds what it loads, and it does not overlap
#   memory and arithmetic perfectly, least of all near the ridge, where both limits nearly apply. A better kernel can
#   gain what is left up to the roof and no more.
# * **Attention does not move to the right.** Its three points lie exactly above each other. A longer context does not
#   raise their intensity, as you counted.
# * **Attention is far below the roof.** The dotted line is what is lost. In plain PyTorch it first gathers every
#   request's blocks into one tensor (it writes and reads them once more), and then makes many small products. A point
#   far below the roof shows that there is time to gain, and not by less arithmetic. (Lesson 9 builds the kernel that
#   reads the blocks in place.)
#
# ### Exercise 5: model bandwidth utilisation
#
# Now a whole step. If memory limits decoding, one number says how good an engine is at it: of all bytes that could have
# been fetched in the time of a step, what share *had to be* fetched?


# %%
def mbu(
    weight_bytes: float, kv_bytes_per_request: float, batch: int, seconds_per_step: float, bandwidth: float
) -> float:
    """Return the model bandwidth utilisation of one decode step for `batch` requests, as a share: 0.4 means 40%.

    weight_bytes: of the weights a step reads; kv_bytes_per_request: of one request's cache; bandwidth: bytes per second
    The share is above 1 if bytes came from elsewhere than the memory, for example from the processor's cache.

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
# The next cell times decoding with one request and with eight, at two contexts, and the prefill of 256 tokens. All of
# them run in plain PyTorch, operation by operation. One decode step and the prefill also run as **one [compiled
# function](glossary.md#compiled-step)** each, which is what the engine uses by default on a CPU (`enforce_eager=True`
# above turns it off; lesson 15 looks into it). Compiling takes ten seconds to a minute, once. The compiled weights
# stay in the 16 bits of the checkpoint, so a step reads about half the bytes.

# %% tags=["nbval-ignore-output"]
from minillm.teaching.roofline_parts import time_whole_steps

utilisation = use("l03.mbu")
steps, no_compiled = time_whole_steps(model, name, [(1, 256), (1, 512), (8, 256), (8, 512)], 256)
if no_compiled:
    print(f"no compiled step here: {no_compiled}")
whole, used = {}, {}
print("                                    million bytes      ms   bandwidth used (MBU)   arithmetic used")
for step in steps:
    label, rate = f"{step.kind}: {step.batch} × {step.context}", step.operations / step.seconds
    whole[label] = Point(f"{step.batch} × {step.context}", step.operations / step.num_bytes, rate, group=step.kind)
    used[label] = utilisation(step.weight_bytes, step.kv_bytes, step.batch, step.seconds, here.bandwidth)
    share = f"{used[label]:.0%}" if "decode" in step.kind else ""
    print(f"{label:33} {step.num_bytes / 1e6:15.1f} {1000 * step.seconds:7.1f} {share:>18} {rate / here.rate:21.0%}")
alone, prompt = "decode step, plain: 1 × 256", "prefill, plain: 1 × 256"
reveal("l03.mbu", round(100 * used[alone]))
claim(
    "Prefill uses a larger share of the arithmetic than any decode step.",
    all(whole[prompt].rate > p.rate for p in whole.values() if "decode" in p.kind),
    measured=True,
)
claim(
    "No prefill lies above the roof by more than a tenth.",
    all(p.rate < 1.1 * here.rate for p in whole.values() if "prefill" in p.kind),
    measured=True,
)
share = max(used[alone], whole[alone].rate / here.rate)
claim("Decoding one request in plain PyTorch reaches neither limit.", share < 0.9, measured=True)
if not no_compiled:
    compiled = whole[alone.replace("plain", "compiled")]
    claim("One compiled function is faster than many operations.", compiled.rate > whole[alone].rate, measured=True)
Roofline(f"Whole steps of {name} on this machine", here, list(whole.values()))

# %% [markdown]
# Prefill is closest to the flat part: arithmetic is its limit, so saving bytes does not speed it up. (An MBU above 100%
# means that bytes came from elsewhere: a processor with a large cache keeps a model this small in it. The two contexts
# of one request differ by a few percent of the bytes, so a larger difference between their lines is noise.) Decoding in
# plain PyTorch reaches neither limit. So what limits it?
#
# The roofline has two limits. A step has a third cost: it makes several hundred calls into PyTorch, and each takes
# microseconds to start, however little it does. The compiled step makes one call. To see the cost of the calls alone,
# keep the number of layers and change the width (random weights do for timing):

# %% tags=["nbval-ignore-output"]
from minillm.teaching.roofline_parts import decode_step, of_width

widths = (64, 192, 384, 576)
sized = {width: model if width == config.hidden_size else of_width(config, width) for width in widths}
took = medians(time_in_turn({width: decode_step(sized[width], 1, 256) for width in widths}))
megabytes = [weight_bytes(sized[width]) / 1e6 for width in widths]
reached = [
    utilisation(weight_bytes(sized[w]), kv_bytes(sized[w].config, 256), 1, took[w], here.bandwidth) for w in widths
]
fewer, faster = megabytes[0] / megabytes[-1], took[widths[0]] / took[widths[-1]]
print(f"the narrowest model has {fewer:.0%} of the weights of the widest, and its step takes {faster:.0%} of the time")
print(f"it takes {took[64] / took[384]:.0%} of the time of a model of width 384, minicoder's width")
claim("Bytes shrink far more than time.", faster > 3 * fewer, measured=True)
claim("The widest model uses more of the bandwidth than the narrowest.", reached[-1] > reached[0], measured=True)
del sized
LineChart(
    "One request, 256 tokens: share of the bandwidth used, on this machine",
    Axis("million bytes of weights", log=True, ticks=tuple(round(m, 1) for m in megabytes)),
    Axis("MBU in percent"),
    [Series("measured, 8 layers of growing width", megabytes, [100 * r for r in reached])],
    "Small models use little of the bandwidth: starting an operation costs more than its bytes. Large ones use more.",
)

# %% [markdown]
# This is the third limit. **A small model in an interpreter reaches neither limit: a large part of its step is spent on
# starting operations.** (The narrowest model has hardly any bytes, and the lines above the chart show how long its step
# still takes.) The rest goes into products that read slower than a copy. The remedy is to start fewer operations: fused
# kernels (one for several operations), compiled steps, CUDA graphs (many kernels started at once). Only then, or if the
# model is large, does MBU come near what the memory can do, and then bytes decide the time. (On an A100, gpt-fast
# reports 72% for a 7B model in bf16, compiled. Quoted, not measured here.)
#
# So the answer has three parts. *Prefill*: arithmetic. *Decoding a large model*: bytes. *Decoding a small model without
# fused operations*: neither.
#
# ### Exercise 6: fewer heads
#
# Fewer KV heads mean fewer bytes in the cache and a higher intensity of attention. Can you remove them from a model
# that is already trained? The recipe of the GQA paper (Ainslie et al. 2023): replace each group of KV heads by their
# **mean**. A projection's matrix holds its heads one after the other, `head_dim` rows each. If 6 query heads share 2 KV
# heads, query head `h` reads KV head `h // 3`: neighbours share one. So KV heads that become one must be neighbours.


# %%
from torch import Tensor


def mean_pool_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return a key or value projection with fewer heads: each new head is the mean of a group of old ones.

    weight:       [num_heads * head_dim, hidden], one KV head after the other; not changed
    num_heads:    the KV heads that weight has now, not the query heads
    num_kv_heads: the KV heads that the result has, a divisor of num_heads
    returns:      [num_kv_heads * head_dim, hidden]

    Example, one number per row, 4 heads of width 2 to 2: [0, 1, 10, 11, 40, 41, 90, 91] becomes [5, 6, 65, 66].
    """
    ### BEGIN SOLUTION
    heads = weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))
    return heads.mean(dim=1).flatten(0, 1)
    ### END SOLUTION


# %%
check("l03.mean_pool_heads")

# %% [markdown]
# Your function now makes real checkpoints: folders with `config.json` and weights, which the engine loads like any
# other. First a case in which nothing may be lost. Give every query head a KV head of its own by *repeating* the KV
# heads: that is a real MHA checkpoint with 6 KV heads, in two groups of three equal ones. Pool it back to 2.

# %%
import tempfile
from pathlib import Path

from minillm.models.decoder import Decoder
from minillm.teaching import roofline_parts as parts
from minillm.teaching.roofline_parts import checkpoint, repeat_heads, with_kv_heads, generate_tokens

pool = use("l03.mean_pool_heads")
folders = tempfile.TemporaryDirectory()


def engine(model: Decoder, folder: str) -> LLM:
    """Save `model` as a checkpoint in `folder` and return an engine that runs it."""
    return LLM(str(checkpoint(model, name, Path(folders.name) / folder)), **options)


mha = with_kv_heads(model, config.num_heads, repeat_heads)
back = with_kv_heads(mha, config.num_kv_heads, pool)
original, pooled_back = generate_tokens(llm), generate_tokens(engine(back, "pooled_back"))
same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), back.parameters(), strict=True))
print(f"{config.num_kv_heads} KV heads → {config.num_heads} (repeated) → {config.num_kv_heads} (pooled)")
claim("The weights are equal up to rounding.", same)
claim("The engine writes the same 24 tokens.", pooled_back == original)
del back

# %% [markdown]
# Equal heads pool without loss. Now heads that differ: minicoder's 2 KV heads become 1, which all 6 query heads share.
# Beside your mean, try three other ways: keep the first head of each group, add the heads up, and start with random
# numbers.

# %%
print(f"{'':30} KV bytes per token   bits per byte")
print(f"{f'{name}, {config.num_kv_heads} KV heads':30} {kv_bytes(config, 1):18,} {before:15.2f}")
conversions = {"mean": pool, "first head": parts.first_head, "sum": parts.sum_of_heads, "random": parts.random_heads}
after = {}
for label, conversion in conversions.items():
    after[label] = bits_per_byte(engine(with_kv_heads(model, 1, conversion), f"mqa_{label}"))
    print(f"{f'1 KV head, {label}':30} {kv_bytes(replace(config, num_kv_heads=1), 1):18,} {after[label]:15.2f}")
reveal("l03.mqa", round(after["mean"], 2))
claim("Every conversion makes the model much worse.", min(after.values()) > 1.2 * before, of_model=True)
pooled_or_chosen = max(after["mean"], after["first head"])
claim("Random numbers are by far the worst start.", after["random"] > 1.3 * pooled_or_chosen, of_model=True)

# %% [markdown]
# **Half the bytes of cache, and a much worse model.** In the paper the mean is the best start, then one head, then random
# numbers. Here only the last place is clear: before any training the mean need not beat one head. And pooling is only a
# *start*: the paper then trains for 5% of the original steps, and only after that reports quality close to the original.
# Here nothing was trained, and the result is useless. (*Sum* may even have a lower number than the mean here. It is
# still a mistake: it does not keep the scale, and three equal heads become one that is three times too large. *Break
# it* shows which check finds it.)
#
# So fewer heads are a decision for training. What do they gain at inference?
#
# ### What fewer heads gain
#
# Three models that differ only in their KV heads: 6 (MHA), 2 (as it is) and 1 (MQA). First attention alone, on the
# roofline:

# %% tags=["nbval-ignore-output"]
mqa = with_kv_heads(model, 1, pool)
family = {config.num_heads: mha, config.num_kv_heads: model, 1: mqa}
longest = contexts[-1]
attended = medians(time_in_turn({n: attention_only(each, 8, longest) for n, each in family.items()}))
points = [attention_point(each.config, 8, longest, attended[n], f"{n} KV") for n, each in family.items()]
print(
    f"attention of 8 requests at {longest} tokens, against {config.num_heads} KV heads: "
    + ", ".join(f"{n} KV {attended[config.num_heads] / attended[n]:.1f}× faster" for n in list(family)[1:])
)
claim("Fewer KV heads make attention faster.", attended[1] < attended[config.num_heads], measured=True)
Roofline("The same attention with fewer KV heads, on this machine", here, points)

# %% [markdown]
# The points move to the right, and up: the same operations over fewer bytes. (The bytes would give 3 and 6 times. The
# gain can be smaller, because the operations stay the same. It can be larger, because a smaller KV cache may stay in the
# processor's cache, and because the query heads of a group are rows of one matrix product, which uses a core better than
# a product for each head.)
#
# Now the whole step, where attention is only a part. Each line is the time with 6 KV heads divided by the time with
# fewer. The dashed line is the ratio of the bytes for 1 KV head and 8 requests. It is no limit: in plain PyTorch a byte
# of the cache costs more than a byte of weights, because it is gathered first, so the measured line may end above it.

# %% tags=["nbval-ignore-output"]
longer = [16, *contexts]
batches = (1, 8)
took = {}
for batch, context in itertools.product(batches, longer):  # one after the other, so that few caches are in memory
    took |= medians(
        time_in_turn({(n, batch, context): decode_step(each, batch, context) for n, each in family.items()})
    )


def gain(n: int, batch: int, context: int) -> float:
    """Return how many times faster a step is with n KV heads than with one for each query head."""
    return took[config.num_heads, batch, context] / took[n, batch, context]


def byte_gain(n: int, batch: int, context: int) -> float:
    """Return the same if only the bytes mattered."""
    large, small = (weight_bytes(m) + kv_bytes(m.config, context, batch) for m in (mha, family[n]))
    return large / small


most = gain(1, 8, longer[-1])
claim(
    "8 long requests gain more from fewer KV heads than one short request.", most > gain(1, 1, longer[0]), measured=True
)
LineChart(
    "A whole decode step against the same model with 6 KV heads, on this machine",
    Axis("context in tokens", log=True, ticks=tuple(longer)),
    Axis("times faster"),
    [Series(f"{n} KV, batch {b}", longer, [gain(n, b, c) for c in longer]) for b in batches for n in list(family)[1:]]
    + [Series("1 KV, batch 8, bytes alone", longer, [byte_gain(1, 8, c) for c in longer], style="modelled")],
    "Fewer KV heads gain little for one request or a short context, and more as batch and context grow.",
)

# %%
print("operations of the prefill of 256 tokens")
prefills = {n: operations(each, rows=256, pairs=256 * 257 // 2, logits=1) for n, each in family.items()}
for n, work in prefills.items():
    print(f"{n} KV head{'s' if n > 1 else ''}: {work / 1e6:,.0f} million, {work / prefills[config.num_heads]:.0%}")
claim(
    "With 1 KV head prefill still does more than 80% of the operations.",
    prefills[1] > 0.8 * prefills[config.num_heads],
    of_model=True,
)

# %% [markdown]
# **Where fewer heads win, and where they lose.**
#
# * They win where the cache is most of the bytes: many requests, long contexts. A batch shares the weights but not the
#   caches, so the larger the batch, the larger the share of the caches.
# * One short request gains only what the smaller projections of keys and values save, because nearly all its bytes are
#   weights. They gain little for prefill: its limit is arithmetic, and of that only the projections of keys and values
#   shrink. Attention compares as many pairs as before, for every query head.
# * They also make *room* for more requests, whatever the speed (exercise 1). Often that is the larger gain (lesson 7).
# * Past the ridge they gain nothing more. An example: minicoder with one KV head has 6 query heads in a group. With 5
#   tokens to verify, its fp32 attention has an intensity of 2 · 6 · 5 / 4 = 15. Compare it with the ridge of your
#   machine, printed above.
# * They cost quality, which must be restored by training. And one KV head cannot be split over several GPUs: each gets
#   a copy.
#
# ## Break it
#
# ### A point above the roof
#
# Here is the addition `a + b` of two vectors, written to a third: one operation for 12 bytes, far left on the slope. It
# is timed with vectors of 32 MiB, and then with vectors of 128 KiB that are added repeatedly. **Guess** where the
# second point will lie.

# %% tags=["nbval-ignore-output"]
from minillm.teaching.roofline_parts import additions

sizes = {"32 MiB": (2**23, 1), "128 KiB, repeatedly": (2**15, 2**9)}
took = medians(time_in_turn({label: additions(*size) for label, size in sizes.items()}))
points = [
    Point(label, 1 / 12, length * repeats / took[label], group="a + b") for label, (length, repeats) in sizes.items()
]
for label, point in zip(sizes, points, strict=True):
    print(f"{label}: {point.rate / here.attainable(1 / 12):.0%} of the roof")
claim("The small vectors lie above the roof.", points[1].rate > here.attainable(1 / 12), measured=True)
claim("They lie higher than the large ones.", points[1].rate > points[0].rate, measured=True)
Roofline("The same work twice", here, points)

# %% [markdown]
# The small vectors stay in the processor's cache, so the slope, which was measured in main memory, does not hold for
# them. A benchmark of one layer in a loop has the same flaw: in the whole model, the other weights evict this layer
# from the processor's cache, and it reaches only a fraction of that speed. That is why the measurement above used
# several copies of the layers. **A point well above the roof means that one of three numbers is wrong**: the bytes
# (they came from elsewhere), the time, or the roof. Most often it is the roof: measured with one library's product, it
# lies below what another kernel reaches. That is why more than one was tried above.
#
# The large vectors may lie above the roof too. Writing costs more than is counted: before a processor writes a part of
# a line of memory, it usually reads the line first. With this read `a + b` moves 4 numbers and is counted as 3, a copy
# moves 3 and is counted as 2, and a sum, which only reads, is counted in full. So if all used the memory equally well,
# `a + b` would reach $\frac{3/4}{2/3}$ = 113% of the roof of a copy, and 75% of the roof of a sum (the limits above
# name the operation). Another share has one of three reasons: noise (a roof is a measurement too, and its spread is
# printed above); a processor that avoids that read; or a roof that is too low, because one core's copy or sum does not
# use all of the memory's bandwidth.
#
# ### Wrong ways to pool
#
# Here are five conversions of heads; the first is right. There are three checks: the checkpoint loads and runs; the
# lossless case (6 KV heads in two groups of three equal ones, pooled to 2) writes the same 24 tokens; the bits per byte
# of the real conversion, 2 → 1. **Guess** which of the wrong ones passes which check.

# %%
from minillm.errors import MinillmError

for label, conversion in {"strided groups": parts.strided_groups, "neighbouring rows": parts.neighbouring_rows}.items():
    after[label] = bits_per_byte(engine(with_kv_heads(model, 1, conversion), f"mqa_{label}"))
    conversions[label] = conversion
print(
    f"{'':20} it runs   {config.num_heads} equal → {config.num_kv_heads}: same tokens   {config.num_kv_heads} → 1: bits per byte"
)
tokens_of = {}
for label in ("mean", "first head", "sum", "strided groups", "neighbouring rows"):
    try:
        pooled = engine(with_kv_heads(mha, config.num_kv_heads, conversions[label]), label.replace(" ", "_"))
        tokens_of[label] = generate_tokens(pooled)
    except MinillmError:
        tokens_of[label] = []
    runs, same = "yes" if len(tokens_of[label]) == len(original) else "NO", tokens_of[label] == original
    print(f"{label:20} {runs:>7} {'same' if same else 'DIFFERS':>25} {after[label]:27.2f}")
passed = [label for label, tokens in tokens_of.items() if tokens == original]
claim("All five load, run and write as many tokens.", {len(tokens) for tokens in tokens_of.values()} == {len(original)})
claim(
    "Of the wrong ones, only the first head passes the lossless case.", passed == ["mean", "first head"], of_model=True
)
claim("With a single group, strided groups give the mean.", abs(after["strided groups"] - after["mean"]) < 1e-6)

# %% [markdown]
# * **It runs** proves nothing: all results have the right shape.
# * **The lossless case** catches conversions that mix the wrong rows or have the wrong scale. It cannot catch *first
#   head*: the mean of equal heads is each of them.
# * **The real conversion** shows that *first head* is not the mean, but only because you know the mean's number. It
#   cannot catch *strided groups*: with a single group there is nothing to confuse. And a low number proves nothing:
#   *sum* is a mistake, and need not come out worse than the mean. So bits per byte alone are no test of a conversion.
#
# No single check catches all four. The exercise's own check compares every number with the reference, so it catches all
# four and tells them apart.
#
# ### Fewer heads by editing a number
#
# The tutorial that lesson 2 tested sets `config.num_key_value_heads = 8` ("Original: 64") before it loads Llama-2-70B,
# and reports eightfold savings. Test two things: how many KV heads does that model have, and what happens to a real MHA
# checkpoint when only this number is changed?

# %%
import json

from minillm.errors import CheckpointError
from minillm.models.loading import load_model

from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B

print(f"Llama-2-70B: {LLAMA_2_70B.num_heads} query heads, {LLAMA_2_70B.num_kv_heads} KV heads")
folder = checkpoint(mha, name, Path(folders.name) / "edited")
stored = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps({**stored, "num_key_value_heads": config.num_kv_heads}))
try:
    load_model(folder, torch.float32)
except CheckpointError as problem:
    print(f"CheckpointError: {problem}".replace(str(folder), "the edited checkpoint"))
folders.cleanup()

# %% [markdown]
# It already has 8, so setting 8 changes nothing and saves nothing. (The line that prints the saving divides two numbers
# of the configuration, 8 by 64; it prints 12.50% in any case.) And in a model that does have a KV head per query head,
# the matrices do not fit. transformers stops there too; with `ignore_mismatched_sizes=True` it goes on and fills the
# matrices with random numbers. You have seen what a model with random heads does.
#
# ### "Sub-100 ms inference"
#
# Another tutorial promises it in its title and never says what it means: the first token, every token, or a whole
# answer? A roofline gives at least a lower limit for one token: the bytes of the weights (without the input embedding,
# of which a step reads one row) divided by the bandwidth. *Quoted* bandwidths, *modelled* times, one request, an empty
# cache:

# %%
gpus = {"A100 80 GB": 2.04e12, "H100": H100_BANDWIDTH}
print("ms per token, at least     " + "".join(f"{gpu:>12}" for gpu in gpus) + "     tokens in 100 ms on the last")
sizes = {"Llama-3-8B, bf16": 2 * READ_8B, "Llama-2-70B, fp16": 2 * 68.7e9, "Llama-2-70B, INT8": 68.7e9}
for label, size in sizes.items():
    floors = [1000 * size / speed for speed in gpus.values()]
    print(f"{label:27}" + "".join(f"{floor:12.1f}" for floor in floors) + f"{100 / floors[-1]:20.1f}")

# %% [markdown]
# With a 70B model at 16 bits and the bandwidth of one H100 (on which it does not even fit), 100 ms are two tokens.
# State *time to first token* and *time per output token*, for how many prompt tokens, and on which machine; lesson 15
# does.
#
# ## In the field
#
# | where | what |
# |---|---|
# | Llama-2-70B, Llama-3, Mistral, Qwen2 and 3 | trained with GQA, most of them with 8 KV heads: `num_key_value_heads` in `config.json` |
# | vLLM, SGLang | `ModelConfig.get_num_kv_heads`: per GPU, KV heads / tensor-parallel size, and never less than 1: with more GPUs than KV heads they are copied |
# | FlashAttention, FlashInfer | all query heads of a group are in one tile, so that the group really shares one reading; our `paged_attention` packs them into one product |
# | transformers, eager attention | `repeat_kv` writes the repeated heads to memory before the product: the cache is small, the bytes moved are not |
# | llama.cpp | `attention.head_count_kv` in the GGUF file |
# | gpt-fast | prints the bandwidth achieved after each run: MBU before the division by the machine's bandwidth |
# | DeepSeek's MLA | keeps all heads, and computes their keys and values from one small latent vector per token (a low-rank form of the cache) |
#
# **Papers.** Williams, Waterman and Patterson 2009, *Roofline: An Insightful Visual Performance Model for Multicore
# Architectures*. Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need* (MQA, and the count of
# exercise 3). Ainslie et al. 2023, *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
# Checkpoints*. MBU: Agarwal et al. 2023, *LLM Inference Performance Engineering: Best Practices*.
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | Llama-2-70B: 80 GB of cache at 4096 tokens, often more than the weights | 1.34 GB, less than the weights; 10.7 GB with all query heads | lesson 2 |
# | `num_key_value_heads = 8` on it saves 8× | it has 8; on an MHA checkpoint the shapes do not fit | Fewer heads by editing a number |
# | GQA: pool by the mean, it beats one head and random heads | random heads are the worst start here, too; mean or one head says nothing before the further training that the paper adds, and both are unusable without it | exercise 6 |
# | sub-100 ms inference | undefined; at least 41 ms per token for a 70B model in fp16 on one H100's bandwidth | the last table |
#
# ## Recap
#
# 1. A computation has an intensity (operations per byte), a machine has a ridge. Left of the ridge memory is the limit,
#    right of it arithmetic.
# 2. A linear layer has an intensity of $2 \cdot \text{rows} / \text{bytes per number}$: batches, prompts and draft
#    tokens move it to the right. Attention has $2 \cdot \text{group} \cdot \text{new tokens} / \text{bytes per
#    number}$: neither context nor batch moves it.
# 3. Prefill is limited by arithmetic, decoding a large model by bytes, and decoding a small one by neither, as long as
#    every operation is started on its own.
# 4. MBU says how much of the bandwidth a step really uses. Measure the bandwidth; count the weights once and the cache
#    of every request.
# 5. Fewer KV heads help where the cache is most of the bytes. They cost quality, which must be restored by training.
#
# **Next:** lesson 4 keeps all heads and makes the numbers themselves smaller.
