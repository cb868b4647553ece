# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 6. Paged blocks
#
# **Question.** *How can a hundred requests share one memory, when nobody knows how long any of them will become?*
#
# A request says how long its prompt is. How long its answer will be is not known until the model ends it. Lesson 2 gave
# every text a buffer as long as it could ever become. With one user that is fine. With a hundred, most of the memory is
# reserved for words that will never be written.
#
# Operating systems met this problem sixty years ago and answered it with *pages*: memory is cut into small pieces of
# one size, and a table per process says which piece comes after which. In this lesson you build that for keys and
# values: the allocator, the table, and attention through the table. Tables make two more things possible: requests can
# **share** blocks with equal contents, and a copy is made only **[on writing](glossary.md#copy-on-write)**. Your code
# runs inside the engine while you watch its blocks.
#
# You need lesson 2 (what a row of the cache is). Everything runs on a laptop's CPU. The engine runs its steps in plain
# PyTorch here (`enforce_eager=True`), so that your attention can replace its own and both are compared on equal terms.
# (By default the engine runs a compiled step, which lesson 15 uses.)

# %%
import os

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM, SamplingParams
from minillm.bench.prompts import held_out_prompts
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.teaching.workshop.l06_pools import average_waste, examine
from minillm.viz import CachePagesView, LiveView
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # any Llama, Mistral, Qwen or SmolLM checkpoint works too
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
prompts = [p.prompt for p in held_out_prompts(24)]
PLAIN = {"enforce_eager": True}  # plain PyTorch, operation by operation
llm = LLM(NAME, **PLAIN, enable_prefix_caching=False)
config, tokenizer = llm.engine.runner.model.config, llm.engine.tokenizer
CONTEXT = llm.max_model_len
TOKEN_BYTES = 2 * config.num_layers * config.kv_size * 4
print(f"{NAME}: {TOKEN_BYTES:,} bytes of keys and values per token (lesson 2), context {CONTEXT}")

# %% [markdown]
# ## The question, in numbers
#
# Twenty-four requests, with prompts cut from real source files. How many tokens do they hold at the end, and how many
# would be *reserved* if each got a buffer for the whole context, as lesson 2 would do it?

# %%
lengths = [len(tokenizer.encode(prompt)) + greedy.max_tokens for prompt in prompts]
reserved = len(lengths) * CONTEXT
print(f"tokens in use at the end: {sum(lengths):,}, the longest text {max(lengths)}, the shortest {min(lengths)}")
print(f"tokens reserved: {reserved:,}, so {sum(lengths) / reserved:.0%} of the memory would be used")
claim("Most of the reserved memory would never be used.", sum(lengths) < reserved / 2)

# %% [markdown]
# That is *internal* fragmentation: memory reserved and never filled. Reserving only what a request will need is not
# possible, since the length of the answer is not known; and it would leave holes of odd sizes where other requests have
# ended: *external* fragmentation. With pieces of one size every hole fits every request, and only the last piece of
# each text is partly empty.
#
# ## Predict
#
# Write a number for each before you measure.
#
# 1. With blocks of 16 tokens, how many [slots](glossary.md#slot) does a request [waste](glossary.md#waste) **on
#    average** over its steps?
# 2. Sixty-four requests begin with the same 512 tokens (a system prompt) and go on with 3 of their own. How many
#    prompt tokens must go through the model in all?
# 3. One user alone, nobody to share with: how many times faster does paging make the decoding of that one stream?
#    (An article says 1.6.)

# %%
predict("l06.waste", None, unit="slots")
predict("l06.prefix", None, unit="tokens")
predict("l06.stream", None, unit="times")

# %% [markdown]
# ## Build
#
# ### Exercises 1 and 2: the allocator
#
# The pool is a list of free block ids and, for every block, the number of its owners, its *[reference
# count](glossary.md#reference-count)*. Why a number, when each block is taken by one request? Because soon several
# requests will read the same block.
#
# Two rules make an allocator correct: an allocation happens completely or not at all, and a block returns exactly when
# its last owner releases it.


