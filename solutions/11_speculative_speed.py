# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11. Speculative decoding: speed
#
# **Question.** *When does guessing make a model faster, and when slower?*
#
# In [speculative decoding](glossary.md#speculative-decoding), a cheap [drafter](glossary.md#drafter) proposes γ tokens
# and the [target](glossary.md#target) judges all of them in one forward. The text is exactly the target's (lesson 10
# proves that). Whether it comes *sooner* is open. Three things decide: how many drafts the target accepts, what it
# costs to draft a token, and what it costs to verify one. Articles mostly give the first, and leave out the other two.
#
# You write the formula, and test it at any acceptance. Then you make drafts in three ways: with a small model, from the
# text itself, and as a tree. Finally you write the rule by which an engine decides, while it runs, how many drafts to
# make: none, one, or six.
#
# You need lesson 0 (what a [round](glossary.md#round) is) and lesson 3 (what limits a step). Everything runs on a
# laptop's CPU, with a target of 12 million parameters and a draft model of a tenth of that.

# %%
import os

import torch

from minillm import LLM, SamplingParams
from minillm.bench.speculation import slice_prompts
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import DraftPlan, FixedDrafts
from minillm.speculative.step_costs import StepCosts
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop import l11_drafting as drafting
from minillm.trace import DraftProposed, DraftsPlanned
from minillm.viz import DraftDecision, PositionAcceptance, SpeedPoint, SpeedUpSurface, show
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
DRAFT = os.environ.get("MINILLM_DRAFT", "minicoder-draft")  # a small model with the same tokenizer
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

SIZE = {"device": "cpu", "max_num_seqs": 8, "num_kv_blocks": 256}
slices = slice_prompts()
model = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 6, "adaptive": False}
drafted = LLM(NAME, speculative_config=model, **SIZE)
print("kinds of text:", ", ".join(f"{name} ({len(prompts)} prompts)" for name, prompts in slices.items()))

# %% [markdown]
# ## The question, in numbers
#
# A plain [step](glossary.md#step) gives one token. A round with γ drafts gives between 1 and γ + 1. It takes γ·c + v
# plain steps:
#
# $$\text{speed-up} = \frac{\tau}{\gamma c + v}$$
#
# * **τ**: the tokens of a round on average, the target's own included,
# * **c**: the time to draft one token, divided by the time of a plain step,
# * **v**: the time to verify γ drafts in one forward, divided by the time of a plain step.
#
# ## Predict
#
# 1. Each draft is accepted with probability 0.8 if those before it were. Drafting a token takes a tenth of a step, and
#    verifying is free (v = 1). How many times faster is γ = 4?
# 2. How many tokens per forward of the target does the bundled draft model reach with γ = 6 on the slice `functions`?
# 3. Eight requests of the slice `docstrings` run together, each with four drafts from the draft model in every round.
#    How many times faster or slower is that than the same eight without drafts, on your machine? (1 is equally fast.)

# %%
predict("l11.textbook", None, unit="times")
predict("l11.tau", None, unit="tokens")
predict("l11.eight", None, unit="times")

# %% [markdown]
# ## Build
#
# ### Exercise 1: tokens per round
#
# A draft is judged only if all drafts before it in its round were accepted. Its acceptance under that condition is the
# **[conditional acceptance](glossary.md#conditional-acceptance)** α of its position. What does a round give on average?


# %%
def expected_tokens(alphas: list[float]) -> float:
    """Return the tokens of a round on average, the target's own token included.

    alphas: conditional acceptance by position; alphas[i] is the probability that draft i + 1 is accepted if all
            drafts before it were

    Example: expected_tokens([0.5, 0.5]) is 1 + 0.5 + 0.25 = 1.75.
    """
    ### BEGIN SOLUTION
    tokens = survival = 1.0
    for alpha in alphas:
        survival *= alpha
        tokens += survival
    return tokens
    ### END SOLUTION


# %%
check("l11.expected_tokens")

# %% [markdown]
# Stuck? `hint("l11.expected_tokens", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# Test the formula in the engine, at any acceptance. With `rejection_sample_method="synthetic"` (vLLM has it, too) the
# engine drafts, verifies and rolls back as always, but whether a draft is accepted is drawn at given rates. (So the
# text is nonsense. It serves to measure an engine before there is a good draft model.)

# %%
from itertools import accumulate
from operator import mul

my_tokens = use("l11.expected_tokens")
print("conditional acceptance   formula   counted tokens per round")
differences = []
for rates in ([0.3] * 4, [0.6] * 4, [0.9] * 4, [0.9, 0.9, 0.9, 0.5], [0.5, 0.9, 0.9, 0.9]):
    at_rates = {
        "method": drafting.ConstantDrafter,
        "num_speculative_tokens": 4,
        "adaptive": False,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(accumulate(rates, mul)),  # of all rounds: products of the conditional ones
    }
    engine = LLM(NAME, speculative_config=at_rates, **SIZE)
    found = drafting.run(engine, slices["imports"], FixedDrafts(4)).acceptance
    print(f"{rates!s:24} {my_tokens(rates):7.2f} {found.tokens_per_round:10.2f} in {found.rounds} rounds")
    differences.append(abs(my_tokens(rates) - found.tokens_per_round))
    del engine
claim("The count agrees with the formula within a fifth of a token.", max(differences) < 0.2)

# %% [markdown]
# (Acceptance is drawn at these rates, so the count scatters around the formula.) Compare the last two rows: a weak first draft
# costs more than a weak last one, because every later draft depends on it.
#
# ### See: three numbers that are all called acceptance
#
# Now with the real draft model, six drafts in every round, on eight prompts of Python functions:

# %% tags=["expected"] alt="Two bars for each of six positions. The conditional acceptance stays at a similar height, the marginal one falls from position to position. Above: accepted divided by drafted, and the tokens per round."
functions = drafting.run(drafted, slices["functions"], FixedDrafts(6))
acceptance = PositionAcceptance.of(functions.trace, "draft model, functions")
acceptance

