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
# **Question.** *Somebody types code and stops for a moment. Can the next 24 tokens be there in a tenth of a second, on one
# core of a CPU?*
#
# A tenth of a second is about what a person takes for "at once". A source of this course promises "sub-100 ms inference"
# and does not say of what. So say it first: **24 new tokens after a prompt of 200, one request, greedy, one thread; from the
# call with text to the text in hand.** *Cold*: the engine has never seen this prompt. *Warm*: it has just seen it, as
# when an editor asks again in the same file. Everything counts: tokens from text, waiting, the prompt, the new tokens,
# Python, text from tokens.
#
# You start with plain PyTorch and go round one loop six times: **predict** where the time goes, **measure** it, find
# the largest part, do something about it, measure again. Most of the lessons before this one come back as one bar of a
# picture. One thing will not help at all, and one will help less than you think.
#
# The first run compiles two functions for your processor, ten to twenty seconds each (more on a busy machine). They are
# kept on disk; the next run finds them.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.bench.prompts import held_out_prompts
from minillm.teaching import check, hint, predict, reveal, use
from minillm.viz.latency_waterfall import Latency, LatencyWaterfall

name = os.environ.get("MINILLM_MODEL", "minicoder")  # any Llama, Mistral, Qwen or SmolLM checkpoint works too
draft_name = os.environ.get("MINILLM_DRAFT", "minicoder-draft")
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # one thread for everybody: PyTorch and the compiled step

PROMPT_TOKENS, NEW_TOKENS = 200, 24
options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 4}
plain = LLM(name, enforce_eager=True, **options)  # one PyTorch operation after the other
tokenizer = plain.engine.tokenizer
long_enough = [p for p in held_out_prompts() if len(tokenizer.encode(p.prompt)) >= PROMPT_TOKENS]
prompt, *others = [tokenizer.decode(tokenizer.encode(p.prompt)[:PROMPT_TOKENS]) for p in long_enough[:6]]
params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
[output] = plain.generate(prompt, params, use_tqdm=False)
expected = output.outputs[0].token_ids
print(f"prompt: {len(output.prompt_token_ids)} tokens of {long_enough[0].source}; it ends with")
print("\n".join(prompt.splitlines()[-4:]) + "⟨" + output.outputs[0].text + "⟩")

# %% [markdown]
# ## Predict
#
# 1. Plain PyTorch, cold. 200 tokens go through the model together, then 23 times one token. What share of the time is the
#    *prompt*, in percent?
# 2. How many PyTorch operations does one decode step call? (8 layers; each has norms, four matrices, RoPE, attention.)
# 3. When you are done, how many times faster is the cold completion?

# %%
predict("l15.prompt_share", None, unit="percent")
predict("l15.calls", None, unit="operations")
predict("l15.faster", None, unit="times")

