# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 17. Beside inference
#
# **Question.** *Lists of "ways to make language models efficient" name training tricks, compressed layers and lookup tables
# in one breath with caches and drafts. Which of them makes an inference engine better, and how do you find out in an hour?*
#
# This is an appendix. Six ideas, each with its mathematics, a few lines of code, a measurement on this project's own model,
# and a verdict:
#
# | | idea | from | promises |
# |---|---|---|---|
# | 1 | contrastive loss in tiles (Inf-CL) | training of embeddings | memory that does not grow with the square of the batch |
# | 2 | training in chunks (OOMB) | training on long texts | activations that do not grow with the text |
# | 3 | block low-rank layers (BLAST, Monarch) | compression | fewer parameters for the same error |
# | 4 | one bit, a low-rank part and a few exact weights (BiMaCoSR) | image models | weights of about one bit |
# | 5 | codebooks weighted by popularity (MEC) | recommendation | small embedding tables |
# | 6 | gathers as one sparse product (SparseTransX) | knowledge graphs | faster lookups |
#
# You need lesson 4 (errors of rounding), lesson 5 (INT4 and INT8 weights), lesson 9 (merging parts of a softmax) and
# lesson 13 (low rank, codebooks). Everything runs on a laptop's CPU. The code is that of `minillm.beside`, and
# `minillm bench beside` measures the same ideas, some in larger sizes.

# %%
import os

import torch

from minillm.beside.binary_linear import BinaryLinear
from minillm.beside.chunked_training import SavedBytes
from minillm.beside.contrastive import dense_contrastive_loss, tiled_contrastive_loss
from minillm.beside.embedding_codes import EmbeddingCodes
from minillm.beside.sparse_gather import by_gather, by_product, incidence, seconds
from minillm.beside.structured_linear import Blast, LowRank, Monarch, relative_error
from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.drives.l17 import LargestTensor
from minillm.teaching.workshop import l17_model as measure
from minillm.teaching.workshop import l17_training as training
from minillm.tokenizer import Tokenizer
from minillm.viz import LossTiles
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

folder = resolve(NAME)
model = load_model(folder, torch.float32, torch.device("cpu")).requires_grad_()  # as in training: gradients are wanted
config = model.config
texts = measure.Texts.held_out(Tokenizer.from_folder(folder))
READ = texts.read[:769]  # what losses are measured on
plain_loss = measure.loss(model, READ, 256)
print(f"{NAME}: {config.num_layers} layers, {config.vocab_size:,} tokens, {model.num_parameters / 1e6:.1f}M parameters")
print(f"held-out texts: {len(texts.fitted):,} tokens to fit to, {len(texts.read):,} others to measure on")
print(f"loss of the model as it is: {plain_loss:.3f} nats per token")

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on.
#
# 1. A text of 512 tokens instead of 256, trained in chunks of 128. How many times as many bytes must be kept for the
#    backward pass?
# 2. A matrix of the model is replaced by its best low-rank approximation with a quarter of the numbers. How large is the
#    error, in percent of the matrix? (The size of a matrix is the root of the sum of its squares, the Frobenius norm.)
# 3. Now every weight becomes one bit, its sign, with one scale per row. How large is the error, in percent?

# %%
predict("l17.kept", None, unit="times as many")
predict("l17.low_rank", None, unit="%")
predict("l17.one_bit", None, unit="%")

# %% [markdown]
# ## 1. A loss in tiles
#
# Models that embed texts or images are trained with a **[contrastive loss](glossary.md#contrastive-loss)**. A batch has n
# pairs. Row i of x belongs to row i of y, and all other rows of y are wrong answers:
#
# $$\text{loss} \;=\; \frac1n \sum_i \Big( \underbrace{\log \sum_j e^{x_i \cdot y_j / \tau}}_{\text{lse}_i} \;-\; x_i \cdot y_i / \tau \Big)$$
#
# (τ is the temperature: the smaller it is, the more the most similar pairs count.)
#
# Larger batches have harder wrong answers and train better. But written plainly this takes the n × n matrix of
# similarities, also for its gradient. Yet of a row only its [log-sum-exp](glossary.md#lse) is needed, and you know from
# lesson 9 how to merge those.
#
# ### Exercise 1: merge log-sum-exps


# %%
def tiled_lse(x: torch.Tensor, y: torch.Tensor, temperature: float, tile: int) -> torch.Tensor:
    """Return log Σ_j exp(x_i · y_j / temperature) for each row of x: [n].

    x: [n, d]; y: [m, d]
    Go through y in tiles of `tile` rows; the last may be shorter. No exponential may overflow. Make no tensor that is
    larger than the largest of these: n · (tile + 1) numbers, x, a tile of y, one number for each row of x and each tile.
    (Views of x and y may be larger.)

    Example: x [[1]], y [[2], [2]], temperature 1, tile 1: the log-sum-exps of the tiles are 2 and 2, that of both is
    2 + log 2 = 2.693.
    """
    ### BEGIN SOLUTION
    lse = torch.full((len(x),), -torch.inf)
    for first in range(0, len(y), tile):
        part = (x @ y[first : first + tile].T / temperature).logsumexp(1)
        lse = torch.logaddexp(lse, part)
    return lse
    ### END SOLUTION


# %%
check("l17.tiled_lse")

# %% [markdown]
# Stuck? `hint("l17.tiled_lse", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### See: a language model is a contrastive loss
#
# The logits of a language model are products of a hidden state with every row of a table: the vocabulary is y, the next
# token is the right answer, and the temperature is 1. So your function computes the model's log-probabilities without ever
# making its logits.

