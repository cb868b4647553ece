# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10. Speculative decoding: exactness
#
# **Question.** *A small model guesses, the large one checks. Why is the text exactly the large model's?*
#
# Generating a token costs one [forward](glossary.md#forward) of the model, and in a large model most of a forward's
# time goes into reading weights. A forward over five tokens reads them once, too. **[Speculative
# decoding](glossary.md#speculative-decoding)** uses this: a small, cheap **[draft model](glossary.md#draft)** guesses the
# next γ tokens, the **drafts**, and one forward of the large model, the **[target](glossary.md#target)**, judges all of
# them. The drafts that pass are kept.
#
# At temperature 0 it is clear what "pass" means: a draft is right if it is the target's argmax. But text is often
# *sampled*. Then the target has no right answer, only a distribution. Which drafts may be kept so that the text is
# distributed as if the target had sampled every token itself? Not approximately: exactly. The rule takes three lines and
# its proof one, and still the loop of an article (you will run it below) does not write the target's text.
#
# You build the rule, prove it by counting, and run it in the real engine. Then you break it in fifteen ways to learn which
# check finds which mistake. Whether it makes text *faster* is another question, which this lesson leaves open.
#
# You need lesson 1 (sampling from a distribution) and lesson 2 (the cache and its length). Everything runs on a laptop's
# CPU. The engine runs each step as one [compiled function](glossary.md#compiled-step), which is compiled the first time it
# runs on a machine; that takes up to a minute behind a progress bar.

# %%
import math
import os
from fractions import Fraction

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.models.held_out import held_out_prompts
from minillm.sampling import sample
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop.l10_words import DRAFT, TARGET, WORDS
from minillm.trace import TokensCommitted
from minillm.viz import AcceptanceStrip, LiveView
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.charts.chi_square import ChiSquare, ChiSquarePanels, p_text
from minillm.viz.speculation.overlap import OverlapBars

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
DRAFT_NAME = os.environ.get("MINILLM_DRAFT", "minicoder-draft")  # a smaller one with the same tokenizer
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

p_row, q_row = TARGET.forward([], [2])[0], DRAFT.forward([], [2])[0]
print("              ", *(f"{word:>8}" for word in WORDS))
print("target, p     ", *(f"{x:8.1%}" for x in p_row.tolist()))
print("draft model, q", *(f"{x:8.1%}" for x in q_row.tolist()))

# %% [markdown]
# ## The question, in numbers
#
# To count everything, we use a language of three words. After some text, the target continues with the probabilities
# *p* above, the draft model with *q*. Both are taken *after* temperature, top-k and top-p: p is the distribution that the
# target would sample from, q the one that the draft was sampled from.
#
# The draft model says `for` in half of all cases. The target wants it in a quarter of them. If every draft were kept, the
# text would be the draft model's.
#
# ## Predict
#
# Write a number for each before you go on.
#
# 1. A rule keeps the text exactly the target's and accepts as many drafts as possible. How many of 100 does it accept?
# 2. An article accepts a draft x with probability min(1, p(x)). How many of 100 does *that* accept, to
#    the nearest whole number?
# 3. A third rule is the first one with one mistake: after a rejection it samples a word from p, "because p is the target's
#    distribution". How often does it write `for`, in percent? (The target: 25.)

# %%
predict("l10.accepted", None, unit="of 100")
predict("l10.article", None, unit="of 100")
predict("l10.mistake", None, unit="percent")

# %% [markdown]
# ## Build
#
# ### Exercise 1: accept or reject
#
# The draft model writes `for` twice as often as it should, so half of these drafts must be rejected. It writes `if` and
# `return` less often than it should, so all of those are kept. In general a draft x is
# **[accepted](glossary.md#accepted)** with probability
#
# $$\min\left(1, \frac{p(x)}{q(x)}\right)$$
#
# In the function below, x has one draft per row. q(x) cannot be 0 if x was really drawn from q. If it is 0 all the same,
# the caller is mistaken, and NaN says so (the engine turns it into an error that names the drafts).