# %%
alphas = acceptance.conditional
print("conditional:", ", ".join(f"{a:.2f}" for a in alphas))
print("marginal:   ", ", ".join(f"{a:.2f}" for a in acceptance.marginal))
print(f"accepted / drafted: {acceptance.accepted_share:.2f}")
print(f"tokens per round (steps with drafts): {acceptance.tokens_per_round:.2f}")
print(f"tokens per forward (plain steps, too): {functions.tokens_per_forward:.2f}")
print(f"your formula, from the conditional ones: {my_tokens(alphas):.2f}")
by_gamma = {g: (my_tokens(alphas[:g]) - 1) / g for g in range(1, len(alphas) + 1)}
print("accepted / drafted by γ, by the formula:", ", ".join(f"{g}: {share:.2f}" for g, share in by_gamma.items()))
reveal("l11.tau", round(functions.tokens_per_forward, 2))
claim(
    "Your formula comes close to the counted tokens per round.",
    abs(my_tokens(alphas) - acceptance.tokens_per_round) < 0.15,
    of_model=True,
)
falling = [by_gamma[g] for g in (6, 4, 2) if g in by_gamma]  # another draft model may never get as far as six
claim("The same draft model has a lower accepted / drafted with a larger γ.", falling == sorted(falling), of_model=True)
claim(
    "Accepted / drafted is below the conditional acceptance of each of the first four positions.",
    acceptance.accepted_share < min(alphas[:4]),
    of_model=True,
)

# %% [markdown]
# (Formula and count differ a little, because the last round of a request has fewer drafts: only as many as may still be
# needed. Where none is needed, the step is a plain one, and the tokens per forward are fewer than those per round.)
#
# * The **conditional acceptance** of a position counts only drafts that were judged. Use it in the formula.
# * The **[marginal acceptance](glossary.md#marginal-acceptance)** divides by all rounds. If all rounds have γ drafts, it
#   is the product of the conditional ones up to the position. vLLM reports it. It can only fall from position to
#   position, even if the draft model is equally good at each, and stays equal only where every draft is accepted.
# * **Accepted / drafted** depends on γ: a larger γ adds drafts that are never judged. It says little about the
#   draft model.
#
# ### Exercise 2: the best number of drafts
#
# More drafts give more tokens, but each costs c to draft, and makes the forward longer. Each position has an acceptance
# of its own.


# %%
def best_gamma(alphas: list[float], c: float, v: list[float]) -> int:
    """Return the number of drafts per round that decodes fastest; the smallest of equals, 0 for no drafts.

    alphas: conditional acceptance by position
    c:      time to draft one token, in plain steps
    v:      v[g] is the time to verify g drafts, in plain steps; v[0] is 1.0, and there is one for each g to
            len(alphas)

    Example: best_gamma([0.9, 0.2], 0.25, [1.0, 1.0, 1.0]) is 1: 1.9 / 1.25 = 1.52 against 2.08 / 1.5 = 1.39.
    """
    ### BEGIN SOLUTION
    speeds = [1.0]
    tokens = survival = 1.0
    for gamma, alpha in enumerate(alphas, start=1):
        survival *= alpha
        tokens += survival
        speeds.append(tokens / (gamma * c + v[gamma]))
    return speeds.index(max(speeds))
    ### END SOLUTION


# %%
check("l11.best_gamma")

# %%
my_gamma = use("l11.best_gamma")


def speed_up(alphas: list[float], c: float, row: float) -> float:
    """Speed-up with all of these drafts; a verified draft adds `row` plain steps to a step."""
    return my_tokens(alphas) / (1 + len(alphas) * (c + row))


reveal("l11.textbook", round(speed_up([0.8] * 4, 0.1, 0.0), 2))
print("α = 0.8, verification free: the best γ up to 20, and its speed-up")
for c in (0.0, 0.02, 0.1, 0.2, 0.8):
    gamma = my_gamma([0.8] * 20, c, [1.0] * 21)
    print(f"  c = {c:4}: γ = {gamma:2}, {speed_up([0.8] * gamma, c, 0.0):.2f}×")
claim("No number of drafts reaches 1 / (1 − α) = 5 times.", speed_up([0.8] * 200, 0.0, 0.0) < 5.000001)
claim("A draft whose price equals its acceptance (c = α) never pays.", my_gamma([0.8] * 20, 0.8, [1.0] * 21) == 0)

# %% [markdown]
# ### See: your machine on the map
#
# What do a draft and a verified row cost on this machine? The cell below times steps of one request and of eight, with
# no drafts and with four. (The clock is the processor time of this thread; medians of up to 28 steps.) Then the map:
# each cell is a pair of acceptance and draft price, with the best γ for this machine's price of a verified row. The
# letters are the draft model on two kinds of text, with the speed-up that one request then really has.

# %% tags=["nbval-ignore-output"]
GAMMA = 4
one, eight = (drafting.prices(drafted, slices["functions"], batch, GAMMA) for batch in (1, 8))
print("requests   c: one draft for each   row: one more verified for each   (in plain steps of so many requests)")
for price in (one, eight):
    print(f"{price.batch:8} {price.c:22.2f} {price.row:32.2f}")
claim(
    "One draft for each request, drafted and verified, costs a larger part of a step when eight requests run together.",
    eight.c + eight.row > one.c + one.row,
    measured=True,
)