# %% [markdown]
# ## Build and see
#
# ### Exercise 1: where does the time go?
#
# The engine tells what it does, event by event. `record` looks at the clock at each of them and gives you *marks*:
#
# `(0.0, "Start"), (0.8, "RequestAdded"), (0.9, "StepStarted"), (58.3, "StepRan prefill"), (58.4, "Committing"), …`
#
# Turn them into parts. There is one rule that makes such a table trustworthy: **the parts sum to the whole.** A profile
# with a hole in it sends you to the wrong place.
#
# | the mark | what the time before it was used for |
# |---|---|
# | `RequestAdded` | tokenise: text became tokens |
# | `StepStarted` | queue: waiting for a step |
# | `StepRan prefill` | prefill: the prompt, or a chunk of it |
# | `DraftProposed` | draft |
# | `StepRan decode`, `StepRan verify` | target |
# | `Detokenised` | detokenise: a token became text |
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
    """Seconds of each part: tokenise, queue, prefill, draft, target, python, detokenise; 0.0 for one that is not there.

    marks: (seconds, what had just happened), in order of time

    Example: [(0.0, "Start"), (2.0, "RequestAdded"), (2.5, "BlocksAllocated")] is 2.0 of tokenise and 0.5 of python.
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
# Stuck? `hint("l15.attribute", 1)`, then 2, then 3: each says more.
#
# Now look. The clock is the CPU time of this thread, so that whatever else runs on your machine does not count; on an
# idle machine it is the time on the wall. Each way runs in turn with what it is compared with, five times after a
# warm-up, and the run with the median total is drawn.

# %% tags=["expected", "nbval-ignore-output"] alt="One bar, far over the line at 100 ms: the prompt is about a third, the target's 23 decode steps nearly all of the rest; tokenising, queue and detokenising cannot be seen."
import time

from minillm.teaching.exercises.l15_under_100_ms import record

clock = time.thread_time if os.name == "posix" else time.perf_counter
my_attribute = use("l15.attribute")


def race(engines: dict[str, LLM], warm: tuple[str, ...] = (), rounds: int = 5) -> dict[str, dict[str, float]]:
    """The parts of the median run of each engine, in turn; those in `warm` have just completed the same prompt."""
    runs = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, llm in engines.items():
            llm.reset_prefix_cache()
            if name in warm:
                llm.generate(prompt, params, use_tqdm=False)
            marks, output = record(llm, prompt, params, clock)
            assert (output.num_cached_tokens > 0) == (name in warm) and len(output.outputs[0].token_ids) == NEW_TOKENS
            parts = my_attribute(marks)
            assert abs(sum(parts.values()) - (marks[-1][0] - marks[0][0])) < 1e-9  # nothing is missing
            if turn:
                runs[name].append(parts)
    return {name: sorted(each, key=lambda parts: sum(parts.values()))[rounds // 2] for name, each in runs.items()}


rows = [Latency("plain PyTorch", race({"plain": plain})["plain"])]
reveal("l15.prompt_share", round(100 * rows[0].seconds["prefill"] / rows[0].total))
LatencyWaterfall("24 tokens after 200: the start", rows)

# %% [markdown]
# Far over the line, and the picture says at once what is *not* worth a thought: turning text into tokens and back, and
# the queue. (With one request there is nobody to wait for.) Two parts count, the prompt and the new tokens. They are
# short of different things, as lesson 3 found. How short?
#
# ### Profile
#
# PyTorch has a profiler. One decode step:

# %% tags=["nbval-ignore-output"]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is talkative
from torch.profiler import ProfilerActivity, profile

from minillm.models.runner import Segment

ids = tokenizer.encode(prompt)
tables = list(range(14))


def decode_step(llm: LLM, width: int = 1):
    """One forward over the last `width` tokens of the prompt, the others being in the cache already."""
    segment = Segment(ids[-width:], len(ids) - width, tables, num_logits=width)
    return lambda: llm.engine.runner.run([segment])


def profiled(step):
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return found


found = profiled(decode_step(plain))
plain.reset_prefix_cache()  # the forwards above wrote where the engine keeps the prompts it has seen
print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=36))

# %%
from collections import Counter


def operations_called(found) -> Counter:
    """How often each PyTorch operation was called from Python; those that operations call themselves do not count."""
    return Counter(e.name for e in found.events() if e.name.startswith("aten::") and e.cpu_parent is None)


called = operations_called(found)
matrices = called["aten::matmul"] + called["aten::mm"] + called["aten::linear"]
print(f"{called.total()} operations in one step; {matrices} of them are products with a weight")
reveal("l15.calls", called.total())

# %% [markdown]
# Five hundred operations for one token, and one in seventeen is a product with a weight. The others shape, add, copy, look up.
# Two costs hide here, and they need different cures: *bytes* (the weights are read once for every token) and *calls* (each
# operation takes a microsecond or more before it does anything).
#
# ### Exercise 2: what must a step take?
#
# Put both into one formula, with what you know from lesson 3.


# %%
def step_seconds(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    """Seconds that a step takes at least.

    bandwidth: bytes per second; rate: operations per second. Moving and computing overlap. A call does not: the thread
    that makes it is the thread that does the work.

    Example: 60 bytes at 20 a second, 10 operations at 10 a second and 4 calls of half a second: 3 + 2 = 5.
    """
    ### BEGIN SOLUTION
    return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)
    ### END SOLUTION


# %%
check("l15.step_seconds")

# %% [markdown]
# Count the bytes and the operations of a step, for every kind of weights that you will meet:

# %%
config = plain.engine.runner.model.config
model = plain.engine.runner.model
in_layers = sum(p.numel() for layer in model.layers for p in layer.parameters() if p.ndim == 2)
in_head = model.lm_head.weight.numel()
BYTES = {  # bytes of a weight in the layers, and in the unembedding
    "float32 (plain PyTorch)": (4, 4),
    "16 bits, as in the checkpoint": (2, 2),
    "W8A8": (1, 1),
}
weight_bytes = {kind: a * in_layers + b * in_head for kind, (a, b) in BYTES.items()}
cache_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * PROMPT_TOKENS


def operations(rows: int, pairs: int) -> int:
    """`rows` through the layers, `pairs` of a query and a key it sees, one row of logits (lesson 3)."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * in_layers * rows + attention + 2 * in_head


decode_work = operations(1, PROMPT_TOKENS)
prefill_work = operations(PROMPT_TOKENS, PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2)
for kind, size in weight_bytes.items():
    print(f"{kind:32} {(size + cache_bytes) / 1e6:6.1f} million bytes per token")
print(f"one token: {decode_work / 1e6:,.0f} million operations; the prompt: {prefill_work / 1e6:,.0f} million")

# %% tags=["nbval-ignore-output"]
import statistics

from minillm.ceilings import copy_bandwidth, matmul_rate

