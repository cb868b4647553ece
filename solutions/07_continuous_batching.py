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
# **Question.** *Thirty-two requests with completions of every length share one model. Which of them run in the next
# step?*
#
# Lesson 3 found that a step reads all weights once, whether one request uses them or eight. So a server runs many
# requests together, as a **[batch](glossary.md#batch)**. The obvious way is to collect eight requests, run them until
# all are done, and take the next eight: **static batching**. Deep learning has always batched like this. For text it
# wastes most of the machine, because eight completions never end together.
#
# **[Continuous batching](glossary.md#continuous-batching)** decides before every step which requests run. A request
# that is done leaves at once, and a waiting one takes its seat. A long prompt is computed in pieces, in the same steps
# as other requests. When memory runs out, a request is put back into the queue. The part of an engine that decides this
# is the **scheduler**. You build its three decisions, run them in the real engine, and watch which request runs when.
#
# You need lesson 6 ([blocks](glossary.md#block) and the pool). Everything runs on a laptop's CPU. The engine runs each
# step as one [compiled function](glossary.md#compiled-step), as it does by default on a CPU (lesson 15 looks into it).
# It is compiled the first time it runs on a machine, which takes up to a minute behind a progress bar.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.models.held_out import held_out_prompts
from minillm.trace.step_metrics import step_metrics
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.teaching.exercises.l07_continuous_batching import heavy_tailed_lengths
from minillm.teaching.workshop.l07_serving import serve_late_prompt, serve, serve_traced, starts_and_ends
from minillm.trace import StepRan
from minillm.viz import LiveView, TimelineComparison, TimelineView
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
WHOLE = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False}  # every prompt from its first token

SEATS = 8
lengths = heavy_tailed_lengths(32)
prompts = [p.prompt for p in held_out_prompts(80) if len(p.prompt) < 260][:32]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
print(f"{len(lengths)} requests; output lengths: {', '.join(map(str, lengths))}")
print(
    f"{sum(lengths)} tokens in all; half of the completions have at most {sorted(lengths)[15]}, the longest {max(lengths)}"
)
claim(
    "The longest completion is more than ten times as long as the median one.", max(lengths) > 10 * sorted(lengths)[15]
)

# %% [markdown]
# ## The question, in numbers
#
# These lengths are **heavy-tailed**: most are short, a few very long. Real traffic looks like that, and no length is
# known before the completion has ended.
#
# The engine has eight **seats**: at most eight requests run in one step (`max_num_seqs`). If every seat were busy in
# every step, the work would take `tokens / 8` steps. The share of seats that are busy is the **slot utilisation** (a
# slot of the batch is a seat, not a slot of the cache). The first half of the lesson is about that number.
#
# ## Predict
#
# 1. *Static* batching: batches of eight in the order given, each as long as its longest request. What is the slot
#    utilisation, in percent?
# 2. *Continuous* batching: how many times fewer steps does it need for the same 32 requests?
# 3. On your machine: how many times longer does a decode step of 16 requests take than a step of one?

# %%
predict("l07.utilisation", None, unit="percent")
predict("l07.steps", None, unit="times fewer")
predict("l07.step16", None, unit="times longer")

# %% [markdown]
# ## Build
#
# ### Exercise 1: steps of static batching
#
# Count the steps of static batching: one step per output token, without the prompts. (The run of 32 requests below
# computes the prompts, too. That does not change the count: each prompt there fits into one step, and that step gives
# the first output token.)


