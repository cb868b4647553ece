# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 9. Triton, paged attention
#
# **Question.** *To decode one token, attention must read every cached key and value at least once. Can a kernel read each of
# them exactly once, although they lie in blocks all over memory?*
#
# Lesson 6 computed attention in two steps: gather the rows of a request into one tensor, then attend to that tensor.
# The result is right, but every row is copied before it is used. A kernel can follow the [block
# table](glossary.md#block-table) itself and read each row in place.
#
# One problem must be solved first. Softmax needs the largest score and the sum over *all* keys, and a kernel sees one
# block at a time. Exercise 1 solves it. Then you write the kernel, split it so that a whole GPU works on one long request,
# and make it read INT8 [codes](glossary.md#quantisation). Each of the kernels runs inside the real engine, which must
# generate the same tokens.
#
# You need lesson 6 (block tables), lesson 4 for the last part, and lesson 8 (programs, masks, a softmax in one block).
# Triton exists for Linux and WSL, and on Colab.
#
# **With or without a GPU.** The cells are the same. Without one, Triton's *interpreter* runs the programs in Python, one
# after the other: the results are right, and the speed says nothing. `TRITON_INTERPRET=1` switches it on, and must be set
# **before the first import of Triton**. The interpreter is slow, so the prompts and completions are short here.

# %%
import os

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton

import triton
import triton.language as tl

from minillm import LLM, SamplingParams
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.viz.tensors.attention_tiles import AttentionTiles
from minillm.viz.charts import Axis, LineChart, Series

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = os.environ.get(
    "MINILLM_MODEL", "minicoder"
)  # or a checkpoint with a power of two as head size, without sliding window
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of infinities; a GPU does not
print("kernels are", "compiled for the GPU" if DEVICE == "cuda" else "interpreted, one program after the other")

# %% [markdown]
# ## Predict
#
# Write a number for each before you go on.
#
# 1. Gather first, then attend: how many times as many bytes move as if each key and value were read once?
# 2. The cache holds INT8 codes with one scale (2 bytes) per row of 128. Attention first dequantises the rows into a 16-bit
#    copy. How many times as many bytes move as with a 16-bit cache that is read in place?
# 3. One request of 4096 tokens, a model with 8 KV heads, a GPU with 132 **multiprocessors** (the units that run programs),
#    and one [program](glossary.md#program) per request and KV head. **How many of the multiprocessors have work?**

# %%
predict("l09.gather", None, unit="times")
predict("l09.int8", None, unit="times")
predict("l09.busy", None, unit="of 132")

# %% [markdown]
# ## Build
#
# ### Exercise 1: softmax in pieces
#
# For one query, a set of keys is summarised by three quantities: the largest score $m$, the sum $l$ of the weights relative
# to $m$, and the weighted sum $o$ of the values (a vector).
#
# $$m = \max_j s_j \qquad l = \sum_j e^{s_j - m} \qquad o = \sum_j e^{s_j - m}\, v_j$$
#
# The attention output is $o / l$. Now take two sets of keys, each with its own $(m, l, o)$. What are $m$, $l$ and $o$ of
# both sets together? You need only these six quantities, not the keys.