my_step = use("l15.step_seconds")


def seconds_of(run, repeats: int = 20, rounds: int = 7) -> float:
    """Seconds of one run, the median of several rounds."""
    run()
    taken = []
    for _ in range(rounds):
        began = clock()
        for _ in range(repeats):
            run()
        taken.append((clock() - began) / repeats)
    return statistics.median(taken)


bandwidth = copy_bandwidth("cpu", repeats=5, num_bytes=2**26).median
rate = matmul_rate("cpu", torch.float32, repeats=5).median
small = torch.zeros(8)
per_call = seconds_of(lambda: torch.add(small, small), repeats=2000)
print(
    f"{bandwidth / 1e9:.0f} GB/s, {rate / 1e9:.0f} G operations/s, {1e6 * per_call:.1f} µs for an operation on 8 numbers"
)

moved = weight_bytes["float32 (plain PyTorch)"] + cache_bytes
one_token = my_step(moved, decode_work, called.total(), bandwidth, rate, per_call)
whole_prompt = my_step(moved, prefill_work, called.total(), bandwidth, rate, per_call)
measured = {"one token": rows[0].seconds["target"] / (NEW_TOKENS - 1), "the prompt": rows[0].seconds["prefill"]}
print("                     modelled   measured   of it calls, bytes, arithmetic (modelled, ms)")
for label, model_says, work in (
    ("one token", one_token, decode_work),
    ("the prompt", whole_prompt, prefill_work),
):
    split = [1000 * x for x in (called.total() * per_call, moved / bandwidth, work / rate)]
    print(
        f"{label:20} {1000 * model_says:6.1f} ms {1000 * measured[label]:7.1f} ms   "
        + ", ".join(f"{x:.2f}" for x in split)
    )

# %% [markdown]
# So for a token, calls and bytes both matter; arithmetic does not. For the prompt, arithmetic is nearly everything. What is
# measured but not in the model is the price of doing it with a general library: a product with one row does not reach
# the bandwidth of a long copy, and Python between two calls is not free either.
#
# ### Step 1: do not compute what you have computed
#
# **Predict**: the prompt was there a moment ago, and its keys and values are still in the pool (lesson 6). How much of
# each part is left?

# %% tags=["nbval-ignore-output"]
seconds = race({"cold": plain, "warm": plain}, warm=("warm",))
warm_rows = [Latency("plain PyTorch", seconds["cold"]), Latency("warm: prefix cache", seconds["warm"], "plain PyTorch")]
LatencyWaterfall("Step 1: the prompt was there before", warm_rows)

# %%
marks, output = record(plain, prompt, params)
kinds = Counter(what for _, what in marks if what.startswith("StepRan"))
print(f"{output.num_cached_tokens} of {len(ids)} prompt tokens were found; forwards: {dict(kinds)}")

# %% [markdown]
# The blue part nearly vanishes. (Not quite: the last tokens of a prompt always go through the model, because somebody must
# make the logits of the first new token; and only whole blocks of 16 are found.) Nothing else changes. This is the
# cheapest step of all *where it applies*, and it does not apply to a prompt that is new. From here on everything is
# measured **cold**.
#
# ### Step 2: INT8 weights
#
# A quarter of the bytes (lesson 5), and bytes are most of a token. **Predict** what INT8 weights do to the green part of
# plain PyTorch.

# %% tags=["nbval-ignore-output"]
eager_int8 = LLM(name, enforce_eager=True, quantization="int8", **options)
seconds = race({"plain": plain, "int8": eager_int8})
rows = [Latency("plain PyTorch", seconds["plain"])]
int8_row = Latency("INT8 weights, eager", seconds["int8"], "plain PyTorch")
found = profiled(decode_step(eager_int8))
print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=4, max_name_column_width=36))
eager_int8.reset_prefix_cache()
LatencyWaterfall("Step 2: a quarter of the bytes, in plain PyTorch", [*rows, int8_row])

# %%
called_int8 = operations_called(found)
print(f"operations in one step: {called.total()} in float32, {called_int8.total()} with INT8 weights")
traffic = {
    "float32: 4 bytes read by the product": 4,
    "INT8: 1 read and 4 written to make floats, 4 + 4 to scale them, 4 read by the product": 1 + 4 + 4 + 4 + 4,
}
for label, size in traffic.items():
    print(f"{label}: {size} a weight, {size * in_layers / 1e6:.0f} million for the layers")
del eager_int8