# %% tags=["expected", "nbval-ignore-output"] alt="A map of cells: acceptance to the right, price of a draft upwards. Below a dashed break-even line drafts pay, and the best number of drafts grows to the lower right. Two measured kinds of text are marked with letters; beside the map, their predicted and measured speed-ups."
points = []
for name in ("functions", "docstrings"):
    prompts = slices[name][:3]
    found = drafting.run(drafted, prompts, FixedDrafts(6)).acceptance
    alpha = sum(found.accepted) / sum(found.judged)  # one conditional acceptance for all positions
    gamma = my_gamma([alpha] * 6, one.c, [1 + one.row * g for g in range(7)])
    times = {
        count: min(drafting.run(drafted, prompts, FixedDrafts(count), batch=1).seconds for _ in range(2))
        for count in (0, gamma)
    }
    points.append(SpeedPoint(f"draft model, {name}", alpha, min(one.c, 0.5), times[0] / times[gamma]))
SpeedUpSurface(points, row=one.row, max_gamma=6)

# %% [markdown]
# The break-even line is α = c + row: the first draft of a round is the most valuable one, and it must earn more than it
# costs. Every machine has its own line. On a GPU with one request a further row is almost free (lesson 3: the step
# waits for the weights), so there a draft pays almost as soon as α exceeds c. (c may be larger than the draft model's
# size suggests: on a GPU a short forward waits for its kernels to be started, not for bytes.) On a CPU, or with many
# requests, the line moves to the right.
#
# ### Exercise 3: drafts without a model
#
# c is almost 0 if no model drafts. Code repeats itself: look for an earlier occurrence of the last few tokens, and
# propose what followed. This is [prompt lookup](glossary.md#n-gram-drafter) (Saxena 2023).


