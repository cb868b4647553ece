# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 1. Decoding from scratch
#
# **Question.** *How does a list of numbers become the next word, and why does the naive loop cost so much?*
#
# A language model does not read words. Its input is a list of integers, and its output is one score for every integer
# that could come next. The rest (choosing one, the loop, the text on your screen) is a few dozen lines around it.
#
# In this lesson you write those lines: attention, rotary positions, sampling and the loop. They run inside a real model
# of 12 million parameters and write code. Then you count what the loop costs, see that nearly all of this work is
# repeated, and break the model in nine ways. Some of them *improve* its loss.
#
# You need Python and a little PyTorch. Everything runs on a laptop's CPU.

# %%
import os

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.held_out import held_out_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.tokenizer import Tokenizer

name = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
model = load_model(name, torch.float32, "cpu")
tokenizer = Tokenizer.from_folder(resolve(name))
config = model.config
texts = [row.prompt for row in held_out_prompts()]  # Python that the model was not trained on
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
print(
    f"{name}: {model.num_parameters / 1e6:.1f}M parameters, {config.num_layers} layers, {config.num_heads} query heads, "
    f"{config.num_kv_heads} KV heads of width {config.head_dim}, {config.vocab_size} tokens"
)

# %% [markdown]
# ## Text is a list of numbers
#
# Each number stands for a **[token](glossary.md#token)**: a piece of text that occurred often when the vocabulary was
# made. Here a token has three to four characters of Python on average; a frequent word with the space before it is one
# token, and so are the spaces of an indent, except the last, which belongs to what follows.

# %%
prompt = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
prompt_ids = tokenizer.encode(prompt)
print("ids:   ", prompt_ids)
print("tokens:", [tokenizer.token_text(i) for i in prompt_ids])
print(f"{len(prompt)} characters, {len(prompt_ids)} tokens")
per_token = sum(map(len, texts)) / sum(len(tokenizer.encode(text)) for text in texts)
print(f"{len(texts)} held-out texts: {per_token:.1f} characters per token")
claim("On average a token has three to four characters of Python.", 3 <= per_token <= 4, of_model=True)

# %% [markdown]
# How is a text split? First into words (each with the one character before it, such as a space, `_` or `(`), numbers of
# up to three digits, punctuation and runs of spaces or line ends; then each of these into tokens. The vocabulary was
# made by **byte-pair encoding** (BPE, Sennrich et al. 2016): begin with single bytes, find the pair of neighbours that
# occurs most often, make it a token, and repeat until there are enough. The result is a list of merges in the order in
# which they were learned. To split a new word, apply them: *the pair that was learned first is merged first*. (In the
# vocabulary file every byte is written as a printable character; a space is `Ġ`.)
#
# Two facts to remember for later:
#
# * **Every byte is a token**, so no text is unknown. A character that was rare in training takes several tokens, and
#   each of them alone is not a character.
# * **The same text can be split into tokens in many ways.** `encode` always returns the same one. A model can generate
#   any of them.

# %%
from minillm.teaching.byte_pairs import BytePairs, num_same_splits  # a page of code; open it if you like

bundled = Tokenizer.from_folder(resolve("minicoder"))
for parts in BytePairs.from_tokenizer(bundled).steps("Ġreturning"):
    print("  ".join(parts))
claim(
    "Merging in this order splits every held-out text exactly as the tokenizer does.",
    num_same_splits(bundled, texts) == len(texts),
)
print()
for text in ("ö", "😀"):
    ids = tokenizer.encode(text)
    parts = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    print(f"{text}: {len(ids)} tokens; the text after each of them: {parts}")

# %% [markdown]
# ## From scores to the next token
#
# One run of the model over $n$ tokens is a **[forward](glossary.md#forward)**. It gives $n$ rows of scores: row $i$
# scores every candidate for the token after token $i$. To continue a text only the last row is needed. The scores are
# called **[logits](glossary.md#logits)**. They can be any numbers, and only their differences matter. **Softmax** turns
# them into probabilities: $p_i = e^{z_i} / \sum_j e^{z_j}$.
#
# `CausalAttention` below is the built-in attention, which you will replace by your own.

# %%
from minillm.models.causal import CausalAttention


def next_logits(text: str) -> Tensor:
    """Logits `[vocab]` for the token after `text`."""
    ids = torch.tensor(tokenizer.encode(text))
    hidden = model(ids, torch.arange(len(ids)), CausalAttention(len(ids)))
    return model.logits(hidden[-1:])[0]


def entropy(probs: Tensor) -> float:
    """Entropy in bits: 0 when one token is certain, log2(n) when n tokens are equally probable."""
    return float(-(probs * probs.clamp_min(1e-30).log2()).sum())


entropies = {}
for text in (prompt, "import os\nimport", "for i in"):
    probs = next_logits(text).softmax(-1)
    entropies[text] = entropy(probs)
    print(f"after {text.splitlines()[-1]!r}: entropy {entropy(probs):.1f} bits")
    for p, i in zip(*probs.topk(5), strict=True):
        print(f"   {p:6.1%}  {'█' * round(40 * float(p)):40}  {tokenizer.token_text(int(i))!r}")
more_certain = entropies[prompt] < entropies["for i in"]
claim("The model is more certain after the docstring than after 'for i in'.", more_certain, of_model=True)

# %% [markdown]
# **Entropy** measures the model's uncertainty in bits: $b$ bits are the uncertainty among $2^b$ equally probable
# tokens. After a docstring it is nearly certain of an indent (of four spaces: this vocabulary has a token for three,
# and the word after it begins with the fourth). After `for i in` many names are possible. A token between bars, such
# as `<|fim_middle|>`, is a special one: it stands for no text, and this model learned with it to fill a gap in the
# middle of a file.
#
# **[Temperature](glossary.md#temperature)** $T$ divides the logits before the softmax. Below 1 it enlarges the
# differences, and the closer it is to 0, the more of the probability the most probable token gets; above 1 it shrinks
# them, and the probabilities approach equal shares. The order of the tokens never changes.