# %%
def static_steps(lengths: list[int], batch_size: int) -> int:
    """Return the steps until all are done, in batches of batch_size in the order given; none joins a running batch.

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
busy_share = {size: sum(lengths) / (size * count_static(lengths, size)) for size in (1, 2, 4, 8, 16, 32)}
print("slot utilisation by batch size:", ", ".join(f"{size}: {share:.0%}" for size, share in busy_share.items()))
claim("About two seats of three are empty.", 0.6 < 1 - busy_share[8] < 0.73)
claim(
    "The larger the batch, the larger the share of empty seats.",
    sorted(busy_share.values(), reverse=True) == [*busy_share.values()],
)

# %% [markdown]
# The empty seats belong to requests that are done, while the longest request of their batch still runs. Larger batches
# make it worse: the longest of 32 is longer than the longest of 8.
#
# ### Exercise 2: share the budget of a step
#
# A step may compute a limited number of tokens, the **[token budget](glossary.md#token-budget)** (vLLM's
# `max_num_batched_tokens`). A decoding request needs one token of it. A request whose prompt is not computed yet could
# use hundreds. If it takes the whole budget, every other request stalls, and users see their text stop. If it gets
# nothing, its own user waits forever.
#
# So prompts are computed in **[chunks](glossary.md#chunked-prefill)**, over several steps. The most urgent request
# takes as many tokens as it can use, but leaves at least one token for every request behind it.


# %%
def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Return the tokens that each running request computes in this step; each gets at least one.

    wanted: tokens that each could compute now, most urgent first: the rest of its prompt, or 1 once it decodes
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
# ### Exercise 3: who is admitted
#
# What is left of the budget goes to the waiting requests. Three things can run out: seats, tokens and blocks.
#
# * A request is admitted only if blocks are free for **all** of its tokens, though only a chunk is computed now. Without
#   this rule it could be admitted, find no blocks for its second chunk, be preempted, and lose its work.
# * The first request in the queue that cannot be admitted **blocks those behind it**. Letting a short one overtake
#   would fill an empty seat. But short requests keep arriving, and the long one would never find enough free blocks.


# %%
def admit(waiting: list[int], budget: int, seats: int, free_blocks: int, block_size: int) -> list[int]:
    """Return the tokens that each admitted request computes in this step, for the first requests in the queue.

    waiting:     tokens that each request has to compute, in the order of the queue
    budget:      tokens left of this step
    seats:       how many more requests may run
    free_blocks: blocks of block_size tokens in the pool; a request is admitted only if all its tokens would fit

    Example: admit([40, 3], budget=16, seats=8, free_blocks=16, block_size=4) is [16]: a chunk, and no budget is left.
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
# ### Exercise 4: who is preempted
#
# Requests grow while they run. Admission checked the blocks for the tokens that a request had then, not for all that it
# will generate. When a running request needs a block and none is free, one request is
# **[preempted](glossary.md#preempt)**: it loses all of its blocks and returns to the queue. Its tokens are kept; its
# keys and values are not. When it is admitted again, they are recomputed like those of a long prompt. Only time is
# lost.
#
# It should be the least urgent request. Then the most urgent one keeps its blocks as long as another request can give
# up its own. So it ends, its blocks become free, and the engine makes progress. And no request is set back by a less
# urgent one.