# %%
def ngram_propose(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Return count drafts: the tokens that followed the last n tokens where they occurred before; [] if nowhere.

    The largest n decides, from longest down to shortest. Of its earlier occurrences the latest decides; it may overlap
    the last n tokens, but is not these themselves. If the text ends before there are count drafts, they repeat from
    the first one: a loop goes on.

    Examples: ngram_propose([1, 2, 3, 4, 1, 2], 2, 3, 2) is [3, 4]; ngram_propose([5, 6, 5], 1, 3, 4) is [6, 5, 6, 5].
    """
    ### BEGIN SOLUTION
    for n in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                followed = token_ids[start + n :]
                return [followed[i % len(followed)] for i in range(count)]
    return []
    ### END SOLUTION


# %%
check("l11.ngram_propose")

# %% [markdown]
# A class with `propose` is all that the engine needs. Yours beside the engine's own, which searches bytes instead of
# lists, and [suffix decoding](glossary.md#suffix-decoding), which finds the longest earlier match of the text's end,
# and drafts the more tokens the longer the match:

# %%
from minillm.speculative.drafter import Draft, Drafter

my_propose = use("l11.ngram_propose")


class MyNgrams(Drafter):
    """Your drafter: n-grams of 2 to 5 tokens."""

    def propose(self, requests, num_drafts):
        return [Draft(my_propose(r.token_ids, 2, 5, most)) for r, most in zip(requests, num_drafts, strict=True)]


FEW = {kind: slices[kind][:4] for kind in ("functions", "docstrings", "imports")}
options = {
    "your n-grams": {"method": MyNgrams},
    "n-grams": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
tau = {"draft model": [drafting.run(drafted, prompts, FixedDrafts(6)) for prompts in FEW.values()]}
for name, own in options.items():
    engine = LLM(NAME, speculative_config={**own, "num_speculative_tokens": 6, "adaptive": False}, **SIZE)
    tau[name] = [drafting.run(engine, prompts, FixedDrafts(6)) for prompts in FEW.values()]
    del engine
print(f"tokens per forward (share of steps with drafts)\n{'':14}", *(f"{kind:>14}" for kind in FEW))
for name, runs in tau.items():
    print(f"{name:14}", *(f"{run.tokens_per_forward:8.2f} ({run.share_with_drafts:4.0%})" for run in runs))
made = {
    name: [[event.token_ids for event in run.trace.of(DraftProposed)] for run in tau[name]]
    for name in ("your n-grams", "n-grams")
}
claim("Your drafter drafts the same tokens as the engine's.", made["your n-grams"] == made["n-grams"])
claim(
    "All methods give the same text.",
    all(run.outputs == tau["draft model"][i].outputs for runs in tau.values() for i, run in enumerate(runs)),
)
claim(
    "On functions the draft model gives more tokens per forward than n-grams.",
    tau["draft model"][0].tokens_per_forward > tau["n-grams"][0].tokens_per_forward,
    of_model=True,
)

# %% [markdown]
# The draft model drafts in every step in which more than one token is still wanted, whether it knows anything or not. n-grams
# draft only where the last tokens occurred before; elsewhere the step is a plain one. The engine's search takes microseconds,
# while the draft model costs c per token. So the row with the most tokens per forward need not be the fastest. But verifying
# costs the same whoever drafted: n-grams that are rejected make a step slower, as some rows of Measure show.
#
# ### Exercise 4: a tree instead of a chain
#
# One rejection ends a round. If the draft model hesitates between two tokens, let it propose both, and continue each:
# a **[tree](glossary.md#draft-tree)**. All its tokens go through the target in *one* forward. They lie one behind the
# other in the cache, so without a mask the branches would see each other. Each token may attend to itself and its
# ancestors only. (Its position, for RoPE, follows from its depth in the tree: siblings have the same one. The engine
# sees to that.)
#
# ```
# parents = [-1, -1, 0, 0, 1]        root ─┬─ 0 ─┬─ 2          rows and columns of the mask:
#                                          │     └─ 3          0: the root (the last committed token)
#                                          └─ 1 ─── 4          i + 1: draft i
# ```


# %%
def tree_mask(parents: list[int]) -> torch.Tensor:
    """Return the mask of a draft tree, [1 + n, 1 + n] bool for n drafts: row i attends to column j.

    parents: of each draft the index of the draft it follows, or -1 for the root; parents come before their children

    Example: tree_mask([-1, -1]) is [[1, 0, 0], [1, 1, 0], [1, 0, 1]]: two drafts that do not see each other.
    """
    ### BEGIN SOLUTION
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent + 1]
    return mask
    ### END SOLUTION


# %%
check("l11.tree_mask")

# %% [markdown]
# Your mask in the engine's forward: the tree above, and each of its paths alone, as an ordinary chain. If the mask is
# right, the target's logits at a node are those at the end of its path.

# %%
from minillm.batch import Segment
from minillm.viz.tensors.mask_grid import MaskGrid

my_mask = use("l11.tree_mask")
runner, tokenizer = drafted.engine.runner, drafted.get_tokenizer()


class MySegment(Segment):
    """A segment with your mask, as one integer per token: bit j is column j."""

    @property
    def masks(self):
        return [sum(1 << j for j, seen in enumerate(row) if seen) for row in my_mask(self.parents).tolist()]


class CausalSegment(Segment):
    """A planted mistake: every token of the tree attends to all before it."""

    @property
    def masks(self):
        return [(2 << i) - 1 for i in range(len(self.token_ids))]


parents = [-1, -1, 0, 0, 1]
prompt = tokenizer.encode(slices["functions"][0])[:40]
parts = {"return self": 2, " = None": 2, "(": 1}  # so many tokens of each
tree = [i for text, n in parts.items() for i in tokenizer.encode(text, add_special_tokens=False)[:n]]
table = list(range(8))


def logits_of(kind: type[Segment], nodes: list[int], links: list[int] | None) -> torch.Tensor:
    """The target's logits at the last committed token and at these nodes."""
    runner.run([Segment(prompt[:-1], 0, table)])
    ids = [prompt[-1], *(tree[node] for node in nodes)]
    return runner.run([kind(ids, len(prompt) - 1, table, len(ids), links)]).float()


of_paths = {node: logits_of(Segment, path, None)[-1] for node, path in {2: [0, 2], 3: [0, 3], 4: [1, 4]}.items()}
furthest = {}
for kind in (MySegment, CausalSegment):
    logits = logits_of(kind, list(range(5)), parents)
    furthest[kind.__name__] = max(float((logits[node + 1] - path).abs().max()) for node, path in of_paths.items())
drafted.reset_prefix_cache()  # these forwards overwrote cached blocks
claim("With your mask, each leaf has the logits of its path alone.", furthest["MySegment"] < 0.01)
claim("With the mask of a chain it has not.", furthest["CausalSegment"] > 0.1)
MaskGrid(my_mask(parents).tolist(), ["root", *(tokenizer.decode([token]) for token in tree)], past=0)

# %% [markdown]
# The branches share more than a forward. Attention reads the keys of the cached tokens once for all of them. With one
# request for each branch, every branch would read them again.

# %%
from minillm.speculative.tree_shape import TreeShape

shape, saved = TreeShape(tuple(parents)), []
print(f"cached tokens   keys read for the tree   for its {len(shape.leaves)} branches one by one   saved")
for cached in (10, 100, 1_000, 10_000):
    at_once, one_by_one = shape.keys_read(cached)
    saved.append(1 - at_once / one_by_one)
    print(f"{cached:13,} {at_once:24,} {one_by_one:31,} {saved[-1]:7.0%}")
claim(
    "The longer the context, the nearer the saving comes to 1 - 1 / (number of branches).",
    saved == sorted(saved) and abs(saved[-1] - (1 - 1 / len(shape.leaves))) < 0.001,
)
quoted("Reading shared prefixes once saves 73 to 99% of the KV cache traffic", "DeFT, Yao et al. 2024; wider trees")

# %% [markdown]
# What does a tree gain? More tokens per round, for more rows in the forward. `(2, 1, 1)` means: two candidates for
# the first token, each continued by one for the second and one for the third. (Near the end of a request the engine
# cuts a tree to as many nodes as tokens may still follow, whatever its depth. Only rounds with the whole tree count
# here.)

# %%
trees = {"method": "draft_tree", "model": DRAFT, "adaptive": False}
grown = {}
ROWS = (0.01, 0.1)  # stated: what a verified draft adds to a step
print(
    "branching    drafts   whole trees   tokens per round   speed if a row costs 0.01   0.1   (of a plain step; drafting free)"
)
for branching in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1)):
    engine = LLM(NAME, speculative_config={**trees, "tree_branching": branching}, **SIZE)
    size = sum(accumulate(branching, mul))
    whole = drafting.run(engine, slices["functions"], FixedDrafts(size)).rounds_with(size)
    found = sum(len(round_.token_ids) for round_ in whole) / len(whole)
    grown[branching] = found, *(found / (1 + row * size) for row in ROWS)
    print(
        f"{branching!s:12} {size:6} {len(whole):13} {found:18.2f} {grown[branching][1]:27.2f} {grown[branching][2]:5.2f}"
    )
del engine
widths, cheap, dear = zip(*grown.values(), strict=True)
claim(
    "Every tree gives more tokens per round than the chain of the same depth.",
    min(widths[1:]) > widths[0],
    of_model=True,
)
claim("Where a row is nearly free, a tree is the fastest.", max(cheap) > cheap[0], of_model=True)
claim("Where a row costs a tenth of a step, the chain is the fastest.", max(dear) == dear[0], of_model=True)

# %% [markdown]
# A tree pays where rows are nearly free: on a GPU with few requests, for a large target. Here `(2, 1, 1)` buys part of a token
# per round with twice the drafts. (Sequoia chooses the tree's shape by dynamic programming from α and the price of rows;
# EAGLE-2 grows it where the draft model is confident.)
#
# ### Exercise 5: a draft model that is trained to be accepted
#
# A draft model is trained to imitate the target. The usual loss is the [KL divergence](glossary.md#kl-divergence)
# KL(p‖q). But this model is too small to imitate everything, and what counts is Σ min(p, q), the probability that the
# target accepts. So train on that (it is one of the LK losses of Samarin et al. 2026; SPIRe mixes KL with the rejection rate
# 1 − Σ min(p, q)).