# %%
my_lse = use("l17.tiled_lse")
ids = READ[:513]
hidden = measure.hidden_states(model, ids[:-1])  # [n, hidden]
table = model.lm_head.weight.detach()
with torch.no_grad(), LargestTensor() as plain:
    wanted = model.logits(hidden).log_softmax(-1)[torch.arange(len(hidden)), ids[1:]]
with torch.no_grad(), LargestTensor() as in_tiles:
    mine = (hidden * table[ids[1:]]).sum(1) - my_lse(hidden, table, 1.0, 256)
print(f"{len(hidden)} tokens, {len(table):,} rows in the table")
print(f"largest tensor: {plain.numbers:,} numbers with logits, {in_tiles.numbers:,} in tiles")
claim("In tiles the logits never exist.", in_tiles.numbers < len(hidden) * len(table))
claim("Both log-probabilities are the same.", torch.allclose(mine, wanted, rtol=1e-3, atol=1e-3))

# %% [markdown]
# That is used in training: it is what fused "linear cross-entropy" kernels do, because the logits of a large vocabulary are
# often the largest tensor of a step.
#
# Now pairs within a batch: hidden states, and the embeddings of the tokens that come next. `minillm.beside.contrastive`
# cuts x into tiles as well, and goes through one row of tiles after the other. The number in a tile is real: the share
# of its rows' softmax that the tile holds, averaged over the rows.

# %% tags=["expected"] alt="Eight by eight tiles of similarities. The tiles of the first rows are merged, one tile of the fourth row exists now, and the others come later. Bars at the right show how much of each row's softmax is in its log-sum-exp."
SHOWN, TILE = 64, 8
pairs = hidden[:SHOWN], table[ids[1 : SHOWN + 1]]
softmax = (pairs[0] @ pairs[1].T).softmax(1)
mass = softmax.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).sum(3).mean(1)
LossTiles(mass.tolist(), TILE, at=(3, 4))

# %% [markdown]
# For training, the gradient must not need the matrix either. It is computed from the log-sum-exps, tile by tile again:
#
# $$\frac{\partial\,\text{loss}}{\partial x_i} \;=\; \frac{1}{n \tau} \Big( \sum_j p_{ij}\, y_j - y_i \Big) \qquad p_{ij} = e^{x_i \cdot y_j / \tau - \text{lse}_i}$$
#
# `tiled_contrastive_loss` does both. The bytes that are kept for the backward pass, counted:

# %% tags=["expected"] alt="Bytes kept for the backward pass over the batch, both axes logarithmic. The line of the plain loss is steeper than that of the loss in tiles, and far above it for the largest batch."
BATCHES = [128, 256, 512, 1024, 2048]
source = texts.read[: BATCHES[-1] + 1]
states = torch.cat([measure.hidden_states(model, piece) for piece in source[:-1].split(256)])
unit_x, unit_y = (torch.nn.functional.normalize(part, dim=1) for part in (states, table[source[1:]]))
kept, differences = {"whole matrix": [], "tiles of 128": []}, []
for batch in BATCHES:
    grads = []
    for name in kept:
        x, y = (part[:batch].clone().requires_grad_() for part in (unit_x, unit_y))
        with SavedBytes(torch.nn.Module()) as saved:
            loss = dense_contrastive_loss(x, y, 0.07) if "whole" in name else tiled_contrastive_loss(x, y, 0.07, 128)
            loss.backward()
        kept[name].append(saved.peak)
        grads.append(x.grad)
    differences.append(float((grads[0] - grads[1]).norm() / grads[0].norm()))
LineChart(
    "Contrastive loss: kept for the backward pass",
    Axis("pairs in the batch", log=True, ticks=tuple(BATCHES)),
    Axis("MB", log=True),
    [Series(name, BATCHES, [count / 1e6 for count in counts]) for name, counts in kept.items()],
    "; ".join(
        f"{name}: {counts[0] / 1e6:.2f} MB at {BATCHES[0]}, {counts[-1] / 1e6:.1f} MB at {BATCHES[-1]}"
        for name, counts in kept.items()
    ),
)

# %%
whole, tiled = (kept[name] for name in ("whole matrix", "tiles of 128"))
print(f"batch:        {'   '.join(f'{batch:6,}' for batch in BATCHES)}")
for name, counts in kept.items():
    print(f"{name:13} {'   '.join(f'{count / 1e6:6.2f}' for count in counts)} MB")
print(
    f"the largest batch against half of it: {whole[-1] / whole[-2]:.1f} times as much with the matrix, "
    f"{tiled[-1] / tiled[-2]:.1f} in tiles"
)
claim("The gradients are the same.", max(differences) < 1e-4)
claim("In tiles, twice the batch takes twice the bytes.", abs(tiled[-1] / tiled[-2] - 2) < 0.05)
claim("With the matrix, more than that.", whole[-1] / whole[-2] > 2.3, of_model=True)  # not if vectors are very long

# %% [markdown]
# **Verdict.** It holds, exactly. The price is that every tile is computed twice. But it is a matter of *training*: an engine
# has no loss. What it has is the same merge, in attention (lesson 9). There the tiles are those of the keys.
#
# ## 2. A text in chunks
#
# Training keeps the **activations** of all layers for the backward pass: many numbers for each token. OOMB goes through a long
# text in chunks, as chunked prefill does (lesson 7), and keeps only keys and values. Backwards it computes each
# chunk a second time, with its graph (**[recomputation](glossary.md#recomputation)**):
#
# ```text
# forward    chunk 1 → chunk 2 → chunk 3         only keys and values are kept, as in a KV cache
# backward   chunk 3 ← chunk 2 ← chunk 1         each chunk is computed again, this time with its graph
# ```
#
# One thing is difficult. The keys and values of chunk 1 were read by chunks 2 and 3, so the loss of those changes with them.
# The graph of chunk 1 knows nothing about it. But chunk 3 can tell: the keys and values of earlier chunks are inputs of it,
# and autograd gives a gradient for inputs. Collect these gradients, g, for each token's row of keys and values r. When the
# chunk's turn comes, add a term whose derivative is g:
#
# $$\frac{\partial}{\partial r} \sum_t g_t \cdot r_t \;=\; g$$
#
# ### Exercise 2: the gradient that crosses the boundary


