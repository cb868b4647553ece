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
# A request says how long its prompt is. How long its answer will be, nobody knows: it ends when the model says so.
# Lesson 2 gave every text a buffer as long as it could ever become. With one user that is fine. With a hundred, most
# of the memory is reserved for words that will never be written.
#
# Operating systems met this problem sixty years ago and answered it with *pages*: memory is cut into small pieces of
# one size, and a table per process says which piece comes after which. In this lesson you build that for keys and
# values: the allocator, the table, attention through the table, and then the two things that tables give for free:
# requests that **share** what they have in common, and copies that are made only **on writing**. Your code runs inside
# the engine while you watch its pages.
#
# You need lesson 2 (what a row of the cache is). Everything runs on a laptop's CPU. The engine runs its steps in plain
# PyTorch here (`enforce_eager=True`): then your attention can take the place of its own, and the two are compared like with
# like. Lesson 15 brings its compiled step.

# %%
import os

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM, SamplingParams
from minillm.bench.prompts import held_out_prompts
from minillm.teaching import check, hint, predict, reveal, use
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

# %% [markdown]
# That is *internal* fragmentation: reserved, and never filled. Reserving only what each request announces would need
# to know the answer's length, and leave holes of odd sizes where others have ended: *external* fragmentation. With
# pieces of one size every hole fits every request, and only the last piece of each text is filled in part.
#
# ## Predict
#
# Write a number for each before you measure.
#
# 1. With blocks of 16 tokens, how many slots does a request waste **on average**, at a moment chosen by chance?
# 2. Sixty-four requests begin with the same 512 tokens (a system prompt) and go on with 3 of their own. How many
#    prompt tokens must go through the model in all?
# 3. One user alone, nobody to share with: how many times faster does paging make the decoding of that one stream?
#    (An article we read says 1.6.)

# %%
predict("l06.waste", None, unit="slots")
predict("l06.prefix", None, unit="tokens")
predict("l06.stream", None, unit="times")

# %% [markdown]
# ## Build
#
# ### Exercises 1 and 2: the allocator
#
# The pool is a list of free block ids and, for every block, the number of its owners. Why a *number* of owners, when
# each block is taken by one request? Because in a moment several requests will read the same block.
#
# Two rules make an allocator trustworthy: an allocation happens wholly or not at all, and a block returns exactly when
# its last owner lets go.


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
# Stuck? `hint("l06.release", 1)`, then 2, then 3: each says more.
#
# ### Exercise 3: where does token 9 live?
#
# All blocks lie side by side in one long tensor of *slots*; block `b` covers slots `b · block_size` up to
# `(b + 1) · block_size - 1`. A request's **block table** lists its blocks in the order of its text. Translate.


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
# mask knows only "earlier" and "later", not slots. Gather, then attend as in lesson 2.


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
# The engine has a seam for each of these. `block_pool_cls` takes a class with `allocate` and `free`, and
# `ops={"paged_attention": …}` takes a function that attends for a whole batch. Both are yours now, and the engine is
# the real one: continuous batching, chunked prefill, preemption. The pool is small on purpose.

# %% tags=["expected"] alt="Cache pages of four requests: each request's block table on top, the physical pages below in the colours of their owners, a usage bar and the wasted slots in numbers."
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
    """Your attention for each request of a batch."""
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
with mine.trace() as trace, LiveView(CachePagesView(trace), pause=0.05):
    outputs = mine.generate(prompts[:4], greedy, use_tqdm=False)

# %%
plain = llm.generate(prompts[:4], greedy, use_tqdm=False)
same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True)]
print(f"{sum(same)} of {len(same)} requests gained the same tokens as with minillm's own pool and attention")
print(f"blocks still held when all is over: {mine.engine.pool.num_used}")

# %% [markdown]
# Look at the tables on top of the picture: the numbers in a table are not in a row, and nobody minds. That is all
# "non-contiguous" means.
#
# ### Exercise 5: the same beginning
#
# Many requests begin alike: a system prompt, a document, the chat so far. Keys and values depend on nothing but the
# tokens up to their own, so equal beginnings have equal keys and values, and **two tables may point to one block**.
# The question is how to find it.
#
# Give every *full* block a name that stands for its contents *and everything before it*:
#
# $$\text{name}_i = H(\text{name}_{i-1},\ \text{tokens of block } i), \qquad \text{name}_{-1} = H(\text{salt})$$
#
# `block_name(parent, tokens)` and `root_name(salt)` do the hashing (SHA-256, so that nobody can construct two texts
# with one name). You walk the chain. Stop at the first unknown name; what comes after a gap cannot be known. And leave
# at least the last token to compute: its logits are what the request came for.

