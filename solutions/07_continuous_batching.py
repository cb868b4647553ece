# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 7. Continuous batching
#
# **Question.** *Thirty-two users, one model, answers of every length: who runs in the next step?*
#
# Lesson 3 found that a step reads all weights once, whether one request uses them or eight. So a server runs many
# requests together: a *batch*. The obvious way is to collect eight, run them until all are done, and take the next
# eight. It is how deep learning has always batched, and for text it wastes most of the machine, because eight answers
# never end together.
#
# The way out is to decide again **before every step**. Whoever is done leaves at once, whoever waits comes in, a long
# prompt is computed in pieces beside the others, and when memory runs dry somebody is put back in the queue. That is a
# scheduler. You build its four decisions, they run the real engine, and you watch who runs when.
#
# You need lesson 6 (blocks and the pool). Everything runs on a laptop's CPU. The engine runs its steps in plain PyTorch
# here (`enforce_eager=True`), so that a step is the one whose cost you counted in lesson 3; lesson 15 brings its compiled
# step.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.bench.prompts import held_out_prompts
from minillm.step_metrics import step_metrics
from minillm.teaching import check, hint, predict, reveal, use
from minillm.teaching.exercises.l07_continuous_batching import heavy_tailed_lengths
from minillm.trace import RequestPreempted, StepRan
from minillm.viz import LiveView, TimelineComparison, TimelineView
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # any Llama, Mistral, Qwen or SmolLM checkpoint works too
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
PLAIN = {"enforce_eager": True, "enable_prefix_caching": False}  # plain PyTorch, and every prompt from its first token

SEATS = 8
lengths = heavy_tailed_lengths(32)
prompts = [p.prompt for p in held_out_prompts(80) if len(p.prompt) < 260][:32]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
print(f"{len(lengths)} requests; output lengths: {', '.join(map(str, lengths))}")
print(
    f"{sum(lengths)} tokens in all; half of the requests want at most {sorted(lengths)[15]}, the longest {max(lengths)}"
)

# %% [markdown]
# ## The question, in numbers
#
# Those lengths are *heavy-tailed*: most are short, a few very long. Real traffic looks like that, and nobody knows a
# length before it has happened.
#
# With eight seats and every seat busy in every step, the work would take `tokens / 8` steps. Call the share of seats
# that are busy the **slot utilisation**; everything below is about that number.
#
# ## Predict
#
# 1. *Static* batching: batches of eight in the order given, each as long as its longest request. What is the slot
#    utilisation, in percent?
# 2. Deciding anew before every step: how many times fewer steps for the same 32 requests?
# 3. On the machine you sit at: how many times longer does a decode step of 16 requests take than a step of one?

# %%
predict("l07.utilisation", None, unit="percent")
predict("l07.steps", None, unit="times fewer")
predict("l07.step16", None, unit="times longer")

# %% [markdown]
# ## Build
#
# ### Exercise 1: the price of waiting for the longest
#
# Count the steps of static batching. (We count one token per request and step and leave the prompts out; the run below
# has them in.)


# %%
def static_steps(lengths: list[int], batch_size: int) -> int:
    """Steps until all are done: batches of batch_size in the order given, nobody joins a running batch.

    lengths: output tokens of each request

    Example: static_steps([8, 1, 1, 9], 2) is 8 + 9 = 17.
    """
    ### BEGIN SOLUTION
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))
    ### END SOLUTION


# %%
check("l07.static_steps")

# %%
count_static = use("l07.static_steps")
steps = count_static(lengths, SEATS)
print(f"static batching: {steps} steps; with every seat busy it would be {-(-sum(lengths) // SEATS)}")
reveal("l07.utilisation", round(100 * sum(lengths) / (SEATS * steps)))

# %% [markdown]
# Two seats of three are empty: their requests are done and wait for the one that is not. Larger batches make it worse,
# for the longest of 32 is longer than the longest of 8.
#
# ### Exercise 2: share the budget of a step
#
# A step may compute at most so many tokens: the *budget* (vLLM's `max_num_batched_tokens`). A decoding request needs one
# token of it. A request whose prompt is not computed yet could use hundreds. If it takes all, everyone else stands
# still, and their users see the text stop. If it gets nothing, its own user waits for ever.
#
# So prompts are computed in **chunks**: the most urgent request takes what it can use, but leaves at least one token to
# everyone behind it.


