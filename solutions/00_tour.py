# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 0. Tour: watch an engine think
#
# **Question.** *What does an inference engine do between your prompt and its answer?*
#
# From outside, a language model is a function: text in, text out. Inside an engine three things repeat: memory
# **[pages](glossary.md#block)** (also called blocks) fill up with what past tokens leave behind, a small model proposes
# the next tokens, and a large model decides which of them to accept. In this lesson you watch all three on a real
# model, change the settings yourself, and count what they gain.
#
# There is nothing to build here. This lesson shows what the parts are for; the lessons after it build them one by one.

# %%
import os

from minillm import LLM, SamplingParams
from minillm.teaching import claim, predict, reveal
from minillm.viz import AcceptanceStrip, CachePagesView, CacheState, LiveView, show

TARGET = os.environ.get("MINILLM_MODEL", "minicoder")
DRAFT = os.environ.get("MINILLM_DRAFT", "minicoder-draft")

prompts = [
    "def read_lines(path):\n    with open(path) as f:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "    def __repr__(self):\n        return ",
    "    for name in sorted(os.listdir(path)):\n        if ",
    "    try:\n        value = int(text)\n    except ValueError:\n        raise ",
]
greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

# %% [markdown]
# ## Predict
#
# You will see three requests of 10 to 30 prompt tokens each, and 48 new tokens for each of them. They are generated
# with **[speculative decoding](glossary.md#speculative-decoding)**: a small, cheap **[draft model](glossary.md#draft)**
# proposes the next four tokens (the **drafts**; their number is called **γ**), and the large model, the
# **[target](glossary.md#target)**, accepts or rejects them. That is one **[round](glossary.md#round)**. Write down a
# number for each question before you look:
#
# 1. The target is the expensive model; one run of it is a **[forward](glossary.md#forward)**. With four drafts a round,
#    **how many new tokens does a request get from each forward of the target** on average? (1 means that the drafts are
#    useless, 5 that they are always accepted.)
# 2. The engine works in **[steps](glossary.md#step)**: in each, all running requests go through the model together. The
#    memory for **[keys and values](glossary.md#kv-cache)** (what attention needs of past tokens) is allocated in
#    pages of 16 **slots**, one slot per token. At the end of the step with the most pages in use (the first, if several
#    have as many), **what share of the slots in these pages is empty**, in percent?

# %%
predict("l00.tokens_per_forward", None, unit="tokens")
predict("l00.waste", None, unit="percent")

# %% [markdown]
# ## Set up
#
# Create the engine first. On a CPU it runs each step as one **[compiled function](glossary.md#compiled-step)**. The
# first run on a machine compiles this function, which takes up to a minute and shows a progress bar. Later runs load
# it from disk.


# %% tags=["nbval-ignore-output"]
def engine(page_size: int = 16, drafts: int = 4, pool_tokens: int = 384) -> LLM:
    """An engine whose pool has `pool_tokens` slots in pages of `page_size`, with `drafts` draft tokens a round."""
    speculative = None
    if drafts:  # always as many, whether they pay or not, so that the pictures are the same on every machine
        speculative = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": drafts, "adaptive": False}
    blocks = pool_tokens // page_size
    return LLM(TARGET, dtype="float32", block_size=page_size, num_kv_blocks=blocks, speculative_config=speculative)


engine().generate("x = ", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)  # compiles on the first run
llm = engine()
print("ready")

# %% [markdown]
# ## See
#
# Run the cell and watch. On the left is the memory. The letter on a page names the request that owns it; dark slots
# were written in the current step. *40 of 41* beside a request means that the keys and values of 40 of its 41 tokens
# are in the cache: the newest token was chosen, but has not been through the model yet. On the right are the rounds of
# one request: the tokens that the draft model proposed, which of them the target accepted, and the token that the
# target added. (If a draft was rejected, the legend calls it *recovered from the residual*, a term of lesson 10.)
#
# The engine runs first, in a second or two, and records its events. The recording then plays slowly once it is visible
# on your screen. You can pause it, step through it with the arrow keys, choose another speed, or read it as text.