# %%
def backward_in_chunks(run, chunks: list[tuple[int, int]], kept: torch.Tensor) -> torch.Tensor:
    """Add the gradients of all losses to the parameters that run uses, with the graph of one chunk at a time.

    Call backward() once for each chunk.
    run(start, end, past) returns the loss of the tokens start to end, and their rows [end - start, width], which later
        chunks read. past: the rows of all tokens before start, [start, width]; if it requires a gradient, backward()
        fills past.grad. The loss and the rows depend on it.
    chunks: (start, end) of each, in order; the first starts at 0
    kept: the rows of all tokens, [n, width], computed before, without a graph

    Returns what was sent: for each row the gradient that came from later chunks, [n, width].

    Example: with one chunk nothing is sent, and loss.backward() is all that is needed.
    """
    ### BEGIN SOLUTION
    sent = torch.zeros_like(kept)
    for start, end in reversed(chunks):
        past = kept[:start].detach().requires_grad_()
        loss, rows = run(start, end, past)
        (loss + (rows * sent[start:end]).sum()).backward()
        sent[:start] += past.grad
    return sent
    ### END SOLUTION


# %%
check("l17.backward_in_chunks")

# %% [markdown]
# ### See: your backward pass trains the model
#
# A row is now all keys and values of a token, of every layer. Your function gets the bundled model and a held-out text. The
# gradients of all parameters are compared with those of the whole text at once. (Both ways use one further trick of
# `minillm.beside`: attention's scores are computed once more in the backward pass, layer by layer, and never kept.)

# %%
my_backward = use("l17.backward_in_chunks")
CHUNK = 128
LENGTHS = [128, 256, 512, 768]
chunked, whole_text = {}, {}
for length in LENGTHS:
    text = texts.read[: length + 1]
    grads, loss_in_chunks, chunked[length] = training.train(model, text, CHUNK, my_backward)
    if length <= 512:  # the whole text at once takes much more memory
        at_once, loss_at_once, whole_text[length] = training.train_at_once(model, text)
        error = training.difference(grads, at_once)
        print(
            f"{length} tokens: loss {loss_in_chunks:.4f} and {loss_at_once:.4f}, "
            f"kept {chunked[length].peak / 1e6:.0f} MB in chunks, {whole_text[length].peak / 1e6:.0f} MB at once"
        )
        claim("The gradients are those of the whole text.", error < 1e-3)
del grads, at_once

# %% tags=["expected"] alt="Bytes kept for the backward pass over the length of the text. The line of the whole text rises steeply and proportionally; the line of the chunks is almost flat."
LineChart(
    "Training: kept for the backward pass",
    Axis("tokens of the text", ticks=tuple(LENGTHS)),
    Axis("MB"),
    [
        Series("whole text", list(whole_text), [saved.peak / 1e6 for saved in whole_text.values()]),
        Series(f"chunks of {CHUNK} (yours)", LENGTHS, [chunked[n].peak / 1e6 for n in LENGTHS]),
    ],
    f"Whole text: {whole_text[512].peak / 1e6:.0f} MB at 512 tokens; in chunks: {chunked[512].peak / 1e6:.0f} MB.",
)

# %%
row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
growth = chunked[512].peak / chunked[256].peak
reveal("l17.kept", round(growth, 2))
print(f"whole text, 512 tokens instead of 256: {whole_text[512].peak / whole_text[256].peak:.2f} times as much")
print(f"what still grows in chunks: {(chunked[512].peak - chunked[256].peak) / 256:,.0f} bytes per token")
print(f"keys and values of a token in all layers: {row_bytes:,} bytes")
print("(not counted: their gradients, which are sent back, as many bytes again)")
claim(
    "The whole text takes twice as much for twice the tokens.",
    abs(whole_text[512].peak / whole_text[256].peak - 2) < 0.1,
)
claim("Chunks take less than 1.3 times as much.", growth < 1.3, of_model=True)
per_token = (chunked[512].peak - chunked[256].peak) / 256
claim("Of what autograd keeps, only the keys and values of earlier chunks grow.", abs(per_token / row_bytes - 1) < 0.05)

# %% [markdown]
# The memory over time shows how it works. The whole text keeps everything until the backward pass begins to let it go. In
# chunks it goes up and down once for each chunk.

# %% tags=["expected"] alt="Bytes kept over the course of a training step with 512 tokens. The whole text is one high mountain; the chunks are four low ones of about equal height."
POINTS = 48


def over_time(saved: SavedBytes) -> list[float]:
    """The most MB in each of POINTS equal parts of the saving and releasing."""
    history = saved.history
    each = len(history) / POINTS
    return [max(history[int(i * each) : int((i + 1) * each)]) / 1e6 for i in range(POINTS)]


shares = [round(100 * (i + 0.5) / POINTS, 1) for i in range(POINTS)]
LineChart(
    "One training step with 512 tokens: kept at each time",
    Axis("percent of all saving and releasing", ticks=(0, 25, 50, 75, 100)),
    Axis("MB"),
    [
        Series("whole text", shares, over_time(whole_text[512])),
        Series(f"chunks of {CHUNK} (yours)", shares, over_time(chunked[512])),
    ],
    f"The whole text has one peak of {whole_text[512].peak / 1e6:.0f} MB, the chunks have {512 // CHUNK} of about "
    f"{chunked[512].peak / 1e6:.0f} MB.",
)

