# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 16. Beyond one machine
#
# **Question.** *A model is too large for one machine, or too slow on it. How do two machines compute one layer, what do
# they have to tell each other, and when is a second copy of the model better?*
#
# There are two ways to use more machines.
#
# * **Split the model** ([tensor parallelism](glossary.md#tensor-parallelism)). Every machine holds a part of every
#   layer. All of them work on the same token, and exchange numbers in every layer.
# * **Copy the model** ([replicas](glossary.md#replica)). Every machine holds all of it and serves other requests. They
#   exchange nothing.
#
# You split the products of a layer by hand, assign the heads, compute what the exchange costs, and write the rule that
# decides which replica gets a request. The engine splits itself with `LLM(..., tensor_parallel_size=2)`, the option of
# vLLM: it starts a second process, and both exchange their numbers through `torch.distributed`.
#
# You need lesson 1 (attention and the layer), lesson 3 (bytes and the roofline) and lesson 6 (the prefix cache).
# Everything runs on a CPU, under Linux, WSL, macOS or on Colab; a process stands for a machine. (The processes exchange
# their numbers through gloo, a library in PyTorch that some of its versions for Windows cannot use. There
# `tensor_parallel_size=2` raises `UnsupportedError`, and Run All stops: run this lesson in WSL or on Colab.) The text says
# two processes; for a model that two cannot share, the first cell prints how many there are.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.models.hub import resolve
from minillm.parallel.split import possible_sizes
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop import l16_replicas as replicas
from minillm.teaching.workshop.l12_costs import H100, LLAMA_8B
from minillm.teaching.workshop.l16_cluster import Cluster, Link, one_shot_seconds
from minillm.teaching.workshop.l16_wire import free_processors, latency_and_bandwidth, measured_seconds
from minillm.trace import StepFinished, Trace
from minillm.viz import CachePagesView, LiveView, SplitLayer, TimelineView, show
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # one processor for each process

