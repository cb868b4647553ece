# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12. Speculation over long contexts
#
# **Question.** *With many requests and long contexts, a step reads more cache than weights. Can a model draft for itself
# from a small part of its own cache?*
#
# [Speculative decoding](glossary.md#speculative-decoding) needs a cheap [drafter](glossary.md#drafter). Lesson 11 made
# it cheap by making the *model* small. But with a long context and many requests, the weights are no longer what a
# [step](glossary.md#step) waits for. It waits for keys and values, of which every request has its own. Then a small
# model saves the wrong bytes. Take the **same** model, let it draft over a small part of its own
# [cache](glossary.md#kv-cache), and let it verify over all of it. Such a drafter has the target's own weights, so it
# guesses well, and it needs no second model and no second cache.
#
# You compute from which context on verifying stays nearly free, however large the batch. Then you build three drafters:
# one that reads the beginning and the newest tokens, one that reads what the prompt's last queries attended to, and one
# that reads all tokens, but half of the bits of each key and value. Finally you compare the papers' speed-ups with what
# the bytes allow: on a GPU by a model, on your machine by the clock.
#
# You need lesson 6 (blocks and block tables), lesson 10 (why the text stays exact) and lesson 11 (τ, c and v). Everything
# runs on a laptop's CPU. The engine runs each step as one [compiled function](glossary.md#compiled-step), which is
# compiled the first time it runs on a machine; that takes up to a minute behind a progress bar.

# %%
import math
import os

import torch
from torch.nn import functional as F

from minillm import LLM
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop import l12_costs as costs
from minillm.teaching.workshop import l12_views as views
from minillm.teaching.workshop.l12_costs import H100, LLAMA_8B
from minillm.viz import BlockView, BudgetAcceptance, BudgetLine, ViewedBlocks, show
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
DRAFT = os.environ.get("MINILLM_DRAFT", "minicoder-draft")  # a small model with the same tokenizer, for comparison
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

GAMMA, NEW = 3, 32  # drafts per round, and new tokens per prompt
SIZE = {"device": "cpu", "max_num_seqs": 1}
drafting = {"num_speculative_tokens": GAMMA, "adaptive": False}
llm = LLM(NAME, num_kv_blocks=800, speculative_config={"method": views.ViewDrafter, **drafting}, **SIZE)
BLOCK, LONGEST = llm.engine.runner.block_size, llm.max_model_len
LIMIT = min(LONGEST, 2048)  # of the texts below, so that they take seconds
prompts = views.long_prompts(llm, 4, LIMIT - NEW - GAMMA)
print(f"{NAME}: contexts of up to {LONGEST} tokens, here of {LIMIT}, in blocks of {BLOCK}")

# %% [markdown]
# ## The question, in numbers
#
# A forward over B requests, each with S tokens in the cache, reads
#
# $$\text{bytes} = \text{weights} + B \cdot S \cdot \text{KV bytes per token}$$
#
# The weights are read once, whatever the batch. Keys and values are read for each request. So the batch, which makes
# weights cheap, does nothing for the cache.

# %%
quoted(
    "Llama-3.1-8B: 8.03 billion parameters, 32 layers, 32 query heads, 8 KV heads of 128",
    "its model card and config.json",
)
quoted("H100 SXM: 3.35 TB/s of memory bandwidth, 989 TFLOP/s in dense bfloat16, 80 GB", "NVIDIA H100 data sheet")
print(f"KV bytes per token: {LLAMA_8B.kv_bytes:,}; weights: {LLAMA_8B.weight_bytes / 1e9:.1f} GB in bfloat16")
print(f"(and {LLAMA_8B.embedding_bytes / 1e9:.1f} GB of input embedding, of which a step reads a few rows only)")

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on. All are about drafts that the target makes for itself.
#
# 1. Llama-3.1-8B in bfloat16, one request. From how many tokens of context on does a step read more bytes of cache than of
#    weights?
# 2. The bundled model drafts over a quarter of the cache of a long file: the first block, and the newest ones. Of 100 such
#    drafts that the target judges, how many does it accept?
# 3. What does such a draft step cost on your machine, as a share of a plain step?

# %%
predict("l12.crossing", None, unit="tokens")
predict("l12.quarter", None, unit="of 100")
predict("l12.draft", None, unit="plain steps")

# %% [markdown]
# ## Build
#
# ### Exercise 1: the time of a step
#
# Memory and arithmetic work at the same time, so the slower one decides: the [roofline](glossary.md#roofline) of lesson 3.
# In a round of [speculative decoding](glossary.md#round) each request brings several rows: the last committed token and
# the drafts. All rows of a request read the same keys and values, once.


# %%
def step_seconds(batch: int, rows: int, context: float, shape: costs.Shape, machine: costs.Machine) -> float:
    """Return the least time of one forward: that of its bytes or that of its operations, whichever is longer.

    batch:   requests
    rows:    tokens that each request computes in this forward
    context: tokens in the cache of each request; every row attends to all of them
    shape:   .parameters, .weight_bytes, .kv_bytes (of one cached token), .attention_flops (of one row and cached token)
    machine: .flops (operations per second), .bandwidth (bytes per second)

    A parameter takes part in one multiplication and one addition per row: two operations.

    Example: 100 parameters in 200 bytes, 4 KV bytes and 8 operations per cached token, 10 bytes and 1000 operations per
    second. One request, one row, 50 cached tokens: 400 bytes take 40 s, 600 operations 0.6 s, so the result is 40.0.
    """
    ### BEGIN SOLUTION
    read = shape.weight_bytes + batch * context * shape.kv_bytes
    operations = batch * rows * (2 * shape.parameters + context * shape.attention_flops)
    return max(read / machine.bandwidth, operations / machine.flops)
    ### END SOLUTION


# %%
check("l12.step_seconds")

# %% [markdown]
# Stuck? `hint("l12.step_seconds", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### See: when the cache outgrows the weights
#
# Below is what a step of Llama-3.1-8B reads. Where a rising line crosses the flat one, a step reads as much cache as
# weights.

# %% tags=["expected"] alt="A flat dashed line for the weights at 15 gigabytes, and three rising dashed lines for the cache of 1, 8 and 32 requests. The more requests, the shorter the context at which the cache crosses the weights."
my_seconds = use("l12.step_seconds")
contexts = [2**i for i in range(8, 18)]
lines = [Series("weights", contexts, [LLAMA_8B.weight_bytes / 1e9] * len(contexts), style="modelled")]
for batch in (1, 8, 32):
    read = [batch * context * LLAMA_8B.kv_bytes / 1e9 for context in contexts]
    lines.append(Series(f"cache, {batch} request{'s' * (batch > 1)}", contexts, read, style="modelled"))