# %%
def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Tokens that each running request computes in this step; everybody gets at least one.

    wanted: tokens that each could compute now, most urgent first: 1 while it decodes, the rest of its prompt before
    budget: tokens of the step; at least len(wanted)

    Example: share_budget([100, 1, 1], 8) is [6, 1, 1].
    """
    ### BEGIN SOLUTION
    shares = []
    for behind, tokens in zip(range(len(wanted) - 1, -1, -1), wanted, strict=True):
        shares.append(min(tokens, budget - behind))
        budget -= shares[-1]
    return shares
    ### END SOLUTION


# %%
check("l07.share_budget")

# %% [markdown]
# ### Exercise 3: who comes in
#
# What is left of the budget goes to those who wait. Three things can run out: seats, tokens and blocks.
#
# * Blocks are asked for **all** of a request's tokens, though only a chunk is computed now. Otherwise it comes in, finds
#   no room for its second chunk, and is thrown out with its work undone.
# * The first in line that cannot come in **holds up those behind it**. Letting a short one slip past looks clever:
#   it fills an empty seat. But short ones keep coming, and the long one never gets its blocks together.


# %%
def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    """Tokens that the first waiting requests compute in this step: one number for each that is let in.

    waiting:     tokens each has to compute, first in line first
    budget:      tokens left of this step
    seats:       how many more requests may run
    free_blocks: blocks of block_size tokens in the pool; a request is let in only if all its tokens would fit

    Example: admit([40, 3], budget=16, seats=8, free_blocks=16, block_size=4) is [16]: a first chunk, and nothing is left.
    """
    ### BEGIN SOLUTION
    shares = []
    for tokens in waiting:
        blocks = -(-tokens // block_size)
        if budget == 0 or len(shares) == seats or blocks > free_blocks:
            break
        free_blocks -= blocks
        shares.append(min(tokens, budget))
        budget -= shares[-1]
    return shares
    ### END SOLUTION


# %%
check("l07.admit")

# %% [markdown]
# ### Exercise 4: who gives way
#
# Requests grow while they run, and the pool was not asked whether all of them may grow to the end. When a running request
# needs a block and none is free, somebody loses all of theirs: *preemption*. Its tokens are kept, its keys and values are
# not; when its turn comes again it computes them anew, like a long prompt. Nothing is lost but time. Who should it be?


# %%
def choose_victim(running: list[tuple[int, int]]) -> int:
    """Index of the request that gives its blocks away: the least urgent.

    running: (priority, number of arrival) of each; a lower priority number is more urgent, then who came first

    Example: choose_victim([(5, 0), (0, 1), (0, 2)]) is 0.
    """
    ### BEGIN SOLUTION
    return max(range(len(running)), key=lambda i: running[i])
    ### END SOLUTION


# %%
check("l07.choose_victim")

# %% [markdown]
# ## See
#
# The engine's scheduler is a class (`scheduler_cls`), and this is a whole one, made of your decisions. What it inherits:
# the two queues, `_extend` (give a request the blocks for its next tokens; false if there are none) and `_preempt` (take
# them all back, put it in line again).

# %%
from minillm.engine.scheduler import Scheduled, Scheduler

my_share, my_admit, my_victim = use("l07.share_budget"), use("l07.admit"), use("l07.choose_victim")


class MyScheduler(Scheduler):
    """Your three decisions, before every step."""

    def _schedule_running(self):
        queue = sorted(self.running, key=self.rank)
        shares = my_share([request.num_new_tokens for request in queue], self.config.max_num_batched_tokens)
        scheduled, preempted = [], False
        while queue:
            request, share = queue.pop(0), shares.pop(0)
            while not self._extend(request, request.num_computed_tokens, share):
                left = [request, *queue]
                victim = left[my_victim([self.rank(r) for r in left])]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
                del shares[queue.index(victim)]
                queue.remove(victim)
            else:
                scheduled.append(Scheduled(request, request.num_computed_tokens, share))
        return scheduled, self.config.max_num_batched_tokens - sum(item.num_tokens for item in scheduled), preempted

    def _schedule_waiting(self, scheduled, budget):
        line, seats = list(self.waiting), self.config.max_num_seqs - len(self.running)
        shares = my_admit([r.num_tokens for r in line], budget, seats, self.pool.num_free, self.pool.block_size)
        for request, share in zip(line, shares, strict=False):
            self._extend(request, 0, share)
            self.running.append(request)
            self.waiting.remove(request)
            scheduled.append(Scheduled(request, 0, share))


# %% [markdown]
# Twelve users arrive one after the other. Rows are requests, columns are steps; watch seats change hands.


# %% tags=["expected"] alt="Timeline: one row per request, one column per step. Prefill chunks, decode steps, waiting and the end of each request are told apart by pattern; below, how many seats each step used."
def serve(engine: LLM, prompts, params, every: int = 0):
    """Queue the prompts (all at once, or one every `every` steps) and step until all are done; returns the requests."""
    requests, left, step = [], list(zip(prompts, params, strict=True)), 0
    while left or engine.engine.has_requests:
        while left and (not every or step % every == 0):
            requests += engine.submit(*left.pop(0))
            if every:
                break
        engine.engine.step()
        step += 1
    return requests


small = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_blocks": 128}
mine = LLM(NAME, scheduler_cls=MyScheduler, **small, **PLAIN)
few = [SamplingParams(temperature=0, max_tokens=max(4, n // 2), ignore_eos=True) for n in lengths[10:22]]
with mine.trace() as trace, LiveView(TimelineView(trace), pause=0.05):
    requests = serve(mine, prompts[:12], few, every=2)

# %%
mine = None  # let go of it: each engine holds its own copy of the weights
alone = LLM(NAME, max_num_seqs=1, **PLAIN)
vocabulary = alone.engine.runner.model.config.vocab_size
expected = [
    alone.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts[:12], few, strict=True)
]
same = sum(request.output_token_ids == tokens for request, tokens in zip(requests, expected, strict=True))
print(f"{same} of {len(requests)} requests gained the same tokens as each one alone")

# %% [markdown]
# Whoever shares a step with you changes nothing about your tokens. (In fp32, that is; in bf16 a sum taken in another order
# can tip a near-tie. Equal in distribution, not always in bits.)
#
# Now the whole crowd, all at once, and beside it what static batching would have done with the same requests. The upper
# half was run. The lower half is *modelled*, counted from the same lengths.

# %% tags=["expected"] alt="Two timelines above each other: continuous batching packs the seats tightly, static batching leaves most of each batch empty while its longest request runs."
alone = None
crowd = LLM(NAME, scheduler_cls=MyScheduler, max_num_seqs=SEATS, num_kv_blocks=128, **PLAIN)
with crowd.trace() as trace:
    crowd_requests = serve(crowd, prompts, params)
TimelineComparison(trace, batch_size=SEATS)

# %%
steps_run = len(trace.of(StepRan))
busy = sum(len(step.work) for step in trace.of(StepRan))
queue_left = [step for step in step_metrics(trace) if step.num_waiting]
while_queue = sum(step.num_running for step in queue_left) / (SEATS * max(1, len(queue_left)))
print(f"continuous: {steps_run} steps, slot utilisation {busy / (SEATS * steps_run):.0%}")
print(f"while anyone was waiting: {while_queue:.0%}; after that the last long requests run in a half-empty house")
reveal("l07.steps", round(count_static(lengths, SEATS) / steps_run, 1))

# %% [markdown]
# The tail at the end belongs to the longest request alone: it needs as many steps as it has tokens, and no scheduler can
# change that. (Only a faster step can. Lessons 10 and 11 shorten it in another way.)
#
# ## Measure
#
# ### In seconds
#
# Steps are not seconds: a fuller step takes longer. Both ways on the same engine, in turn; static batching is the engine
# that gets eight prompts and the next eight only when all are done.

# %% tags=["nbval-ignore-output"]
import statistics
import time

crowd = None
clock = time.thread_time if os.name == "posix" else time.perf_counter
server = LLM(NAME, max_num_seqs=SEATS, num_kv_blocks=128, **PLAIN)


def run_static() -> None:
    for first in range(0, len(prompts), SEATS):
        server.generate(prompts[first : first + SEATS], params[first : first + SEATS], use_tqdm=False)


def run_continuous() -> None:
    server.generate(prompts, params, use_tqdm=False)


seconds = {run_static: [], run_continuous: []}
for turn in range(4):
    for run, took in seconds.items():
        began = clock()
        run()
        if turn:
            took.append(clock() - began)
pairs = [a / b for a, b in zip(seconds[run_static], seconds[run_continuous], strict=True)]
print(
    f"continuous batching is {statistics.median(pairs):.2f} times as fast (from {min(pairs):.2f} to {max(pairs):.2f})"
)

# %% [markdown]
# Less than the ratio of steps. Why? The static batch was empty for two thirds, and an empty seat costs nothing *in this
# engine*, which runs only the requests that are there. What is saved is the fixed price of a step: reading the weights,
# and the overhead of a few hundred operations. A server that pads (every seat computes, busy or not) saves in full.
#
# ### What a seat costs
#
# So how does a step grow with its batch? This decides everything, and it depends on the machine.

# %% tags=["nbval-ignore-output"]
SIZES = (1, 2, 4, 8, 16, 32)
server = None
wide = LLM(NAME, max_num_seqs=32, num_kv_blocks=256, **PLAIN)
long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def step_seconds(batch: int) -> float:
    """Median time of a decode step of `batch` requests."""
    requests = wide.submit(prompts[:batch], long)
    wide.engine.step()
    took = []
    for _ in range(7):
        began = clock()
        wide.engine.step()
        took.append(clock() - began)
    for request in requests:
        wide.engine.abort(request.request_id)
    return statistics.median(took)


rounds = [[step_seconds(batch) for batch in SIZES] for _ in range(4)][1:]
relative = [[row[i] / row[0] for row in rounds] for i in range(len(SIZES))]
middle = [statistics.median(r) for r in relative]
reveal("l07.step16", round(middle[SIZES.index(16)], 1))
LineChart(
    f"One decode step of {NAME} against its batch, on this machine",
    Axis("requests in the step", log=True, ticks=SIZES),
    Axis("times a step of one", log=True),
    [
        Series("time of the step", SIZES, middle, [min(r) for r in relative], [max(r) for r in relative]),
        Series("tokens per second", SIZES, [size / m for size, m in zip(SIZES, middle, strict=True)]),
        Series("if a step cost the same at any size", SIZES, SIZES, style="modelled"),
    ],
    "The step grows with its batch, more slowly than the batch; tokens per second rise and then flatten.",
)

# %% [markdown]
# On a GPU the first line would stay flat up to a hundred requests or more, because decoding is short of bandwidth there
# and arithmetic is free (lesson 3's ridge). A CPU reaches its ridge after a few. Tokens per second is what the operator
# pays for; the time of a step is what each user feels. A batch trades one for the other.
#
# ### Chunks: whose wait?
#
# Seven users are reading their answers when an eighth brings a prompt of 600 tokens. The budget decides what happens. We
# count, in tokens computed, the largest step that the seven sit through, and how many steps the eighth waits for its
# first token.

# %%
reading = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 7
long_prompt = {"prompt_token_ids": [7 + i * 31 % (vocabulary - 8) for i in range(600)]}
wide = None


def newcomer(budget: int) -> tuple[int, int, int]:
    """The largest step while the seven read, steps until the eighth's first token, and readers who stood still in any."""
    engine = LLM(NAME, max_num_seqs=8, max_num_batched_tokens=budget, num_kv_blocks=128, **PLAIN)
    readers = engine.submit(prompts[:7], reading)
    while any(not reader.num_output_tokens for reader in readers):
        engine.engine.step()
    [eighth] = engine.submit(long_prompt, SamplingParams(temperature=0, max_tokens=2))
    largest = waited = stood_still = 0
    with engine.trace() as trace:
        while not eighth.num_output_tokens:
            at_it = sum(not reader.finished for reader in readers)
            engine.engine.step()
            work, waited = trace.of(StepRan)[-1].work, waited + 1
            largest = max(largest, sum(part.num_tokens for part in work) if at_it else 0)
            stood_still = max(stood_still, at_it - sum(part.kind == "decode" for part in work))
    return largest, waited, stood_still


