# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 13. Compressing the cache
#
# **Question.** *Which half of the cache can you throw away?*
#
# The [KV cache](glossary.md#kv-cache) of a layer is a block of numbers: tokens × heads × channels × bits. Lesson 4 cut
# bits. Lesson 12 cut tokens, but only for a drafter, so that the text stayed the target's. Here the compressed cache is
# the **only** cache. What it loses is lost, and the text may change.
#
# You cut along five directions: channels (ThinK), a [low rank](glossary.md#low-rank) (LoRC), codes of a
# [codebook](glossary.md#codebook) (CommVQ), tokens (SnapKV and windows, which you know from lesson 12), and reads
# (Squeezed Attention, which stores everything and reads little). One of your functions shows why
# [RoPE](glossary.md#rope) stands in the way of two of them. At the end all compete at equal bytes.
#
# You need lesson 1 (RoPE) and lesson 4 (quantised caches). Everything runs on a laptop's CPU, in plain PyTorch: your own
# functions run inside the engine's cache layouts.

# %%
import os

import torch

from minillm.cache.lorc import projection
from minillm.cache.snapkv import observed_mass, pooled
from minillm.models.rope import inverse_frequencies
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop import l13_layouts as layouts
from minillm.teaching.workshop import l13_measure as measure
from minillm.teaching.workshop import l13_rope as rope
from minillm.viz import CodebookCells, KeptCache, KeptPart, PointCloud
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.charts.zoo_chart import zoo_chart

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # a Llama, Mistral, Qwen2 or SmolLM checkpoint works too
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

LENGTH = 512  # tokens of each text; all but the last 64 are the prompt, which is compressed
bench = measure.Bench(NAME, LENGTH, rows=2, tasks=4, distance=200)
model, shape, prompt_len = bench.model, bench.shape, bench.prompt_len
LAYER = shape.num_layers // 2  # the layer that the examples look at
frequencies, _ = inverse_frequencies(shape.rope, shape.head_dim)
recorder = measure.record(model, bench.rows[0])  # queries, keys and values of the first text, of every layer
print(f"{NAME}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim} channels")
print(
    f"texts: {len(bench.rows)} held-out files, prompts of {prompt_len} tokens; "
    "the tokens after each prompt are scored, except the first"
)

# %% [markdown]
# **How quality is measured here.** A prompt is read and compressed, then the file's true continuation is fed. (ThinK,
# SnapKV and Squeezed Attention act when the prompt is complete. The others compress while it is read, so later
# tokens of the prompt see compressed ones already.) At each token of the continuation but the first (which the prompt's
# last token predicts), the prediction is compared with that of the plain cache: the mean [KL
# divergence](glossary.md#kl-divergence), and how often the argmax is the same. It is a small version of
# `minillm bench zoo`, made with its functions.
#
# ## Predict
#
# Write a number for each before you go on.
#
# 1. ThinK drops half of the channels of every old key, and leaves the last 32 tokens whole. Of 100 bytes of the
#    prompt's cache, how many remain?
# 2. LoRC keeps half of the numbers of keys and values. For how many of 100 tokens is the argmax still the same?
# 3. Squeezed Attention groups similar old keys into clusters. For each query it estimates the attention weight of one
#    key of each cluster, and reads the clusters in which this is at least half of 1 / (number of keys). Of 100 old
#    keys, how many does it read?

# %%
predict("l13.bytes", None, unit="of 100")
predict("l13.rank", None, unit="of 100")
predict("l13.read", None, unit="of 100")

# %% [markdown]
# ## Build
#
# ### Exercise 1: which channels does nobody use?
#
# A score is a sum over channels, q · k = Σ q_c k_c. Over many queries and keys, channel c adds the matrix "column of all q_c
# times row of all k_c". Its size, the squared Frobenius norm, is Σ q_c² · Σ k_c². A channel in which the queries *or* the
# keys are small adds little, so ThinK (Xu et al. 2024) drops the [channels](glossary.md#channel) with the smallest product.
# Which queries? Those of the prompt's last tokens: what they need, the next tokens will probably need, too.
#
# Each KV head chooses for itself, for all query heads that share it ([GQA](glossary.md#gqa)).