# %% [markdown]
# **It loses.** Plain PyTorch has no product of INT8 weights with float32 activations. So the weights are made floats
# first, in operations of their own: a byte is read, four are written; they are read, multiplied by their scale and written;
# and the product reads them. Four times the bytes of before (much of it in caches, or it would be worse), and more calls. The smaller checkpoint is real; the faster step is not. *Bytes are saved only where the
# conversion happens inside the loop that multiplies.* PyTorch does not let you into that loop. So write the loop.
#
# ### Exercise 3: a product of one's own
#
# numba compiles a Python function to machine code. Two things decide whether that is fast: how many numbers an
# instruction handles, and in which order memory is read. `minillm.ops.cpu` settles both with a layout. A **panel** is
# sixteen rows of W with their columns interleaved:

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
# Sixteen numbers that lie together are one weight each of sixteen *outputs*. They are all multiplied by the same number of x.
# So one load brings sixteen weights, one multiply-add serves sixteen sums, nothing is ever added up across a vector, and
# memory is read from the first byte to the last. Four words are enough to say it, and each is one instruction where the
# processor has AVX-512:
#
# | word | what it does |
# |---|---|
# | `load(array, at)` | the sixteen numbers from `array[at]` on |
# | `splat(number)` | sixteen times the same number |
# | `fma(a, b, sums)` | `a · b + sums`, lane by lane |
# | `store(array, at, vector)` | write sixteen numbers from `array[at]` on |
#
# Compiled code does not check where an array ends. The exercise's check puts your arrays between guards.

# %%
from numba import njit

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.simd import LANES, fma, load, splat, store

ZERO = np.float32(0)