print("budget   largest step while seven read   steps until the eighth's first token   readers who ever stood still")
for budget in (2048, 256, 64, 16):
    largest, waited, stood_still = newcomer(budget)
    print(f"{budget:6} {largest:31} {waited:38} {stood_still:30}")

# %% [markdown]
# A large budget serves the newcomer at once, and everyone's text stops for the length of a 600-token forward. A small one
# keeps the text flowing, and the newcomer waits. Nobody is ever left out of a step: that is your exercise 2. Servers with
# a promise about *time per output token* choose the budget by it; those with a promise about *time to first token* make
# it large.
#
# ### Preemption
#
# The same crowd, in pools of different sizes. Every request gets the same tokens in each; the price is counted in tokens
# that had to be computed twice.

# %%
reference = [request.output_token_ids for request in crowd_requests]


def in_a_pool_of(blocks: int) -> tuple[list[RequestPreempted], int, int]:
    """What was preempted, the steps, and the requests with the right tokens."""
    engine = LLM(NAME, scheduler_cls=MyScheduler, max_num_seqs=SEATS, num_kv_blocks=blocks, **PLAIN)
    with engine.trace() as trace:
        done = serve(engine, prompts, params)
    lost = trace.of(RequestPreempted)
    same = sum(a.output_token_ids == b for a, b in zip(done, reference, strict=True))
    return lost, len(trace.of(StepRan)), same