# %%
def allocate(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    """Take `count` blocks from the end of `free`, each with one owner.

    free:       ids of free blocks; changed in place
    ref_counts: owners of every block of the pool, by id; changed in place
    returns:    the ids in the order taken, or None (and no change) if there are too few

    Example: free = [2, 1, 0], count = 2 gives [0, 1] and leaves free = [2].
    """
    ### BEGIN SOLUTION
    if count > len(free):
        return None
    taken = [free.pop() for _ in range(count)]
    for block in taken:
        ref_counts[block] = 1
    return taken
    ### END SOLUTION


# %%
check("l06.allocate")


# %%
def release(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    """Take one owner from each of these blocks, in order; a block without any left goes to the end of `free`.

    Example: ref_counts = [2, 1], block_ids = [0, 1] leaves ref_counts = [1, 0], and only block 1 becomes free.
    """
    ### BEGIN SOLUTION
    for block in block_ids:
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            free.append(block)
    ### END SOLUTION


# %%
check("l06.release")

# %% [markdown]
# Stuck? `hint("l06.release", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### Exercise 3: where does token 9 live?
#
# All blocks lie side by side in one long tensor of *slots*; block `b` covers slots `b · block_size` up to
# `(b + 1) · block_size - 1`. A request's **[block table](glossary.md#block-table)** lists its blocks in the order of
# its text. Translate.


# %%
def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """The slot of each of the tokens start, start + 1, … start + num_tokens - 1 of a request.

    Example: block_table = [7, 0, 3], block_size = 4: token 0 lies in slot 28, token 4 in slot 0, token 9 in slot 13.
    """
    ### BEGIN SOLUTION
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, start + num_tokens)
    ]
    ### END SOLUTION


# %%
check("l06.slot_mapping")

# %% [markdown]
# ### Exercise 4: attention through the table
#
# Writing is solved: new rows go to their slots. For reading, the rows must be brought into order again, because the
# mask is about positions in the text, not about slots. Gather, then attend as in lesson 2. Read only slots that this
# request has written: all others hold what earlier requests left there, or nothing meaningful at all.


# %%
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k/√d)·v where `mask` (`[num_queries, num_keys]`) allows. All `[tokens, heads, width]`; heads shared."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def gather_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    """Causal attention of a request's newest tokens over all of its tokens.

    q:            [num_new, num_heads, head_dim], the last num_new of the request's seq_len tokens
    keys, values: [num_slots, num_kv_heads, head_dim], the slots of everybody, already holding the new tokens
    returns:      [num_new, num_heads, head_dim]; use `attention` above

    Example: block_table = [3, 1], seq_len = 6, block_size = 4 reads slots 12, 13, 14, 15, 4, 5 in this order.
    """
    ### BEGIN SOLUTION
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    positions = torch.arange(seq_len - len(q), seq_len)
    mask = torch.arange(seq_len)[None, :] <= positions[:, None]
    return attention(q, keys[slots], values[slots], mask)
    ### END SOLUTION


# %%
check("l06.gather_attention")

# %% [markdown]
# ### See: the engine on your code
#
# The engine lets you replace each of these. `block_pool_cls` takes a class with `allocate` and `free`, and
# `ops={"paged_attention": …}` takes a function that attends for a whole batch. Here both call your functions; the rest
# of the engine is the real one: [continuous batching](glossary.md#continuous-batching), [chunked
# prefill](glossary.md#chunked-prefill), preemption.

# %%
from minillm.cache.block_pool import BlockPool

my_allocate, my_release = use("l06.allocate"), use("l06.release")
my_slots, my_attention = use("l06.slot_mapping"), use("l06.gather_attention")


class MyPool(BlockPool):
    """The engine's pool with your allocator."""

    def allocate(self, count: int) -> list[int] | None:
        return my_allocate(self._empty, self._ref_counts, count)

    def free(self, block_ids: list[int]) -> None:
        my_release(self._empty, self._ref_counts, block_ids)


def my_paged_attention(q, keys, values, batch, window=None):
    """Your attention for each request of a batch, one after the other."""
    outputs = []
    for r, (start, end) in enumerate(zip(batch.query_start, batch.query_start[1:], strict=False)):
        table = batch.block_tables[r].tolist()
        outputs.append(my_attention(q[start:end], keys, values, table, batch.seq_lens[r], batch.block_size))
    return torch.cat(outputs)


