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
# From outside, a language model is a function: text in, text out. Inside an engine three things happen at once, over
# and over: memory [pages](glossary.md#block) fill up, a small model guesses ahead, and a large model decides which
# guesses stay. In this lesson you watch all three on a real model, turn the knobs yourself, and count what they buy.
#
# There is nothing to build here. The lessons after this one take the engine apart; this one shows what the parts are
# for.

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
# You are about to see three requests of 10 to 30 prompt tokens each, and 48 new tokens for every one of them. A
# [draft model](glossary.md#draft) guesses four tokens ahead in every [round](glossary.md#round). Commit yourself before
# you look:
#
# 1. The [target](glossary.md#target) model is the expensive one. With four guesses a round, **how many new tokens does
#    each of its [forwards](glossary.md#forward) yield** on average? (1 means that the guesses are useless, 5 that they
#    are always right.)
# 2. The memory for [keys and values](glossary.md#kv-cache) is handed out in pages of 16 tokens. At the busiest moment,
#    **what share of the slots in used pages is empty**, in percent?

# %%
predict("l00.tokens_per_forward", None, unit="tokens")
predict("l00.waste", None, unit="percent")

# %% [markdown]
# ## Set up
#
# First the engine. On a CPU it runs each step as one [compiled function](glossary.md#compiled-step). The first time on
# a machine that function has to be compiled, which takes up to two minutes behind a progress bar; after that it comes
# from disk.


# %% tags=["nbval-ignore-output"]
def engine(page_size: int = 16, drafts: int = 4, pool_tokens: int = 384) -> LLM:
    """An engine with a pool of `pool_tokens` slots, in pages of `page_size`, that guesses `drafts` tokens a round."""
    speculative = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": drafts} if drafts else None
    blocks = pool_tokens // page_size
    return LLM(TARGET, block_size=page_size, num_kv_blocks=blocks, speculative_config=speculative)


engine().generate("x = ", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)  # compiles, if it has to
llm = engine()
print("ready")

# %% [markdown]
# ## See
#
# Run the cell and watch. On the left is the memory: every page belongs to the request whose letter it carries, and dark
# slots were written in this very step. On the right is one request's conversation between the two models: what the
# small one guessed, where the large one stopped it, and what the large one added.
#
# The engine runs first, in a second or two; each frame is drawn from its events. Then the recording plays slowly, as
# soon as you look at it. Pause it, step through it with the arrow keys, choose another speed, or read it as text.

# %% tags=["expected"] alt="Left, cache pages of three requests with their block tables, dark where a slot was just written. Right, the rounds of one request: accepted drafts with a check mark, rejected ones crossed out, and the tokens that the target added."
with (
    llm.trace() as trace,
    LiveView(CachePagesView(trace, narrow=True), AcceptanceStrip(trace, narrow=True), seconds=15),
):
    outputs = llm.generate(prompts[:3], greedy, use_tqdm=False)

# %% [markdown]
# This is what it wrote. The model has 12 million parameters and has read nothing but Python source, so expect code
# that looks right before you expect code that is right.

# %%
print(outputs[0].prompt + outputs[0].outputs[0].text)

# %% [markdown]
# ## Look closer: four moments
#
# A trace remembers everything, so any step can be drawn again. First the **[prefill](glossary.md#prefill)**: all prompt
# tokens of a request go through the model together, because nothing has to be guessed about them. One step fills whole
# pages.

# %%
from minillm.trace import StepRan, StepStarted, TokensCommitted
from minillm.viz.moments import preemption, rejected_round

pages = CachePagesView(trace)
show(pages, step=trace.of(StepStarted)[0].step)

# %% [markdown]
# Then **verification**. A request brings its last token and four guesses, five tokens in all, and the target judges
# them in one forward. Guesses that were wrong leave slots behind that mean nothing any more: they are hatched here,
# and will be overwritten by the next round. That is all there is to taking tokens back. Nothing is copied or erased;
# the engine just lowers one counter.

# %%
moment = rejected_round(trace)
show(pages, step=moment.step)

# %% [markdown]
# The same step, from the side of the tokens: everything after the first wrong guess is thrown away, even if it would
# have been right, because it was a guess about a text that does not exist.

# %%
show(AcceptanceStrip(trace, request_id=moment.request_id), step=moment.step)

# %% [markdown]
# And at the **end** no page has an owner: the dashed block tables are those that the requests had and gave back. Pages
# that were full are ***[cached](glossary.md#cached)***: they are free, but keep their keys and values until somebody
# needs the room. A new request whose prompt starts with the same tokens takes them as they are, instead of computing
# them again.

# %%
state = CacheState().fold_all(trace)
print(
    f"{state.num_blocks} pages: {state.used_blocks} in use, {state.free_blocks} to be had, {state.cached_blocks} of them cached"
)
claim("At the end no page has an owner.", state.used_blocks == 0)
show(pages)

# %% [markdown]
# ## Measure
#
# Counting is better than timing when you want to understand, so count first. A *forward* is one run of the large
# model; without drafts every token of a request needs one of its own.