# %%
def accept_rule(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Return the probability with which each draft is accepted: min(1, p(x) / q(x)), or NaN where q(x) = 0.

    p, q:    [k, vocab] distributions of the target and of the draft model, one row per draft
    x:       [k] int64, the drafts
    returns: [k]

    Example: p = [[0.2, 0.8]], q = [[0.5, 0.5]]: for x = [0] it is [0.4], for x = [1] it is [1.0].
    """
    ### BEGIN SOLUTION
    p_x = p.gather(-1, x[..., None]).squeeze(-1)
    q_x = q.gather(-1, x[..., None]).squeeze(-1)
    return torch.where(q_x > 0, (p_x / q_x).clamp(max=1.0), math.nan)
    ### END SOLUTION


# %%
check("l10.accept_rule")

# %% [markdown]
# Stuck? `hint("l10.accept_rule", 1)`, then 2, 3 and 4: where to look, which operation, the shape of the code, the solution.
#
# How often is a draft accepted? The word y is drafted with probability q(y) and then accepted with your function, so it is
# drafted *and* accepted with probability q(y) · min(1, p(y) / q(y)) = min(p(y), q(y)).

# %%
my_accept = use("l10.accept_rule")
all_words = torch.arange(len(WORDS))
chances = my_accept(p_row.expand(3, -1), q_row.expand(3, -1), all_words)
accepted = q_row * chances
print("accept with probability", *(f"{word} {x:.3f}" for word, x in zip(WORDS, chances.tolist(), strict=True)))
print("drafted and accepted   ", *(f"{word} {x:.3f}" for word, x in zip(WORDS, accepted.tolist(), strict=True)))
alpha = float(accepted.sum())
reveal("l10.accepted", round(100 * alpha))
reveal("l10.article", round(100 * float((q_row * p_row).sum())))
claim("The accepted share is Σ min(p, q).", math.isclose(alpha, float(torch.minimum(p_row, q_row).sum())))

# %% [markdown]
# Σ min(p, q) is called **α**, an [acceptance rate](glossary.md#acceptance-rate). No exact rule for a single draft can accept
# more: a word may not be written more often than p says, and is not drafted more often than q says.
#
# ### Exercise 2: the residual
#
# After a rejection, a word is needed from somewhere else. Acceptance has given each word min(p, q) so far. What is missing
# for p? Where the draft model writes a word too often, nothing. Where it writes it too rarely, p − q. So the
# **[recovered token](glossary.md#recovered-token)** is drawn from the **[residual](glossary.md#residual)**:
#
# $$\frac{\max(0,\, p - q)}{\sum_y \max(0,\, p(y) - q(y))}$$
#
# If p and q are equal, the residual is 0/0. A rejection is then impossible in theory, but rounding can make it possible:
# p(x)/q(x) may be 0.9999999. Return p in this case.


# %%
def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of the recovered token: max(0, p - q), normalised. Where p nowhere exceeds q: p.

    p, q, returns: [n, vocab]

    Example: p = [[0.2, 0.3, 0.5]], q = [[0.6, 0.2, 0.2]] gives [[0, 0.25, 0.75]].
    """
    ### BEGIN SOLUTION
    left = (p - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)
    ### END SOLUTION


# %%
check("l10.residual")

# %% [markdown]
# The proof is a picture. The probability p of each word has two parts: drafted and accepted (green), and recovered
# (orange). What is rejected has the same size as what is recovered, because p and q both sum to 1.

# %% tags=["expected"] alt="Three bars, one per word. The green part of each is drafted and accepted, 75% together. For the word `for`, a hatched part of 25% is rejected; on the other two words, orange parts of 8.3% and 16.7% are recovered."
my_residual = use("l10.residual")
OverlapBars(WORDS, p_row.tolist(), q_row.tolist())

# %%
recovered = my_residual(p_row[None], q_row[None])[0]
written = accepted + (1 - alpha) * recovered
mistaken = accepted + (1 - alpha) * p_row
print("               ", *(f"{word:>8}" for word in WORDS))
print("accepted       ", *(f"{x:8.1%}" for x in accepted.tolist()))
print("recovered      ", *(f"{x:8.1%}" for x in ((1 - alpha) * recovered).tolist()))
print("together       ", *(f"{x:8.1%}" for x in written.tolist()))
print("from p instead ", *(f"{x:8.1%}" for x in mistaken.tolist()))
claim("Accepted and recovered together are the target's distribution.", torch.allclose(written, p_row, atol=1e-12))
reveal("l10.mistake", 100 * float(mistaken[0]))
claim(
    "With p instead of the residual, the word that the draft model likes too much is still written too often.",
    mistaken[0] > p_row[0],
)

# %% [markdown]
# That was the proof, for one token: P(y) = min(p(y), q(y)) + (1 − α) · residual(y) = p(y). The last step holds because
# Σ max(0, p − q) = Σ p − Σ min(p, q) = 1 − α. So the factor 1 − α cancels the division in the residual, and what remains is
# min(p, q) + max(0, p − q) = p.
#
# The last line of the table is the mistake of your third prediction: acceptance alone gives `for` its whole 25%, and
# drawing from p after a rejection adds 6 more.
#
# ### Exercise 3: a round
#
# A **[round](glossary.md#round)** judges γ drafts. The target's forward runs over the *last committed token* and the drafts,
# γ + 1 tokens in all, so it returns γ + 1 rows. Row i is the distribution *after* input i, which judges draft i:
#
# ```text
# input of the target     last token   x₀          x₁          x₂
# row of p                p[0]         p[1]        p[2]        p[3]
# it judges               x₀           x₁          x₂          (nothing)
#
# all accepted            x₀           x₁          x₂          bonus token from p[3]
# x₁ rejected             x₀           recovered from p[1], q[1]           x₂ is discarded
# ```
#
# Drafts behind the first rejected one are discarded, because they continue a text that does not exist. If all drafts are
# accepted, the last row is left over. It is a distribution of the target for the next token, so one more token is drawn from
# it: the **[bonus token](glossary.md#bonus-token)**. So a round commits at least 1 and at most γ + 1 tokens.
#
# Randomness comes in as numbers from outside. A draft is accepted if its uniform is *below* its chance (so chance 0 is never
# accepted, even at uniform 0). The last uniform draws the recovered or the bonus token: `sample(row, [u])`, for a row
# `[1, vocab]`, returns a tensor with one token id.


# %%
def verify_chain(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    """Return the tokens that one round commits: the accepted drafts, then one token of the target.

    drafts:   γ token ids, at least one
    p:        [γ + 1, vocab]; row i judges draft i, the last row is the bonus token's
    q:        [γ, vocab]; what each draft was drawn from
    uniforms: γ + 1 numbers in [0, 1), one per draft; the last draws the recovered or the bonus token

    No input is changed. my_accept and my_residual are your functions, or the references if yours do not pass.

    Example: one draft [0], p = [[0.2, 0.8], [0.5, 0.5]], q = [[0.5, 0.5]], so the chance is 0.4.
    uniforms [0.3, 0.9] give [0, 1] (accepted, bonus), uniforms [0.6, 0.9] give [1] (rejected, recovered).
    """
    ### BEGIN SOLUTION
    chances = accept_rule(p[:-1], q, torch.tensor(drafts)).tolist()
    n = 0
    while n < len(drafts) and uniforms[n] < chances[n]:
        n += 1
    last = residual(p[n : n + 1], q[n : n + 1]) if n < len(drafts) else p[n : n + 1]
    return [*drafts[:n], int(sample(last, uniforms[-1:]))]
    ### END SOLUTION


# %%
check("l10.verify_chain")

# %% [markdown]
# ### Exercise 4: roll back two caches
#
# Both models have a cache, and both have computed rows for tokens that are now rejected. **[Rollback](glossary.md#rollback)**
# removes them. A row is valid if its token has been committed. Below, a row is written as the token whose key and value it
# holds. Two committed tokens (11, 12) and four drafts (21 … 24), of which two are accepted:
#
# ```text
# the target's cache      11  12  21  22  23  24      it ran over 12 and all drafts
# the draft model's cache 11  12  21  22  23          24 was its last output, and never its input
# valid                   11  12  21  22              then comes the recovered token, which is in no cache yet
# ```
#
# Two details:
#
# * The draft model's cache has one row less. When *all* drafts are accepted it lacks the last one, so the next round must
#   give the draft model two tokens: the last draft and the bonus token.
# * In Python, `rows[:-0]` is not all rows.


# %%
def rollback(target: list[int], draft: list[int], num_drafts: int, num_accepted: int) -> tuple[list[int], list[int]]:
    """Return the valid rows of both caches after a round.

    target: rows of the target's cache; the last num_drafts of them are the drafts
    draft:  rows of the draft model's cache: the same without the last draft
    Neither list is changed.

    Example: rollback([11, 12, 21, 22, 23, 24], [11, 12, 21, 22, 23], 4, 2) is ([11, 12, 21, 22], [11, 12, 21, 22]).
    """
    ### BEGIN SOLUTION
    num_valid = len(target) - (num_drafts - num_accepted)
    return target[:num_valid], draft[:num_valid]
    ### END SOLUTION


# %%
check("l10.rollback")

# %% [markdown]
# ## Check it without chance
#
# Does a whole round of *your* code give the target's distribution, for several tokens in a row? In the world of three
# words nothing needs to be left to chance: take *every* pair of drafts with its probability, and every combination of
# uniforms. (Chances of acceptance are multiples of 1/4, and the last token's probabilities multiples of 1/12. So
# 4 · 4 · 12 combinations of uniforms, each in the middle of its interval, stand for all.) A round may commit fewer than
# three tokens; then the target alone writes the rest. The joint distribution of the next three tokens has 27
# probabilities, all of them fractions. They must be *equal* to the target's, without tolerance and without statistics.

# %%
from minillm.teaching.workshop.l10_words import enumerate_round, target_joint

my_verify, my_rollback = use("l10.verify_chain"), use("l10.rollback")
PROMPT = [2, 0]  # return for
joint, exact = enumerate_round(my_verify, PROMPT), target_joint(PROMPT, 3)
for tokens in sorted(exact, key=exact.get)[:: len(exact) // 5]:
    text = " ".join(WORDS[token] for token in tokens)
    print(f"{text:22} after a round {joint.get(tokens, 0)!s:>5}   target alone {exact[tokens]!s:>5}")
claim("Each of the 27 probabilities is the same fraction as the target's.", joint == exact)

# %% [markdown]
# The proof holds for any rows p and q, so a round is exact after any text. The next round continues a text that is exact, and
# so on: the whole text is the target's.
#
# This kind of test needs tiny models. For real ones there is **Pearson's [χ² test](glossary.md#chi-square)**: generate many
# texts, count, compare with the expected counts. It returns a p-value, the probability that a *right* sampler deviates at
# least this much. We call a sampler wrong below 10⁻⁶. So the test accuses a right sampler with one set of seeds in a
# million, and here the seeds are fixed: it always gives the same result. (The pictures also name the test's *degrees of
# freedom*, the number of counts that are free if their sum is given: one less than there are counts.)
#
# The loop that uses your four functions is `Loop` in `minillm/teaching/workshop/l10_loop.py`, one page. In the world of
# three words the target's row is always (3, 3, 6)/12 in *some* order, which depends on the whole text. So each word of a
# text has a **role**: `a` or `b` (probability 1/4 each) or `c` (1/2). If the text is the target's, the roles of two words in a
# row are independent, and each of the nine pairs has a known probability. The lower panel is the mistake of your third
# prediction.

# %% tags=["expected"] alt="Two panels of nine pairs of bars, expected beside observed. With your functions all counts are close to the expected ones. With p instead of the residual at least one is marked as far off, and the p-value is below one in a million."
from minillm.teaching.workshop.l10_broken import (
    BROKEN,
    FullTarget,
    NeverCuts,
    NoBonus,
    OneUniform,
    OpenFilter,
    TargetAlone,
)
from minillm.teaching.workshop.l10_checks import CELLS, COLUMNS, NUM_TOKENS, chi_square, examine, many_texts
from minillm.teaching.workshop.l10_loop import Loop, pick

texts = {kind: many_texts(kind(my_verify, my_rollback)) for kind in (Loop, FullTarget)}
tests = {kind: chi_square([text.tokens for text in some]) for kind, some in texts.items()}
pairs = [f"{'abc'[i]} {'abc'[j]}" for i, j in CELLS]
ChiSquarePanels(
    "Roles of two words in a row",
    pairs,
    [("your functions", tests[Loop]), ("after a rejection: all of p", tests[FullTarget])],
)

# %%
claim("Your functions pass the test.", tests[Loop].p_value > 1e-6)
claim("With p instead of the residual, the test fails.", tests[FullTarget].p_value < 1e-6)

# %% [markdown]
# ## See
#
# Now the same code in the real engine, with a real target and a real draft model. The engine has two places for it.
# `rejection_sample_method=AcceptRule(my_accept, my_residual)` replaces the two functions. `ChainRule`, below, gives your
# `verify_chain` the whole round: drafts, rows, and uniforms.
#
# In the picture a row is a round. ✓ accepted, ✗ rejected, · discarded, ↻ recovered, ★ bonus. The bars: of the rounds with a
# draft at this position, the share that accepted it. A draft after a rejected one counts as not accepted. The text is
# sampled (temperature 0.8), so rejections are frequent.

# %% tags=["nbval-ignore-output"]
from minillm.teaching.workshop.l10_engine import ChainRule


def engine(rule="standard", gamma: int = 4, drafter: str | None = DRAFT_NAME) -> LLM:
    """The target with a draft model, or alone."""
    config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": gamma, "adaptive": False}
    speculative = {**config, "rejection_sample_method": rule} if drafter else None
    return LLM(NAME, device="cpu", dtype="float32", num_kv_blocks=512, max_num_seqs=64, speculative_config=speculative)


mine, alone = engine(ChainRule(verify=my_verify)), engine(drafter=None)
mine.generate("x = ", SamplingParams(max_tokens=8), use_tqdm=False)  # compiles the step if needed
print("ready")

# %% tags=["expected"] alt="Rounds of at most four drafts: accepted drafts with a check mark, the first rejected one of a round crossed out, those behind it dotted, and the token that the target added: recovered after a rejection, or a bonus."
warm = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
with mine.trace() as trace, LiveView(AcceptanceStrip(trace), seconds=12):
    mine.generate("def read_lines(path):\n    with open(path) as f:\n", warm, use_tqdm=False)

# %% [markdown]
# (`ignore_eos` lets a text go on after its end, so a new file may begin in the picture.)
#
# **At temperature 0** p and q are *one-hot*: probability 1 for one token, 0 for all others. Then your rule becomes the
# simple one without any change: a draft is accepted (chance 1) if it is the target's argmax, otherwise rejected (chance
# 0), and the residual is the target's argmax. So in exact arithmetic the tokens are the *same* as without drafts, one by
# one. (In many engines a forward over five tokens rounds differently from a forward over one; the compiled step of this
# engine rounds both alike. In float32 two logits are rarely so close that this matters; in bfloat16 two nearly equal
# logits may change places.)

# %%
prompts = [prompt.prompt for prompt in held_out_prompts(64) if len(prompt.prompt) < 260][:16]


def tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    """The tokens of one completion per prompt."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


greedy = [SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)] * len(prompts)
sampled = [SamplingParams(seed=seed, max_tokens=48, ignore_eos=True) for seed in range(len(prompts))]
same = {}
for name, params in (("temperature 0", greedy), ("temperature 1", sampled)):
    pairs_of_texts = zip(tokens_of(mine, params), tokens_of(alone, params), strict=True)
    same[name] = sum(with_drafts == without for with_drafts, without in pairs_of_texts)
    print(f"{name}: {same[name]} of {len(prompts)} completions have the same tokens with and without drafts")
claim("At temperature 0 the drafts change no token.", same["temperature 0"] == len(prompts))
claim(
    "At temperature 1, with the same seeds, most completions differ.",
    same["temperature 1"] < len(prompts) / 2,
    of_model=True,
)

# %% [markdown]
# So when sampling, "lossless" does not mean "the same text": with drafts, most tokens are chosen by other random
# numbers (those that draw and judge the drafts). It means the same *distribution*, and only a statistical test can see
# that. Here it is for the real pair, after `def`. Top-k is 3, so there are only 27 continuations of three tokens, and
# the target's probability of each is computed without drafts. (The first token comes from the prompt's step, which has
# no drafts, and a round never has more drafts than it needs for `max_tokens`. So each text gets four tokens: then its
# first round has two drafts. The first three tokens are counted.) The limit is 10⁻⁶ again: one set of seeds in a
# million accuses a right sampler. The mistake is also tested after `    if`.

# %% tags=["expected"] alt="Two panels of pairs of bars for the most probable continuations of a prompt. With your functions the observed counts are close to the expected ones; with p instead of the residual at least one is marked as far off."
from minillm.models.loading import load_model
from minillm.speculative.rejection_sampler import AcceptRule
from minillm.teaching.workshop.l10_engine import chi_square_of_texts, sampled_texts, target_probabilities

COUNT = 600
short_prompt, other_prompt = "def", "    if"


def params_of(seed: int) -> SamplingParams:
    """Four sampled tokens, so that the first round has two drafts."""
    return SamplingParams(top_k=3, seed=seed, max_tokens=4, ignore_eos=True)


tokenizer = mine.engine.tokenizer
model = load_model(NAME, torch.float32, "cpu")
expected = {
    prompt: target_probabilities(model, tokenizer.encode(prompt), params_of(0), 3)
    for prompt in (short_prompt, other_prompt)
}
model = None


def tested(rule: str | AcceptRule, prompt: str) -> tuple[list[tuple[int, ...]], ChiSquare]:
    """The most probable continuations of a prompt, and the test of the texts that the engine writes with a rule."""
    texts_of_rule = [text[:3] for text in sampled_texts(engine(rule, gamma=2), prompt, params_of, COUNT)]
    return chi_square_of_texts(texts_of_rule, expected[prompt], most_cells=11)


rules = {
    "your functions": AcceptRule(my_accept, my_residual),
    "after a rejection: all of p": AcceptRule(my_accept, lambda p, q: p),
}
panels = []
for name, rule in rules.items():
    cells, test = tested(rule, short_prompt)
    panels.append((name, test))
labels = ["".join(tokenizer.token_text(token) for token in cell).strip().replace("\n", "⏎")[:9] for cell in cells]
ChiSquarePanels(f"{COUNT} completions of “def”, the first three tokens", [*labels, "others"], panels)

# %%
right, wrong = (test for _, test in panels)
_, wrong_elsewhere = tested(rules["after a rejection: all of p"], other_prompt)
print(f"after “def”: your functions: {p_text(right.p_value)}; all of p: {p_text(wrong.p_value)}")
seen = "seen" if wrong_elsewhere.p_value < 1e-6 else f"not seen in {COUNT} texts"
print(f"after “if”:  all of p: {p_text(wrong_elsewhere.p_value)} ({seen})")
claim("Through the engine, your functions pass.", right.p_value > 1e-6)
claim("After “def” the mistake is seen in 600 short texts.", wrong.p_value < 1e-6, of_model=True)

# %% [markdown]
# The mistake changes the probability of a token by min(p, q) − α·p. Where the draft model's q is close to p, this is
# close to 0, and it takes more texts to see the mistake: after another prompt, or with a better draft model, 600 may be
# too few. A passed test says only that no error is *large* enough to show in so many texts. The proof and the
# enumeration have no such limit.
#
# **The caches.** The engine keeps no list of rows, only how many are valid: two counters per request. After every round they
# must equal the lengths that your `rollback` returns.

# %%
from minillm.teaching.workshop.l10_engine import rounds_of

agree, two_tokens = [], 0
for prompt in prompts[:6]:
    for round_ in rounds_of(mine, prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)):
        text_and_drafts = [*round_.text, *round_.drafts]
        rows = my_rollback(text_and_drafts, text_and_drafts[:-1], len(round_.drafts), round_.num_accepted)
        agree.append(tuple(map(len, rows)) == (round_.target_rows, round_.draft_rows))
        two_tokens += len(round_.text) + round_.num_accepted + 1 - len(rows[1]) == 2
print(f"{len(agree)} rounds; after {two_tokens} of them the draft model has two tokens to read, else one")
claim("Your rollback and the engine's counters agree after every round.", all(agree) and len(agree) > 4)
claim(
    "Both cases occurred: the draft model had one token to read, and two.", 0 < two_tokens < len(agree), of_model=True
)

# %% [markdown]
# ## Measure
#
# ### Three numbers for acceptance
#
# | name | counted as | use |
# |---|---|---|
# | [conditional acceptance](glossary.md#conditional-acceptance) | accepted / judged (accepted ones and the first rejected one of each round) | an estimate of α |
# | accepted / drafted | accepted / all drafts, discarded ones included | easy to count; falls as γ grows |
# | acceptance length τ | tokens per round: what the target's forward over the drafts commits | what is gained for one expensive forward |
#
# (A round is a step with drafts. The few steps without, such as one for the last token of a text, count in the
# [tokens per forward](glossary.md#tokens-per-forward) of lesson 11.)

# %%
from minillm.teaching.workshop.l10_engine import conditional_acceptance


def drafted_rounds(llm: LLM, params: list[SamplingParams], texts: list[str] = prompts) -> list[TokensCommitted]:
    """All rounds with drafts while the prompts are completed."""
    with llm.trace() as events:
        llm.generate(texts, params, use_tqdm=False)
    return [event for event in events.of(TokensCommitted) if event.num_drafts]


def summary(rounds: list[TokensCommitted]) -> tuple[float, float, float]:
    """Conditional acceptance, accepted / drafted, tokens per round."""
    num_accepted, num_drafts = (sum(getattr(r, field) for r in rounds) for field in ("num_accepted", "num_drafts"))
    return conditional_acceptance(rounds), num_accepted / num_drafts, 1 + num_accepted / len(rounds)


standard, together = engine("standard"), engine("block")
print("                              conditional   accepted/drafted     tokens per round")
found = {}
for name, llm, params in (
    ("temperature 0", standard, greedy),
    ("temperature 1", standard, sampled),
    ("temperature 1, block", together, sampled),
):
    found[name] = summary(drafted_rounds(llm, params))
    conditional, share, tokens = found[name]
    print(f"{name:28} {'–' if llm is together else f'{conditional:.2f}':>13}{share:19.2f}{tokens:21.2f}")
del standard, together, llm  # each engine holds its own copy of the weights
claim(
    "With four drafts per round, accepted / drafted is below the conditional acceptance.",
    all(found[name][1] < found[name][0] for name in ("temperature 0", "temperature 1")),
    of_model=True,
)
claim(
    "Sampled text is harder to guess than greedy text.",
    found["temperature 1"][2] < found["temperature 0"][2],
    of_model=True,
)

# %% [markdown]
# (Block verification, the last row, judges all drafts of a round together, so no draft has a conditional acceptance.)
#
# ### Judge the block together
#
# Your rule stops at the first rejection. Sun et al. (2024) showed that one can do better without giving up exactness:
# **[block verification](glossary.md#block-verification)** judges all drafts together. A later draft that the target likes
# *more* than the draft model did can make up for an earlier one that it likes less. Count the drafts from 1: x₁ to x_γ. With
# w₀ = 1 and wᵢ = min(1, wᵢ₋₁ · p(xᵢ)/q(xᵢ)), it keeps the *longest* prefix x₁ to xᵢ that passes a test based on wᵢ. At the
# next position it recovers from max(0, wᵢ·p − q), normalised. The module `minillm/speculative/block_verification.py` has the
# formulas; in vLLM and here it is `rejection_sample_method="block"`. In the world of three words, the mean number of accepted
# drafts can be computed for both rules, over all drafts; in the engine, the texts are tested as yours were. The table above
# has 16 texts, too few to say how much block verification gains. So the next cell writes four texts per prompt with each.

# %%
from minillm.teaching.workshop.l10_checks import mean_accepted

one_by_one, in_a_block = mean_accepted(PROMPT, gamma=4)
print(f"accepted of four drafts, three words, exactly: {one_by_one:.3f} one by one, {in_a_block:.3f} as a block")
_, block_test = tested("block", short_prompt)
print(f"χ² test of block verification in the engine: {p_text(block_test.p_value)}")
prompts_again = prompts * 4
seeds = [SamplingParams(seed=seed, max_tokens=48, ignore_eos=True) for seed in range(len(prompts_again))]
tau_standard, tau_block = (
    summary(drafted_rounds(engine(rule), seeds, prompts_again))[2] for rule in ("standard", "block")
)
print(
    f"tokens per round, {len(seeds)} texts of the real pair: {tau_standard:.2f} one by one, {tau_block:.2f} as a block"
)
claim("Block verification passes.", block_test.p_value > 1e-6)
claim("It accepts more drafts than the standard rule, in theory …", in_a_block > one_by_one)
claim("… and with the real pair it commits more tokens per round.", tau_block > tau_standard, of_model=True)

# %% [markdown]
# **Where it loses.** At temperature 0, and with drafts that are not sampled (q one-hot), your rule already accepts as many
# as any exact rule can, so block verification gains nothing. It needs both rows of every draft, not two numbers per draft,
# which is more work with a large vocabulary. And with the same seed it writes other texts.
#
# ### More drafts per round
#
# There are two formulas for the tokens per round. With a chance α for each draft, independent of the others, a
# round commits 1 + α + α² + … + α^γ tokens on average. An article says "1 + gamma * acceptance_rate". Measure both.

# %% tags=["expected"] alt="Tokens per round against the number of drafts, from one to eight: the measured line begins on the straight line 1 + γ·α, rises more and more slowly and falls far below it."
GAMMAS = (1, 2, 4, 8)
by_gamma = [summary(drafted_rounds(engine(gamma=gamma), sampled)) for gamma in GAMMAS]
rates, shares, taus = map(list, zip(*by_gamma, strict=True))
first_rate = rates[0]
straight = [1 + gamma * first_rate for gamma in GAMMAS]
geometric = [sum(first_rate**i for i in range(gamma + 1)) for gamma in GAMMAS]
print("drafts per round      ", *(f"{gamma:6}" for gamma in GAMMAS))
print("conditional acceptance", *(f"{rate:6.2f}" for rate in rates))
print("accepted / drafted    ", *(f"{share:6.2f}" for share in shares))
print("tokens per round      ", *(f"{tau:6.2f}" for tau in taus))
claim("Accepted / drafted falls as drafts are added.", shares == sorted(shares, reverse=True), of_model=True)
claim("Eight drafts give less than twice the tokens of one draft.", taus[-1] < 2 * taus[0], of_model=True)
LineChart(
    f"Tokens per round of {NAME}, sampled at temperature 1",
    Axis("drafts per round", ticks=GAMMAS),
    Axis("tokens per round"),
    [
        Series("measured", GAMMAS, taus),
        Series("1 + α + … + α^γ, with α measured at γ = 1", GAMMAS, geometric, style="modelled"),
        Series("1 + γ·α, with the same α", GAMMAS, straight, style="modelled"),
    ],
    "The measured tokens per round flatten as drafts are added, as the sum does; the straight line does not.",
)

# %% [markdown]
# The straight line is what "1 + γ · acceptance rate" says if the rate is α. (If it is accepted / drafted, the formula is
# true of every run, because it only repeats the definition; but then the rate itself falls as γ grows.) The sum stays below
# 1/(1 − α), however many drafts are made. And tokens per round are not speed: drafts take time, and a forward over nine
# tokens takes longer than a forward over one.
#
# ## Break it
#
# Fifteen loops with one mistake each, and five checks:
#
# * **enumeration**: the exact distribution of one round, as above;
# * **χ²**: 600 sampled texts of twelve tokens, roles counted;
# * **temperature 0**: the same tokens as the target alone, 27 prompts;
# * **own draft**: the target drafts for itself. In every round all drafts must be accepted, and a bonus token must
#   follow. (Also: a draft model that equals the target up to rounding must break nothing.)
# * **ends**: at most `max_tokens` tokens, and none after the end token.
#
# (The row `OpenFilter` is no mistake: its drafter filters, and reports the filtered distribution.) **Guess first:** which
# mistakes does the enumeration *not* see? Which two checks would you keep if you could keep only two?

# %%
for kind in BROKEN:
    print(f"{kind.__name__:14} {kind.__doc__}")

# %%
from itertools import combinations

print(f"{'':14} {' '.join(f'{name:>13}' for name in COLUMNS)}   tokens per round")
findings = {}
for kind in (Loop, OpenFilter, *BROKEN):
    one = findings[kind.__name__] = examine(kind, my_verify, my_rollback)
    marks = " ".join(f"{'CAUGHT' if name in one.caught_by else '·':>13}" for name in COLUMNS)
    print(f"{kind.__name__:14} {marks} {one.tokens_per_round:18.2f}")


def only(check_name: str) -> set[str]:
    """The mistakes that this check alone has caught."""
    return {name for name, one in findings.items() if one.caught_by == (check_name,)}


def missed_by(pair: tuple[str, str]) -> list[str]:
    """The mistakes that neither of two checks has caught."""
    return [kind.__name__ for kind in BROKEN if not {*pair} & {*findings[kind.__name__].caught_by}]


best_two = min(combinations(COLUMNS, 2), key=lambda pair: len(missed_by(pair)))
missed = missed_by(best_two)
print(f"\nthe best two checks: {' and '.join(best_two)} catch {len(BROKEN) - len(missed)} of {len(BROKEN)} mistakes")
print("they miss", ", ".join(missed), "\n")
claim(
    "No other two checks catch as many.",
    all(len(missed_by(pair)) > len(missed) for pair in combinations(COLUMNS, 2) if pair != best_two),
)
claim(
    "The right loop passes all checks, and every mistake is caught by at least one.",
    [name for name, one in findings.items() if not one.caught_by] == ["Loop"],
)
claim("Only the enumeration catches OneUniform.", only("enumeration") == {"OneUniform"})
claim(
    "Only χ² catches drafts that are reported with a distribution they were not drawn from.",
    only("χ²") == {"ArgmaxDraft", "HiddenFilter"},
)
claim(
    "Only the own draft catches what costs tokens and changes no text, and the 0/0 of ZeroByZero.",
    only("own draft") == {"OpenFilter", "ZeroByZero", "DraftOneShort", "NoBonus", "TargetAlone"},
)
claim(
    "Only temperature 0 catches SoftmaxAtZero, and only the ends catch NeverCuts.",
    (only("temperature 0"), only("ends")) == ({"SoftmaxAtZero"}, {"NeverCuts"}),
)

# %% [markdown]
# Why did χ² miss `OneUniform`? The next cell computes, for three prompts of one word each, how often the next word has the
# role `b`. It should be a quarter after each. (A round of one draft is enough for the next word. `OneUniform` compares the
# same uniform with chances, which are multiples of 1/4, and with the thresholds of the residual, which are multiples of
# 1/3. So the uniform takes twelve values here, not four.)

# %%
from minillm.teaching.workshop.l10_words import TWELVE_MIDDLES, role


def share_of_b(kind: type[Loop], prompt: list[int]) -> Fraction:
    """The exact probability that the next word has the role b, also if the uniform that judges a draft draws it."""
    joint = enumerate_round(kind(my_verify, my_rollback).judge, prompt, gamma=1, accept_middles=TWELVE_MIDDLES)
    return sum(p for tokens, p in joint.items() if role(prompt, tokens[0]) == 1)


shares_of_b = {kind: [share_of_b(kind, [word]) for word in range(3)] for kind in (Loop, FullTarget, OneUniform)}
print(f"{'':14}", *(f"after {word:8}" for word in WORDS), "      mean   χ² test")
for kind, by_prompt in shares_of_b.items():
    p_of_kind = p_text(findings[kind.__name__].chi_square.p_value)
    mean = float(sum(by_prompt) / 3)
    print(f"{kind.__name__:14}", *(f"{float(share):14.3f}" for share in by_prompt), f"{mean:10.3f}   {p_of_kind}")
claim("FullTarget gives b too little everywhere.", max(shares_of_b[FullTarget]) < Fraction(1, 4))
claim(
    "OneUniform gives it too little after one word and too much after another, and on average exactly a quarter.",
    min(shares_of_b[OneUniform]) < sum(shares_of_b[OneUniform]) / 3 == Fraction(1, 4) < max(shares_of_b[OneUniform]),
)

# %% [markdown]
# A token is drawn by adding up the row in the order of the token ids. A uniform that has just rejected a draft is large, so
# the *last* token of the order is drawn too often. Which role that is depends on the text. On average over these three
# prompts the errors cancel exactly: the share of `b` is a quarter, as it should be. The χ² test adds up the counts of all
# texts. In them the order of the row changes from word to word, so most of the error cancels there, too. A statistical
# test sees only what it counts; the enumeration compares everything.
#
# Your second guess: the two lines below the table name the best two checks and what they miss. They leave the rule itself
# to statistics, so `OneUniform` is among the missed ones.
#
# Now read the table by columns.
#
# * **Enumeration** sees the five mistakes that give a *round* another distribution, and nothing around the round. The rule
#   of `MinusZero` is perfect; it judges by rows of a wrong text.
# * **χ²** sees a change anywhere in the loop, if it changes what is counted and the sample is large enough. Look at
#   `ArgmaxDraft`: your rule is exact *if x was drawn from q*. A drafter that reports another q breaks it, and no test of
#   the rule can notice. `OpenFilter` filters its drafts too, but says so: its texts are the target's, and only the tokens
#   per round fall. (So a drafter may use any temperature and any filter. But it must not drop a draft *because of the token
#   it drew*: that changes q, too.)
# * **Temperature 0** is a cheap check. It misses every mistake that is only about random numbers. `SoftmaxAtZero` is
#   the one that only it sees: judged by softmax rows, a token that is not the target's argmax may pass.
# * **Own draft** sees what costs accepted drafts or the bonus token. `DraftOneShort` leaves the text exactly the
#   target's: a draft model with a hole in its cache is just a worse draft model, so no test of the output can find it.
#   `OpenFilter` is caught as well, and it is no mistake: this check says "tokens are lost", not "the text is wrong".
# * **Ends**: a run of accepted drafts may contain the end of the text. (In the engine, a stop string may end there, too.)
#
# `ZeroByZero` shows why checks need corner cases. It fails only if a draft is rejected where p equals q up to rounding.
# The check forces that: a ratio of 1 − 2⁻²² and a uniform of 1 − 2⁻²⁴, the largest that the engine draws. By chance it
# would take about 2²² such tokens, four million.
#
# ## In the literature: a loop from an article
#
# An article gives a full loop. Here it is, rewritten for the world of three words, with its logic unchanged. The forwards of
# both models append to the cache that they are given. **Before you go on, find the mistakes.**

# %%
import random


def article_loop(prompt: list[int], max_tokens: int, seed: int, gamma: int = 2) -> tuple[list[int], list[int]]:
    """New tokens, and how many each round committed. As in the article, mistakes included."""
    uniform = random.Random(seed).random
    text, target_cache, draft_cache, rounds = list(prompt), [], [], []
    while len(text) - len(prompt) < max_tokens:
        drafts, unread = [], text
        for _ in range(gamma):
            row = DRAFT.forward(draft_cache, unread)[-1]
            drafts.append(pick(row.tolist(), uniform()))
            unread = drafts[-1:]
        p = TARGET.forward(target_cache, text + drafts)[-gamma - 1 : -1]
        kept = 0
        for x, row in zip(drafts, p, strict=True):
            if uniform() < min(1.0, float(row[x])):
                kept += 1
                continue
            row = row.clone()
            row[x] = 0
            drafts[kept] = pick((row / row.sum()).tolist(), uniform())
            break
        rounds.append(kept + (kept < gamma))
        text += drafts[: rounds[-1]]
    return text[len(prompt) :], rounds


# %% [markdown]
# <details><summary>What did you find?</summary>
#
# 1. In every round the *whole* text goes into caches that already hold it (`text + drafts`, and `unread = text`). From the
#    second round on, both models read the text again, at wrong positions.
# 2. Nothing is ever rolled back: the rows of rejected drafts stay.
# 3. A draft is accepted with min(1, p(x)). The `min` does nothing, and q is never used.
# 4. No bonus token: the row after the last draft is computed and discarded.
# 5. The text may become longer than `max_tokens`, and there is no end of text.
#
# </details>
#
# Correct it in four steps, and test each.


# %%
class RightCaches(NoBonus, TargetAlone, NeverCuts):
    """1. The caches are right."""


class RightBonus(TargetAlone, NeverCuts):
    """2. … and there is a bonus token."""


class RightRule(NeverCuts):
    """3. … and drafts are judged by p(x)/q(x) and the residual."""


class RightEnds(Loop):
    """4. … and the text ends where it should."""


by_article = [article_loop(PROMPT, NUM_TOKENS, seed) for seed in range(600)]
steps = {
    "0. As in the article.": ([tokens for tokens, _ in by_article], [r for _, rounds in by_article for r in rounds])
}
for kind in (RightCaches, RightBonus, RightRule, RightEnds):
    some = many_texts(kind(my_verify, my_rollback))
    steps[kind.__doc__] = [one.tokens for one in some], [r for one in some for r in one.rounds]
print(f"{'':64} {'χ² test':>12}   tokens per round   longest text")
results = {}
for name, (tokens, rounds) in steps.items():
    test = chi_square([one[:NUM_TOKENS] for one in tokens])
    results[name[0]] = test.p_value, sum(rounds) / len(rounds), max(map(len, tokens))
    print(f"{name:64} {p_text(test.p_value):>12} {results[name[0]][1]:18.2f} {results[name[0]][2]:14}")
claim("The article's loop does not write the target's text.", results["0"][0] < 1e-6)
claim("With right caches it does, although its rule ignores q …", results["1"][0] > 1e-6)
claim(
    "… but that rule wastes drafts: the right one commits at least 1.5 times as many tokens per round.",
    results["3"][1] > 1.5 * results["2"][1],
)
claim(
    "Until the last step, texts are longer than the twelve tokens asked for.",
    all(results[str(i)][2] > 12 for i in range(4)) and results["4"][2] == 12,
)

# %% [markdown]
# The surprise is step 1. Accepting with p(x) and then drawing from p *without x* is **exact**: given any draft x, the result
# is x with probability p(x), and any other y with probability (1 − p(x)) · p(y)/(1 − p(x)) = p(y). That is the target,
# whatever x was. It is the right rule for drafts that were not sampled at all (q one-hot: n-grams, argmax drafts). For
# sampled drafts it is lossless but slow: it accepts Σ p·q, in your second prediction 33 of 100, where Σ min(p, q) would be
# 75. And mixed with the other residual it is wrong (`MixedRule`).
#
# ### Drafts that travel as text
#
# Another article lets the draft model `generate`, *decodes* its output, appends it to the prompt, and tokenizes the whole for
# the target. (Its `generate` also returns the prompt, which the target therefore reads twice.) What happens to the tokens on
# their way through text? Here are all rounds of the real pair:

# %%
from minillm.teaching.workshop.l10_engine import through_text

with mine.trace() as trace:
    mine.generate(prompts, sampled, use_tqdm=False)
trip = through_text(trace, tokenizer, prompts)
print(f"{trip.num_rounds} rounds without special tokens")
print(f"in {trip.changed} of them the drafts come back as other tokens, in {trip.text_changed} the text before them")
if trip.example:
    print("for example", trip.example[0], "comes back as", trip.example[1])
claim("Some drafts do not survive the way through text.", trip.changed > 0, of_model=True)

# %% [markdown]
# A sampled text is not always the tokenizer's own choice of tokens: the model may cut a word at another place than the
# tokenizer. Then the target judges tokens that were never drafted, or judges drafts after tokens that were never committed.
# (minillm's `decode` leaves out special tokens, so those are lost altogether.) Drafts must travel as token ids. So the draft
# model needs the target's tokenizer, and minillm's engine checks that. (vLLM's `use_heterogeneous_vocab` allows another one: it
# drafts only tokens that both vocabularies have, and translates their ids.)
#
# ## In the field
#
# | system | where | rule |
# |---|---|---|
# | vLLM | `v1/sample/rejection_sampler.py`; option `rejection_sample_method` | `standard` (yours), `block`, and `synthetic`, which accepts at a given rate whatever the tokens are: for measurements only. A model's drafts are argmaxes, accepted with p(x), unless `draft_sample_method` is `"probabilistic"` |
# | transformers | `_speculative_sampling` in `generation/utils.py` | p/q and the residual |
# | SGLang | `tree_speculative_sampling_target_only` | by default accepts with p(x), without q; `speculative_accept_threshold_single` and `speculative_accept_threshold_acc` are 1 by default, and lower values raise that chance, which makes it lossy; `speculative_use_rejection_sampling` is an option, set by default for EAGLE's chains on AMD GPUs (pull request 37134) |
# | llama.cpp | `common_sampler_sample_and_accept_n` | samples from the target at each position and goes on while the sample equals the draft: accepts with p(x) |
# | Medusa | typical acceptance | accepts what is likely enough for the target: lossy |
#
# So three large engines accept with p(x) alone by default. For sampled drafts that would be slow. Their drafts are usually
# not sampled: they are the most likely tokens of a draft model, or a tree of them. Then q is one-hot, and p(x) *is*
# min(1, p(x)/q(x)).
#
# **Claims, checked.**

# %%
quoted(
    '"Effective speedup: 1 + gamma * acceptance_rate forward passes saved", at 60 to 70% and gamma = 5',
    "an article on KV caches and speculative decoding",
)
print(
    f"at α = 0.65 and γ = 5: the straight line says {1 + 5 * 0.65:.2f}, the sum says {sum(0.65**i for i in range(6)):.2f} tokens per round\n"
)
quoted('"2–3x token throughput with zero quality loss"', "the same article")
print(f"same distribution: {p_text(right.p_value)}; same sampled texts: {same['temperature 1']} of {len(prompts)}\n")
quoted('"linear speedups without sacrificing the quality"', "an article on inference below 100 ms")
print(f"tokens per round for 1, 2, 4, 8 drafts: {', '.join(f'{tau:.2f}' for tau in taus)}")

# %% [markdown]
# | claim | what holds | tested where |
# |---|---|---|
# | speed-up = 1 + γ · acceptance rate | with accepted / drafted it is the tokens per round, by definition; with α it is far too high. Neither is a speed-up. Nor is it the forwards saved: each round still runs one of the target, so those are one fewer | more drafts per round |
# | zero quality loss | the distribution is the target's; sampled texts differ; the greedy texts were the same here (float32, an engine that rounds one row and five alike) | χ² through the engine, temperature 0 |
# | accept with min(1, p(x)) | exact with "p without x", wrong with the residual, and slow for sampled drafts | four steps |
# | linear speed-up | with the same α at every position, the tokens per round never exceed 1/(1 − α) | more drafts per round |
# | drafts may be exchanged as text | some come back as other tokens | drafts that travel as text |
#
# **Papers.** Leviathan et al. 2023, *Fast Inference from Transformers via Speculative Decoding*. Chen et al. 2023,
# *Accelerating Large Language Model Decoding with Speculative Sampling*. Sun et al. 2024, *Block Verification Accelerates
# Speculative Decoding*. Miao et al. 2024, *SpecInfer* (several guesses for one position). Cai et al. 2024, *Medusa* (typical
# acceptance, lossy).
#
# ## Recap
#
# 1. Accept a draft with min(1, p(x)/q(x)), else draw from the residual max(0, p − q): each token is distributed as p, and
#    Σ min(p, q) of the drafts are accepted. No exact rule accepts more of a single draft.
# 2. A round commits the accepted drafts and one token of the target, recovered or bonus: 1 to γ + 1 tokens.
# 3. The proof needs drafts that were drawn from the q that is reported, and rows of the right text: roll both caches back,
#    and remember the draft that the draft model never read.
# 4. The rule is the easy part. Enumeration tests the rule, χ² the whole, temperature 0 the argmax. Drafting with the
#    target itself finds lost drafts and rows missing from the draft model's cache, but no missing rollback, because nothing is
#    rejected. Each finds mistakes that the others miss.
# 5. Exact is not fast. Accepting with p(x) and recovering from p without x, no bonus, a hole in the draft model's cache: all
#    exact, and all commit fewer tokens per round.
#
# **Next:** lesson 11 asks how many tokens a round should draft, and when drafts make text faster at all.