print("blocks   preemptions   tokens computed twice   steps   same tokens")
for blocks in (64, 28, 20, 14):
    lost, steps, same = in_a_pool_of(blocks)
    twice = sum(event.num_computed_tokens for event in lost)
    print(f"{blocks:6} {len(lost):13} {twice:23} {steps:7} {same:8} of {len(reference)}")

# %% [markdown]
# **Where continuous batching loses.** With one user there is nothing to batch. When all requests arrive together and have
# the same length (scoring a data set, say), static batches are already full and the decisions before every step are
# overhead. And with a pool that is too small, work is done twice: then fewer seats would be faster.
#
# ## Break it
#
# Five schedulers with one mistake each, on a trickle of short requests with one long prompt among them, in a small pool.
# **Guess first:** which mistakes change tokens? (Think about what a scheduler can possibly break.)


# %%
class Overtakes(Scheduler):
    """Lets whoever fits slip past the head of the line."""

    def _schedule_waiting(self, scheduled, budget):
        for request in sorted(self.waiting, key=lambda r: r.num_tokens):
            if budget > 0 and len(self.running) < self.config.max_num_seqs:
                admitted = self._admit(request, budget)
                if admitted is not None:
                    scheduled.append(admitted)
                    budget -= admitted.num_tokens


class PromptFirst(Scheduler):
    """A request that computes its prompt takes the whole step; the others stand still."""

    def schedule(self):
        scheduled = super().schedule()
        prompts_only = [item for item in scheduled if item.kind == "prefill"]
        return prompts_only or scheduled