# %%
rounds = [e for e in trace.of(TokensCommitted) if e.num_drafts]
gained = sum(len(e.token_ids) for e in rounds)
kept, drafted = sum(e.num_accepted for e in rounds), sum(e.num_drafts for e in rounds)
per_forward = gained / len(rounds)
print(f"{len(rounds)} rounds: {drafted} drafts, {kept} kept ({kept / drafted:.0%}), {gained} tokens gained")
print(f"{kept} kept + {gained - kept} of the target's own = {gained}")
print(f"{gained} / {len(rounds)} = {per_forward:.2f} tokens per forward")
reveal("l00.tokens_per_forward", per_forward)

# %%
busiest = max(state.history, key=lambda figures: figures.used_blocks)
slots = busiest.used_blocks * state.block_size
print(
    f"at the busiest step {busiest.used_blocks} pages = {slots} slots were in use, {busiest.waste_slots} of them empty"
)
reveal("l00.waste", 100 * busiest.waste_slots / slots)

# %% [markdown]
# **Does any of this change the text?** No, and that is the point. The same prompts through an engine without drafts,
# and with pages of 4 and of 64 tokens, give the same tokens; only the number of forwards and the waste differ.


# %%
def tokens_of(outputs: list) -> list[list[int]]:
    """The generated tokens of each request."""
    return [output.outputs[0].token_ids for output in outputs]


plain = engine(drafts=0)
with plain.trace() as plain_trace:
    expected = tokens_of(plain.generate(prompts[:3], greedy, use_tqdm=False))
with_drafts, without = len(trace.of(StepRan)), len(plain_trace.of(StepRan))
print(f"steps, each with one target forward: {without} without drafts, {with_drafts} with")
claim("Drafts change no token.", tokens_of(outputs) == expected)
claim("Drafts save steps.", with_drafts < without)
for page_size in (4, 64):
    other = tokens_of(engine(page_size, drafts=0).generate(prompts[:3], greedy, use_tqdm=False))
    claim(f"Pages of {page_size} tokens change no token.", other == expected)

# %% [markdown]
# **Is it faster?** A forward over five tokens costs more than one over a single token, and the draft is not free. The
# engine notes how long each part takes, so here is the ratio on *your* machine, the two engines taking turns: once with
# one request after the other, once with all three together.

# %% tags=["nbval-ignore-output"]
from statistics import median

from minillm.viz.figures import speed_ratios

ratios = {
    "one at a time": speed_ratios(llm, plain, [[p] for p in prompts[:3]], greedy),
    "three together": speed_ratios(llm, plain, [prompts[:3]], greedy),
}
for label, five in ratios.items():
    print(f"{label}: {median(five):.2f} times as fast with a draft (five pairs: {five[0]:.2f} to {five[-1]:.2f})")
alone, together = map(median, ratios.values())
claim("Both gain less than the tokens per forward.", max(alone, together) < per_forward, measured=True)
claim("A request on its own gains more from a draft than three together.", alone > together, measured=True)

# %% [markdown]
# One request at a time, a forward over one token reads all weights to do very little with them, so checking four
# guesses costs little extra. Three requests together share each forward already, and fifteen tokens to verify are real
# work for a few cores. **Speculation spends idle arithmetic. Where none is idle, there is nothing to spend.**
#
# ### Where it loses
#
# **More guesses.** The fifth guess only counts if the first four were right, and every guess costs a draft forward. So
# tokens per forward grow more slowly than γ, the number of guesses in a round.

# %% tags=["expected"] alt="A line of tokens per target forward against γ = 1, 2, 4 and 8. It rises, each time by less than the guesses added, and stays far below the dashed line of guesses that are always right."
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.figures import tokens_per_forward

gammas = (1, 2, 4, 8)
yields = [tokens_per_forward(engine(drafts=g).generate(prompts, greedy, use_tqdm=False)) for g in gammas]
print({g: round(y, 2) for g, y in zip(gammas, yields, strict=True)})
claim("Eight guesses yield less than twice what four do.", yields[3] < 2 * yields[2])
LineChart(
    "Tokens per target forward, by guesses in a round",
    Axis("guesses in a round (γ)", ticks=gammas),
    Axis("tokens per forward"),
    [
        Series("counted, six prompts", gammas, yields),
        Series("if every guess were right", gammas, [g + 1 for g in gammas], style="modelled"),
    ],
    "Tokens per target forward rise with γ, but far more slowly than γ.",
)

# %% [markdown]
# **Surprising text.** A guess pays only if the target accepts it. With a high [temperature](glossary.md#temperature)
# the two models agree less often. (Sampled drafts are kept with probability $\min(1, p/q)$, which leaves the
# distribution of the output as it is; Leviathan et al., cited below, prove it.)

# %% tags=["expected"] alt="A line: tokens per target forward fall as the temperature rises from 0 to 1.5, above a dashed line at 1, where guessing gains nothing."
temperatures = (0.0, 0.5, 1.0, 1.5)
taus = []
for temperature in temperatures:
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=1, ignore_eos=True)
    taus.append(tokens_per_forward(llm.generate(prompts, params, use_tqdm=False)))