@njit(**OPTIONS)
def panel_product(panels, x, y):
    """y = W x, written to y.

    panels: W as `pack` lays it, flat: column k of panel p begins at (p * columns + k) * LANES
    x: [columns]; y: [number of outputs, padded to a multiple of LANES], holds anything before; all float32
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
# **Inside the engine.** Every linear layer of the plain model now runs on your function when it gets a single row; prompts go
# the old way. Same prompt, same tokens?


# %%
class PanelLinear(torch.nn.Module):
    """A linear layer on a compiled panel product, for one row."""

    def __init__(self, linear: torch.nn.Linear, kernel) -> None:
        super().__init__()
        self.linear, self.kernel = linear, kernel
        self.panels = pack(linear.weight.detach().numpy())
        self.y = np.empty(-(-linear.out_features // LANES) * LANES, np.float32)
        self.calls = 0

    def forward(self, x):
        if len(x) > 1:
            return self.linear(x)
        self.calls += 1
        self.kernel(self.panels, x[0].numpy(), self.y)
        return torch.from_numpy(self.y[: self.linear.out_features].copy())[None]


mine = use("l15.panel_product")
kernel = mine if hasattr(mine, "py_func") else njit(**OPTIONS)(mine)
with_kernel = LLM(name, enforce_eager=True, **options)
own_model = with_kernel.engine.runner.model
replaced = [n for n, m in own_model.layers.named_modules() if isinstance(m, torch.nn.Linear) and m.bias is None]
for layer in replaced:
    own_model.layers.set_submodule(layer, PanelLinear(model.layers.get_submodule(layer), kernel))  # plain's own weights
tokens = with_kernel.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
calls = sum(m.calls for m in own_model.modules() if isinstance(m, PanelLinear))
print(f"{len(replaced)} layers run on your kernel, {calls} calls; same {NEW_TOKENS} tokens: {tokens == expected}")

# %% tags=["nbval-ignore-output"]
seconds = race({"plain": plain, "own": with_kernel})
own_row = Latency("own product, eager", seconds["own"], "plain PyTorch")
del with_kernel, own_model
LatencyWaterfall("One's own product inside plain PyTorch", [Latency("plain PyTorch", seconds["plain"]), own_row])

# %% [markdown]
# Whatever you see there, a little faster or a little slower, it is no breakthrough. The product was replaced, and five hundred calls are still
# there, and so are the four bytes per weight. To see what a call costs, take a product so small that it costs nothing,
# and make it three ways: as a PyTorch operation, as a call of your function from Python, and as a call of your function *from a
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
    "your function, called from compiled code": seconds_of(lambda: many_times(*own, 2000), 1) / 2000,
}
for label, taken in times.items():
    print(f"{label:42} {1e6 * taken:6.2f} µs a product of 64 × 64")

# %% [markdown]
# *That* is what is to be won: not a better product, but **no call between the products**. A step must be one function.
#
# ### Step 3: the compiled step
#
# `minillm/ops/cpu/` is that function: all layers of the decoder in one call, some two thousand lines with their comments, no C
# compiler. You have written its innermost loop. What it adds:
#
# * **Tiles.** Your loop has one sum in flight, and every multiply-add waits for the one before it. The real one keeps a
#   *tile* of up to 6 rows × 4 panels, 24 sums, in the processor's 32 vector registers (`simd.tile`). With one row, four panels
#   hide the wait. With six rows, each weight that is loaded is used six times: this is how a prompt becomes bound by
#   arithmetic and not by loads. Every sum still runs over k in order, so a token's numbers do not depend on who else
#   is in the batch, to the last bit.
# * **Narrow weights.** minicoder's checkpoint holds 16-bit floats. `load` widens them in the register, so memory moves half
#   the bytes and no bit of the result changes. (What step 2 could not have: the conversion inside the loop.)
# * **Everything between the products** (norms, RoPE, SiLU, attention that walks the block table) on the same vectors,
#   without a call.
# * **Barriers.** With several threads, each does its share of the outputs, and at some sixty points a step all must have
#   finished before any may go on. Starting a parallel loop at each would cost 2 µs a time; `team.py` starts the threads
#   once and lets them meet at a counter, for a tenth of that. (This lesson has one thread, which meets nobody.)
#
# In the engine it is the default; `enforce_eager=True` switched it off. **Predict** the green part: how often do
# half the bytes and one call for five hundred make it smaller?

# %% tags=["nbval-ignore-output"]
began = time.perf_counter()
compiled = LLM(name, **options)
print(f"ready after {time.perf_counter() - began:.1f} s (compiled once, then fetched from disk)")
seconds = race({"plain": plain, "compiled": compiled})
rows = [Latency("plain PyTorch", seconds["plain"]), Latency("compiled step", seconds["compiled"], "plain PyTorch")]
LatencyWaterfall("Step 3: one call instead of five hundred", rows)

# %%
executor = compiled.engine.runner.executor
tokens = compiled.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
if executor is not None:
    found = profiled(decode_step(compiled))
    compiled.reset_prefix_cache()
    read = executor.weights.nbytes + executor.head.nbytes
    print(f"PyTorch operations in one step: {operations_called(found).total()} (of {called.total()})")
    print(
        f"weights read: {read / 1e6:.1f} million bytes, in {executor.weights.dtype} holding the bits of 16-bit floats"
    )
print(f"same {NEW_TOKENS} tokens as plain PyTorch: {tokens == expected}")

# %% [markdown]
# The same tokens, exactly, and the green part is a third or a quarter of what it was. Now the *prompt* is the largest
# part, and it has not gained like that. It never was short of calls or bytes: 200 rows share them. It is short of
# arithmetic, and there PyTorch's own library was good already. **No engineering of calls or bytes
# will make the blue part much smaller. Only other arithmetic will.**
#
# > A true story of this part. For a while the blue bar was *twice* as long as it should be, in some runs and not in others, and
# > busy neighbours got the blame. Then the same product was timed in a process that had just compiled the step and in one
# > that had fetched it from disk: 57 and 140 ms for 512 tokens. In the second, LLVM had unrolled the loop over k and needed
# > more registers than there are, so it kept the 24 sums in memory, and wrote and read them in every round. One line tells
# > it not to unroll (`simd.py`, `_as_it_is`). A time that varies without a cause has one. Look at the machine code.
#
# ### Step 4: W8A8
#
# Round the activations to INT8 as well (lesson 5), and the products become products of *bytes*. An instruction with
# 16 float lanes has 64 byte lanes (VNNI; without it the step still runs, without this gain). A quarter of the bytes per
# weight compared with plain PyTorch, and four times the products per instruction. The price: it is lossy. (The logits are
# made of INT8 weights, too, but their inputs are rounded to two bytes each, which costs next to nothing in quality. So are
# the inputs of all products with `quantization="int8"`.)

# %% tags=["nbval-ignore-output"]
began = time.perf_counter()
w8a8 = LLM(name, quantization="w8a8", **options)
print(f"ready after {time.perf_counter() - began:.1f} s")
seconds = race({"plain": plain, "compiled": compiled, "w8a8": w8a8})
rows = [
    Latency("plain PyTorch", seconds["plain"]),
    Latency("compiled step", seconds["compiled"], "plain PyTorch"),
    Latency("W8A8", seconds["w8a8"], "compiled step"),
]
LatencyWaterfall("Step 4: products of bytes", rows)

# %%
same, first = 0, []
for text in [prompt, *others]:
    a, b = (llm.generate(text, params, use_tqdm=False)[0].outputs[0].token_ids for llm in (compiled, w8a8))
    first.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), NEW_TOKENS))
    same += a == b
if w8a8.engine.runner.executor is not None:
    read = w8a8.engine.runner.executor.weights.nbytes + w8a8.engine.runner.executor.head.nbytes
    print(f"weights read: {read / 1e6:.1f} million bytes")
print(f"{same} of {len(first)} completions have the same {NEW_TOKENS} tokens as float32")
print(f"tokens before the first that differs: {first}")

# %% [markdown]
# Both bars shrink: the prompt because there is less to compute, the tokens because there is less to read. Look what has
# become visible: **Python**. In plain PyTorch it was a sliver. It has not grown; everything around it has shrunk. (Amdahl
# 1967 in one picture: what you do not make faster is what is left.)
#
# ### Step 5: a draft model on top
#
# Speculation (lesson 10) makes the number of steps smaller: a round of γ guesses gains several tokens. It has saved time in
# every blog post you have read. **Predict**: does it here?
#
# Measure before you switch it on. Three numbers decide: how often a guess is right, what a guess costs, and what it
# costs to judge several tokens in one step instead of one.
#
# ### Exercise 4: which γ?


# %%
def choose_gamma(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    """The number of drafts per round that makes decoding fastest; 0 means: do not draft at all.

    acceptance:   chance that a draft is right if all before it in its round were
    draft_cost:   seconds of one draft / seconds of one plain step
    verify_costs: verify_costs[g] = seconds of a step that judges g drafts / seconds of a plain step; the first is 1.0

    Example: choose_gamma(0.9, 1.0, [1.0, 1.0, 1.0]) is 0: drafts as dear as the target are never worth it.
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
# How often is a guess right? Five other prompts, four guesses a round, so that the choice is not made on what it will be
# measured on:

# %%
from minillm.trace import TokensCommitted

speculative = {"method": "draft_model", "model": draft_name, "num_speculative_tokens": 4}
drafting = LLM(name, speculative_config=speculative, **options)
with drafting.trace() as trace:
    drafting.generate(others, params, use_tqdm=False)
judged = [event for event in trace.of(TokensCommitted) if event.num_drafts]
accepted = sum(event.num_accepted for event in judged)
rejected = sum(event.num_accepted < event.num_drafts for event in judged)
acceptance = accepted / (accepted + rejected)
print(f"{len(judged)} rounds: {accepted} guesses accepted, {rejected} rejected, so {acceptance:.2f} of those judged")
del drafting, trace

# %% tags=["nbval-ignore-output"]
from functools import partial

my_gamma = use("l15.choose_gamma")
draft_alone = LLM(draft_name, **options)
plan = {}
for label, llm in (("compiled step", compiled), ("W8A8", w8a8)):
    parts = next(row for row in rows if row.name == label).seconds
    between = (
        parts["python"] + parts["queue"] + parts["detokenise"]
    ) / NEW_TOKENS  # what a step costs beside the model
    for each in (llm, draft_alone):
        each.engine.runner.run([Segment(ids, 0, tables)])
    forwards = [seconds_of(decode_step(llm, width), 10) for width in range(1, 8)]
    segment = Segment(ids[-1:], len(ids) - 1, tables)
    guess = seconds_of(partial(draft_alone.engine.runner.draft, [segment], 4), 10) / 4
    llm.reset_prefix_cache()
    one = forwards[0] + between
    c, v = guess / one, [(seconds + between) / one for seconds in forwards]
    plan[label] = my_gamma(acceptance, c, v)
    tokens_at_4 = sum(acceptance**i for i in range(5))
    print(
        f"{label:14} plain step {1000 * one:.2f} ms, c = {c:.2f}, v for 1 to 6 drafts: "
        + ", ".join(f"{x:.2f}" for x in v[1:])
    )
    print(
        f"{'':14} 4 drafts would gain {tokens_at_4:.2f} tokens for {4 * c + v[4]:.2f} steps: "
        f"{tokens_at_4 / (4 * c + v[4]):.2f}×; best: {plan[label]} drafts"
    )
del draft_alone

# %% [markdown]
# Now run it, with your γ (at least 1, to see what it does), on both kinds of weights. Each is compared with itself
# without drafts.

# %% tags=["nbval-ignore-output"]
contest = {"compiled step": compiled, "W8A8": w8a8}
for label, quantization in (("compiled step", None), ("W8A8", "w8a8")):
    config_of_draft = {**speculative, "num_speculative_tokens": max(1, plan[label])}
    contest[f"{label} + draft"] = LLM(name, quantization=quantization, speculative_config=config_of_draft, **options)
seconds = race(contest, rounds=7)
draft_rows = [
    Latency(label, seconds[label], label.removesuffix(" + draft") if "draft" in label else None)
    for label in ("compiled step", "compiled step + draft", "W8A8", "W8A8 + draft")
]
LatencyWaterfall("Step 5: a draft model on top", draft_rows)

# %%
exact = {}
for label in ("compiled step", "W8A8"):
    a, b = (
        contest[each].generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for each in (label, f"{label} + draft")
    )
    exact[label] = a == b
print("tokens with drafts are those without:", exact)