# %% tags=["expected"] alt="Probability of the five most probable tokens after import os, newline, import, against the temperature: near 0 the first has nearly everything; it falls steadily; at temperature 2 the five together have little."
from minillm.viz.charts import Axis, LineChart, Series

logits = next_logits("import os\nimport")
temperatures = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0)
at = [(logits / t).softmax(-1) for t in temperatures]
best = logits.topk(5).indices
print("temperature  " + "".join(f"{t:7.1f}" for t in temperatures))
print("entropy, bits" + "".join(f"{entropy(p):7.1f}" for p in at))
claim("Every rise of the temperature raises the entropy.", sorted(map(entropy, at)) == [entropy(p) for p in at])
LineChart(
    "The five most probable tokens after 'import os⏎import'",
    Axis("temperature", ticks=(0.1, 0.5, 1.0, 1.4, 2.0)),
    Axis("probability"),
    [Series(repr(tokenizer.token_text(int(i))), temperatures, [float(p[i]) for p in at]) for i in best],
    "The most probable token has nearly everything at temperature 0.1 and loses it as the temperature rises.",
)

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on. Only you see it, and a wrong guess makes the answer easier to remember.
#
# 1. The loop runs the whole text through the model for every new token, one **row** (the vector of one token) for each
#    token of the text. To write **100 tokens** after a prompt of a single token, how many rows go through the model in
#    all?
# 2. Attention compares pairs of tokens, so its work grows with the square of the length. Take one forward over a whole
#    text, and count only the pairs in which a token sees itself or one before it. With the shape of Llama-3-8B, **from
#    how many tokens on** does attention need at least as much arithmetic as all products with the layers' weight
#    matrices together? (It may be beyond that model's context of 8,192; Llama-3.1-8B has the same shape and 131,072.)
# 3. A text of 256 tokens is 16 times as long as one of 16. **How many times as long** does its forward take here?
# 4. A program keeps its text as a string and encodes it again for every token. In how many of **48** completions of up
#    to 16 tokens, sampled at temperature 1, does the model at least once receive other tokens than it generated?

# %%
predict("l01.rows", None, unit="rows")
predict("l01.crossing", None, unit="tokens")
predict("l01.slower", None, unit="times")
predict("l01.drift", None, unit="completions")

# %% [markdown]
# ## Build
#
# ### Exercise 1: attention
#
# In each layer every token produces three vectors: a **query** (what am I looking for?), a **key** (what do I contain?)
# and a **value** (what do I pass on?). The output for a token is an average of values, weighted by how well its query
# matches their keys:
#
# $$\text{out}_i = \sum_{j \le i} w_{ij}\, v_j, \qquad w_{i\cdot} = \text{softmax}_j\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right)$$
#
# * $j \le i$ is the **[causal mask](glossary.md#causal-mask)**: a token sees itself and the tokens before it. The model
#   is trained to predict the next token, so it must not see it.
# * $\sqrt d$, where $d$ is the width of a head, scales the scores: a sum of $d$ products of independent numbers with
#   mean 0 and variance 1 is typically of the size $\sqrt d$. Without the division, the wider the heads are, the sharper
#   the softmax would be.
# * There are several **[heads](glossary.md#head)**, computed side by side. Here 6 query heads share 2 KV heads, in
#   groups of *neighbours*: query heads 0, 1, 2 read KV head 0, and 3, 4, 5 read KV head 1. This is grouped-query
#   attention (**[GQA](glossary.md#gqa)**).


# %%
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention: for each token, the weighted mean of its own value and those of the tokens before it.

    q:       [num_tokens, num_heads, head_dim]; not changed
    k, v:    [num_tokens, num_kv_heads, head_dim]; query head h reads KV head h // (num_heads // num_kv_heads); not
             changed
    returns: [num_tokens, num_heads, head_dim]

    Example, one head of width 1: q = [1, 1], k = [0, 0], v = [10, 20] gives [10, 15]: equal scores, so the first token
    gets its own value and the second the mean of both.
    """
    ### BEGIN SOLUTION
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
    ### END SOLUTION


# %%
check("l01.causal_attention")

# %% [markdown]
# Stuck? `hint("l01.causal_attention", 1)`, then 2, 3 and 4: where to look, which operation, the shape of the code, the
# solution. You may also skip an exercise: `use(...)` takes your function if it passes its check, and otherwise the
# reference, and says so.
#
# In this whole course a function may change its arguments only if its docstring says so; otherwise `check` refuses it.
#
# In every layer the model calls the `attend` method of an object that is passed to it, and it accepts any object with
# such a method. So your function can run inside the model right away. Compare the logits that the model then gives with
# those that it gives with the built-in attention, at every position of the prompt:

# %%
from minillm.teaching.decoding import FunctionAttention

attend = use("l01.causal_attention")
ids, positions = torch.tensor(prompt_ids), torch.arange(len(prompt_ids))
mine = model.logits(model(ids, positions, FunctionAttention(attend)))
theirs = model.logits(model(ids, positions, CausalAttention(len(ids))))
claim("All logits are within 0.001 of the built-in attention's.", bool((mine - theirs).abs().max() < 1e-3))
print(f"same most probable next token at {int((mine.argmax(-1) == theirs.argmax(-1)).sum())} of {len(ids)} positions")

# %% [markdown]
# ### Exercise 2: the position of a token
#
# Attention is a sum over a set: it does not depend on the order of the keys. **[RoPE](glossary.md#rope)** (rotary
# position embedding, Su et al. 2021) adds the order by *rotating* queries and keys before their products are taken. The
# channels of a head form pairs. Each pair is a point in the plane and is rotated by
#
# $$\text{angle} = \text{position} \times \text{frequency of the pair}$$
#
# Rotating $(a, b)$ by $\varphi$ gives $(a\cos\varphi - b\sin\varphi,\; b\cos\varphi + a\sin\varphi)$. The first pair
# rotates by one radian per position, each further pair more slowly, like the hands of a clock; the cell after the
# exercise prints the frequencies.
#
# *Which channels are a pair?* There are two incompatible conventions. Here, as in all Llama checkpoints in Hugging Face
# format, pair $i$ is channel $i$ and channel $i + d/2$: the first half holds all $a$'s, the second all $b$'s.


# %%
def apply_rope(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Rotate every pair of channels by its angle.

    x:         [num_tokens, num_heads, head_dim], queries or keys; not changed
    positions: [num_tokens], the position of each token in the text
    freqs:     [head_dim / 2], radians per position of pair i, which is (channel i, channel i + head_dim / 2)
    returns:   a new tensor like x

    Example: x = [[[1, 0]]], positions = [1], freqs = [π/2] is a quarter turn and gives [[[0, 1]]].
    """
    ### BEGIN SOLUTION
    angles = positions[:, None] * freqs  # [num_tokens, head_dim / 2]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]  # the same for every head
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    ### END SOLUTION