class NoRoomCheck(Scheduler):
    """Lets requests in as soon as there is a block for their first token."""

    def _admit(self, request, budget):
        num_tokens = min(request.num_tokens, budget, self.pool.num_free * self.pool.block_size)
        if not num_tokens or not self._extend(request, 0, num_tokens):
            return None
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, 0, num_tokens)


class PreemptsFirst(Scheduler):
    """Takes the blocks of the request that has come first."""

    def rank(self, request):
        return (request.priority, -request.arrival)

    def add(self, request):
        super().add(request)
        self.waiting.sort(key=lambda r: r.arrival)


class KeepsCounter(Scheduler):
    """Preempts, but forgets to set back how many tokens are computed."""

    def _preempt(self, request):
        computed = request.num_computed_tokens
        super()._preempt(request)
        request.num_computed_tokens = computed - computed % self.pool.block_size

    def _admit(self, request, budget):
        if not request.num_computed_tokens:
            return super()._admit(request, budget)
        if not self._extend(request, 0, request.num_tokens):
            return None
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)


# %%
trickle = [prompts[i % 8] for i in range(24)]
trickle[6] = {"prompt_token_ids": long_prompt["prompt_token_ids"][:300]}
answers = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 24
alone = LLM(NAME, max_num_seqs=1, **PLAIN)
want = [alone.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(trickle, answers, strict=True)]
alone = None