# %%
def merge(
    m_a: Tensor, l_a: Tensor, o_a: Tensor, m_b: Tensor, l_b: Tensor, o_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the attention over two sets of keys, given m, l and o of each.

    m, l:    [num_queries]; o: [num_queries, head_dim], not divided by l
    returns: m, l and o of both sets together

    A set without keys has m = -inf, l = 0, o = 0. Two such sets together must give the same, not NaN (-inf minus -inf
    is NaN).

    Example: m = 0, l = 2, o = [2, 1] and m = 1, l = 1, o = [3, 5]
    give m = 1, l = 2/e + 1, o = [2/e + 3, 1/e + 5].
    """
    ### BEGIN SOLUTION
    m = torch.maximum(m_a, m_b)
    factor_a = torch.where(m_a == m, 1.0, torch.exp(m_a - m))  # 1 also where both are -inf
    factor_b = torch.where(m_b == m, 1.0, torch.exp(m_b - m))
    return m, l_a * factor_a + l_b * factor_b, o_a * factor_a[:, None] + o_b * factor_b[:, None]
    ### END SOLUTION


# %%
check("l09.merge")

# %% [markdown]
# Stuck? `hint("l09.merge", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# This is all of *[online softmax](glossary.md#online-softmax)*. Start with no keys and merge block after block; only one
# block of scores exists at any time. The result is exact, not an approximation:

# %%
my_merge = use("l09.merge")
torch.manual_seed(0)
q, k, v = torch.randn(3, 64).double(), torch.randn(70, 64).double(), torch.randn(70, 64).double()
scores = q @ k.T / 8
so_far = torch.full((3,), -torch.inf).double(), torch.zeros(3).double(), torch.zeros(3, 64).double()
for first in range(0, 70, 16):
    s = scores[:, first : first + 16]
    weights = torch.exp(s - s.amax(1, keepdim=True))
    so_far = my_merge(*so_far, s.amax(1), weights.sum(1), weights @ v[first : first + 16])
whole = torch.softmax(scores, dim=1) @ v
same = torch.allclose(so_far[2] / so_far[1][:, None], whole, atol=1e-12)
claim("Merged block by block (the last has 6 of 16 keys), attention is the same as over all keys at once.", same)

# %% [markdown]
# ### Exercise 2: a kernel that walks the block table
#
# The kernel has one program per request and KV head. A program loads the queries of the heads that share its KV head, then
# loops over the request's blocks: look up the block id, load the keys and values, compute the scores, merge. It stores only
# the result.
#
# ```text
# block table of the request   7      2      9
# turn of the loop             1      2      3
# rows read               112…127  32…47  144…148    the other slots of block 9 hold no token
# ```
#
# The first lines are given: the request and KV head of this program, the queries of its heads, and `place`, the offsets
# 0 … BLOCK_SIZE - 1 of the slots in a block. Write the loop and the store. Four details of Triton:
#
# * Sides of a [tile](glossary.md#tile) must be powers of two, so a group of 3 heads is padded to 4 (`PAD_GROUP`), and
#   `is_head` masks the fourth.
# * The bounds of a loop may be values that the kernel has loaded: `range(0, length, BLOCK_SIZE)`.
# * `tl.where`, `tl.maximum`, `tl.minimum`, `tl.exp` and `tl.log` do with blocks what torch's functions of these names do
#   with tensors.
# * The product of queries and keys is written as a sum here: `tl.sum(q[:, None, :] * k[None, :, :], 2)` is
#   `[PAD_GROUP, BLOCK_SIZE]`. There is also `tl.dot`, which can use **tensor cores**, the GPU's units for matrix products.
#   With a group of 3 they have little to do, and a decode step waits for memory, not for arithmetic. The check
#   has rows of 4 channels, too few for `tl.dot` on a GPU: Triton 3.9 wants at least 8 terms in a float32 sum.


# %%
@triton.jit
def decode_kernel(
    q_ptr,  # [requests, heads, DIM]
    k_ptr,  # [slots, NUM_KV, DIM], shared by all requests
    v_ptr,
    table_ptr,  # [requests, table_stride] block ids: rows padded to the longest table; row r begins at r · table_stride
    length_ptr,  # [requests]: cached tokens of each, including the newest
    out_ptr,  # like q
    table_stride,
    scale,  # 1 / √DIM
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head: heads kv_head · GROUP + 0, 1, …
    PAD_GROUP: tl.constexpr,  # GROUP, rounded up to a power of two
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Attention of one query per request over its cached tokens. Grid: (requests, NUM_KV).

    Example: 2 requests, 2 KV heads: 4 programs. Row `slot` of KV head h begins at (slot · NUM_KV + h) · DIM.
    """
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    is_head = head[:, None] < GROUP
    q_at = ((request * NUM_KV + kv_head) * GROUP + head[:, None]) * DIM + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=is_head, other=0.0).to(tl.float32) * scale
    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)  # the largest score so far
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)  # l
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)  # o
    ### BEGIN SOLUTION
    for first in range(0, length, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q[:, None, :] * k[None, :, :], 2)
        score = tl.where(exists[None, :], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        weight = tl.exp(score - m_new[:, None])
        rescale = tl.exp(m - m_new)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
        m = m_new
    tl.store(out_ptr + q_at, out / total[:, None], mask=is_head)
    ### END SOLUTION


# %%
check("l09.decode_kernel")

# %% [markdown]
# ### Use: the engine on your kernel
#
# `ops={"paged_attention": …}` replaces the engine's own attention by your function. A step may contain several new tokens
# per request (a prompt, or drafts to verify), but your kernel takes one query per request. So pass each new token as a
# request of its own: the token at position p has the block table of its request and p + 1 keys. Then no causal mask is
# needed.

# %%
my_decode = use("l09.decode_kernel")


def sizes(q: Tensor, num_kv: int, block_size: int) -> dict[str, int]:
    """The constants that every kernel of this lesson takes."""
    group = q.shape[1] // num_kv
    pad = triton.next_power_of_2(group)
    return {"NUM_KV": num_kv, "GROUP": group, "PAD_GROUP": pad, "DIM": q.shape[2], "BLOCK_SIZE": block_size}


def rows_of(batch) -> tuple[Tensor, Tensor]:
    """The block table and the number of keys of every new token."""
    counts = torch.tensor(batch.query_lens, device=batch.block_tables.device)
    return batch.block_tables.repeat_interleave(counts, 0), batch.positions + 1


def my_paged_attention(q, keys, values, batch, window=None, kernel=my_decode):
    """Attention of every new token of a step, by your kernel."""
    q, (tables, lengths) = q.contiguous(), rows_of(batch)
    out = torch.empty_like(q)
    args = (q, keys, values, tables, lengths, out, tables.stride(0), q.shape[2] ** -0.5)
    kernel[(len(q), keys.shape[1])](*args, **sizes(q, keys.shape[1], batch.block_size))
    seen.append((batch, keys.shape[1]))
    return out


seen = []  # the batch and the number of KV heads of each launch
prompts = ["with open(path) as", "class Point:\n    def __init__(self, x"]
PLAIN = {"enforce_eager": True, "dtype": "float32", "block_size": 8, "enable_prefix_caching": False}


def completions(texts: list[str], num_tokens: int, **options) -> list[list[int]]:
    """The tokens that an engine with these options generates after each prompt. The interpreter is slow: ask for few."""
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = LLM(NAME, **PLAIN, **options).generate(texts, greedy, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


tokens = completions(prompts, 8, ops={"paged_attention": my_paged_attention})
claim(
    "With your kernel the engine generates the same tokens as with its own attention.",
    tokens == completions(prompts, 8),
)
print(f"{len(seen)} launches, {sum(batch.query_start[-1] for batch, _ in seen):,} queries")

# %% [markdown]
# ### See: tiles
#
# The picture shows the last step of that run. A row is a program. A column is eight token positions of the request, one
# logical block. A tile names the physical block that the program reads there, and the turn of the loop.


# %% tags=["expected"] alt="Four programs, one for each of two requests and two KV heads. Each walks the blocks of its request from left to right, one per turn; the end of the last block is hatched, because no token is there."
def tiles_of(batch, num_kv: int, parts: int = 1) -> AttentionTiles:
    """The tiles that each program of the kernel reads in one decode step."""
    return AttentionTiles(batch.seq_lens, batch.block_tables.tolist(), batch.block_size, num_kv, parts)


tiles_of(*seen[-1])

# %% [markdown]
# The two KV heads of a request read the same blocks but not the same bytes: a slot of a block holds one key per KV head.
# So no key is read twice, and only the hatched slots are not read.
#
# ### Exercise 3: more programs than KV heads
#
# There is one program per request and KV head, and no more. One request to a model with 8 KV heads keeps 8 multiprocessors
# busy. A large GPU has more than a hundred, and reaches its full bandwidth only if most of them load data. So split the keys
# of a request into parts, one program each (*[split-KV](glossary.md#split-kv)*, as in Flash-Decoding). The program of a part
# does what `decode_kernel` does, on the blocks of its part.
#
# The result of a part is not final. Its program stores its own $o / l$ and one number that says how much of the softmax the
# part holds: the logarithm of its sum of $e^{score}$, called *[LSE](glossary.md#lse)* (log-sum-exp).
#
# $$L = \log \sum_j e^{s_j} = m + \log l$$
#
# You need not write the same lines again. Here are two functions made of lines of `decode_kernel` (those that exercise 2
# asks for, so do that one first); a kernel may call another `@triton.jit` function.


# %%
@triton.jit
def load_queries(q_ptr, scale, NUM_KV: tl.constexpr, GROUP: tl.constexpr, PAD_GROUP: tl.constexpr, DIM: tl.constexpr):
    """Row indices [PAD_GROUP] and scaled queries [PAD_GROUP, DIM] of the heads that share this program's KV head."""
    head, channel = tl.arange(0, PAD_GROUP), tl.arange(0, DIM)
    row = (tl.program_id(0) * NUM_KV + tl.program_id(1)) * GROUP + head
    q_at = row[:, None] * DIM + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=head[:, None] < GROUP, other=0.0).to(tl.float32) * scale
    return row, q


@triton.jit
def add_block(score, v, exists, m, total, out):
    """Merge one block into m, l (total) and o (out). score: [PAD_GROUP, BLOCK_SIZE]; v: [BLOCK_SIZE, DIM]."""
    score = tl.where(exists[None, :], score, float("-inf"))
    m_new = tl.maximum(m, tl.max(score, 1))
    weight = tl.exp(score - m_new[:, None])
    rescale = tl.exp(m - m_new)
    total = total * rescale + tl.sum(weight, 1)
    out = out * rescale[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
    return m_new, total, out


# %% [markdown]
# In `split_kernel` only the bounds of the loop and the two stores are new. Each part gets ⌈number of blocks / SPLITS⌉ whole
# blocks. The last parts may get fewer, or none: a part without keys stores zeros and $L = -\infty$.
#
# `tl.cdiv(a, b)` is a / b, rounded up. Python's `-(-a // b)` rounds *down* in a kernel: there `//` rounds towards zero, as
# in C.


# %%
@triton.jit
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    part_ptr,  # [requests, heads, SPLITS, DIM] fp32
    lse_ptr,  # [requests, heads, SPLITS] fp32
    table_stride,
    scale,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Attention over one of SPLITS parts of the keys. Grid: (requests, NUM_KV, SPLITS).

    Example: 10 tokens, BLOCK_SIZE 4, SPLITS 2: part 0 has the keys 0 to 7, part 1 the keys 8 and 9.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    row, q = load_queries(q_ptr, scale, NUM_KV, GROUP, PAD_GROUP, DIM)
    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)
    # Where do the keys of this part begin and end?
    ### BEGIN SOLUTION
    keys_of_a_part = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS) * BLOCK_SIZE
    begin = split * keys_of_a_part
    end = tl.minimum(begin + keys_of_a_part, length)
    ### END SOLUTION
    for first in range(begin, end, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        m, total, out = add_block(tl.sum(q[:, None, :] * k[None, :, :], 2), v, exists, m, total, out)
    # What is stored, and where? `row` [PAD_GROUP]: the index of each query head among those of all requests.
    ### BEGIN SOLUTION
    divisor = tl.where(total == 0.0, 1.0, total)
    part_row = row * SPLITS + split
    part_at = part_row[:, None] * DIM + channel[None, :]
    tl.store(part_ptr + part_at, out / divisor[:, None], mask=head[:, None] < GROUP)
    tl.store(lse_ptr + part_row, m + tl.log(divisor), mask=head < GROUP)
    ### END SOLUTION


# %%
check("l09.split_kernel")

# %% [markdown]
# ### Exercise 4: merge by LSE
#
# A second, small kernel merges the parts. Part $i$ has stored $a_i = o_i / l_i$, and it holds $e^{L_i}$ of the whole
# sum. So the attention output $a$ is
#
# $$a = \frac{\sum_i e^{L_i}\, a_i}{\sum_i e^{L_i}}$$
#
# with the largest $L$ subtracted first, so that nothing overflows. It is your `merge` again, for parts that are already
# divided by their own $l$.


# %%
@triton.jit
def merge_kernel(
    part_ptr,  # [rows, SPLITS, DIM] fp32
    lse_ptr,  # [rows, SPLITS] fp32
    out_ptr,  # [rows, DIM]
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two
):
    """Merge the parts of one query head (a row). Grid: (rows,).

    Example: parts [4, 0] and [0, 4] with lse log 3 and log 1 give [3, 1].
    """
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    split, channel = tl.arange(0, SPLITS), tl.arange(0, DIM)
    lse = tl.load(lse_ptr + row * SPLITS + split)
    part = tl.load(part_ptr + (row * SPLITS + split)[:, None] * DIM + channel[None, :])
    weight = tl.exp(lse - tl.max(lse, 0))
    out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * DIM + channel, out)
    ### END SOLUTION