# %% [markdown]
# **Verdict.** It holds: equal gradients, activations of one chunk. "Constant" is said of *activations*: keys, values and their
# gradients still grow, which OOMB moves to the CPU. It costs a second forward. It is for *training only*. But an engine has
# had the forward half all along: a chunked prefill with a KV cache.
#
# ## 3. Layers with fewer parameters
#
# A matrix W of m × n numbers can be replaced by factors. The best [low-rank](glossary.md#low-rank) approximation is the
# truncated SVD (lesson 13). Two other structures are said to lose less with as many numbers, because they can represent
# some matrices of full rank:
#
# | | form | numbers |
# |---|---|---|
# | SVD | W ≈ U V | r (m + n) |
# | BLAST, **[block low-rank](glossary.md#block-low-rank)** | W_ij ≈ U_i diag(s_ij) V_jᵀ for b × b blocks | r (m + n) + r b² |
# | Monarch | two block-diagonal matrices (b blocks each) with a permutation in between | b (m + n) |
#
# The blocks of a row share U_i, those of a column share V_j, and s_ij says how much of each direction a block has. The
# product needs no dense matrix:
#
# $$y_i \;=\; U_i \sum_j s_{ij} \odot \left(V_j^T x_j\right)$$
#
# (⊙ multiplies element by element.)
#
# ### Exercise 3: a block low-rank product
#
# The check also refuses an answer that makes a whole block of W: block by block it computes all of W, too.