# %% [markdown]
# **It pays a little, or nothing**, far from the 2 to 2.8× that such articles promise. Three reasons:
#
# * Only the green part can shrink, and it is no longer most of the time. The blue part stays, whatever the drafts do.
# * The draft reads the prompt, too: 200 tokens through a second model, which is most of the orange part. With 24 new
#   tokens there is not much to spread that over, and the formula has no place for it. Warm, or with a longer completion, it
#   would pay more.
# * The faster the target, the smaller what a saved step is worth, while a draft costs what it always did: c grew when the
#   target shrank. And where bytes are not what is short, judging several tokens is not free: v is above 1.
#
# And this completion even flatters the draft, because it repeats itself ("the file is a file"). That is why the
# acceptance above was counted on other prompts.
#
# Speculation is at its best with a target that is slow per step and short of bytes, and a draft that is cheap beside it:
# a model a hundred times this size. Here a draft model is the smallest step of all; with more drafts than your function
# chose it is smaller still, and behind plain W8A8 if the text is less predictable than this.
#
# ### Step 6: guesses that cost nothing
#
# The reasons name the cure: a drafter that has no prompt to read and no c. Code repeats itself, so look for the last few
# tokens earlier in the text, and guess that what followed them then follows now (`"method": "ngram"`). That is a search of
# some microseconds. **Predict**: asked for c = 0, would your function draft more tokens than before, or fewer?

# %% tags=["nbval-ignore-output"]
lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 4}
contest["W8A8 + n-gram"] = LLM(name, quantization="w8a8", speculative_config=lookup, **options)
del contest["compiled step + draft"]
print(f"W8A8, best number of drafts at c = {c:.2f}: {plan['W8A8']}, at c = 0: {my_gamma(acceptance, 0.0, v)}")
seconds = race(contest, rounds=7)
looked_up = [
    Latency(label, seconds[label], None if label == "W8A8" else "W8A8") for label in contest if "W8A8" in label
]
LatencyWaterfall("Step 6: guesses looked up in the text", looked_up)

# %%
a, b = (contest[each].generate(prompt, params, use_tqdm=False)[0].outputs[0] for each in ("W8A8", "W8A8 + n-gram"))
print("tokens with n-grams are those without:", a.token_ids == b.token_ids)

# %% [markdown]
# The orange part is nearly gone, and the green one is longer than with the draft model: there are fewer guesses, and they are
# right less often. Where the text is new there is none, the step is a plain one, and nothing is lost. What a wrong guess
# costs is v: it has been judged. So this lives on repetition, and of that this completion has plenty. On text that never
# repeats itself it gives nothing, where a draft model goes on guessing.
#
# ## Measure
#
# All of it in turn, cold, and one warm run of plain W8A8.

# %% tags=["expected", "nbval-ignore-output"] alt="A bar for each way, cold: plain PyTorch and INT8 weights far over 100 ms, INT8 the longest; the compiled step well below plain; W8A8 well under the line; with a draft or with n-grams a little shorter; warm the shortest, nearly without a prompt."
everyone = {"plain PyTorch": plain, **contest, "W8A8, warm": w8a8}
seconds = race(everyone, warm=("W8A8, warm",), rounds=7)
before = {"compiled step": "plain PyTorch", "W8A8": "compiled step"}
before |= dict.fromkeys(("W8A8 + draft", "W8A8 + n-gram", "W8A8, warm"), "W8A8")
rows = [
    Latency("plain PyTorch", seconds["plain PyTorch"]),
    int8_row,
    *(Latency(label, seconds[label], before[label]) for label in before),
]
final = min((row for row in rows if row.name != "W8A8, warm"), key=lambda row: row.total)
reveal("l15.faster", round(rows[0].total / final.total, 1))
on_the_wall = []
for _ in range(5):
    w8a8.reset_prefix_cache()
    began = time.perf_counter()
    w8a8.generate(prompt, params, use_tqdm=False)
    on_the_wall.append(1000 * (time.perf_counter() - began))
print(f"W8A8, cold, on the wall clock: from {min(on_the_wall):.0f} to {max(on_the_wall):.0f} ms in five runs")
LatencyWaterfall("24 tokens after 200, one core: every step", rows)

# %% [markdown]
# **How far is the floor?** What must happen at least, by your own function with no calls at all: the operations of the prompt
# at the measured rate, and the bytes of 23 tokens at the measured bandwidth. For W8A8 the rate is *modelled*, four
# times that of float32.

# %% tags=["nbval-ignore-output"]
kinds = {
    "compiled step": ("16 bits, as in the checkpoint", rate),
    "W8A8": ("W8A8", 4 * rate),
}
print("                 floor: prompt + 23 tokens      measured: prompt + target      the rest    floor / measured")
for label, (kind, this_rate) in kinds.items():
    size = weight_bytes[kind] + cache_bytes
    floor = [
        my_step(size, prefill_work, 0, bandwidth, this_rate, 0.0),
        (NEW_TOKENS - 1) * my_step(size, decode_work, 0, bandwidth, this_rate, 0.0),
    ]
    row = next(row for row in rows if row.name == label)
    real = [row.seconds["prefill"], row.seconds["target"]]
    print(
        f"{label:16} {1000 * floor[0]:8.1f} + {1000 * floor[1]:4.1f} ms {1000 * real[0]:20.1f} + {1000 * real[1]:4.1f} ms "
        f"{1000 * (row.total - sum(real)):15.1f} ms {sum(floor) / row.total:17.0%}"
    )