crossing = {batch: LLAMA_8B.weight_bytes / LLAMA_8B.kv_bytes / batch for batch in (1, 8, 32)}
LineChart(
    "What a step of Llama-3.1-8B reads (modelled)",
    Axis("context of each request, in tokens", log=True, ticks=(256, 1024, 4096, 16_384, 65_536)),
    Axis("GB per step", log=True, ticks=(0.1, 1, 10, 100)),
    lines,
    "The cache crosses the weights at "
    + ", ".join(f"{tokens:,.0f} tokens with batch {batch}" for batch, tokens in crossing.items())
    + ".",
)

# %%
for batch, tokens in crossing.items():
    print(f"{batch:3} request{'s' if batch > 1 else ' '}: as much cache as weights from {tokens:9,.0f} tokens on")
reveal("l12.crossing", round(crossing[1]))
seconds = [my_seconds(32, 1, context, LLAMA_8B, H100) for context in (1024, 15_000)]
print(f"32 requests on an H100: a step at 15,000 tokens takes {seconds[1] / seconds[0]:.1f} times one at 1,024")
claim("One request alone must have a very long context before its cache outweighs the weights.", crossing[1] > 100_000)

# %% [markdown]
# And here? The bundled model is small, and so is its longest context. The cell below counts bytes, and times a step of one
# request (medians, processor time of this thread). The compiled step keeps the weights in the 16 bits of the checkpoint,
# and the cache in float32.

# %% tags=["nbval-ignore-output"]
from minillm.teaching.latency import decode_step, seconds_of