def examine(scheduler_cls) -> tuple[int, int, int, int, int]:
    """Requests with the right tokens, steps, most steps without a token for anyone who decodes, the long one's wait, preemptions."""
    engine = LLM(
        NAME,
        scheduler_cls=scheduler_cls,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_kv_blocks=26,
        **PLAIN,
    )
    for pool in (engine.engine.runner.cache.keys, engine.engine.runner.cache.values):
        pool.zero_()  # slots that nobody has written hold chance otherwise, and what is wrong would differ every time
    with engine.trace() as trace:
        done = serve(engine, trickle, answers, every=2)
    steps, last_seen, longest_stall, first_of_long = 0, {}, 0, None
    for step in trace.of(StepRan):
        steps += 1
        for work in step.work:
            if work.kind == "decode" and work.request_id in last_seen:
                longest_stall = max(longest_stall, steps - last_seen[work.request_id] - 1)
            last_seen[work.request_id] = steps
            if work.request_id == done[6].request_id and first_of_long is None:
                first_of_long = steps - 12  # it arrived before step 13
    same = sum(request.output_token_ids == tokens for request, tokens in zip(done, want, strict=True))
    return same, steps, longest_stall, first_of_long, len(trace.of(RequestPreempted))


print(f"{'':14} same tokens   steps   longest stall   long prompt waited   preemptions")
for kind in (Scheduler, Overtakes, PromptFirst, NoRoomCheck, PreemptsFirst, KeepsCounter):
    same, steps, stall, waited, preemptions = examine(kind)
    print(f"{kind.__name__:14} {same:4} of {len(want)} {steps:9} {stall:15} {waited:20} {preemptions:13}")

# %% [markdown]
# A scheduler decides *when*, not *what*. Most of its mistakes leave every token right and show only in somebody's waiting
# time, so a test that compares tokens passes them all. They need tests that count: how long nobody got a token, how long
# the unlucky one waited, how much was computed twice. Only the mistake about *state* (what is in the cache) changes text.
#
# ## In the field
#
# | system | who decides | chunks | when memory runs dry |
# |---|---|---|---|
# | vLLM (V1) | one token budget per step, running requests first | always; `long_prefill_token_threshold` caps one prompt | preempt the last by recompute |
# | SGLang | prefill batches are preferred; chunked prefill can be mixed in | `chunked_prefill_size` | retract running requests, lowest progress first |
# | TensorRT-LLM | "in-flight batching" | optional | pause and resume |
# | llama.cpp server | fixed slots (`--parallel`) that share one batch | `--ubatch-size` | slots are bounded, contexts are shifted |
# | transformers `generate_batch` | its own continuous batching over a paged cache | by token budget | evicts and re-queues |
#
# **Claims, and what is so.**
#
# | claim | what is so | tested where |
# |---|---|---|
# | paging and continuous batching alone give 2–3× over naive serving | in steps, more than that for these lengths; in seconds it depends on what an empty seat costs. Without lengths, seats and machine the number says nothing | first two measurements |
# | "In continuous batching everyone gets faster" | throughput rises; each step gets slower, so a single user's text comes *slower* than alone | what a seat costs |
# | preemption loses work | it loses time, never a token | the table of pools |
#
# **Papers.** Yu et al. 2022, *Orca* (scheduling by iteration). Kwon et al. 2023, *PagedAttention* (preemption by
# recompute). Agrawal et al. 2024, *Sarathi-Serve* (chunked prefill against stalls).
#
# ## Recap
#
# 1. A static batch is as slow as its longest request; with heavy-tailed lengths most seats stand empty.
# 2. Deciding before every step keeps seats busy as long as anyone waits. The tail belongs to the longest request.
# 3. One budget mixes decoding and pieces of prompts, so nobody's text stops; its size trades first tokens against flow.
# 4. Admit with room for the whole request, let nobody overtake, preempt the least urgent: time is lost, never tokens.
# 5. Scheduling mistakes hide from every test that only compares tokens. Count waits.
#
# **Next:** lesson 8 goes below PyTorch, to your first GPU kernels.