# %% tags=["expected"] alt="Left, cache pages of three requests with their block tables, dark where a slot was just written. Right, the rounds of one request: accepted drafts with a check mark, rejected ones crossed out, and the tokens that the target added."
with (
    llm.trace() as trace,
    LiveView(CachePagesView(trace, narrow=True), AcceptanceStrip(trace, narrow=True), seconds=15),
):
    outputs = llm.generate(prompts[:3], greedy, use_tqdm=False)

# %% [markdown]
# These are the three texts. The model has 12 million parameters and was trained on nothing but Python source. Expect
# code that looks right, not code that is right. A small model that always takes its most probable token repeats itself:
# look for lines that come again.

# %%
for letter, output in zip("ABC", outputs, strict=True):
    print(f"--- request {letter}", output.prompt + output.outputs[0].text, sep="\n")

# %% [markdown]
# ## Look closer: four pictures
#
# The trace holds every event of the run, so any step can be drawn again. First the **[prefill](glossary.md#prefill)**:
# all prompt tokens of a request go through the model together, because all of them are known already. One step writes
# the slots of whole prompts.

# %%
from minillm.trace import StepRan, StepStarted
from minillm.trace.moments import first_preemption, first_rejected_round

pages = CachePagesView(trace)
show(pages, step=trace.of(StepStarted)[0].step)

# %% [markdown]
# Next comes **verification**: the target runs one forward over the last token of a request and its four drafts, five
# tokens in all, and so checks all four drafts at once. Rejected drafts leave invalid keys and values in their slots.
# These slots are hatched here and count as empty; the next round overwrites them. To take the rejected tokens back, the
# engine lowers one counter and frees pages that hold only rejected tokens, except the page that the next token needs.
# Nothing is copied or erased.

# %%
moment = first_rejected_round(trace)
show(pages, step=moment.step)

# %% [markdown]
# These are the tokens of the same step. Every draft after the first rejected one is thrown away, even if it matches,
# because it continues a text that was rejected.

# %%
show(AcceptanceStrip(trace, request_id=moment.request_id), step=moment.step)

# %% [markdown]
# At the **end** no page has an owner. A **block table** is the list of one request's pages; a dashed table is that of a
# finished request. (A page can be in two of them: one request took it after another had ended.) Full pages are
# ***[cached](glossary.md#cached)***: they are free, but keep their keys and values until their memory is needed. A new
# request whose prompt starts with the same tokens reuses them instead of computing them again. (A line that begins with
# ✓ is a statement that the cell has checked.)

# %%
state = CacheState().fold_all(trace)
empty = state.free_blocks - state.cached_blocks
print(f"{state.num_blocks} pages: {state.used_blocks} in use, {state.cached_blocks} cached, {empty} free and empty")
claim("At the end no page has an owner.", state.used_blocks == 0)
show(pages)

# %% [markdown]
# ## Measure
#
# Counts explain more than timings, so count first. Without drafts, every token of a request needs a forward of its own.
# A forward that serves three requests is counted once for each of them. (The first token of each request comes from its
# prefill and is not counted here.) Near its end a request gets fewer than four drafts: a round never proposes more
# tokens than the request may still need.

# %%
metrics = [output.metrics for output in outputs]
forwards, generated = sum(m.num_decode_forwards for m in metrics), sum(m.num_decode_tokens for m in metrics)
accepted, drafted = sum(m.num_accepted for m in metrics), sum(m.num_drafts for m in metrics)
per_forward = generated / forwards
print(f"{forwards} forwards: {drafted} drafts, {accepted} accepted ({accepted / drafted:.0%}), {generated} new tokens")
print(f"{accepted} accepted + {generated - accepted} added by the target = {generated}")
print(f"{generated} / {forwards} = {per_forward:.2f} tokens per forward")
verified = forwards + drafted  # a forward runs over the last token of a request and its drafts
print(f"tokens that these forwards run over: {forwards} + {drafted} = {verified}; without drafts {generated}")
claim("With drafts the target runs over more tokens than without.", verified > generated, of_model=True)
reveal("l00.tokens_per_forward", per_forward)

