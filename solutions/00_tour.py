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
# and over: memory pages fill up, a small model guesses ahead, and a large model decides which guesses stay. In this
# lesson you watch all three on a real model, turn the knobs yourself, and count what they buy.
#
# There is nothing to build here. The lessons after this one take the engine apart; this one shows what the parts are
# for.

# %%
import os

from minillm import LLM, SamplingParams
from minillm.teaching import predict, reveal
from minillm.viz import AcceptanceStrip, CachePagesView, LiveView

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

# %% [markdown]
# ## Predict
#
# You are about to see three requests of 10 to 30 prompt tokens each, and 48 new tokens for every one of them. A
# draft model guesses four tokens ahead in every round. Commit yourself before you look:
#
# 1. The target model is the expensive one. With four guesses a round, **how many new tokens does each of its forwards
#    yield** on average? (1 means that the guesses are useless, 5 that they are always right.)
# 2. The memory for keys and values is handed out in pages of 16 tokens. At the busiest moment, **what share of the
#    slots in used pages is empty**, in percent?

# %%
predict("l00.tokens_per_forward", None, unit="tokens")
predict("l00.waste", None, unit="percent")

# %% [markdown]
# ## See
#
# Run the cell and watch. The upper picture is the memory: every page belongs to the request whose letter it carries,
# and dark slots were written in this very step. The lower picture is one request's conversation between the two
# models: what the small one guessed, where the large one stopped it, and what the large one added.
#
# The pictures are not an animation of the idea. Each frame is drawn from the events of the engine that generates the
# text while you look, slowed down a little with `pause`.
#
# First the engine itself. On a CPU it runs each step as one compiled function. The first time on a machine that function
# has to be compiled, which takes about twenty seconds behind a progress bar; after that it comes from disk.