claim("At temperature 1.5 a forward yields fewer tokens than at 0.", taus[-1] < taus[0])
LineChart(
    "Tokens per target forward, four drafts a round",
    Axis("temperature", ticks=temperatures),
    Axis("tokens per forward"),
    [
        Series("counted, six prompts", temperatures, taus),
        Series("no gain", temperatures, [1.0] * len(temperatures), style="modelled"),
    ],
    "Tokens per target forward fall as the temperature rises.",
)

# %% [markdown]
# ## Turn the knobs
#
# * **page size**: small pages waste fewer slots; large pages need shorter tables. Try 4 and 64.
# * **drafts a round (γ)**: more guesses, of which the later ones are right less and less often.
# * **requests**, 1 to 6: watch pages being handed out as requests start and end.
# * **tokens in the pool**: with too few, a request loses all its pages and starts over
#   (*[preempted](glossary.md#preempt)*). Its text does not change.
#
# Change the numbers in the last line, run the cell again, and compare. Do you prefer sliders? Call `knobs(tour)` in a
# cell of your own.

# %%
from minillm.viz.knobs import knobs


def tour(page_size: int = 16, drafts: int = 4, requests: int = 3, pool_tokens: int = 384, show=None) -> None:
    """Run an engine with these settings, and watch."""
    chosen = engine(page_size, drafts, pool_tokens)
    with chosen.trace() as run:
        cards = CachePagesView(run, narrow=True), AcceptanceStrip(run, narrow=True)
        with LiveView(*cards, seconds=15, show=show):
            chosen.generate(prompts[:requests], greedy, use_tqdm=False)


tour(page_size=4, drafts=8, requests=3, pool_tokens=384)

# %% [markdown]
# ## Break it
#
# **A drafter that knows nothing.** `Drafter` is the interface: anything that proposes tokens can be plugged in. This
# one guesses a comma, always. Before you run it: will the text get worse?

# %%
from minillm.speculative.drafter import Draft, Drafter

comma = plain.engine.tokenizer.encode(",")[0]


class OnlyCommas(Drafter):
    """The worst colleague: quick, confident and wrong."""

    def propose(self, requests, num_drafts):
        return [Draft([comma] * count) for count in num_drafts]


commas = LLM(TARGET, num_kv_blocks=24, speculative_config={"method": OnlyCommas, "num_speculative_tokens": 4})
comma_outputs = commas.generate(prompts[:3], greedy, use_tqdm=False)
print(f"tokens per forward: {tokens_per_forward(comma_outputs):.2f}")
claim("Commas as guesses change no token.", tokens_of(comma_outputs) == expected)

# %% [markdown]
# A bad drafter costs time and nothing else, because a guess only ever *suggests*. The target decides.
#
# **A pool that is far too small.** Ten pages for three requests that want twelve. Somebody will have to give up their
# pages; does the text survive?

# %% tags=["expected"] alt="A pool of ten pages in use by two requests, while a third has been preempted and waits for its turn."
from minillm.trace import RequestPreempted

tight = engine(drafts=0, pool_tokens=160)
with tight.trace() as tight_trace:
    tight_outputs = tight.generate(prompts[:3], greedy, use_tqdm=False)
preempted = tight_trace.of(RequestPreempted)
print(f"preemptions: {len(preempted)}, tokens computed twice: {sum(e.num_computed_tokens for e in preempted)}")
claim("A preemption changes no token.", bool(preempted) and tokens_of(tight_outputs) == expected)
show(CachePagesView(tight_trace), step=preemption(tight_trace).step)

# %% [markdown]
# ## In the field
#
# * **vLLM** introduced these pages (PagedAttention, Kwon et al. 2023) and has the same vocabulary: block table,
#   slot mapping, preemption by recompute. The names `LLM`, `SamplingParams` and `generate` in this lesson are vLLM's.
# * **SGLang** keeps pages in a radix tree, so that requests with a common beginning share them.
# * **transformers** has assisted generation (`assistant_model=`), the same draft-and-verify for one request at a time;
#   **llama.cpp** has it too.
# * Speculative decoding is from Leviathan et al. and Chen et al. (2023). A speed-up that grows *linearly* with the
#   number of guesses is sometimes promised; your chart of γ shows why it cannot be had.
#
# ## Recap
#
# 1. The engine works in steps; in each step every request brings a few tokens, and all of them go through the model together.
# 2. Keys and values live in pages; a request finds its own through a block table, and gives them all back when it ends.
# 3. A draft model guesses, the target judges several guesses in one forward, and wrong ones are taken back by lowering a counter.
# 4. None of this changes the text: not drafts, not page sizes, not preemption. You tested all three.
# 5. What it buys is counted in forwards and paid in drafting; whether that is faster is a measurement, not a promise.
#
# **Next:** lesson 1 builds the plainest engine of all, from attention to a generated text, and shows what it costs.