# %%
def blast_apply(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return x Wᵀ for W_ij = U_i diag(s_ij) V_jᵀ, without making W: [n, out].

    x: [n, in];  u: [blocks, out / blocks, rank];  s: [blocks, blocks, rank];  v: [blocks, in / blocks, rank]
    The inputs of a block stand side by side, and so do its outputs.

    Example: u [[[1]], [[1]]], s [[[1], [2]], [[3], [4]]], v [[[1]], [[2]]], x [[1, 10]]: V_jᵀ x_j are 1 and 20, so y is
    [[1 · 1 + 2 · 20, 3 · 1 + 4 · 20]] = [[41, 83]].
    """
    ### BEGIN SOLUTION
    latents = torch.einsum("njq,jqr->njr", x.unflatten(1, (len(v), -1)), v)
    mixed = torch.einsum("ijr,njr->nir", s, latents)
    return torch.einsum("ipr,nir->nip", u, mixed).flatten(1)
    ### END SOLUTION


# %%
check("l17.blast_apply")

# %% [markdown]
# ### Measure: error against parameters
#
# One matrix of the model: the down projection of a middle layer. BLAST is fitted by alternating least squares, and can
# only improve on its start, an SVD of slightly lower rank. All get at most the same share of the numbers. Each number
# is counted as 16 bits.

# %%
my_blast = use("l17.blast_apply")
LAYER = config.num_layers // 2
downs = {i: layer.mlp.down_proj.weight.detach() for i, layer in enumerate(model.layers)}
weight = downs[LAYER]
rows, columns = weight.shape
BLOCKS = next(b for b in (8, 4, 2, 1) if rows % b == columns % b == 0)
SHARES = [1 / 16, 1 / 8, 1 / 4]  # of the numbers of the matrix


def bits(fit) -> float:
    """Bits per weight of the matrix."""
    return 16 * fit.num_parameters / weight.numel()


svds = [LowRank.fit(weight, max(1, int(share * weight.numel() / (rows + columns)))) for share in SHARES]
blasts = [
    Blast.fit(weight, BLOCKS, max(1, int(share * weight.numel() / (rows + columns + BLOCKS**2))), rounds=5)
    for share in SHARES
]
monarchs = [Monarch.fit(weight, b) for b in (8, 16, 32, 64) if rows % b == columns % b == 0]
inputs = torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
last = blasts[-1]
claim(
    "Your product is that of the dense matrix.",
    torch.allclose(my_blast(inputs, last.u, last.s, last.v), inputs @ last.dense().T, rtol=1e-3, atol=1e-3),
)
errors = {name: [relative_error(weight, fit) for fit in fits] for name, fits in (("SVD", svds), ("BLAST", blasts))}
print(f"layer {LAYER}, {rows} × {columns}, {BLOCKS} × {BLOCKS} blocks")
for i, share in enumerate(SHARES):
    print(f"  {share:6.2%} of the numbers: SVD loses {errors['SVD'][i]:.1%}, BLAST {errors['BLAST'][i]:.1%}")
reveal("l17.low_rank", round(100 * errors["SVD"][-1]))
claim("With a quarter of the numbers BLAST is a little better.", errors["BLAST"][-1] < errors["SVD"][-1], of_model=True)
claim("By less than a tenth of the error.", errors["BLAST"][-1] > 0.9 * errors["SVD"][-1], of_model=True)
claim(
    "With a quarter of the numbers most of the matrix is lost.",
    min(e[-1] for e in errors.values()) > 0.5,
    of_model=True,
)
as_large = [LowRank.fit(weight, fit.num_parameters // (rows + columns)) for fit in monarchs]
claim(
    "Monarch is no better than an SVD with as many numbers.",
    all(relative_error(weight, a) >= relative_error(weight, b) for a, b in zip(monarchs, as_large, strict=True)),
    of_model=True,
)

# %% [markdown]
# Why? A low-rank approximation pays if the singular values fall fast. Those of this matrix fall slowly: all directions
# are used. What BLAST can still gain are differences between blocks. The papers **train** a layer in its new
# form, or train it on afterwards. According to the papers it is the training that closes the gap. Without it, none of
# these fits is near a matrix of this model. What that does to the model is measured below, for the SVD. (They minimise
# the error of the *matrix*. Methods that weight it by the inputs a layer really sees, such as ASVD and SVD-LLM, lose less
# without training; not tried here.)
#
# ## 4. One bit and a few exact weights
#
# Now keep *all* directions, and give each number fewer bits. The extreme is one bit, the sign. For which scale a is
# a · sign(w) nearest to w? The derivative of Σ (w − a sign(w))² is zero at a = mean |w|. And since some weights are much
# larger than the rest (lesson 5), keep those exactly:
#
# $$W \;\approx\; \mathrm{diag}(a)\,\mathrm{sign}(W) \;+\; S \qquad S \text{ sparse}$$
#
# BiMaCoSR adds a low-rank product U V as a third part. (An exact weight is counted as 48 bits: 16 for the number and 32
# for its place.)
#
# ### Exercise 4: signs, scales, and what is exact


# %%
def one_bit_and_exact(weight: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales [out] and the exact part [out, in] of W ≈ diag(scales) sign(W) + exact.

    weight: [out, in]
    The count weights with the largest |W| of the whole matrix are exact: there both parts together are W. The exact part
    is 0 elsewhere. A row's scale is the mean |W| of its other weights, or 0 if it has no others. (Of equally large
    weights any may be exact, but no more than count in all.)

    Example: [[1, -8, 2]], count 1: -8 is exact. The scale is (1 + 2) / 2 = 1.5, so signs alone give -1.5 there, and the
    exact part is [[0, -6.5, 0]].
    """
    ### BEGIN SOLUTION
    chosen = torch.zeros_like(weight, dtype=torch.bool)
    chosen.view(-1)[weight.abs().flatten().topk(count).indices] = True
    scales = weight.abs().masked_fill(chosen, 0).sum(1) / (~chosen).sum(1).clamp_min(1)
    return scales, torch.where(chosen, weight - scales[:, None] * weight.sign(), 0.0)
    ### END SOLUTION


# %%
check("l17.one_bit_and_exact")

# %%
my_one_bit = use("l17.one_bit_and_exact")


def one_bit(matrix: torch.Tensor, density: float, rank: int = 0) -> BinaryLinear:
    """The layer of `minillm.beside` from your two parts; with a rank, what the low rank has left is made binary."""
    low_rank = LowRank.fit(matrix, rank) if rank else None
    rest = matrix - low_rank.dense() if low_rank else matrix
    scales, exact = my_one_bit(rest, round(density * matrix.numel()))
    return BinaryLinear(low_rank, exact.to_sparse().coalesce(), rest >= 0, scales)


DENSITIES = [0.0, 0.005, 0.02, 0.05]
binaries = [one_bit(weight, density) for density in DENSITIES]
with_rank = [one_bit(weight, 0.005, rank) for rank in (8, 32)]
theirs = BinaryLinear.fit(weight, rank=8, density=0.005)
gaussian = (1 - 2 / torch.pi) ** 0.5
print(f"signs alone: error {relative_error(weight, binaries[0]):.1%}; of normally distributed weights {gaussian:.1%}")
for fit in (*binaries[1:], *with_rank):
    parts = f"{fit.sparse.values().numel() / weight.numel():.1%} exact" + (
        f", rank {fit.low_rank.u.shape[1]}" if fit.low_rank else ""
    )
    print(f"  {parts:22} {fit.num_bits / weight.numel():5.2f} bits per weight, error {relative_error(weight, fit):.1%}")
reveal("l17.one_bit", round(100 * relative_error(weight, binaries[0])))
claim(
    "Your parts give the error of those of `minillm.beside`.",
    abs(relative_error(weight, with_rank[0]) - relative_error(weight, theirs)) < 1e-4,
)
claim(
    "The product is that of the dense matrix.",
    torch.allclose(binaries[2].apply(inputs), inputs @ binaries[2].dense().T, rtol=1e-3, atol=1e-3),
)
claim(
    "Signs alone are as good as for normally distributed weights, within a tenth.",
    abs(relative_error(weight, binaries[0]) / gaussian - 1) < 0.1,
    of_model=True,
)
claim(
    "Exact weights help.",
    relative_error(weight, binaries[-1]) < 0.9 * relative_error(weight, binaries[0]),
    of_model=True,
)

# %% [markdown]
# ### See: all of them on one axis
#
# Bits per weight against error, with the INT4 (groups of 64) and INT8 of lesson 5 beside them.

# %% tags=["expected"] alt="Relative error of a matrix over bits per weight. SVD, BLAST and Monarch lie close together at the top; one bit with exact weights lies clearly lower; INT4 and INT8 lie far below all of them."
rounded = [measure.rounded(weight, n) for n in (4, 8)]
LineChart(
    f"The down projection of layer {LAYER}: what is lost",
    Axis("bits per weight", log=True, ticks=(0.5, 1, 2, 4, 8)),
    Axis("relative error"),
    [
        Series("SVD", [bits(fit) for fit in svds], errors["SVD"]),
        Series("BLAST", [bits(fit) for fit in blasts], errors["BLAST"]),
        Series("Monarch", [bits(fit) for fit in monarchs], [relative_error(weight, fit) for fit in monarchs]),
        Series(
            "one bit + exact (yours)",
            [fit.num_bits / weight.numel() for fit in binaries],
            [relative_error(weight, fit) for fit in binaries],
        ),
        Series(
            "INT4, INT8 of the engine",
            [size for size, _ in rounded],
            [float((weight - near).norm() / weight.norm()) for _, near in rounded],
        ),
    ],
    f"At about 4 bits: SVD {errors['SVD'][-1]:.0%}, BLAST {errors['BLAST'][-1]:.0%}, one bit and exact weights "
    f"{relative_error(weight, binaries[-1]):.0%}, INT4 {float((weight - rounded[0][1]).norm() / weight.norm()):.0%}.",
)

# %% [markdown]
# ### Measure: what it does to the model
#
# The down projections of **all** layers are replaced, and nothing is trained. The loss on held-out text, above that of the
# model as it is:

# %%
ways = {
    "INT8": {i: measure.rounded(w, 8) for i, w in downs.items()},
    "INT4": {i: measure.rounded(w, 4) for i, w in downs.items()},
}
for name, density in (("one bit", 0.0), ("one bit, 2% exact", 0.02), ("one bit, 5% exact", 0.05)):
    made = {i: one_bit(w, density) for i, w in downs.items()}
    ways[name] = {i: (fit.num_bits / fit.signs.numel(), fit.dense()) for i, fit in made.items()}
for name, share in (("SVD, a quarter", 1 / 4), ("SVD, a half", 1 / 2)):
    made = {i: LowRank.fit(w, int(share * w.numel() / sum(w.shape))) for i, w in downs.items()}
    ways[name] = {i: (16 * fit.num_parameters / downs[i].numel(), fit.dense()) for i, fit in made.items()}
added = {}
print(f"{'all down projections as':24}{'bits per weight':>16}{'loss, nats per token':>23}")
for name, made in ways.items():
    with measure.replaced(model, {i: dense for i, (_, dense) in made.items()}):
        added[name] = measure.loss(model, READ, 256) - plain_loss
    print(f"{name:24}{made[LAYER][0]:16.2f}{added[name]:+23.3f}")
claim(
    "INT4 loses less than a fifth of what any of the new ones does.",
    5 * added["INT4"] < min(nats for name, nats in added.items() if "INT" not in name),
    of_model=True,
)
claim(
    "One bit with 2% exact weights loses less than a low rank with twice the bits.",
    added["one bit, 2% exact"] < added["SVD, a quarter"],
    of_model=True,
)
claim("Exact weights help the model, too.", added["one bit, 5% exact"] < added["one bit"], of_model=True)

# %% [markdown]
# **Verdict, for both.** Fewer bits lose less than fewer directions: at equal size, one bit *of every* number keeps more
# than all bits of a few directions. The recipe of exact weights beside coarse ones is right, and the engine has it
# (dense and sparse, lesson 5). But four bits and a scale per group are so much closer that nothing here competes
# without training. One bit is for models that were **trained** in one bit. In a CPU engine a sign bit must also be
# unpacked, and the sparse part is a second product.
#
# ## 5. Codes for frequent tokens
#
# The embedding table has a row for each token. MEC compresses such tables for recommendation models, where they are
# most of the model: rows are cut into parts, and each part is replaced by its nearest [centroid](glossary.md#centroid)
# of a small [codebook](glossary.md#codebook). The idea to test is the weighting. A small part of the tokens makes about
# half of a text, so k-means should count each row by its frequency, to a power: 0 counts all alike. (A token that does
# not occur counts as one that occurs once.)
#
# ### Exercise 5: a weighted round of k-means


# %%
def centroid_step(points: torch.Tensor, weights: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the centroids after one round: each moves to the weighted mean of the points that are nearest to it.

    points: [n, d]; weights: [n], above 0; centroids: [k, d]
    A centroid that no point is nearest to stays where it is. Returns [k, d].

    Example: points [[1], [2], [10]] with weights 3, 1, 5 and centroids [[0], [9]]: (3 · 1 + 1 · 2) / 4 and 10, so
    [[1.25], [10]].
    """
    ### BEGIN SOLUTION
    nearest = torch.cdist(points, centroids).argmin(1)
    moved = centroids.clone()
    for index in nearest.unique():
        own = nearest == index
        moved[index] = (points[own] * weights[own, None]).sum(0) / weights[own].sum()
    return moved
    ### END SOLUTION


# %%
check("l17.centroid_step")

# %% [markdown]
# ### Measure: by the rows that a text reads, and by all rows
#
# Parts of eight numbers, 64 centroids each. (Counted as `minillm.beside` stores them: a byte for each code, and
# codebooks in float32.) Frequencies are counted in some held-out texts, and the error is measured on others: once over
# the rows that these read (a frequent token counts as often as it occurs), once over all rows. The last two columns are
# what is added to the model's loss: with the coded table as the input alone, and as input and output layer.

# %%
my_step = use("l17.centroid_step")
embeddings = model.embed_tokens.weight.detach()
counts = torch.bincount(texts.fitted, minlength=len(embeddings))
top = counts.sort(descending=True).values
print(
    f"of {len(embeddings):,} tokens {int((counts > 0).sum()):,} occur; the 100 most frequent make {top[:100].sum() / top.sum():.0%} of the text"
)
POWERS = (0.0, 0.5, 1.0)
CODES = min(64, len(embeddings))
lost, tables = {}, {}
for power in POWERS:
    codes = EmbeddingCodes.fit(embeddings, counts, embeddings.shape[1] // 8, CODES, power, rounds=3, step=my_step)
    tables[f"codes, power {power:g}"] = (
        8 * codes.num_bytes / embeddings.numel(),
        codes.rows(torch.arange(len(embeddings))),
    )
tables["INT4"] = measure.rounded(embeddings, 4)
print(
    f"{'':18}{'bits':>6}{'error of rows read':>20}{'of all rows':>13}{'added loss, input':>19}{'input and output':>18}"
)
for name, (size, near) in tables.items():
    gap = embeddings - near
    over_read = float(gap[texts.read].norm() / embeddings[texts.read].norm())
    over_all = float(gap.norm() / embeddings.norm())
    added_by = []
    for as_output in (False, True):
        with measure.embedded_by(model, near, as_output):
            added_by.append(measure.loss(model, READ, 256) - plain_loss)
    lost[name] = over_read, over_all, *added_by
    print(f"{name:18}{size:6.2f}{over_read:20.1%}{over_all:13.1%}{added_by[0]:+19.3f}{added_by[1]:+18.3f}")
share = embeddings.numel() / model.num_parameters
quoted("Qwen2.5-0.5B: a table of 151,936 rows of 896 numbers, of 494 million in all", "its config.json and model card")
print(
    f"the table is {share:.0%} of the model's parameters, and {'is' if config.tie_word_embeddings else 'is not'} the output layer, too"
)

# %%
alike, halfway, fully = (lost[f"codes, power {power:g}"] for power in POWERS)
claim("Weighting helps the rows that are read.", fully[0] < 0.95 * alike[0], of_model=True)
claim("It costs those that are not.", fully[1] > alike[1], of_model=True)
claim("With it the model loses less.", fully[2] < alike[2], of_model=True)
claim("As the output layer, codes cost more than as the input.", fully[3] - fully[2] > fully[2], of_model=True)
claim(
    "INT4 in both places costs less than a fifth of what codes in both cost.",
    5 * lost["INT4"][3] < fully[3],
    of_model=True,
)

# %% [markdown]
# **Verdict.** The weighting helps: the error moves to rows that are not read. (MEC weights a regulariser of its codes
# by popularity; weighted k-means is a simple form of that idea.) The codes take one to two bits per number, but they do
# not pay here, because the two kinds of models differ. A recommendation model may have millions of rows, which are most
# of its bytes. Of a large language model the table is a small part; of a small one it can be a quarter (the quoted
# one). And where it is *tied*, it is also the output layer, which multiplies by **all** rows in every step. Four or
# eight bits per number are the better offer (lesson 5).
#
# ## 6. Gathers as a product
#
# In a knowledge graph a fact is a triple, and its score is a distance |head + relation − tail|. Plain code gathers
# three rows for each triple and then adds. SparseTransX writes the sums of *all* triples as one product with an
# **[incidence matrix](glossary.md#incidence-matrix)** A, which has the entries +1, +1, −1 in each row (E: the
# embeddings):
#
# $$\text{head} + \text{relation} - \text{tail of all triples} \;=\; A\,E$$
#
# Nothing is copied first: each row of E is read where it is, and added to the result. A library may also have a **fused
# gather**, which does just that without A: PyTorch's is `embedding_bag`.

# %%
from torch.nn.functional import embedding, embedding_bag

triples = torch.randint(len(embeddings), (2000, 3), generator=torch.Generator().manual_seed(0))
signs = torch.tensor([1.0, 1.0, -1.0])
matrix = incidence(triples, signs, len(embeddings))
with LargestTensor() as gathering:
    gathered = by_gather(embeddings, triples, signs)
with LargestTensor() as multiplying:
    multiplied = by_product(embeddings, matrix)
factors = signs.expand(len(triples), -1).contiguous()
with LargestTensor() as fusing:
    fused = embedding_bag(triples, embeddings, mode="sum", per_sample_weights=factors)
print(f"A: {list(matrix.shape)}, {len(matrix.values()):,} entries; a small part of it:")
print(incidence(torch.tensor([[0, 2, 3], [1, 4, 0]]), signs, 5).to_dense())
print(
    f"largest tensor: {gathering.numbers:,} numbers by gathering, {multiplying.numbers:,} by the product, "
    f"{fusing.numbers:,} by the fused gather"
)
claim(
    "All three are the same.",
    torch.allclose(gathered, multiplied, atol=1e-4) and torch.allclose(gathered, fused, atol=1e-4),
)
claim("Gathering makes a copy three times as large as the result.", gathering.numbers == 3 * multiplying.numbers)

# %% tags=["nbval-ignore-output"]
singles = triples[:, :1]
as_matrix = incidence(singles, signs[:1], len(embeddings))
taken = {
    "triples, gathered": seconds(lambda: by_gather(embeddings, triples, signs)),
    "triples, product": seconds(lambda: by_product(embeddings, matrix)),
    "triples, fused gather": seconds(
        lambda: embedding_bag(triples, embeddings, mode="sum", per_sample_weights=factors)
    ),
    "single rows, gathered": seconds(lambda: embedding(singles[:, 0], embeddings)),  # as a model does it
    "single rows, product": seconds(lambda: by_product(embeddings, as_matrix)),
}
for name, time in taken.items():
    print(f"{name:24} {1e3 * time:7.2f} ms")
gains = [taken[f"{what}, gathered"] / taken[f"{what}, product"] for what in ("triples", "single rows")]
print(f"the product is {gains[0]:.1f} times as fast for triples, {gains[1]:.1f} times for single rows")
fastest = taken["triples, product"] / taken["triples, fused gather"]
print(f"the fused gather is {fastest:.1f} times as fast as the product")
claim("For triples the product is faster than gather and sum.", gains[0] > 1.2, measured=True)
claim("It is not faster than the fused gather.", fastest > 1, measured=True)
claim("For single rows most of that gain is gone, or all of it.", gains[1] < gains[0] / 1.5, measured=True)

# %% [markdown]
# **Verdict.** It holds against gather and sum, and not against a fused gather: no copy is made there either, and there is
# no A to be read. (Making A is not in these times. Where the triples change with every batch, it would have to be added.)
# And there is nothing in an engine to use it for. A language model looks up *one* row per token: a row of A has a single
# 1, and nothing is added up. Where an engine does sum over gathered rows, in attention, the factors are new for every
# query, and a fused kernel does gather and sum (lesson 9).
#
# ## Break it
#
# A common first mistake when training in chunks: nothing goes back over the boundary
# (**[truncated backpropagation](glossary.md#truncated-backpropagation)**). **Guess first**: which of four checks finds it? The
# loss, the memory, the gradients of a text of one chunk, or of four?

# %%
print(f"{'':22}{'loss':>9}{'MB kept':>9}{'gradients differ by':>21}")
found = {}
for length in (CHUNK, 4 * CHUNK):
    text = texts.read[: length + 1]
    right, right_loss, right_saved = training.train(model, text, CHUNK, my_backward)
    cut, cut_loss, cut_saved = training.train(model, text, CHUNK, training.truncated)
    found[length] = training.difference(cut, right)
    print(f"{length:4} tokens, right      {right_loss:9.4f}{right_saved.peak / 1e6:9.0f}")
    print(f"{length:4} tokens, truncated  {cut_loss:9.4f}{cut_saved.peak / 1e6:9.0f}{found[length]:21.0%}")
    claim("The loss is the same.", cut_loss == right_loss)
    claim("The memory is the same, within a tenth.", abs(cut_saved.peak / right_saved.peak - 1) < 0.1)
del right, cut
claim("With one chunk the gradients are the same, too.", found[CHUNK] < 1e-4)
claim("With four they are not.", found[4 * CHUNK] > 0.05, of_model=True)

# %% [markdown]
# Only the gradients of a text with several chunks show it: tokens never learn to be useful to those of later chunks.
#
# ## In the field

# %%
quoted("Inf-CL: two orders of magnitude less memory at comparable speed", "Cheng et al. 2024, abstract")
quoted(
    "OOMB: a constant memory footprint of activations, contexts of millions of tokens",
    "Out of the Memory Barrier, 2026, abstract",
)
quoted(
    "Acceleration of block low-rank models on small GPUs; such methods learn compact representations of weight matrices",
    "Abillama et al. 2025, title and abstract",
)
quoted(
    "BiMaCoSR: 23.8 times smaller and 27.4 times faster than full precision, for super-resolution of images",
    "BiMaCoSR, 2025, abstract",
)
quoted("MEC: over 50 times less memory for the tables of recommendation models", "MEC, 2025, abstract")
quoted("SparseTransX: less training time and memory for embeddings of knowledge graphs", "Anik and Azad 2025, abstract")

# %% [markdown]
# **Claims, checked.** All figures are of a small model whose weights were not trained for any of this.
#
# | idea | what holds here | belongs in an inference engine? |
# |---|---|---|
# | contrastive loss in tiles | exactly the same gradients, memory linear in the batch. 3.7 times less than the matrix for the largest batch above, and the factor grows with the batch. Two orders of magnitude, at larger batches and against other ways that save memory, were not tested, nor was the speed in this lesson | no: training only. The engine has its merge in attention |
# | OOMB | the same gradients, activations of one chunk; keys and values still grow | no: training only. Its forward half is chunked prefill |
# | BLAST | with a quarter of the numbers a little better than an SVD; both lose most of the matrix. The acceleration in Abillama et al.'s title is not built here, and no speed was measured | only for models that were trained in this form |
# | Monarch | no better than an SVD on this matrix | the same |
# | BiMaCoSR | exact weights help; far behind INT4. With 2% of them exact 16 times smaller than float32, with 0.5% 25 times. No speed was measured | its sparse part, yes, as in dense-and-sparse weights. One bit only for models trained with it |
# | MEC | weighting by frequency helps what is read; codes of one to two bits lose far more than INT4, most of all as the output layer. They take a tenth of float16's bytes, not a fiftieth | no |
# | SparseTransX | faster and smaller than gather and sum, but not faster than a fused gather | no: an engine looks up single rows |
#
# | system | what of this it has |
# |---|---|
# | Liger Kernel, Cut Cross-Entropy | a language model's loss without its logits: exercise 1, fused into a kernel; transformers' `use_liger_kernel` switches it on |
# | PyTorch `checkpoint`, DeepSpeed, Megatron-LM | recomputation, by layers; context parallelism for long texts |
# | BitNet, in bitnet.cpp | weights of 1.58 bits, in models that are trained with them |
# | vLLM, SGLang, llama.cpp | 4 and 8 bits with scales per group; llama.cpp also others from 1.6 to 6.6 bits, the fewest only with an importance matrix from calibration text; no low rank in place of weights. Low rank is *added* to weights: LoRA |
# | minillm | `minillm.beside`, measured by `minillm bench beside` |
#
# **Papers.** Cheng et al. 2024, *Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss*.
# *Out of the Memory Barrier* (OOMB), 2026. Lee et al. 2024, *BLAST*. Abillama et al. 2025, *Memory-Efficient
# Acceleration of Block Low-Rank Foundation Models on Resource Constrained GPUs*. Dao et al. 2022, *Monarch*.
# *BiMaCoSR*, 2025. *A Universal Framework for Compressing Embeddings in CTR Prediction* (MEC), 2025. Anik and Azad
# 2025, *SparseTransX*.
#
# ## Recap
#
# 1. A log-sum-exp merges from tiles: no matrix of similarities or logits need exist, in a loss as in attention.
# 2. Recompute a chunk, and add the gradients that later chunks computed for its keys and values: equal gradients,
#    activations of one chunk.
# 3. This model's matrices use all directions. A low-rank form, in blocks or not, loses much; four bits lose little.
# 4. Weights by frequency move the error to where it is not read. Whether that pays depends on how much of the model the
#    table is.
# 5. Ask of every idea: is there such a step in *my* system, what share of the bytes or the time is it, and what is the best
#    plain way? Then measure against that.
#
# This is where the course ends. `docs/techniques.md` has a line like those above for most published techniques that are built here.