# %% tags=["nbval-ignore-output"]
llm = LLM(
    TARGET,
    block_size=16,
    num_kv_blocks=24,
    speculative_config={"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4},
)
greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

# %% tags=["expected"] alt="Cache pages of three finished requests above the rounds of one of them: accepted drafts with a check mark, rejected ones crossed out, and the tokens that the target added."
with llm.trace() as trace, LiveView(CachePagesView(trace), AcceptanceStrip(trace), pause=0.1):
    outputs = llm.generate(prompts[:3], greedy, use_tqdm=False)

# %% [markdown]
# This is what it wrote. The model has 12 million parameters and has read nothing but Python source, so expect code
# that looks right before you expect code that is right.

# %%
print(outputs[0].prompt + outputs[0].outputs[0].text)

# %% [markdown]
# ## Look closer: four moments
#
# A trace remembers everything, so any step can be drawn again. First the **prefill**: all prompt tokens of a request
# go through the model together, because nothing has to be guessed about them. One step fills whole pages.

# %%
from IPython.display import SVG, display

from minillm.trace import StepRan, StepStarted, TokensCommitted

pages = CachePagesView(trace)
first = trace.of(StepStarted)[0].step
display(SVG(pages.to_svg(step=first)))

# %% [markdown]
# Then **verification**. A request brings its last token and four guesses, five tokens in all, and the target judges
# them in one forward. Guesses that were wrong leave slots behind that mean nothing any more: they are hatched here,
# and will be overwritten by the next round. That is all there is to taking tokens back. Nothing is copied or erased;
# the engine just lowers one counter.

# %%
step, verdict = 0, None
for event in trace:
    if isinstance(event, StepRan):
        step = event.step
    elif isinstance(event, TokensCommitted) and event.num_accepted < event.num_drafts - 1:
        verdict = event  # the first round with at least two wrong guesses
        break
display(SVG(pages.to_svg(step=step)))

# %% [markdown]
# The same step, from the side of the tokens: everything after the first wrong guess is thrown away, even if it would
# have been right, because it was a guess about a text that does not exist.

# %%
display(SVG(AcceptanceStrip(trace, request_id=verdict.request_id).to_svg(step=step)))

# %% [markdown]
# And at the **end** every page is free again: 24 pages in the pool, none in use.

# %%
print(pages.describe())

# %% [markdown]
# ## Measure
#
# Counting is better than timing when you want to understand, so count first. A *forward* is one run of the large
# model; without drafts every token of a request needs one of its own.

# %%
rounds = [e for e in trace.of(TokensCommitted) if e.num_drafts]
gained = sum(len(e.token_ids) for e in rounds)
kept = sum(e.num_accepted for e in rounds)
drafted = sum(e.num_drafts for e in rounds)
per_forward = gained / len(rounds)
print(f"{len(rounds)} rounds: {drafted} drafts, {kept} kept ({kept / drafted:.0%}), {gained} tokens gained")
print(
    f"{kept} kept + {gained - kept} of the target's own = {gained}; {gained} / {len(rounds)} = {per_forward:.2f} tokens per forward"
)
reveal("l00.tokens_per_forward", per_forward)

# %%
from minillm.viz import CacheState

state = CacheState().fold_all(trace)
busiest = max(state.history, key=lambda figures: figures.used_blocks)
slots = busiest.used_blocks * 16
print(
    f"at the busiest step {busiest.used_blocks} pages = {slots} slots were in use, {busiest.waste_slots} of them empty"
)
reveal("l00.waste", 100 * busiest.waste_slots / slots)

# %% [markdown]
# **Does drafting change the text?** No, and that is the point of the method. The same prompts through an engine
# without drafts give the same tokens; only the number of forwards differs.

# %%
plain = LLM(TARGET, block_size=16, num_kv_blocks=24)
with plain.trace() as plain_trace:
    plain_outputs = plain.generate(prompts[:3], greedy, use_tqdm=False)
same = [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain_outputs]
with_drafts, without = len(trace.of(StepRan)), len(plain_trace.of(StepRan))
print(f"same tokens: {same}; target forwards: {without} without drafts, {with_drafts} with")

# %% [markdown]
# **Is it faster?** A forward over five tokens costs more than one over a single token, and the draft is not free. The
# engine notes how long each part takes, so here is the honest ratio on *your* machine, the two engines taking turns:
# once with one request after the other, once with all three together.

# %% tags=["nbval-ignore-output"]
from statistics import median

from minillm.viz.figures import RunFigures


def tokens_per_second(engine: LLM, batches: list[list[str]]) -> float:
    """Speed over these batches of prompts, counting only time inside the engine."""
    with engine.trace() as run:
        for batch in batches:
            engine.generate(batch, greedy, use_tqdm=False)
    return RunFigures.of(run).tokens_per_second


for label, batches in (("one at a time", [[p] for p in prompts[:3]]), ("three together", [prompts[:3]])):
    ratios = [tokens_per_second(llm, batches) / tokens_per_second(plain, batches) for _ in range(6)][1:]
    print(
        f"{label}: {median(ratios):.2f} times as fast with a draft (five pairs: {min(ratios):.2f} to {max(ratios):.2f})"
    )

# %% [markdown]
# Both stay below the tokens per forward. One request at a time, the draft pays: a forward over one token reads all
# weights to do very little with them, so four guesses ride along at a small price. With three together it gains much
# less, or even loses: they share each forward already, and fifteen tokens to verify are real work for a few cores.
# **Speculation spends idle arithmetic. Where none is idle, there is nothing to spend.** On a GPU the same line is
# crossed at a much larger batch; lesson 11 draws it.

# %% [markdown]
# ### Where else it loses
#
# The guesses are worth what they hit. Ask for surprising text, with a high temperature, and the two models agree less
# often. (Sampled drafts are kept with probability $\min(1, p/q)$; lesson 10 shows why that changes nothing in the
# distribution of the output.)

# %% tags=["expected"] alt="Three bars: tokens per target forward fall as the temperature rises from 0 to 1.5, against a dashed line at 1, where guessing gains nothing."
from minillm.viz.charts import Axis, LineChart, Series

temperatures = (0.0, 0.5, 1.0, 1.5)
taus = []
for temperature in temperatures:
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=1, ignore_eos=True)
    outs = llm.generate(prompts, params, use_tqdm=False)
    taus.append(sum(o.metrics.num_output_tokens for o in outs) / sum(o.metrics.num_decode_forwards for o in outs))
LineChart(
    "Tokens per target forward, four drafts a round",
    Axis("temperature", ticks=temperatures),
    Axis("tokens per forward"),
    [
        Series("measured, six prompts", temperatures, taus),
        Series("no gain", temperatures, [1.0] * len(temperatures), style="modelled"),
    ],
    "Tokens per target forward fall as the temperature rises.",
)

# %% [markdown]
# ## Turn the knobs
#
# * **page size**: small pages waste fewer slots; large pages need shorter tables. Try 4 and 64.
# * **drafts a round (γ)**: more guesses, of which the later ones are right less and less often.
# * **requests**: watch pages being handed out as requests arrive and end.
# * **pages in the pool**: with too few, a request loses all its pages and starts over (*preempted*). Its text does
#   not change.
#
# Choose, and press **Run**. (Without widgets, call `tour(...)` in a cell of your own.)

# %%
import ipywidgets as widgets


def tour(block_size: int = 16, drafts: int = 4, requests: int = 3, blocks: int = 24, show=None) -> None:
    """Run the engine once with these settings, live."""
    speculative = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": drafts} if drafts else None
    engine = LLM(TARGET, block_size=block_size, num_kv_blocks=blocks, speculative_config=speculative)
    with engine.trace() as run, LiveView(CachePagesView(run), AcceptanceStrip(run), pause=0.1, show=show):
        engine.generate(prompts[:requests], greedy, use_tqdm=False)