# %%
def choose_victim(running: list[tuple[int, int]]) -> int:
    """Return the index of the request that is preempted: the least urgent.

    running: (priority, arrival number) of each; a lower priority number is more urgent, then a lower arrival number

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
# The engine's scheduler is a class (`scheduler_cls`), and this is one with your decisions. Before every step the engine
# calls `schedule`, which calls `_schedule_running` and then, unless a request was preempted, `_schedule_waiting` with
# the rest of the budget. `schedule` is inherited. So are the two queues, `rank` (the pair of numbers of exercise 4),
# `_preempt` (free all blocks of a request and put it back into the queue) and the KV cache manager, whose
# `allocate_slots` gives a request the blocks for its next tokens (false if too few are free).

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
            while not self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens, share):
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
        queue, seats = list(self.waiting), self.config.max_num_seqs - len(self.running)
        shares = my_admit([r.num_tokens for r in queue], budget, seats, self.pool.num_free, self.pool.block_size)
        for request, share in zip(queue, shares, strict=False):
            self.kv_cache_manager.allocate_slots(request, 0, share)
            self.running.append(request)
            self.waiting.remove(request)
            scheduled.append(Scheduled(request, 0, share))


# %% [markdown]
# Twelve requests arrive, one every two steps, at an engine with four seats.

# %%
LLM(NAME, **WHOLE).generate("x = ", SamplingParams(max_tokens=2), use_tqdm=False)  # compiles the step if needed
small = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_blocks": 128}
few = [SamplingParams(temperature=0, max_tokens=max(4, n // 2), ignore_eos=True) for n in lengths[10:22]]

# %% [markdown]
# Rows are requests, columns are steps. Watch how seats are reused: the last two requests find all four busy, and each
# of them begins in the step after another row has ended.

# %% tags=["expected"] alt="Timeline: one row per request, one column per step. Prefill chunks, decode steps, waiting and the end of each request are told apart by pattern; below, how many seats each step used."
mine = LLM(NAME, scheduler_cls=MyScheduler, **small, **WHOLE)
with mine.trace() as trace, LiveView(TimelineView(trace), seconds=10):
    requests = serve(mine, prompts[:12], few, every=2)
del mine  # each engine holds its own copy of the weights

# %%
alone = LLM(NAME, max_num_seqs=1, **WHOLE)
vocabulary = alone.engine.runner.model.config.vocab_size
expected = [
    alone.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts[:12], few, strict=True)
]
del alone
same = sum(request.output_token_ids == tokens for request, tokens in zip(requests, expected, strict=True))
print(f"{same} of {len(requests)} requests have the same tokens as each one alone")
claim("The other requests of a step change no token.", same == len(requests))

# %% [markdown]
# (This engine's compiled step adds in one fixed order, whatever else is in the batch. PyTorch and GPU libraries choose
# a kernel, and with it the order, by the number of rows. Then the last bits of a sum depend on the other requests, more
# in bfloat16 than in float32, and may decide between two tokens of nearly equal probability.)
#
# Now all 32 requests arrive at once. The upper half of the picture shows this run. The lower half is *modelled*: static
# batching of the same requests, counted from their lengths.

# %% tags=["expected"] alt="Two timelines above each other: continuous batching fills all seats while requests wait, then ends in a long tail of few requests; static batching leaves most of each batch empty while its longest request runs."
crowd = LLM(NAME, scheduler_cls=MyScheduler, max_num_seqs=SEATS, num_kv_blocks=128, **WHOLE)
with crowd.trace() as crowd_trace:
    crowd_requests = serve(crowd, prompts, params)
del crowd
TimelineComparison(crowd_trace, batch_size=SEATS)

# %%
steps_run = len(crowd_trace.of(StepRan))
busy = sum(len(step.work) for step in crowd_trace.of(StepRan))
queue_left = [step for step in step_metrics(crowd_trace) if step.num_waiting]
rest = [step for step in step_metrics(crowd_trace) if not step.num_waiting]
while_queue, after = (sum(s.num_running for s in part) / (SEATS * max(1, len(part))) for part in (queue_left, rest))
print(f"continuous: {steps_run} steps, slot utilisation {busy / (SEATS * steps_run):.0%}")
print(f"{len(queue_left)} steps while any request was waiting: {while_queue:.0%}; the {len(rest)} others: {after:.0%}")
steps_ratio = count_static(lengths, SEATS) / steps_run
reveal("l07.steps", round(steps_ratio, 1))
claim("While any request waits, every seat is busy.", while_queue == 1)
claim("After that, fewer than half of the seats are.", after < 0.5)
claim("Continuous batching needs a little more than half of the steps.", 1.75 < steps_ratio < 2)

# %% [markdown]
# ### Where the tail comes from
#
# With every seat busy in every step, the run would take 75 steps. It took 128, because the queue was empty long before
# the last request was done. Which request was the last, and could another order have helped? A free seat goes to the
# next request in the queue, so the steps can be counted without an engine:

# %%
spans = starts_and_ends(lengths, SEATS)
last = max(range(len(spans)), key=lambda i: spans[i][1])
start, end = spans[last]
print(f"the count says {end} steps, the engine ran {steps_run}")
print(f"the last to finish: request {last + 1}, {lengths[last]} tokens, admitted at step {start}, done at step {end}")
orders = {"as given": lengths, "shortest first": sorted(lengths), "longest first": sorted(lengths, reverse=True)}
needed = {name: max(end for _, end in starts_and_ends(order, SEATS)) for name, order in orders.items()}
print("steps by order of submission:", ", ".join(f"{name} {steps}" for name, steps in needed.items()))
claim("The count agrees with the engine.", end == steps_run)
claim("The last to finish is not the longest request.", lengths[last] < max(lengths))
claim(
    "With the longest first, the longest request alone sets the number of steps.",
    needed["longest first"] == max(lengths),
)
claim("With the shortest first, it takes the most steps.", max(needed, key=needed.get) == "shortest first")

# %% [markdown]
# The last to finish had to wait for a seat until a third of the steps were over. A scheduler that starts long requests
# first would have ended 32 steps earlier. No order can do better than the longest request: it needs one step per token.
# But a server does not know which request will be long, so it takes them in order of arrival. (Some servers predict the
# length. A server that minimises the average wait and not the total time would start the *short* ones first.)
#
# ## Measure
#
# ### In seconds
#
# Steps are not seconds: a fuller step takes longer. Both methods run on the same engine, alternately. For static
# batching the engine gets eight prompts, and the next eight only when all are done.

# %% tags=["nbval-ignore-output"]
import statistics

from minillm.bench.timing import clock

server = LLM(NAME, max_num_seqs=SEATS, num_kv_blocks=128, **WHOLE)


def run_static() -> None:
    for first in range(0, len(prompts), SEATS):
        server.generate(prompts[first : first + SEATS], params[first : first + SEATS], use_tqdm=False)


def run_continuous() -> None:
    server.generate(prompts, params, use_tqdm=False)


server.generate(prompts[0], params[0], use_tqdm=False)  # to warm up
seconds = {run_static: [], run_continuous: []}
for _ in range(3):
    for run, took in seconds.items():
        began = clock()
        run()
        took.append(clock() - began)
pairs = [a / b for a, b in zip(seconds[run_static], seconds[run_continuous], strict=True)]
faster = statistics.median(pairs)
print(f"continuous batching is {faster:.2f} times as fast (from {min(pairs):.2f} to {max(pairs):.2f})")
claim("Continuous batching takes less time.", faster > 1, measured=True)
claim(f"It gains less in seconds than in steps ({steps_ratio:.1f} times).", faster < steps_ratio, measured=True)

# %% [markdown]
# Why less? Two thirds of the static batch were empty, and an empty seat costs nothing *in this engine*, which computes
# only busy seats. What is saved is the fixed cost of a step: reading the weights, and the overhead of the engine. A
# server that pads, so that every seat computes whether it is busy or not, saves as much time as steps.
#
# ### What a seat costs
#
# How does the time of a step grow with its batch? That depends on the machine.

# %% tags=["nbval-ignore-output"]
SIZES = (1, 2, 4, 8, 16, 32)
server = None
wide = LLM(NAME, max_num_seqs=32, num_kv_blocks=512, **WHOLE)
long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def step_seconds() -> dict[int, float]:
    """Median time of a decode step for each batch in SIZES: 32 requests decode, then all but 16 of them leave, …"""
    requests = wide.submit(prompts, long)
    while not all(request.num_output_tokens for request in requests):
        wide.engine.step()
    medians = {}
    for batch in reversed(SIZES):
        while len(requests) > batch:
            wide.engine.abort(requests.pop().request_id)
        took = []
        for _ in range(7):
            began = clock()
            wide.engine.step()
            took.append(clock() - began)
        medians[batch] = statistics.median(took)
    wide.engine.abort(requests.pop().request_id)
    return medians


rounds = [step_seconds() for _ in range(4)][1:]
relative = [[times[size] / times[1] for times in rounds] for size in SIZES]
middle = [statistics.median(r) for r in relative]
rate = [size / m for size, m in zip(SIZES, middle, strict=True)]
reveal("l07.step16", round(middle[SIZES.index(16)], 1))
print(
    f"from 16 requests to 32: the step takes {middle[-1] / middle[-2]:.2f} times as long, "
    f"tokens per second rise by {rate[-1] / rate[-2] - 1:.0%}"
)
claim("A step of 16 takes longer than a step of one, but much less than 16 times.", 1 < middle[4] < 8, measured=True)
claim(
    "From 16 to 32 requests, tokens per second rise by less than half.",
    rate[-1] / rate[-2] < 1.5,
    measured=True,
)
LineChart(
    f"One decode step of {NAME} against its batch, on this machine",
    Axis("requests in the step", log=True, ticks=SIZES),
    Axis("times the value at one request", log=True),
    [
        Series("time of the step", SIZES, middle, [min(r) for r in relative], [max(r) for r in relative]),
        Series("tokens per second", SIZES, rate),
        Series("tokens per second, if a step cost the same at any size", SIZES, SIZES, style="modelled"),
    ],
    f"A step of 32 requests takes {middle[-1]:.1f} times as long as a step of one, "
    f"and gives {rate[-1]:.1f} times as many tokens per second.",
)

# %% [markdown]
# On a GPU the first line rises more slowly. On an H100, with the shape of an 8B model in 16 bits, after 512 tokens, a
# step of 32 requests took 1.18 times as long as a step of one, and a step of 128 requests 1.74 times (measured:
# docs/gpu.md). Decoding is limited by memory there, and the arithmetic of more requests is almost free. But each
# request adds the bytes of its own cache: at 512 tokens, those of 128 requests are more than half the bytes of the
# weights, and at 4096 tokens, those of 64 requests are twice the bytes of the weights (lesson 3). On a CPU the ridge
# comes earlier, so each further request costs more. The operator wants many tokens per second (**throughput**); each
# user wants short waits (**latency**). A larger batch makes each step longer (on a GPU often only a little), so each
# user's text comes more slowly; but fewer requests have to wait for a seat. It improves throughput until the arithmetic
# is the limit.
#
# ### Chunks: which request waits?
#
# Seven requests are decoding when an eighth arrives with a prompt of 600 tokens. The budget decides what happens. Three
# things are counted: the tokens of the largest step while the seven decode, the steps until the eighth has its first
# token, and the most decoding requests that any step left out.

# %%
decode_params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 7
long_prompt = {"prompt_token_ids": [7 + i * 31 % (vocabulary - 8) for i in range(600)]}
wide = None


print(
    "budget   largest step while seven decode   steps until the eighth's first token   most requests left out of a step"
)
seen = {}
for budget in (2048, 256, 64, 16):
    engine = LLM(
        NAME, max_num_seqs=8, max_num_batched_tokens=budget, num_kv_blocks=128, scheduler_cls=MyScheduler, **WHOLE
    )
    seen[budget] = serve_late_prompt(engine, prompts[:7], decode_params, long_prompt)
    largest, waited, left_out = seen[budget].largest_step, seen[budget].steps_waited, seen[budget].most_left_out
    print(f"{budget:6} {largest:33} {waited:38} {left_out:34}")
    del engine
largest, waits = ([getattr(one, name) for one in seen.values()] for name in ("largest_step", "steps_waited"))
claim("No decoding request is ever left out of a step.", not any(one.most_left_out for one in seen.values()))
claim("The smaller the budget, the smaller the largest step.", largest == sorted(largest, reverse=True))
claim("The smaller the budget, the more steps the eighth waits.", waits == sorted(waits))

# %% [markdown]
# With a large budget the eighth request is served at once, and the text of all others stops for the length of a 600-token
# forward. With a small budget the others continue in short steps, and the eighth waits for more of them. (Steps are not
# seconds: a small step is shorter. All of them together compute the same 600 tokens of the prompt, and what the others
# decode meanwhile; but each has a fixed cost. With a budget of 16 the eighth gets nine tokens a step, and one more each
# time one of the seven has ended, which is why it waits for fewer than ⌈600 / 9⌉ = 67 steps.) Your `share_budget` ensures
# that no decoding request is left out. Servers that promise a **[time per output token](glossary.md#tpot)** choose the
# budget by it; those that promise a **[time to first token](glossary.md#ttft)** make it large.
#
# ### Preemption
#
# The same 32 requests run in pools of different sizes. The cost is counted in tokens whose keys and values were
# computed twice.

# %%
reference = [request.output_token_ids for request in crowd_requests]


print("blocks   preemptions   tokens computed twice   steps   same tokens")
pools = {}
for blocks in (64, 28, 20, 14):
    engine = LLM(NAME, scheduler_cls=MyScheduler, max_num_seqs=SEATS, num_kv_blocks=blocks, **WHOLE)
    served = pools[blocks] = serve_traced(engine, prompts, params)
    del engine
    print(
        f"{blocks:6} {len(served.preempted):13} {served.computed_twice:23} {served.steps:7} "
        f"{served.same_tokens(reference):8} of {len(reference)}"
    )
twice = [served.computed_twice for served in pools.values()]
claim(
    "In every pool, every request gets the same tokens.",
    all(p.same_tokens(reference) == len(reference) for p in pools.values()),
)
claim("The smaller the pool, the more is computed twice.", twice == sorted(set(twice)) and twice[0] == 0, of_model=True)

# %% [markdown]
# **Where continuous batching loses.** With one request there is nothing to batch. When all requests arrive together and
# have the same length (scoring a data set, say), static batches are already full and the decisions before every step
# are overhead. And when the pool is too small for the seats, work is done twice.
#
# ## Break it
#
# Here are five schedulers with one mistake each. Short requests arrive one after the other, with one long prompt among
# them, in a small pool. **Guess first:** which mistakes change tokens? (Think about what a scheduler can possibly
# break. In the table, a *stall* is a series of steps in which a decoding request gets no token. The wait of a preempted
# request is not in it, so look at the preemptions as well.)


# %%
from minillm.teaching.workshop.l07_broken import BROKEN

for kind in BROKEN:
    print(f"{kind.__name__:14} {kind.__doc__}")

# %%
trickle = [prompts[i % 8] for i in range(24)]
trickle[6] = {"prompt_token_ids": long_prompt["prompt_token_ids"][:300]}
answers = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 24
alone = LLM(NAME, max_num_seqs=1, **WHOLE)
want = [alone.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(trickle, answers, strict=True)]
alone = None
tight = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_kv_blocks": 26}

# %%
print(f"{'':14} same tokens   steps   longest stall   long prompt waited   preemptions")
results = {}
for kind in (Scheduler, *BROKEN):
    engine = LLM(NAME, scheduler_cls=kind, **tight, **WHOLE)
    served = serve_traced(engine, trickle, answers, every=2)
    del engine
    same, stall, preemptions = served.same_tokens(want), served.longest_stall(), len(served.preempted)
    waited = served.first_step_of(6) - 13  # the long prompt, number 6, arrives before step 13 and could run in it
    results[kind.__name__] = (same, stall, waited, preemptions, served.steps)
    print(f"{kind.__name__:14} {same:4} of {len(want)} {served.steps:9} {stall:15} {waited:20} {preemptions:13}")
right = results["Scheduler"]
wrong_tokens = [name for name, found in results.items() if found[0] < len(want)]
claim("Only the scheduler that keeps its counter changes tokens.", wrong_tokens == ["KeepsCounter"], of_model=True)
claim(
    "Overtaking makes the long prompt wait at least three times as long.",
    results["Overtakes"][2] >= 3 * right[2],
    of_model=True,
)
claim(
    "Prompts first: some request gets no token for several steps.",
    results["PromptFirst"][1] > 3 > right[1],
    of_model=True,
)
claim(
    "Without the check for free blocks there are many more preemptions.",
    results["NoRoomCheck"][3] > 3 * right[3],
    of_model=True,
)
claim(
    "Three of the five mistakes need fewer steps than the right scheduler.",
    sum(found[4] < right[4] for found in results.values()) == 3,
    of_model=True,
)
claim(
    "PreemptsFirst changes no token, no stall and no wait for the long prompt.",
    results["PreemptsFirst"][:3] == right[:3],
    of_model=True,
)

# %% [markdown]
# A scheduler decides *when* a token is computed, not *which* token it is. Most of its mistakes leave every token right
# and only make some request wait, or compute something twice, so a test that compares tokens does not detect them. Nor
# does the number of steps: three of the five need fewer than the right scheduler. Of these columns, `PreemptsFirst`
# changes only the steps and the number of preemptions. It needs a test of the decision itself: which request was
# preempted. The others need tests that count: how long a request got no token, how long it waited to start, how much
# was computed twice. Only the mistake about *state* (what is in the cache) changes text.
#
# ## In the field
#
# | system | scheduling | chunks | when memory runs out |
# |---|---|---|---|
# | vLLM (V1) | one token budget per step, running requests first | by default; `long_prefill_token_threshold` caps one prompt | preempt the last by recompute |
# | SGLang | prefill batches are preferred; chunked prefill can be mixed in | `chunked_prefill_size` | retract running requests, those with the fewest output tokens first |
# | TensorRT-LLM | "in-flight batching" | optional | by default it admits only what can run to its end; with `MAX_UTILIZATION` it pauses requests |
# | llama.cpp server | fixed slots (`--parallel`) that share one batch | `--batch-size`, computed in pieces of `--ubatch-size` | slots are bounded; with `--context-shift` the oldest tokens of a full slot are dropped |
# | transformers `generate_batch` | its own continuous batching over a paged cache | by token budget | evicts and re-queues |
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | paging and continuous batching alone give 2–3× over naive serving | for these lengths, continuous batching needs 1.9 times fewer steps than static batching, and saves less than that in seconds, because an empty seat costs nothing here. Without lengths, seats and machine the number says nothing | the picture of 32 requests, in seconds |
# | continuous batching makes generation faster for everyone | tokens per second rise up to some batch; each step takes longer, so a single user's text comes *slower* than alone | what a seat costs |
# | preemption loses work | it loses time, never a token | the table of pools |
#
# **Papers.** Yu et al. 2022, *Orca* (iteration-level scheduling). Kwon et al. 2023, *PagedAttention* (preemption by
# recompute). Agrawal et al. 2024, *Sarathi-Serve* (chunked prefill against stalls).
#
# ## Recap
#
# 1. A static batch takes as many steps as its longest request; with heavy-tailed lengths most seats stand empty.
# 2. Deciding before every step keeps all seats busy as long as a request waits and finds free blocks. After that, the
#    end depends on when the long requests were started.
# 3. One budget is shared by decoding and chunks of prompts, so no request stalls. A small budget delays first tokens, a
#    large one makes long steps.
# 4. Admit a request only with free blocks for all its tokens, let none overtake, preempt the least urgent: time is
#    lost, never tokens.
# 5. Tests that only compare tokens miss most scheduling mistakes. Count waiting times.
#
# **Next:** lesson 8 goes below PyTorch, to your first GPU kernels.