# %%
def kept_channels(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` channels that each KV head keeps, ascending: [num_kv_heads, count], int64.

    queries: [n, num_heads, head_dim]; query heads 0 … g - 1 read KV head 0, the next g read KV head 1, and so on
    keys:    [m, num_kv_heads, head_dim]

    The score of a channel is the mean of q² (over the queries and the query heads of the KV head) times the mean of k²
    (over the keys). The highest scores stay, the earlier of equals.

    Example: one head, one query [1, 2, 1], one key [5, 1, 3], count 2: the scores are 25, 4, 9, so [[0, 2]].
    """
    ### BEGIN SOLUTION
    of_queries = queries.square().unflatten(1, (keys.shape[1], -1)).mean((0, 2))
    of_keys = keys.square().mean(0)
    best = (of_queries * of_keys).argsort(dim=1, descending=True, stable=True)[:, :count]
    return best.sort(dim=1).values
    ### END SOLUTION


# %%
check("l13.kept_channels")

# %% [markdown]
# Stuck? `hint("l13.kept_channels", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# Your choice inside the engine's layout `think`, with half of the channels. Two other choices stand beside it: the least
# used channels, and the channels with the largest keys, whatever the queries.

# %%
my_channels = use("l13.kept_channels")


def largest_keys(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """A choice that ignores the queries."""
    return my_channels(torch.ones_like(queries), keys, count)


think = {"key_share": 0.5}
engines = {
    "the engine's think": layouts.options("think", **think),
    "your channels": layouts.options(layouts.think_with(my_channels), **think),
    "largest keys": layouts.options(layouts.think_with(largest_keys), **think),
    "least used": layouts.options(layouts.think_with(layouts.least_used), **think),
}
found = {name: bench.logprobs(options) for name, options in engines.items()}
print("half of the key channels    mean KL   same argmax")
for name, logprobs in found.items():
    quality = bench.quality(logprobs)
    print(f"{name:24} {quality.mean_kl:10.4f} {quality.top1:12.0%}")
stored = bench.share_stored(engines["your channels"])
reveal("l13.bytes", round(100 * stored))
mine, engines_own = (bench.quality(found[name]).mean_kl for name in ("your channels", "the engine's think"))
claim("Your channels give what the engine's choice gives.", abs(mine - engines_own) < 0.02 * engines_own)
claim(
    "Half of the channels of the old keys is not half of the bytes: values and the newest keys stay whole.",
    0.75 < stored < 0.8,
)
claim(
    "Dropping the most used channels is much worse.",
    bench.quality(found["least used"]).mean_kl > 1.5 * mine,
    of_model=True,
)
claim(
    "The largest keys, whatever the queries, are nearly as good.",
    bench.quality(found["largest keys"]).mean_kl < 1.5 * mine,
    of_model=True,
)

# %% [markdown]
# The largest keys alone choose nearly as well: with this model, the queries add little to the choice. As
# built here, ThinK can never go below half of the bytes, because it leaves values alone.
#
# ### Exercise 2: truncate, and absorb
#
# Keys and values are made by a matrix: v = W x, with W of `kv_size` rows (all KV heads together) and `hidden` columns.
# The singular value decomposition (SVD) W = U S Vᵀ sorts the directions that can come out of it by size. Keep the first
# r columns U_r: then a value is stored as r numbers, z = U_rᵀ v, and read as U_r z. LoRC (Zhang et al. 2024) does this
# without data and without training. (It also keeps more in the first layers, whose errors pass through all others. Here
# every layer keeps the same share.)
#
# Reading looks expensive: U_r z for every old token, in every step. But look at what follows. The output of query head h is
# a weighted sum of values, and then the output projection O_h is applied:
#
# $$O_h \sum_j p_j \, U_r^{(h)} z_j \;=\; \left(O_h U_r^{(h)}\right) \sum_j p_j \, z_j$$
#
# The bracket is a matrix that can be computed once, before anything runs: U_r is
# **[absorbed](glossary.md#absorbed-projection)**, and no value is ever restored. U_r^(h) are those rows of U_r that belong to
# the KV head which query head h reads.


# %%
def low_rank(weight: torch.Tensor, out: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the basis [num_kv_heads · head_dim, rank] and the absorbed projection [num_heads, hidden, rank].

    weight: [num_kv_heads · head_dim, hidden], which makes the values of all KV heads, one head after the other
    out:    [num_heads, hidden, head_dim], what the output projection does with each query head; query heads
            0 … g - 1 read KV head 0, the next g read KV head 1, and so on

    The basis is the first `rank` left singular vectors of `weight`, as columns. Their signs do not matter.

    Example: weight [[3, 0, 0], [0, 1, 0]], one head, rank 1: the basis is [[1], [0]], and the absorbed projection is the
    first column of out[0].
    """
    ### BEGIN SOLUTION
    basis = torch.linalg.svd(weight, full_matrices=False).U[:, :rank]
    of_heads = basis.unflatten(0, (-1, out.shape[2]))
    group = len(out) // len(of_heads)
    return basis, out @ of_heads.repeat_interleave(group, 0)
    ### END SOLUTION


# %%
check("l13.low_rank")

# %% [markdown]
# First the absorption: one layer's attention output from the stored coordinates, once by restoring every value, once
# without.

# %%
my_low_rank = use("l13.low_rank")
weight, out = projection(model, LAYER, is_key=False)[0], layouts.out_projection(model, LAYER)
rank = shape.kv_size // 2
basis, absorbed = my_low_rank(weight, out, rank)
weights = measure.attention_weights(recorder.queries[LAYER][-1], recorder.keys[LAYER])  # [num_heads, n]
coordinates = recorder.values[LAYER].flatten(1) @ basis  # [n, rank]: all that is stored
restored = (coordinates @ basis.T).unflatten(1, (shape.num_kv_heads, -1))
of_heads = restored.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
by_restoring = torch.einsum("hn,nhd,hid->i", weights, of_heads, out)
by_absorbing = torch.einsum("hn,nr,hir->i", weights, coordinates, absorbed)
print(f"numbers stored per value: {rank} instead of {shape.kv_size}")
whole_rank = my_low_rank(weight, out, shape.kv_size)[1]
print(f"numbers in the output projection: {out.numel():,}; absorbed {absorbed.numel():,}")
print(f"(absorbed with the whole rank of {shape.kv_size}: {whole_rank.numel():,})")
claim("Both outputs are the same.", torch.allclose(by_restoring, by_absorbing, rtol=1e-3, atol=1e-4))
claim(
    "With a rank above head_dim, the absorbed projection is larger than the one that it replaces.",
    whole_rank.numel() > out.numel(),
    of_model=True,  # if it has more than one KV head
)

# %% [markdown]
# The last line is a limit of absorption: every query head now works on r coordinates instead of its `head_dim` channels.
#
# Now your basis inside the engine's layout `lorc`, for keys and values. (The layout uses only the basis: in plain
# PyTorch it restores values, too. A kernel could use the absorbed projection.) And beside it the question of where the
# basis should come from: LoRC takes it from the weights, so it knows what keys *can* be. The same function of yours,
# applied to keys of other texts, knows what keys *are*.

# %%
half = {"key_share": 0.5, "value_share": 0.5}
with_mine = bench.quality(bench.logprobs(layouts.options(layouts.lorc_with(my_low_rank), **half)))
with_engine = bench.quality(bench.logprobs(layouts.options("lorc", **half)))
whole = bench.quality(bench.logprobs(layouts.options("lorc", key_share=1.0, value_share=1.0)))
print(f"half of the ranks: mean KL {with_mine.mean_kl:.3f}, same argmax {with_mine.top1:.0%}")
reveal("l13.rank", round(100 * with_mine.top1))
claim("Your basis is the engine's.", abs(with_mine.mean_kl - with_engine.mean_kl) < 0.01 * with_engine.mean_kl)
claim("With all ranks nothing is lost.", whole.mean_kl < 1e-5)
claim("With half of them much is.", with_mine.mean_kl > 100 * whole.mean_kl, of_model=True)

# %% tags=["expected"] alt="Two falling lines over the rank, logarithmic: the share of the keys' squared length that is lost. The line for the basis from keys of other texts lies below the one for the basis from the weights."
other = measure.record(model, bench.material.calibration[0])
ranks = sorted({max(1, shape.kv_size * i // 8) for i in range(1, 8)})
lost = {"basis from the weights": [], "basis from keys of other texts": []}
own = [rope.before_rope(keys, frequencies).flatten(1) for keys in recorder.keys]
others = [rope.before_rope(keys, frequencies).flatten(1) for keys in other.keys]
for rank in ranks:
    sums = [0.0, 0.0]
    for layer in range(shape.num_layers):
        sources = projection(model, layer, is_key=True)[0], others[layer].T
        for i, source in enumerate(sources):
            sums[i] += rope.lost_share(own[layer], my_low_rank(source, out, rank)[0]) / shape.num_layers
    for name, value in zip(lost, sums, strict=True):
        lost[name].append(value)
LineChart(
    "What a low rank loses of the keys before RoPE (mean of all layers)",
    Axis(f"rank, of {shape.kv_size}", ticks=tuple(ranks)),
    Axis("lost share of the squared length", log=True),
    [Series(name, ranks, values) for name, values in lost.items()],
    "; ".join(
        f"{name}: {values[len(values) // 2]:.1%} at rank {ranks[len(ranks) // 2]}" for name, values in lost.items()
    ),
)

# %%
from_weights, from_keys = (values[len(ranks) // 2] for values in lost.values())
print(
    f"rank {ranks[len(ranks) // 2]}: lost {from_weights:.1%} with the weights' basis, {from_keys:.1%} with the keys' basis"
)
claim("A basis that has seen keys loses less.", from_keys < 0.9 * from_weights, of_model=True)

# %% [markdown]
# A small share of the *squared* length is a larger share of the length: where 6% of the square is lost, the error is
# about a quarter as long as the key (√0.06 ≈ 0.25). The layout makes such an error in the keys of every layer, and
# another one in the values, which this chart does not show. So a share that looks small can change many predictions.
#
# ### Exercise 3: why RoPE breaks the absorption
#
# For keys, absorption would be even nicer: q · (U z) = (Uᵀ q) · z, so the query takes U in, and no key is ever restored. But
# the key of a token at position p is R(p) U z, with RoPE's [rotation](glossary.md#rope-rotation) in between:
#
# $$q \cdot R(p)\, U z \;=\; \left(U^T R(p)^T q\right) \cdot z$$
#
# The bracket now depends on p: a query would need another one for every token. But suppose a head's key is M k: a fixed
# matrix M of the head's own channels, and a vector k that belongs to the token. The score is q · R(p) M k. If R(p) M =
# M R(p) for every p, this equals (Mᵀ q) · R(p) k: M is applied once, to the query, and serves all positions. So the
# question is which matrices **[commute](glossary.md#commute)** with the rotation. Write the test.
#
# R(p) consists of four blocks, each of them a diagonal matrix. Pair i, which is channels i and i + d / 2, turns by the
# angle p · f_i:
#
# $$R(p) = \begin{pmatrix} C & -S \\ S & C \end{pmatrix} \qquad C = \mathrm{diag}(\cos p f_i), \quad S = \mathrm{diag}(\sin p f_i)$$


# %%
def commutation_error(matrix: torch.Tensor, frequencies: torch.Tensor, positions: list[int]) -> float:
    """Return the largest ‖R M - M R‖ / ‖M‖ over the rotations R of these positions (Frobenius norms).

    matrix:      M, [d, d]
    frequencies: [d / 2], the angle per position of each pair of channels; pair i is channels i and i + d / 2
    positions:   at least one

    Example: M = [[2, 0], [0, 1]] and a quarter turn (frequency π / 2, position 1): R M - M R = [[0, 1], [1, 0]], so the
    result is √2 / √5 = 0.632.
    """
    ### BEGIN SOLUTION
    errors = []
    for position in positions:
        cos, sin = (position * frequencies).cos().diag(), (position * frequencies).sin().diag()
        rotation = torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))
        errors.append(float((rotation @ matrix - matrix @ rotation).norm() / matrix.norm()))
    return max(errors)
    ### END SOLUTION


# %%
check("l13.commutation_error")

# %%
my_error = use("l13.commutation_error")
positions, width = [1, 4, 16, 64], shape.head_dim
key_weight = projection(model, LAYER, is_key=True)[0]
of_head = my_low_rank(key_weight, out, shape.kv_size // 2)[0][:width]  # the basis' rows of KV head 0
x, y = torch.randn(2, width // 2, generator=torch.Generator().manual_seed(0))
mask = torch.zeros(width).index_fill(0, my_channels(recorder.queries[LAYER], recorder.keys[LAYER], width // 2)[0], 1)
matrices = {
    "the identity": torch.eye(width),
    "LoRC: one head's block of the projection": of_head @ of_head.T,
    "ThinK: half of a head's channels": mask.diag(),
    "half of the pairs, both channels": torch.cat((mask[: width // 2], mask[: width // 2])).diag(),
    "a scaled rotation of each pair": torch.cat(
        (torch.cat((x.diag(), -y.diag()), 1), torch.cat((y.diag(), x.diag()), 1))
    ),
}
errors = {name: my_error(matrix, frequencies, positions) for name, matrix in matrices.items()}
for name, error in errors.items():
    print(f"{name:40} {error:6.3f}   {'commutes' if error < 1e-4 else 'does not commute'}")
claim(
    "Scaled rotations commute with RoPE, and so does dropping whole pairs.",
    max(errors["a scaled rotation of each pair"], errors["half of the pairs, both channels"]) < 1e-4,
)
claim(
    "LoRC's projection does not: already its block of one head does not.",
    errors["LoRC: one head's block of the projection"] > 0.1,
    of_model=True,
)
masks = [
    torch.zeros(width).index_fill(0, kept, 1).diag()
    for queries, keys in zip(recorder.queries, recorder.keys, strict=True)
    for kept in my_channels(queries, keys, width // 2)
]
commuting = sum(my_error(each, frequencies, positions) < 1e-4 for each in masks)
print(f"ThinK's choice commutes in {commuting} of {len(masks)} KV heads (all layers)")

# %% [markdown]
# A mask of half of the channels commutes only if it keeps or drops both channels of each pair. The last line counts the
# heads in which ThinK's does. (The error of a mask is small if the pairs that it splits turn slowly: at these positions
# they have hardly turned.) Where it does not commute, that does no harm: ThinK drops channels from keys that *already*
# carry RoPE. LoRC cannot do that: its directions come from the weights and fit keys before RoPE; they fit keys after it
# much worse (Break it, below, measures that). So its layout stores coordinates of keys *before* RoPE, and restores and
# rotates them in every step. What if one absorbs all the same, and forgets the rotation?

# %% tags=["expected"] alt="A line per layer over the distance between query and key: the error of scores if the rotation is left out. It is small at distance 1 and large at the far end."
key_rank = shape.kv_size * 3 // 4
distances = [1, 2, 4, 8, 16, 32, 64, 128, 255]
wrong = {}
for layer in sorted({0, LAYER, shape.num_layers - 1}):
    key_basis = my_low_rank(projection(model, layer, is_key=True)[0], out, key_rank)[0]
    seen = recorder.queries[layer], recorder.keys[layer]
    wrong[layer] = rope.error_by_distance(*seen, key_basis, frequencies, [0, *distances])
LineChart(
    "Scores from an absorbed key projection without RoPE",
    Axis("tokens between query and key", log=True, ticks=(1, 4, 16, 64, 256)),
    Axis("error, as a share of the right scores"),
    [Series(f"layer {layer}", distances, values[1:]) for layer, values in wrong.items()],
    "; ".join(
        f"layer {layer}: {values[1]:.2f} at distance 1, {values[-1]:.2f} at 255" for layer, values in wrong.items()
    ),
)

# %%
for layer, values in wrong.items():
    far = max(values[5:])
    print(
        f"layer {layer}: error {values[0]:.3f} at distance 0, {values[1]:.2f} at distance 1, at most {far:.2f} from 16 on"
    )
claim("Query and key at the same position: no error.", max(values[0] for values in wrong.values()) < 1e-3)
claim(
    "In each of these layers, at some distance from 16 on, the error is more than half of the right scores.",
    min(max(values[5:]) for values in wrong.values()) > 0.5,
    of_model=True,
)

# %% [markdown]
# ### Exercise 4: a codebook that commutes
#
# A codebook stores, in place of a vector, the number of the nearest of its **centres**. CommVQ (Li et al. 2025) codes keys
# before RoPE: there, equal tokens have similar keys, wherever they stand.

# %% tags=["expected"] alt="Two squares with the same pair of channels of a layer's keys. Before RoPE the points lie close together, and sixteen centres are close to them. After RoPE they are spread around the origin, and the same number of centres loses much more."
CENTRES = 16
pairs = {
    "before RoPE": rope.pairs_of(rope.before_rope(recorder.keys[LAYER], frequencies)),
    "after RoPE": rope.pairs_of(recorder.keys[LAYER]),
}
fits = {name: rope.clustered(points, CENTRES) for name, points in pairs.items()}
ratio = fits["after RoPE"][1] / fits["before RoPE"][1]
pair = int(ratio.argmax())
clouds = [
    PointCloud(name, [*map(tuple, pairs[name][pair].tolist())], [*map(tuple, fits[name][0][pair].tolist())])
    for name in pairs
]
CodebookCells(f"Layer {LAYER}, the pair of channels in which RoPE makes the largest difference", clouds)

# %%
for name, (_, lost_of_pairs) in fits.items():
    print(
        f"{name:12} {CENTRES} centres lose {float(lost_of_pairs.mean()):.1%} of the squared length, mean of all pairs"
    )
claim(
    "After RoPE, equally many centres lose more.",
    float(fits["after RoPE"][1].mean()) > 1.1 * float(fits["before RoPE"][1].mean()),
    of_model=True,
)

# %% [markdown]
# A pair (x, y) of a centre is the matrix [[x, −y], [y, x]] times (1, 0): a scaled rotation. Exercise 3 says that it commutes
# with R(p). So the *centres* can move to the query's side. For one pair, with the angle a = p · f:
#
# $$q \cdot R(p) \begin{pmatrix} x \\ y \end{pmatrix} \;=\; \cos a \cdot (\ldots) + \sin a \cdot (\ldots)$$
#
# The brackets depend on the query and the centre, not on the token. So a table of all centres is made once per query. For a
# token there remain a look-up by its code, and its own cosines and sines. No key is decoded.


# %%
def absorb_centres(query: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Return the table [2, k, d / 2] of one query and all centres: what stands beside the cosine, and beside the sine.

    query:   [d], already rotated to its own position; pair i is channels i and i + d / 2
    centres: [k, d], keys before RoPE

    The score of a token with centre c at position p is then the sum over pairs i of
    cos(p · f_i) · table[0, c, i] + sin(p · f_i) · table[1, c, i].

    Example: query [1, 2] and centre [3, 5] (one pair). Rotated by a, the centre is (3 cos a - 5 sin a, 3 sin a + 5 cos a),
    so the score is (3 + 10) cos a + (6 - 5) sin a, and the table is [[[13]], [[1]]].
    """
    ### BEGIN SOLUTION
    qx, qy = query.chunk(2)
    x, y = centres.chunk(2, dim=1)
    return torch.stack((qx * x + qy * y, qy * x - qx * y))
    ### END SOLUTION


# %%
check("l13.absorb_centres")

# %% [markdown]
# The engine's layout `commvq` stores a prompt with 2 bits per number. In keys, 8 channels share a code of one byte, and
# what is left is coded once more. (Values are coded by the signs of a learned rotation of them, one bit per number; what
# is left, by the signs of a second one.) Its codebooks are trained in this cell, on half of the engine's calibration
# texts. Your tables must give the scores of the keys that the layout restores.

# %%
my_centres = use("l13.absorb_centres")
CommVQ = rope.trained_once(model, bench.calibration_texts, bits=4)
commvq = bench.read(layouts.options(CommVQ, bits=2)).cache
query = recorder.queries[LAYER][prompt_len, 0]
looked_up = rope.looked_up_scores(my_centres, commvq, LAYER, query, prompt_len)
coded = commvq.restore(LAYER, True, commvq.keys[LAYER][:prompt_len]).unflatten(1, (shape.num_kv_heads, -1))
exact = commvq.rotate(LAYER, coded, commvq.positions[:prompt_len])[:, 0] @ query
print(f"a key takes {commvq.keys[LAYER].shape[1]} bytes for all KV heads; in float16 it takes {2 * shape.kv_size}")
per_token = 2 * shape.head_dim  # multiplications that a look-up saves: the rotation of a key
tables = 2 * 256 * 2 * shape.head_dim * shape.num_heads // shape.num_kv_heads
print(f"multiplications (counted): {tables:,} for the tables of a KV head, {per_token} fewer for every token")
print(f"so look-ups multiply less with more than {tables // per_token:,} tokens")
claim(
    "Scores by look-up are those of decoded and rotated keys.",
    torch.allclose(looked_up, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max())),
)

# %% [markdown]
# That is where the commuting codebook loses: with short contexts its tables cost more than they save. The engine's PyTorch
# path decodes; a kernel would look up.
#
# ### Exercise 5: read little, store everything
#
# Squeezed Attention (Hooper et al. 2024) throws nothing away. Offline, the keys of a prompt that many requests share are
# clustered, by direction, into one [centroid](glossary.md#centroid) for about 20 tokens. (Here that is the prompt without
# its last 32 tokens, which are always read.) A query is compared with the centroids, and attends exactly to the keys of
# the clusters that matter:
#
# $$S_i = \frac{e^{q \cdot C_i / \sqrt d}}{\sum_j N_j \, e^{q \cdot C_j / \sqrt d}} \qquad \text{keep cluster } i \text{ if } S_i \ge \frac{t}{N}$$
#
# (The factor 1/N, so that one t suits prompts of all lengths, is this engine's.) C_i is the mean key of cluster i, and
# N_i its number of keys. S_i estimates the attention weight of *one* of its keys, and 1 / N is what each of all N keys
# would have under equal attention. One threshold t serves all heads and layers: a head with sharp attention reads little,
# a head with flat attention reads much. The query heads of a KV head share what is loaded, so here their S_i are
# averaged.


# %%
def kept_clusters(
    queries: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Return which clusters are read: [num_clusters], bool.

    queries:   [g, head_dim], one token's queries of the query heads that share this KV head
    centroids: [num_clusters, head_dim]
    sizes:     [num_clusters], the number of keys of each cluster, at least 1, as floats
    threshold: in multiples of the weight of equal attention, 1 / (number of keys)

    Scores can be in the thousands: e^score would overflow.

    Example: one query [0, 0]: every key has equal weight, so all clusters are read at threshold 0.99, and none at 1.01.
    """
    ### BEGIN SOLUTION
    scores = queries @ centroids.T * queries.shape[1] ** -0.5
    total = (scores + sizes.log()).logsumexp(1, keepdim=True)
    weights = (scores - total).exp().mean(0)
    return weights * sizes.sum() >= threshold
    ### END SOLUTION


# %%
check("l13.kept_clusters")

# %%
my_clusters = use("l13.kept_clusters")
runners = {
    "your clusters": bench.read(layouts.options(layouts.squeezed_with(my_clusters), threshold=0.5)),
    "the engine's squeezed": bench.read(layouts.options("squeezed", threshold=0.5)),
}
outputs = {name: bench.step(runner) for name, runner in runners.items()}
read = {name: runner.cache.share_read for name, runner in runners.items()}
for name, share in read.items():
    print(f"{name:22} one decode step reads {share:.1%} of the old keys")
reveal("l13.read", round(100 * read["your clusters"]))
claim(
    "Your clusters are the engine's, and so is what the model predicts.",
    abs(read["your clusters"] - read["the engine's squeezed"]) < 0.01
    and torch.equal(*(logits.argmax(-1) for logits in outputs.values())),
)
claim("At least a third of the old keys is not read.", read["your clusters"] < 2 / 3, of_model=True)

# %% [markdown]
# ### See: what may a query read?
#
# The cache of KV head 0 of one layer, at the prompt's end (for LoRC, the coordinates of all KV heads). Your functions
# chose ThinK's channels and the clusters of Squeezed Attention.

# %% tags=["expected"] alt="Six panels of the same cache, a token per column. ThinK: horizontal stripes, the kept channels, over all old tokens. LoRC: the upper half, the first ranks. A window: only the newest tokens. SnapKV: most columns directly before the newest tokens, and two small groups further back. Squeezed Attention for two queries: two different sets of columns."
WINDOW, QUARTER = 32, prompt_len // 4
old = prompt_len - WINDOW
queries, keys = recorder.queries[LAYER][:prompt_len], recorder.keys[LAYER][:prompt_len]
channels = set(my_channels(queries[-WINDOW:], keys, shape.head_dim // 2)[0].tolist())
mass = pooled(observed_mass(queries[-WINDOW:], keys)[:, :old], 7)[0]
chosen = set(mass.argsort(descending=True, stable=True)[: QUARTER - WINDOW].tolist())
every, all_tokens = [True] * shape.head_dim, [True] * prompt_len
centroids, sizes, labels = next(iter(runners["your clusters"].cache.requests.values())).layers[LAYER].parts[:3]


def squeezed_part(name: str, position: int) -> KeptPart:
    """What the token at this position reads of the old keys of KV head 0."""
    of_token = recorder.queries[LAYER][position : position + 1]
    clusters = layouts.kept(my_clusters, of_token, centroids, sizes, 0.5)[0, 0]
    tokens = [*clusters[labels[0].long()].tolist(), *all_tokens[old:]]
    return KeptPart(name, "channels", every, tokens, old, "all is stored; another token reads other keys")


parts = [
    KeptPart(
        "ThinK: half of the key channels",
        "channels",
        [channel in channels for channel in range(shape.head_dim)],
        all_tokens,
        old,
        "keys only: values keep all channels",
    ),
    KeptPart(
        "LoRC: half of the ranks",
        "ranks",
        [i < shape.kv_size // 2 for i in range(shape.kv_size)],
        all_tokens,
        prompt_len,
        "coordinates of all KV heads together",
    ),
    KeptPart("window: a quarter of the tokens", "channels", every, [False] * prompt_len, prompt_len - QUARTER),
    KeptPart(
        "SnapKV: a quarter of the tokens",
        "channels",
        every,
        [i in chosen for i in range(prompt_len)],
        old,
        "chosen once, at the prompt's end",
    ),
    squeezed_part("Squeezed Attention: the next token", prompt_len),
    squeezed_part("Squeezed Attention: 40 tokens later", prompt_len + 40),
]
KeptCache(parts)

# %% [markdown]
# ## Measure
#
# All techniques at equal bytes. The budget is a share of what the prompt takes in float16; bytes are counted on the
# real caches. For Squeezed Attention the budget is what a step *reads*; its threshold is calibrated on other texts. Not
# every technique is measured at every budget: some have no size that small, others are left out to save time. INT4 and
# KIVI are made larger than in lesson 4, so that they fill half: INT4 has a scale and a zero point for every 8 numbers,
# KIVI a long window of the newest tokens in full precision. LoRC has one rank fewer here than half or three quarters of
# them, because the bytes of a stored position count: so it loses a little more than in exercise 2 and under Break it.
# After the mean KL comes its standard error over the scored tokens. Recall: a definition stands 200 tokens back, the
# prompt's end repeats its first tokens, and the mean negative log-probability of the tokens that follow in the
# definition is measured (in nats, the unit of natural logarithms; lower is better). There are only four such tasks of
# eight tokens each, and no error is printed: do not rely on differences of a tenth or so.

# %% tags=["nbval-ignore-output"]
BUDGETS = {
    0.125: ["commvq"],
    0.25: ["window", "snapkv", "squeezed", "commvq"],
    0.5: ["int4", "kivi", "lorc", "snapkv", "squeezed"],
    0.75: ["think", "lorc"],
}
outcome = bench.zoo(BUDGETS, {"commvq": CommVQ})
at = {row["system"]: row for row in outcome["rows"]}
kl = {name: row["quality"]["mean_kl"] for name, row in at.items()}
print("system           bytes   mean KL            same argmax   recall (nats)")
for row in sorted(outcome["rows"], key=lambda row: (row["budget"] or 1, row["quality"]["mean_kl"])):
    quality, nats = row["quality"], row["recall"][0]["nats"]
    print(
        f"{row['system']:15} {row['share']:6.1%} {quality['mean_kl']:9.4f} ± {quality['mean_kl_error']:.4f} "
        f"{quality['top1']:13.0%} {nats:11.2f}"
    )
guess = outcome["config"]["recall_without_definition"][0]["nats"]
print(f"recall without the definition, plain cache: {guess:.2f}")
apart = kl["squeezed 25%"] - kl["snapkv 25%"]
error = sum(at[name]["quality"]["mean_kl_error"] ** 2 for name in ("squeezed 25%", "snapkv 25%")) ** 0.5
print(f"squeezed 25% minus snapkv 25%: {apart:+.4f} ± {error:.4f}, if they were measured on different tokens")

# %%
claim(
    "At half of the bytes, fewer bits are nearer to the plain cache than fewer ranks or fewer tokens.",
    max(kl["int4 50%"], kl["kivi 50%"]) < min(kl["lorc 50%"], kl["snapkv 50%"]) / 1.5,
    of_model=True,
)
claim(
    "At a quarter, a trained codebook is nearer than a window.",
    kl["commvq 25%"] < kl["window 25%"] / 1.5,
    of_model=True,
)
claim(
    "Twice the bits of a codebook lose much less.",
    kl["commvq 25%"] < kl["commvq 12.5%"] / 1.5,
    of_model=True,
)
claim(
    "Twice the reads of Squeezed Attention lose much less, too.",
    kl["squeezed 50%"] < kl["squeezed 25%"] / 1.5,
    of_model=True,
)
claim(
    "Half of LoRC's ranks lose the most of all, more than a codebook at an eighth of the bytes.",
    kl["lorc 50%"] == max(kl.values()),
    of_model=True,
)
claim(
    "More bytes help: LoRC and SnapKV.",
    kl["lorc 75%"] < kl["lorc 50%"] and kl["snapkv 50%"] < kl["snapkv 25%"],
    of_model=True,
)

# %% [markdown]
# In the chart the dashed line, the Pareto front, joins those that no other beats in both bytes and KL.

# %% tags=["expected", "nbval-ignore-output"] alt="Points for each technique: bytes of the prompt as a share of float16, against the mean KL divergence to the plain cache, logarithmic. A dashed line joins those that no other beats in both."
zoo_chart(outcome)

# %% [markdown]
# ### Where each one loses
#
# | technique | keeps | loses |
# |---|---|---|
# | INT4, and KIVI with four bits, as here (lesson 4) | every number, roughly | four bits and their scales are more than a quarter of float16, so they do not fit into a quarter |
# | ThinK | the key channels that the last queries used | at most half of the bytes can go; later queries may need other channels |
# | LoRC | what the weights make large | with this model a low rank loses much; keys must be restored and rotated in each step |
# | CommVQ | the nearest centre | codebooks must be trained, per model; coding a new key costs a search |
# | window, sinks | the newest tokens, with sinks also the first ones | all other tokens are gone |
# | SnapKV | what the prompt's last queries attended to | a later question about something else finds nothing |
# | Squeezed Attention | everything | saves no memory; clusters pay only for a prompt that is used many times |
#
# ## Break it
#
# Three mistakes in a compressed cache. **Guess first**: which of them would you find by looking at the predictions, which
# by counting bytes?

# %%
three_quarters = {"key_share": 0.75, "value_share": 0.75}
broken = {
    "think": engines["your channels"],
    "think, least used channels": engines["least used"],
    "think, zeros instead": layouts.options(layouts.ZeroedChannels, **think),
    "lorc": layouts.options("lorc", **three_quarters),
    "lorc, keys with RoPE": layouts.options(layouts.LatentsAfterRope, **three_quarters),
}
known = {"think": found["your channels"], "think, least used channels": found["least used"]}
results = {}
print("                              mean KL   bytes of the prompt")
for name, options in broken.items():
    logprobs = known[name] if name in known else bench.logprobs(options)
    results[name] = bench.quality(logprobs).mean_kl, bench.share_stored(options)
    print(f"{name:28} {results[name][0]:8.4f} {results[name][1]:18.1%}")
claim(
    "Zeros predict the same as dropped channels, and save nothing.",
    abs(results["think, zeros instead"][0] - results["think"][0]) < 1e-6 and results["think, zeros instead"][1] >= 0.99,
)
claim(
    "Compressed after RoPE, the same rank loses more than before it.",
    results["lorc, keys with RoPE"][0] > 1.3 * results["lorc"][0],
    of_model=True,
)

# %% [markdown]
# * **The least used channels** take as many bytes as the right ones. The KL finds them.
# * **Zeros instead of dropped channels** give the right predictions at full size. Only counting real bytes finds them.
# * **Low rank after RoPE** gives the right number of bytes and worse predictions. At position 0 it loses no more than the
#   right one, because R(0) is the identity, so a test with a single token finds nothing.
#
# ## In the field

# %%
quoted("ThinK: over 20% less KV memory at comparable quality, on top of token eviction", "Xu et al. 2024")
quoted("LoRC: little loss with the cache at 55 to 60% of its size, no training", "Zhang et al. 2024")
quoted("CommVQ: 87.5% less KV cache at 2 bits", "Li et al. 2025")
quoted(
    "Squeezed Attention: 3.1 times fewer keys read without loss, 8 times with less than half a point",
    "Hooper et al. 2024",
)
quoted(
    "DeepSeek-V3: 512 latent numbers per token and layer, and 64 key channels with RoPE",
    "DeepSeek-AI 2024",
)

# %% [markdown]
# | system | what it does |
# |---|---|
# | DeepSeek's MLA, in vLLM and SGLang | a *trained* low rank. Exercise 3 is why it has two parts: latents without RoPE, whose up-projections are absorbed in decode, and a few separate channels with RoPE |
# | vLLM, SGLang, llama.cpp | fewer bits: vLLM has caches of 8 bits (FP8, INT8) and fewer (INT4, NVFP4; TurboQuant: 4 and 3), SGLang FP8 and FP4, llama.cpp 8 to 4 bits; windows for models that were trained with them |
# | transformers | quantised caches; token eviction by separate libraries, such as NVIDIA's kvpress |
# | minillm | `kv_cache_config={"layout": …}` with `think`, `lorc`, `commvq`, `squeezed`, `snapkv`, `window`, `sinks`, `kivi`; measured by `minillm bench zoo` |
#
# **Claims, checked.** The papers measured models hundreds to thousands of times as large, on tasks. Here: a small model,
# the distance from its own plain cache.
#
# | claim | what holds here | tested where |
# |---|---|---|
# | ThinK saves over 20% of the memory | the bytes are right. The plain cache's prediction is not kept: the argmax changes for a part of the tokens. (Tested alone, not on top of token eviction.) | exercise 1, Measure |
# | LoRC loses little at 55 to 60% | not with this model: with half of the ranks it loses the most of all techniques under Measure. (Not tested as in the paper: all layers keep the same share here.) The chart of exercise 2 shows how much of the keys is lost | exercise 2, Measure |
# | CommVQ works at 2 bits | it reaches an eighth of the bytes, with a loss that twice the bits make much smaller. (Not trained as in the paper: here one stage is fitted after the other, on a few texts.) | exercise 4, Measure |
# | Squeezed Attention reads a third without loss | a third was not measured; a quarter and a half are not without loss. Whether it loses less than SnapKV at a quarter of the bytes: see their difference and its error, printed under Measure | exercise 5, Measure |
#
# **Papers.** Xu et al. 2024, *ThinK*. Zhang et al. 2024, *LoRC*. Li et al. 2025, *CommVQ*. Hooper et al. 2024, *Squeezed
# Attention*. Li et al. 2024, *SnapKV*. Liu et al. 2024, *KIVI*. DeepSeek-AI 2024, *DeepSeek-V3*.
#
# ## Recap
#
# 1. A cache can shrink along tokens, channels, ranks and bits, and a step can read less than is stored. Count bytes on the
#    real cache: zeros take as much room as other numbers.
# 2. A linear map of values can be absorbed into the output projection, and no value is ever restored.
# 3. For keys RoPE stands in between. Only what commutes with its rotations can be absorbed: scaled rotations of pairs.
# 4. A codebook of such centres turns a score into a look-up. A low rank has to be restored and rotated.
# 5. With this model, at half of the bytes, fewer bits per number lose less than fewer tokens, and much less than fewer
#    ranks. Below four bits there remain two-bit integers (KIVI's own size, not built here), trained codebooks, fewer
#    tokens, or reading less than one stores.
#
# **Next:** in lesson 14 keys and values are used again: from a file, over a link, at another position, after an edit.