class Screen:
    """A picture that a button press can change: the live view draws into an HTML widget."""

    def __init__(self) -> None:
        self.widget = widgets.HTML("<i>Press Run.</i>")

    def show(self, bundle: dict[str, str]) -> "Screen":
        self.update(bundle, raw=True)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.widget.value = bundle["text/html"]


screen = Screen()
block_size = widgets.Dropdown(options=[1, 4, 16, 64], value=16, description="page size")
drafts = widgets.IntSlider(4, 0, 8, description="drafts (γ)")
requests = widgets.IntSlider(3, 1, 6, description="requests")
tokens = widgets.IntSlider(384, 128, 1024, step=64, description="pool, tokens")
button = widgets.Button(description="Run", icon="play", button_style="primary")


def on_click(_: widgets.Button) -> None:
    """Run with the chosen settings; a setting that cannot work says why."""
    button.disabled = True
    try:
        tour(block_size.value, drafts.value, requests.value, tokens.value // block_size.value, screen.show)
    except ValueError as problem:
        screen.widget.value = f"<b>{type(problem).__name__}</b>: {problem}"
    finally:
        button.disabled = False


button.on_click(on_click)
widgets.VBox([widgets.HBox([block_size, drafts]), widgets.HBox([requests, tokens, button]), screen.widget])

# %% [markdown]
# ## Break it
#
# **A drafter that knows nothing.** `Drafter` is the seam: anything that proposes tokens can be plugged in. This one
# guesses a comma, always. Before you run it: will the text get worse?

# %%
from minillm.speculative.drafter import Draft, Drafter

comma = plain.engine.tokenizer.encode(",")[0]


class OnlyCommas(Drafter):
    """The worst colleague: quick, confident and wrong."""

    def propose(self, requests, num_drafts):
        return [Draft([comma] * count) for count in num_drafts]


commas = LLM(TARGET, num_kv_blocks=24, speculative_config={"method": OnlyCommas, "num_speculative_tokens": 4})
comma_outputs = commas.generate(prompts[:3], greedy, use_tqdm=False)
same = [o.outputs[0].token_ids for o in comma_outputs] == [o.outputs[0].token_ids for o in plain_outputs]
tau = sum(o.metrics.num_output_tokens for o in comma_outputs) / sum(
    o.metrics.num_decode_forwards for o in comma_outputs
)
print(f"same tokens as without drafts: {same}; tokens per forward: {tau:.2f}")

# %% [markdown]
# A bad drafter costs time and nothing else, because a guess only ever *suggests*. The target decides.
#
# **A pool that is far too small.** Ten pages for three requests that want twelve or more. Somebody will have to give up
# their pages; does the text survive?

# %% tags=["expected"] alt="A pool of ten pages in use by two requests, while a third has been preempted and waits for its turn."
from minillm.trace import RequestPreempted

tight = LLM(TARGET, block_size=16, num_kv_blocks=10)
with tight.trace() as tight_trace:
    tight_outputs = tight.generate(prompts[:3], greedy, use_tqdm=False)
preempted = tight_trace.of(RequestPreempted)
same = [o.outputs[0].token_ids for o in tight_outputs] == [o.outputs[0].token_ids for o in plain_outputs]
print(
    f"preemptions: {len(preempted)}, tokens computed twice: {sum(e.num_computed_tokens for e in preempted)}; same tokens: {same}"
)
step = next(
    e.step for e in reversed(tight_trace.events[: tight_trace.events.index(preempted[0])]) if isinstance(e, StepStarted)
)
display(SVG(CachePagesView(tight_trace).to_svg(step=step)))

# %% [markdown]
# ## In the field
#
# * **vLLM** introduced these pages (PagedAttention, Kwon et al. 2023) and has the same vocabulary: block table,
#   slot mapping, preemption by recompute. The names of `LLM` and `SamplingParams` in this lesson are vLLM's, so the
#   first cells run there after changing the import.
# * **SGLang** keeps pages in a radix tree, so that requests with a common beginning share them.
# * **transformers** has assisted generation (`assistant_model=`), the same draft-and-verify for one request at a time;
#   **llama.cpp** has it too.
# * Speculative decoding is from Leviathan et al. and Chen et al. (2023). Blog posts often promise a *linear* speed-up
#   with the number of guesses. You just measured one: tokens per forward grow more slowly than γ, because the fifth
#   guess only counts if the first four were right, and every guess costs a draft forward. Set γ to 8 above and compare.

# %% [markdown]
# ## Recap
#
# 1. The engine works in steps; in each step every request brings a few tokens, and all of them go through the model together.
# 2. Keys and values live in pages; a request finds its own through a block table, and frees them all when it ends.
# 3. A draft model guesses, the target judges several guesses in one forward, and wrong ones are taken back by lowering a counter.
# 4. None of this changes the text: not drafts, not page sizes, not preemption. You tested all three.
# 5. What it buys is counted in forwards and paid in drafting; whether that is faster is a measurement, not a promise.
#
# **Next:** lesson 2 opens the most important box of them all, the KV cache.