# %% [markdown]
# This is the average over all forwards of three texts. How do the texts differ?

# %%
from minillm.outputs import tokens_per_forward

gains = {letter: tokens_per_forward([output]) for letter, output in zip("ABC", outputs, strict=True)}
for letter, gain in gains.items():
    print(f"request {letter}: {gain:.2f} tokens per forward")
claim(
    "The same two models gain at least a quarter more on one text than on another.",
    max(gains.values()) >= 1.25 * min(gains.values()),
    of_model=True,
)

# %% [markdown]
# **The number of tokens per forward depends on the text**, not only on the two models: what is easy to foresee, such as
# a line like the one before, is easy to draft. So a figure from other prompts says little about yours.
#
# Now the memory. The engine counts the pages at the end of each step, when the pages of rejected drafts and of finished
# requests have been freed.

# %%
busiest = max(state.history, key=lambda step: step.used_blocks)  # the first of them, if several have as many
slots = busiest.used_blocks * state.block_size
print(f"after step {busiest.step}: {busiest.used_blocks} pages = {slots} slots were in use, ", end="")
print(f"{busiest.waste_slots} of them empty")
print(f"within a step, before such pages are freed: up to {state.totals.peak_blocks} pages (the picture's peak)")
reveal("l00.waste", 100 * busiest.waste_slots / slots)

# %% [markdown]
# **Does any of this change the text?** At temperature 0, which always takes the most probable token, no. An engine
# without drafts, and engines with pages of 4 and of 64 tokens, generate the same tokens from the same prompts. Only the
# number of forwards and the number of empty slots differ. (On a CPU this engine's compiled step adds in one fixed
# order, so a forward over five tokens gives each of them the same result as a forward over it alone. PyTorch and GPU
# libraries may choose another order for five tokens than for one, and then the last digits differ. Where two tokens are
# almost equally probable, that can change the text: hardly ever with 32-bit numbers, as here, more often with 16 bits.)


# %%
def tokens_of(outputs: list) -> list[list[int]]:
    """The generated tokens of each request."""
    return [output.outputs[0].token_ids for output in outputs]


plain = engine(drafts=0)
with plain.trace() as plain_trace:
    expected = tokens_of(plain.generate(prompts[:3], greedy, use_tqdm=False))
with_drafts, without = len(trace.of(StepRan)), len(plain_trace.of(StepRan))
print(f"steps, each with one target forward for all running requests: {without} without drafts, {with_drafts} with")
claim("Drafts change no token.", tokens_of(outputs) == expected)
claim("Drafts save steps.", with_drafts < without, of_model=True)
for page_size in (4, 64):
    other = tokens_of(engine(page_size, drafts=0).generate(prompts[:3], greedy, use_tqdm=False))
    claim(f"Pages of {page_size} tokens change no token.", other == expected)

# %% [markdown]
# **Is it faster?** A forward over five tokens takes longer than one over a single token, and the draft model takes time
# too. The next cell measures the ratio on *your* machine. The two engines run alternately: first with one request after
# the other, then with all three together.

# %% tags=["nbval-ignore-output"]
from statistics import median

from minillm.bench.timing import speed_ratios

ratios = {
    "one at a time": speed_ratios(llm, plain, [[p] for p in prompts[:3]], greedy),
    "three together": speed_ratios(llm, plain, [prompts[:3]], greedy),
}
for label, each in ratios.items():
    print(
        f"{label}: {median(each):.2f} times as fast with drafts (five pairs of runs: {each[0]:.2f} to {each[-1]:.2f})"
    )
alone, together = map(median, ratios.values())
claim(
    "Both speed-ups are smaller than the number of tokens per forward.",
    max(alone, together) < per_forward,
    measured=True,
)
claim("A request on its own gains more from drafts than three together.", alone > together, measured=True)

