# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 15. Capstone: a completion under 100 ms
#
# **Question.** *A programmer stops typing for a moment. Can one core of a CPU add 24 tokens to the code in a tenth of a
# second?*
#
# A person perceives a tenth of a second as about "at once". Articles promise "sub-100 ms inference" and do not say of
# what. So define it first: **24 new tokens after a prompt of 200 tokens, one request, greedy decoding, one thread, from
# the call with the prompt to the returned text.** **Cold** means that the engine has never seen this prompt, **warm**
# that it has just completed it, as when an editor asks again in the same file. Everything counts: tokenising, queueing,
# the prompt, the new tokens, Python, detokenising.
#
# You start with plain PyTorch and repeat one loop six times: **predict** where the time goes, **measure** it, choose
# a large part, change it, measure again. Several of the lessons before this one come back as a bar of a picture. One
# change makes it slower, and two gain little, or lose.
#
# The first run [compiles two functions](glossary.md#compiled-step) for your processor, which takes most of its time.
# They are cached on disk, and the next run loads them from there.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.models.held_out import held_out_prompts
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.viz.timeline.latency_waterfall import Latency, LatencyWaterfall

name = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
draft_name = os.environ.get("MINILLM_DRAFT", "minicoder-draft")
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # one thread for PyTorch (on macOS its products may use more) and for the compiled step

PROMPT_TOKENS, NEW_TOKENS = 200, 24
options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 48, "max_num_seqs": 2}
plain = LLM(name, enforce_eager=True, **options)  # one PyTorch operation after the other
tokenizer = plain.engine.tokenizer
long_enough = [p for p in held_out_prompts() if len(tokenizer.encode(p.prompt)) >= PROMPT_TOKENS]
beginnings = [(p.source, tokenizer.decode(tokenizer.encode(p.prompt)[:PROMPT_TOKENS])) for p in long_enough[:8]]
source, prompt = next((one for one in beginnings if "narwhals" in one[0]), beginnings[0])  # it ends inside code
others = [text for _, text in beginnings if text != prompt][:5]
params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
[output] = plain.generate(prompt, params, use_tqdm=False)
expected = output.outputs[0].token_ids
print(f"prompt: {len(output.prompt_token_ids)} tokens of {source}; it ends with")
print("\n".join(prompt.splitlines()[-4:]) + "⟨" + output.outputs[0].text + "⟩")

# %% [markdown]
# ## Predict
#
# 1. In plain PyTorch, cold, 200 tokens go through the model together, then 23 times one token. What percentage of the time
#    does the *[prompt](glossary.md#prefill)* take?
# 2. How many PyTorch operations does one decode step call? (8 layers; each has norms, four matrices, RoPE, attention.)
# 3. At the end of the lesson, how many times as fast is the cold completion?

# %%
predict("l15.prompt_share", None, unit="percent")
predict("l15.calls", None, unit="operations")
predict("l15.faster", None, unit="times as fast")

# %% [markdown]
# ## Build and see
#
# ### Exercise 1: where does the time go?
#
# The engine reports what it does as events. `record_marks` reads the clock at each event and returns *marks*, pairs of the
# time in seconds and what has just happened:
#
# `(4.2, "Start"), (4.2008, "RequestAdded"), (4.2009, "StepStarted"), (4.2583, "StepRan prefill"), (4.2584, "Committing"), …`
#
# (The clock started before the run did, so the first mark is not at 0.)
#
# Turn them into the seconds of each part. One rule makes such a profile trustworthy: **the parts sum to the whole.** A
# profile that leaves something out sends you to the wrong place.
#
# | the mark | the part that the time before it belongs to |
# |---|---|
# | `RequestAdded` | tokenise: turn text into tokens |
# | `StepStarted` | queue: waiting for a step |
# | `StepRan prefill` | prefill: the prompt, or a chunk of it |
# | `DraftProposed` | draft: proposing draft tokens, by a draft model or by a search (steps 5 and 6) |
# | `StepRan decode`, `StepRan verify` | target: the target model |
# | `Detokenised` | detokenise: turn a token into text |
# | anything else | python |

# %%
import itertools

PART_OF = {
    "RequestAdded": "tokenise",
    "StepStarted": "queue",
    "StepRan prefill": "prefill",
    "DraftProposed": "draft",
    "StepRan decode": "target",
    "StepRan verify": "target",
    "Detokenised": "detokenise",
}


