# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14. Moving and reusing the cache
#
# **Question.** *Keys and values of a text have been computed once. When may they be used again, and when is it faster
# to compute them again?*
#
# A [prefix cache](glossary.md#prefix-caching) uses keys and values again in the one case that is always right: the same
# tokens stand at the same place, after the same text. It takes no more than a hash. This lesson leaves that case in
# three ways:
#
# * keys and values lie **elsewhere**, on a disk or behind a slow link. Loading takes time, too;
# * the text stands at **another position**, because something before it was edited. Its keys are rotated for the old
#   one;
# * the text stands after **another text**. Then its keys and values are not those that the model would compute, and
#   somebody has to keep track of what is exact and what is approximate.
#
# You compute how long a text must be for loading to pay, split a transfer so that the processor works while the link is
# busy, move keys to other positions, and write the rule that decides which entry of a store may be used. Your functions
# run inside the engine's own methods: documents on disk (MatKV), partial recomputation (KVPR), edited prompts (PIE).
#
# You need lesson 1 (RoPE), lesson 2 (the cache) and lesson 6 (blocks and the prefix cache). Everything runs on a
# laptop's CPU. The engine runs each step as one [compiled function](glossary.md#compiled-step), which is compiled the
# first time it runs on a machine; that takes up to a minute behind a progress bar.

# %%
import math
import os
from tempfile import TemporaryDirectory

import torch

from minillm import LLM, SamplingParams
from minillm.models.rope import inverse_frequencies
from minillm.ops import rerotation
from minillm.reuse import offload
from minillm.reuse.document_store import DocumentStore
from minillm.reuse.scratch import Scratch
from minillm.teaching import check, claim, hint, predict, quoted, reveal, use
from minillm.teaching.workshop import l14_moving as moving
from minillm.teaching.workshop.l12_costs import EMBEDDING, H100, LLAMA_8B
from minillm.teaching.workshop.l12_views import long_prompts
from minillm.teaching.workshop.l14_store import Key, SpanStore
from minillm.viz import MovedSuffix, TimedPart, TransferRow, TransferTimeline
from minillm.viz.charts import Axis, LineChart, Series

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model

SIZE = {"device": "cpu", "max_num_seqs": 1}
llm = LLM(NAME, num_kv_blocks=512, **SIZE)
config = llm.engine.runner.model.config
LIMIT = min(llm.max_model_len, 1024)  # of the texts below, so that they take seconds
texts = long_prompts(llm, 3, LIMIT - 64)
store_folder = TemporaryDirectory()
store = DocumentStore(llm, store_folder.name)
print(f"{NAME}: contexts of up to {llm.max_model_len} tokens, texts of {len(texts[0])} here")

# %% [markdown]
# ## The question, in numbers
#
# What is there to be loaded? For each token, a key and a value in every layer. That is much more than the token itself.

# %%
path = store.add(texts[0])
text_bytes = len(llm.engine.tokenizer.decode(texts[0]).encode())
KV_BYTES = store.load(texts[0]).num_bytes // len(texts[0])
print(f"{len(texts[0])} tokens of text:  {text_bytes:>10,} bytes")
print(f"their keys and values: {KV_BYTES * len(texts[0]):>10,} bytes, {KV_BYTES:,} per token")
print(f"the file:              {path.stat().st_size:>10,} bytes")
claim(
    "Keys and values are what lesson 2 counted: two tensors, all layers, all KV heads.",
    2 * config.num_layers * config.kv_size * 4 == KV_BYTES,
)
claim("They take more than a thousand times the bytes of the text.", KV_BYTES * len(texts[0]) > 1000 * text_bytes)

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on.
#
# 1. On your machine, the keys and values of the text above lie in a file that the system has in memory. How many times
#    as fast as computing them is loading them?
# 2. A model with multi-head attention. Its cache comes back over a link, and sending all of it would take exactly as
#    long as recomputing all of it from the activations, the inputs of the layers. Activations are half as large as keys
#    and values, and must first cross the same link. After that, recomputing some tokens and sending the keys and values
#    of the others run at the same time. How many percent of the time can you save?
# 3. A comment is inserted into a file, or a line deleted, at a quarter of its length. The keys after it are only
#    rotated, not computed again. Of 100 tokens at the end of the file, for how many does the model still predict the
#    same next token?

# %%
predict("l14.load", None, unit="times as fast")
predict("l14.split", None, unit="% saved")
predict("l14.agree", None, unit="of 100")

# %% [markdown]
# ## Build
#
# ### Exercise 1: load or compute
#
# Loading has a **latency**, which does not depend on the length (find the file, the first byte), and then takes the
# time of the bytes. Computing takes about the same time for each token. So for a short text computing is faster, and
# for a long one loading is, *if* a token is loaded faster than it is computed. (Attention makes later tokens more
# expensive to compute. Leave that out.)


# %%
def break_even_tokens(kv_bytes: float, bandwidth: float, latency: float, seconds_per_token: float) -> float:
    """Return the number of tokens, not rounded, from which on loading keys and values is faster than computing them.

    kv_bytes:          bytes of one token's keys and values
    bandwidth:         bytes per second
    latency:           seconds until the first byte arrives, once for a text
    seconds_per_token: seconds to compute one token

    If loading is never faster, because a token takes at least as long to load as to compute, return math.inf.

    Example: 1024 bytes per token over 4096 bytes per second are 0.25 s; computing takes 1 s, the latency is 3 s. A token
    saves 0.75 s, so the result is 4.0: both take 4 s.
    """
    ### BEGIN SOLUTION
    saved = seconds_per_token - kv_bytes / bandwidth
    return latency / saved if saved > 0 else math.inf
    ### END SOLUTION


