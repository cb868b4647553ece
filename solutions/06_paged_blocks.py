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
# **Question.** *How can a hundred requests share one memory, when the final length of each is unknown?*
#
# The length of a prompt is known when its request arrives. The length of the completion is unknown until it ends.
# Lesson 2 gave every request a buffer for the longest possible text. With one user that is fine. With a hundred, most
# of the memory is reserved for tokens that will never be generated.
#
# Operating systems solved this problem sixty years ago with **pages**: memory is divided into small pieces of one size,
# and a table per process lists its pieces in order. In this lesson you build the same for keys and values, whose pages
# are called **blocks**: the allocator, the table, and attention through the table. Tables make two more things
# possible. Requests that begin with the same text can **share** the blocks of that beginning, and a shared block is
# copied only when a request writes into it: **[copy on write](glossary.md#copy-on-write)**. Your code runs inside the
# engine while you watch its blocks.
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
from minillm.models.held_out import held_out_prompts
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.teaching.workshop.l06_pools import average_waste, examine
from minillm.viz import CachePagesView, LiveView

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
prompts = [p.prompt for p in held_out_prompts(24)]
PLAIN = {"device": "cpu", "enforce_eager": True}  # plain PyTorch, operation by operation
llm = LLM(NAME, **PLAIN, enable_prefix_caching=False)
config, tokenizer = llm.engine.runner.model.config, llm.engine.tokenizer
CONTEXT = llm.max_model_len
TOKEN_BYTES = 2 * config.num_layers * config.kv_size * 4
print(f"{NAME}: {TOKEN_BYTES:,} bytes of keys and values per token (lesson 2), context {CONTEXT}")
del llm  # each engine holds its own copy of the weights

# %% [markdown]
# ## The question, in numbers
#
# Twenty-four requests, with prompts cut from real source files. How many tokens do they hold at the end, and how many
# would be *reserved* if each got a buffer for the whole context, as in lesson 2?

# %%
lengths = [len(tokenizer.encode(prompt)) + greedy.max_tokens for prompt in prompts]
reserved = len(lengths) * CONTEXT
print(f"tokens in use at the end: {sum(lengths):,}, the longest text {max(lengths)}, the shortest {min(lengths)}")
print(f"tokens reserved: {reserved:,}, so {sum(lengths) / reserved:.0%} of the memory would be used")
claim("Most of the reserved memory would never be used.", sum(lengths) < reserved / 2)

# %% [markdown]
# This is **internal fragmentation**: memory that is reserved and never filled. Reserving exactly what a request will
# need is impossible, because the length of its completion is unknown. It would also leave gaps of different sizes where
# other requests have ended: **external fragmentation**. With blocks of one size, every gap fits every request, and only
# the last block of each text is partly empty.
#
# ## Predict
#
# Write a number for each before you measure.
#
# 1. With blocks of 16 tokens, how many [slots](glossary.md#slot) does a request [waste](glossary.md#waste) **on
#    average** over its steps?
# 2. Sixty-four requests begin with the same 512 tokens (a system prompt) and continue with 3 tokens of their own. How
#    many prompt tokens must the model compute in all?
# 3. One request runs alone and has nothing to share. How many times as fast does paging make its generation, prompt
#    included? (In an article's table the line "+ PagedAttention (vLLM)" has 45 tokens per second: 1.6 times the line
#    above it, 3.7 times the first line. The article does not say for how many requests.)

# %%
predict("l06.waste", None, unit="slots")
predict("l06.prefix", None, unit="tokens")
predict("l06.stream", None, unit="times")

# %% [markdown]
# ## Build
#
# ### Exercises 1 and 2: the allocator
#
# The pool keeps a list of free block ids. For every block it also keeps a **[reference
# count](glossary.md#reference-count)**: the number of requests that own the block. It can exceed 1, because later in
# this lesson several requests read the same block.
#
# Two rules make an allocator correct. An allocation succeeds completely or changes nothing. A block becomes free
# exactly when its last owner releases it.