# %%
check("l09.merge_kernel")

# %% [markdown]
# Now both kernels run in the engine, with the keys split into four parts. A prompt has enough programs without parts,
# so only decode steps are split; the engine's own attention computes the prompt. The picture shows the same two
# requests as above.

# %% tags=["expected"] alt="The same two requests with the keys cut into four parts: sixteen programs. Each has one tile or none; the tiles of the other programs are outlined."
from minillm.ops.paged_attention import paged_attention

my_split, my_merge_kernel = use("l09.split_kernel"), use("l09.merge_kernel")


def my_split_attention(q, keys, values, batch, window=None, splits=4, merge_parts=my_merge_kernel):
    """Your two kernels for decode steps, and the engine's attention for prompts."""
    if max(batch.query_lens) > 1:
        return paged_attention(q, keys, values, batch, window)
    q, (tables, lengths), num_kv = q.contiguous(), rows_of(batch), keys.shape[1]
    out = torch.empty_like(q)
    part = torch.empty(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.empty(*q.shape[:2], splits, dtype=torch.float32, device=q.device)
    args = (q, keys, values, tables, lengths, part, lse, tables.stride(0), q.shape[2] ** -0.5)
    my_split[(len(q), num_kv, splits)](*args, **sizes(q, num_kv, batch.block_size), SPLITS=splits)
    merge_parts[(q.shape[0] * q.shape[1],)](part, lse, out, DIM=q.shape[2], SPLITS=splits)
    return out


both = tiles_of(*seen[-1], parts=4)
alone = ["class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def norm(self"]
expected = completions(alone, 5)
tokens = completions(alone, 5, ops={"paged_attention": my_split_attention})
claim("With the keys split into four parts and merged, the engine generates the same tokens.", tokens == expected)
claim("In the picture no program has more than one tile.", both.longest == 1)
both

# %% [markdown]
# There are as many tiles as before, in more programs, so the longest program takes fewer turns. The *order* of the sums
# has changed, and with it the last bits of the result. Engines choose the number of parts by how busy the GPU is (minillm
# does), so the last bits of a request's results depend on the other requests in the batch. **Batch-invariant** kernels avoid
# that: they split all requests of the same length in the same way.
#
# ### Exercise 5: INT8 inside
#
# The INT8 cache of lesson 4 keeps one scale per token and KV head. Attention in PyTorch dequantises all rows first and
# writes them to memory. So the cache is smaller, but a step moves *more* bytes than with a 16-bit cache that is read in
# place. A kernel can load the codes and dequantise them in registers, so that only the codes and scales move.
#
# All channels of a key share one scale. A key with the codes $c$ and the scale $\sigma$ is $\sigma\,c$, so its scale is a
# factor of the *score*: $q \cdot (\sigma\,c) = \sigma\,(q \cdot c)$. Multiply the GROUP · BLOCK_SIZE scores by the scales
# of the keys, instead of BLOCK_SIZE · DIM elements of the keys. (These scales are at `k_scale_ptr`; the argument `scale`
# is still 1 / √DIM.) For the values, multiply the rows (or their weights).
#
# The rest is given again. Write the five or six lines between computing the addresses and storing the result.


# %%
@triton.jit
def int8_kernel(
    q_ptr,
    k_ptr,  # [slots, NUM_KV, DIM] int8
    k_scale_ptr,  # [slots, NUM_KV] bfloat16: the key is code · scale
    v_ptr,  # like the keys
    v_scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    table_stride,
    scale,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Like `decode_kernel`, for keys and values that are codes with scales. Grid: (requests, NUM_KV).

    Example: with 2 KV heads, the scale of the key in slot 5, KV head 1 lies at k_scale_ptr + 11.
    """
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    row, q = load_queries(q_ptr, scale, NUM_KV, GROUP, PAD_GROUP, DIM)
    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)
    for first in range(0, length, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        slot = (block * BLOCK_SIZE + place) * NUM_KV + kv_head  # rows of this block: [BLOCK_SIZE]
        at = slot[:, None] * DIM + channel[None, :]
        # Codes and scales of this block, its scores, and `add_block`.
        ### BEGIN SOLUTION
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0).to(tl.float32)
        k_scale = tl.load(k_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)
        v_scale = tl.load(v_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)
        score = tl.sum(q[:, None, :] * k[None, :, :], 2) * k_scale[None, :]
        m, total, out = add_block(score, v * v_scale[:, None], exists, m, total, out)
        ### END SOLUTION
    tl.store(out_ptr + row[:, None] * DIM + channel[None, :], out / total[:, None], mask=head[:, None] < GROUP)


# %%
check("l09.int8_kernel")

# %%
my_int8 = use("l09.int8_kernel")


def my_int8_attention(q, keys, values, batch, window=None):
    """Your kernel on the engine's INT8 pools (codes and scales) for decode steps, the engine's attention for prompts."""
    if max(batch.query_lens) > 1:
        return paged_attention(q, keys, values, batch, window)
    q, (tables, lengths), num_kv = q.contiguous(), rows_of(batch), keys.shape[1]
    out = torch.empty_like(q)
    args = (q, *keys.pools, *values.pools, tables, lengths, out, tables.stride(0), q.shape[2] ** -0.5)
    my_int8[(len(q), num_kv)](*args, **sizes(q, num_kv, batch.block_size))
    return out


own = completions(alone, 5, kv_cache_dtype="int8")
tokens = completions(alone, 5, kv_cache_dtype="int8", ops={"paged_attention": my_int8_attention})
claim("On its INT8 cache the engine generates the same tokens with your kernel as without it.", tokens == own)

# %% [markdown]
# ## Measure
#
# ### Bytes moved
#
# Attention must read each stored key and value at least once. The unit below is a 16-bit cache that is read once. (An
# INT8 cache can stay below it: it stores less.) The bytes that each way moves follow from the shapes. Take eight
# requests of 4096 tokens and one layer of a model with 8 KV heads of 128 channels, 32 query heads, 16-bit elements and
# blocks of 16:

# %%
REQUESTS, TOKENS, KV_HEADS, HEADS, WIDE, BLOCK, PARTS = 8, 4096, 8, 32, 128, 16, 8
rows = 2 * REQUESTS * TOKENS * KV_HEADS  # keys and values
PLAIN_ROW, INT8_ROW = 2 * WIDE, WIDE + 2  # bytes; INT8: codes and a scale
queries = 2 * REQUESTS * HEADS * WIDE * 2  # read, and as many results written
table = REQUESTS * KV_HEADS * TOKENS // BLOCK * 8  # a block id of 8 bytes per tile
parts = 2 * REQUESTS * HEADS * PARTS * (WIDE + 1) * 4  # written, and read again by the merge
moved = {
    "gather, then attend": rows * 3 * PLAIN_ROW + queries,
    "walk the table": rows * PLAIN_ROW + table + queries,
    f"walk it in {PARTS} parts": rows * PLAIN_ROW + table + queries + parts,
    "INT8, dequantised first": rows * (INT8_ROW + 2 * PLAIN_ROW) + queries,
    "INT8, in the kernel": rows * INT8_ROW + table + queries,
}
once = rows * PLAIN_ROW
print(f"a 16-bit cache, read once: {once / 2**20:.0f} MiB\n")
for way, count in moved.items():
    print(f"{way:24} {count / 2**20:6.1f} MiB   {count / once:.3f} of a 16-bit cache, read once")
reveal("l09.gather", round(moved["gather, then attend"] / once, 2))
reveal("l09.int8", round(moved["INT8, dequantised first"] / once, 2))
extra = {way: count / moved["walk the table"] - 1 for way, count in moved.items()}
claim("Reading the block table adds a tenth of a percent.", 0.0005 < table / once < 0.0015)
claim(f"Splitting into {PARTS} parts adds less than 2%.", 0 < extra[f"walk it in {PARTS} parts"] < 0.02)
claim(
    "INT8 dequantised first moves 2.5 times the bytes of a 16-bit cache.",
    2.4 < moved["INT8, dequantised first"] / once < 2.6,
)

# %% [markdown]
# Looking up blocks is cheap, copying rows is not. And a quantised cache moves fewer bytes than a 16-bit cache read in
# place only if the kernel reads the codes.
#
# ### How many multiprocessors are busy
#
# Take one request that grows. Without parts the number of programs does not grow with it. The model below is rough (every
# turn takes the same time, and each multiprocessor runs one program at a time), but it shows why Flash-Decoding exists.

# %%
PROCESSORS = 132


def turns(tokens: int, num_parts: int) -> int:
    """Turns of the loop that run one after the other, until all programs of one request are done."""
    picture = AttentionTiles([tokens], [range(-(-tokens // BLOCK))], BLOCK, KV_HEADS, num_parts)
    waves = -(-KV_HEADS * num_parts // PROCESSORS)
    return picture.longest * waves


lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
LineChart(
    "One request: turns that run one after the other, per layer",
    Axis("tokens in the cache", log=True, ticks=tuple(lengths)),
    Axis("turns", log=True, ticks=(1, 4, 16, 64, 256, 1024)),
    [
        Series(f"{n} {'part' if n == 1 else 'parts'}", lengths, [turns(t, n) for t in lengths], style="modelled")
        for n in (1, 4, 16)
    ],
    summary="Turns that run one after the other, for 1, 4 and 16 parts: 16 parts need a sixteenth of the turns of 1.",
)

# %%
busy = len(AttentionTiles([4096], [range(256)], BLOCK, KV_HEADS).programs())
for num_parts in (1, 4, 16):
    print(
        f"{num_parts:2} {'part: ' if num_parts == 1 else 'parts:'} {min(busy * num_parts, PROCESSORS):3} of {PROCESSORS} multiprocessors have a program"
    )
reveal("l09.busy", busy)
claim(
    "With 16 parts, a request of 16384 tokens needs a sixteenth of the turns.", 16 * turns(16384, 16) == turns(16384, 1)
)

# %% [markdown]
# ### On a GPU: achieved bandwidth
#
# This cell divides the bytes that must be read by the measured time, and compares the result with a plain copy on the same
# machine. Without a GPU it measures nothing: the interpreter's time is Python's.

# %% tags=["nbval-ignore-output"]
from torch.nn import functional as F
from triton.testing import do_bench


def bytes_per_second(run, num_bytes: int) -> float:
    """`num_bytes` divided by the median time of a run. `do_bench` overwrites the L2 cache of the GPU before each."""
    return num_bytes / (do_bench(run, return_mode="median") / 1000)


def on_gpu(num_requests: int) -> None:
    """Time four ways, for requests of 4096 tokens whose blocks are scattered at random."""
    per_request = TOKENS // BLOCK
    tables = torch.randperm(num_requests * per_request, device="cuda").view(num_requests, per_request)
    keys, values = torch.randn(2, num_requests * TOKENS, KV_HEADS, WIDE, device="cuda").half()
    q = torch.randn(num_requests, HEADS, WIDE, device="cuda").half()
    many = torch.full((num_requests,), TOKENS, device="cuda")
    out, shape = torch.empty_like(q), sizes(q, KV_HEADS, BLOCK)
    part = torch.empty(num_requests, HEADS, PARTS, WIDE, device="cuda")
    lse = torch.empty(num_requests, HEADS, PARTS, device="cuda")
    slots = (tables[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    codes = [quantize_symmetric(x, 127) for x in (keys, values)]
    last = (tables, many, out, tables.stride(0), WIDE**-0.5)

    def gather():
        k, v = (x[slots].view(num_requests, TOKENS, KV_HEADS, WIDE).transpose(1, 2) for x in (keys, values))
        F.scaled_dot_product_attention(q.view(num_requests, KV_HEADS, -1, WIDE), k, v)

    def split():
        my_split[(num_requests, KV_HEADS, PARTS)](
            q, keys, values, tables, many, part, lse, tables.stride(0), WIDE**-0.5, **shape, SPLITS=PARTS
        )
        my_merge_kernel[(num_requests * HEADS,)](part, lse, out, DIM=WIDE, SPLITS=PARTS)

    plain, packed = 2 * keys.nbytes, 2 * keys.numel() // WIDE * INT8_ROW
    grid = (num_requests, KV_HEADS)
    ways = {
        "gather, then attend": (gather, plain),
        "walk the table": (lambda: my_decode[grid](q, keys, values, *last, **shape), plain),
        f"walk it in {PARTS} parts": (split, plain),
        "INT8, in the kernel": (lambda: my_int8[grid](q, *codes[0], *codes[1], *last, **shape), packed),
    }
    for way, (run, num_bytes) in ways.items():
        rate = bytes_per_second(run, num_bytes)
        print(
            f"{num_requests:3} requests, {way:22} {num_bytes / rate * 1e6:7.0f} µs, {rate / copy.median:6.1%} of a copy"
        )


if DEVICE == "cuda":
    from minillm.doctor.machine_limits import copy_bandwidth
    from minillm.ops.kv_quant import quantize_symmetric

    copy = copy_bandwidth("cuda")
    print(f"copy bandwidth: {copy}")
    for num_requests in (1, 32):
        on_gpu(num_requests)
else:
    print("no GPU here: bytes and turns are counted above, and times are not measured")

# %% [markdown]
# **Where this kernel loses.**
#
# - *Prompts.* Every new token has programs of its own, and each of them reads all keys up to that token. So a prompt of
# n tokens reads n (n + 1) / 2 keys per KV head. A program for a tile of 64 queries would read each key once for all of
# them, about one 64th of that in long prompts:

# %%
for tokens_in_prompt in (16, 512, 4096):
    read = tokens_in_prompt * (tokens_in_prompt + 1) // 2
    print(f"prompt of {tokens_in_prompt:4}: {read:9,} keys read per KV head, {read / tokens_in_prompt:6.1f} times each")

# %% [markdown]
#   The engine's own kernel and FlashAttention do this: they put several queries into one tile.
# - *One short request.* A few hundred tokens are about a megabyte per layer here, which an H100 reads in less than a
#   microsecond (modelled). A launch takes several, and parts add a second one.
# - *Many requests.* With 32 requests of similar length and 8 KV heads there are 256 programs already, and parts only add bytes.
# - *Tensor cores.* `tl.sum` of products uses none. As long as few queries share a key, reading is the bottleneck and that
#   does not matter. When several queries share each key (a group of 8, or drafts to verify), `tl.dot` on a tile of queries
#   is better, and the engine's kernel does that. Triton (3.6 to 3.9) takes a `tl.dot` of any number of rows and columns, 1
#   and 4 included, and pads small ones itself; but its sums must have at least 16 terms in float16 or bfloat16. It compiles
#   `tl.dot` to tensor-core instructions from sm_80 on; for sm_75 (a T4) it emits ordinary multiply-add instructions,
#   although that GPU has tensor cores.
#
# ## Break it
#
# ### Forget the mask of the last block
#
# Two things deal with slots that hold no token: the mask of the loads, and -inf for the scores. Of the two broken
# kernels below, the first does not set the scores to -inf; the second loads its keys with a mask and its values
# without. (The check of exercise 2 recognises both mistakes.) **Guess first:** for which lengths is the result still
# right, and does it matter what the unused slots of the block hold?

# %%
from minillm.teaching.registry import find

planted = {wrong.description: wrong.function for wrong in find("l09.decode_kernel").wrong}
broken = {
    "yours": my_decode,
    "scores without -inf": next(kernel for name, kernel in planted.items() if "is not -inf" in name),
    "values without a mask": next(kernel for name, kernel in planted.items() if "never written" in name),
}


def error_at(length: int, rest: float, kernel) -> float:
    """Largest error of a kernel on a request of `length` tokens, if unused slots hold `rest`."""
    torch.manual_seed(length)
    used = torch.randn(2, length, 1, 64)
    pool = torch.full((2, 32, 1, 64), rest)
    pool[:, :length] = used
    q = torch.randn(1, 3, 64)
    right = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], *(x.transpose(0, 1)[None] for x in used), enable_gqa=True
    )
    q, pool, tables, lengths = (x.to(DEVICE) for x in (q, pool, torch.tensor([[0, 1]]), torch.tensor([length])))
    out = torch.empty_like(q)
    kernel[(1, 1)](q, pool[0], pool[1], tables, lengths, out, 2, 64**-0.5, **sizes(q, 1, 16))
    return float((out.cpu() - right[0].transpose(0, 1)).abs().max())


print("largest error at a length of             16      17      31      32")
found = {}
for name, kernel in broken.items():
    for rest in (0.0, 1.0, torch.nan):
        errors = found[name, rest] = [error_at(length, rest, kernel) for length in (16, 17, 31, 32)]
        print(f"{name:22} slots hold {rest:3.0f}   " + "".join(f"{error:8.2f}" for error in errors))

# %%
full = [error for errors in found.values() for error in (errors[0], errors[3])]
claim("Both broken kernels are right where the request fills its blocks.", max(full) < 1e-5)
unmasked = {rest: errors for (name, rest), errors in found.items() if name == "values without a mask"}
numbers = [error for rest, errors in unmasked.items() if rest == rest for error in errors]
claim("Without a mask for the values, the result is right while the unused slots hold numbers.", max(numbers) < 1e-5)
claim(
    "It is NaN where the unused slots hold NaN and the last block is not full.",
    np.isnan(unmasked[torch.nan][1:3]).all(),
)

# %% [markdown]
# A test with lengths of 16 and 32 finds neither mistake. The second kernel is right even at 17, as long as the unused slots
# hold numbers: their weight of 0 removes them. When the pool holds a NaN there (fresh memory, or the result of an overflow),
# 0 · NaN is NaN, and a request fails because of what another request left in the block. Hence a rule for testing such
# kernels: fill everything that must not be read with NaN.
#
# ### Merge by averaging
#
# Now a mistake in the merge: average the parts, as if each held the same share of the softmax. The shapes are right and
# nothing is NaN.

# %%
averaging = next(wrong.function for wrong in find("l09.merge_kernel").wrong if "averages" in wrong.description)


def averaged_attention(q, keys, values, batch, window=None):
    """Attention split into four parts, which are averaged."""
    return my_split_attention(q, keys, values, batch, merge_parts=averaging)


short = ["with open(path) as"]  # leaves parts that are short or empty
[right_tokens] = completions(short, 5)
[wrong_tokens] = completions(short, 5, ops={"paged_attention": averaged_attention})
tokenizer = LLM(NAME, **PLAIN).engine.tokenizer
same = next((i for i, (a, b) in enumerate(zip(wrong_tokens, right_tokens, strict=True)) if a != b), len(wrong_tokens))
print(f"right tokens before the first wrong one: {same} of {len(wrong_tokens)}")
claim("Averaging gives another completion.", same < len(wrong_tokens))
print("LSE:      ", repr(tokenizer.decode(right_tokens)))
print("averaging:", repr(tokenizer.decode(wrong_tokens)))

# %% [markdown]
# A part without keys counts as a zero vector here, and a part of one key counts as much as a full one. A test on
# *random* keys in equal parts would find only a small error and might accept it. So compare with the reference at a small
# tolerance, and also at lengths that leave parts empty.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM, Triton unified attention (`triton_unified_attention`) | one kernel for prompts and decoding, the queries of a group packed into one tile; a variant with split-KV and a second kernel that merges the segments (pull requests 16828 and 19152). The default is FlashAttention on Ampere and Hopper GPUs, FlashInfer on Blackwell |
# | vLLM, `paged_attention_v1` and `v2` | the CUDA kernels of the PagedAttention paper: a thread block (the CUDA counterpart of a program) per request and query head walks the block table; v2 adds parts of 512 tokens. Not used by default since vLLM 0.8 (its maintainers in pull request 15353) |
# | Flash-Decoding | split-KV with an LSE per part, for FlashAttention; later versions take a block table and choose the number of parts |
# | FlashInfer | plans before each step how to split the keys of a batch of requests with different lengths, and has a function that merges two (output, LSE) pairs |
# | SGLang, `triton_ops/decode_attention.py` | split-KV in Triton, and a second kernel that merges the parts; its table lists the slot of every token |
# | transformers, `generate_batch` | gathers the keys and values of the paged cache for FlashAttention (SDPA without it), or, for decoding, hands the block table to FlashAttention's kernel |
# | llama.cpp | no block table (lesson 6). Its CUDA kernels split the keys over thread blocks, merge the parts in a second kernel, and dequantise 8- and 4-bit caches inside |
# | minillm, `ops/triton/paged_attention.py` | `decode_kernel`, `split_kernel` and `int8_kernel` in one, with several queries per tile, draft trees (lesson 11), INT4, and powers of 2 instead of e |
#
# **Claims, checked.** One article says that kernels "like FlashAttention … reduce memory bandwidth usage". Another's
# table gives INT8 keys and values "1.0× (memory only)" (both quoted). The bytes show how far each can be right. The model
# has the shape of Llama 3 8B: a step reads 15 GB of 16-bit weights (and one row of the input embedding), in 32 layers.

# %%
scores = HEADS * 4 * 4  # bytes per key: fp32 scores written, read, weights written, read: what a fused kernel saves
print(
    f"decoding: the scores that a fused kernel keeps on the chip are {scores / (scores + KV_HEADS * 2 * PLAIN_ROW):.0%} of the bytes of unfused attention"
)

WEIGHTS, LAYERS = 15e9, 32
speeds = {}
for users, context in ((1, 512), (1, 4096), (64, 4096)):
    plain = users * context * LAYERS * KV_HEADS * 2 * PLAIN_ROW
    inside, outside = plain * INT8_ROW / PLAIN_ROW, plain * (INT8_ROW + 2 * PLAIN_ROW) / PLAIN_ROW
    best, worst = ((WEIGHTS + plain) / (WEIGHTS + x) for x in (inside, outside))
    speeds[users, context] = best, worst
    print(
        f"{users:2} {'user, ' if users == 1 else 'users,'} {context:4} tokens each: INT8 in the kernel {best:.2f}×, dequantised first {worst:.2f}× the speed"
    )

claim(
    "By its bytes, with many users INT8 in the kernel gains more than 40%, and dequantised first it loses.",
    speeds[64, 4096][0] > 1.4 and speeds[64, 4096][1] < 1,
)
claim("With one user and a short context it gains less than 1%.", speeds[1, 512][0] < 1.01)

# %% [markdown]
# | claim | what holds | how it is known |
# |---|---|---|
# | FlashAttention-like kernels reduce the bandwidth used | much in a prefill, whose scores grow with n²; when decoding, the keys and values must be read in any case, and only the scores are saved | decoding: counted above; prefill: by the n² scores, not counted here |
# | INT8 keys and values: 1.0×, memory only | true for one user with a short context, where nearly all bytes read are weights. With many users it gains if the kernel reads the codes, at most what the bytes allow, and *loses* if they are dequantised first | modelled by bytes, above |
# | PagedAttention makes one stream faster | no: walking a block table moves about as many bytes as reading a contiguous cache. Reading the table costs next to nothing, and gains nothing | counted above |
#
# A kernel need not reach what its bytes allow. On an H100, attention over 32,768 cached tokens was 1.16 times as fast with
# the engine's own INT8 kernel as with 16 bits, where the bytes allow 1.97 times; it read the codes at 47% of the rate of a
# copy. After 2,000 tokens it took longer than with 16 bits, 16.1 µs instead of 12.9 (all measured: docs/gpu.md).
#
# If you have a GPU, the cell about achieved bandwidth *measures* four ways: gathering first, walking the table, walking
# it in parts, and INT8 in the kernel. It times no contiguous cache, and no INT8 that is dequantised first.
#
# **Papers.** Milakov & Gimelshein 2018, *Online normalizer calculation for softmax*. Dao et al. 2022, *FlashAttention*.
# Dao et al. 2023, *Flash-Decoding for long-context inference*. Kwon et al. 2023, *PagedAttention* (section 5 has the
# kernels). Ye et al. 2025, *FlashInfer*.
#
# ## Recap
#
# 1. A softmax over pieces needs $(m, l, o)$ per piece. Merging rescales both sums to the larger maximum, and is exact.
# 2. So a kernel can walk the block table and read every key and value once: a third of what gathering moves.
# 3. Split-KV keeps a whole GPU busy with one long request. Each part stores its LSE, and the weights of the merge are $e^{L}$.
# 4. A quantised cache moves fewer bytes than a 16-bit cache read in place only if the kernel itself dequantises the codes.
# 5. In the last block, mask the loads *and* the scores, and test with NaN in every slot that must not be read.
#
# **Next:** in lesson 10 a small model guesses several tokens ahead, and the text stays exactly the large model's.