# %%
check("l14.break_even_tokens")

# %% [markdown]
# Stuck? `hint("l14.break_even_tokens", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# First for a large model, from data sheets. What a token takes to compute is at least two operations per parameter.
# (The embeddings do not count: a token looks up one row of the input's, and only the last token of a prompt needs the
# output's.) No prefill reaches the peak, so there is a second column at 40% of it. (The 40% and the latency are
# assumptions. An H100 has PCIe 5.0, twice as fast as the lanes of the last two lines.)

# %%
my_break_even = use("l14.break_even_tokens")
quoted("An H100 computes 989 TFLOP/s in dense bfloat16", "NVIDIA H100 data sheet")
quoted("Llama-3.1-8B: 8.03 billion parameters, 32 layers, 8 KV heads of 128", "its model card and config.json")
quoted("SATA 3: 6 Gbit/s, of which 8 in 10 bits are data", "Serial ATA, revision 3")
quoted("PCIe 4.0: 16 GT/s per lane, of which 128 in 130 bits are data", "PCI Express base specification 4.0")
LANE = 16e9 * 128 / 130 / 8
links = {
    "SATA 3": 6e9 * 8 / 10 / 8,
    "10-gigabit Ethernet": 10e9 / 8,
    "SSD on 4 lanes of PCIe 4.0": 4 * LANE,
    "host memory over 16 of them": 16 * LANE,
}
needed, in_layers = {}, LLAMA_8B.parameters - EMBEDDING
print(
    f"\nhow many tokens it takes until loading pays; {LLAMA_8B.kv_bytes:,} bytes per token, latency 0.1 ms (modelled)"
)
print(f"{'':29}{'GB/s':>6}{'compute at peak':>18}{'at 40% of it':>15}")
for name, bandwidth in links.items():
    for share in (1.0, 0.4):
        seconds = 2 * in_layers / (share * H100.flops)
        needed[name, share] = my_break_even(LLAMA_8B.kv_bytes, bandwidth, 1e-4, seconds)
    shown = (f"{math.ceil(n):,}" if math.isfinite(n) else "never" for n in (needed[name, 1.0], needed[name, 0.4]))
    print(f"{name:29}{bandwidth / 1e9:6.2f}" + "".join(f"{t:>{w}}" for t, w in zip(shown, (18, 15), strict=True)))
balance = LLAMA_8B.kv_bytes / (2 * in_layers / H100.flops)
print(
    f"a token loads as fast as it is computed at {balance / 1e9:.1f} GB/s (peak), {0.4 * balance / 1e9:.1f} GB/s (40%)"
)
claim(
    "Over SATA and Ethernet, loading never pays for this GPU.", all(math.isinf(needed[n, 0.4]) for n in list(links)[:2])
)
claim(
    "From an SSD it depends on how well prefill uses the GPU.",
    math.isinf(needed["SSD on 4 lanes of PCIe 4.0", 1.0]) and needed["SSD on 4 lanes of PCIe 4.0", 0.4] < 100,
)
claim("From host memory it always pays, from a few tokens on.", needed["host memory over 16 of them", 1.0] < 20)

# %% [markdown]
# The bandwidth at which both are equally fast is **KV bytes per token over seconds per token**. A faster processor
# raises it; a cache with fewer bytes (grouped heads, INT8) lowers it.
#
# Now your machine. The file was just written, so the system still has it in memory: this is the best case, not the
# speed of a disk. Times are processor time of this thread, so the work of other programs does not count.