# %%
def distil_loss(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Return −log Σ min(p, q), averaged over the rows: a tensor without dimensions.

    target_logits, draft_logits: [rows, vocab]; p is the softmax of the former, q that of the latter

    The draft model is trained with it: compute it with functions of torch, so that it has a gradient.

    Example: p = (½, ½) and q = (¾, ¼) give −log(½ + ¼) = 0.288.
    """
    ### BEGIN SOLUTION
    p, q = target_logits.softmax(-1), draft_logits.softmax(-1)
    return -torch.minimum(p, q).sum(-1).log().mean()
    ### END SOLUTION


# %%
check("l11.distil_loss")

# %% [markdown]
# A minimal example of a draft model too small for its target: the target's distribution has two modes (peaks), the
# draft model's only one, with a centre and a width to learn.

# %% tags=["expected"] alt="Three curves over forty tokens: the target with two modes; the draft model trained by KL, one wide mode across both; the draft model trained on acceptance, a narrow mode on the larger one."
from torch.nn import functional as F

my_loss = use("l11.distil_loss")
tokens = torch.arange(40.0, dtype=torch.float64)
modes = 0.75 * torch.exp(-((tokens - 10) ** 2) / 8) + 0.25 * torch.exp(-((tokens - 28) ** 2) / 8)
target = (modes / modes.sum()).log()[None]


def fit(loss) -> tuple[torch.Tensor, float]:
    """The draft model's distribution after training with `loss`, and its acceptance."""
    centre, log_width = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (17.0, 1.5))
    adam = torch.optim.Adam([centre, log_width], lr=0.1)
    with torch.enable_grad():
        for _ in range(300):
            draft = -((tokens - centre) ** 2 / (2 * (2 * log_width).exp()))[None]
            adam.zero_grad()
            loss(target, draft).backward()
            adam.step()
    q = draft.detach().softmax(-1)[0]
    return q, float(torch.minimum(target.softmax(-1)[0], q).sum())