config = llm.engine.runner.model.config
weights, kv_bytes = costs.Shape.of(config, 2).weight_bytes, costs.Shape.of(config, 4).kv_bytes
times = {}
print("context   cache / weights (bytes)   step, of one with the shortest context: by bytes   measured")
for context in (LONGEST // 16, LONGEST // 4, LONGEST // 2, LONGEST - 1):
    ids = (prompts[0] * 8)[:context]
    times[context] = seconds_of(decode_step(llm, ids), repeats=5, rounds=5)
    first = next(iter(times))
    by_bytes = (weights + context * kv_bytes) / (weights + first * kv_bytes)
    print(f"{context:7} {context * kv_bytes / weights:17.0%} {by_bytes:48.2f} {times[context] / times[first]:10.2f}")
llm.reset_prefix_cache()
print(f"as much cache as weights from {weights / kv_bytes:,.0f} tokens on")
claim(
    "Up to half of the longest context, a step reads more weights than cache.",
    LONGEST // 2 * kv_bytes < weights,
    of_model=True,
)
claim("A longer context makes a step longer.", times[LONGEST - 1] > times[LONGEST // 16], measured=True)

# %% [markdown]
# If the measured step grows faster than its bytes, a cached token costs more than reading it: on this machine attention
# also computes. Remember this for the end: a drafter that saves cache can save only what the cache costs.
#
# ### Exercise 2: the break-even context
#
# Drafting is one side. The other is *verification*: with γ drafts, γ + 1 rows per request. If the forward waits for
# memory, further rows are nearly free. If it waits for arithmetic, each row costs as much as the first. With a large
# batch and short contexts arithmetic is the limit, so speculation gains less, or loses (lesson 11 measured that). But
# each request brings not only its operations, it also brings its cache to be read. From some context on, reading takes
# longer than computing **however large the batch is**. Then verification stays nearly free on a busy server, too. Find
# that context.


# %%
def break_even_context(rows: int, shape: costs.Shape, machine: costs.Machine) -> float:
    """Return the context from which on a forward waits for memory at any batch size; math.inf if there is none.

    rows: tokens that each request computes; with γ drafts, γ + 1
    shape, machine: as in step_seconds

    With very many requests, what the weights take to read no longer counts: compare the time to read one request's keys
    and values with the time to compute its rows.

    Example: 100 parameters, 4 KV bytes and 8 operations per cached token, 1000 operations and 100 bytes per second:
    one row has 200 operations and 8 per token, so 4 S / 100 = (200 + 8 S) / 1000, and S is 6.25.
    """
    ### BEGIN SOLUTION
    operations_per_byte = machine.flops / machine.bandwidth
    spare = shape.kv_bytes * operations_per_byte - rows * shape.attention_flops
    return rows * 2 * shape.parameters / spare if spare > 0 else math.inf
    ### END SOLUTION


# %%
check("l12.break_even_context")

# %%
my_break_even = use("l12.break_even_context")
print("Llama-3.1-8B on an H100, from this context on verifying waits for memory at any batch size:")
for gamma in (0, 1, 2, 4, 8):
    name = "draft: " if gamma == 1 else "drafts:"
    print(f"  {gamma} {name} {my_break_even(gamma + 1, LLAMA_8B, H100):6,.0f} tokens")
at = my_break_even(5, LLAMA_8B, H100)
ratio = {
    (batch, context): my_seconds(batch, 5, context, LLAMA_8B, H100) / my_seconds(batch, 1, context, LLAMA_8B, H100)
    for batch in (1, 64, 512)
    for context in (256, round(2 * at))
}
print("\nverifying four drafts, in plain steps (modelled; whether so many requests fit is another question)")
for batch in (1, 64, 512):
    print(
        f"{batch:5} request{'s' if batch > 1 else ' '} "
        + "".join(f"   context {c}: {ratio[batch, c]:.2f}" for c in (256, round(2 * at)))
    )
claim("With four drafts it is about 2.1 thousand tokens.", 2050 < at < 2150)
claim("Far below it, verifying costs a large batch more than two steps.", ratio[512, 256] > 2)
claim(
    "At twice the break-even context it costs a single step, whatever the batch.",
    max(ratio[batch, round(2 * at)] for batch in (1, 64, 512)) < 1.001,
)

# %% [markdown]
# MagicDec (Sadhukhan et al. 2024) calls this context the *critical sequence length*. From it on *verification* is nearly
# free; whether a round pays also depends on what its drafts cost. MagicDec's point is that beyond it speculation pays
# *more* with a larger batch, because the cache that a drafter does not have to read grows with the batch.
#
# ### Exercise 3: sinks and a window
#
# Which part of the cache? StreamingLLM (Xiao et al. 2024) keeps the first few tokens, the
# **[attention sinks](glossary.md#attention-sink)**, and a window of the newest. In many models the first tokens get much
# attention whatever they say: the weights of a softmax sum to 1, so a head that needs nothing must still put them
# somewhere.
#
# In a paged cache such a **[view](glossary.md#view)** costs nothing: it is a shorter
# [block table](glossary.md#block-table). Nothing is copied. Two details are easy to get wrong. With blocks of 4 tokens, 22
# tokens, and two blocks to be kept:
#
# ```text
# block table      [ 7 ][ 3 ][ 9 ][ 4 ][ 8 ][ 2 ][ 6 ]     token 21 is the newest: in the block with index 5 (id 2)
# the view         [ 7 ]               [ 8 ][ 2 ][ 6 ]     index of token 21 in the view: 9; 12 tokens are left out
# ```
#
# * **Where the newest token is stored** follows from its index in the view: 9 is offset 1 of the third block. The blocks
#   from there on are for it and for the drafts, so they all stay in the table.
# * **Which position it has** does not change: 9 + 12 = 21. [RoPE](glossary.md#rope) is already in the cached keys, each
#   rotated by its own true position. Distances come out right only if the query, too, is rotated by its true position.
#   (StreamingLLM counts positions *within* its cache, because it streams beyond the context for which the model was
#   trained. A drafter within the context has no need to.)


# %%
def sink_view(block_table: list[int], num_tokens: int, block_size: int, most: int) -> tuple[list[int], int, int]:
    """Return what a draft step reads: (a shortened block table, the newest token's index in it, the tokens left out).

    block_table: block ids of the request; it has room for the drafts behind the newest token
    num_tokens:  tokens of the request; the newest, with index num_tokens - 1, is the one that the draft step computes
    most:        at least 1; how many of the blocks *before* the newest token's block are kept: block 0, and the newest
                 ones; all of them, if there are no more

    Example: sink_view([7, 3, 9, 4, 8, 2, 6], 22, 4, 2) is ([7, 8, 2, 6], 9, 12), as in the drawing.
    """
    ### BEGIN SOLUTION
    last = num_tokens - 1
    newest = last // block_size
    kept = [0, *range(newest - most + 1, newest)] if newest > most else list(range(newest))
    left_out = (newest - len(kept)) * block_size
    return [block_table[i] for i in kept] + block_table[newest:], last - left_out, left_out
    ### END SOLUTION


# %%
check("l12.sink_view")

# %% [markdown]
# Your view in the engine. `views.ViewDrafter` is a short drafter: it takes the block table that a view returns, and runs
# the *target* over it. The engine has the same as its method `self_sparse`. Both must make the same drafts, and
# neither may change the text.

# %%
my_view = use("l12.sink_view")


def sinks(budget: int) -> views.View:
    """Your view of at most `budget` tokens, the newest token's block included."""
    return lambda block_table, num_tokens, attention: my_view(block_table, num_tokens, BLOCK, budget // BLOCK - 1)


QUARTER = LIMIT // 4
whole = views.draft_with(llm, prompts, views.whole, GAMMA, NEW)
quarter = views.draft_with(llm, prompts, sinks(QUARTER), GAMMA, NEW)
self_sparse = {"method": "self_sparse", "sparse_layout": "sinks", "budget": QUARTER, **drafting}
engine = LLM(NAME, num_kv_blocks=400, speculative_config=self_sparse, **SIZE)
built_in = views.draft_with(engine, prompts[:2], None, GAMMA, NEW)
print(f"drafts over the whole cache:    {whole.alpha:6.1%} accepted")
print(
    f"your view of {QUARTER:4} tokens:       {quarter.alpha:6.1%} accepted, {quarter.run.tokens_per_forward:.2f} tokens per forward"
)
print(f"self_sparse, two of the prompts: {built_in.alpha:6.1%} accepted")
reveal("l12.quarter", round(100 * quarter.alpha))
claim("A view of everything is the target itself: all drafts are accepted.", whole.alpha == 1)
claim("Your drafts are accepted exactly as those of the engine's own method.", quarter.rates[:2] == built_in.rates)
claim(
    "The text is the same with every view.",
    quarter.run.outputs == whole.run.outputs and built_in.run.outputs == whole.run.outputs[:2],
)
claim("Over a quarter of the cache, most drafts are accepted.", quarter.alpha > 0.6, of_model=True)

# %% [markdown]
# The first claim is a good first test of a self-drafter: with a budget for everything, *any* rejected draft is a bug.
# (In an engine whose forward over one token rounds differently from one over several, near-ties are excepted.) It does
# not find every mistake, as Break it shows.
#
# ### Exercise 4: let the prompt choose
#
# A window is blind to everything older. In the prompt below, a function is defined, then comes other code, and then the
# text begins to call the function: `if check_zeb`. The rest of the name stands far back. SnapKV (Li et al. 2024) looks
# at what the *last queries of the prompt* attended to, and keeps that: what they needed, the next tokens will need. (It
# chooses tokens, for each layer and KV head. One block table serves all layers and heads here, so the attention is
# summed over both, and whole blocks are chosen. This is coarser, so the curves below are no verdict on the paper.)
#
# ```text
# attention   [num_queries, n]     sum over the queries → one number per token → sum over each block → choose blocks
#
# blocks 0 … count - 1     ░ ░ █ ░ ░ ░ ▒ ░ | ▓ ▓          most = 4: two for the window (the newest), two by attention
# kept                         2       6   | 8 9
# ```


# %%
def snapkv_blocks(attention: torch.Tensor, block_size: int, count: int, most: int) -> list[int]:
    """Return which of the blocks 0 … count - 1 a drafter reads, ascending: `most` of them, or all if there are no more.

    attention: [num_queries, n] attention weights of the prompt's last queries to its n tokens, summed over layers and
               heads
    count:     full blocks before the newest token's block; the text may have grown beyond the prompt, and tokens behind
               the prompt count as 0 (if n is larger than count · block_size, ignore the rest)
    most:      at least 1

    The newest most // 2 blocks are the window. The others are those of the blocks before the window that got the most
    attention in sum, the earlier of equals.

    Example: attention [[0.5, 0.1, 0.1, 0.3, 0, 0]], block_size 1, count 6, most 3 gives [0, 3, 5].
    """
    ### BEGIN SOLUTION
    if count <= most:
        return list(range(count))
    of_tokens = attention.sum(0)
    of_blocks = F.pad(of_tokens, (0, count * block_size - len(of_tokens))).view(count, block_size).sum(1)
    window = most // 2
    best = of_blocks[: count - window].argsort(descending=True, stable=True)[: most - window]
    return sorted(best.tolist()) + list(range(count - window, count))
    ### END SOLUTION


# %%
check("l12.snapkv_blocks")

# %%
my_choice = use("l12.snapkv_blocks")


def snapkv(budget: int, queries: int = 32) -> views.View:
    """The view of your choice of blocks by the last `queries` of the prompt, of at most `budget` tokens."""
    return views.chosen(
        lambda attention, size, count, most: my_choice(attention[-queries:], size, count, most),
        BLOCK,
        budget // BLOCK - 1,
    )


far, SMALL = views.far_definition(llm), 6 * BLOCK
decode = llm.engine.tokenizer.decode
right = views.draft_with(llm, [far.token_ids], views.whole, GAMMA, 12)
print(f"the target writes: check_zeb{decode(right.run.outputs[0])}".split("\n")[0])
found, rows = {}, []
drafts_over = {
    "sink and window": sinks(SMALL),
    "SnapKV, 32 queries": snapkv(SMALL),
    "SnapKV, 8 queries": snapkv(SMALL, queries=8),
}
for name, view in drafts_over.items():
    found[name] = views.draft_with(llm, [far.token_ids], view, GAMMA, 12)
    blocks = [block for block in llm.engine.drafter.read[0] if block <= (len(far.token_ids) - 1) // BLOCK]
    first, after = found[name].first_draft, "check_zeb" + decode(right.run.outputs[0][:1])
    passed, judged = found[name].counts
    is_right = first[0] == right.run.outputs[0][1]  # its first draft, the next part of the name
    text = f"after “{after}” it drafts “{decode(first)}”; in all, {passed} of {judged} drafts accepted"
    rows.append(BlockView(name, blocks, text.replace("\n", "⏎"), is_right))
    print(f"{name:18} reads blocks {blocks}: {passed} of {judged} drafts accepted")
reads_it = [bool(set(far.blocks) & set(row.blocks)) for row in rows]
print(f"the definition is in block {far.blocks[0]}")
claim(
    "By the last eight queries, SnapKV keeps a block of the definition. By the last 32 it does not, nor does the window.",
    reads_it == [False, False, True],
    of_model=True,
)
claim(
    "With equal budgets, the view with the definition gets more of its drafts accepted.",
    found["SnapKV, 8 queries"].alpha > max(found[name].alpha for name in list(drafts_over)[:2]),
    of_model=True,
)

# %% tags=["expected"] alt="On top, bars: the attention that each block got from the last eight queries; the block with the definition, far on the left, is marked. Below, three rows of blocks, all with the first block and the newest ones. Sink and window, and SnapKV over 32 queries, leave out the definition's block. SnapKV over 8 queries reads it, and more of its drafts are accepted."
observed = llm.engine.drafter.attention[tuple(far.token_ids)][-8:].sum(0)
of_blocks = [float(observed[i : i + BLOCK].sum()) for i in range(0, len(observed), BLOCK)]
ViewedBlocks(of_blocks, rows, {far.blocks[0]: far.definition})

# %% [markdown]
# Where the definition is needed, the window's drafter fails: it drafts another name. The target repairs it, at the
# price of a round that yields fewer tokens.
#
# SnapKV finds the definition only if it observes the right queries. The beginning of the call is only a few tokens. The
# queries of these tokens attend to the definition. Most of the last 32 queries belong to the code before, and the sum
# over all 32 follows them. So the number of observed queries is a setting that matters. The engine's `self_sparse`
# observes 32, and so does the curve below. (The bars show the attention of the last eight queries. That of the first
# block is high, too. In longer texts it is not, as the numbers below say.)
#
# ### See: how much cache must a drafter read?
#
# Now on the long prompts, at equal budgets: sinks and window, SnapKV, and the newest blocks alone. The dashed line is the
# bundled draft model, a tenth of the target's size, on two of these prompts.


# %% tags=["expected"] alt="Three lines over the number of cached tokens that a drafter reads: they rise steeply up to 256 tokens, stay almost level, and meet at 100% for the whole context. The dashed line of the separate draft model lies above the points of the smallest budget and below all points from 256 tokens on. Small bars below show which part of the cache each budget is."
def newest(budget: int) -> views.View:
    """The newest blocks alone, without a sink."""
    return views.chosen(
        lambda attention, size, count, most: list(range(max(0, count - most), count)), BLOCK, budget // BLOCK - 1
    )


budgets = sorted({2 * BLOCK, 4 * BLOCK, LIMIT // 8, LIMIT // 4, LIMIT // 2, LIMIT})
sweep = {
    name: [views.draft_with(llm, prompts, view(budget), GAMMA, NEW) for budget in budgets]
    for name, view in (("sink and window", sinks), ("SnapKV", snapkv), ("newest alone", newest))
}
small = LLM(NAME, speculative_config={"method": "draft_model", "model": DRAFT, **drafting}, **SIZE)
separate = views.draft_with(small, prompts[:2], None, GAMMA, NEW)
del small
BudgetAcceptance(
    [
        BudgetLine(
            name,
            budgets,
            [point.alpha for point in points],
            [min(point.rates) for point in points],
            [max(point.rates) for point in points],
        )
        for name, points in sweep.items()
    ],
    LIMIT,
    ("separate draft model", separate.alpha),
)

# %%
alphas = {name: [point.alpha for point in points] for name, points in sweep.items()}
print("budget          ", "".join(f"{budget:8}" for budget in budgets))
for name, values in alphas.items():
    print(f"{name:16}", "".join(f"{value:8.0%}" for value in values))
half, eighth = budgets.index(LIMIT // 2), budgets.index(LIMIT // 8)
for name in ("SnapKV", "newest alone"):
    wins = sum(x > y for x, y in zip(alphas[name], alphas["sink and window"], strict=True))
    print(f"{name} is better than sink and window at {wins} of {len(budgets)} budgets")
seen = torch.stack([llm.engine.drafter.attention[tuple(ids)].sum(0) for ids in prompts])
count = len(prompts[0]) // BLOCK
shares = (seen / seen.sum(1, keepdim=True))[:, : count * BLOCK].view(len(prompts), count, BLOCK).sum(2).mean(0)
print(
    f"the first block gets {float(shares[0]):.1%} of the attention; an even share would be {BLOCK / len(prompts[0]):.1%}"
)
print(f"(the median of the other blocks in the first half: {float(shares[1 : count // 2].median()):.1%})")
claim("With the whole context, every view accepts everything.", all(values[-1] == 1 for values in alphas.values()))
claim("The text never changes.", all(p.run.outputs == whole.run.outputs for points in sweep.values() for p in points))
claim(
    "A drafter over an eighth of the cache agrees with the target more often than not, whatever the view.",
    min(values[eighth] for values in alphas.values()) > 0.5,
    of_model=True,
)
claim(
    "At the smallest budget, the block before the newest token's is the best choice.",
    alphas["newest alone"][0] > max(alphas["sink and window"][0], alphas["SnapKV"][0]),
    of_model=True,
)
claim(
    "Half of the cache beats the smallest budget, for every view.",
    all(values[half] > values[0] for values in alphas.values()),
    of_model=True,
)
claim(
    "Half of the cache beats a separate draft model.",
    min(values[half] for values in alphas.values()) > separate.alpha,
    of_model=True,
)

# %% [markdown]
# How to read it:
#
# * **Most of what decides the next token is near.** A small part of the cache is enough for most tokens. That is why such
#   drafters work at all.
# * **On these texts the views differ little.** From a budget of 64 tokens on, the three rows are within a few percentage
#   points of each other, too little to rank them by about a hundred judged drafts each. SnapKV gains nothing from
#   its choice here, and the blocks chosen by attention make its window shorter.
# * **At the smallest budget** a view has two blocks: the newest token's block and one more. The block before it is the
#   best choice. Sink and window takes the first block instead, and loses.
# * **The sink** matters for models that give the first tokens a large part of the attention. The two lines above the check
#   marks say how much this one gives, in texts of this length. Its first block gets more than most old blocks, but less
#   than an even share, because most of the attention goes to the newest blocks. That is hardly a sink. So the rows "sink
#   and window" and "newest alone", which differ in nothing else, are close from 64 tokens on. (The papers measured models
#   hundreds of times as large.)
#
# ### Exercise 5: two levels of bits
#
# A view leaves out tokens. One can also leave out *bits*. QuantSpec (Tiwari et al. 2025) stores each number in two codes of
# four bits: the **upper** [nibble](glossary.md#nibble) alone is an INT4 cache, both together are about as good as INT8.
# The drafter reads the upper one, the target both, and nothing is stored twice:
#
# $$x \approx \text{zero} + \text{scale} \cdot \left(u + \frac{l}{16}\right) \qquad u \in 0 \ldots 15,\quad l \in -8 \ldots 7$$
#
# The upper code is the *nearest* step, so the rest lies between −½ and ½ steps, and the lower code counts it in
# sixteenths. (If an 8-bit code is simply split, its upper half is rounded *down*: read as it is, the drafter is off by
# up to a whole step, always to the same side, unless the reader adds half a step. The nearest step is an ordinary INT4
# code.)


# %%
def two_levels(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper codes 0 … 15 and the lower codes -8 … 7 of x, both int8.

    x:           [..., n]
    scale, zero: [..., 1], one for each group of n numbers: x is between zero and zero + 15 scale, but for rounding

    Ties round to the even number, as torch.round does. Limit the upper code first: the lower one counts what the
    limited upper code leaves over, and is then limited, too.

    Example: scale 2, zero 1: x = 8.25 is 3.625 steps above zero: upper 4, rest -0.375 steps, lower -6.
    """
    ### BEGIN SOLUTION
    steps = (x - zero) / scale
    upper = steps.round().clamp(0, 15)
    lower = ((steps - upper) * 16).round().clamp(-8, 7)
    return upper.to(torch.int8), lower.to(torch.int8)
    ### END SOLUTION


# %%
check("l12.two_levels")

# %%
my_levels = use("l12.two_levels")
x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
zero = x.amin(-1, keepdim=True)
scale = (x.amax(-1, keepdim=True) - zero) / 15
upper, lower = my_levels(x, scale, zero)
read = {"upper": zero + scale * upper, "both": zero + scale * (upper + lower / 16)}
error = {name: (x - value).abs() / scale for name, value in read.items()}
for name, steps in error.items():
    print(f"{name:6} worst error {float(steps.max()):.4f} of a step, mean {float(steps.mean()):.4f}")
claim("Upper nibbles: at most half a step.", float(error["upper"].max()) <= 0.5001)
claim("Both: at most a sixteenth of a step.", float(error["both"].max()) <= 1 / 16 + 1e-4)
claim(
    "More than nine of ten numbers are within a thirty-second.",
    float((error["both"] <= 1 / 32 + 1e-4).float().mean()) > 0.9,
)
claim(
    "The upper nibbles are centred: errors to both sides cancel.",
    abs(float(((x - read["upper"]) / scale).mean())) < 0.01,
)

# %% [markdown]
# (The worst case is a rest of exactly + ½ steps, for which the lower code would have to be 8.)
#
# Your codes in the engine: the layout `paged_two_level` with your function inside, and the engine's own. Then three
# drafters of the method `self_quant`: only the drafter's weights in four bits, only its cache, or both. The engines run
# in plain PyTorch here, because your function cannot be compiled into the step. (The paper quantises keys per channel,
# in groups of 128 tokens, and keeps the newest tokens in 16 bits. This layout quantises each token as it comes, so the
# numbers below are no verdict on the paper.)

# %%
from minillm.teaching.workshop import l12_levels as levels

EAGER = {**SIZE, "enforce_eager": True}
TWO = {"kv_cache_config": {"layout": "paged_two_level"}}
short = views.long_prompts(llm, 3, 128)
own_weights = {"method": "self_quant", "quantization": None, **drafting}
int4_weights = {"method": "self_quant", "quantization": "int4", **drafting}
engines = {
    "your codes": {"kv_cache_config": {"layout": levels.layout_with(my_levels)}, "speculative_config": own_weights},
    "4-bit cache": {**TWO, "speculative_config": own_weights},
    "4-bit weights": {**TWO, "kv_cache_config": {"layout": "paged"}, "speculative_config": int4_weights},
    "both": {**TWO, "speculative_config": int4_weights},
}
quantised = {
    name: views.draft_with(LLM(NAME, **options, **EAGER), short, None, GAMMA, 24) for name, options in engines.items()
}
for name, accepted in quantised.items():
    passed, judged = accepted.counts
    print(f"{name:14} {passed:3} of {judged:3} accepted, {accepted.run.tokens_per_forward:.2f} tokens per forward")
print("(so few drafts are rejected that these rows cannot be ranked)")
claim(
    "Your codes give the same text and the same acceptance as the engine's.",
    quantised["your codes"].run.outputs == quantised["4-bit cache"].run.outputs
    and quantised["your codes"].rates == quantised["4-bit cache"].rates,
)
claim(
    "More than 80% are accepted, whatever is in four bits.",
    min(a.alpha for a in quantised.values()) > 0.8,
    of_model=True,
)

# %% [markdown]
# **Lossless compared with what?** The drafts cost nothing in quality: the text is that of the target over *this* cache. But
# the target itself now reads 8-bit numbers. So the reference of QuantSpec is a target with an INT8 cache, not one in full
# precision. How far do these caches move the target's distribution?

# %%
caches = {"two levels": TWO, "INT8": {"kv_cache_dtype": "int8"}, "INT4": {"kv_cache_dtype": "int4"}}
plain = LLM(NAME, **EAGER)
reference = [levels.log_probs(plain, ids) for ids in short]
del plain
kl = {}
print("cache        KL to full precision")
for name, options in caches.items():
    target = LLM(NAME, **options, **EAGER)
    rows_of = [levels.log_probs(target, ids) for ids in short]
    kl[name] = sum(map(levels.mean_kl, reference, rows_of)) / len(short)
    print(f"{name:12} {kl[name]:20.6f}")
claim("Two levels are about as near to full precision as INT8.", kl["two levels"] < 3 * kl["INT8"], of_model=True)
claim("INT4, what the drafter reads, is much farther away.", kl["INT4"] > 10 * kl["two levels"], of_model=True)

# %% [markdown]
# ## Measure
#
# ### On a GPU, by the model
#
# MagicDec's formula is that of lesson 11 with the three forwards spelled out. T_SD is the time of a token with drafts;
# T_D, T_V and T are the times of a draft step, of the verification and of a plain step, and Ω is the mean number of
# tokens of a round, τ in lesson 11:
#
# $$\frac{T_{SD}}{T} = \frac{1}{\Omega}\left(\gamma\,\frac{T_D}{T} + \frac{T_V}{T}\right)$$
#
# Your `step_seconds` gives all three. The acceptance is the one measured above with a view of an eighth of the context,
# 256 tokens, by the better of the two views of the papers. For Llama it is an assumption, a high one, and so is that
# it stays the same as the context grows. γ is the best of 1 to 8. A line ends where weights and cache no longer fit into
# 80 GB, or at 131,072 tokens, Llama's longest context.

# %% tags=["expected"] alt="Modelled speed-up over the context for 1, 8, 32 and 128 requests. Each line begins near 1 and rises with the context; with more requests it rises earlier, but it also ends earlier, where the memory is full."
BUDGET = 257  # one sink and a window of 256, about the budget of MagicDec's example
alpha = max(alphas["sink and window"][eighth], alphas["SnapKV"][eighth])


def best_speed_up(batch: int, context: int) -> float:
    """Of 1 to 8 drafts, the fastest."""
    omega = [sum(alpha**i for i in range(gamma + 1)) for gamma in range(9)]
    return max(
        costs.speed_up(my_seconds, omega[gamma], gamma, batch, context, BUDGET, LLAMA_8B, H100) for gamma in range(1, 9)
    )


reach = {batch: min(131_072, costs.most_context(batch, LLAMA_8B, H100)) for batch in (1, 8, 32, 128)}
gains = {}
for batch, most in reach.items():
    points = [context for context in (512 * 2 ** (i / 2) for i in range(17)) if context < most] + [most]
    gains[batch] = [round(context) for context in points], [best_speed_up(batch, round(context)) for context in points]
LineChart(
    f"Llama-3.1-8B on an H100 drafts over {BUDGET} of its own cached tokens (modelled, acceptance {alpha:.0%})",
    Axis("context of each request, in tokens", log=True, ticks=(512, 2048, 8192, 32_768, 131_072)),
    Axis("speed-up over plain decoding"),
    [Series(f"{batch} request{'s' * (batch > 1)}", *gain, style="modelled") for batch, gain in gains.items()],
    "; ".join(
        f"batch {batch}: {ups[0]:.2f} at {at[0]} tokens, {ups[-1]:.2f} at {at[-1]}"
        for batch, (at, ups) in gains.items()
    ),
)

# %%
print("speed-up, modelled    " + "".join(f"{context:>13,}" for context in (1024, 4096, 15_000)))
table = {}
for batch in reach:
    row = []
    for context in (1024, 4096, 15_000):
        table[batch, context] = best_speed_up(batch, context) if context <= reach[batch] else None
        row.append("does not fit" if table[batch, context] is None else f"{table[batch, context]:.2f}×")
    print(f"{batch:4} request{'s' if batch > 1 else ' '}         " + "".join(f"{text:>13}" for text in row))
claim("A longer context raises the gain, for every batch.", all(ups[-1] > ups[0] for _, ups in gains.values()))
claim("At 4,096 tokens, eight requests gain more than one.", table[8, 4096] > table[1, 4096])
claim("At 15,000 tokens, 32 requests gain more than eight.", table[32, 15_000] > table[8, 15_000])
claim("One request with 4,096 tokens gains next to nothing, or loses.", table[1, 4096] < 1.1)
claim(
    "128 requests gain below the break-even context of four drafts: at 1,024 tokens, half of it.",
    table[128, 1024] > 1.2 and my_break_even(5, LLAMA_8B, H100) > 2 * 1024,
    of_model=True,
)

# %% [markdown]
# This turns lesson 11's rule upside down: *there*, a larger batch took away most or all of what drafts gain. With long
# contexts they gain more, because what the drafter does not read grows with the batch. It also shows the limit: with
# several requests, a line ends where weights and cache fill the memory. Several GPUs that share weights and cache go
# further.
#
# ### What other drafters read
#
# Two trained drafters take the same idea further. SPIRe's drafter is a quarter of the target's layers with a short window;
# LongSpec's is a single layer, which attends to the target's last-layer cache. What does each read per drafted token?

# %%
print(
    f"{'GB that a draft step reads (Llama-3.1-8B, 32 requests, modelled)':62}"
    + "".join(f"{c:>9,}" for c in (1024, 4096, 15_000))
)
reads = {kind.name: [kind.read(32, context) / 1e9 for context in (1024, 4096, 15_000)] for kind in costs.DRAFT_KINDS}
for name, gigabytes in reads.items():
    print(f"  {name:60}" + "".join(f"{value:9.1f}" for value in gigabytes))
view_of_257, quant = (next(v for n, v in reads.items() if paper in n) for paper in ("MagicDec", "QuantSpec"))
claim("With short contexts, four bits of everything save more than a view does.", quant[0] < view_of_257[0])
claim("With long contexts, the view saves more.", view_of_257[2] < quant[2])
quoted(
    "MagicDec: up to 2.51× for Llama-3.1-8B with 32 to 256 requests (in an earlier version 1.84×, on 8 A100 GPUs)",
    "Sadhukhan et al. 2024, arXiv 2408.11049v5 and v3",
)
quoted(
    "QuantSpec: over 90% accepted, up to about 2.5× faster, 1.3× less memory than drafting over a sparse cache",
    "Tiwari et al. 2025",
)
quoted("LongSpec: up to 3.26×, trains a drafter of one layer", "Yang et al. 2025")
quoted("SPIRe: over 35% more throughput than MagicDec, modelled; trains", "Neelam et al. 2025")

# %% [markdown]
# | drafter | reads of the weights | reads of the cache, per drafted token | trained |
# |---|---|---|---|
# | view: sinks and window, SnapKV (MagicDec) | all | a fixed number of tokens, in all layers | no |
# | upper nibbles (QuantSpec) | all, in four bits | all tokens, the upper four of eight bits | no |
# | SPIRe | its own copy of a quarter of the layers, and the output layer | 65 tokens, in those layers; older ones as the target computed them | yes |
# | LongSpec | one layer of its own, and the output layer | 512 tokens of its own layer, and all tokens of the target's last layer | yes |
#
# Four bits are counted as 4.25: a scale and a zero point, each of 16 bits, are stored for every 128 numbers.
#
# The numbers above say why there is more than one of them. The trained drafters read least; their price is the training.
# Of the two without training, four bits of everything read less at shorter contexts, because a view still reads all weights in
# full. The view reads less at longer contexts, because its part of the cache does not grow.
#
# SPIRe's claim is itself modelled. Here is such a model with your `step_seconds`: the bytes are those of the table above,
# and the tokens per round are quoted. The paper counted them with a target of eight layers and views of its own, so for
# Llama and the view of 257 tokens above they are an assumption.

# %%
quoted(
    "SPIRe: 3.40 tokens per round with four drafts, MagicDec 3.89; modelled for 64 requests of 512 tokens",
    "Neelam et al. 2025",
)
contexts = (512, 1024, 2048, 4096)
print("speed-up, 64 requests, modelled" + "".join(f"{context:>9,}" for context in contexts))
gain_of = {}
for paper, omega in (("MagicDec", 3.89), ("SPIRe", 3.40)):
    kind = next(kind for kind in costs.DRAFT_KINDS if paper in kind.name)
    for context in contexts:
        plain_step, verify = (my_seconds(64, rows, context, LLAMA_8B, H100) for rows in (1, 5))
        draft = kind.read(64, context) / H100.bandwidth  # one row per request, so it waits for memory
        gain_of[paper, context] = omega * plain_step / (4 * draft + verify)
    print(f"  {paper:29}" + "".join(f"{gain_of[paper, context]:8.2f}×" for context in contexts))
lead = [gain_of["SPIRe", context] / gain_of["MagicDec", context] for context in contexts]
print(f"  {'SPIRe over MagicDec':29}" + "".join(f"{100 * (ratio - 1):8.0f}%" for ratio in lead))
claim("SPIRe leads by about 100% with 512 tokens and by about 50% with 4,096.", lead[0] > 1.9 and 1.4 < lead[-1] < 1.6)
claim("The longer the context, the smaller the lead.", lead == sorted(lead, reverse=True))

# %% [markdown]
# At 512 tokens a step reads mostly weights. MagicDec's drafter reads all of them, SPIRe's less than a third. As the
# context grows, the weights count for less.
#
# ### On this machine
#
# Now the three forwards with the clock, one request, with one of the long prompts above; from them and from the
# counted tokens per round, what the formula promises; and beside it the whole engine, timed with and without drafts in turn.

# %% tags=["nbval-ignore-output"]
from minillm.speculative.draft_policy import FixedDrafts
from minillm.teaching.workshop.l11_drafting import run

ids = prompts[0]
taken = views.step_times(engine, ids, sinks(QUARTER), GAMMA)
over_all = views.step_times(engine, ids, views.whole, GAMMA)
c, v = taken.draft / taken.plain, taken.verify / taken.plain
given = [{"prompt_token_ids": ids} for ids in prompts[:2]]
run(engine, given, FixedDrafts(0), batch=1, new_tokens=4)  # the prompts enter the prefix cache
clock = {count: [] for count in (0, GAMMA)}
for _ in range(3):
    for count, seconds_of_runs in clock.items():
        last = run(engine, given, FixedDrafts(count), batch=1, new_tokens=NEW)
        seconds_of_runs.append(last.seconds)
measured = min(clock[0]) / min(clock[GAMMA])
print(f"a draft step costs c = {c:.2f} plain steps (over the whole cache {over_all.draft / over_all.plain:.2f})")
by_bytes = (weights + QUARTER * kv_bytes) / (weights + len(ids) * kv_bytes)
print(f"by the bytes that it reads it would be {by_bytes:.2f}")
print(f"verifying {GAMMA} drafts costs v = {v:.2f}")
promised = last.tokens_per_forward / (GAMMA * c + v)
print(f"{last.tokens_per_forward:.2f} tokens per forward: promised {promised:.2f}×, measured {measured:.2f}×")
reveal("l12.draft", round(c, 2))
claim("A draft over a quarter of the cache costs more than a third of a plain step.", c > 1 / 3, measured=True)
claim("Over the whole cache it costs more.", over_all.draft > taken.draft, measured=True)
claim("The formula comes within a third of the clock.", abs(promised / measured - 1) < 1 / 3, measured=True)
claim(
    "The speed-up is less than half of the tokens per forward.", measured < last.tokens_per_forward / 2, measured=True
)

# %% [markdown]
# Promise and clock need not agree. The formula knows only the three forwards, each timed alone. The engine's runs also pay for
# Python, once per step, and with drafts there are fewer steps. And other work on the machine may slow any of these times.
#
# Where this lesson was recorded, the speed-up is far below the tokens per forward. The acceptance is high, but so are
# the prices: a round takes γc + v plain steps. v depends on how much of the processor's arithmetic is idle in a plain
# step: where little is, four rows cost much more than one. And c is high, because a draft step reads all the weights,
# and at this context they are more bytes than the cache. Where c is below what the bytes say, there are two reasons. All
# drafts of a round are one call of the compiled step, so even a draft step over the whole cache may be cheaper than a
# plain step. And attention also computes, so a cached token may cost more time than its bytes; the table of steps at the
# beginning shows whether it does here. Compare the two prices of a draft step: their difference is what the view saves.
#
# ## Break it
#
# Four mistakes in a self-drafter. **Guess first**: which of them changes the text? Which would you notice? The columns
# show, for a small budget, whether the text is still the target's and the acceptance; and the acceptance with a budget
# for the whole context.
#
# * **verifies over the view**: the target judges the drafts over the same shortened block table.
# * **positions of the view**: drafts get their positions in the view, not those in the text.
# * **no rollback**: the next round drafts behind *all* drafts of the last one, the rejected ones included.
# * **window of one token**: the view has room for one new token, so each draft takes the place of the one before it.

# %%
from minillm.teaching.workshop.l12_broken import MISTAKES

TIGHT, FEW = 6 * BLOCK, prompts[:3]
outcome = {}
print("                          text is the target's   accepted: small budget   whole context")
for name, mistake in MISTAKES.items():
    results = []
    for budget in (TIGHT, LIMIT):
        with mistake(llm, sinks(budget), GAMMA) as view:
            results.append(views.draft_with(llm, FEW, view, GAMMA, NEW))
    same = results[0].run.outputs == whole.run.outputs[: len(FEW)]
    outcome[name] = same, results[0].alpha, results[1].alpha
    print(f"{name:25} {'yes' if same else 'NO':>20} {results[0].alpha:24.0%} {results[1].alpha:15.0%}")
claim(
    "Only verifying over the view changes the text.",
    [name for name, row in outcome.items() if not row[0]] == ["verifies over the view"],
    of_model=True,
)
claim("And it accepts every draft: the acceptance is too good.", outcome["verifies over the view"][1] == 1)
claim(
    "A drafter that does not see its own drafts is found by the budget for everything.",
    outcome["window of one token"][2] < 1,
    of_model=True,
)
claim(
    "Wrong positions, and drafts that do not see each other, are accepted less often.",
    max(outcome[name][1] for name in ("positions of the view", "window of one token")) < outcome["right"][1],
    of_model=True,
)

# %% [markdown]
# * **Verifying over the view, too** gives the text of another model: the one that sees only the view. Nothing warns you; the
#   acceptance is perfect. Only a comparison with plain decoding finds it.
# * **Mistakes in drafting never change the text.** Wrong positions make the drafter worse with a small budget. Rejected
#   drafts that stay in the view hardly show here, because few drafts are rejected. With a budget for everything neither
#   shows: nothing is left out, and nothing is rejected. And a lower acceptance alone does not tell you that there is a
#   mistake. They are found by comparing with a reference, as the cell after exercise 3 does with the acceptance of
#   every prompt; comparing the drafts themselves is stricter.
# * **A window of one token** shows with a budget for everything, too: a drafter that does not see its own drafts of the
#   round is not the target, whatever else it reads. There, every acceptance below 100% is a mistake.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | MagicDec | StreamingLLM or SnapKV as the drafter's cache, a separate, compacted one; in its example a budget of 256 tokens and three drafts |
# | vLLM | caches of 8 bits (FP8, INT8) and fewer (INT4, NVFP4; TurboQuant: 4 and 3), and windows for models trained with them; its drafts come from other methods, among which there is no view of the target's cache |
# | SGLang | drafts by trained layers (EAGLE, multi-token prediction), a draft model or n-grams |
# | transformers | another self-drafter: the target's first layers (`assistant_early_exit`), in models trained for it |
# | llama.cpp | with `--context-shift` and `--keep`, the first tokens and the newest as the *only* cache |
# | minillm | `self_sparse` (a shortened block table, no second cache), `self_quant` with the layout `paged_two_level` |
# | StreamingLLM | sinks and window as the *only* cache: constant memory, but what has left the window is lost |
#
# The difference between a drafter's view and the *only* cache matters: as the only cache, a window changes the text. As a
# drafter's view it never does.
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | speculation does not help large batches | true where the context is a small part of the break-even context for this number of drafts. By the model the gain begins below it: 128 requests gain at half of it. Whether a round pays depends on the price of drafting, too | exercise 2, On a GPU |
# | a few sinks and a window suffice | a window suffices for most tokens, not where something far back is needed; whether the sink helps depends on how much attention it gets | exercise 4, See |
# | self-speculation gives 2.5× | where the cache outweighs the weights; in the model above that takes several requests with very long contexts, or very many with shorter ones. On this machine, with one request, the gain is far smaller | Measure |
# | QuantSpec is lossless, and takes 1.3 times less memory | lossless compared with a target over an 8-bit cache; the memory was not compared | exercise 5 |
# | SPIRe: over 35% more throughput than MagicDec, over 100% more than a small draft | by a model for Llama it is 102% with 512 tokens, and 52% with 4,096. The small draft, and contexts that differ between requests, were not modelled | What other drafters read |
#
# **Papers.** Sadhukhan et al. 2024, *MagicDec*. Xiao et al. 2024, *Efficient Streaming Language Models with Attention
# Sinks*. Li et al. 2024, *SnapKV*. Tiwari et al. 2025, *QuantSpec*. Yang et al. 2025, *LongSpec*. Neelam et al. 2025, *SPIRe*.
#
# ## Recap
#
# 1. A step reads the weights once and the cache of every request. Beyond the break-even context, verification waits for
#    memory at any batch size, so further rows are nearly free.
# 2. A view is a shortened block table: nothing is copied, positions stay true, and the text is the target's.
# 3. A window is enough for most tokens; SnapKV finds what the prompt's last queries needed, unless too many others are
#    summed with them.
# 4. Two levels of four bits: the drafter reads one, the target both. Its reference is the 8-bit cache.
# 5. A drafter can save only what it does not read. By the model, there is little to gain where the weights are several
#    times the cache.
#
# **Next:** in lesson 13 the compressed cache is the only one: what may be lost, and what does that save?