PLAIN = {"device": "cpu", "enforce_eager": True, "num_kv_blocks": 96, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
llm = LLM(NAME, **PLAIN)
model = llm.engine.runner.model
config = model.config
SIZE = next(size for size in possible_sizes(config) if size > 1)
print(f"{NAME}: {config.num_layers} layers, {config.num_heads} query heads, {config.num_kv_heads} KV heads")
print(f"it can be split over {', '.join(map(str, possible_sizes(config)))} processes; here over {SIZE}")

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on.
#
# 1. The model is split over two processes. How many times does each layer have to wait for a sum over both?
# 2. The split model decodes one request on this machine. How many percent of a step does a process spend exchanging
#    numbers and waiting for the other one, instead of computing?
# 3. Two replicas get many requests about eight documents. Each has a prefix cache with room for about half of them. A
#    router sends each request to the replica that has seen its document. How many times as many prompt tokens come from
#    the caches as when the replicas take turns?

# %%
predict("l16.sums", None, unit="sums per layer")
predict("l16.waiting", None, unit="%")
predict("l16.hits", None, unit="times as many")

# %% [markdown]
# ## Build
#
# Every process is a **[rank](glossary.md#rank)**, numbered from 0. A layer consists mostly of products y = x W. There are
# two ways to cut W. (PyTorch stores the transpose: `weight` = Wᵀ, with the shape [out, in]. So y = x weightᵀ, and a
# column of W is a row of `weight`.)
#
# ### Exercise 1: by columns
#
# Each rank computes **some of the outputs**. For that it needs all inputs, and the rows of `weight` that belong to its
# outputs. Nothing has to be exchanged, as long as every rank goes on with its own outputs.


# %%
def column_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Cut y = x weightᵀ + bias into `size` equal parts along the outputs; return part number `rank`, counted from 0.

    x:      [tokens, in], the same on every rank
    weight: [out, in], bias: [out], both whole; out is a multiple of size
    Returns [tokens, out / size]. The outputs of other ranks are not computed.

    Example: x [[1, 1]], weight [[1, 2], [3, 4]], bias [10, 20], two ranks: rank 0 returns [[13]], rank 1 [[27]].
    """
    ### BEGIN SOLUTION
    own = slice(rank * len(weight) // size, (rank + 1) * len(weight) // size)
    return x @ weight[own].T + bias[own]
    ### END SOLUTION


# %%
check("l16.column_parallel")

# %% [markdown]
# Stuck? `hint("l16.column_parallel", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### Exercise 2: by rows
#
# Now the **inputs** are split: rank r has some columns of x, for example because a product before was split by columns.
# Each output is a sum over all inputs, so each rank can compute a *part of every sum*. Adding these parts over all ranks
# is an **[all-reduce](glossary.md#all-reduce)**: afterwards every rank has the total.


# %%
def row_parallel(parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return y = x weightᵀ + bias, where parts[r] are the columns of x that are on rank r, in order.

    parts:  one tensor per rank, each [tokens, in / number of ranks]
    weight: [out, in], bias: [out], both whole
    Compute what each rank computes from its part, one product for each, and add these up. Add the bias once.

    Example: parts [[[1]], [[2]]], weight [[3, 5]], bias [100]: rank 0 has 1 · 3, rank 1 has 2 · 5, the result is [[113]].
    """
    ### BEGIN SOLUTION
    width = parts[0].shape[1]
    partial = [part @ weight[:, r * width : (r + 1) * width].T for r, part in enumerate(parts)]
    return sum(partial[1:], partial[0]) + bias
    ### END SOLUTION


# %%
check("l16.row_parallel")

# %% [markdown]
# ### See: one sum for two products
#
# The two fit together. The MLP of a layer is down(SiLU(gate(x)) · up(x)), where SiLU(a) = a / (1 + e^−a). Split gate and
# up by columns, and down by rows: SiLU and the product work element by element, so each rank has exactly the inputs that
# its part of down needs. Here with your functions, and the weights of the first layer.

# %%
my_column, my_row = use("l16.column_parallel"), use("l16.row_parallel")
mlp = model.layers[0].mlp
gate, up = mlp.gate_up_proj.weight.float().chunk(2)
down = mlp.down_proj.weight.float()
x = model.layers[0].post_attention_norm(model.embed_tokens(torch.arange(5, 17)))
whole = mlp(x)
none, none_down = torch.zeros(len(gate)), torch.zeros(len(down))
inner = [
    torch.nn.functional.silu(my_column(x, gate, none, rank, SIZE)) * my_column(x, up, none, rank, SIZE)
    for rank in range(SIZE)
]
summed = my_row(inner, down, none_down)
print(f"x {list(x.shape)} → on each rank {list(inner[0].shape)} → sum {list(summed.shape)}")
claim("Split over the ranks, the MLP computes what it computed whole.", torch.allclose(summed, whole, atol=1e-4))

# %% [markdown]
# What else would be possible? Gather the inputs of *down*, and then its outputs, so that every rank has all of them: then
# the *inner* numbers are exchanged as well. (A ring sends each number twice for a sum, but only once for a gather;
# exercise 4 shows how.) Or begin by rows: then SiLU would be applied to parts of a sum. That is wrong, because SiLU(a +
# b) is not SiLU(a) + SiLU(b).

# %%
tokens, hidden, width = len(x), config.hidden_size, config.intermediate_size
pieces = [part @ piece.T for part, piece in zip(x.chunk(SIZE, 1), gate.chunk(SIZE, 1), strict=True)]
early = sum(torch.nn.functional.silu(piece) for piece in pieces)
late = torch.nn.functional.silu(sum(pieces))
print(f"columns, then rows:    1 sum of {hidden} numbers per token")
print(f"gather both times:     {width + hidden} numbers per token, gathered")
print(f"so gathering sends {(width + hidden) / (2 * hidden):.1f} times as much")
claim("SiLU of a sum is not the sum of SiLUs.", not torch.allclose(early, late, atol=1e-2))

# %% [markdown]
# ### Exercise 3: whose heads
#
# Attention works head by head. So q, k and v are split by columns, a whole number of heads to each rank, and the output
# projection by rows. A query head reads one KV head: query head h reads KV head h // (query heads / KV heads). Both must
# be on the same rank, with the keys and values in its cache.
#
# Grouped heads make this harder. With more ranks than KV heads, several ranks need the *same* KV head, and each holds a
# copy of it.


# %%
def heads_of_rank(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range] | None:
    """Return the query heads and the KV heads of this rank, as two ranges, or None if the heads cannot be split.

    * The query heads must divide evenly: size divides num_heads.
    * If size divides num_kv_heads, the KV heads are split evenly, too. If instead num_kv_heads divides size, each rank
      has one KV head, and size / num_kv_heads neighbouring ranks have the same one. If neither divides the other: None.

    Example: 8 query heads, 2 KV heads, 4 ranks. Rank 1 has (range(2, 4), range(0, 1)), rank 2 (range(4, 6), range(1, 2)).
    """
    ### BEGIN SOLUTION
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        return None
    heads, kv_heads = num_heads // size, max(1, num_kv_heads // size)
    first = rank * num_kv_heads // size
    return range(rank * heads, (rank + 1) * heads), range(first, first + kv_heads)
    ### END SOLUTION


# %%
check("l16.heads_of_rank")

# %% [markdown]
# ### See: a layer on two ranks
#
# Your assignment, and the whole layer with it. Follow a lane from left to right: a rank needs nothing from the others
# until it comes to a bar.

# %% tags=["expected"] alt="A lane per rank. Each rank holds a vertical strip of q, k and v, its query heads and KV head, a horizontal strip of o, then vertical strips of gate and up and a horizontal strip of down. Two bars labelled all-reduce cross all lanes: one after o, one after down."
my_heads = use("l16.heads_of_rank")
assigned = [my_heads(config.num_heads, config.num_kv_heads, rank, SIZE) for rank in range(SIZE)]
SplitLayer(assigned, config.num_heads, config.intermediate_size, config.hidden_size)

# %%
copies = {}
for size in range(1, 9):
    found = [my_heads(config.num_heads, config.num_kv_heads, rank, size) for rank in range(size)]
    if None in found:
        print(f"{size} ranks: not possible")
        continue
    copies[size] = sum(len(kv_heads) for _, kv_heads in found) / config.num_kv_heads
    ranks, heads = f"{size} rank{'s' * (size > 1)}", len(found[0][0])
    print(f"{ranks}: {heads} query head{'s' * (heads > 1)} each, every KV head is on {copies[size]:g} of them")
claim(
    "These are the sizes that the engine accepts, if they also divide the MLP's inner channels.",
    [n for n in copies if config.intermediate_size % n == 0] == [n for n in possible_sizes(config) if n < 9],
)
claim(
    "As long as there are KV heads for all ranks, the cache is split and not copied.",
    all(copies[size] == 1 for size in copies if size <= config.num_kv_heads),
)

# %% [markdown]
# ### See: the engine on two processes
#
# Now the real thing. `tensor_parallel_size` starts the other process; each reads its slices from the checkpoint and has
# a cache for its own KV heads. This process schedules, and sends every step to the other one. The block tables are the
# same on both, so the picture of the cache is that of one engine.
#
# The vocabulary is split, too. Each rank has the embeddings of some tokens (the others add zeros, which takes one more
# all-reduce), and computes the logits of those tokens. An **[all-gather](glossary.md#all-gather)** then gives every
# rank the logits of all ranks, one after the other; nothing is added.

# %% tags=["expected"] alt="Cache pages of three requests with their block tables, as an engine of one process would show them."
prompts = ["def fib(n):", "class Stack:\n    def push(self, item):\n", "import os\n\n\ndef walk(root):\n"]
SPLIT = {"tensor_parallel_size": SIZE, "device": "cpu", "num_kv_blocks": 24, "max_num_seqs": 8}
split = LLM(NAME, **SPLIT)
traffic = split.engine.runner.model.group.traffic
traffic.clear()
with split.trace() as trace, LiveView(CachePagesView(trace), seconds=8):
    on_both = [output.outputs[0].token_ids for output in split.generate(prompts, GREEDY, use_tqdm=False)]
del split  # ends the other process

# %%
alone = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
steps = sum(isinstance(event, StepFinished) for event in trace)
per_step = traffic.num_all_reduces / steps
print(f"{steps} steps, {traffic.num_all_reduces} all-reduces, {traffic.num_all_gathers} all-gathers")
print(f"per step: {per_step:g} all-reduces = 2 · {config.num_layers} layers + 1 for the embedding")
reveal("l16.sums", (per_step - 1) / config.num_layers)
claim(f"{SIZE} processes write the tokens of one.", on_both == alone)
claim("Two all-reduces per layer, and one for the embedding.", per_step == 2 * config.num_layers + 1)
claim("One all-gather per step, for the logits.", traffic.num_all_gathers == steps)

# %% [markdown]
# ### Exercise 4: what a sum costs
#
# How do n ranks add up a tensor? In a **ring**: the tensor is cut into n chunks. In each step every rank sends one chunk
# to the next rank, which adds its own. After n - 1 steps every rank has the total of one chunk. In n - 1 further steps the
# totals go around. A step takes the **latency** (the time until a message arrives, however short) and the time of its
# bytes.
#
# ```text
# ranks 0 → 1 → 2 → 0        chunks a b c
# step 1   0 sends a, 1 sends b, 2 sends c      each receiver adds its own chunk
# step 2   0 sends c, 1 sends a, 2 sends b      now rank 2 has all of a, 0 all of b, 1 all of c
# step 3, 4   the totals go around
# ```


# %%
def all_reduce_seconds(num_bytes: float, size: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce.

    num_bytes: of the tensor on each rank; all chunks are equally long, even if that is no whole number of bytes
    size:      number of ranks; a rank that is alone sends nothing
    bandwidth: bytes per second that a rank sends
    latency:   seconds per step

    Example: 1000 bytes, 2 ranks, 100 bytes per second, 3 s: two steps of 3 + 5 s, 16.0 s.
    """
    ### BEGIN SOLUTION
    return 2 * (size - 1) * (latency + num_bytes / size / bandwidth)
    ### END SOLUTION


# %%
check("l16.all_reduce_seconds")

# %% [markdown]
# Two processes of this machine are connected by TCP, through the operating system (gloo sends the tensors). Measure an
# all-reduce, the fastest of 200 runs for each size: the smallest tensor gives the latency, the difference between the two
# largest the bandwidth. Your formula draws the line that starts at the smallest tensor's time and rises with this
# bandwidth. Other points may lie above or below it.

# %% tags=["expected", "nbval-ignore-output"] alt="Time of an all-reduce over its size, both axes logarithmic. Measured points vary little for small sizes and rise for the largest; the dashed line of the formula starts at the first point; others may lie above or below it."
my_seconds = use("l16.all_reduce_seconds")
SIZES = [16 * 4**i for i in range(9)]  # bytes
taken = measured_seconds(SIZES)
LATENCY, BANDWIDTH = latency_and_bandwidth(SIZES, taken)
modelled = [my_seconds(size, 2, BANDWIDTH, LATENCY) for size in SIZES]
print(f"latency {LATENCY * 1e6:.0f} µs per step, bandwidth {BANDWIDTH / 1e9:.2f} GB/s")
LineChart(
    "An all-reduce between two processes of this machine",
    Axis("bytes", log=True, ticks=(10, 100, 1_000, 10_000, 100_000, 1_000_000)),
    Axis("microseconds", log=True),
    [
        Series("measured (gloo)", SIZES, [1e6 * s for s in taken]),
        Series("your formula", SIZES, [1e6 * s for s in modelled], style="modelled"),
    ],
    f"From {1e6 * taken[0]:.0f} µs for {SIZES[0]} bytes to {1e6 * taken[-1]:.0f} µs for {SIZES[-1]:,} bytes.",
)

# %% tags=["nbval-ignore-output"]
step_bytes = 4 * config.hidden_size
waits, sends = 2 * (SIZE - 1) * LATENCY, 2 * (SIZE - 1) * step_bytes / SIZE / BANDWIDTH
print(f"a sum in a decode step of one request, over {SIZE} processes: {step_bytes:,} bytes")
print(f"   latency {1e6 * waits:.0f} µs, its bytes {1e6 * sends:.1f} µs")
claim("For one token the latency counts, not the bytes.", sends < waits, measured=True)

# %% [markdown]
# ## Measure
#
# ### A split model on this machine
#
# Now a step as a whole: decoding with one request and with eight, on one process and on two. Both run plain PyTorch with
# one thread per process. `waiting` is the time in all-reduces and in the all-gather, as the first process sees it.
# Whatever delays the other process is in it.


# %% tags=["nbval-ignore-output"]
def decode_seconds(engine: LLM, batch: int) -> list[float]:
    """Seconds of each step of a generation with so many requests."""
    ids = [{"prompt_token_ids": [7 + i, 8, 9]} for i in range(batch)]
    with engine.trace() as recorded:
        engine.generate(ids, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    return [event.seconds for event in recorded if isinstance(event, StepFinished)]


def median_ms(seconds: list[float]) -> float:
    return 1e3 * sorted(seconds)[len(seconds) // 2]


split = LLM(NAME, **SPLIT)
exchange = split.engine.runner.model.group.traffic
decode, waiting = {}, {}
print(f"{free_processors():.1f} processors are free, for {SIZE} processes")
for batch in (1, 8):
    decode[batch, 1] = median_ms(decode_seconds(llm, batch))
    exchange.clear()
    of_split = decode_seconds(split, batch)
    decode[batch, SIZE] = median_ms(of_split)
    waiting[batch] = exchange.seconds / sum(of_split)
    print(
        f"{batch} request{' ' if batch == 1 else 's'}: one process {decode[batch, 1]:6.1f} ms a step, {SIZE} processes {decode[batch, SIZE]:6.1f} ms,"
        f" of which waiting {waiting[batch]:.0%}"
    )
del split
reveal("l16.waiting", round(100 * waiting[1]))
sums = 2 * config.num_layers + 1
print(f"waiting with 1 request: {waiting[1] * decode[1, SIZE]:.1f} ms a step; ", end="")
print(f"{sums} sums by your formula: {1e3 * sums * my_seconds(step_bytes, SIZE, BANDWIDTH, LATENCY):.1f} ms")
own = {batch: (1 - waiting[batch]) * decode[batch, SIZE] for batch in (1, 8)}
print(
    f"without waiting a step of the first process takes {own[1]:.1f} and {own[8]:.1f} ms; "
    f"the whole step on one process {decode[1, 1]:.1f} and {decode[8, 1]:.1f} ms"
)
ratios = [decode[batch, SIZE] / decode[batch, 1] for batch in (1, 8)]
print(f"a step of {SIZE} processes takes {ratios[0]:.1f} and {ratios[1]:.1f} times as long as a step of one")
claim(
    f"{SIZE} processes are far from {SIZE} times as fast as one: a step takes more than 0.6 of the time.",
    min(ratios) > 0.6,
    measured=True,
)

# %% [markdown]
# Here splitting **does not pay**. With a processor for each, two processes should take half the time. The first line says
# how many were free: with fewer than two they take turns, and wait for that, too. Even with two, they share the
# memory and the caches of one machine, so the weights are not read any faster than by one process with two threads, and a
# small model has little to compute between two sums. Your formula has only the link in it, at its fastest. The rest is
# what an all-reduce usually takes beyond that, and waiting for the other process when it arrives late: the two never take
# equally long, and any other work on the machine delays one of them. A sum is as late as the latest rank. (Waiting varies
# from run to run, so a step of eight requests can even be faster than a step of one.) And waiting is not all: compare the
# printed time without waiting with the whole step on one process. A rank multiplies by half of each matrix, but makes as
# many calls as one process with the whole model, and the first also sends every step to the other. Splitting pays where
# each rank brings its *own* memory and processor, and where the links are fast: on GPUs.
#
# ### A split model on GPUs, modelled
#
# Eight GPUs, Llama-3.1-8B in bfloat16, decoding. They can be 8 replicas, 4 groups of 2, 2 groups of 4, or one group of
# 8. A step reads the weights of its rank and computes, whichever takes longer, and then comes the exchange that you have
# counted: two sums per layer, one for the embedding, and the gather of the logits. (In the gather every rank sends its
# logits to all others at once. Reading the cache is left out. It takes equally long for every way of splitting, as long
# as no KV head is copied. But with thousands of requests it can take longer than the rest. Such a step waits for memory,
# so a split still gains by reading fewer weights, and replicas win later and by less than here. The latencies are
# assumptions.)

# %%
quoted("An H100 has 80 GB of memory, reads 3.35 TB/s and computes 989 TFLOP/s in bfloat16", "NVIDIA H100 data sheet")
quoted("NVLink 4: 900 GB/s in both directions together, so 450 GB/s in each", "NVIDIA H100 data sheet")
quoted("InfiniBand NDR: 400 Gbit/s per port", "InfiniBand Trade Association")
quoted("Llama-3.1-8B: 32 layers, hidden size 4096, a vocabulary of 128,256 tokens", "its config.json")
nvlink = Link("NVLink", 450e9, 5e-6)
network = Link("network", 50e9, 20e-6)
clusters = {
    link.name: Cluster(8, H100, link, LLAMA_8B, 32, 2 * 4096, 2 * 128_256, my_seconds) for link in (nvlink, network)
}
small, large = 8192.0, 8192.0 * 4096  # a decode step, the prefill of a prompt
for name, num_bytes in (("1 token", small), ("4,096 tokens", large)):
    ring, one_shot = (1e6 * f(num_bytes, 8, 450e9, 5e-6) for f in (my_seconds, one_shot_seconds))
    print(f"sum of {name:12} over 8 GPUs: ring {ring:7.1f} µs, everyone to everyone {one_shot:7.1f} µs")
claim(
    "For few bytes a ring has too many latencies; for many it has the fewest bytes.",
    my_seconds(small, 8, 450e9, 5e-6) > one_shot_seconds(small, 8, 450e9, 5e-6)
    and my_seconds(large, 8, 450e9, 5e-6) < one_shot_seconds(large, 8, 450e9, 5e-6),
)

# %% [markdown]
# So engines choose by size: vLLM has an all-reduce of its own for small tensors, in which every GPU reads from all
# others at once. The model below takes the faster of both.

# %% tags=["expected"] alt="Tokens per second of eight GPUs over the number of requests, both axes logarithmic. With few requests the group of eight is fastest; with thousands the eight replicas are, and the line of the group of eight flattens out."
REQUESTS = [8 * 2**i for i in range(11)]
cluster = clusters["NVLink"]
curves = [
    Series(
        f"{8 // size} × {size} GPUs" if size > 1 else "8 replicas",
        REQUESTS,
        [cluster.tokens_per_second(n, size) for n in REQUESTS],
        style="modelled",
    )
    for size in (1, 2, 4, 8)
]
best = {n: max((1, 2, 4, 8), key=lambda size, n=n: cluster.tokens_per_second(n, size)) for n in REQUESTS}
LineChart(
    "Eight H100s over NVLink, Llama-3.1-8B (modelled)",
    Axis("requests at a time", log=True),
    Axis("tokens per second", log=True),
    curves,
    "; ".join(f"{n} requests: groups of {size} are fastest" for n, size in best.items()),
)

# %%
print(f"{'':9}{'requests':>9}" + "".join(f"{f'groups of {size}':>22}" for size in (1, 2, 4, 8)))
for name, its in clusters.items():
    for n in (8, 256, 8192):
        shown = (f"{1e3 * its.step_seconds(n, s):8.2f} ms {its.tokens_per_second(n, s):8,.0f}/s" for s in (1, 2, 4, 8))
        print(f"{name:9}{n:9,}" + "".join(f"{text:>22}" for text in shown))
fits = ", ".join(f"{size}: {cluster.cache_tokens(size):,}" for size in (1, 2, 4, 8))
print(f"tokens of keys and values that fit, by size of a group: {fits}")
claim(
    "With few requests, splitting gives each token sooner, and more tokens: the weights are read once for all requests.",
    best[8] == 8 and cluster.step_seconds(8, 8) < cluster.step_seconds(8, 1) / 3,
)
claim(
    "With thousands of requests, replicas give more: computing takes as long either way, and they exchange nothing.",
    best[8192] == 1,
)
claim(
    "Over a network the split gains less.",
    clusters["network"].tokens_per_second(8, 8) < cluster.tokens_per_second(8, 8) / 2,
)
claim(
    "A split stores the weights once, and has more room for the cache.",
    cluster.cache_tokens(8) > cluster.cache_tokens(1),
)

# %% [markdown]
# So: **split for latency, or because the model does not fit; copy for throughput.** In practice both: groups within a
# machine, whose links are fast, and replicas of these groups.
#
# ### Exercise 5: which replica
#
# Replicas have a [prefix cache](glossary.md#prefix-caching) each. A request about a document is cheap on the replica that has the document's keys and
# values, and expensive on all others. The router decides. It knows the hash of each block of the prompt (lesson 6), the
# hashes of what it sent to each replica, and how many requests are waiting there.


# %%
def route(blocks: list[int], cached: list[set[int]], queued: list[int]) -> int:
    """Return the number of the replica that gets the request.

    blocks: hashes of the prompt's blocks, in order
    cached: for each replica, the hashes of the blocks that were sent to it, which the router takes to be cached there
    queued: for each replica, the number of its waiting requests

    The replica with the longest cached beginning: blocks count from the first one up to the first that is missing.
    Among equals the one with the fewest waiting requests, and among those the first.

    Example: blocks [7, 8, 9], cached [{8, 9}, {7}], queued [0, 3]: replica 1. It has one block from the beginning,
    replica 0 has none.
    """
    ### BEGIN SOLUTION

    def hits(replica: int) -> int:
        count = 0
        while count < len(blocks) and blocks[count] in cached[replica]:
            count += 1
        return count

    return min(range(len(cached)), key=lambda r: (-hits(r), queued[r]))
    ### END SOLUTION


# %%
check("l16.route")

# %% [markdown]
# ### Measure: routing by prefix
#
# Two engines with room for about half of the documents each, and 96 requests about eight documents, in random order.
# The replicas take turns, or your function decides. Counted by the engines: how many prompt tokens were in a prefix
# cache.

# %%
my_route = use("l16.route")
DOCUMENTS, DOCUMENT_TOKENS = 8, 96
documents = replicas.documents(llm, DOCUMENTS, DOCUMENT_TOKENS)
room = {**PLAIN, "num_kv_blocks": 4 * (DOCUMENT_TOKENS // 16 + 1)}


def served_by_two(requests: list[list[int]]) -> dict[str, replicas.Served]:
    """What two replicas do with the requests, routed in either way."""
    engines = [LLM(NAME, **room) for _ in range(2)]
    return {
        "take turns": replicas.serve(engines, requests, replicas.round_robin()),
        "by prefix (yours)": replicas.serve(engines, requests, my_route),
    }


results = served_by_two(replicas.requests(llm, documents, 96))
print(f"{'':20}{'cached tokens':>15}{'of all':>9}{'busiest replica':>18}")
for name, served in results.items():
    print(f"{name:20}{served.num_cached:>15,}{served.hit_rate:>9.0%}{served.busiest:>18.0%}")
turns, mine = results.values()
reveal("l16.hits", round(mine.num_cached / max(turns.num_cached, 1), 1))
claim("Routing by prefix finds at least 1.3 times as many tokens.", mine.num_cached > 1.3 * turns.num_cached)
claim("No replica gets more than two thirds of the requests.", mine.busiest < 2 / 3)

# %% [markdown]
# Each document now belongs to one replica, and both caches together hold all of them. If the replicas take turns, each
# needs all documents, and many blocks are in both caches.
#
# **Where it loses.** If most requests are about *one* document, nearly all go to one replica, and the other one is
# almost idle.

# %%
skewed = served_by_two(replicas.requests(llm, documents, 96, hot=0.9))
print(f"{'9 of 10 about one':20}{'cached tokens':>15}{'of all':>9}{'busiest replica':>18}")
for name, served in skewed.items():
    print(f"{name:20}{served.num_cached:>15,}{served.hit_rate:>9.0%}{served.busiest:>18.0%}")
claim("One replica gets more than 80% of the requests.", skewed["by prefix (yours)"].busiest > 0.8)
claim(
    "And the gain is small: taking turns finds this document, too.",
    skewed["by prefix (yours)"].hit_rate < 1.3 * skewed["take turns"].hit_rate,
)

# %% [markdown]
# Routers in the field therefore weigh both: by prefix as long as the queues are balanced, by queue when they are not.
#
# ## Break it
#
# Five versions of a split model, each with one mistake. Nothing raises an error, and every mistake gives logits of the
# right shape. Two checks: do all **ranks agree** (on the last hidden states, from which the logits are computed, and on
# the logits), and does rank 0 predict what the **whole model** predicts? **Guess first**: which mistakes does the first
# check miss? (The ranks are threads here, so that this takes seconds.)

# %%
from minillm.teaching.workshop.l16_broken import MISTAKES, run_on_ranks

ids = documents[0][:48]
folder = resolve(NAME)
[whole] = run_on_ranks(folder, 1, ids, MISTAKES["right"])
agree, correct = {}, {}
print(f"{'':28}{'ranks agree':>13}{'same argmax as the whole model':>33}")
for name, mistake in MISTAKES.items():
    first, *others = run_on_ranks(folder, SIZE, ids, mistake)
    agree[name] = all(first.agrees(other) for other in others)
    correct[name] = float((first.logits.argmax(-1) == whole.logits.argmax(-1)).float().mean())
    print(f"{name:28}{'yes' if agree[name] else 'no':>13}{correct[name]:>33.0%}")
claim("Without a mistake both checks pass.", agree["right"] and correct["right"] == 1)
claim("Every mistake changes predictions.", all(c < 1 for n, c in correct.items() if n != "right"), of_model=True)
claim(
    "Where a sum or a gather is missing, the ranks disagree.",
    not any(agree[name] for name in correct if "not" in name),
)
claim(
    "A sum too many, and keys of the wrong head: all ranks agree, on something wrong.",
    agree["the MLP is summed twice"] and agree["the neighbour's KV heads"],
)

# %% [markdown]
# Ranks that agree can still be wrong. The check that catches all of them is the one of this course: the tokens of the
# plain model. (The engine's tests compare 100 prompts.)
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | Megatron-LM | the column and row split of this lesson, for training |
# | vLLM, SGLang | `tensor_parallel_size` (SGLang: `tp_size`): the same split; all-reduces of their own for small tensors; KV heads are copied where there are too few |
# | transformers | `tp_plan="auto"` under `torchrun`: the same split |
# | llama.cpp | whole layers on each GPU (`--split-mode layer`, the default); `tensor`, experimental, is the split of this lesson, and the older `row` is deprecated |
# | vLLM under `torchrun` | `distributed_executor_backend="external_launcher"`: every process runs the same script and the same scheduler, as minillm does under `torchrun` |
# | SGLang's router, llm-d, NVIDIA Dynamo | replicas behind a router that knows prefixes and queues |
# | pipeline parallelism | whole layers on each rank: one message per boundary instead of two sums per layer, but a token passes through all of them in turn |
#
# ### Your script on vLLM
#
# This script uses only options that vLLM has, so it runs on both, and only the name of the module differs. (`model`,
# `prompts` and `watch` are set before: `watch` is `LLM.trace` here, and for vLLM it is `of_vllm`, after
# `from minillm.trace import of_vllm`. That needs vLLM's engine in the same process: set the environment variable
# `VLLM_ENABLE_V1_MULTIPROCESSING=0` first.) If vLLM is installed here and can be watched, it runs now. Otherwise you see a
# **recorded run** of vLLM 0.32 on a CPU: other prompts and lengths, several completions per prompt, and a version of the
# bundled model that may be older than yours. `of_vllm` turned what vLLM's scheduler did into this project's events, so
# the pictures of lessons 0, 6 and 7 draw it.

# %%
SCRIPT = """
from {module} import LLM, SamplingParams

llm = LLM(model, max_model_len=256, max_num_seqs=4, block_size=32, enforce_eager=True,
          speculative_config={{"method": "ngram", "num_speculative_tokens": 3,
                              "prompt_lookup_max": 3, "prompt_lookup_min": 1}})
greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
with watch(llm) as trace:
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
"""
texts = ["def fib(n):", "class Stack:\n    def __init__(self):\n        self.items = []\n", "for line in"]
names = {"model": NAME, "prompts": texts, "watch": LLM.trace}
exec(SCRIPT.format(module="minillm"), names)
ours = names["trace"]
print(SCRIPT.format(module="minillm").strip())

# %%
from minillm.teaching.workshop.l16_vllm import run_or_recorded

theirs, where = run_or_recorded(SCRIPT, str(folder), texts)
print(where)


# %% tags=["nbval-ignore-output"]
def middle(trace: Trace) -> int:
    """The number of the step in the middle."""
    return [event.step for event in trace if isinstance(event, StepFinished)][-1] // 2


show(CachePagesView(ours), step=middle(ours))

# %% tags=["expected"] alt="Cache pages of vLLM in the middle of its run: pages of 32 slots with letters for the requests; page 0 is never used."
show(CachePagesView(theirs), step=middle(theirs))

# %%
TimelineView(theirs)

# %%
kinds = {type(event).__name__ for event in ours}, {type(event).__name__ for event in theirs}
print("events of both:", ", ".join(sorted(kinds[0] & kinds[1])))
claim(
    "In both traces engines start, requests are added, run in steps, get tokens and finish, with the same kinds of events.",
    kinds[0] & kinds[1]
    >= {
        *("EngineStarted", "RequestAdded", "StepStarted", "StepRan", "TokensCommitted"),
        *("StepFinished", "RequestFinished"),
    },
)

# %% [markdown]
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | a layer needs two all-reduces | columns, then rows: one for attention, one for the MLP; one more per step for a split embedding | exercise 2, the engine's counter |
# | n GPUs decode n times as fast | never quite: the exchange is added to the reading. It is close while reading weights takes much longer | the modelled cluster |
# | a split is slower than replicas | with many requests; with few it is faster, because weights are read once for all | the modelled cluster |
# | prefix routing saves prefill | if the documents of all replicas do not fit into one; with one hot document it only makes queues uneven | exercise 5 |
#
# **Papers.** Shoeybi et al. 2019, *Megatron-LM*. Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*. Kwon
# et al. 2023, *PagedAttention* (vLLM). Zheng et al. 2024, *SGLang*. Pope et al. 2022, *Efficiently Scaling Transformer
# Inference*.
#
# ## Recap
#
# 1. By columns a rank has some outputs, by rows a part of every sum. Columns, then rows: one all-reduce for two products.
# 2. Heads are split whole. Query heads go with their KV head; with more ranks than KV heads, it is copied.
# 3. A sum over n ranks takes 2 (n - 1) steps in a ring. For one token the latency counts, for a prompt the bytes.
# 4. Split for latency and for models that do not fit; copy for throughput.
# 5. A router that knows prefixes makes the caches of all replicas one large one, at the price of uneven queues.
#
# What you have built is, in small, what vLLM is in large: read its code next. An appendix, [lesson 17](17_beside_inference.ipynb),
# measures ideas that stand beside inference.