def attribute(marks: list[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each part: tokenise, queue, prefill, draft, target, python, detokenise; 0.0 if a part does not occur.

    marks: (seconds, what had just happened), in order of time

    Example: [(5.0, "Start"), (7.0, "RequestAdded"), (7.5, "BlocksAllocated")] gives tokenise 2.0, python 0.5, others 0.0.
    """
    ### BEGIN SOLUTION
    parts = dict.fromkeys(["tokenise", "queue", "prefill", "draft", "target", "python", "detokenise"], 0.0)
    for (began, _), (ended, happened) in itertools.pairwise(marks):
        parts[PART_OF.get(happened, "python")] += ended - began
    return parts
    ### END SOLUTION


# %%
check("l15.attribute")

# %% [markdown]
# Stuck? `hint("l15.attribute", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# Now measure. The clock is the CPU time of this thread, so the time of other programs does not count; on an idle machine
# it equals wall-clock time. (On Windows and macOS it is wall-clock time: on Windows CPU time is too coarse, and on macOS
# PyTorch's products may run on several threads.) `race` runs the engines to be compared in turn, three times after a
# warm-up, and returns for each the parts of the run with the median total. (It raises an error if the parts do not sum
# to the whole.) Other programs still share caches and memory, so compare times of the same race only.

# %% tags=["expected", "nbval-ignore-output"] alt="One bar, over the line at 100 ms: the prompt and the target's 23 decode steps are nearly all of it; tokenising, queue and detokenising cannot be seen."
import time
from collections import Counter

from minillm.batch import Segment
from minillm.teaching import latency
from minillm.teaching.latency import decode_step, operations_called, record_marks, seconds_of

my_attribute = use("l15.attribute")


def race(engines: dict[str, LLM], warm: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Seconds of each part of each engine's median run. Engines in `warm` have just completed the prompt."""
    return latency.race(engines, prompt, params, my_attribute, warm, rounds=3)


# Once a large tensor has been freed, the C library of Linux reuses the memory of freed tensors. Before, it gets new pages
# from the operating system for each. Later cells free large tensors, and times before and after should be comparable.
torch.empty(2**22)
start = Latency("plain PyTorch", race({"plain": plain})["plain"])
reveal("l15.prompt_share", round(100 * start.seconds["prefill"] / start.total))
small = [start.seconds[part] for part in ("tokenise", "queue", "detokenise")]
claim("Plain PyTorch needs more than 100 ms.", start.total > 0.1, measured=True)
claim(
    "Tokenising, queue and detokenising take less than 5% of the time.",
    sum(small) < 0.05 * start.total,
    measured=True,
)
LatencyWaterfall("24 tokens after 200: the start", [start])

# %% [markdown]
# The picture shows what is *not* worth improving: tokenising, detokenising and the queue. (A single request does not
# wait for others; what is left of the queue is the engine's own work before a step.) Two parts count: the prompt and
# the new tokens. Lesson 3 found that arithmetic limits the prompt, and that decoding a small model in plain PyTorch
# reaches neither limit. What takes its time?
#
# ### Profile
#
# Which PyTorch operations does one decode step call, and how often? (Counted at PyTorch's dispatcher, so views count too.)

# %% tags=["nbval-ignore-output"]
ids = tokenizer.encode(prompt)
called = operations_called(decode_step(plain, ids))
plain.reset_prefix_cache()  # the forward overwrote cached blocks
for operation, count in called.most_common(8):
    print(f"{operation.replace('numpy_T', '.T (transpose)'):16} {count:4} times")
products = sum(called[operation] for operation in ("matmul", "mm", "addmm", "linear"))
print(f"{called.total()} operations in one step; {products} of them multiply by a weight")
reveal("l15.calls", called.total())
claim("Fewer than one operation in ten multiplies by a weight.", 0 < products < called.total() / 10)

# %% [markdown]
# The other operations reshape, add, copy and look up. There are two costs here, and they need different remedies: *bytes*
# (all weights are read once for every token) and *calls* (each operation takes a microsecond or more before it does
# anything).
#
# ### Exercise 2: what is the least time that a step takes?
#
# Put bytes, calls and arithmetic (lesson 3) into one formula.


# %%
def step_seconds(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    """The least time of a step, in seconds.

    operations: multiplications and additions (not PyTorch's operations: those are the calls)
    bandwidth: bytes per second; rate: operations per second. Moving bytes and computing overlap. Calls do not overlap
    with them: the thread that makes a call is the thread that does the work.

    Example: 60 bytes at 20 per second, 10 operations at 10 per second and 4 calls of half a second: 3 + 2 = 5.
    """
    ### BEGIN SOLUTION
    return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)
    ### END SOLUTION


# %%
check("l15.step_seconds")

# %% [markdown]
# Count the bytes and the operations of a step, for each kind of weights in this lesson:

# %%
config = plain.engine.runner.model.config
model = plain.engine.runner.model
in_layers = sum(p.numel() for layer in model.layers for p in layer.parameters() if p.ndim == 2)
in_head = model.lm_head.weight.numel()
BYTES = {  # bytes per weight: in the layers, and in the LM head
    "float32 (plain PyTorch)": (4, 4),
    "16 bits, as in most checkpoints": (2, 2),
    "W8A8": (1, 1),
}
weight_bytes = {kind: a * in_layers + b * in_head for kind, (a, b) in BYTES.items()}
cache_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * PROMPT_TOKENS


def operations(rows: int, pairs: int) -> int:
    """Operations for `rows` tokens, `pairs` of a query and a key that it sees, and one row of logits (lesson 3)."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * in_layers * rows + attention + 2 * in_head


decode_work = operations(1, PROMPT_TOKENS)
prefill_work = operations(PROMPT_TOKENS, PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2)
for kind, size in weight_bytes.items():
    print(f"{kind:32} {(size + cache_bytes) / 1e6:6.1f} million bytes per token")
print(
    f"one token: {decode_work / 1e6:,.0f} million multiplications and additions; the prompt: {prefill_work / 1e6:,.0f} million"
)

# %% [markdown]
# Now measure the machine's limits. The bandwidth is that of the faster of two copies: a large one, and one of the size
# of the weights, which may fit into the processor's cache. The rate of arithmetic is that of PyTorch's product of two
# large matrices. (This is one product of PyTorch's. Other shapes can run faster in PyTorch, and a later step has a
# faster kernel. A **floor**, the least time that a part can take, needs the *best* rate of the machine; the best that
# was measured is what stands for it here.)

# %% tags=["nbval-ignore-output"]
from minillm.doctor.machine_limits import copy_bandwidth

my_step = use("l15.step_seconds")
weights_size = weight_bytes["16 bits, as in most checkpoints"]
bandwidth = max(copy_bandwidth("cpu", repeats=5, num_bytes=size).high for size in (2**26, weights_size))
square = torch.randn(1024, 1024)
rate = 2 * 1024**3 / seconds_of(lambda: square @ square, 1, 5)
small = torch.zeros(8)
per_call = seconds_of(lambda: torch.add(small, small), repeats=2000)
print(
    f"{bandwidth / 1e9:.0f} GB/s, {rate / 1e9:.0f} G operations/s in a PyTorch product, "
    f"{1e6 * per_call:.1f} µs for an operation on 8 numbers"
)

moved = weight_bytes["float32 (plain PyTorch)"] + cache_bytes
measured = {"one token": start.seconds["target"] / (NEW_TOKENS - 1), "the prompt": start.seconds["prefill"]}
print("                     modelled   measured   calls, bytes, arithmetic (modelled, ms)")
for label, work in (("one token", decode_work), ("the prompt", prefill_work)):
    modelled = my_step(moved, work, called.total(), bandwidth, rate, per_call)
    split = [1000 * x for x in (called.total() * per_call, moved / bandwidth, work / rate)]
    parts = ", ".join(f"{x:.2f}" for x in split)
    print(f"{label:20} {1000 * modelled:6.1f} ms {1000 * measured[label]:7.1f} ms   {parts}")
claim("For the prompt, arithmetic takes longer than bytes.", prefill_work / rate > moved / bandwidth, measured=True)
claim(
    "One token takes longer than modelled.",
    measured["one token"] > my_step(moved, decode_work, called.total(), bandwidth, rate, per_call),
    measured=True,
)
claim("For one token, bytes take longer than arithmetic.", moved / bandwidth > decode_work / rate, measured=True)

# %% [markdown]
# In the model, calls and bytes limit a token, and arithmetic limits the prompt. But look how much of a token's measured
# time the model explains. What it leaves out may be large: a product with one row may not reach the bandwidth of a
# copy, other operations may cost more than an addition of 8 numbers, and Python needs time between two calls. For the
# prompt the measured time can be longer than the modelled one, because attention and norms do not reach the rate of a
# large product, or shorter, because products of other shapes may run faster than the one that was measured.
#
# ### Step 1: reuse the cached prompt
#
# **Predict**: the engine has just completed this prompt, and its keys and values are [still in the
# pool](glossary.md#prefix-caching) (lesson 6). How much of each part is left?

# %% tags=["nbval-ignore-output"]
seconds = race({"cold": plain, "warm": plain}, warm=("warm",))
warm_rows = [Latency("plain PyTorch", seconds["cold"]), Latency("warm: prefix cache", seconds["warm"], "plain PyTorch")]
claim(
    "Warm, the prompt takes less than half of its cold time.",
    2 * seconds["warm"]["prefill"] < seconds["cold"]["prefill"],
    measured=True,
)
LatencyWaterfall("Step 1: the prompt is cached", warm_rows)

# %%
marks, output = record_marks(plain, prompt, params)
kinds = Counter(what for _, what in marks if what.startswith("StepRan"))
print(f"{output.num_cached_tokens} of {len(ids)} prompt tokens were cached; forwards: {dict(kinds)}")

# %% [markdown]
# The blue part (prefill) shrinks most. (It does not vanish: the last tokens of a prompt always go through the model, because
# they give the logits of the first new token, and only full blocks of 16 are cached.) This is the cheapest step of all
# *where it applies*, and it does not apply to a new prompt. From here on everything is measured **cold**.
#
# ### Step 2: INT8 weights
#
# INT8 weights have a quarter of the bytes (lesson 5), and in the model above a token's bytes take longer than its
# arithmetic. **Predict** what INT8 weights do to the green part (target) of plain PyTorch.

# %% tags=["nbval-ignore-output"]
eager_int8 = LLM(name, enforce_eager=True, quantization="int8", **options)
seconds = race({"plain": plain, "int8": eager_int8})
int8_row = Latency("INT8 weights, eager", seconds["int8"], "plain PyTorch")
called_int8 = operations_called(decode_step(eager_int8, ids))
del eager_int8
claim(
    "In plain PyTorch, INT8 weights make decoding slower.",
    seconds["int8"]["target"] > seconds["plain"]["target"],
    measured=True,
)
LatencyWaterfall(
    "Step 2: a quarter of the bytes, in plain PyTorch", [Latency("plain PyTorch", seconds["plain"]), int8_row]
)

# %%
print(f"operations in one step: {called.total()} in float32, {called_int8.total()} with INT8 weights")
traffic = {
    "float32: 4 bytes read by the product": 4,
    "INT8: 1 read and 4 written by the cast, 4 + 4 by the scaling, 4 read by the product": 1 + 4 + 4 + 4 + 4,
}
for label, size in traffic.items():
    print(f"{label}: {size} bytes per weight, {size * in_layers / 1e6:.0f} million for the layers")

# %% [markdown]
# **It loses.** PyTorch has no public operation that multiplies float32 activations by INT8 weights without quantising the
# activations, too. So separate operations dequantise the weights first. The cast reads a byte and writes four, the
# scaling reads and writes four, and the product reads four. That is four times as many bytes as before (many of them in
# caches, or it would be worse), and more calls. The weights take less memory, but the step is not faster. *Quantisation
# saves bytes only where the dequantising happens inside the loop that multiplies.* With eager PyTorch's operations you
# cannot write that loop (a compiler such as `torch.compile` may generate it). With numba you can.
#
# ### Exercise 3: your own product
#
# numba compiles a Python function to machine code. Two things decide whether this code is fast: how many numbers one
# instruction handles (**SIMD**), and in which order it reads memory. `minillm.ops.cpu` solves both with a memory layout. A
# **[panel](glossary.md#panel)** is sixteen rows of W, stored column by column:

# %%
import numpy as np

from minillm.ops.cpu.panels import pack

tiny = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
panels = pack(tiny)
print(f"W has {tiny.shape[0]} rows of {tiny.shape[1]}; row 0 is {tiny[0]}, row 1 is {tiny[1]}")
print("panel 0, column 0:", panels[:16].astype(int))
print("panel 0, column 1:", panels[16:32].astype(int))
print("panel 1, column 0:", panels[48:64].astype(int), "← rows 16 to 19, and zeros to fill the panel")

# %% [markdown]
# Sixteen adjacent numbers are the weights of sixteen *outputs*, one each. They are all multiplied by the same element of x.
# So one load fetches sixteen weights, one multiply-add updates sixteen sums, no sum runs across the lanes of a vector, and
# memory is read in order. Four functions are enough, and each is one instruction where the processor has AVX-512:
#
# | function | what it does |
# |---|---|
# | `load(array, at)` | the sixteen numbers from `array[at]` on |
# | `splat(number)` | a vector of sixteen times the same number |
# | `fma(a, b, sums)` | `a · b + sums`, lane by lane |
# | `store(array, at, vector)` | write sixteen numbers from `array[at]` on |
#
# Compiled code does not check array bounds. So the check runs your function on arrays with NaN around them. On Linux
# without a GPU it does so in a separate process, and reports every read or write past an end. Elsewhere it can miss a
# read that does not change the result, and an access far outside can end the kernel of this notebook.

# %%
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.simd import LANES, fma, load, splat, store

ZERO = np.float32(0)


@njit(**OPTIONS)
def panel_product(panels, x, y):
    """Write W x to y.

    panels: W in the layout of `pack`, flat: column k of panel p begins at (p * columns + k) * LANES
    x:      [columns]
    y:      [number of outputs, padded to a multiple of LANES]: LANES outputs per panel; initial contents are arbitrary
    All are float32.
    """
    ### BEGIN SOLUTION
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)
    ### END SOLUTION


# %%
check("l15.panel_product")

# %% [markdown]
# **Inside the engine.** Every linear layer of the plain model but the LM head now calls your function when it gets a single
# row; prompts use PyTorch's product as before. Does the engine generate the same tokens, and how fast?

# %% tags=["nbval-ignore-output"]
from minillm.teaching.latency import with_panel_products

mine = use("l15.panel_product")
kernel = mine if hasattr(mine, "py_func") else njit(**OPTIONS)(mine)
with_kernel = LLM(name, enforce_eager=True, **options)
layers = with_panel_products(with_kernel, model, kernel)  # shares the weights of `plain`
tokens = with_kernel.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
print(f"{len(layers)} layers use your kernel, {sum(layer.calls for layer in layers)} calls")
claim(f"With your product the engine generates the same {NEW_TOKENS} tokens.", tokens == expected)
seconds = race({"plain": plain, "own": with_kernel})
del with_kernel, layers
own_row = Latency("own product, eager", seconds["own"], "plain PyTorch")
own_gain = seconds["plain"]["target"] / seconds["own"]["target"]
print(f"your own product: the new tokens are {own_gain:.2f} times as fast")
LatencyWaterfall("Your own product inside plain PyTorch", [Latency("plain PyTorch", seconds["plain"]), own_row])

# %% [markdown]
# What another product alone changes is the factor above. It leaves the other calls and the four bytes per weight as
# they are. To see what a call costs, take a product so small that its arithmetic takes almost no time, and compute it
# in three ways: as a PyTorch operation, as a call of your function from Python, and as a call of your function *from a
# compiled function*.


# %% tags=["nbval-ignore-output"]
@njit(**OPTIONS)
def many_times(panels, x, y, times):
    for _ in range(times):
        kernel(panels, x, y)


weight, vector = torch.randn(64, 64), torch.randn(1, 64)
own = (pack(weight.numpy()), vector[0].numpy(), np.empty(64, np.float32))
times = {
    "PyTorch, F.linear": seconds_of(lambda: torch.nn.functional.linear(vector, weight), 2000),
    "your function, called from Python": seconds_of(lambda: kernel(*own), 2000),
    "your function, called from compiled code": seconds_of(lambda: many_times(*own, 200), 10) / 200,
}
for label, taken in times.items():
    print(f"{label:42} {1e6 * taken:6.2f} µs per product of 64 × 64")
in_torch, from_python, inside = times.values()
claim(
    "Called from compiled code, the same function takes less than half as long.",
    2 * inside < from_python,
    measured=True,
)

# %% [markdown]
# The calls of the products alone are a small part of a token. But between these products stand some hundreds of other
# operations, each with its call and the Python around it. They go away only together: **a step must be one function**.
# It can also read the weights in fewer bytes.
#
# ### Step 3: the compiled step
#
# `minillm/ops/cpu/` has that function: all layers of the decoder in one call, without a C compiler. You have written its
# innermost loop. What it adds:
#
# * **Tiles.** In your loop every multiply-add waits for the one before it, because there is one sum. The real loop keeps a
#   *[tile](glossary.md#tile)* of several rows × several panels of sums in vector registers (`register_tiles.py`). With one
#   row, several panels hide this latency. With several rows, each loaded weight is used once per row, so arithmetic limits
#   a prompt, and not loads. Every sum still runs over k in order, so the results of a token do not depend on the other
#   requests in the batch.
# * **Narrow weights.** minicoder's checkpoint holds 16-bit floats. `load` casts them to float32 in the register, so memory
#   moves half the bytes and the result stays the same. (Step 2 lacked this cast inside the loop.)
# * **Everything between the products** (norms, RoPE, SiLU, attention that walks the [block
#   table](glossary.md#block-table)) on the same vectors, without a call.
# * **Barriers.** With several threads, each computes a part of the outputs. At a barrier, each thread waits until all have
#   arrived; a layer has several. `team.py` starts the threads once and lets them wait at a shared counter, which costs less
#   than starting a parallel loop each time. (This lesson has one thread, which never waits.)
#
# The engine uses this compiled step by default; `enforce_eager=True` switched it off. **Predict** the green part: by what
# factor do half the bytes and a single call shrink it?

# %% tags=["nbval-ignore-output"]
began = time.perf_counter()
compiled = LLM(name, **options)
print(f"ready after {time.perf_counter() - began:.1f} s (compiled once, then loaded from disk)")
seconds = race({"plain": plain, "compiled": compiled})
gains = {part: seconds["plain"][part] / seconds["compiled"][part] for part in ("prefill", "target")}
print(f"the new tokens are {gains['target']:.1f} times as fast, the prompt {gains['prefill']:.1f} times")
claim("The compiled step makes both parts faster.", min(gains.values()) > 1, measured=True)
claim(
    "The new tokens gain more than twice as much by it as by your own product.",
    gains["target"] > 2 * own_gain,
    measured=True,
)
rows = [Latency("plain PyTorch", seconds["plain"]), Latency("compiled step", seconds["compiled"], "plain PyTorch")]
LatencyWaterfall("Step 3: one call instead of hundreds", rows)

# %%
executor = compiled.engine.runner.executor
tokens = compiled.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
if executor is not None:
    inside = operations_called(decode_step(compiled, ids)).total()
    compiled.reset_prefix_cache()
    packed = executor.packed  # the weights as the compiled step reads them
    read = packed.weights.nbytes + packed.head.nbytes
    claim(
        "A compiled step calls fewer than a tenth of the PyTorch operations of a plain one.",
        10 * inside < called.total(),
    )
    floats = " with the bits of 16-bit floats" if packed.weights.dtype.itemsize == 2 else ""
    print(f"weights read: {read / 1e6:.1f} million bytes, in {packed.weights.dtype}{floats}")
claim(f"The compiled step generates the same {NEW_TOKENS} tokens as plain PyTorch.", tokens == expected)

# %% [markdown]
# Both parts gain, for different reasons. A decode step gains because it has fewer calls and bytes. The prompt's 200 rows
# share their calls and bytes, so its gain is mostly faster arithmetic: in the tiles, and in attention and norms, which this
# lesson does not measure separately. How fast can this machine compute at all? Measure prompts of other lengths: longer
# ones keep the tiles full, and the operands of shorter ones stay in the processor's cache. The highest rate of all is
# one more measurement of the limit.

# %% tags=["nbval-ignore-output"]


def rate_of(llm: LLM) -> float:
    """The highest rate, in operations per second, over prompts of four lengths and three runs each."""
    llm.reset_prefix_cache()
    rates = []
    for tokens in (96, 192, 256, 512):
        blocks = list(range(-(-tokens // llm.engine.runner.block_size)))
        one = [Segment((ids * 3)[:tokens], 0, blocks)]
        fastest = min(seconds_of(lambda one=one: llm.engine.runner.run(one), 1, 1) for _ in range(3))
        rates.append(operations(tokens, tokens * (tokens + 1) // 2) / fastest)
    return max(rates)


rates = {"float32": max(rate, rate_of(compiled))}
print(f"in float32: PyTorch's product {rate / 1e9:.0f} G operations/s, the fastest so far {rates['float32'] / 1e9:.0f}")

# %% [markdown]
# > A true story about this part (its numbers are quoted from the log of that day, on another machine). For a while the
# > blue bar was more than *twice* as long as it should be, in some runs and not in others. Other programs on the
# > machine seemed to be the cause. Then the same product was timed in two processes. One had just compiled the step and
# > took 57 ms for 512 tokens; the other had loaded it from disk and took 140 ms. In the second, LLVM had unrolled the
# > loop over k and needed more registers than there are. So it **spilled** the 24 sums: it wrote them to memory and
# > read them back in every iteration. Now `register_tiles.py` tells LLVM not to unroll that loop. A time that varies
# > has a cause. Look at the machine code.
#
# ### Step 4: W8A8
#
# Arithmetic limits the prompt, so do cheaper arithmetic. Quantise the [activations to INT8](glossary.md#w8a8) as well
# (lesson 5), and the products become products of *bytes*. An instruction with 16 float lanes has 64 byte lanes
# ([VNNI](glossary.md#vnni); a processor without it multiplies pairs of 16-bit numbers instead and gains less; the line
# printed below says what this machine gains). That is a quarter of plain PyTorch's bytes per weight, and with VNNI up to
# four times as many products per instruction. A whole forward gains less: attention and norms still compute in floats,
# and the activations must be quantised first. The price: it is lossy. (The weights of the LM head are INT8 too, but its
# inputs are quantised to two bytes each, which costs next to nothing in quality.)

# %% tags=["nbval-ignore-output"]
began = time.perf_counter()
w8a8 = LLM(name, quantization="w8a8", **options)
print(f"ready after {time.perf_counter() - began:.1f} s")
seconds = race({"plain": plain, "compiled": compiled, "w8a8": w8a8})
rates["W8A8"] = rate_of(w8a8)
print(f"{rates['W8A8'] / 1e9:.0f} G operations/s at most; in float32 {rates['float32'] / 1e9:.0f}")
claim(
    "W8A8 is faster than float32, for the prompt and for the new tokens.",
    all(seconds["w8a8"][part] < seconds["compiled"][part] for part in ("prefill", "target")),
    measured=True,
)
w8a8_row = Latency("W8A8", seconds["w8a8"], "compiled step")
rows = [
    Latency("plain PyTorch", seconds["plain"]),
    Latency("compiled step", seconds["compiled"], "plain PyTorch"),
    w8a8_row,
]
LatencyWaterfall("Step 4: products of bytes", rows)

# %%
same, first = 0, []
for text in [prompt, *others]:
    a, b = (llm.generate(text, params, use_tqdm=False)[0].outputs[0].token_ids for llm in (compiled, w8a8))
    first.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), NEW_TOKENS))
    same += a == b
if w8a8.engine.runner.executor is not None:
    packed = w8a8.engine.runner.executor.packed
    read = packed.weights.nbytes + packed.head.nbytes
    print(f"weights read: {read / 1e6:.1f} million bytes")
print(f"{same} of {len(first)} completions have the same {NEW_TOKENS} tokens as float32")
print(f"tokens before the first that differs: {first}")

# %% [markdown]
# The cell shows the price: how many completions still have the tokens of float32. Other tokens are not necessarily worse
# tokens; lesson 5 measures the loss in quality. Both parts of the bar shrink: the prompt because its arithmetic is cheaper,
# the tokens because there is less to read and the products take fewer instructions (the two are not measured separately
# here). **Python** has become visible. In plain PyTorch it was a thin line beside the parts that have shrunk since
# (Amdahl 1967: the part that is not made faster is what remains).
#
# ### Step 5: a draft model on top
#
# Whichever part is now the largest, the decode steps can still become fewer. [Speculative
# decoding](glossary.md#speculative-decoding) does that: a small *[draft](glossary.md#draft)* model proposes γ tokens.
# The target verifies all of them in one step, accepts those before the first that it would not have generated itself,
# and adds one token of its own. That is one *round* (lesson 0 shows it). **Predict**: does it save time here?
#
# Measure before you switch it on. Three numbers decide: how often a draft token is accepted, what a draft token costs (*c*
# below), and how much longer a step takes that verifies several tokens instead of one (*v* below).
#
# ### Exercise 4: which γ?
#
# This is exercise 2 of lesson 11 with one conditional acceptance for all positions.


# %%
def choose_gamma(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    """The number of draft tokens per round that makes decoding fastest; 0 means: do not draft at all.

    acceptance:   conditional acceptance: probability that a draft token is accepted if all before it in its round were
    draft_cost:   c = seconds to draft one token / seconds of one plain step
    verify_costs: v[g] = seconds of a step that verifies g draft tokens / seconds of a plain step; v[0] is 1.0

    If several numbers are equally fast, return the smallest.
    Example: choose_gamma(0.9, 1.0, [1.0, 1.0, 1.0]) is 0: drafts as slow as the target never pay.
    """

    ### BEGIN SOLUTION
    def speed_up(gamma: int) -> float:
        tokens = sum(acceptance**i for i in range(gamma + 1))
        return tokens / (gamma * draft_cost + verify_costs[gamma])

    return max(range(len(verify_costs)), key=speed_up)
    ### END SOLUTION


# %%
check("l15.choose_gamma")

# %% [markdown]
# How often is a draft token accepted? Count on five other prompts, with four draft tokens per round: γ must not be chosen on
# the prompt that it will be measured on.

# %%
from minillm.trace import TokensCommitted

speculative = {"method": "draft_model", "model": draft_name, "num_speculative_tokens": 4, "adaptive": False}
drafting = LLM(name, quantization="w8a8", speculative_config=speculative, **options)
with drafting.trace() as trace:
    drafting.generate(others, params, use_tqdm=False)
del drafting
judged = [event for event in trace.of(TokensCommitted) if event.num_drafts]
accepted = sum(event.num_accepted for event in judged)
rejected = sum(event.num_accepted < event.num_drafts for event in judged)
acceptance = accepted / (accepted + rejected)
print(
    f"{len(judged)} rounds: {accepted} draft tokens accepted, {rejected} rejected: a conditional acceptance of {acceptance:.2f}"
)

# %% tags=["nbval-ignore-output"]
from functools import partial

my_gamma = use("l15.choose_gamma")
draft_alone = LLM(draft_name, **options)
parts = w8a8_row.seconds
between = (parts["python"] + parts["queue"] + parts["detokenise"]) / NEW_TOKENS  # seconds per step outside the model
for each in (w8a8, draft_alone):
    each.engine.runner.run([Segment(ids, 0, list(range(14)))])
forwards = [seconds_of(decode_step(w8a8, ids, width), 10) for width in range(1, 8)]
last = Segment(ids[-1:], len(ids) - 1, list(range(14)))
draft_seconds = seconds_of(partial(draft_alone.engine.runner.draft, [last], 4), 10) / 4
w8a8.reset_prefix_cache()
del draft_alone
one = forwards[0] + between
c, v = draft_seconds / one, [(seconds + between) / one for seconds in forwards]
v[0] = 1.0
gamma = my_gamma(acceptance, c, v)
print(
    f"a plain step in a loop of its own {1000 * one:.2f} ms, c = {c:.2f}, v for 1 to 6 draft tokens: "
    + ", ".join(f"{x:.2f}" for x in v[1:])
)
tokens_at_4 = sum(acceptance**i for i in range(5))
print(
    f"a round with 4 draft tokens gives {tokens_at_4:.2f} tokens in the time of {4 * c + v[4]:.2f} steps: "
    f"{tokens_at_4 / (4 * c + v[4]):.2f}×"
)
print(f"the best γ: {gamma}; if drafting cost nothing (c = 0): {my_gamma(acceptance, 0.0, v)}")
claim("Cheaper drafting is never a reason to draft fewer tokens.", my_gamma(acceptance, 0.0, v) >= gamma)

# %% [markdown]
# Now run it, with your γ (at least 1, to see what it does), and compare it with W8A8 alone.

# %% tags=["nbval-ignore-output"]
config_of_draft = {**speculative, "num_speculative_tokens": max(1, gamma)}
w8a8_engines = {
    "W8A8": w8a8,
    "W8A8 + draft": LLM(name, quantization="w8a8", speculative_config=config_of_draft, **options),
}
seconds = race(w8a8_engines)
draft_rows = [Latency("W8A8", seconds["W8A8"]), Latency("W8A8 + draft", seconds["W8A8 + draft"], "W8A8")]
gain = draft_rows[0].total / draft_rows[1].total
print(f"the whole completion: {gain:.2f}×")
claim("The gain is below the 2 to 2.8 times that an article on drafts promises (quoted).", gain < 2, measured=True)
LatencyWaterfall("Step 5: a draft model on top", draft_rows)

# %%


def tokens_of(label: str) -> list[int]:
    """The tokens that one of these engines generates."""
    return w8a8_engines[label].generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


claim("With a draft model the tokens are the same as without.", tokens_of("W8A8 + draft") == tokens_of("W8A8"))

# %% [markdown]
# Three things limit the gain:
#
# * Only what is done once per step can shrink: the green part (target), and with it some Python. The prompt takes as long
#   as before.
# * The draft model must prefill the prompt too. 200 tokens through a second model are a large part of the orange part
#   (draft), and the formula does not include them. This cost is spread over only 24 new tokens. Warm, or with a longer
#   completion, a draft model would gain more.
# * The faster the target, the less a saved step is worth, while a draft token takes as long as before: c is larger for a
#   fast target. And where bytes are not the limit, verifying several tokens takes longer than one: v is above 1.
#
# One completion may favour the draft, for example if it repeats itself. That is why the conditional acceptance above
# was counted on other prompts. Speculation works best if a step of the target is slow because of the bytes it reads,
# and the draft is cheap in comparison: with a target a hundred times this size.
#
# ### Step 6: an n-gram drafter
#
# A drafter without prefill and with a smaller c would avoid two of the three limits. Code repeats itself. So search the
# text for an earlier occurrence of the last few tokens, and propose the tokens that followed it (`"method": "ngram"`).
# This search is short, but so is a step of this target.

# %% tags=["nbval-ignore-output"]
lookup = {
    "method": "ngram",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
    "num_speculative_tokens": 4,
    "adaptive": False,
}
w8a8_engines["W8A8 + n-gram"] = LLM(name, quantization="w8a8", speculative_config=lookup, **options)
seconds = race(w8a8_engines)
looked_up = [Latency(label, seconds[label], None if label == "W8A8" else "W8A8") for label in w8a8_engines]
drafted = {label: seconds[label]["draft"] for label in ("W8A8 + draft", "W8A8 + n-gram")}
claim(
    "The n-gram search takes less than half of the draft model's time.",
    2 * drafted["W8A8 + n-gram"] < drafted["W8A8 + draft"],
    measured=True,
)
LatencyWaterfall("Step 6: draft tokens found in the text", looked_up)

# %%
claim("With n-grams the tokens are the same as without.", tokens_of("W8A8 + n-gram") == tokens_of("W8A8"))

# %% [markdown]
# The orange part shrinks. Where the text is new, the search finds nothing, and the step is a plain one. A rejected
# token costs time, because the target has verified it: the step took v instead of 1. Compare the totals: with a target
# this fast, n-grams may gain nothing, or lose. On text that never repeats itself an n-gram drafter proposes nothing,
# whereas a draft model still proposes tokens.
#
# ## Measure
#
# Now measure the engines in turn, cold, and W8A8 alone once more, warm. (The bar of INT8 weights is that of step 2, from
# another race.)

# %% tags=["expected", "nbval-ignore-output"] alt="A bar for each way, cold: plain PyTorch and INT8 weights over the line at 100 ms; the compiled step much shorter than both; W8A8 shorter still, alone, with a draft model and with n-grams; warm the shortest, with little left of the prompt."
engines = {"plain PyTorch": plain, "compiled step": compiled, **w8a8_engines, "W8A8, warm": w8a8}
seconds = race(engines, warm=("W8A8, warm",))
before = {"compiled step": "plain PyTorch", "W8A8": "compiled step"}
before |= dict.fromkeys(("W8A8 + draft", "W8A8 + n-gram", "W8A8, warm"), "W8A8")
rows = [
    Latency("plain PyTorch", seconds["plain PyTorch"]),
    Latency(int8_row.name, int8_row.seconds),
    *(Latency(label, seconds[label], before[label]) for label in before),
]
final = min((row for row in rows if row.name != "W8A8, warm"), key=lambda row: row.total)
by_name = {row.name: row for row in rows}
print(
    f"CPU time (on Windows and macOS: wall-clock time), cold: W8A8 {1000 * by_name['W8A8'].total:.0f} ms, the fastest ({final.name}) {1000 * final.total:.0f} ms"
)
claim(
    "The compiled step is faster than plain PyTorch, and W8A8 is faster still.",
    by_name["plain PyTorch"].total > by_name["compiled step"].total > by_name["W8A8"].total,
    measured=True,
)
claim("Warm is the fastest of all.", by_name["W8A8, warm"].total == min(row.total for row in rows), measured=True)
largest = max(by_name["W8A8"].seconds, key=by_name["W8A8"].seconds.get)
print(f"the largest part of W8A8, cold, is now: {largest}")
reveal("l15.faster", round(rows[0].total / final.total, 1))
wall_clock_ms = []
for _ in range(5):
    w8a8.reset_prefix_cache()
    began = time.perf_counter()
    w8a8.generate(prompt, params, use_tqdm=False)
    wall_clock_ms.append(1000 * (time.perf_counter() - began))
print(
    f"W8A8, cold, wall-clock time: from {min(wall_clock_ms):.0f} to {max(wall_clock_ms):.0f} ms in five runs, "
    f"{sum(taken < 100 for taken in wall_clock_ms)} of them under 100 ms"
)
LatencyWaterfall("24 tokens after 200, one core: every step", rows)

# %% [markdown]
# The last line answers the question of this lesson, because its definition asks for wall-clock time. The bars show CPU
# time (on Windows and macOS: wall-clock time), in which waiting for other programs does not count. Ways whose bars differ
# by a few milliseconds may change places in the next run.
#
# **How far away is the floor?** Your `step_seconds`, with no calls at all, gives the least time of a completion: the
# operations of the prompt at the highest rate that this lesson reached with the same arithmetic, and the bytes of 23 tokens
# at the highest bandwidth of a copy or a sum of as many bytes. (Small weights may stay in the processor's cache from step
# to step, and that is faster than memory.)

# %% tags=["nbval-ignore-output"]
from minillm.doctor.machine_limits import memory_bandwidth

kinds = {
    "compiled step": ("16 bits, as in most checkpoints", rates["float32"]),
    "W8A8": ("W8A8", rates["W8A8"]),
}
print("                 floor: prompt + 23 tokens      measured: prompt + target      the rest    floor / measured")
above, highest = [], {}
for label, (kind, fastest) in kinds.items():
    size = weight_bytes[kind] + cache_bytes
    highest[label] = max(bandwidth, memory_bandwidth("cpu", repeats=5, num_bytes=weight_bytes[kind]).high)
    floor = [
        my_step(size, prefill_work, 0, highest[label], fastest, 0.0),
        (NEW_TOKENS - 1) * my_step(size, decode_work, 0, highest[label], fastest, 0.0),
    ]
    row = by_name[label]
    real = [row.seconds["prefill"], row.seconds["target"]]
    above += [taken > 0.9 * least for taken, least in zip(real, floor, strict=True)]
    print(
        f"{label:16} {1000 * floor[0]:8.1f} + {1000 * floor[1]:4.1f} ms {1000 * real[0]:20.1f} + {1000 * real[1]:4.1f} ms "
        f"{1000 * (row.total - sum(real)):15.1f} ms {sum(floor) / row.total:17.0%}"
    )
print("highest bandwidth: " + ", ".join(f"{label} {rate / 1e9:.0f} GB/s" for label, rate in highest.items()))
claim(
    "No part is faster than its floor (with a tolerance of a tenth, by which measurements differ).",
    all(above),
    measured=True,
)

# %% [markdown]
# How to read it. A prompt near its floor computes about as fast as anything measured in this lesson. That need not be the
# processor's peak, so a better kernel might still gain; fewer operations, or cheaper ones, should gain in any case. Where
# the highest rate is that of whole prompts, the prompt's floor contains attention and norms already. A token's time above
# its floor probably goes to attention and norms, which move few bytes, and to the many places in a step where one
# operation must finish before the next can start, which no count of bytes includes. And where the bandwidth printed for
# W8A8 is that of numbers which stay in the processor's cache, the floor of its tokens is lower than weights that come
# from memory allow. "The rest" is mostly Python and tokenising, which no floor here includes either.
#
# What would you do next? Look at the largest part, which the cell under *Measure* prints, and at its distance from its
# floor. A second thread speeds up the green and blue parts (target and prefill), but not the yellow one (Python).
#
# ## Break it
#
# A number under 100 ms is easy to get: measure it wrong. Here are four ways:
#
# * The benchmark does not empty the prefix cache.
# * It counts tokens that were never generated.
# * It starts the clock after the prompt.
# * It leaves out detokenising.
#
# **Guess** which of three checks catches which: no prompt token was cached; 24 tokens were generated; the parts from `Start`
# to `End` include prefill and detokenise.


# %%
def checks(llm: LLM, these: SamplingParams, forget: bool = True, late: bool = False) -> str:
    """The verdicts of the three checks on one way of measuring."""
    if forget:
        llm.reset_prefix_cache()
    marks, output = record_marks(llm, prompt, these)
    if late:  # the clock starts at the first token
        marks = marks[next(i for i, (_, what) in enumerate(marks) if what == "StepRan prefill") :]
    parts = my_attribute(marks)
    verdicts = {
        "nothing cached": output.num_cached_tokens == 0,
        f"{NEW_TOKENS} tokens": len(output.outputs[0].token_ids) == NEW_TOKENS,
        "all parts": parts["prefill"] > 0 and parts["detokenise"] > 0,
    }
    return "   ".join(f"{what}: {'ok    ' if right else 'CAUGHT'}" for what, right in verdicts.items())


silent = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
stops = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop=["\n"])
found = {
    "right": checks(w8a8, params),
    "prefix cache not emptied": checks(w8a8, params, forget=False),
    "stops at the end of a line": checks(w8a8, stops),
    "clock starts after prefill": checks(w8a8, params, late=True),
    "no detokenising": checks(w8a8, silent),
}
for label, verdicts in found.items():
    print(f"{label:28}{verdicts}")
claim(
    "Each wrong way is caught by exactly one check.",
    [text.count("CAUGHT") for text in found.values()] == [0, 1, 1, 1, 1],
    of_model=True,
)

# %% [markdown]
# (Stopping at the end of a line is not wrong; a benchmark that counts it as 24 tokens is.) None of the four generates a
# wrong token.
#
# **Find the mistakes.** An article has a "production stack" for vLLM: Llama 3 70B on four GPUs, its cache in INT8, and
# Llama 3 8B as the draft model. In our own words, its code
#
# * gives `LLM` the plain 70B checkpoint, `draft_model` with the 8B checkpoint, `tensor_parallel_size=4`,
#   `quantization="awq"` and `enable_prefix_caching=True`;
# * gives `SamplingParams` a temperature, `speculative_model` with the 8B checkpoint, and `num_speculative_tokens=5`.
#
# <details><summary>What did you find?</summary>
#
# 1. vLLM's `LLM` has no option `draft_model`: this call raises. Drafting is set as here, by
#    `speculative_config={"method": "draft_model", "model": …, "num_speculative_tokens": 5}`.
# 2. `SamplingParams` has neither `speculative_model` nor `num_speculative_tokens`. Drafting belongs to the engine, not to
#    a request.
# 3. `quantization="awq"` loads weights that were quantised with AWQ before. The checkpoint named here was not.
# 4. The INT8 cache is missing: it takes a `kv_cache_dtype`.
#
# </details>
#
# ## In the field
#
# | where | what |
# |---|---|
# | llama.cpp | the strongest peer for one request on a CPU: a graph of C kernels with no Python between them, weights repacked for the processor, `Q8_0` is W8A8 in blocks of 32; `minillm bench decode` and `prefill` compare |
# | vLLM, SGLang | the same remedy on a GPU: CUDA graphs replace hundreds of launches by one; vLLM's `enforce_eager=True` switches them off |
# | gpt-fast, transformers with a static cache | `torch.compile(mode="reduce-overhead")`: the compiler fuses operations, and CUDA graphs launch the step as one |
# | oneDNN, OpenBLAS, BLIS | panels ("packing") and register tiles: Goto and van de Geijn 2008 is where they come from |
# | ONNX Runtime, OpenVINO | whole graphs compiled for a CPU, W8A8 with VNNI |
# | editors | keep the prefix cache of the open file, cancel requests that are out of date, stop at the end of the line: this can be worth more than all of the above |
#
# **Papers.** Goto and van de Geijn 2008, *Anatomy of High-Performance Matrix Multiplication*. Williams, Waterman and
# Patterson 2009, *Roofline*. Dettmers et al. 2022, *LLM.int8()*. Leviathan et al. 2023, *Fast Inference from Transformers
# via Speculative Decoding*. Saxena 2023, *Prompt Lookup Decoding*. Amdahl 1967, *Validity of the Single Processor Approach*.
# Miller 1968, *Response Time in Man-Computer Conversational Transactions* (where the tenth of a second comes from).
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | sub-100 ms inference | means nothing without the number of tokens, the prompt, cold or warm, and the machine; this lesson states the first three, and measures what its machine can do | the whole lesson |
# | INT8 weights make inference faster | only where they are dequantised inside the product; in eager PyTorch on a CPU they made it slower | Step 2 |
# | speculation gives 2 to 2.8× | it depends on c, v, the conditional acceptance and the draft's own prefill; here the whole completion gained little, or lost | Steps 5 and 6 |
# | in an engine written in Python, slow kernels are the problem | your own product among hundreds of calls gained less than half of what the compiled step gained on the new tokens. That step removes the calls and halves the bytes; the two are not measured separately here | Exercise 3, Step 3 |
#
# ## Recap
#
# 1. Say what is measured: prompt, new tokens, cold or warm, machine. The parts of a profile must sum to the whole.
# 2. Each part has its own limit: arithmetic for the prompt, bytes for a token, calls for a small model.
# 3. A prefix cache removes the prompt where it was there before; a compiled step removes the calls; narrow weights save
#    bytes if they are cast inside the loop; W8A8 makes the arithmetic itself cheaper, and is lossy.
# 4. Whether speculation pays depends on c, v, the conditional acceptance and the draft's prefill. Measure them first.
#    An n-gram drafter has a small c and no prefill.
# 5. What is made faster may stop being the largest part, so look again after each step. A floor, computed from the best
#    rates that were measured, shows where looking further may pay.
#
# **Next:** lesson 16 divides one model over several processes, and sends requests to several copies of it.