# %% [markdown]
# With one request at a time, a forward over one token reads all weights and does little arithmetic with them, so
# verifying four drafts costs far less than four more forwards. With three requests, each forward already serves all
# three, and verifying fifteen tokens is real work for a few cores. **Speculative decoding uses arithmetic that would
# otherwise be idle. Where none is idle, it loses time:** the target runs over more tokens than without drafts (counted
# above), and drafting comes on top. So by default the engine drafts only as many tokens as pay. Here that is switched
# off (`"adaptive": False`); lesson 11 is about it.
#
# ### Where it loses
#
# **More drafts.** The fifth draft counts only if the first four were accepted. So tokens per forward grow more slowly
# than γ, the number of drafts in a round, while every draft costs a forward of the draft model.

# %% tags=["expected"] alt="A line of tokens per target forward against γ = 1, 2, 4 and 8. It rises, each time by less than the number of drafts added, and stays far below the dashed line for drafts that are always accepted."
from minillm.viz.charts import Axis, LineChart, Series

gammas = (1, 2, 4, 8)
yields = [tokens_per_forward(engine(drafts=g).generate(prompts, greedy, use_tqdm=False)) for g in gammas]
print({g: round(y, 2) for g, y in zip(gammas, yields, strict=True)})
claim("Eight drafts a round yield less than twice what four do.", yields[3] < 2 * yields[2], of_model=True)
LineChart(
    "Tokens per target forward, by drafts in a round",
    Axis("drafts in a round (γ)", ticks=gammas),
    Axis("tokens per forward"),
    [
        Series("counted, six prompts", gammas, yields),
        Series("if every draft were accepted", gammas, [g + 1 for g in gammas], style="modelled"),
    ],
    "Tokens per target forward rise with γ, but far more slowly than γ.",
)

# %% [markdown]
# **Random text.** A draft saves time only if the target accepts it. With a high
# **[temperature](glossary.md#temperature)**, which makes sampling more random, the two models agree less often here.
# (At very high temperatures both would approach equal shares for all tokens, and agree again. A sampled draft is
# accepted with probability $\min(1, p/q)$, where $p$ is its probability under the target and $q$ under the draft model;
# instead of a rejected draft, a token is drawn from the part $\max(0, p - q)$, divided by its sum. Leviathan et al.,
# cited below, prove that together these leave the distribution of the output unchanged.)

# %% tags=["expected", "nbval-ignore-output"] alt="A line: tokens per target forward are most at temperature 0 and fewer at 0.5, 1 and 1.5, all above a dashed line at 1, where drafts gain nothing."
temperatures = (0.0, 0.5, 1.0, 1.5)
taus = []
for temperature in temperatures:
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=1, ignore_eos=True)
    taus.append(tokens_per_forward(llm.generate(prompts, params, use_tqdm=False)))
print({t: round(tau, 2) for t, tau in zip(temperatures, taus, strict=True)})
claim("At every temperature above 0 a forward yields fewer tokens than at 0.", max(taus[1:]) < taus[0], of_model=True)
LineChart(
    "Tokens per target forward, four drafts a round",
    Axis("temperature", ticks=temperatures),
    Axis("tokens per forward"),
    [
        Series("counted, six prompts", temperatures, taus),
        Series("no gain", temperatures, [1.0] * len(temperatures), style="modelled"),
    ],
    "Tokens per target forward are most at temperature 0; sampled text yields fewer.",
)

# %% [markdown]
# ## Turn the knobs
#
# * **page size**: small pages leave fewer slots empty; large pages need shorter block tables. Try 4 and 64.
# * **drafts a round (γ)**: each further draft is accepted at most as often as the one before it.
# * **requests**, 1 to 6: watch how pages are allocated and freed as requests start and end.
# * **tokens in the pool**: if there are too few, the engine **[preempts](glossary.md#preempt)** a request: it frees all
#   its pages and later computes its keys and values again, except those of pages that are still cached.
#
# Change the numbers in the last line, run the cell again, and compare. For sliders, call `knobs(tour)` in a new cell.

# %%
from minillm.viz.live.knobs import knobs


def tour(page_size: int = 16, drafts: int = 4, requests: int = 3, pool_tokens: int = 384, show=None) -> None:
    """Run an engine with these settings and draw what it does."""
    chosen = engine(page_size, drafts, pool_tokens)
    with chosen.trace() as run:
        cards = CachePagesView(run, narrow=True), AcceptanceStrip(run, narrow=True)
        with LiveView(*cards, seconds=15, show=show):
            chosen.generate(prompts[:requests], greedy, use_tqdm=False)