# %%
def allocate(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    """Take `count` blocks from the end of `free`, each with one owner.

    free:       ids of free blocks; changed in place
    ref_counts: number of owners of each block of the pool, indexed by block id; changed in place
    returns:    the ids in the order taken; None, and nothing is changed, if too few blocks are free

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
    """Remove one owner from each of these blocks, in order; append a block without owners to `free`.

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
# ### Exercise 3: the slot of a token
#
# All blocks lie one after another in one long tensor of **slots**, each of which holds one token. Block `b` covers
# slots `b · block_size` to `(b + 1) · block_size - 1`. A request's **[block table](glossary.md#block-table)** lists its
# blocks in the order of its text. Write the function that maps token positions to slots, the **[slot
# mapping](glossary.md#slot-mapping)**.


# %%
def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """Return the slots of tokens start, start + 1, … start + num_tokens - 1 of a request.

    Example: block_table = [7, 0, 3], block_size = 4: token 0 is in slot 28, token 4 in slot 0, token 9 in slot 13.
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
# Writing is simple now: each new row goes to its slot. Reading must first restore the order of the text, because the
# causal mask depends on positions, not on slots. Gather the rows in order, then attend as in lesson 2. Read only slots
# that this request has written. All other slots hold rows of other requests or uninitialised memory.


# %%
my_slots = use("l06.slot_mapping")


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k/√d)·v with GQA. q, k, v: `[tokens, heads, head_dim]`; mask: `[queries, keys]`, True: visible."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def gather_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    """Causal attention of a request's newest tokens over all of its tokens.

    q:            [num_new, num_heads, head_dim], the last num_new of the request's seq_len tokens
    keys, values: [num_slots, num_kv_heads, head_dim], the slots of all requests; the new tokens are already stored
    returns:      [num_new, num_heads, head_dim]; use `attention` above

    my_slots is your slot_mapping, or the reference if yours does not pass.

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
# The engine can run your versions. `block_pool_cls` takes a class with `allocate` and `free`, and
# `ops={"paged_attention": …}` takes a function that computes attention for a whole batch. Here both call your
# functions. The rest of the engine stays as it is: [continuous batching](glossary.md#continuous-batching), [chunked
# prefill](glossary.md#chunked-prefill), [preemption](glossary.md#preempt).

# %%
from minillm.cache.block_pool import BlockPool

my_allocate = use("l06.allocate")
my_release = use("l06.release")
my_attention = use("l06.gather_attention")


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
        num_blocks = -(-batch.seq_lens[r] // batch.block_size)
        table = batch.block_tables[r, :num_blocks].tolist()  # without the padding of its row
        outputs.append(my_attention(q[start:end], keys, values, table, batch.seq_lens[r], batch.block_size))
    return torch.cat(outputs)


# %% [markdown]
# The pool has only 40 blocks. Each request's block table is on top, the blocks of the pool below.

# %% tags=["expected"] alt="Cache pages of four requests: each request's block table on top, the physical pages below in the colours of their owners, a usage bar and the wasted slots in numbers."
mine = LLM(
    NAME,
    **PLAIN,
    enable_prefix_caching=False,
    num_kv_blocks=40,
    block_pool_cls=MyPool,
    ops={"paged_attention": my_paged_attention},
)
with mine.trace() as trace, LiveView(CachePagesView(trace), seconds=10):
    my_outputs = mine.generate(prompts[:4], greedy, use_tqdm=False)
num_held = mine.engine.pool.num_used
del mine

# %%
plain = LLM(NAME, **PLAIN, enable_prefix_caching=False).generate(prompts[:4], greedy, use_tqdm=False)
same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(my_outputs, plain, strict=True)]
print(f"{sum(same)} of {len(same)} requests have the same tokens as with minillm's own pool and attention")
print(f"blocks still held at the end: {num_held}")
claim("Your pool and attention change no token, and no block is lost.", all(same) and not num_held)

# %% [markdown]
# Look at the tables at the top of the picture: the blocks of a table need not be consecutive. That is what
# "non-contiguous" means.
#
# ### Exercise 5: prefix caching
#
# Many requests begin with the same tokens: a system prompt, a document, the chat so far. The keys and values of a token
# depend only on that token and the tokens before it. So equal prefixes have equal keys and values, and **two tables may
# point to one block**. Finding and sharing such blocks is called **[prefix caching](glossary.md#prefix-caching)**.
#
# Every *full* block gets a **[block hash](glossary.md#block-hash)**, a hash of its tokens *and of all tokens before
# them*:
#
# $$\text{hash}_i = H(\text{hash}_{i-1},\ \text{tokens of block } i), \qquad \text{hash}_{-1} = H(\text{salt})$$
#
# The **[salt](glossary.md#cache-salt)** is a name: requests share blocks only if theirs is the same (*Why the salt?*
# below). `root_hash(salt)` computes the first hash, and `hash_block_tokens(parent, tokens)` each following one. Both
# use SHA-256, so that an attacker cannot construct two texts with the same hash. The engine's pool stores a full block
# under its hash (`BlockPool.register`) and looks it up later (`BlockPool.find`). Here a dictionary from hashes to block
# ids takes the pool's place. Follow the chain of hashes and stop at the first unknown one: the engine computes all
# tokens from there on, so it has no use for later blocks. Leave at least the last token to compute, because its logits
# are needed.

# %%
from minillm.cache.prefix import hash_block_tokens, root_hash


def find_prefix(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    """Return the blocks that already hold the beginning of the text, in order; never one that contains the last token.

    known:   block hash → id of the block that has this hash
    returns: block ids, perhaps none

    Example: 12 tokens, block_size 4, all three hashes known: the first two blocks. The third has the last token in it.
    """
    ### BEGIN SOLUTION
    found = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = hash_block_tokens(parent, token_ids[start : start + block_size])
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
# filled. If one completion wrote into that block, it would overwrite what the others read. So before a request writes
# into a block that has other owners, the block is copied, and the request continues with the copy.


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

    keys, values: [num_slots, ...], views of the engine's cache: assign to their slots. A new block needs the contents
                  of the old one; `free` holds a block if one is needed.
    my_allocate and my_release are your functions, or the references if yours do not pass.

    Example: block_table = [0, 1], index = 1, ref_counts = [2, 2, 0, 0], free = [2, 3]
    leaves block_table = [0, 3], ref_counts = [2, 1, 0, 1], free = [2], and block 3 holds what block 1 holds.
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
# The engine's scheduler asks a **KV cache manager** for blocks. This one calls *your* `find_prefix` to find the blocks
# that a new request can share, and *your* `own_block` before a request writes into a shared block. A scheduler
# (`scheduler_cls`) that names it brings it into the engine.

# %%
from minillm.engine.kv_cache_manager import KVCacheManager, SharedBlocks
from minillm.engine.scheduler import Scheduler
from minillm.trace import BlockCopied, BlocksShared, StepRan

my_find, my_own = use("l06.find_prefix"), use("l06.own_block")


class MyManager(KVCacheManager):
    """The engine's KV cache manager with your prefix search and your copy on write."""

    cache = None  # the engine's paged cache, set below: own_block copies keys and values in it

    def get_computed_blocks(self, request):
        if request.fork_of is not None and not request.fork_of.finished:
            return super().get_computed_blocks(request)  # another completion of a prompt shares all its blocks
        size = self.pool.block_size
        found = my_find(request.token_ids, self.pool._block_with, size, request.cache_salt)
        return SharedBlocks(found, len(found) * size, "prefix")

    def _copy_on_write(self, request, index, target):
        pool, source = self.pool, request.block_table[index]
        pool.free([target])  # the engine has allocated one; your function allocates its own
        keys, values = (x.transpose(0, 1) for x in (self.cache.keys, self.cache.values))  # [num_slots, layers, …]
        my_own(request.block_table, index, pool._empty, pool._ref_counts, keys, values, pool.block_size)
        self.emit(BlockCopied(request.request_id, source, request.block_table[index]))


class MyScheduler(Scheduler):
    kv_cache_manager_cls = MyManager


# %% [markdown]
# Four requests have a common prefix; the last of them asks for three completions. Its first completion finds the prefix
# in the cache, like the second and the third request. Its other two completions are **forks** of the first: they get
# its whole block table, the partly filled last block included, and compute only the last prompt token again.

# %%
beginning = 'class Inventory:\n    """Counts of the things in a shop, by name."""\n\n    def __init__(self):\n        self.counts = {}\n\n'
endings = ["    def add(self, name", "    def remove(self, name", "    def total(self", "    def names(self"]
class_prompts = [beginning + ending for ending in endings]
several = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3 + [several]

# %% tags=["expected"] alt="Cache pages: the pages of the common prefix carry the outlines of all owners and a reference count; the three completions of the last prompt share its pages except the last one, which one of them keeps and the two others copy."
sharing = LLM(NAME, **PLAIN, num_kv_blocks=40, scheduler_cls=MyScheduler, enable_prefix_caching=True)
MyManager.cache = sharing.engine.runner.cache
with sharing.trace() as sharing_trace, LiveView(CachePagesView(sharing_trace), seconds=10):
    written = sharing.generate(class_prompts, params, use_tqdm=False)
sharing = MyManager.cache = None

# %%
shared = sharing_trace.of(BlocksShared)
computed = sum(w.num_tokens for step in sharing_trace.of(StepRan) for w in step.work if w.kind == "prefill")
asked = sum(len(o.prompt_token_ids) * len(o.outputs) for o in written)
found, forked = (sum(e.num_tokens for e in shared if e.source == source) for source in ("prefix", "fork"))
print(f"{asked} prompt tokens in all, {computed} computed by the model")
print(f"{found} found in the prefix cache, {forked} forked from another completion of the prompt")
completions = [completion.token_ids for output in written for completion in output.outputs]
copies = len(sharing_trace.of(BlockCopied))
print(f"{len(shared)} of {len(completions)} completions share blocks, {copies} copied one before writing")
claim("Every prompt token was computed, found or forked.", computed + found + forked == asked)
claim("More than half of the prompt tokens did not have to be computed.", found + forked > asked / 2)
own = LLM(NAME, **PLAIN, num_kv_blocks=40, enable_prefix_caching=True).generate(class_prompts, params, use_tqdm=False)
claim(
    "All completions have the same tokens as with the engine's own manager.",
    completions == [completion.token_ids for output in own for completion in output.outputs],
)

# %% [markdown]
# A trace can be drawn at any step. Here is the step in which the completions diverge.

# %%
from minillm.viz import show

step = 0
for event in sharing_trace:
    if isinstance(event, BlockCopied):
        break
    step = event.step if type(event).__name__ == "StepStarted" else step
show(CachePagesView(sharing_trace), step=step)

# %% [markdown]
# And here are all steps. Press play, or click the picture and use the arrow keys; "as text" describes each frame.

# %%
from minillm.viz import ReplayWidget

ReplayWidget(CachePagesView(sharing_trace))

# %% [markdown]
# The four requests arrived together, when no block was [cached](glossary.md#cached). Still the full blocks of the
# common prefix were computed only once. (What follows them is in a block that is not full, and each request computed
# it.) A block can be found as soon as it is *scheduled*, before it is computed. Every layer stores all new keys of the
# step before it attends, so the second request reads in the same forward what the first one writes.
#
# ## Measure
#
# ### Wasted slots by block size
#
# Every request wastes the empty slots of its last block. We run the 24 requests with different block sizes, and after
# every step compare the slots that are allocated with the slots that are filled. This is counted, not timed, so the
# engine can run its [compiled step](glossary.md#compiled-step) here, which is faster. (It is compiled the first time it
# runs on a machine, which takes up to a minute behind a progress bar.)

# %%
SIZES = (1, 4, 16, 64, 256)
measured = {}
for size in SIZES:
    engine = LLM(NAME, device="cpu", block_size=size, enable_prefix_caching=False)
    measured[size] = average_waste(engine, prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    del engine
print("block size   wasted slots per request   filled")
for size, (waste, filled) in measured.items():
    print(f"{size:10} {waste:26.1f} {filled:8.0%}")
reveal("l06.waste", round(measured[16][0], 1))
print(
    f"a buffer for the whole context, as in lesson 2, would be filled to {sum(lengths) / reserved:.0%} "
    f"(at the end, with {greedy.max_tokens} new tokens)"
)
short = sum(length - 16 <= 256 for length in lengths)
print(f"{short} of the {len(lengths)} texts fit into one block of 256")
claim(
    "Up to blocks of 64, a request wastes about (block size - 1) / 2 slots.",
    all(abs(measured[size][0] - (size - 1) / 2) < size / 10 for size in SIZES[:4]),
    of_model=True,
)
claim(
    "With blocks of 256, a request wastes about two thirds of a block: every text fits into one.",
    0.6 < measured[256][0] / 256 < 0.75 and short == len(lengths),
    of_model=True,
)

# %% [markdown]
# A text may end anywhere in its last block, so (block size - 1) / 2 slots are wasted on average: about half a block, a
# little less if blocks are small. This holds as long as blocks are not longer than most texts. Here no text is longer
# than a block of 256: such a block wastes memory as a reserved buffer does.
#
# Small blocks waste little, but blocks of one token have other costs. Every block needs a table entry, an allocation
# and a hash, and a kernel reads 16 consecutive rows faster than 16 scattered ones. (Small blocks have one more
# advantage: a common prefix is found up to its last full block.) vLLM and this engine use 16 by default.
#
# ### How many requests fit
#
# This is the purpose of paging. Both layouts get the same memory, enough for four buffers of a whole context, and all
# 24 requests at once. The contiguous layout is lesson 2's cache inside this engine.

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
claim("Both generate the same tokens.", texts["contiguous"] == texts["paged"])
claim(
    "Paging runs several times as many at once, in several times fewer steps.",
    most["paged"] > 3 * most["contiguous"] and 3 * steps["paged"] < steps["contiguous"],
)

# %% [markdown]
# Fewer steps for the same work means that each step serves more requests, and every step reads the weights once (lesson
# 3). The PagedAttention paper reports 2 to 4 times the throughput of other systems (quoted). The gain comes from a
# larger batch in the same memory, not from faster attention. (With only 24 requests, the paged pool is not even full:
# more would fit.)
#
# ### Sixty-four requests, one prefix

# %%
shared_llm = LLM(NAME, **PLAIN)
vocabulary = config.vocab_size
head = [7 + i * 31 % (vocabulary - 8) for i in range(512)]
requests = [{"prompt_token_ids": [*head, 1 + i, 2 + i, 3 + i]} for i in range(64)]
one = SamplingParams(temperature=0, max_tokens=1)
with shared_llm.trace() as trace:
    outputs = shared_llm.generate(requests, one, use_tqdm=False)
computed = sum(w.num_tokens for step in trace.of(StepRan) for w in step.work)
print(f"{64 * 515:,} prompt tokens in all, {computed} computed: 512 + 64 · 3 = {512 + 64 * 3}")
claim("The common prefix is computed once, and each request's own tokens once.", computed == 512 + 64 * 3)
reveal("l06.prefix", computed)

# %% [markdown]
# ### One request alone
#
# Now the third prediction. One request with nothing to share runs on the same engine with three caches: contiguous, in
# blocks of 16, and in blocks of 1. The three are timed alternately; only the ratios matter.

# %% tags=["nbval-ignore-output"]
import statistics

from minillm.bench.timing import clock

shared_llm = None
alone = {
    "contiguous": LLM(NAME, **PLAIN, kv_cache_config={"layout": "contiguous"}, max_num_seqs=1),
    "blocks of 16": LLM(NAME, **PLAIN, enable_prefix_caching=False, max_num_seqs=1),
    "blocks of 1": LLM(NAME, **PLAIN, block_size=1, enable_prefix_caching=False, max_num_seqs=1),
}
brief = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
seconds = {label: [] for label in alone}
for turn in range(6):
    for label, engine in alone.items():
        began = clock()
        engine.generate(prompts[0], brief if turn else one, use_tqdm=False)
        if turn:
            seconds[label].append(clock() - began)
speed = {
    label: statistics.median(a / b for a, b in zip(seconds["contiguous"], seconds[label], strict=True))
    for label in alone
}
for label, ratio in speed.items():
    print(f"{label:13} {ratio:.2f} times the speed of a contiguous cache")
reveal("l06.stream", round(speed["blocks of 16"], 2))
claim(
    "One request alone is about as fast in blocks as in a contiguous cache, not 1.6 times as fast.",
    all(0.7 < ratio < 1.35 for ratio in speed.values()),
    measured=True,
)

# %% [markdown]
# **Where paging loses.** One request has nothing to gain from paging: the same numbers are read, and each block must be
# looked up in a table. (A ratio over 1 above is not a gain of paging: the two layouts run different PyTorch code. And
# the blocks of a single request are consecutive here, so the engine reads them as one slice.) On a GPU a good kernel
# hides the look-up, but cannot turn it into a gain. Paging also gains nothing for requests that all have the same
# length, known in advance: then reserved buffers waste nothing, and a table is overhead. Paging pays when *many*
# requests of *unknown* length compete for memory. Prefix caching has a cost, too: requests without a common prefix pay
# for a hash per block and find nothing.
#
# ## Break it
#
# Here are five KV cache managers with one mistake each. They serve eight requests, four with one common prefix and four
# with another, two of them with two completions. Each manager gets three checks. Does every request get the same tokens
# as when it runs alone? Is the pool consistent after every step (`check_integrity`: free + used = all, reference counts
# = owners)? Are all blocks free at the end? **Guess first:** which mistakes does only the comparison of tokens catch,
# and which only the checks of the pool?

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
print(f"{'':15} same tokens   pool           not freed")
results = {}
for kind in (KVCacheManager, *BROKEN):

    class Examined(Scheduler):
        kv_cache_manager_cls = kind

    seen = examine(LLM(NAME, **PLAIN, **small, scheduler_cls=Examined), [jobs])
    same = sum(a == b for a, b in zip(seen.tokens, expected, strict=True))
    results[kind.__name__] = (same == len(expected), seen.consistent and not seen.num_not_freed)
    pool = "consistent" if seen.consistent else "WRONG"
    print(f"{kind.__name__:15} {same:2} of {len(expected)}      {pool:10} {seen.num_not_freed:7} blocks")
contents = ("NoCopyOnWrite", "EmptyCopy", "SharesHalfFull", "ForgetsParents")
claim("The engine's own manager makes no mistake.", results["KVCacheManager"] == (True, True))
claim(
    "Four mistakes change tokens and leave the pool consistent.",
    all(results[name] == (False, True) for name in contents),
    of_model=True,
)
claim("The leak changes no token, and only the checks of the pool show it.", results["Leaks"] == (True, False))

# %% [markdown]
# Mistakes about *contents* leave the pool consistent. A leak leaves every token right, until the pool is empty. (The
# opposite mistake about ownership, a block that is freed while another request reads it, changes tokens as well.) A
# paged cache needs both kinds of test. (The engine's own tests drive it through random steps, and check both after
# each.)
#
# **Find the mistakes.** A tutorial's paged cache does this (in our own words): a request's blocks are allocated when
# its first tokens are appended, `⌈tokens / block size⌉` of them, and stored under its id. Every append then looks up
# these blocks. Only the body of an append is left out, with a comment that says so.
#
# <details><summary>What did you find?</summary>
#
# 1. It does not store how many tokens a request has, so it cannot know which slot is next or when a new block is
#    needed. It allocates on the first append only.
# 2. There is no way to release blocks. The pool runs empty and stays empty.
# 3. A second allocation under the same id overwrites the table: the old blocks are neither owned nor free. A leak.
# 4. An allocation that does not fit is an `assert`: the server crashes, with every request in it.
#
# </details>
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM | `BlockPool` and `KVCacheManager`: hash chain over full blocks, reference counts, least recently used eviction; `cache_salt` in the request; blocks of 16 |
# | SGLang | `RadixCache`: a tree of token runs instead of a hash chain; finds the longest common prefix to the token, with its default pages of one token |
# | TensorRT-LLM | paged blocks with reuse, and priorities for eviction |
# | llama.cpp | one cell per token; with a unified cache, `seq_cp` shares cells between sequences by adding a sequence id and copies nothing; with a stream per sequence it copies the buffer |
# | transformers | a paged cache in `generate_batch`; the ordinary `generate` has one contiguous cache per batch |
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | the line "+ PagedAttention (vLLM)" of a table: 45 tokens per second after 28, 3.7× the baseline (without batch, hardware or context) | one request has nothing to gain; the gain is in how many run together | one request alone |
# | the line "All combined" of that table: 52 tokens per second, 4.3× the baseline | measured with all settings declared, on 16 requests: an INT8 cache, drafts and paged batching together make this engine 1.9 times as fast as without the three, and paged batching alone does as well: combining adds nothing there. Over transformers, the baseline of that table, it is 20.8 times, of which 11.0 without any of the three | docs/measured.md, *The ladder of one article* (quoted) |
# | vLLM with PagedAttention: "2–4x higher throughput than naive HuggingFace pipelines" by less waste and "higher batching" | the gain is indeed the larger batch in the same memory; the paper's 2–4× are over systems that reserve buffers (quoted) | how many requests fit |
# | a sample paged cache | allocates once, stores no lengths, frees nothing, leaks on re-allocation | just above |
#
# **Why the salt?** If any two requests can share blocks, the time to the first token reveals whether *someone else* has
# sent the same prefix before. With a salt per tenant, no tenant finds another tenant's blocks:

# %%
salted, hits = LLM(NAME, **PLAIN), []
for who in ("alice", "bob", "alice"):
    [output] = salted.generate({"prompt": beginning, "cache_salt": who}, one, use_tqdm=False)
    hits.append(output.num_cached_tokens)
    print(f"{who:6} found {hits[-1]:2} of {len(output.prompt_token_ids)} tokens in the cache")
claim("Bob finds none of Alice's blocks, and Alice finds them again.", hits[:2] == [0, 0] and hits[2] > 0)

# %% [markdown]
# **Papers.** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*
# (sections 3 and 4 are this lesson). Zheng et al. 2024, *SGLang* (RadixAttention). Gu et al. 2025, *Auditing Prompt
# Caching in Language Model APIs* (why salts exist).
#
# ## Recap
#
# 1. The length of a completion is unknown, so reserved buffers waste most of the memory; blocks of one size that are
#    shorter than most texts waste about half a block per request.
# 2. A block table turns a position into a slot. Allocating, freeing and sharing change only tables, the free list and
#    reference counts. Keys and values stay where they are; only copy on write copies a block.
# 3. Equal prefixes have equal keys and values. A chain of hashes over full blocks finds them, and reference counts keep
#    them. Leave the last token to compute, and never hash a block that is only partly filled.
# 4. Before writing into a shared block, copy it.
# 5. Paging does not make one request faster. It lets more requests run together.
#
# **Next:** in lesson 7 you build the scheduler, which decides *which* requests run together.