mine = LLM(
    NAME,
    **PLAIN,
    enable_prefix_caching=False,
    num_kv_blocks=40,
    block_pool_cls=MyPool,
    ops={"paged_attention": my_paged_attention},
)

# %% [markdown]
# The pool has only 40 blocks. Each request's block table is on top, the blocks of the pool below.

# %% tags=["expected"] alt="Cache pages of four requests: each request's block table on top, the physical pages below in the colours of their owners, a usage bar and the wasted slots in numbers."
with mine.trace() as trace, LiveView(CachePagesView(trace), seconds=10):
    outputs = mine.generate(prompts[:4], greedy, use_tqdm=False)

# %%
plain = llm.generate(prompts[:4], greedy, use_tqdm=False)
same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True)]
print(f"{sum(same)} of {len(same)} requests have the same tokens as with minillm's own pool and attention")
print(f"blocks still held at the end: {mine.engine.pool.num_used}")
claim("Your pool and attention change no token, and no block is lost.", all(same) and not mine.engine.pool.num_used)

# %% [markdown]
# Look at the tables at the top of the picture: the blocks of a table need not be consecutive. That is all that
# "non-contiguous" means.
#
# ### Exercise 5: the same beginning
#
# Many requests begin alike: a system prompt, a document, the chat so far. Keys and values depend on nothing but the
# tokens up to their own, so equal beginnings have equal keys and values, and **two tables may point to one block**.
# The question is how to find it.
#
# Give every *full* block a [hash](glossary.md#block-hash) of its contents *and of everything before it*:
#
# $$\text{hash}_i = H(\text{hash}_{i-1},\ \text{tokens of block } i), \qquad \text{hash}_{-1} = H(\text{salt})$$
#
# `block_name(parent, tokens)` and `root_name(salt)` compute it (SHA-256, so that nobody can construct two texts with
# one hash; the hash serves as the block's name). You walk the chain of hashes. Stop at the first that is unknown: after
# a gap nothing can be shared. And leave at least the last token to compute, because its logits are needed.

# %%
from minillm.cache.prefix import block_name, root_name