tour(page_size=4, drafts=8, requests=3, pool_tokens=384)

# %% [markdown]
# ## Break it
#
# **A drafter that is nearly always wrong.** `Drafter` is the interface for everything that proposes tokens. This one
# always proposes a comma. Before you run it: how many tokens will a forward yield?

# %%
from minillm.speculative.drafter import Draft, Drafter

comma = plain.engine.tokenizer.encode(",")[-1]


class OnlyCommas(Drafter):
    """Proposes commas only."""

    def propose(self, requests, num_drafts):
        return [Draft([comma] * count) for count in num_drafts]


drafts_commas = {"method": OnlyCommas, "num_speculative_tokens": 4, "adaptive": False}
commas = LLM(TARGET, dtype="float32", num_kv_blocks=24, speculative_config=drafts_commas)
comma_outputs = commas.generate(prompts[:3], greedy, use_tqdm=False)
print(f"tokens per forward: {tokens_per_forward(comma_outputs):.2f}")
claim("Commas as drafts change no token.", tokens_of(comma_outputs) == expected)

# %% [markdown]
# A bad drafter costs time and nothing else, because the target decides which drafts are accepted. (It can still gain a
# little more than 1 token per forward: where the text has a comma, the draft is right.)
#
# **A pool that is too small.** When they end, the three requests together need more pages than the ten of this
# pool. At least one request will lose its pages. Does its text change?

# %% tags=["expected"] alt="A pool of ten pages: two requests use eight of them, two are cached, and a third request has been preempted and waits for its turn."
from minillm.trace import RequestPreempted

tight = engine(drafts=0, pool_tokens=160)
with tight.trace() as tight_trace:
    tight_outputs = tight.generate(prompts[:3], greedy, use_tqdm=False)
preempted = tight_trace.of(RequestPreempted)
stored = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs]  # the last token is never stored
needed = sum(-(-count // state.block_size) for count in stored)
print(f"when they end, the requests store {stored} tokens: {needed} pages; the pool has 10")
claim("That is more than the pool has.", needed > 10)
print(f"preemptions: {len(preempted)}, tokens that lost their pages: {sum(e.num_computed_tokens for e in preempted)}")
claim("A preemption changes no token.", bool(preempted) and tokens_of(tight_outputs) == expected)
show(CachePagesView(tight_trace), step=first_preemption(tight_trace).step)

# %% [markdown]
# ## In the field
#
# * **vLLM** introduced these pages (PagedAttention, Kwon et al. 2023) and uses the same terms: block table, slot
#   mapping, preemption by recompute. The names `LLM`, `SamplingParams` and `generate` in this lesson are vLLM's.
# * **SGLang** keeps pages in a radix tree, so that requests with a common prefix share them.
# * **transformers** has assisted generation (`assistant_model=`), the same draft-and-verify for one request at a time;
#   **llama.cpp** has it too.
# * Speculative decoding is from Leviathan et al. and Chen et al. (2023). Some texts promise a speed-up that grows
#   *linearly* with the number of drafts; your chart of γ shows that even the tokens per forward grow more slowly.
#
# ## Recap
#
# 1. The engine works in steps. In each step every running request contributes one or more tokens, and all of them go
#    through the model together.
# 2. Keys and values are stored in pages. A request finds its own through a block table, and frees them all when it
#    ends.
# 3. A draft model proposes tokens, the target verifies several of them in one forward, and rejected ones are taken back
#    by lowering a counter; nothing is erased.
# 4. At temperature 0, drafts, page sizes and preemption do not change the text: you tested all three. (Where the order
#    of additions depends on the number of tokens, rounding may decide between two tokens that are almost equally
#    probable.) With sampling, drafts leave its distribution unchanged.
# 5. Drafts save forwards of the target and cost forwards of the draft model. Whether that is faster has to be measured.
#
# **Next:** lesson 1 builds the simplest engine, from attention to a generated text, and shows what it costs.
