# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 2. The KV cache
#
# **Question.** *Why does the 1000th token cost more than the first, and what does the cache change?*
#
# A language model generates one token at a time, and each token depends on all the tokens before it. The plain way is
# to run the whole text through the model again for every new token. It works, but it repeats almost all of its
# computation at every token.
#
# In this lesson you build the **KV cache**, which makes the repetition unnecessary. You run it inside a real model,
# count its bytes, and measure how much time it saves. Then you break it in six ways to learn which test finds which
# mistake.
#
# You need to know what a query, a key and a value are (lesson 1 builds them). Everything runs on a laptop's CPU.

# %%
import os

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.tokenizer import Tokenizer

name = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
model = load_model(name, torch.float32, "cpu")
tokenizer = Tokenizer.from_folder(resolve(name))
config = model.config
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
print(
    f"{name}: {model.num_parameters / 1e6:.1f}M parameters, {config.num_layers} layers, "
    f"{config.num_heads} query heads, {config.num_kv_heads} KV heads of width {config.head_dim}, context {config.max_position_embeddings}"
)

# %% [markdown]
# ## The question, in numbers
#
# Here is the plain loop. `model(token_ids, positions, attention)` runs a list of tokens through all layers; in each
# layer it calls `attention`, which computes what every token gets from the others. `CausalAttention` has no cache: it
# sees exactly the tokens of this one call. One token's vector on its way through the layers is called a **row**.

# %%
from minillm.models.causal import CausalAttention