# %%
from minillm.cache.prefix import block_name, root_name


def find_prefix(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    """Blocks that hold the beginning of the text already, in order; never one that contains the last token.

    known:   name of a full block's contents → the id of a block that holds them
    returns: block ids, perhaps none

    Example: 12 tokens, block_size 4, all three names known: the first two blocks. The third has the last token in it.
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
# `n=3` asks for three completions of one prompt. They share its blocks, and the last of those is usually filled only in
# part. Whoever writes into it first would scribble into the memory of the others. So before a request writes into a
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
# Both run inside the engine through a scheduler of ours (`scheduler_cls`): it asks *your* `find_prefix` which blocks a
# new request can share, and *your* `own_block` before anybody writes into a shared one. Four requests with one
# beginning; the last of them wants three completions.

# %% tags=["expected"] alt="Cache pages: the pages of the common beginning carry the outlines of all owners and a reference count; the three completions of the last prompt share its pages except the last one, of which each has a copy."
from minillm.engine.scheduler import Found, Scheduler
from minillm.trace import BlockCopied, BlocksShared, StepRan

my_find, my_own = use("l06.find_prefix"), use("l06.own_block")


class MyScheduler(Scheduler):
    """The engine's scheduler with your prefix search and your copy on write."""

    cache = None  # the engine's paged cache, put here below: own_block must copy keys and values

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


beginning = 'class Inventory:\n    """Counts of the things in a shop, by name."""\n\n    def __init__(self):\n        self.counts = {}\n\n'
endings = ["    def add(self, name", "    def remove(self, name", "    def total(self", "    def names(self"]
llm = mine = None  # let go of them: each engine holds its own copy of the weights
sharing = LLM(NAME, **PLAIN, num_kv_blocks=40, scheduler_cls=MyScheduler, enable_prefix_caching=True)
MyScheduler.cache = sharing.engine.runner.cache
several = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3 + [several]
with sharing.trace() as trace, LiveView(CachePagesView(trace), pause=0.05):
    outputs = sharing.generate([beginning + ending for ending in endings], params, use_tqdm=False)

# %%
shared = trace.of(BlocksShared)
computed = sum(w.num_tokens for step in trace.of(StepRan) for w in step.work if w.kind == "prefill")
asked = sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs)
print(f"{asked} prompt tokens were asked for, {computed} went through the model")
print(
    f"{sum(e.num_tokens for e in shared)} were found: {len(shared)} requests share blocks, {len(trace.of(BlockCopied))} copied one before writing"
)

# %% [markdown]
# A trace can be drawn at any step. Here is the one in which the completions part.

# %%
from IPython.display import SVG, display

step = 0
for event in trace:
    if isinstance(event, BlockCopied):
        break
    step = event.step if type(event).__name__ == "StepStarted" else step
display(SVG(CachePagesView(trace).to_svg(step=step)))

# %% [markdown]
# And here are all of them. Press play, or click the picture and use the arrow keys; "as text" says each frame in words.

# %%
from minillm.viz import ReplayWidget

ReplayWidget(CachePagesView(trace))

# %% [markdown]
# Something subtle happened in the first step: the four requests arrived together, nothing was cached, and still the
# beginning was computed once. A block gets its name when it is *scheduled*, not when it is done, and every layer stores
# all new keys of the step before it attends. So the second request can read, in the very same forward, what the first
# one is just writing.
#
# ## Measure
#
# ### What blocks waste, and what a size costs
#
# Every request wastes what is left of its last block. We run the 24 requests with different block sizes, and after
# every step compare the slots that are allocated with the slots that are filled. This is counted, not timed.

# %%
sharing = MyScheduler.cache = None