by_kl, alpha_kl = fit(lambda p, q: F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean"))
by_acceptance, alpha_lk = fit(my_loss)
print(f"acceptance Σ min(p, q): trained by KL {alpha_kl:.2f}, trained on acceptance {alpha_lk:.2f}")
speeds = [speed_up([alpha] * my_gamma([alpha] * 8, 0.1, [1.0] * 9), 0.1, 0.0) for alpha in (alpha_kl, alpha_lk)]
print(f"with c = 0.1 and free verification: {speeds[0]:.2f}× and {speeds[1]:.2f}×")
claim("Training on acceptance raises acceptance.", alpha_lk > alpha_kl + 0.1)
ids = list(range(40))
LineChart(
    "A target with two modes, and two draft models with one",
    Axis("token"),
    Axis("probability"),
    [
        Series("target", ids, target.softmax(-1)[0].tolist(), style="modelled"),
        Series("draft model, by KL", ids, by_kl.tolist()),
        Series("draft model, on acceptance", ids, by_acceptance.tolist()),
    ],
    "The draft model trained by KL covers both modes; the one trained on acceptance covers the larger one.",
)

# %% [markdown]
# KL(p‖q) punishes a draft model most where the target's probability is high and its own is near 0. So it spreads over
# both modes (KL is *mode-covering*), and much of it lies where the target has almost nothing. The acceptance loss gives
# up the smaller mode. (It takes the logarithm because far from the target the gradient of Σ min(p, q) itself is weak;
# where that sum is the loss, KL comes first or is mixed in. The bundled draft model was trained on KL + the rejection
# rate + a little cross-entropy: `minillm/training/distill.py`.)
#
# ### Exercise 6 (optional): how many drafts, in this step?
#
# γ need not be the same for all requests, nor in every step. One request is in the middle of a table of constants, the
# next writes prose. So take the drafts of all requests in one order, the most probable first, and as many of them as
# give the most tokens per second: [adaptive drafting](glossary.md#adaptive-drafting). (vLLM's adaptive verification
# ranks in a similar way and takes its prices from a profile, but decides how many of the drafts already made are
# *verified*. Here it is how many are made.)


# %%
def choose_drafts(survival: list[list[float]], seconds: list[float]) -> list[int]:
    """Return how many drafts each request gets in this step.

    survival: survival[r][i] is the probability that draft i + 1 of request r and all before it are accepted
    seconds:  seconds[m] is the time of a step with m drafts of all requests together

    Take the m drafts with the highest survival, with the m that gives the most tokens per second; the fewest of
    equals. Every request also gets the target's own token. Of equally probable drafts, those of an earlier request
    come first.

    Example: choose_drafts([[0.9, 0.8], [0.3, 0.1]], [1.0, 1.2, 1.4, 1.6, 1.8]) is [2, 0].
    """
    ### BEGIN SOLUTION
    slots = [(p, r) for r, chances in enumerate(survival) for p in chances]
    slots.sort(key=lambda slot: -slot[0])
    tokens, counts, chosen = float(len(survival)), [0] * len(survival), [0] * len(survival)
    fastest = tokens / seconds[0]
    for m, (p, r) in enumerate(slots, start=1):
        tokens += p
        counts[r] += 1
        if tokens / seconds[m] > fastest:
            fastest, chosen = tokens / seconds[m], list(counts)
    return chosen
    ### END SOLUTION


# %%
check("l11.choose_drafts")

# %% [markdown]
# Your rule decides in the engine now, in every step. Survival is estimated from each request's own verdicts (and at
# first from those of all). The prices are *stated*, so that the picture is the same everywhere: three machines, of
# which the first is like a GPU with few requests, and the last has no arithmetic to spare.

# %%
my_choose = use("l11.choose_drafts")
MACHINES = {
    "rows nearly free": (0.02, 0.01),
    "in between": (0.05, 0.12),
    "saturated": (0.3, 0.8),
}  # c and row: one draft, one row; in steps of one row


class MyDrafts(AdaptiveDrafts):
    """Your rule, with the engine's estimate of survival."""

    def plan(self, requests, num_rows):
        survival = [self.survival(request) for request in requests]
        most = sum(map(len, survival))
        seconds = [self.costs.target(num_rows + m, 0) + m * self.costs.next_draft for m in range(most + 1)]
        return DraftPlan(my_choose(survival, seconds), survival, drafting.speedups(survival, seconds))

    def step_finished(self, drafts, num_rows, num_context, seconds):
        """The prices are stated: nothing is learnt from the clock."""


def at_prices(c: float, row: float) -> MyDrafts:
    return MyDrafts(6, StepCosts({1: 1.0, 64: 1 + 63 * row}, next_draft=c))


mixed = [*slices["imports"][:2], *slices["docstrings"][:2]]
decided = {}
for name, (c, row) in MACHINES.items():
    decided[name] = drafting.run(drafted, mixed, at_prices(c, row), new_tokens=64)
    plans = decided[name].trace.of(DraftsPlanned)
    given = [sum(plan.num_drafts) / len(plan.num_drafts) for plan in plans]
    print(
        f"{name:17} {sum(given) / len(given):5.2f} drafts per request and step, "
        f"{decided[name].tokens_per_forward:.2f} tokens per forward, {len(plans)} steps"
    )
per_step = [sum(sum(plan.num_drafts) for plan in run.trace.of(DraftsPlanned)) for run in decided.values()]
claim(
    "The more a draft and a row cost, the fewer drafts.",
    per_step == sorted(per_step, reverse=True) and per_step[0] > 0,
    of_model=True,
)
claim("On the saturated machine nothing is drafted.", per_step[-1] == 0)
claim("The text is the same on all three.", len({str(run.outputs) for run in decided.values()}) == 1)

# %% [markdown]
# One decision of the second machine, in the ninth step after the prompts: A and B continue imports, C and D docstrings.
# On the left, the chance of each draft to be kept; on the right, what another draft would do to the speed.

# %% tags=["expected"] alt="Left: four requests with their chances by position; the cells with the highest chances are ticked. Right: predicted speed-up by number of drafts, with a ring at the chosen number, where it is highest."
STEP = 8
in_between = decided["in between"].trace
DraftDecision(in_between.of(DraftsPlanned)[STEP], in_between)

# %% [markdown]
# And the same step on the other two: more drafts, and none.

# %%
for name in ("rows nearly free", "saturated"):
    show(DraftDecision(decided[name].trace.of(DraftsPlanned)[STEP], decided[name].trace))
given, fewer = (decided[name].trace.of(DraftsPlanned)[STEP].num_drafts for name in ("rows nearly free", "in between"))
claim("Rows nearly free: more drafts than in between.", sum(given) > sum(fewer), of_model=True)

# %% [markdown]
# ## Measure
#
# Does the formula predict this machine? The prices come from steps with four drafts (the cell above the map) and with
# one (timed here), all on *other* text (`functions`). The prediction follows from these prices and from the counted
# drafts of each step; beside it is what the clock says. Drafts are always four, or adaptive (at most four, by the
# engine's own rule with the same prices).

# %% tags=["nbval-ignore-output"]
known = [(drafting.prices(drafted, slices["functions"], p.batch, 1), p) for p in (one, eight)]  # one draft, and four
costs = {"draft model": drafting.costs_of(*known), "n-grams": drafting.costs_of(*known, has_model=False)}
lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": GAMMA}
engines = {"draft model": drafted, "n-grams": LLM(NAME, speculative_config={**lookup, "adaptive": False}, **SIZE)}
measured, predicted, per_forward, NEW = {}, {}, {}, 24
print("requests  text        method        drafts      tokens/forward   predicted   measured")
for price in (one, eight):
    for kind in ("imports", "docstrings"):
        prompts = slices[kind][: max(2, price.batch)]
        for method, engine in engines.items():
            policies = {
                "none": lambda: FixedDrafts(0),
                "four": lambda: FixedDrafts(GAMMA),
                "adaptive": lambda method=method: AdaptiveDrafts(GAMMA, costs[method]),
            }
            runs = {name: [] for name in policies}
            for _ in range(2):
                for name, policy in policies.items():
                    runs[name].append(drafting.run(engine, prompts, policy(), batch=price.batch, new_tokens=NEW))
            plain = min(run.seconds for run in runs.pop("none"))
            for name, found in runs.items():
                ratio = measured[price.batch, kind, method, name] = plain / min(run.seconds for run in found)
                foretold = drafting.predicted_speed_up(found[0], costs[method], price.batch, NEW)
                predicted[price.batch, kind, method, name] = foretold
                per_forward[price.batch, kind, method, name] = found[0].tokens_per_forward
                print(
                    f"{price.batch:8}  {kind:11} {method:13} {name:10} {found[0].tokens_per_forward:15.2f} "
                    f"{foretold:10.2f}× {ratio:9.2f}×{'   slower' if ratio < 0.995 else ''}"
                )
reveal("l11.eight", round(measured[8, "docstrings", "draft model", "four"], 2))
error = {key: foretold / measured[key] - 1 for key, foretold in predicted.items()}
off = sorted(abs(e) for key, e in error.items() if key[-1] == "four")
print(
    f"always four drafts: predictions are off by {off[0]:.0%} to {off[-1]:.0%}, half of them by less than {off[4]:.0%}"
)
for kind in ("imports", "docstrings"):
    for method in engines:
        four, adaptive = (measured[8, kind, method, name] for name in ("four", "adaptive"))
        print(f"eight requests, {kind}, {method}: always four drafts {four:.2f}×, adaptive {adaptive:.2f}×")
slower = [key for key, ratio in measured.items() if key[2] == "n-grams" and ratio < 0.995]
print(f"n-grams: {len(slower)} of {sum(key[2] == 'n-grams' for key in measured)} rows are slower than no drafts")
claim("n-grams cost nothing to draft, and yet they can make a run slower.", len(slower) > 0, measured=True)
claim("Always four drafts: half of the predictions are within 25% of the clock.", off[3] < 0.25, measured=True)
claim(
    "The same drafts gain less with eight requests than with one.",
    measured[8, "docstrings", "draft model", "four"] < measured[1, "docstrings", "draft model", "four"],
    measured=True,
)
claim(
    "Eight requests, docstrings, four drafts each from the draft model: the speed-up is less than half of the tokens "
    "per forward.",
    measured[8, "docstrings", "draft model", "four"] < per_forward[8, "docstrings", "draft model", "four"] / 2,
    measured=True,
)
claim(
    "Eight requests, mean of both texts: four drafts each from n-grams make the run slower.",
    (measured[8, "imports", "n-grams", "four"] + measured[8, "docstrings", "n-grams", "four"]) / 2 < 1,
    measured=True,
)
claim(
    "Eight requests, docstrings, n-grams: adaptive drafting is predicted not to lose as much.",
    predicted[8, "docstrings", "n-grams", "adaptive"] > predicted[8, "docstrings", "n-grams", "four"],
    measured=True,
)

# %% [markdown]
# **Where speculation loses.** With eight requests a step has eight rows; with four drafts each it has forty. The
# processor on which this lesson was recorded has no arithmetic left to compute them for nothing; yours may have. The
# price has changed, not the chance that a draft is right. (The rows with one request ran two of these prompts, those
# with eight ran all eight, so their tokens per forward may differ.) On that processor, with eight requests and four
# drafts each, the draft model gives three tokens per forward, and yet hardly any speed-up, or none. **n-grams** give
# 1.3, too few to pay for their rows: over both texts they make the run slower. Rows that are verified and rejected take
# time, whoever drafted them. That is why a server drafts when it is quiet and stops when it is busy, and why a benchmark
# with one request says nothing about a server.
#
# **Adaptive drafting** drafts less where the prices are high, or where few drafts are accepted. Compare its rows with
# those of four drafts. (The runs are short and the clock is noisy: differences of a tenth say little. A measured number
# above the tokens per forward is noise, because no round is shorter than a plain step.) With eight requests and n-grams
# on docstrings, by the prices it does not lose as much (by the clock the difference may be larger or smaller). With the
# draft model it may give up a gain: here that model's drafts are accepted more often than the rule assumes at first
# (70%), and it drafts only where it predicts to gain 5% or more. So it can be slower than always four drafts, and even
# than none, although none is one of its choices. In a short run its estimates are still guesses. Deciding takes time, so
# a decision to draft holds for 16 steps while the same requests decode. And to find out whether drafts are accepted it
# must draft some.
#
# It is no better than its prices and its estimates. The prices are timed on steps in which all requests draft alike. In a
# mixed step the formula takes a line between them, but the draft model runs its forward even if only one request drafts,
# and after a pause it must first read the tokens that it missed. So the engine's rule also compares: it times its own
# steps, each one with drafts against those without shortly before it, and corrects by that what the prices say drafts
# add. (An engine with adaptive drafting times the prices itself when it starts. To have steps to compare, it makes ten
# steps without drafts now and then: first once it has drafted for as long as 8 of them take, then 16, and so on,
# doubling up to 512. And once drafts have cost eight plain steps more than they saved, it drafts nothing for some
# hundred plain steps per step lost, so that the loss it has measured comes to about 1% in the long run. The runs above
# were given the prices, and only decide by them: they neither make such steps nor rest.)
#
# ### The literature's claims
#
# Three statements about speculative decoding from two articles, beside what the formula says:

# %%
quoted(
    '"Effective speedup: 1 + gamma * acceptance_rate forward passes saved", at "~60-70% acceptance rate at gamma=5"',
    "an article on KV caches and speculative decoding, which gives no c and no v",
)
quoted('"Real-world: 2.0–2.8x tokens/sec improvement"', "the same article")
quoted('"linear speedups without sacrificing the quality"', "an article on inference below 100 ms")
print("\nα = 0.65 at every position, c = 0.1, verification free")
print("γ    1 + γα   tokens per round   speed-up")
for gamma in (1, 2, 3, 5, 8, 16, 32):
    print(
        f"{gamma:2} {1 + 0.65 * gamma:8.2f} {my_tokens([0.65] * gamma):14.2f} {speed_up([0.65] * gamma, 0.1, 0):14.2f}×"
    )
conditional = speed_up([0.65] * 5, 0.1, 0.0)
share = (1 + 5 * 0.65) / (1 + 5 * 0.1)
print(f"\nγ = 5, an 'acceptance of 65%': conditional {conditional:.2f}×; accepted / drafted {share:.2f}×")
claim("1 + γα is more than the tokens of a round, and those are no speed-up yet.", my_tokens([0.65] * 5) < 1 + 5 * 0.65)
at = {gamma: speed_up([0.65] * gamma, 0.1, 0.0) for gamma in (3, 5, 16, 32)}
claim("The speed-up has a maximum: γ = 3 beats 5, 5 beats 16.", at[3] > at[5] > at[16])
claim("With γ = 32 drafting is slower than not drafting.", at[32] < 1)
claim(
    "65% gives 1.76 times if it is conditional, 2.83 times if it is accepted / drafted.",
    (round(conditional, 2), round(share, 2)) == (1.76, 2.83),
)

# %% [markdown]
# ## Break it
#
# Five ways to choose γ wrong. The acceptances are those of the draft model above, the prices are stated. **Guess
# first**: which mistake costs most? Each row shows the γ that the mistake leads to, and the speed that this γ really
# has.

# %%
c, row = 0.12, 0.16  # stated
rows = [1 + row * g for g in range(len(alphas) + 1)]
gpu_c, gpu_row = MACHINES["rows nearly free"]
share = acceptance.accepted_share
chosen = {
    "right": my_gamma(alphas, c, rows),
    "prices of a GPU": my_gamma(alphas, gpu_c, [1 + gpu_row * g for g in range(len(rows))]),
    "drafts are free": my_gamma(alphas, 0.0, rows),
    "verification is free": my_gamma(alphas, c, [1.0] * len(rows)),
    "accepted / drafted as α": my_gamma([share] * len(alphas), c, rows),
    "marginal as conditional": my_gamma(acceptance.marginal, c, rows),
}
speeds = {mistake: speed_up(alphas[:gamma], c, row) for mistake, gamma in chosen.items()}
for mistake, gamma in chosen.items():
    print(f"{mistake:24} γ = {gamma}   {speeds[mistake]:.2f}×")
claim("No mistake is faster than the right γ.", max(speeds.values()) == speeds["right"])
claim("Prices of another machine cost most.", min(speeds, key=speeds.get) == "prices of a GPU", of_model=True)

# %% [markdown]
# None of these changes the text, so no test of tokens finds them. Only the clock does, on the machine where it matters.
#
# ## In the field
#
# | system | what it drafts | how many |
# |---|---|---|
# | vLLM | `ngram`, `suffix`, `draft_model`, `medusa`, `eagle`, `eagle3`, `mtp` and others | `num_speculative_tokens`, by batch size if wanted; adaptive verification (for `dspark` only) ranks drafts by survival, with profiled step costs |
# | EAGLE 1 to 3 | one layer on the target's hidden states; a fixed tree at first, from EAGLE-2 on trees that grow where it is confident | a budget of nodes |
# | Medusa | heads on the target's last hidden state, all guesses in one pass | a fixed tree |
# | Hydra | heads that run one after another, because each also reads the tokens guessed before it | a fixed tree |
# | PARD | a draft model with mask tokens: K drafts in one forward | K |
# | Sequoia | any draft model | the tree's shape by dynamic programming for a machine |
# | Arctic (Snowflake) | suffix decoding where it expects at least as many accepted tokens as the model would draft, else the model | by the length of the match; the model a fixed number |
# | llama.cpp, transformers | a draft model, or prompt lookup (`prompt_lookup_num_tokens`) | fixed, or by the draft model's confidence |

# %%
quoted(
    "Vicuna-7B in FP16 on an A100, greedy, one request, tokens per step → speed: small draft model 2.28 → 1.52×, look-up 1.75 → 1.66×, Medusa 2.31 → "
    "1.71×, Hydra 3.26 → 2.07×, EAGLE-2 4.34 → 2.36×",
    "Spec-Bench, Leaderboard.md, the table for the A100 with PyTorch 2.5.1",
)
print("plain steps per round, from these pairs:")
for name, tokens_per_step, faster in (
    ("small draft model", 2.28, 1.52),
    ("look-up", 1.75, 1.66),
    ("EAGLE-2", 4.34, 2.36),
):
    print(f"  {name:18} {tokens_per_step / faster:.2f}")

# %% [markdown]
# By these numbers look-up is faster than a small draft model, with fewer tokens per step. The denominator explains it:
# a round of the small draft model takes one and a half plain steps, a round of look-up hardly more than one.
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | speed-up = 1 + γ × acceptance | that is τ, and only if "acceptance" means accepted / drafted; the speed-up divides by γc + v. (The article says "forward passes saved": of the target's, a round saves τ − 1) | the literature's claims |
# | linear in γ | with the same α at every position τ never exceeds 1 / (1 − α); with c > 0 the speed-up has a maximum, then falls below 1 | the same |
# | 60–70% acceptance gives 2.0–2.8× | three numbers have that name: with γ = 5, c = 0.1 and free verification, 65% gives 1.76× if it is the conditional acceptance, 2.83× if it is accepted / drafted | the same |
# | speculative decoding makes a server faster | with one request it does, where drafts are accepted; with eight together, where this lesson was recorded, the draft model gained little or nothing, and n-grams made it slower | Measure |
#
# **Papers.** Leviathan et al. 2023, *Fast Inference from Transformers via Speculative Decoding*. Chen et al. 2023,
# *Accelerating Large Language Model Decoding with Speculative Sampling*. Miao et al. 2024, *SpecInfer*. Chen et al.
# 2024, *Sequoia*. Li et al. 2024, *EAGLE* and *EAGLE-2*. Cai et al. 2024, *Medusa*. Saxena 2023, *Prompt Lookup
# Decoding*. Oliaro et al. 2024, *SuffixDecoding*. Mamou et al. 2024, *DISCO* (a dynamic number of drafts). Samarin et al. 2026,
# *LK Losses*.
#
# ## Recap
#
# 1. Speed-up = τ / (γc + v). τ = 1 + Σ of products of *conditional* acceptances; if none of these exceeds α, it stays
#    below 1 / (1 − α).
# 2. A further draft pays if its chance to be kept, divided by its price, exceeds the speed-up reached without it. For
#    the first draft that speed-up is 1, so break-even is α = c + the price of a row. (If every row costs the same.)
# 3. n-grams and suffixes cost almost nothing to draft, but rejected rows are paid for as any others; trees buy tokens
#    with rows; training on Σ min(p, q) buys acceptance where the draft model is small.
# 4. Prices belong to a machine and a batch. The same drafts that pay for one request gain less for eight, or lose.
# 5. So decide while the engine runs: rank all drafts by their chance to be kept, and take as many of them as give the
#    most tokens per second.
#
# **Next:** in lesson 12 the cache is what a step waits for, and a model drafts from a part of its own.