# %%
check("l01.apply_rope")

# %% [markdown]
# Why rotate? Rotate the query at position $m$ and the key at position $n$. Their product depends on the difference of
# the two angles, which is $(m - n) \times$ frequency. So the score depends on the **distance** of the two tokens, not
# on their positions.

# %%
from minillm.models.rope import inverse_frequencies

rope = use("l01.apply_rope")
freqs, _ = inverse_frequencies(config.rope, config.head_dim)
print("radians per position, first and last pairs:", [f"{f:.2g}" for f in (*freqs[:3].tolist(), *freqs[-2:].tolist())])

generator = torch.Generator().manual_seed(0)
query, key = torch.randn(2, 1, 1, config.head_dim, generator=generator)


def score(query_at: int, key_at: int) -> float:
    """q·k after both were rotated by their positions."""
    return float((rope(query, torch.tensor([query_at]), freqs) * rope(key, torch.tensor([key_at]), freqs)).sum())


query_positions = (5, 105, 905)
scores = {distance: [score(at, at - distance) for at in query_positions] for distance in (0, 1, 2, 5)}
print("\ndistance   " + "".join(f"query at {at:<6}" for at in query_positions))
for distance, each in scores.items():
    print(f"{distance:8}   " + "".join(f"{one:<15.2f}" for one in each))
claim("Each line is constant.", all(max(each) - min(each) < 0.01 for each in scores.values()))

# %% [markdown]
# Moved by 100 or by 900 positions, the same query and key have the same score. This is why a text means the same at any
# position, and why cached keys can be *moved* to another position by rotating them once more. (The result is exact if
# the same text precedes them there; lesson 14 measures what happens otherwise.)
#
# ### See: the whole model on one page
#
# Here is the whole decoder from token ids to logits. It uses the checkpoint's own matrices, your attention and your
# rotation. Every layer adds two results to each token's row `x`: the output of attention, and the output of a small
# network (the **MLP**).


# %%
def linear(x: Tensor, module: torch.nn.Module) -> Tensor:
    """x·Wᵀ + b: `[rows, in]` → `[rows, out]`."""
    return F.linear(x, module.weight, module.bias)


def rms_norm(x: Tensor, module: torch.nn.Module) -> Tensor:
    """Scale every row to a root mean square of 1, then multiply each channel by its weight."""
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * module.weight