# %% tags=["nbval-ignore-output"]
pieces_of = [texts[0][: len(texts[0]) * n // 8] for n in (1, 4, 8)]
compute, load = [], []
for ids in pieces_of:
    store.add(ids)
    compute.append(moving.prefill_seconds(llm, ids))
    load.append(moving.load_seconds(store, ids))
    print(f"{len(ids):5} tokens: compute {compute[-1] * 1e3:7.1f} ms, load {load[-1] * 1e3:6.2f} ms")
PER_TOKEN = compute[1] / len(pieces_of[1])
bandwidth = KV_BYTES * (len(pieces_of[2]) - len(pieces_of[0])) / max(load[2] - load[0], 1e-9)
latency = max(0.0, load[0] - KV_BYTES * len(pieces_of[0]) / bandwidth)
print(
    f"from these: {bandwidth / 1e9:.2f} GB/s and {latency * 1e3:.2f} ms of latency; "
    f"computing {PER_TOKEN * 1e6:.0f} µs per token"
)
print(f"loading pays from {my_break_even(KV_BYTES, bandwidth, latency, PER_TOKEN):.1f} tokens on")
reveal("l14.load", round(compute[2] / load[2], 1))
claim("From memory, loading the longest text is at least three times as fast.", compute[2] > 3 * load[2], measured=True)
claim("The longer text gains more than the short one.", compute[2] / load[2] > compute[0] / load[0], measured=True)

# %% [markdown]
# ### See: your number decides
#
# Below a `Reader` fetches documents over a link that is slower on purpose: four times as fast as computing, after a
# latency of 100 tokens' computing. It loads a document if it has at least as many tokens as *your* function says, and
# computes it otherwise. Its choice is then compared with the faster of the two ways.

# %% tags=["nbval-ignore-output"]
link = offload.Link(4 * KV_BYTES / PER_TOKEN)
threshold = my_break_even(KV_BYTES, link.bandwidth, 100 * PER_TOKEN, PER_TOKEN)
reader = moving.Reader(store, link, 100 * PER_TOKEN, threshold)
print(f"your break-even: {threshold:.1f} tokens")
rows = []
for length in (round(threshold / 4), math.ceil(threshold), len(texts[0])):
    ids = texts[0][:length]
    store.add(ids)
    llm.reset_prefix_cache()
    seconds = {way: reader.seconds(ids, way == "loaded") for way in ("computed", "loaded")}
    llm.reset_prefix_cache()
    rows.append((length, reader.prepare(ids), min(seconds, key=lambda way: seconds[way])))
    print(
        f"{length:5} tokens: compute {seconds['computed'] * 1e3:6.1f} ms, load {seconds['loaded'] * 1e3:6.1f} ms"
        f"; your reader: {rows[-1][1]}"
    )
claim(
    "Far below and far above the break-even, your reader took the faster way.",
    all(chosen == faster for _, chosen, faster in (rows[0], rows[-1])),
    measured=True,
)

# %%
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
llm.reset_prefix_cache()
chosen = reader.prepare(texts[0])
[after] = llm.generate({"prompt_token_ids": texts[0]}, GREEDY, use_tqdm=False)
llm.reset_prefix_cache()
[plain] = llm.generate({"prompt_token_ids": texts[0]}, GREEDY, use_tqdm=False)
print(f"{after.num_cached_tokens} of {len(texts[0])} tokens came from the prefix cache")
claim("Loaded or computed: the request writes the same text.", after.outputs[0].token_ids == plain.outputs[0].token_ids)

# %% [markdown]
# Near the break-even both ways take about as long, and either may be faster: your number comes from a text of half the
# full length, and in a shorter text a token usually takes less time to compute.
#
# This document stands where it was computed: at the beginning. So its keys and values are exact, to the last bit. From
# exercise 3 on that is not always so.
#
# ### Exercise 2: the overlap split
#
# While the link sends, the processor waits. KVPR (Jiang et al. 2024) lets it work. Beside keys and values it stores the
# **[activations](glossary.md#activations)**: the inputs of the layers. From an activation, key and value follow by the
# layer's norm, one small product and, for the key, the rotation: no attention and no MLP. So send the activations of the
# first *l* tokens, and while the processor recomputes their keys and values, send those of the others:
#
# ```text
# link      activations 0 … l-1 │ keys and values l … n-1 ──────────────►
# compute                       │ keys and values 0 … l-1 ────────►
# ```
#
# $$T(l) = \frac{l \cdot \text{hidden bytes}}{\text{bandwidth}} + \max\left(l \cdot \text{seconds per token},\ \frac{(n - l) \cdot \text{KV bytes}}{\text{bandwidth}}\right)$$
#
# Here *hidden bytes* are those of one token's activations, and *seconds per token* is only the time to recompute its
# keys and values from them, less than in exercise 1. Nothing is computed before the activations are there, so their
# time is added. It pays only if activations are smaller than the keys and values that they replace.


# %%
def best_split(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    """Return the l from 0 to num_tokens for which T(l) above is least; of equals the smallest.

    kv_bytes, hidden_bytes: of one token: its keys and values, its activations
    bandwidth:              bytes per second
    seconds_per_token:      seconds to recompute one token's keys and values from its activations

    If activations are at least as large as keys and values, the result is 0. Otherwise T is least where both sides of
    the maximum are equal, or at a whole number next to that.

    Example: 12 tokens, 8 and 4 bytes, 8 bytes per second, 1 s per token: for l = 6 the activations take 3 s, then both
    sides take 6 s. T(6) = 9 s is the least; T(0) = 12 s.
    """
    ### BEGIN SOLUTION
    if hidden_bytes >= kv_bytes:
        return 0
    balance = num_tokens * kv_bytes / (seconds_per_token * bandwidth + kv_bytes)

    def seconds(split: int) -> float:
        rest = (num_tokens - split) * kv_bytes / bandwidth
        return split * hidden_bytes / bandwidth + max(split * seconds_per_token, rest)

    return min(math.floor(balance), math.ceil(balance), key=seconds)
    ### END SOLUTION


# %%
check("l14.best_split")

# %% [markdown]
# When are activations smaller? Per layer an activation has *hidden* numbers; keys and values have 2 · KV heads · head
# size. With multi-head attention that is 2 · hidden (if the heads together are as wide as the hidden state), so an
# activation is half as large. With grouped heads it is soon *larger*.

# %% tags=["expected"] alt="Time of a transfer over the share of tokens that are recomputed, as a share of sending everything. The line of the model with multi-head attention falls to 0.75 in the middle and rises again. The lines of the bundled model and of Llama-3.1-8B only rise."
my_split = use("l14.best_split")
quoted("OPT-6.7B: hidden size 4096, 32 query heads and 32 KV heads of 128", "its config.json")
shapes = {"OPT-6.7B (multi-head)": (4096, 2 * 32 * 128), "Llama-3.1-8B": (4096, 2 * 8 * 128)}
shapes[NAME] = config.hidden_size, 2 * config.kv_size
N, curves, best = 1000, [], {}
for name, (hidden, kv) in shapes.items():  # numbers per layer; sending all takes as long as recomputing all: kv seconds
    times = [offload.transfer_seconds(split, N, kv, hidden, 1.0, kv) / (N * kv) for split in range(0, N + 1, 10)]
    curves.append(Series(name, [split / N for split in range(0, N + 1, 10)], times, style="modelled"))
    best[name] = my_split(N, kv, hidden, 1.0, kv)
    print(
        f"{name:22} activation {hidden:5} numbers, keys and values {kv:5}: recompute {best[name] / N:4.0%} of the tokens"
    )
LineChart(
    "A cache comes back; sending all of it would take as long as recomputing it (modelled)",
    Axis("share of the tokens that are recomputed"),
    Axis("time, as a share of sending everything"),
    curves,
    "; ".join(f"{name}: least at {split / N:.0%}" for name, split in best.items()),
)

# %%
hidden, kv = shapes["OPT-6.7B (multi-head)"]
gain = 1 - offload.transfer_seconds(best["OPT-6.7B (multi-head)"], N, kv, hidden, 1.0, kv) / (N * kv)
print(f"saved with multi-head attention: {gain:.0%}")
reveal("l14.split", round(100 * gain))
claim("With multi-head attention, recomputing half of the tokens saves a quarter of the time.", abs(gain - 0.25) < 1e-9)
claim("For Llama-3.1-8B, with eight KV heads, nothing is recomputed.", best["Llama-3.1-8B"] == 0)
claim(
    "Nor for the model of this lesson: its activations are larger than its keys and values.",
    best[NAME] == 0,
    of_model=True,
)
claim(
    "The engine's closed form gives the same splits.",
    all(offload.best_split(N, kv, hidden, 1.0, kv) == best[name] for name, (hidden, kv) in shapes.items()),
)

# %% [markdown]
# ### See: a real transfer
#
# The bundled model would gain nothing, so it is given another form: each KV head is copied for every query head that
# uses it. That is multi-head attention, the same function with a larger cache. (Nobody would do this to save time; it
# stands for the models for which KVPR was made.) Its cache is sent over a link that is throttled to half the speed of
# recomputing. The link is a thread that sleeps; the products are real. These are wall-clock times. (The speed of
# recomputing is measured just before. If the machine was busy then, and is not during the transfers, recomputing all
# can be the fastest. Run the cell again.)

# %% tags=["expected", "nbval-ignore-output"] alt="Three transfers over time, with a lane for the link and one for computing. Send everything: one long bar on the link. Best split: activations cross first, then recomputing and sending the rest run at the same time and end together; it is the shortest. Recompute all: activations on the link, then recomputing alone."
with moving.multi_head("minicoder", num_kv_blocks=2 * LIMIT // 16, **SIZE) as wide:
    offloader = offload.Offloader(wide)
    n = min(LIMIT, wide.max_model_len) // 2
    [text] = long_prompts(wide, 1, n)
    cache = offloader.offload(text)
    per_token = offloader.seconds_per_token(cache)
    slow = cache.kv_bytes / (2 * per_token)  # bytes per second
    split = my_split(n, cache.kv_bytes, cache.hidden_bytes, slow, per_token)
    transfers, crossed = {}, {}
    for name, recomputed in (("send everything", 0), (f"recompute {split}", split), ("recompute all", n)):
        runs = []
        for _ in range(3):
            wire = offload.Link(slow)
            runs.append(offloader.restore(cache, wire, recomputed))
        transfers[name] = min(runs, key=lambda run: run.seconds)
        crossed[recomputed] = wire.num_bytes
    exact = transfers[f"recompute {split}"].span
    with Scratch(wide, n) as scratch:
        scratch.forward(text, 0)
        prefilled = scratch.read(0, n, text)
del wide, offloader
TransferTimeline(
    f"The cache of {n} tokens comes back over {slow / 1e6:.1f} MB/s (measured)",
    [TransferRow(name, moving.as_parts(run.timeline)) for name, run in transfers.items()],
    f"multi-head form of minicoder: {cache.kv_bytes:,} bytes of keys and values per token, {cache.hidden_bytes:,} of activations",
)

# %%
claim(
    "Recomputed keys and values are those of a prefill, up to rounding.",
    torch.allclose(exact.keys, prefilled.keys, rtol=1e-3, atol=1e-3)
    and torch.allclose(exact.values, prefilled.values, rtol=1e-3, atol=1e-3),
)
claim(
    "As many bytes crossed the link as counted.",
    all(count == m * cache.hidden_bytes + (n - m) * cache.kv_bytes for m, count in crossed.items()),
)
print(f"multi-head form: an activation has {cache.hidden_bytes / cache.kv_bytes:.0%} of the bytes of keys and values")

# %% tags=["nbval-ignore-output"]
for name, run in transfers.items():
    recomputed = {"send everything": 0, "recompute all": n}.get(name, split)
    modelled = offload.transfer_seconds(recomputed, n, cache.kv_bytes, cache.hidden_bytes, slow, per_token)
    print(f"{name:16} modelled {modelled * 1e3:7.0f} ms, measured {run.seconds * 1e3:7.0f} ms")
balanced, sent = transfers[f"recompute {split}"].seconds, transfers["send everything"].seconds
print(f"saved: {1 - balanced / sent:.0%}")
claim("The best split is faster than sending everything.", balanced < sent, measured=True)
claim("It is faster than recomputing all, too.", balanced < transfers["recompute all"].seconds, measured=True)

# %% [markdown]
# The paper measured KVPR on a GPU with the cache in host memory, behind PCIe. There the link is much slower than the
# arithmetic.

# %%
quoted(
    "KVPR: up to 35.8% lower latency and 46.2% higher throughput while decoding",
    "Jiang et al. 2024, arXiv 2411.17089v2",
)
claim(
    "The model above allows at most 50%, where recomputing is free and activations are half as large.",
    abs(1 - offload.transfer_seconds(N, N, 2.0, 1.0, 1.0, 0.0) / (2 * N) - 0.5) < 1e-9,
)

# %% [markdown]
# ### Exercise 3: move keys
#
# Somebody edits line 20 of a file with 100 lines. The prefix cache has everything before the edit. Everything after it
# stands at other positions, and its keys have [RoPE](glossary.md#rope) inside, for the old ones. But rotations add up:
# a key at position p is $R(p)\,k$, and
#
# $$R(\delta)\,R(p)\,k = R(p + \delta)\,k$$
#
# So one further [rotation](glossary.md#re-rotation) moves it, without the weights and without knowing p. Values are not
# rotated. (Queries are not cached: a new token's query is computed at its new position.) PIE (He et al. 2024) does this
# to the suffix of an edit.


# %%
def rerotate(keys: torch.Tensor, frequencies: torch.Tensor, delta: int) -> torch.Tensor:
    """Return the keys, which were rotated for their positions, as they are `delta` positions further on.

    keys:        [..., head_dim]; channel i forms a pair with channel i + head_dim / 2
    frequencies: [head_dim / 2], the angle per position of each pair
    delta:       how far all of them move; negative for back

    A pair (x, y) that is rotated by an angle a becomes (x cos a - y sin a, y cos a + x sin a).

    Example: keys [[1, 2, 3, 4]], frequencies [π/2, 0], delta 1: the pair (1, 3) becomes (-3, 1), the pair (2, 4) stays,
    so the result is [[-3, 2, 1, 4]].
    """
    ### BEGIN SOLUTION
    angles = delta * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    ### END SOLUTION


# %%
check("l14.rerotate")

# %% [markdown]
# ### See: the suffix turns
#
# A small edit: a default value gets longer. After it everything moves by the same number of positions, and each
# channel pair turns by its own angle: the fast ones by a lot, the slow ones by next to nothing.

# %% tags=["expected"] alt="Two rows of tokens. Before: a prefix, a removed token, a suffix. After: the same prefix, three new tokens, and the suffix two positions further to the right, joined by a band. Below, five dials, each with a dashed hand for the old position and a solid one for the new: the first turns by 115 degrees, the last by less than two thousandths of a degree."
my_rotation = use("l14.rerotate")
frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
num_pairs = len(frequencies)
MovedSuffix(
    ["def", " area", "(", "w", ",", " h", "=", "1", ")", ":", "\n    ", "return", " w", " *", " h"],
    7,
    8,
    ["0", ".", "5"],
    [float(frequencies[i]) for i in (0, num_pairs // 8, num_pairs // 4, num_pairs // 2, num_pairs - 1)],
)

# %% [markdown]
# Your rotation in the engine: `edited_prompt` takes the keys of the old text, computes the new tokens, calls *your*
# function for the suffix, and puts the result into the prefix cache under a cache salt of its own (exercise 4 says why).

# %%
edits = moving.edits(llm, texts, place=0.25)
example = edits[0]
llm.reset_prefix_cache()
found = {}
for name, rotate in (("yours", my_rotation), ("the engine's", rerotation.rerotate)):
    prompt = example.prompt(llm, name, rotate)
    with Scratch(llm, len(example.after)) as scratch:
        known = scratch.copy_cached(example.after, name)
        found[name] = scratch.read(0, known, example.after[:known])
with Scratch(llm, len(example.after)) as scratch:
    scratch.forward(example.after, 0)
    right = scratch.read(0, known, example.after[:known])
edited = example.start + len(example.new)
off = [
    float(
        (found["yours"].keys[layer, edited:] - right.keys[layer, edited:]).abs().mean()
        / right.keys[layer, edited:].abs().mean()
    )
    for layer in range(config.num_layers)
]
print(f"{example.kind}: {len(example.new)} new tokens at {example.start}, {example.suffix} tokens move")
print("mean error of the moved keys, by layer: " + " ".join(f"{error:.1%}" for error in off))
claim(
    "Your function stores what the engine's own does.",
    torch.allclose(found["yours"].keys, found["the engine's"].keys, rtol=1e-3, atol=1e-3)
    and torch.equal(found["yours"].values, found["the engine's"].values),
)
claim("In the first layer the moved keys are right, up to rounding.", off[0] < 1e-3)
claim("In deeper layers they are not.", min(off[1:]) > 10 * off[0], of_model=True)

# %% [markdown]
# That is the price. The first layer's keys depend on the token and its position alone. In deeper layers keys *and values*
# depend on what the token attended to, and that was the *old* text. So PIE is **approximate**. By how much? The [KL
# divergence](glossary.md#kl-divergence) compares the predictions at the end of the text with those of a plain request.

# %%
llm.reset_prefix_cache()
plain_rows = [moving.computed(llm, edit.after) for edit in edits]
ways = {"rotated (PIE)": my_rotation, "not rotated": moving.unmoved}
rows_of = {name: [] for name in ways}
for edit in edits:
    for name, rotate in ways.items():
        llm.reset_prefix_cache()
        rows_of[name].append(moving.served(llm, edit.prompt(llm, name, rotate)))
print(f"the last {moving.SCORED} tokens of {len(edits)} edited texts, compared with computing everything")
print(f"{'':16}{'KL':>9}{'same argmax':>14}")
difference = {name: moving.Difference.between(plain_rows, rows) for name, rows in rows_of.items()}
for name, its in difference.items():
    print(f"{name:16}{its.kl:9.4f}{its.agree:14.1%}")
for kind in ("insert a comment", "delete a line"):
    chosen = [i for i, edit in enumerate(edits) if edit.kind == kind]
    its = moving.Difference.between([plain_rows[i] for i in chosen], [rows_of["rotated (PIE)"][i] for i in chosen])
    print(f"   {kind:20} rotated: KL {its.kl:.4f}, same argmax {its.agree:.1%}")
reveal("l14.agree", round(100 * difference["rotated (PIE)"].agree))
claim("Rotated keys change the predictions a little.", 0 < difference["rotated (PIE)"].kl < 0.1, of_model=True)
claim(
    "Keys that are left at their old positions change them at least five times as much.",
    difference["not rotated"].kl > 5 * difference["rotated (PIE)"].kl,
    of_model=True,
)

# %% [markdown]
# ### Exercise 4: what may be used
#
# You now have all the means to use an entry of a store in the wrong place. An entry is named by a **key** (of the store,
# not of attention): what determines its numbers. A prompt states the key that it *wants*. When do the two fit?
#
# | field | if it differs |
# |---|---|
# | `text`: hash of the tokens | other tokens: never |
# | `model`: fingerprint of the weights | other numbers, often of the same shape: never |
# | `dtype`, `format` | the bytes mean something else: never |
# | `start`: the position | keys can be moved by `wanted.start - entry.start` |
# | `before`: hash of all tokens before it | the tokens attended to something else: usable, but approximate |
#
# `before` decides whether an entry is *exact*. The same position is not enough: another text of the same length may
# have been before it. An exact entry has the same start, because it has the same text before it.


# %%
def find_entry(entries: list[Key], wanted: Key) -> tuple[int, int, bool] | None:
    """Return (index of the entry to use, positions by which its keys move, whether it is exact), or None: compute.

    Both have .text, .before, .start, .model, .dtype and .format, as in the table above.
    The first exact entry is used; if there is none, the first usable one.

    Example: the same text, model, dtype and format; stored at 0 with nothing before it, wanted at 40 after other
    tokens: (0, 40, False).
    """
    ### BEGIN SOLUTION
    same = (wanted.text, wanted.model, wanted.dtype, wanted.format)
    usable = [i for i, e in enumerate(entries) if (e.text, e.model, e.dtype, e.format) == same]
    for i in usable:
        if entries[i].before == wanted.before:
            return i, 0, True
    return (usable[0], wanted.start - entries[usable[0]].start, False) if usable else None
    ### END SOLUTION


# %%
check("l14.find_entry")

# %% [markdown]
# Your rule in a store. A file is cut into three documents. The store has each of them, computed *alone*, and the second
# one also as it stands after the first. A prompt puts them one after the other, and asks for the tokens that follow.
#
# What is exact is put into the prefix cache like any other prompt's blocks. What is not gets a **[cache
# salt](glossary.md#cache-salt)** of its own, so that no other request finds it.

# %%
my_find = use("l14.find_entry")
third = (len(texts[0]) - moving.SCORED) // 3
first, second, last = (texts[0][i * third : (i + 1) * third] for i in range(3))
question = texts[0][3 * third : 3 * third + moving.SCORED]
llm.reset_prefix_cache()
spans = SpanStore(my_find, rotate=my_rotation)
for before, text in (([], first), ([], second), ([], last), (first, second)):
    spans.add(llm, before, text, "base")
results = {}
for name, documents in {"first": [first], "first, second": [first, second], "all three": [first, second, last]}.items():
    made = spans.prompt(llm, documents, question, "base")
    ids = made.prompt["prompt_token_ids"]
    rows = moving.served(llm, made.prompt)
    llm.reset_prefix_cache()
    results[name] = made, moving.Difference.between([moving.computed(llm, ids)], [rows])
    llm.reset_prefix_cache()
    salt = made.prompt.get("cache_salt", "none")
    print(
        f"{name:14} entries {made.used}: {'exact' if made.exact else 'approximate'}, salt: {salt}, KL {results[name][1].kl:.6f}"
    )
claim(
    "Where your rule says exact, the predictions are the plain ones.",
    all(its.kl < 1e-6 for made, its in results.values() if made.exact),
)
claim(
    "The second document after the first is found as it was computed there.",
    results["first, second"][0].used == [0, 3],
)
claim("The third one was never computed after those two: approximate.", not results["all three"][0].exact)

# %% [markdown]
# ## Measure
#
# ### Documents on disk (MatKV): quality
#
# MatKV (Shin et al. 2025) builds a system from such approximate entries: each document is computed alone, once, and
# stored; a prompt is put together from them. (In exercise 4 the second document was found as computed after the first.
# Here each one was computed alone.) No document attends to another. Only the question attends to all of them. The
# engine's `DocumentStore` does it, with your rotation. How much is lost, and how much of it does the rotation save? For
# comparison: a prompt with the last document alone, computed as usual.

# %%
rotating = DocumentStore(llm, store_folder.name, rotate=my_rotation)
plain_rows, loaded = [], {"rotated": [], "as stored": [], "last one alone": []}
for text in texts:
    pieces = [text[i * third : (i + 1) * third] for i in range(3)]
    asked = text[3 * third : 3 * third + moving.SCORED]
    for piece in pieces:
        rotating.add(piece)
    llm.reset_prefix_cache()
    plain_rows.append(moving.computed(llm, [*text[: 3 * third], *asked]))
    loaded["last one alone"].append(moving.computed(llm, [*pieces[-1], *asked]))
    for name in ("rotated", "as stored"):
        llm.reset_prefix_cache()
        loaded[name].append(moving.served(llm, rotating.prompt(pieces, asked, rerotate=name == "rotated")))
print(f"three documents of {third} tokens and {moving.SCORED} tokens after them, {len(texts)} files")
print(f"{'':16}{'KL':>9}{'same argmax':>14}")
matkv = {name: moving.Difference.between(plain_rows, rows) for name, rows in loaded.items()}
for name, its in matkv.items():
    print(f"{name:16}{its.kl:9.4f}{its.agree:14.1%}")
claim("Documents that were computed alone change the predictions.", matkv["rotated"].kl > 1e-3, of_model=True)
claim(
    "Without rotation they change them at least five times as much.",
    matkv["as stored"].kl > 5 * matkv["rotated"].kl,
    of_model=True,
)
claim(
    "With rotation, three documents are better than the last one alone; without, they are worse.",
    matkv["rotated"].kl < matkv["last one alone"].kl < matkv["as stored"].kl,
    of_model=True,
)

# %% [markdown]
# ### Documents on disk: time
#
# Processor time, because here the "link" is the system's page cache, the files that it keeps in memory: nothing
# overlaps, and copying is work, too.

# %% tags=["expected", "nbval-ignore-output"] alt="Two rows over time. Compute everything: one long bar of prefill. Load three documents: short bars for loading and rotating, then the prefill of the question; it ends much earlier."
asked = texts[0][3 * third : 3 * third + moving.SCORED]
pieces = [texts[0][i * third : (i + 1) * third] for i in range(3)]
moving.load_timeline(rotating, pieces, asked)  # once for warming up
parts = moving.load_timeline(rotating, pieces, asked)
whole = moving.prefill_seconds(llm, [*texts[0][: 3 * third], *asked], rounds=3)
compared = [
    TransferRow(
        "compute everything", [TimedPart("compute", "prefill", 0.0, whole)], f"{3 * third + len(asked)} tokens"
    ),
    TransferRow("load three documents", parts, f"then {len(asked)} tokens"),
]
TransferTimeline(
    "Until the question is computed (measured)", compared, "processor time; the files are in the page cache"
)

# %% tags=["nbval-ignore-output"]
print(f"compute everything {whole * 1e3:.1f} ms, load and compute the question {compared[1].seconds * 1e3:.1f} ms")
print(f"{whole / compared[1].seconds:.1f} times as fast")
claim("Loading is at least twice as fast here.", whole > 2 * compared[1].seconds, measured=True)

# %% [markdown]
# Remember exercise 1: this is a file in memory. For a disk, compare its bandwidth with the KV bytes per token over the
# seconds per token.
#
# ### Edits (PIE): time, and where it loses
#
# An editor waits for the next token after an edit. Both ways find the prefix in the prefix cache. Recomputing computes
# the new tokens and the whole suffix; PIE computes the new tokens, rotates the suffix, and computes the last block
# again, because the last token's logits are needed. The place of the edit decides.

# %% tags=["nbval-ignore-output"]
taken = {}
print("edit at       tokens after it    recompute        PIE")
for place in (0.05, 0.5, 0.985):
    edit = moving.edits(llm, texts[:1], place)[0]
    again = moving.update_seconds(llm, edit, lambda salt, edit=edit: {"prompt_token_ids": edit.after}, rounds=2)
    moved = moving.update_seconds(llm, edit, lambda salt, edit=edit: edit.prompt(llm, salt, my_rotation), rounds=2)
    taken[place] = again, moved
    print(f"{place:7.1%} {edit.suffix:20} {again * 1e3:10.1f} ms {moved * 1e3:8.1f} ms   {again / moved:5.1f}×")
claim("Near the beginning PIE is at least three times as fast.", taken[0.05][0] > 3 * taken[0.05][1], measured=True)
claim(
    "Near the end it gains less than half of that, or loses.",
    taken[0.985][0] / taken[0.985][1] < taken[0.05][0] / taken[0.05][1] / 2,
    measured=True,
)

# %% [markdown]
# **Where these methods lose.**
#
# * *Loading* loses on a slow disk, and for short documents (exercise 1). It costs the bytes above for every token
#   stored.
# * *KVPR* loses wherever activations are not smaller than keys and values: with most models that have grouped heads, as
#   nearly all newer ones do (exercise 2).
# * *PIE* gains little near the end of a text, or loses: there the suffix is short. And it is approximate: the suffix
#   remembers the old text. The edits of exercise 3 are mild, and far from the tokens that are scored. If a variable is
#   renamed, later tokens still remember the old name; that is not measured here.
# * *MatKV* loses quality: no document knows of another one.
#
# ## Break it
#
# Five stores. Four of them have one mistake in the rule that decides whether an entry fits. Each has three entries: 0
# is another document that begins with the same tokens; 1 is the right document, but computed by *other weights* (they
# stand for the same model after more training; here, noise is added to them); 2 is the right document, computed alone
# by this model. The prompt is the first document, which no store has, so it is computed (`None`), and then the second.
# **Guess first**: which mistakes change the predictions most? Which one harms *other* requests?

# %%
from minillm.teaching.workshop.l14_broken import MISTAKES

tuned = LLM(NAME, enforce_eager=True, num_kv_blocks=LIMIT // 16, **SIZE)
with torch.inference_mode():
    noise = torch.Generator().manual_seed(0)
    for weights in tuned.engine.runner.model.layers.parameters():
        if weights.dim() == 2:
            weights.add_(torch.randn(weights.shape, generator=noise) * weights.std() * 0.3)
twin = [*second[:16], *texts[1][: third - 16]]  # begins like the second document
ids = [*first, *second, *question]
llm.reset_prefix_cache()
truth = moving.computed(llm, ids)
llm.reset_prefix_cache()
broken = {}
print(f"{'':26}{'entries used':>14}{'KL':>10}{'KL of a plain request after it':>34}")
for name, make in MISTAKES.items():
    careless = make(my_find)
    careless.add(llm, [], twin, "base")
    careless.add(tuned, [], second, "tuned")
    careless.add(llm, [], second, "base")
    llm.reset_prefix_cache()
    made = careless.prompt(llm, [first, second], question, "base")
    mine = moving.Difference.between([truth], [moving.served(llm, made.prompt)])
    others = moving.Difference.between([truth], [moving.served(llm, {"prompt_token_ids": ids})])
    llm.reset_prefix_cache()
    broken[name] = made, mine.kl, others.kl
    print(f"{name:26}{made.used!s:>14}{mine.kl:10.4f}{others.kl:34.6f}")
del tuned
base = broken["right"][1]
claim(
    "Another model's entry, and another text's, change the predictions more than the right one does.",
    min(broken["no model in the key"][1], broken["hash of the first tokens"][1]) > base,
    of_model=True,
)
claim(
    "Only one mistake changes what other requests get: calling exact what was moved.",
    [name for name, (_, _, others) in broken.items() if others > 1e-6] == ["moved is called exact"],
)
claim(
    "Keys that are not moved cost at least five times what moved ones do.",
    broken["keys are not moved"][1] > 5 * base,
    of_model=True,
)
claim(
    "With the entry wrongly called exact, the request itself gets the predictions of the right store.",
    abs(broken["moved is called exact"][1] - base) < 1e-6,
)

# %% [markdown]
# * **No model in the key.** The numbers have the right shape, nothing raises. Train a model further, keep the folder of
#   the store, and its predictions change without an error.
# * **A hash of part of the text.** Two files with the same licence header are then the same file.
# * **Keys that are not moved** cost several times what moved ones do, and nothing raises either.
# * **Moved is called exact** is the worst one: the request itself shows nothing, and *every other* request with this
#   prefix now gets approximate keys. A salt prevents this.
#
# The engine's `DocumentStore` puts all of it into the name of the file: a hash of the format, a sample of every weight
# tensor (training changes nearly all weights, so a sample shows it; one weight edited by hand may not), the dtype, the
# quantisation and the tokens. An entry for which any of these differs is not found. And it always uses a salt.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM, SGLang | prefix caching: the exact case, by block hash or radix tree; `cache_salt` keeps tenants apart. Both can keep copies in host memory (`kv_offloading_size`; `--enable-hierarchical-cache`) |
# | LMCache, Mooncake | keys and values in host memory, on disks, on other machines: exercise 1 as a service |
# | CacheBlend | documents computed alone, and some of their tokens computed again, to repair what they did not attend to |
# | llama.cpp | `--cache-reuse`: chunks of the old prompt are moved by a shift of their keys, as in exercise 3 |
# | minillm | `DocumentStore` (MatKV), `edited_prompt` (PIE), `Offloader` (KVPR), each with its limits in its docstring |

# %%
quoted("MatKV: half of the time and half of the power for retrieval workloads", "Shin et al. 2025, arXiv 2512.22195")
quoted("PIE: over 85% less work than recomputing, DeepSeek-Coder of 1.3B to 33B", "He et al. 2024, arXiv 2407.03157")
quoted("KVPR: up to 35.8% lower latency", "Jiang et al. 2024, arXiv 2411.17089")
print(f"here, MatKV: KL {matkv['rotated'].kl:.4f} with rotation, {matkv['as stored'].kl:.4f} without")
print(f"here, PIE:   KL {difference['rotated (PIE)'].kl:.4f}, same argmax {difference['rotated (PIE)'].agree:.0%}")
hidden, kv = shapes[NAME]
gain = 1 - offload.transfer_seconds(best[NAME], N, kv, hidden, 1.0, kv) / (N * kv)
print(f"here, KVPR:  recompute {best[NAME]} of {N} tokens with this model's own heads: {gain:.0%} saved (modelled)")

# %% [markdown]
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | loading a cache is faster than computing it | above a bandwidth of KV bytes per token over seconds per token, and from the break-even number of tokens on | exercise 1 |
# | recomputing part of a cache while the rest is sent saves time | with multi-head attention; with grouped heads the activations are mostly the larger ones | exercise 2 |
# | rotating the keys makes an edit exact | in the first layer only | exercise 3 |
# | documents can be computed alone | the predictions change, with rotation less than without | Measure |
# | MatKV halves the power | not tested: nothing here measures power | |
#
# **Papers.** Shin et al. 2025, *MatKV*. Jiang et al. 2024, *KVPR*. He et al. 2024, *Let the Code LLM Edit Itself When
# You Edit the Code* (PIE). Su et al. 2021, *RoFormer* (RoPE). Yao et al. 2024, *CacheBlend*.
#
# ## Recap
#
# 1. Loading pays above a bandwidth of KV bytes per token over seconds per token, and if the text has more than latency
#    / (compute time of a token − load time of a token) tokens.
# 2. A link and a processor can work at the same time: recompute as many tokens as makes both end together, if
#    activations are smaller than keys and values. With grouped heads they mostly are not.
# 3. A rotation moves keys to another position, exactly. It does not change what a token had attended to when its key was
#    computed, so keys and values of deeper layers stay approximate.
# 4. An entry fits if text, weights, dtype and format are equal; it is exact only if the same text was before it.
# 5. What is approximate must never be found by a request that did not ask for it.
#
# **Next:** lesson 15 puts the pieces together, and asks whether one core can complete code in less than 100 ms.