def generate_plain(prompt_ids: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Greedy decoding without a cache. Returns the new tokens, and how many rows went through the model."""
    ids, rows = list(prompt_ids), 0
    while len(ids) < len(prompt_ids) + num_tokens:
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), CausalAttention(len(ids)))
        rows += len(ids)
        ids.append(int(model.logits(hidden[-1]).argmax()))
    return ids[len(prompt_ids) :], rows


prompt_ids = tokenizer.encode('def read_lines(path):\n    """Return the lines of a text file."""\n')
plain_tokens, plain_rows = generate_plain(prompt_ids, 32)
print(tokenizer.decode(prompt_ids + plain_tokens))
print(f"\n{len(prompt_ids)} prompt tokens + {len(plain_tokens)} new ones; {plain_rows} rows went through the model")
claim("Most of these rows are repetitions.", plain_rows > 10 * (len(prompt_ids) + len(plain_tokens)))

# %% [markdown]
# The token at position $n$ costs $n$ rows. (Positions count from 0. *First* below is the token at position 1, after a
# prompt of one token.) Two kinds of work grow differently. Count both, in arithmetic operations, for the token at
# position $n$:
#
# * **linear layers** do the same for every row that goes through: $2 \cdot \text{weights}$ operations a row, one
#   multiplication and one addition per weight;
# * **attention** compares every query with every key before it: $4 \cdot \text{layers} \cdot \text{heads} \cdot
#   \text{width}$ operations for each pair, half for the score, half for the value.

# %% tags=["expected"] alt="Work for one token against its position, logarithmic on both axes: without a cache it rises from 1 to more than 1000 times the first token's work at position 1000; a dashed line for one row per token stays below 2."
from minillm.viz.charts import Axis, LineChart, Series

weights_per_row = sum(p.numel() for layer in model.layers for p in layer.parameters() if p.ndim == 2)


def operations(rows: int, pairs: int) -> int:
    """Operations for one token: `rows` rows through the layers, `pairs` pairs of query and key, one row of logits."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * weights_per_row * rows + attention + 2 * config.vocab_size * config.hidden_size


def work_plain(n: int) -> int:
    """Without a cache: n rows, and every pair of them."""
    return operations(rows=n, pairs=n * (n + 1) // 2)


def work_cached(n: int) -> int:
    """With a cache: only the newest row, compared with n keys."""
    return operations(rows=1, pairs=n)


positions = (1, 4, 16, 64, 256, 1000)
chart = LineChart(
    "Work for one token, counted, relative to the first token",
    Axis("position of the token", log=True, ticks=positions),
    Axis("times the work of the first token", log=True),
    [
        Series("without a cache: all rows again", positions, [work_plain(n) / work_plain(1) for n in positions]),
        Series(
            "if only the newest row had to run",
            positions,
            [work_cached(n) / work_plain(1) for n in positions],
            style="modelled",
        ),
    ],
    "Without a cache the work grows a thousandfold until token 1000; with one row per token it grows little.",
)
print(
    f"token 1000 costs {work_plain(1000) / work_plain(1):,.0f} times the first; "
    f"it could cost {work_cached(1000) / work_plain(1):.1f} times"
)
claim(
    "The dashed line rises too, by far less.",
    1 < work_cached(1000) / work_cached(1) < 0.01 * work_plain(1000) / work_plain(1),
)
chart

# %% [markdown]
# The dashed line is the aim of this lesson. It is not flat: the newest token is still compared with every key before
# it. **A cache removes the repeated rows. It does not remove attention's growth with the length of the text.** That is
# the part of the answer about arithmetic; the part about bytes comes below.
#
# ## Predict
#
# Write a number for each before you measure. Only you see it, and a wrong guess makes the answer easier to remember.
#
# 1. How many bytes does the cache of this model need **per token**, with 4-byte numbers?
# 2. At 256 tokens of text, how many times faster is one step with the cache than without it?
# 3. A cache can start small and grow by `r` rows whenever it is full. Each growth copies all rows; each empty row costs
#    a little time in every step. For a text of 384 tokens, which `r` should be fastest? (1 = grow at every token,
#    384 = allocate everything at once.)

# %%
predict("l02.bytes", None, unit="bytes")
predict("l02.speedup", None, unit="times")
predict("l02.growth", None, unit="rows")

# %% [markdown]
# ## Build
#
# ### Which results may be kept?
#
# Before building a cache, check that what it stores stays correct. Run 12 tokens, then the same 12 followed by 4 more,
# and count in each layer how many of the first 12 **keys** have changed: a key counts if one of its numbers moves by
# more than 0.001, far more than rounding. Do this once with the **[causal mask](glossary.md#causal-mask)**, which hides
# later tokens from earlier ones, and once with every token seeing every other, as in an encoder such as BERT.

# %%
from minillm.teaching.caching import attention, changed_keys

text = (prompt_ids + plain_tokens)[:16]
causal, everyone = (changed_keys(model, text, 12, causal) for causal in (True, False))
print("layer   keys changed, causal   keys changed, everyone sees everyone")
for layer in range(config.num_layers):
    print(f"{layer:5} {causal[layer]:13} of 12 {everyone[layer]:20} of 12")
claim("With the causal mask no key changes.", not any(causal))
claim("Without it keys change in every layer but the first.", everyone[0] == 0 and all(everyone[1:]))

# %% [markdown]
# With the causal mask a later token cannot change an earlier one, so **keys and values of old tokens never change**:
# they may be kept. Without it, keys change in every layer but layer 0, whose keys depend on their own token only: only
# layer 0 could be kept. The KV cache is possible because of the mask.
#
# Two details that matter later:
#
# * *Why not keep the queries too?* A query is used once, when its token is the newest, and never again.
# * *The keys are stored after **[RoPE](glossary.md#rope)** has rotated them by their position.* A token's position
#   never changes, so its rotation does not either. But a new token must get its true position, `past + i`, not its
#   index in this call.
#
# ### Exercise 1: append
#
# The cache of one layer is two tables, one of keys and one of values, with one row per token. (So *row* has two
# meanings in this lesson. A row that goes *through the model* is a token's vector; a row that is written, copied or
# empty is a row of these tables.) The tables are allocated once and start empty. Write the new rows after the old ones
# and return the part that is in use. Several tokens may arrive at once: a whole prompt, a piece of one, or the draft
# tokens of [speculative decoding](glossary.md#speculative-decoding).
#
# Beware of one property of PyTorch: a slice beyond the end is shortened silently, and assigning one row to *no* rows is
# not an error. `table[4:5] = row` on a table of 4 rows does nothing.


# %%
def append_kv(cache_k: Tensor, cache_v: Tensor, past: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Write new rows after the first `past` rows, in place, and return views of all valid rows.

    cache_k, cache_v: [capacity, num_kv_heads, head_dim]; rows from `past` on are unused, but may hold old numbers
    new_k, new_v:     [num_new, num_kv_heads, head_dim]
    returns:          two views [past + num_new, num_kv_heads, head_dim] of the caches (no copies)
    raises:           ValueError if not all new rows fit; then both caches stay as they were

    Example, one number per row, capacity 5: cache_k = [1, 2, 6, 0, 5], past = 2, new_k = [7, 8]
    makes cache_k = [1, 2, 7, 8, 5] and returns [1, 2, 7, 8].
    """
    ### BEGIN SOLUTION
    end = past + new_k.shape[0]
    if end > cache_k.shape[0]:
        raise ValueError(f"{end} rows do not fit into a cache of {cache_k.shape[0]}")
    cache_k[past:end] = new_k
    cache_v[past:end] = new_v
    return cache_k[:end], cache_v[:end]
    ### END SOLUTION


# %%
check("l02.append_kv")

# %% [markdown]
# Stuck? `hint("l02.append_kv", 1)`, then 2, 3 and 4: where to look, which operation, the shape of the code, the solution.
#
# Below, your function fills a buffer of 12 rows with 4 tokens, then 1, 1, 1 and 3. The picture shows which rows changed
# in the buffer.

# %% tags=["expected"] alt="A buffer of 12 rows over 5 steps. Step 1 writes rows 0 to 3, steps 2 to 4 one row each, step 5 rows 7 to 9. Earlier rows stay where they are, two rows remain empty."
from minillm.trace import StepFinished, Trace
from minillm.viz.pages.cache_rows import CacheRowsView, RowsWritten

append = use("l02.append_kv")
cache_k, cache_v, past, trace = torch.zeros(12, 2, 64), torch.zeros(12, 2, 64), 0, Trace()
for num_new in (4, 1, 1, 1, 3):
    before = cache_k.clone()
    append(cache_k, cache_v, past, torch.ones(num_new, 2, 64), torch.ones(num_new, 2, 64))
    written = int((cache_k != before).any(-1).any(-1).sum())
    trace.append(RowsWritten("one buffer of 12 rows, your append_kv", past, written, copied=0, capacity=12))
    past += written
CacheRowsView(trace)

# %% [markdown]
# ### Exercise 2: the mask, with an offset
#
# Queries now come from the new tokens only, while keys come from all of them. So the mask is not a square any more: it
# has one row per *new* token and one column per key. The first new token is at position `past`.
#
# PyTorch's `is_causal=True` does not help: when there are fewer queries than keys, its triangle starts in the *top
# left* corner, as if the new tokens were the first ones.


# %%
def offset_mask(num_new: int, past: int) -> Tensor:
    """Which key each new token may see.

    returns: bool [num_new, past + num_new]; entry [i, j] is True if new token i (at position past + i) may see key j

    Example: offset_mask(2, 3) is
        [[True, True, True, True, False],
         [True, True, True, True, True ]]
    """
    ### BEGIN SOLUTION
    positions = past + torch.arange(num_new)
    return torch.arange(past + num_new)[None, :] <= positions[:, None]
    ### END SOLUTION


# %%
check("l02.offset_mask")

# %% tags=["expected"] alt="Attention mask of 4 new tokens after 7 cached ones: every new token sees the 7 cached keys and the new ones up to itself."
from minillm.viz.tensors.mask_grid import MaskGrid

mask_for = use("l02.offset_mask")
MaskGrid(mask_for(4, 7).tolist(), [tokenizer.token_text(i) for i in prompt_ids[:11]], past=7)

# %% [markdown]
# Try `mask_for(1, 7)`: a **[decode](glossary.md#decode)** step, which runs one new token, needs no mask, because the
# newest token sees everything. This is why a wrong mask passes most tests.
#
# ### Exercise 3: what it costs
#
# The cache trades memory for time. How much memory? Count the bytes that are stored for **one token**.

# %%
from minillm.models.config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int) -> int:
    """Return the bytes that one token adds to the cache, over all layers.

    config: has num_layers, hidden_size, num_heads (of the queries), num_kv_heads and head_dim; you need only some

    Example: one layer, 2 query heads sharing 1 KV head of width 4, two bytes a number: 16 bytes.
    """
    ### BEGIN SOLUTION
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value
    ### END SOLUTION


# %%
check("l02.kv_bytes_per_token")

# %%
kv_bytes = use("l02.kv_bytes_per_token")
reveal("l02.bytes", kv_bytes(config, 4))

# %% [markdown]
# Now the same for larger models. The columns *tokens until cache = weights* give the second part of the answer: each
# decode step must *read* the weights once and the whole cache of each request once, and in large models reading takes
# most of the time of decoding. (Of the input embedding it reads only the row of the newest token. In many models the
# output layer uses the same matrix, and reads all of it. In both Llamas below the input embedding is a matrix of its
# own, so it is left out.) Where the cache has as many bytes as the weights, a step reads twice as much as the first
# step did. A batch of 64 shares one reading of the weights, but has 64 caches (the column *each of 64* gives the length
# of each text).

# %%
from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B, LLAMA_3_8B, QWEN_3_06B

GIB = 2**30
models = [  # name, shape, billions of weights that a step reads, bytes a number, longest context
    (name, config, (weights_per_row + config.vocab_size * config.hidden_size) / 1e9, 4, config.max_position_embeddings),
    ("Qwen3-0.6B", QWEN_3_06B, 0.596, 2, 40_960),
    ("Llama-3-8B", LLAMA_3_8B, 8.03 - 128_256 * 4096 / 1e9, 2, 8192),  # all, less the input embedding
    ("Llama-2-70B", LLAMA_2_70B, 68.98 - 32_000 * 8192 / 1e9, 2, 4096),
]
print("                                                       tokens until cache = weights   longest")
print("model          bytes per token   GiB at 4096 tokens      1 request      each of 64    context")
crossing = {}
for label, shape, billions, width, most in models:
    per_token = kv_bytes(shape, width)
    crossing[label] = billions * 1e9 * width / per_token
    print(
        f"{label:13} {per_token:16,} {per_token * 4096 / GIB:20.2f} {crossing[label]:14,.0f} "
        f"{crossing[label] / 64:15,.0f} {most:10,}"
    )
claim(
    "The cache of one request of Llama-2-70B stays smaller than the weights for its whole context.",
    crossing["Llama-2-70B"] > 4096,
)
claim(
    "The caches of 64 requests of Llama-3-8B reach the size of the weights well within its context.",
    crossing["Llama-3-8B"] / 64 < 8192 / 4,
)

# %% [markdown]
# This is why the cache matters so much in serving engines. Lesson 4 makes its numbers smaller, and lesson 6 avoids
# wasted rows.
#
# A tutorial gives the size as $2 \cdot \text{layers} \cdot \text{heads} \cdot
# (\text{hidden}/\text{heads}) \cdot 2$ and says that Llama-2-70B needs "roughly 80 GB" at 4096 tokens. Test it:

# %% tags=["expected"] alt="Size of Llama-2-70B's cache against tokens held. With its 8 KV heads it reaches 80 GB only near 244,000 tokens, which is about 60 texts of 4096; counting all 64 query heads, near 30,500 tokens; at 4096 tokens they are at 1.3 and 10.7 GB."
held = (1024, 4096, 16384, 65536, 262144)
per_kv_head, per_query_head = kv_bytes(LLAMA_2_70B, 2), 2 * 80 * 64 * (8192 // 64) * 2
print(
    f"one text of 4096 tokens: {4096 * per_kv_head / 1e9:.2f} GB; "
    f"by the tutorial's own formula {4096 * per_query_head / 1e9:.2f} GB"
)
claim("Even its own formula gives less than a seventh of the 80 GB.", 7 * 4096 * per_query_head < 80e9)
LineChart(
    "Llama-2-70B in fp16: size of the cache",
    Axis("tokens held, all texts together", log=True, ticks=held),
    Axis("GB", log=True),
    [
        Series("8 KV heads, as it is", held, [n * per_kv_head / 1e9 for n in held]),
        Series("all 64 query heads, the tutorial's formula", held, [n * per_query_head / 1e9 for n in held]),
        Series("the 80 GB it claims for 4096 tokens", held, [80.0] * len(held), style="modelled"),
    ],
    "The model's real cache crosses 80 GB at about 244,000 tokens, the formula with all query heads at about 30,500.",
)

# %% [markdown]
# The formula counts query heads instead of **[KV heads](glossary.md#gqa)**, which several query heads share. (The same
# text then proposes to set `num_key_value_heads = 8` on this model, to save 8×. The model already has 8.)
#
# ### Exercise 4: growing
#
# Allocating the cache for the longest possible text wastes memory when texts are short. So caches grow: when one is
# full, a larger buffer is allocated and the old rows are copied. The **growth policy** says how much larger it is. One
# number `r` describes all policies here: capacities are multiples of `r`.
#
# * `r = 1`: a new buffer for every token. This is what `torch.cat` does.
# * `r` = the longest text: one allocation, no copies.
# * in between: *balancing memory and compute*, **BMC** (Ramachandran et al. 2025): a new buffer every `r` tokens.


# %%
def next_capacity(capacity: int, past: int, num_new: int, every: int) -> tuple[int, int]:
    """Return the capacity needed to add `num_new` rows after `past`, and how many rows are copied to reach it.

    capacity: rows of the buffer now (0 at the start); past: how many of them are in use
    every:    r; a new buffer has the smallest multiple of `every` rows that holds past + num_new
    returns:  (capacity, rows copied); a buffer with enough room stays as it is

    Example, r = 8: next_capacity(8, 5, 1, 8) is (8, 0); next_capacity(8, 8, 1, 8) is (16, 8).
    """
    ### BEGIN SOLUTION
    needed = past + num_new
    if needed <= capacity:
        return capacity, 0
    return -(-needed // every) * every, past
    ### END SOLUTION


# %%
check("l02.next_capacity")

# %% tags=["expected"] alt="One policy, r = 8: a prompt of 21 tokens makes a buffer of 24 rows, then every 8 tokens all earlier rows are copied into a larger buffer; in between single rows are written into empty ones."
grow_to = use("l02.next_capacity")


def grow(policy: str, every: int, chunks: list[int]) -> list[RowsWritten]:
    """Return the events of a cache to which chunks of these numbers of tokens are added in turn."""
    events, capacity, past = [], 0, 0
    for num_new in chunks:
        capacity, copied = grow_to(capacity, past, num_new, every)
        events.append(RowsWritten(policy, past, num_new, copied, capacity))
        past += num_new
    return events


CacheRowsView(Trace(grow("a prompt of 21 tokens, then 27 one by one, r = 8", 8, [21] + [1] * 27)))

# %% [markdown]
# ### Exercise 5 (optional): the best r, on paper
#
# A small `r` copies much: about $N^2/(2r)$ rows in a text of $N$ tokens. A large `r` leaves about $r/2$ rows empty in
# each of $N$ steps, and **if the attention kernel (the routine that computes it) works on the whole buffer**, empty
# rows cost time as well. Each of the $N/r$ allocations has a fixed cost:
#
# $$\text{cost}(r) = \frac{N^2}{2r}\,c_\text{copy} + \frac{N r}{2}\,c_\text{pad} + \frac{N}{r}\,c_\text{allocation}$$
#
# Find the `r` for which the sum is smallest. Consider the extremes: what if empty rows cost nothing?

# %%
import math


def best_r(num_tokens: int, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    """Return the r between 1 and num_tokens, not rounded to whole rows, for which cost(r) is smallest.

    copy_cost: cost of copying one row; pad_cost: of one empty row in one step; allocation_cost: of one allocation.
    All are in the same unit; pad_cost may be 0.

    Example: best_r(100, 1.0, 1.0, 0.0) is 10.0.
    """
    ### BEGIN SOLUTION
    if pad_cost == 0:
        return float(num_tokens)
    r = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost)
    return min(max(r, 1.0), float(num_tokens))
    ### END SOLUTION


# %%
check("l02.best_r")

# %% tags=["expected"] alt="Modelled cost against r for a text of 384 tokens when copying a row costs as much as one empty row: the copies fall, the empty rows rise, and the sum is smallest where the two cross, near r = 20."
best = use("l02.best_r")
N = 384
RS = (1, 2, 4, 8, 16, 32, 64, 128, 384)


def model_cost(r: float, copy_cost: float, pad_cost: float, allocation_cost: float) -> float:
    """cost(r) of the formula above for N tokens."""
    return N * N / (2 * r) * copy_cost + N * r / 2 * pad_cost + N / r * allocation_cost


print(f"r* = {best(N, 1.0, 1.0, 0.0):.1f} when a copied and an empty row cost the same")
claim(
    "When empty rows are free, the best r is the whole text: preallocate.",
    math.isclose(best(N, 1.0, 0.0, 0.0), N, rel_tol=1e-3),
)
LineChart(
    "The model: every row costs 1, allocation is free",
    Axis("r", log=True, ticks=RS),
    Axis("cost of 384 steps, in rows", log=True),
    [
        Series("copied rows", RS, [model_cost(r, 1, 0, 0) for r in RS]),
        Series("empty rows", RS, [model_cost(r, 0, 1, 0) for r in RS]),
        Series("sum", RS, [model_cost(r, 1, 1, 0) for r in RS], style="modelled"),
    ],
    "Copies fall with r, empty rows rise with r; the sum is smallest near r = 20, the square root of 384.",
)

# %% [markdown]
# So whether BMC gains anything depends on whether the kernel works on empty rows. You will measure both kinds of
# kernel.
#
# ## See
#
# Now put your functions together. This is the whole cache; `attend` is the method that every layer of the model calls.
# Its state is the rows and **one** number, `length`, which advances once per forward, after all layers are done.


# %%
class KVCache:
    """Keys and values of one text in all layers. `every` is the growth policy's r."""

    def __init__(self, every: int, trace: Trace | None = None, policy: str = "") -> None:
        self.keys = self.values = torch.zeros(config.num_layers, 0, config.num_kv_heads, config.head_dim)
        self.length, self.every, self.trace, self.policy = 0, every, trace, policy

    def reserve(self, num_new: int) -> None:
        """Make room for `num_new` more rows, with your `next_capacity`."""
        capacity, copied = grow_to(self.keys.shape[1], self.length, num_new, self.every)
        if capacity > self.keys.shape[1]:
            self.keys, self.values = (self._grown(old, capacity, copied) for old in (self.keys, self.values))
        if self.trace is not None:
            self.trace.append(RowsWritten(self.policy, self.length, num_new, copied, capacity))

    def _grown(self, old: Tensor, capacity: int, copied: int) -> Tensor:
        new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
        new[:, :copied] = old[:, :copied]
        return new

    def positions(self, num_new: int) -> Tensor:
        """Positions of the new tokens in the text."""
        return self.length + torch.arange(num_new)

    def mask(self, num_new: int) -> Tensor:
        return mask_for(num_new, self.length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """Store k and v (`[num_new, num_kv_heads, head_dim]`), and return attention over all valid rows."""
        keys, values = append(self.keys[layer], self.values[layer], self.length, k, v)
        return attention(q, keys, values, self.mask(len(q)))

    def advance(self, num_new: int) -> None:
        self.length += num_new

    def reset(self) -> None:
        """Start another text. Old rows are not erased, because nothing beyond `length` is read."""
        self.length = 0


def forward(cache: KVCache, token_ids: list[int]) -> Tensor:
    """Run only these new tokens; return logits `[vocab]` of the last."""
    cache.reserve(len(token_ids))
    hidden = model(torch.tensor(token_ids), cache.positions(len(token_ids)), cache)
    cache.advance(len(token_ids))
    return model.logits(hidden[-1])


def generate_cached(cache: KVCache, prompt_ids: list[int], num_tokens: int, chunk: int = 1024) -> list[int]:
    """Greedy decoding: the prompt once (in pieces of `chunk`), then one row per token."""
    for start in range(0, len(prompt_ids), chunk):
        logits = forward(cache, prompt_ids[start : start + chunk])
    tokens = [int(logits.argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(forward(cache, tokens[-1:]).argmax()))
    return tokens


cache = KVCache(every=1024)
cached_tokens = generate_cached(cache, prompt_ids, len(plain_tokens))
same = sum(a == b for a, b in zip(cached_tokens, plain_tokens, strict=True))
claim(f"All {len(plain_tokens)} tokens are the same as without a cache.", same == len(plain_tokens))
print(f"rows through the model: {cache.length} with the cache, {plain_rows} without")

# %% [markdown]
# The tokens are the same, from a small part of the rows. (The last token was chosen but never went through the model,
# so it has no row: prompt + 32 tokens need prompt + 31 rows.)
#
# *Why "the same tokens" and not "the same bits"?* A matrix product of one row and one of fifty rows may add in a
# different order, so logits differ in the last digits. In fp32 that almost never changes the largest one.
#
# Now watch three growth policies generate the same text side by side. Your `next_capacity` chooses the capacity, your
# `append_kv` writes the rows, your `offset_mask` hides later tokens.

# %% tags=["expected"] alt="Three panels after 32 steps. Concat: nearly the whole triangle is copied rows. Every 8 rows: three copied columns, a few empty rows below. Preallocated: no copies, a large triangle of empty rows."
from minillm.viz.live import LiveView

num_rows = len(prompt_ids) + len(plain_tokens) - 1
policies = {"concat: r = 1": 1, "BMC: r = 8": 8, f"preallocated: r = {num_rows}": num_rows}
trace = Trace()
caches = [KVCache(every, trace, policy) for policy, every in policies.items()]
texts = [[] for _ in caches]
with LiveView(CacheRowsView(trace, num_steps=len(plain_tokens), max_rows=num_rows), seconds=10):
    for step in range(len(plain_tokens)):
        for cache, tokens in zip(caches, texts, strict=True):
            tokens.append(int(forward(cache, tokens[-1:] or prompt_ids).argmax()))
        trace.append(StepFinished(step + 1, 0.0, 0.0, 0.0, 0))
claim("All three policies wrote the same tokens.", texts[0] == texts[1] == texts[2] == plain_tokens)

# %% [markdown]
# Orange rows are copied, dotted or hollow rows are empty, and dark rows are new: only these had to be written. Change
# the number `8` after `"BMC: r = 8":` to 4 or 16 (and the label with it) and run the cell again.
#
# ## Measure
#
# ### With and without the cache
#
# For contexts of growing length, one step with and one without the cache are timed in turn, three times after a
# warm-up. Between the rounds the cache is **[rolled back](glossary.md#rollback)**: its last tokens are removed by
# lowering `length`, and nothing is erased. (Speculative decoding removes rejected draft tokens with the same line.)
# Within a round `length` is also *raised*. That is right here only because the rows of the whole text were written
# before and are still those of this text.

# %%
import inspect
import textwrap
from functools import partial

from minillm.bench.timing import time_in_turn, ratio

longest = min(1000, config.max_position_embeddings)
contexts = [n for n in (1, 4, 16, 64, 256, 1000) if n <= longest]
code_ids = tokenizer.encode(inspect.getsource(textwrap))[:longest]
full = KVCache(every=longest)
forward(full, code_ids)


def step_plain(context: int) -> int:
    """Return the next token after `context` tokens, without a cache."""
    hidden = model(torch.tensor(code_ids[:context]), torch.arange(context), CausalAttention(context))
    return int(model.logits(hidden[-1]).argmax())


def step_cached(context: int) -> int:
    """Return the same token, with all rows but the newest in the cache."""
    full.length = context - 1
    return int(forward(full, code_ids[context - 1 : context]).argmax())


claim("The token is the same at every context.", all(step_plain(n) == step_cached(n) for n in contexts))

# %% tags=["nbval-ignore-output"]
seconds = time_in_turn({(kind, n): partial(kind, n) for n in contexts for kind in (step_plain, step_cached)}, rounds=3)
speedup = {n: ratio(seconds[step_plain, n], seconds[step_cached, n]) for n in contexts}
counted = {n: work_plain(n) / work_cached(n) for n in contexts}
reveal("l02.speedup", round(speedup[256].median, 1))
print("times faster with the cache: " + ", ".join(f"{n} tokens {s.median:.1f}" for n, s in speedup.items()))
claim("For the first token the cache gains nothing.", speedup[1].median < 1.3, measured=True)
claim("At the longest context it gains more than ten times.", speedup[contexts[-1]].median > 10, measured=True)
claim(
    "From 16 tokens on the gain stays below the counted one.",
    all(speedup[n].median < counted[n] for n in contexts[2:]),
    True,
)
LineChart(
    f"One step of {name} with the cache, against without, on this machine",
    Axis("context in tokens", log=True, ticks=tuple(contexts)),
    Axis("times faster (median of 3, with the spread)", log=True),
    [
        Series("measured", contexts, *zip(*((s.median, s.low, s.high) for s in speedup.values()), strict=True)),
        Series("counted operations", contexts, list(counted.values()), style="modelled"),
    ],
    "Near 1 for the first token, then growing with the context, and from 16 tokens on below the counted operations.",
)

# %% [markdown]
# Three observations:
#
# * **Where it does not help:** at the left end. The first token has no rows to reuse, and all rows of a *prompt* are
#   new. A cache does not shorten the time to the first token (reusing the rows of an earlier prompt does; lesson 6).
#   Scoring a text without generating gains nothing either, and uses the memory for nothing.
# * **Why it stays below the count:** many rows at once cost less per row than one alone. One row reads every weight to
#   use it once; a thousand rows share the reading. So a thousand times the work takes less than a thousand times as
#   long.
# * **Why it grows:** the plain step takes longer as the context grows; the cached step changes little at these lengths.
#
# ### Concat, every r rows, preallocate
#
# Now the growth policies, with the shape of one layer of Llama-3-8B (8 KV heads of width 128, each shared by four query
# heads), for 384 decode steps of attention alone. There are two kernels:
#
# * **whole buffer**: attention runs over all `capacity` rows, and the empty ones are masked. BMC assumes this case.
#   Graphs whose attention has the fixed shape of the buffer work this way too, as with transformers' `StaticCache`; a
#   kernel that is given the length as data need not.
# * **valid rows**: attention runs over `buffer[:, :length]`, a *view*. No copy, no padding.
#
# The two extremes calibrate the cost model (the time of an allocation is measured separately; apart from that, $r=1$
# only copies and $r=N$ only pads). The values between them test it: the cell compares their times with the model's.
# (The loop is `decode_layer` in `minillm/teaching/caching.py`, one page.)

# %%
from minillm.teaching.caching import time_growth_policies

grid = (1, 4, 16, 32, 64, 128, N)
copied, read = sum(event.copied for event in grow("r = 16", 16, [1] * N)), N * (N + 1) // 2
claim("In 384 steps at r = 16, 4,416 rows are copied, and attention reads 73,920.", (copied, read) == (4416, 73920))

# %% tags=["nbval-ignore-output"]
costs = time_growth_policies(grow_to, append, N, grid)
slower, prices = costs.relative_times, (costs.copy, costs.pad, costs.allocation)
concat, middle = slower["whole", 1].median, slower["whole", costs.best("whole")].median
best_by_model, flat = best(N, *prices), costs.near_best("whole")
reveal("l02.growth", round(best_by_model))
modelled = {r: 1 + model_cost(r, *prices) / costs.preallocated for r in grid}
missed = [slower["whole", r].median / modelled[r] for r in grid[1:-1]]
share = costs.copy / costs.pad if costs.pad else math.inf
print("whole buffer: that answer is r* by the cost model, with the costs measured here;")
print(f"              copying a row costs {share:.1f} times as much as an empty row in one step;")
print(f"              measured times within 10% of the best: r = {flat}")
print(f"              between the ends they are {min(missed):.2f} to {max(missed):.2f} times what the model says")
large = [slower["view", r].median for r in grid if r >= 16]
print(f"valid rows:   from r = 16 on {min(large):.2f} to {max(large):.2f} times as long as preallocate + view")
print(f"against preallocate + view: concat takes {concat:.1f} times as long, whole buffer at its best r {middle:.1f}")
claim(
    "The model's best r is at most a factor of 2 from these.",
    flat[0] / 2 <= best_by_model <= 2 * flat[-1],
    measured=True,
)
claim("Between its ends the model is wrong by less than half.", min(missed) > 0.5 and max(missed) < 1.5, measured=True)
claim("Concatenating is slower than preallocate + view.", concat > 1.05, measured=True)
claim("With a view, every r from 16 on is faster than r = 1.", max(large) < slower["view", 1].median, measured=True)
claim("With the whole buffer no r beats preallocate + view by more than 10%.", middle > 0.9, measured=True)
LineChart(
    "384 steps of one attention layer, against preallocate + view, on this machine",
    Axis("r", log=True, ticks=grid),
    Axis("times as long"),
    [
        Series(title, grid, *zip(*((s.median, s.low, s.high) for s in (slower[kernel, r] for r in grid)), strict=True))
        for title, kernel in (("whole buffer (BMC's case)", "whole"), ("valid rows only (a view)", "view"))
    ]
    + [
        Series(
            "model for the whole buffer",
            grid,
            list(modelled.values()),
            style="modelled",
        )
    ],
    "With the whole buffer both ends take longer than the middle; with a view r = 1 takes longest.",
)

# %% [markdown]
# **Where BMC wins, and where it loses.** With a kernel that works on the whole buffer, both extremes are slow and a
# middle `r` wins: your cost model has the shape of a U. Where copying a row costs about as much as an empty row (the
# cell prints the ratio), $\sqrt N$ is a fair guess for its minimum. The bottom of the U is flat: by the formula, half
# or twice the best `r` adds only a quarter to the cost of copies, allocations and empty rows. So an answer that far
# from the computed one is nearly as good. Between the ends, which the model was given, its times are not exact (the
# cell prints how far they are off). It tells which `r` to try, and not how long a step then takes.
#
# With a view there is no U, because empty rows cost no arithmetic. A larger `r` saves copies. At `r = 16` only 4,416
# rows are copied in all, while attention reads 73,920, so by the count 6% are left to save. The measured rest (the line
# *valid rows*) can be more: a copied row may cost more than one that is read, and times this short vary from run to run.
# *Preallocate + view* copies nothing and needs no choice of `r`.
#
# BMC reports up to 3.2× over the transformers baseline (quoted), and that baseline concatenates. The line *against
# preallocate + view* shows how much is gained here, with this shape and length, only by not concatenating: that part
# needs no BMC. BMC also reports up to 1.36× over vLLM (quoted), which does not concatenate; that is not measured here.
# The idea is useful where a view is impossible (attention compiled for a fixed shape, accelerators that need one), and
# growing is useful where memory cannot be reserved in advance. Where padding is unavoidable, the empty rows can also
# hold the draft tokens of speculative decoding ($r \ge \gamma + 1$ for $\gamma$ drafts), which BMC uses. Lesson 6
# grows *without* copying, with blocks.
#
# How much does this matter for a whole step? Here attention ran alone. In a model the linear layers run too. With a
# small cache their time hides most of the difference; with long texts and large batches it does not.
#
# ## Break it
#
# Here are six caches, each with a mistake that people really make. Each overrides one or two methods of `KVCache`.


# %%
class StalePosition(KVCache):
    """`pos += 1` in every layer instead of once per token.

    With L layers and one token a step, layer l of token t lands in row t·L + l.
    """

    writes = 0

    def attend(self, layer, q, k, v, batch=None):
        append(self.keys[layer], self.values[layer], self.writes, k, v)
        self.writes += len(k)
        end = self.length + len(k)
        return attention(q, self.keys[layer, :end], self.values[layer, :end], self.mask(len(q)))

    def reset(self):
        self.length = self.writes = 0


class PositionsFromZero(KVCache):
    """RoPE gets the index within this call instead of the position in the text."""

    def positions(self, num_new):
        return torch.arange(num_new)


class NoOffset(KVCache):
    """The triangle starts in the top left corner, as with `is_causal=True`."""

    def mask(self, num_new):
        return torch.ones(num_new, self.length + num_new, dtype=torch.bool).tril()


class NoOffsetForMany(NoOffset):
    """The same, but right for single tokens: `is_causal=(num_new > 1)`."""

    def mask(self, num_new):
        return super().mask(num_new) if num_new > 1 else mask_for(1, self.length)


class SeesEmptyRows(KVCache):
    """Attends over the whole buffer: its empty rows, zeros or those of an earlier text, get a share of the softmax."""

    def attend(self, layer, q, k, v, batch=None):
        append(self.keys[layer], self.values[layer], self.length, k, v)
        mask = F.pad(self.mask(len(q)), (0, self.keys.shape[1] - self.length - len(q)), value=True)
        return attention(q, self.keys[layer], self.values[layer], mask)


class NeverCleared(KVCache):
    """The next text starts where the last one ended."""

    def reset(self):
        pass


# %% [markdown]
# And here are four checks. Each compares tokens with those of the plain loop. **Before running the cell, guess:** which
# mistakes are found by one check only? Which checks would you keep if you could keep two?

# %%
from itertools import combinations

room = 64 * config.num_layers  # `StalePosition` uses a row for every layer
second_ids = tokenizer.encode("def main():\n")
first_want, second_want = plain_tokens[:16], generate_plain(second_ids, 16)[0]


def checks(kind: type[KVCache]) -> list[bool]:
    """The first token; all 16; all 16 with the prompt in pieces of 7; all 16 of a second prompt in the same cache."""
    cache = kind(every=room)
    first = generate_cached(cache, prompt_ids, 16)
    cache.reset()
    second = generate_cached(cache, second_ids, 16)
    pieces = generate_cached(kind(every=room), prompt_ids, 16, chunk=7)
    return [first[0] == first_want[0], first == first_want, pieces == first_want, second == second_want]


print(f"{'':20} first token   16 tokens   prompt in pieces   second prompt")
kinds = (KVCache, StalePosition, PositionsFromZero, NoOffset, NoOffsetForMany, SeesEmptyRows, NeverCleared)
found = {kind: checks(kind) for kind in kinds}
for kind, passed in found.items():
    marks = ["same" if same else "DIFFERS" for same in passed]
    print(f"{kind.__name__:20} {marks[0]:>11} {marks[1]:>11} {marks[2]:>18} {marks[3]:>15}")
names = ("first token", "16 tokens", "prompt in pieces", "second prompt")
missed = {pair: [k for k in kinds[1:] if found[k][pair[0]] and found[k][pair[1]]] for pair in combinations(range(4), 2)}
complete = [" and ".join(names[i] for i in pair) for pair, kept in missed.items() if not kept]
print("\npairs of checks that together find all six mistakes:", "; ".join(complete) or "none")
claim(
    "The right cache passes all four checks, and no wrong one does.",
    [*map(all, found.values())] == [True] + 6 * [False],
)
claim("Only the prompt in pieces reveals NoOffsetForMany.", found[NoOffsetForMany] == [True, True, False, True])
claim("Only the second prompt reveals NeverCleared.", found[NeverCleared] == [True, True, True, False])
rows = forward(KVCache(every=room), prompt_ids), forward(SeesEmptyRows(every=room), prompt_ids)
moved = float((rows[0] - rows[1]).abs().max())
print(f"SeesEmptyRows moves a logit of the first token by {moved:.2f}")
claim("That is far more than rounding.", moved > 0.01, of_model=True)
claim("The largest logit stays the largest.", found[SeesEmptyRows][0], of_model=True)

# %% [markdown]
# Read the table by columns.
#
# * **The first token proves little**: most mistakes need cached tokens to have an effect, and even a wrong cache may
#   predict an easy token.
# * **16 tokens** find mistakes that change the choice of a token as soon as there *are* cached tokens.
# * **`NoOffsetForMany`** passes both, and would pass any number of ordinary generations: whole prompts have past = 0,
#   single tokens need no mask. It fails only when *several tokens arrive after others*. That happens in **[chunked
#   prefill](glossary.md#chunked-prefill)** (a prompt in pieces, lesson 7) and when draft tokens are verified in
#   speculative decoding: with one of those switched on, the model gets worse without any error.
# * **`NeverCleared`** passes every check that uses a fresh cache. Only the second text reveals it.
# * **`SeesEmptyRows`** is wrong from the first forward on: its logits move (the line below the table). A key of zeros
#   has the score 0 and a value of zeros, so the empty rows take weight from the others, which need not change the
#   largest logit, and then the first token is right. After `reset` the same rows hold keys and values of the old text.
#   Comparing tokens can miss a mistake that comparing logits finds at once.
#
# Note what is *not* a mistake: `reset` of the right cache erases nothing. Rows beyond `length` hold old data, which is
# harmless as long as they are not read. The pool of [blocks](glossary.md#block) in lesson 6 relies on that.
#
# Choose one and read what it writes. (`NeverCleared` writes the right text here, in a fresh cache.)

# %%
BROKEN = NoOffsetForMany  # or StalePosition, PositionsFromZero, NoOffset, SeesEmptyRows, NeverCleared

print(f"{'without a cache':20}", repr(tokenizer.decode(first_want)))
print(f"{BROKEN.__name__:20}", repr(tokenizer.decode(generate_cached(BROKEN(every=room), prompt_ids, 16, chunk=7))))

# %% [markdown]
# A broken cache does not crash: sooner or later it writes *other* text. The text may be nonsense, or may look like the
# work of a weak model. Only a comparison with the plain loop shows that the cache is the cause.
#
# ## In the field
#
# | system | how rows are written | how it grows | r |
# |---|---|---|---|
# | transformers, `DynamicCache` (the default of `generate`) | `torch.cat` in `DynamicLayer.update` | a new buffer for every token | 1 |
# | transformers, `StaticCache` | `index_copy_` in `StaticLayer.update`, which returns the *whole* buffer | never | N, whole buffer: the price of a fixed shape |
# | llama.cpp | one buffer for the whole context; `llama_kv_cache::get_n_kv` attends over the used rows, rounded up to 256 | never | N in memory, 256 in compute: a view that is padded so that the graph can be reused |
# | vLLM | `reshape_and_cache_flash` scatters by a `slot_mapping` into a pool of blocks | by one block (16 tokens is usual), nothing is copied | lesson 6 |
# | SGLang | `MHATokenToKVPool.set_kv_buffer` writes to slots that `ReqToTokenPool` maps | slots from a pool, shared by a radix tree | lesson 6 |
#
# llama.cpp's rounding to 256 is BMC's idea without BMC's copies.
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | caching avoids computing the whole attention matrix again | right for the old rows of the matrix; the newest is still computed at every step, and grows with the text | first chart: the dashed line rises |
# | KV bytes = 2 · layers · heads · (hidden / heads) · 2; Llama-2-70B at 4096 tokens needs 80 GB | KV heads, not query heads: 1.34 GB | exercise 3 |
# | a sample INT8 cache with `self.pos += 1` in its per-layer `update` | layer l of token t is written to row t·L + l: every layer reads rows that it never wrote (the first layer from the second token on, the others at once), and a buffer for 1024 tokens is full after 1024 / L tokens (L layers) | `StalePosition` |
# | BMC: up to 3.2× over the transformers baseline, another 1.39× beyond the gain of speculative decoding, 1.36× over vLLM and 2.29× over DeepSpeed | the first baseline concatenates; preallocate + view needs neither copies nor padding, and is the baseline to compare with; not tested here: the gain with speculative decoding, vLLM (which does not concatenate) and DeepSpeed | second measurement |
#
# **Find the mistakes.** The tutorial of the first claim decodes like this (paraphrased):
#
# ```python
# cache = init_cache(max_length)
# outputs = model(prompt, cache)                # the model appends to the cache as it runs
# token = argmax(outputs)
# for _ in range(max_length):
#     cache = update(cache, outputs)
#     outputs = model(token, cache)
#     token = argmax(outputs)
#     if token == eos: break
# return decode(outputs)
# ```
#
# <details><summary>What did you find?</summary>
#
# 1. The rows are appended twice: by the model, and again by `update`.
# 2. The cache has `max_length` rows, but prompt + `max_length` tokens go in.
# 3. The tokens are never collected; `decode` gets the logits of the last step.
# 4. The first token is never checked for end of text, so generation goes on after it.
#
# </details>
#
# **Papers.** The cache is as old as fast decoding with Transformers; Shazeer 2019, *Fast Transformer Decoding: One
# Write-Head is All You Need*, is about its bytes. Growth: Ramachandran et al. 2025, *Striking the Right Balance between
# Compute and Copy*. Blocks: Kwon et al. 2023, *PagedAttention*.
#
# ## Recap
#
# 1. With a causal mask old keys and values never change, so each token needs one new row per layer, not the whole text.
# 2. Attention still reads every row: token 1000 costs more than token 1, in operations and in bytes, though far from
#    1000×.
# 3. A token needs 2 · layers · KV heads · width · (bytes per number) bytes. With many requests the caches can be larger
#    than the weights.
# 4. The state is the rows and one length. Advance the length once per forward, offset the mask and the positions by it,
#    and reset it to 0 for a new text.
# 5. Growing by copying saves memory in short texts. It saves time only with kernels that spend time on empty rows;
#    otherwise preallocate + view, without copies or padding, is the one to beat.
#
# **Next:** lesson 3 asks whether arithmetic or bytes limit a step, and what fewer KV heads save.