def forward(ids: list[int], *, attend=attend, rope_q=rope, rope_k=rope, rope_v=None, first_position=0) -> Tensor:
    """Logits `[len(ids), vocab]`; row i scores the token after ids[i]. *Break it* replaces the keyword arguments."""
    positions = first_position + torch.arange(len(ids))
    x = model.embed_tokens.weight[torch.tensor(ids)]  # one row per token
    for layer in model.layers:
        heads = linear(rms_norm(x, layer.input_norm), layer.qkv_proj).view(len(ids), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None:  # Qwen3
            q, k = rms_norm(q, layer.q_norm), rms_norm(k, layer.k_norm)
        q, k = rope_q(q, positions, freqs), rope_k(k, positions, freqs)
        v = v if rope_v is None else rope_v(v, positions, freqs)
        x = x + linear(attend(q, k, v).flatten(1), layer.o_proj)
        gate, up = linear(rms_norm(x, layer.post_attention_norm), layer.mlp.gate_up_proj).chunk(2, dim=-1)
        x = x + linear(F.silu(gate) * up, layer.mlp.down_proj)
    return linear(rms_norm(x, model.norm), model.lm_head)


long_ids = tokenizer.encode(texts[0])
reference = model.logits(model(torch.tensor(long_ids), torch.arange(len(long_ids)), CausalAttention(len(long_ids))))
difference = (forward(long_ids) - reference).abs().max()
print(f"{len(long_ids)} tokens, {reference.numel():,} logits")
claim("All of them are within 0.001 of those of minillm's own decoder.", bool(difference < 1e-3))

# %% [markdown]
# That is a complete Llama. minillm's own decoder computes the same with fewer and larger operations. The project's
# tests compare that decoder with the `transformers` implementation, model family by model family. (Importing
# `transformers` takes seconds and hundreds of megabytes, so this lesson does without.)
#
# ### Exercise 3: choose a token
#
# **[Greedy decoding](glossary.md#greedy-decoding)** takes the largest logit. **Sampling** draws a token at random, by
# probability. Three settings change the probabilities, in this order:
#
# 1. **temperature**: divide the logits; 0 means greedy.
# 2. **[top-k](glossary.md#top-k-top-p)**: keep the `k` most probable tokens, and those that are as probable as the
#    `k`-th.
# 3. **top-p** (nucleus sampling, Holtzman et al. 2020): of these, keep the most probable tokens until their sum
#    *reaches* `p`. The token that makes the sum reach `p` is kept.
#
# Then draw. The function takes its random number, `uniform`, as an argument, so that it can be tested. Place the kept
# tokens side by side on the line from 0 to 1, in the order of their ids, each with a length proportional to its
# probability. Return the token on whose part of the line `uniform` falls. A number exactly on the border of two parts
# belongs to the part on the right.


# %%
def sample_next(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """Return the token that `uniform`, a random number from [0, 1), selects.

    logits:      [vocab]; not changed
    uniform:     a number on the border of two tokens' parts of the line selects the right-hand one
    temperature: 0 takes the largest logit
    top_k:       0, or the size of the vocabulary or more, keeps all tokens; tokens as probable as the k-th are kept
                 too; the kept ones are divided by their sum
    top_p:       1 keeps all tokens; of equally probable tokens the lower id comes first

    Example: logits = log([0.1, 0.6, 0.3]). uniform 0.05 gives token 0, 0.5 gives 1, 0.95 gives 2.
    With top_k = 2 tokens 1 and 2 are left with 2/3 and 1/3, so 0.05 and 0.5 give 1, and 0.95 gives 2.
    """
    ### BEGIN SOLUTION
    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_k < len(probs):
        probs[probs < probs.topk(top_k).values[-1]] = 0
        probs = probs / probs.sum()
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(0) - ranked
        probs[order[before >= top_p]] = 0
    cumulative = probs.double().cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    ### END SOLUTION


# %%
check("l01.sample_next")

# %% [markdown]
# The engine computes all its probabilities with one function, `minillm.sampling.probs_from_logits`. With the same
# random numbers and real logits, your function must draw the same tokens as the engine:

# %%
from minillm.sampling import Draw, SamplingParams, SamplingRow, probs_from_logits, sample, uniform

choose = use("l01.sample_next")
settings = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.5},
]
same = tried = 0
for text in texts[:5]:
    logits = next_logits(text)
    for options in settings:
        probs = probs_from_logits(logits[None], [SamplingRow(SamplingParams(**options))])
        for i in range(20):
            u = uniform(seed=0, index=i, purpose=Draw.SAMPLE)
            same += choose(logits, u, **options) == int(sample(probs, torch.tensor([u])))
            tried += 1
print(f"the engine's token in {same} of {tried} draws")
claim("Your function draws the same tokens as the engine.", same == tried)

# %% [markdown]
# ### Exercise 4: the loop
#
# Now write text. `forward(ids)` gives logits for a list of ids. Pass it the whole text (there is no
# [KV cache](glossary.md#kv-cache) yet), take the largest logit of the *last* row, append that token, repeat. One token
# of the vocabulary means "here the text ends" (**end of text**, EOS). When it is chosen, stop.


# %%
def generate_naive(forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
    """Greedy decoding without a cache.

    forward:    forward(ids) gives logits [len(ids), vocab]; row i scores the token after ids[i]
    prompt_ids: not changed; an eos_id inside the prompt does not stop the loop
    returns:    max_tokens new tokens; or fewer if eos_id is chosen, which is then the last of them

    Example: with a model that counts up, prompt [3, 4], max_tokens = 3 and eos_id = 6 give [5, 6].
    """
    ### BEGIN SOLUTION
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(forward(ids)[-1].argmax()))
        if ids[-1] == eos_id:
            break
    return ids[len(prompt_ids) :]
    ### END SOLUTION


# %%
check("l01.generate_naive")

# %% [markdown]
# Your attention, your rotation, your loop, the model's weights. The engine of the later lessons gets the same prompt.
# Here it runs its steps in plain PyTorch (`enforce_eager=True`), as your functions do, so that the main difference is
# its cache; lesson 15 uses its compiled step.

# %%
from minillm import LLM

generate = use("l01.generate_naive")
eos_id = -1  # no token: a model may have several end tokens, and this loop takes one
NEW = 32
new_ids = generate(forward, prompt_ids, NEW, eos_id)
print(tokenizer.decode(prompt_ids + new_ids))