def find_prefix(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    """Blocks that hold the beginning of the text already, in order; never one that contains the last token.

    known:   hash of a full block → the id of a block with these contents
    returns: block ids, perhaps none

    Example: 12 tokens, block_size 4, all three hashes known: the first two blocks. The third has the last token in it.
    """
    ### BEGIN SOLUTION
    found = []
    parent = root_name(salt)
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = block_name(parent, token_ids[start : start + block_size])
        if parent not in known:
            break
        found.append(known[parent])
    return found
    ### END SOLUTION


# %%
check("l06.find_prefix")

# %% [markdown]
# ### Exercise 6: copy on write
#
# `n=3` asks for three completions of one prompt. They share its blocks, and the last of those is usually only partly
# filled. If one of them wrote into it, it would overwrite what the others read. So before a request writes into a
# block, it makes sure that it is the only owner; if it is not, it moves to a copy.


# %%
def own_block(
    block_table: list[int],
    index: int,
    free: list[int],
    ref_counts: list[int],
    keys: Tensor,
    values: Tensor,
    block_size: int,
) -> None:
    """Make the request the only owner of entry `index` of its block table. Everything is changed in place.

    keys, values: [num_slots, ...]; a new block needs the contents of the old one. There is a free block if one is needed.

    Example: block_table = [0, 1], index = 1, ref_counts = [2, 2, 0, 0], free = [3]
    leaves block_table = [0, 3], ref_counts = [2, 1, 0, 1], free = [], and block 3 holds what block 1 holds.
    """
    ### BEGIN SOLUTION
    old = block_table[index]
    if ref_counts[old] == 1:
        return
    [new] = allocate(free, ref_counts, 1)
    for pool in (keys, values):
        pool[new * block_size : (new + 1) * block_size] = pool[old * block_size : (old + 1) * block_size]
    block_table[index] = new
    release(free, ref_counts, [old])
    ### END SOLUTION


# %%
check("l06.own_block")

# %% [markdown]
# ### See: shared pages
#
# Both run inside the engine through a scheduler (`scheduler_cls`): it asks *your* `find_prefix` which blocks a new request
# can share, and calls *your* `own_block` before a request writes into a shared one.

# %%
from minillm.engine.scheduler import Found, Scheduler
from minillm.trace import BlockCopied, BlocksShared, StepRan

my_find, my_own = use("l06.find_prefix"), use("l06.own_block")


class MyScheduler(Scheduler):
    """The engine's scheduler with your prefix search and your copy on write."""

    cache = None  # the engine's paged cache, set below: own_block copies keys and values in it

    def _find_blocks(self, request):
        if request.fork_of is not None and not request.fork_of.finished:
            return super()._find_blocks(request)  # another completion of a prompt that is in the cache: all of it
        size = self.pool.block_size
        found = my_find(request.token_ids, self.pool._blocks, size, request.cache_salt)
        return Found(found, len(found) * size, "prefix")

    def _copy_on_write(self, request, index, target):
        pool, source = self.pool, request.block_table[index]
        pool.free([target])  # the engine has set a block aside; yours is allocated by your function
        keys, values = (x.transpose(0, 1) for x in (self.cache.keys, self.cache.values))  # [num_slots, layers, …]
        my_own(request.block_table, index, pool._empty, pool._ref_counts, keys, values, pool.block_size)
        self.emit(BlockCopied(request.request_id, source, request.block_table[index]))


# %% [markdown]
# Four requests with one beginning; the last of them asks for three completions.

# %%
beginning = 'class Inventory:\n    """Counts of the things in a shop, by name."""\n\n    def __init__(self):\n        self.counts = {}\n\n'
endings = ["    def add(self, name", "    def remove(self, name", "    def total(self", "    def names(self"]
llm = mine = None  # let go of them: each engine holds its own copy of the weights
sharing = LLM(NAME, **PLAIN, num_kv_blocks=40, scheduler_cls=MyScheduler, enable_prefix_caching=True)
MyScheduler.cache = sharing.engine.runner.cache
several = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3 + [several]

# %% tags=["expected"] alt="Cache pages: the pages of the common beginning carry the outlines of all owners and a reference count; the three completions of the last prompt share its pages except the last one, of which each has a copy."
with sharing.trace() as trace, LiveView(CachePagesView(trace), seconds=10):
    outputs = sharing.generate([beginning + ending for ending in endings], params, use_tqdm=False)

# %%
shared = trace.of(BlocksShared)
computed = sum(w.num_tokens for step in trace.of(StepRan) for w in step.work if w.kind == "prefill")
asked = sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs)
found = sum(e.num_tokens for e in shared)
print(f"{asked} prompt tokens were asked for, {computed} went through the model")
print(
    f"{found} were found: {len(shared)} requests share blocks, {len(trace.of(BlockCopied))} copied one before writing"
)
claim("What was not computed was found.", computed + found == asked)
claim("More than half of the prompt tokens were found.", found > asked / 2)

# %% [markdown]
# A trace can be drawn at any step. Here is the one in which the completions part.

# %%
from minillm.viz import show

step = 0
for event in trace:
    if isinstance(event, BlockCopied):
        break
    step = event.step if type(event).__name__ == "StepStarted" else step
show(CachePagesView(trace), step=step)

# %% [markdown]
# And here are all of them. Press play, or click the picture and use the arrow keys; "as text" says each frame in words.

# %%
from minillm.viz import ReplayWidget

ReplayWidget(CachePagesView(trace))

# %% [markdown]
# The four requests arrived together, when nothing was [cached](glossary.md#cached), and still the beginning was
# computed once. How? A block can be found as soon as it is *scheduled*, not only when it is computed, and every layer
# stores all new keys of the step before it attends. So the second request reads, in the same forward, what the first
# one writes.
#
# ## Measure
#
# ### What blocks waste, and what a size costs
#
# Every request wastes what is left of its last block. We run the 24 requests with different block sizes, and after
# every step compare the slots that are allocated with the slots that are filled. This is counted, not timed, so the
# engine may run its [compiled step](glossary.md#compiled-step) here, which is quicker. (The first time on a machine it
# has to be compiled, which takes up to two minutes behind a progress bar.)