def average_waste(block_size: int) -> tuple[float, float]:
    """Mean over all steps of: wasted slots per running request, and the filled part of the allocated slots."""
    engine = LLM(NAME, **PLAIN, block_size=block_size, enable_prefix_caching=False)
    requests = engine.submit(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    wasted, used, running = 0, 0, 0
    while engine.engine.has_requests:
        engine.engine.step()
        for request in requests:
            if not request.finished:
                allocated = len(request.block_table) * block_size
                wasted += allocated - request.num_computed_tokens
                used += allocated
                running += 1
    return wasted / running, 1 - wasted / used


SIZES = (1, 4, 16, 64, 256)
measured = {size: average_waste(size) for size in SIZES}
print("block size   wasted slots per request   filled")
for size, (waste, filled) in measured.items():
    print(f"{size:10} {waste:26.1f} {filled:8.0%}")
reveal("l06.waste", round(measured[16][0], 1))
print(f"a buffer for the whole context, as in lesson 2, would be filled to {sum(lengths) / reserved:.0%}")

# %% [markdown]
# About half a block each, as chance has it. Small blocks waste nothing, so why not blocks of one token? Because the
# table has an entry for every block, the allocator works for each of them, a block is what can be found by name
# (short ones are found more often), and a kernel that reads 16 neighbours in memory at once reads faster than one that
# jumps. vLLM and this engine take 16.
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
print("the same tokens:", texts["contiguous"] == texts["paged"])
for label in layouts:
    print(f"{label:10}  at most {most[label]:2} requests at once, {steps[label]:3} steps for all 24")
print(
    f"in the same {budget / 2**20:.0f} MiB, paging runs {most['paged'] / most['contiguous']:.0f} times as many at once"
)

# %% [markdown]
# Fewer steps for the same work means that each step serves more requests, and every step reads the weights once
# (lesson 3). *That* is where the 2 to 4 times of the PagedAttention paper come from: not from faster attention, but
# from a larger batch in the same memory.
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
reveal("l06.prefix", computed)

# %% [markdown]
# ### One stream alone
#
# And now the third prediction. One request, nobody to share with, the same engine with its cache in one piece, in
# blocks of 16 and in blocks of 1. Timed in turn; the ratio is what counts.

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
seconds = {label: [] for label in alone}
for turn in range(6):
    for label, engine in alone.items():
        began = clock()
        engine.generate(prompts[0], greedy, use_tqdm=False)
        if turn:
            seconds[label].append(clock() - began)
speed = {
    label: statistics.median(a / b for a, b in zip(seconds["in one piece"], seconds[label], strict=True))
    for label in alone
}
for label, ratio in speed.items():
    print(f"{label:13} {ratio:.2f} times the speed of a cache in one piece")
reveal("l06.stream", round(speed["blocks of 16"], 2))

# %% [markdown]
# **Where paging loses.** Alone, it gains nothing: the same numbers are read, only from more places, and somebody has to
# look up where. On a GPU a good kernel hides the look-up; nothing turns it into a gain. The same holds for requests
# that all have the same length, known before: then reserving is exact, and a table is overhead. Paging pays when
# *many* requests of *unknown* length compete for memory. So does sharing: requests without a common beginning pay a
# hash per block and get nothing back.
#
# ## Break it
#
# Six pools and schedulers with one mistake each. They run eight requests with a common beginning, two of them with
# two completions, in a pool so small that blocks are taken away and used again. Three checks look at each: the same
# tokens as every request alone, the books of the pool after every step (`check_integrity`: free + used = all, reference
# counts = owners), and no block left behind at the end. **Guess first:** which mistakes are caught only by tokens, and
# which only by the books?

# %%
import minillm.cache.prefix as prefix

alone = engine = None


class Right(Scheduler):
    """No mistake."""


class NoCopyOnWrite(Scheduler):
    """Writes into a shared block as if it were its own."""

    def _extend(self, request, start, num_tokens):
        counts = self.pool._ref_counts
        self.pool._ref_counts = [min(count, 1) for count in counts]  # look away while the question is asked
        try:
            before = list(self.pool._ref_counts)
            extended = super()._extend(request, start, num_tokens)
            changed = {
                b: new for b, (old, new) in enumerate(zip(before, self.pool._ref_counts, strict=True)) if old != new
            }
        finally:
            self.pool._ref_counts = counts
        for block, count in changed.items():
            counts[block] = count
        return extended


class EmptyCopy(Scheduler):
    """Takes a new block on writing, and forgets to copy what was in the old one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.copy_blocks = lambda pairs: None


class SharesHalfFull(Scheduler):
    """Also gives names to blocks that are filled only in part, by the tokens they will hold later."""

    def _name_full_blocks(self, request, start, end):
        super()._name_full_blocks(request, start, min(end + self.pool.block_size - 1, request.num_tokens))


class ForgetsParents(Scheduler):
    """Names a block by its own tokens alone."""

    def _name_full_blocks(self, request, start, end):
        own_names(request, self.pool.block_size)
        super()._name_full_blocks(request, start, end)

    def _find_blocks(self, request):
        own_names(request, self.pool.block_size)
        return super()._find_blocks(request)


class Leaks(Scheduler):
    """Does not return the last block of a finished request."""

    def _free(self, request, keep, reason):
        if reason == "finished":
            request.block_table = request.block_table[:-1]
        super()._free(request, keep, reason)


def own_names(request, block_size):
    """Replace the request's chain of names by names of single blocks."""
    request._block_names[:] = [
        prefix.block_name(b"", request.token_ids[start : start + block_size])
        for start in range(0, len(request.token_ids) - block_size + 1, block_size)
    ]


# %%
from minillm.cache.block_pool import BlockPoolError

MIXED = [
    prompt_ids + tail
    for prompt_ids, tail in zip([head[:40]] * 4 + [head[8:40]] * 4, ([1], [2, 3], [4], [5]) * 2, strict=True)
]
TWICE = SamplingParams(temperature=0.7, n=2, seed=3, max_tokens=12, ignore_eos=True)
ONCE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
mixed_params = [TWICE if i in (1, 6) else ONCE for i in range(8)]


def run_mixed(scheduler_cls, together: bool) -> tuple[list[list[int]], str, int]:
    """Tokens of all completions, what the books said, and blocks left behind."""
    engine = LLM(
        NAME,
        **PLAIN,
        block_size=8,
        num_kv_blocks=40,
        long_prefill_token_threshold=20,  # a prompt goes in by pieces of 20 tokens, so a block may be half full
        scheduler_cls=scheduler_cls,
        enable_prefix_caching=together,
    )
    for pool in (engine.engine.runner.cache.keys, engine.engine.runner.cache.values):
        pool.zero_()  # slots that nobody has written hold chance otherwise, and what is wrong would differ every time
    tokens, books = [], "balance"
    batches = [list(range(8))] if together else [[i] for i in range(8)]
    for batch in batches:
        requests = engine.submit([{"prompt_token_ids": MIXED[i]} for i in batch], [mixed_params[i] for i in batch])
        while engine.engine.has_requests:
            engine.engine.step()
            try:
                engine.engine.scheduler.check_integrity()
            except BlockPoolError:
                books = "WRONG"
        tokens += [request.output_token_ids for request in requests]
    return tokens, books, engine.engine.pool.num_used


expected, _, _ = run_mixed(Right, together=False)
print(f"{'':16} same tokens   books     left behind")
for kind in (Right, NoCopyOnWrite, EmptyCopy, SharesHalfFull, ForgetsParents, Leaks):
    tokens, books, left = run_mixed(kind, together=True)
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    print(f"{kind.__name__:16} {same:2} of {len(expected)}      {books:9} {left:3} blocks")

# %% [markdown]
# Mistakes about *contents* leave the books in perfect order, and mistakes about *books* leave every token right, until
# the day the pool is empty. A paged cache needs both kinds of test. (The engine's own tests drive it through thousands
# of random steps, and check both after each.)
#
# **Find the mistakes.** A tutorial's paged cache does this (retold in our words): a request's blocks are allocated when
# its first tokens are appended, `⌈tokens / block size⌉` of them, and stored under its id; later appends write "into
# the blocks".
#
# <details><summary>What did you find?</summary>
#
# 1. Nothing remembers how many tokens a request has, so nobody knows which slot is the next one, or when a new block
#    is due. It allocates on the first append only.
# 2. There is no way to give blocks back. The pool empties, for ever.
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
# | PagedAttention makes one stream 1.6× faster (a table without batch, hardware or context) | one stream gains nothing; the gain is in how many run together | third measurement |
# | vLLM with PagedAttention is 2–4× faster than naive pipelines | by batch size, in the same memory: the paper compares it with systems that reserve | second measurement |
# | a sample paged cache | allocates once, knows no lengths, frees nothing, leaks on re-allocation | just above |
#
# **Why the salt?** If any two requests can share, then how fast an answer comes tells whether *someone else* has sent
# the same beginning before. With a salt per tenant, names of different tenants never meet:

# %%
salted = LLM(NAME, **PLAIN)
for who in ("alice", "bob", "alice"):
    [output] = salted.generate({"prompt": beginning, "cache_salt": who}, one, use_tqdm=False)
    print(f"{who:6} found {output.num_cached_tokens:2} of {len(output.prompt_token_ids)} tokens in the cache")

# %% [markdown]
# **Papers.** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*
# (sections 3 and 4 are this lesson). Zheng et al. 2024, *SGLang* (RadixAttention). Gu et al. 2025, *Auditing Prompt
# Caching in Language Model APIs* (why salts exist).
#
# ## Recap
#
# 1. Nobody knows how long an answer will be, so reserving wastes most of the memory; blocks of one size waste half a
#    block per request.
# 2. A block table turns a position into a slot. Everything else (allocating, sharing, moving) is bookkeeping on
#    tables, and keys and values stay where they are.
# 3. Equal beginnings have equal keys: a chain of names over full blocks finds them, and reference counts keep them
#    alive. Keep the last token to compute; never share what is half full or not yet judged.
# 4. Before writing into a shared block, copy it.
# 5. Paging does not make one stream faster. It lets more of them run together.
#
# **Next:** lesson 7 decides *who* runs together: the scheduler.