llm = LLM(
    name,
    dtype="float32",
    device="cpu",
    enforce_eager=True,  # steps in plain PyTorch, like yours
    enable_prefix_caching=False,  # each prompt from its first token
)
[output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
print()
claim(f"The engine generates the same {len(new_ids)} tokens.", new_ids == list(output.outputs[0].token_ids))

# %% [markdown]
# It looks like Python, and it repeats itself. The most probable token at every step does not make the most probable
# text, and once a phrase has been repeated, repeating it again becomes probable. Sampling breaks the loop, but
# sometimes draws one of the many improbable tokens; top-p removes those. Here are three settings with the same random
# numbers (change the seed and compare):


# %%
def sampled(seed: int, **options: float) -> str:
    """24 tokens drawn after the prompt."""
    ids = list(prompt_ids)
    for index in range(24):
        ids.append(choose(forward(ids)[-1], uniform(seed, index, Draw.SAMPLE), **options))
    return tokenizer.decode(ids[len(prompt_ids) :])


for label, options in (
    ("greedy", {"temperature": 0}),
    ("temperature 0.8, top-p 0.9", {"temperature": 0.8, "top_p": 0.9}),
    ("temperature 1.5", {"temperature": 1.5}),
):
    print(f"--- {label}\n{sampled(1, **options)}\n")

# %% [markdown]
# ### Exercise 5: count the work
#
# Count what your loop does. A forward over a text of $n$ tokens sends $n$ rows through every linear layer (a product
# with a weight matrix), and its attention needs $n(n+1)/2$ **pairs** of a query and a key that it may see. (Your
# function computes all $n^2$ pairs and hides the others. Count only the visible ones.) Which texts go through the model
# until `num_new` tokens are written?


# %%
def total_work(num_prompt: int, num_new: int) -> tuple[int, int]:
    """Return (rows, visible pairs), summed over all forwards of the naive loop, for one layer and one head.

    Example: a prompt of 2 and 2 new tokens take two forwards, over 2 and 3 tokens: 5 rows, 3 + 6 = 9 pairs.
    """
    ### BEGIN SOLUTION
    lengths = range(num_prompt, num_prompt + num_new)
    return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    ### END SOLUTION


# %%
check("l01.total_work")

# %%
work = use("l01.total_work")
reveal("l01.rows", work(1, 100)[0])
print("\n new tokens      rows needed once     rows done     pairs needed once            pairs done")
for new in (10, 100, 1000, 10_000):
    rows, pairs = work(1, new)
    print(f"{new:11,} {new:20,} {rows:13,} {new * (new + 1) // 2:21,} {pairs:21,}")

# %% [markdown]
# From a prompt of one token the rows are $1 + 2 + \dots + n = n(n+1)/2$, and the visible pairs grow with the *cube* of
# the length: attention is quadratic in each forward, and there are $n$ forwards.
#
# ## See
#
# Is all that work really repeated? After every forward, `WatchedForward` compares the logits of each row with those of
# the previous forward. If they are the same, the row was computed for nothing. The picture is drawn from these
# comparisons while your functions write the text.

# %% tags=["expected"] alt="After 32 forwards: on the left 32 columns, each a little longer than the one before: the first is all new, the others are hatched (redone) but for the lowest cell; in the middle the triangle of attention, hatched but for its last row; on the right more than a thousand rows, most of them redone."
from minillm.teaching.decoding import WatchedForward
from minillm.trace import Trace
from minillm.viz.tensors.attention_work import AttentionWorkView, ForwardWork
from minillm.viz.live import LiveView

trace = Trace()
with LiveView(AttentionWorkView(trace, num_steps=NEW, max_tokens=len(prompt_ids) + NEW - 1), seconds=10):
    watched_ids = generate(WatchedForward(forward, trace), prompt_ids, NEW, eos_id)
forwards = trace.of(ForwardWork)
seen = sum(event.num_rows for event in forwards), sum(event.pairs for event in forwards)
claim("Rows and pairs are as you counted.", seen == work(len(prompt_ids), len(watched_ids)))
claim("After the prompt, one row of each forward is new.", {event.num_new for event in forwards[1:]} == {1})

# %% [markdown]
# All hatched work was done before. With the causal mask, a token's row depends only on itself and the tokens before it,
# and those do not change, so its logits are the same every time. If the results of the old rows were *kept*, only the
# dark rows would have to run:

# %% tags=["expected"] alt="The same picture if old rows were kept: the columns are hollow but for the newest row, the triangle is hollow but for its last row, and 48 rows instead of more than a thousand went through the model."
with_cache = [ForwardWork(event.num_tokens, event.num_new, event.num_new) for event in forwards]
AttentionWorkView(Trace(with_cache))

# %% [markdown]
# That is the **KV cache**, and lesson 2 builds it. Note the last row of the triangle: the
# newest query is still compared with every key. It is often said that caching avoids recomputing attention. That is
# true of the old rows only, and it leaves out the larger saving in short texts: the linear layers of these rows. Lesson
# 2 measures what is left.
#
# ## Measure
#
# ### When attention dominates
#
# "Attention is quadratic" is true and often misunderstood. Count the arithmetic of one forward over $n$ tokens: the linear
# layers need $2 \cdot \text{weights}$ operations for each of $n$ rows (one multiplication and one addition per weight),
# attention $4 \cdot \text{layers} \cdot \text{heads} \cdot \text{width}$ for each of $n(n+1)/2$ visible pairs (half for
# the score, half for the value). The rest (norms, RoPE, softmax, and the logits, of which generating needs one row) is
# left out. From which length on is attention the larger part?

# %%
weights = sum(p.numel() for layer in model.layers for p in layer.parameters() if p.ndim == 2)
llama_weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
shapes = {  # weights of all layers, and layers · heads · width
    name: (weights, config.num_layers * config.num_heads * config.head_dim),
    "Llama-3-8B": (llama_weights, 32 * 32 * 128),
}


def attention_share(shape: str, n: int) -> float:
    """Attention's part of the operations of one forward over n tokens (counting only pairs that may be seen)."""
    linear_part, attention_part = 2 * shapes[shape][0] * n, 4 * shapes[shape][1] * n * (n + 1) // 2
    return attention_part / (linear_part + attention_part)


lengths = (16, 256, 1024, 4096, 16_384, 131_072)
print("attention's share of one forward\n" + " " * 12 + "".join(f"{n:>9,}" for n in lengths) + " tokens")
for shape in shapes:
    print(f"{shape[:11]:12}" + "".join(f"{attention_share(shape, n):9.1%}" for n in lengths))
crossing = {shape: round(w / a) - 1 for shape, (w, a) in shapes.items()}  # 2·w·n = 4·a·n·(n + 1)/2
all_pairs = {shape: round(w / (2 * a)) for shape, (w, a) in shapes.items()}  # 2·w·n = 4·a·n·n
print("half is reached at:", ", ".join(f"{shape} {n:,} tokens" for shape, n in crossing.items()))
print("with all n² pairs: ", ", ".join(f"{shape} {n:,} tokens" for shape, n in all_pairs.items()))
reveal("l01.crossing", crossing["Llama-3-8B"])
claim("The wider model crosses later.", crossing["Llama-3-8B"] > crossing[name])
claim(
    "With its shape, half is reached at 53,247 tokens if only visible pairs are computed, and at 26,624 if all are.",
    (crossing["Llama-3-8B"], all_pairs["Llama-3-8B"]) == (53_247, 26_624),
)

# %% [markdown]
# In short texts attention is a small part of the repeated work of the naive loop: the same rows go through the same
# *matrices*, again and again.
#
# *Half is reached at* counts visible pairs only: kernels (compiled routines for one computation) like FlashAttention
# skip what the mask hides. Your function computes all $n^2$ pairs and hides nearly half of them, as most plain
# implementations do, so its attention reaches half at half the length: *with all n² pairs*. A decode step with a cache
# reaches it there, too: a single row goes through the matrices, and it sees all $n$ keys.
#
# ### How long a forward takes
#
# Now measure the time: all lengths in turn, five times after a warm-up. The dashed line is the counted work.

# %%
from minillm.bench.timing import time_in_turn, ratio

code_ids = [i for text in texts[:8] for i in tokenizer.encode(text)]
contexts = [n for n in (1, 4, 16, 64, 256, 512) if n <= config.max_position_embeddings]


def operations(n: int) -> int:
    """One forward over n tokens: linear layers, attention, logits."""
    logits_part = 2 * config.vocab_size * config.hidden_size
    return (2 * weights + logits_part) * n + 4 * shapes[name][1] * n * (n + 1) // 2


# %% tags=["nbval-ignore-output"]
seconds = time_in_turn({n: lambda n=n: forward(code_ids[:n]) for n in contexts})
times = {n: ratio(seconds[n], seconds[1]) for n in contexts}
counts = {n: operations(n) / operations(1) for n in contexts}
longest = contexts[-1]
reveal("l01.slower", round(ratio(seconds[256], seconds[16]).median, 1))
print(f"counted, 256 tokens are {operations(256) / operations(16):.1f} times the work of 16")
print(
    f"{longest} tokens take {times[longest].median:.0f} times as long as one; counted: {counts[longest]:.0f} times the work"
)
claim("16 tokens take less than 8 times as long as one.", times[16].median < 8, measured=True)
claim(
    "At every length the time grows less than the counted work.",
    all(times[n].median < counts[n] for n in contexts[1:]),
    True,
)
claim(f"{longest} tokens take more than 10 times as long as one.", times[longest].median > 10, measured=True)
LineChart(
    f"One forward of {name} over n tokens, against one token, on this machine",
    Axis("tokens in the text", log=True, ticks=tuple(contexts)),
    Axis("times as long (median of 5, with the spread)", log=True),
    [
        Series("measured", contexts, *zip(*((s.median, s.low, s.high) for s in times.values()), strict=True)),
        Series("counted operations", contexts, list(counts.values()), style="modelled"),
    ],
    "The measured line starts nearly flat, rises, and stays below the counted operations.",
)

# %% [markdown]
# **Where the naive loop loses little:** at the left. Sixteen tokens take far less than sixteen times as long as one. A
# single row has to read all weights and uses each only once, and in a model this small much of the time goes into
# starting a few hundred operations from Python, whatever their size. For an answer of one token (a classification, a
# score) there is nothing to save unless prompts begin alike, and a cache would only cost memory.
#
# **Where it loses most:** at the right. The rows of a long text keep the processor busy, so the time grows with their
# number, and *each* new token takes that long.
#
# Now both generate the same 16 tokens. The engine has a cache, your loop does not:

# %% tags=["nbval-ignore-output"]
sixteen = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
[output] = llm.generate(prompt, sixteen, use_tqdm=False)
claim("The tokens are the same.", generate(forward, prompt_ids, 16, -1) == list(output.outputs[0].token_ids))
seconds = time_in_turn(
    {
        "your loop": lambda: generate(forward, prompt_ids, 16, -1),
        "the engine": lambda: llm.generate(prompt, sixteen, use_tqdm=False),
    }
)
gain = ratio(seconds["your loop"], seconds["the engine"])
print(f"your loop takes {gain} times as long as the engine")
claim("Without a cache the same tokens take longer.", gain.median > 1, measured=True)

# %% [markdown]
# The gain grows with every token of the text: that is the first measured chart of lesson 2.
#
# ## Stay in tokens
#
# Your loop keeps a list of ids and decodes at the end. Many programs keep a *string*: they decode each new token, add
# it to the text, and encode the text again for the next call. In one tutorial on [speculative
# decoding](glossary.md#speculative-decoding) (lesson 10), a small *draft model* guesses tokens, and passes them to the
# large *target model* in this way, as text. Does the target get the same tokens?
#
# Remember that the same text can be split into tokens in many ways. `retokenization_drift` takes completions from the
# engine and checks, after every new token but the last, whether decoding and encoding gives back the ids that the model
# generated. (After the last token the loop does not call the model again.)

# %%
from minillm.teaching.decoding import retokenization_drift, common_prefix_length

held_out = texts[:48]
greedy_drift, sampled_drift = retokenization_drift(llm, held_out, 0.0), retokenization_drift(llm, held_out, 1.0)
unchanged = sum(
    tokenizer.encode(tokenizer.decode(tokenizer.encode(text))) == tokenizer.encode(text) for text in held_out
)
print(f"prompts: the same ids after decoding and encoding in {unchanged} of {len(held_out)}")
for label, changed in (("greedy", greedy_drift), ("temperature 1", sampled_drift)):
    print(f"{label}: other ids after decoding and encoding in {len(changed)} of {len(held_out)} completions")
reveal("l01.drift", len(sampled_drift))
claim("Every prompt keeps its ids.", unchanged == len(held_out), of_model=True)
claim("Not every sampled completion does.", len(sampled_drift) > 0, of_model=True)

drifted = greedy_drift + sampled_drift
number, written, returned = drifted[0] if drifted else (0, prompt_ids, prompt_ids)  # some models change none
split = common_prefix_length(written, returned)
print("\nthe model generated    ", [tokenizer.token_text(i) for i in written[split:]])
print("after decode and encode", [tokenizer.token_text(i) for i in returned[split:]])
claim("Both lists decode to the same text.", tokenizer.decode(written) == tokenizer.decode(returned))

# %% [markdown]
# The prompts keep their ids because `encode` made them. The tokens that a *model* generates may change. How often they
# do depends on the model, and this one is small; *In the field* below shows that it happens with large ones too.
#
# Does the difference matter to the model? The next cell gives it both lists and compares what it expects next. Then two
# loops continue this text, one over the ids that the model generated and one through text:

# %%
for label, ids in (("generated ids", written), ("ids after encode", returned)):
    probs = forward(ids)[-1].softmax(-1)
    top = "  ".join(f"{p:.0%} {tokenizer.token_text(int(i))!r}" for p, i in zip(*probs.topk(4), strict=True))
    print(f"next token after the {label + ':':18} {top}")

made = tokenizer.decode(written)
for _ in range(12):
    ids = tokenizer.encode(made)
    made = tokenizer.decode([*ids, int(forward(ids)[-1].argmax())])
print("\nloop over ids:      ", repr(tokenizer.decode(generate(forward, written, 12, eos_id))))
print("loop through text:  ", repr(made[len(tokenizer.decode(written)) :]), "\n")

expected = [(forward(ids)[-1], forward(back)[-1]) for _, ids, back in drifted]
other = sum(int(one.argmax() != two.argmax()) for one, two in expected)
moved = [float((one.softmax(-1) - two.softmax(-1)).abs().sum() / 2) for one, two in expected]
print(f"another most probable next token after {other} of {len(drifted)} changed completions")
print(f"share of the probability that moves to other tokens: {sum(moved) / max(len(moved), 1):.0%} on average")
claim(
    "After most of the changed completions the model expects another next token.",
    2 * other > len(drifted),
    of_model=True,
)

# %% [markdown]
# The same characters can be another list of ids. The model sees only the ids, and what it expects next can be very
# different, as printed above. Everything that depends on the ids goes wrong too: a cache holds rows of other tokens,
# the draft model's probabilities belong to tokens that are no longer in the text, and token counts do not add up. An
# incomplete character (as with the emoji above) becomes the character `�`, and its bytes are lost.
#
# **Rule: encode the prompt once, stay in ids, decode for the reader only.**
#
# ## Break it
#
# Here are ten decoders. One is right, and nine contain a mistake that people really make; most are the reference with
# one edit. Five checks test each of them:
#
# 1. **runs**: the shapes fit and nothing is NaN;
# 2. **no peeking**: later tokens do not change earlier logits;
# 3. **shift**: with all positions moved by 100, the logits stay the same (RoPE depends on distances only);
# 4. **loss**: how many bits the model needs per token of held-out code, on average. Lower is better;
# 5. **12 tokens**: it generates the same greedy tokens as the right decoder.
#
# **Before running the cells, guess:** how many of the nine mistakes make the loss at least half a bit worse? Which check
# finds the most?

# %%
from functools import partial

from minillm.teaching.decoding import five_checks
from minillm.teaching.exercises import l01_decoding as references
from minillm.teaching.source import edited


def edited_attention(old: str, new: str):
    """Return the decoder whose attention is the reference with `old` replaced by `new` in its source."""
    return partial(forward, attend=edited(references.causal_attention, (old, new)))


def no_rotation(x: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """Return `x` as it is: what RoPE does if all positions are 0."""
    return x


decoders = {
    "right": forward,
    "no mask": edited_attention(".triu(1)", ".triu(num_tokens)"),
    "mask one token late": edited_attention(".triu(1)", ".triu(2)"),
    "hidden scores are 0": edited_attention("-torch.inf", "0.0"),
    "no scale": edited_attention(" / head_dim**0.5", ""),
    "softmax over queries": edited_attention(".softmax(-1)", ".softmax(-2)"),
    "KV heads alternate": edited_attention(
        "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
        "k.repeat(1, group, 1), v.repeat(1, group, 1)",
    ),
    "positions all 0": partial(forward, rope_q=no_rotation, rope_k=no_rotation),
    "neighbours paired": partial(forward, rope_q=references.interleaved_rope, rope_k=references.interleaved_rope),
    "values rotated too": partial(forward, rope_v=rope),
}

# %%
samples = [tokenizer.encode(texts[i])[:96] for i in (0, 4, 5)]
want = generate(forward, prompt_ids, 12, eos_id)
found = {
    label: five_checks(decoder, lambda d: generate(d, prompt_ids, 12, eos_id), samples)
    for label, decoder in decoders.items()
}
right, wrong = found["right"], {label: each for label, each in found.items() if label != "right"}
print(f"{'':22} runs   no peeking     shift    loss, bits   12 tokens")
for label, each in found.items():
    runs, peeks = "yes" if each.runs else "NO", "holds" if each.causal else "PEEKS"
    shift = "holds" if each.position_independent else "CHANGES"
    tokens = "same" if each.tokens == want else f"{common_prefix_length(each.tokens, want)} same"
    print(f"{label:22} {runs:>4} {peeks:>12} {shift:>9} {each.bits:>13.2f} {tokens:>11}")
better = [label for label, each in wrong.items() if each.bits < right.bits]
print("\nwrong, with a better loss than the right decoder:", ", ".join(better))
print("wrong, with the same 12 tokens:", ", ".join(x for x in wrong if wrong[x].tokens == want) or "none")
by_check = {
    "runs": sum(not each.runs for each in wrong.values()),
    "no peeking": sum(not each.causal for each in wrong.values()),
    "shift": sum(not each.position_independent for each in wrong.values()),
    "a loss at least half a bit worse": sum(each.bits >= right.bits + 0.5 for each in wrong.values()),
    "12 tokens": sum(each.tokens != want for each in wrong.values()),
}
print(f"mistakes found, of {len(wrong)}:", ", ".join(f"{count} by {check}" for check, count in by_check.items()))
claim("Every wrong decoder runs.", all(each.runs for each in wrong.values()))
claim(
    "The loss is better without a mask, and with a mask that hides too little.",
    {"no mask", "mask one token late"} <= {*better},
    of_model=True,
)
claim(
    "'hidden scores are 0' changes the loss by less than 0.1 bits.",
    abs(found["hidden scores are 0"].bits - right.bits) < 0.1,
    of_model=True,
)
claim(
    "'positions all 0' and 'no scale' pass 'no peeking' and 'shift'.",
    all(wrong[label].causal and wrong[label].position_independent for label in ("positions all 0", "no scale")),
)

# %% [markdown]
# Read the table by columns.
#
# * **Runs** finds no mistake. Right shapes prove little.
# * **The loss can be better with a mistake.** Without a mask, or with a mask that hides too little, it is *better* than
#   the right decoder's: the model sees the answer, or something computed from it. In training such a leak looks like a
#   breakthrough. During generation there is no future text, so the advantage disappears.
# * **12 tokens** needs a right decoder to compare with. It finds a mistake only where it changes the largest logit, so
#   a short or easy text can miss one; the lines below the table say how many it found here, and which it missed.
# * **Hidden scores are 0** hardly changes the loss. During generation the newest token has no future to hide, so its
#   own weights are right; only the older rows that it reads are wrong, from the second layer on. *No peeking* sees it
#   at once.
# * **No peeking** and **shift** need no reference, only a property that must hold. Each finds its own kind of mistake
#   and misses the others: `positions all 0` passes both.
# * **No scale** passes both properties as well. Only a comparison with a right decoder, of the loss or of the tokens,
#   shows it.
#
# Now read what each of them writes:

# %%
for label, each in found.items():
    print(f"{label:22}", repr(tokenizer.decode(each.tokens)))

# %% [markdown]
# Some of these lines are nonsense, others look like Python, as does the right one. Text that looks right does not show
# that a model is right. A comparison shows whether it is the same model.
#
# ## In the field
#
# | | transformers | vLLM | llama.cpp |
# |---|---|---|---|
# | heads shared | `repeat_kv`: neighbours, as you did | inside the kernel, nothing is copied | inside the kernel |
# | RoPE pairs | halves (`rotate_half`) | both, `is_neox_style=True` means halves | neighbours for Llama: the converter reorders the rows of the Q and K matrices to fit |
# | order of the sampling settings | temperature, top-k, top-p | temperature, then top-k and top-p | top-k, top-p first, *temperature last* by default |
# | cache | by default; `use_cache=False` is your loop | always, paged | always |
# | text | `generate` stays in ids | ids inside; `return_token_ids` returns them | ids inside |
#
# The same numbers for temperature, top-k and top-p therefore mean different distributions in llama.cpp and in vLLM.
# And loading the same Q and K matrices with the other pairing is the line "neighbours paired" of your table.
#
# The problem of *Stay in tokens* is called **retokenization drift**. It was found in reinforcement learning: a trainer
# that re-encodes a sampled answer computes probabilities of tokens that were never sampled. TRL, SGLang and vLLM have
# each added a way to stay in tokens from end to end (TRL issue 5224, SGLang pull request 26555).
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | a sample speculative loop passes draft tokens to the target as text: decode, concatenate, encode | the target may get other tokens than were drafted; the cell prints how often with this model | Stay in tokens |
# | caching avoids computing the whole attention matrix again | right for the old rows of the matrix; its newest row is still computed at every step. What is saved in short texts is mostly the linear layers of the old rows | See; measured in lesson 2 |
# | "attention is quadratic, so it dominates" | in Llama-3.1-8B from 53,247 tokens on, in one forward over the whole text that skips hidden pairs; from 26,624 on in one that computes all pairs, and in a decode step with a cache; never in Llama-3-8B, whose context ends at 8,192 | When attention dominates (counted) |
#
# **Papers.** Attention: Vaswani et al. 2017. GQA: Ainslie et al. 2023. RoPE: Su et al. 2021. BPE for text: Sennrich et
# al. 2016; on bytes: Radford et al. 2019 (GPT-2). Top-p: Holtzman et al. 2020.
#
# ## Recap
#
# 1. Text becomes ids, ids become rows, and each layer adds to every row what attention collects from it and the rows
#    before it, and then the output of its MLP.
# 2. The last row's logits, divided by the temperature and restricted by top-k and top-p, give the distribution of the
#    next token.
# 3. RoPE rotates queries and keys, so a score depends on the distance of two tokens and not on their positions.
# 4. Without a cache, $n$ tokens after a prompt of one cost $n(n+1)/2$ rows and about $n^3/6$ visible pairs. In each
#    forward after the first, all rows but the newest are repeated.
# 5. Loss, shapes and readable output do not show that a decoder is right; properties and a comparison do.
#
# **Next:** lesson 2 keeps the keys and values of the old rows.