# %%
sharing = MyScheduler.cache = None
SIZES = (1, 4, 16, 64, 256)
measured = {}
for size in SIZES:
    engine = LLM(NAME, block_size=size, enable_prefix_caching=False)
    measured[size] = average_waste(engine, prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    del engine
print("block size   wasted slots per request   filled")
for size, (waste, filled) in measured.items():
    print(f"{size:10} {waste:26.1f} {filled:8.0%}")
reveal("l06.waste", round(measured[16][0], 1))
print(f"a buffer for the whole context, as in lesson 2, would be filled to {sum(lengths) / reserved:.0%}")
short = sum(length - 16 < 256 for length in lengths)
print(f"{short} of the {len(lengths)} texts are shorter than 256 tokens here")
claim(
    "Up to blocks of 64, a request wastes about half a block.",
    all(abs(measured[size][0] - (size - 1) / 2) < size / 10 for size in SIZES[:4]),
)
claim(
    "Of a block of 256 it wastes about two thirds: nearly every text fits into one.",
    0.6 < measured[256][0] / 256 < 0.75,
)

# %% [markdown]
# A text ends anywhere in its last block, so half a block is wasted on average, as long as texts are several blocks long.
# Blocks of 256 are longer than nearly all texts here: then the block is as bad as a buffer.
#
# Small blocks waste little, so why not blocks of one token? Because the table has an entry for every block, the allocator
# works for each of them, every block needs a hash, and a kernel reads 16 neighbouring rows faster than 16 scattered ones.
# (Short blocks have one more advantage: an equal beginning is found to its last full block.) vLLM and this engine use 16.
#
# ### How many requests fit
#
# This is what paging was made for. Give both layouts the same memory, four buffers of a whole context, and ask for all 24
# requests at once. The contiguous one is lesson 2's cache as a layout of this engine.

# %%
budget = 4 * CONTEXT * TOKEN_BYTES
layouts = {"contiguous": {"kv_cache_config": {"layout": "contiguous"}}, "paged": {"enable_prefix_caching": False}}
steps, most, texts = {}, {}, {}
for label, options in layouts.items():
    engine = LLM(NAME, **PLAIN, **options, kv_cache_memory_bytes=budget)
    with engine.trace() as trace:
        texts[label] = [o.outputs[0].token_ids for o in engine.generate(prompts, greedy, use_tqdm=False)]
    steps[label] = len(trace.of(StepRan))
    most[label] = max(len(step.work) for step in trace.of(StepRan))
    del engine
for label in layouts:
    print(f"{label:10}  at most {most[label]:2} requests at once, {steps[label]:3} steps for all 24")
print(
    f"in the same {budget / 2**20:.0f} MiB, paging runs {most['paged'] / most['contiguous']:.0f} times as many at once"
)
claim("Both write the same tokens.", texts["contiguous"] == texts["paged"])
claim(
    "Paging runs several times as many at once, in several times fewer steps.",
    most["paged"] > 3 * most["contiguous"] and 3 * steps["paged"] < steps["contiguous"],
)

# %% [markdown]
# Fewer steps for the same work means that each step serves more requests, and every step reads the weights once
# (lesson 3). The PagedAttention paper reports 2 to 4 times the throughput of other systems (quoted). It comes from this:
# not from faster attention, but from a larger batch in the same memory.
#
# ### Sixty-four requests, one beginning

# %%
shared_llm = LLM(NAME, **PLAIN)
vocabulary = config.vocab_size
head = [7 + i * 31 % (vocabulary - 8) for i in range(512)]
requests = [{"prompt_token_ids": [*head, 1 + i, 2 + i, 3 + i]} for i in range(64)]
one = SamplingParams(temperature=0, max_tokens=1)
with shared_llm.trace() as trace:
    outputs = shared_llm.generate(requests, one, use_tqdm=False)
computed = sum(w.num_tokens for step in trace.of(StepRan) for w in step.work)
print(f"{64 * 515:,} prompt tokens asked for, {computed} computed: 512 + 64 · 3 = {512 + 64 * 3}")
claim("The common beginning is computed once, and each request's own tokens once.", computed == 512 + 64 * 3)
reveal("l06.prefix", computed)

# %% [markdown]
# ### One stream alone
#
# And now the third prediction. One request, nobody to share with, the same engine with its cache in one piece, in
# blocks of 16 and in blocks of 1. The three are timed alternately; only the ratios matter.

# %% tags=["nbval-ignore-output"]
import statistics
import time

shared_llm = None
alone = {
    "in one piece": LLM(NAME, **PLAIN, kv_cache_config={"layout": "contiguous"}, max_num_seqs=1),
    "blocks of 16": LLM(NAME, **PLAIN, enable_prefix_caching=False, max_num_seqs=1),
    "blocks of 1": LLM(NAME, **PLAIN, block_size=1, enable_prefix_caching=False, max_num_seqs=1),
}
clock = time.thread_time if os.name == "posix" else time.perf_counter
brief = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
seconds = {label: [] for label in alone}
for turn in range(6):
    for label, engine in alone.items():
        began = clock()
        engine.generate(prompts[0], brief if turn else one, use_tqdm=False)
        if turn:
            seconds[label].append(clock() - began)
speed = {
    label: statistics.median(a / b for a, b in zip(seconds["in one piece"], seconds[label], strict=True))
    for label in alone
}
for label, ratio in speed.items():
    print(f"{label:13} {ratio:.2f} times the speed of a cache in one piece")
reveal("l06.stream", round(speed["blocks of 16"], 2))
claim(
    "One stream is about as fast in blocks as in one piece, not 1.6 times as fast.",
    all(0.7 < ratio < 1.35 for ratio in speed.values()),
    measured=True,
)

# %% [markdown]
# **Where paging loses.** For one stream it gains nothing: the same numbers are read from more places, and each place must
# be looked up. On a GPU a good kernel hides the look-up, but nothing turns it into a gain. The same holds for requests
# that all have the same length, known in advance: then reserving is exact, and a table is overhead. Paging pays when
# *many* requests of *unknown* length compete for memory. Sharing has a cost, too: requests without a common beginning
# pay a hash per block and find nothing.
#
# ## Break it
#
# Five schedulers with one mistake each. They run eight requests with a common beginning, two of them with two completions,
# in a pool so small that blocks are taken away and used again. Three checks look at each: are the tokens those of every
# request alone; do the books of the pool balance after every step (`check_integrity`: free + used = all, reference
# counts = owners); and is no block left behind at the end? **Guess first:** which mistakes are caught only by tokens,
# and which only by the books?

# %%
from minillm.teaching.workshop.l06_broken import BROKEN

for kind in BROKEN:
    print(f"{kind.__name__:15} {kind.__doc__}")

# %%
alone = engine = None
MIXED = [
    prompt_ids + tail
    for prompt_ids, tail in zip([head[:40]] * 4 + [head[8:40]] * 4, ([1], [2, 3], [4], [5]) * 2, strict=True)
]
TWICE = SamplingParams(temperature=0.7, n=2, seed=3, max_tokens=12, ignore_eos=True)
ONCE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
jobs = [(MIXED[i], TWICE if i in (1, 6) else ONCE) for i in range(8)]
small = {"block_size": 8, "num_kv_blocks": 40}
small["long_prefill_token_threshold"] = 20  # a prompt is computed in pieces of 20 tokens, so a block may be partly full
expected = examine(LLM(NAME, **PLAIN, **small, enable_prefix_caching=False), [[job] for job in jobs]).tokens

# %%
print(f"{'':15} same tokens   books     left behind")
results = {}
for kind in (Scheduler, *BROKEN):
    seen = examine(LLM(NAME, **PLAIN, **small, scheduler_cls=kind), [jobs])
    same = sum(a == b for a, b in zip(seen.tokens, expected, strict=True))
    results[kind.__name__] = (same == len(expected), seen.balanced and not seen.left_behind)
    books = "balance" if seen.balanced else "WRONG"
    print(f"{kind.__name__:15} {same:2} of {len(expected)}      {books:9} {seen.left_behind:3} blocks")
contents = ("NoCopyOnWrite", "EmptyCopy", "SharesHalfFull", "ForgetsParents")
claim("The engine's own scheduler makes no mistake.", results["Scheduler"] == (True, True))
claim(
    "Four mistakes change tokens and leave the books in order.",
    all(results[name] == (False, True) for name in contents),
    of_model=True,
)
claim("The leak changes no token, and only the books show it.", results["Leaks"] == (True, False))

# %% [markdown]
# Mistakes about *contents* leave the books in order, and mistakes about *books* leave every token right, until the pool is
# empty. A paged cache needs both kinds of test. (The engine's own tests drive it through random steps, and check both
# after each.)
#
# **Find the mistakes.** A tutorial's paged cache does this (in our own words): a request's blocks are allocated when
# its first tokens are appended, `⌈tokens / block size⌉` of them, and stored under its id; later appends write "into
# the blocks".
#
# <details><summary>What did you find?</summary>
#
# 1. Nothing remembers how many tokens a request has, so nobody knows which slot is the next one, or when a new block
#    is due. It allocates on the first append only.
# 2. There is no way to release blocks. The pool runs empty and stays empty.
# 3. A second allocation under the same id overwrites the table: the old blocks are neither owned nor free. A leak.
# 4. An allocation that does not fit is an `assert`: the server dies, with every request in it.
#
# </details>
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM | `BlockPool` and `KVCacheManager`: hash chain over full blocks, reference counts, least recently used eviction; `cache_salt` in the request; blocks of 16 |
# | SGLang | `RadixCache`: a tree of token runs instead of a hash chain; finds the longest common prefix at any length |
# | TensorRT-LLM | paged blocks with reuse, and priorities for eviction |
# | llama.cpp | one cell per token, cells shared between sequences with `seq_cp`; copy on write by cell |
# | transformers | a paged cache in `generate_batch`; the ordinary `generate` has one piece per batch |
#
# **Claims, and what is so.**
#
# | claim | what is so | tested where |
# |---|---|---|
# | PagedAttention makes one stream 1.6× faster (a table without batch, hardware or context) | one stream gains nothing; the gain is in how many run together | one stream alone |
# | vLLM with PagedAttention is 2–4× faster than naive pipelines | by batch size, in the same memory: the paper compares it with systems that reserve (quoted) | how many requests fit |
# | a sample paged cache | allocates once, knows no lengths, frees nothing, leaks on re-allocation | just above |
#
# **Why the salt?** If any two requests can share, then the time until an answer comes tells whether *someone else* has sent
# the same beginning before. With a salt per tenant, no block of one tenant is found by another:

# %%
salted, hits = LLM(NAME, **PLAIN), []
for who in ("alice", "bob", "alice"):
    [output] = salted.generate({"prompt": beginning, "cache_salt": who}, one, use_tqdm=False)
    hits.append(output.num_cached_tokens)
    print(f"{who:6} found {hits[-1]:2} of {len(output.prompt_token_ids)} tokens in the cache")
claim("Bob finds nothing of what Alice has sent, and Alice finds it again.", hits[:2] == [0, 0] and hits[2] > 0)

# %% [markdown]
# **Papers.** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*
# (sections 3 and 4 are this lesson). Zheng et al. 2024, *SGLang* (RadixAttention). Gu et al. 2025, *Auditing Prompt
# Caching in Language Model APIs* (why salts exist).
#
# ## Recap
#
# 1. The length of an answer is not known, so reserving wastes most of the memory; blocks of one size waste about half a
#    block per request.
# 2. A block table turns a position into a slot. Allocating, sharing and moving are bookkeeping on tables; keys and
#    values stay where they are.
# 3. Equal beginnings have equal keys: a chain of hashes over full blocks finds them, and reference counts keep them.
#    Leave the last token to compute, and never share a block that is only partly filled.
# 4. Before writing into a shared block, copy it.
# 5. Paging does not make one stream faster. It lets more of them run together.
#
# **Next:** lesson 7 decides *who* runs together: the scheduler.