# %% [markdown]
# How to read it. Half of the time and more is now what the machine asks for at least. What is not: attention, norms and some
# sixty places where one thing must be done before the next, which no count of bytes knows; and "the rest", which is Python, a
# floor of its own. (If a measured time is *below* its floor, it is as in lesson 3: the weights of so small a model may fit
# into the processor's last cache, which is faster than the memory that the bandwidth was measured in.)
#
# What would you do next? The picture says: Python per step, then attention, and for the prompt nothing but fewer or
# cheaper operations. Two threads would help the green and blue parts and not the yellow one.
#
# ## Break it
#
# A number under 100 ms is easy to get: measure it wrong. Here are four ways, each with what they found in the wild: the
# benchmark forgets to empty the prefix cache; it counts tokens that never came; it starts the clock after the prompt; it
# leaves the text out. **Guess** which of three checks catches which: no prompt token was cached; 24 tokens came;
# the parts from `Start` to `End` include prefill and detokenise.


# %%
def checks(llm: LLM, these: SamplingParams, forget: bool = True, late: bool = False) -> str:
    """What the three checks say of one way of measuring."""
    if forget:
        llm.reset_prefix_cache()
    marks, output = record(llm, prompt, these)
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
print("right                      ", checks(w8a8, params))
print("prefix cache not emptied   ", checks(w8a8, params, forget=False))
print("stops at the end of a line ", checks(w8a8, stops))
print("clock starts after prefill ", checks(w8a8, params, late=True))
print("no text                    ", checks(w8a8, silent))

# %% [markdown]
# Each is caught by one check and passes the other two. (Stopping at the end of a line is not wrong, it is another
# product; a benchmark that calls it 24 tokens is.) None of the four would be seen in the generated text.
#
# ## In the field
#
# | where | what |
# |---|---|
# | llama.cpp | the strongest peer for one request on a CPU: one compiled graph, weights repacked for the processor, `Q8_0` is W8A8 in blocks of 32; `minillm bench latency` and `decode` compare |
# | vLLM | the same cure on a GPU: CUDA graphs replace hundreds of launches by one; `enforce_eager=True` switches them off, hence the name |
# | gpt-fast | `torch.compile(mode="reduce-overhead")`: fewer calls by generating fused code |
# | oneDNN, OpenBLAS, BLIS | panels ("packing") and register tiles: Goto and van de Geijn 2008 is where they come from |
# | ONNX Runtime, OpenVINO | whole graphs compiled for a CPU, W8A8 with VNNI |
# | editors | keep the prefix cache of the open file, cancel what is no longer wanted, stop at the end of the line: often worth more than all of the above |
#
# **Papers.** Goto and van de Geijn 2008, *Anatomy of High-Performance Matrix Multiplication*. Williams, Waterman and
# Patterson 2009, *Roofline*. Dettmers et al. 2022, *LLM.int8()*. Leviathan et al. 2023, *Fast Inference from Transformers
# via Speculative Decoding*. Saxena 2023, *Prompt Lookup Decoding*. Amdahl 1967, *Validity of the Single Processor Approach*.
# Miller 1968, *Response Time in Man-Computer Conversational Transactions* (where the tenth of a second comes from).
#
# **Claims, and what is so.**
#
# | claim | what is so | tested where |
# |---|---|---|
# | sub-100 ms inference | says nothing without tokens, prompt, cold or warm, and machine; here all four are said | the whole lesson |
# | INT8 weights make inference faster | only where they are converted inside the product; in eager PyTorch on a CPU they make it slower | Step 2 |
# | speculation gives 2 to 2.8× | it depends on c, v, acceptance and the draft's own prefill; here it gave little or nothing for the whole completion | Steps 5 and 6 |
# | kernels are what is slow in Python | a faster product inside 500 calls changed little; fewer calls changed a lot | Step 3 |
#
# ## Recap
#
# 1. Say what is measured: prompt, new tokens, cold or warm, machine. Parts that sum to the whole, or no profile.
# 2. Each part is short of something else: the prompt of arithmetic, a token of bytes, a small model of calls.
# 3. A prefix cache removes the prompt, where it was there before; a compiled step removes the calls; narrow weights the
#    bytes, if they are widened inside the loop; W8A8 makes the arithmetic itself cheaper, and is lossy.
# 4. Speculation has a price list (c, v, acceptance, the draft's prefill). Read it before buying; a guess that is looked up
#    has no c and no prefill.
# 5. After each step something else is largest. Stop when the floor is near, not when the number is pretty.
#
# **Next:** lesson 16 leaves the one machine.
