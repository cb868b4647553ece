# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 4. INT8 and INT4 KV
#
# **Question.** *How few bits can a key have before the model gets worse?*
#
# Lesson 2 traded memory for time, and lesson 3 showed what limits a decode step of a large model: bytes. So store each
# number in fewer bits. In float16 each number of a key or a value takes 16 bits. With 8 bits, the same memory holds
# almost twice the text; with 4, almost four times as much. It is only almost, because the integer codes need
# **[scales](glossary.md#scale)**, the factors between codes and numbers, and scales take memory too. This lesson counts
# them.
#
# You build two schemes: a scale per token and head (INT8, INT4; vLLM has both, INT4 with a rotation and a zero point),
# and a scale per channel ([KIVI](glossary.md#kivi)). Your functions then store the keys and values of a real model inside
# the engine, and two measures show what changed: the tokens it generates, and how far its probabilities moved.
#
# You need lesson 2 (what a row of the cache is). Everything runs on a laptop's CPU. The engine runs its steps in plain
# PyTorch here (`enforce_eager=True`), so that your functions can replace its own and every operation can be counted.
# (By default the engine runs a compiled step, which lesson 15 uses.)

# %%
import os

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.bench import quality
from minillm.models.held_out import evaluation_prompts
from minillm.models.config import ModelConfig
from minillm.batch import Segment
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.teaching.exercises.l02_kv_cache import LLAMA_3_8B
from minillm.teaching.workshop.l04_bounds import try_bounds
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.tensors.error_map import ErrorMap

NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
PLAIN = {"device": "cpu", "enforce_eager": True}  # plain PyTorch: what is counted here is what runs
llm = LLM(NAME, **PLAIN)
config = llm.engine.runner.model.config
DIM = config.head_dim
print(f"{NAME}: {config.num_layers} layers, {config.num_kv_heads} KV heads of width {DIM}")

# %% [markdown]
# ## The question, in numbers
#
# Compare a model of eight billion weights in float16 with the cache of *one* text. (Arithmetic, from the shape of Llama
# 3.1 8B.)

# %%
weights, per_token = 16e9, 2 * LLAMA_3_8B.num_layers * LLAMA_3_8B.kv_size * 2
for context in (8_192, 32_768, 131_072):
    print(
        f"{context:7,} tokens: {context * per_token / 1e9:5.1f} GB of keys and values, weights {weights / 1e9:.0f} GB"
    )

claim("At 131,072 tokens the cache of one text is larger than the model.", 131_072 * per_token > weights)

# %% [markdown]
# Every decode step reads all of it.
#
# ## Predict
#
# Write a number for each before you measure.
#
# 1. INT8 codes, and one scale of two bytes per token and head, heads of width 64. How many times smaller than float16?
#    (An article says 2.)
# 2. Keys and values in INT4, one scale per token and head. At how many of 100 positions in a text does the most
#    probable next token (the argmax) differ from that of float32?
# 3. An INT8 cache written in plain PyTorch [dequantises](glossary.md#quantisation) its codes before it attends. How
#    many bytes does the attention of one decode step move, as a multiple of the same step over a float16 cache?

# %%
predict("l04.smaller", None, unit="times")
predict("l04.changed", None, unit="of 100")
predict("l04.moved", None, unit="times")

# %% [markdown]
# ## Build
#
# ### Exercise 1: one scale per token and head
#
# An integer code $c$ stands for the number $c \cdot s$. Choose the scale $s$ so that the largest absolute value of the
# row gets the largest code:
#
# $$s = \frac{\max_i |x_i|}{\text{levels}}, \qquad c_i = \operatorname{round}(x_i / s), \qquad
# |x_i - c_i s| \le \frac{s}{2}$$
#
# where *levels* is the number of positive codes, and so the largest code: 127 for 8 bits, 7 for 4 bits. Two details
# decide whether the bound holds:
#
# * A row of zeros has $s = 0$, and $0/0$ is NaN. Give it the scale 1.
# * The scale is stored in two bytes. Dequantising multiplies by the *stored* scale, so divide by the stored scale too.
#   It is stored in bfloat16, which has the range of float32; in float16, scales below about 3e-8 would become 0.


# %%
def quantise_symmetric(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Quantise with one scale per token and head.

    x:       [tokens, heads, dim] float32; not changed
    levels:  the largest code, such as 127 (8 bits) or 7 (4 bits)
    returns: codes [tokens, heads, dim] int8, within ±levels; scale [tokens, heads] bfloat16, 1 for a row of zeros

    Example: x = [[[1, -2.1, 0.3, 4]]], levels = 7: 4 / 7 is 0.5703 in bfloat16, and the codes are [[[2, -4, 1, 7]]].
    """
    ### BEGIN SOLUTION
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / levels).to(torch.bfloat16)
    codes = (x / scale.float()[..., None]).round().clamp(-levels, levels)
    return codes.to(torch.int8), scale
    ### END SOLUTION


# %%
check("l04.quantise_symmetric")

# %% [markdown]
# Stuck? `hint("l04.quantise_symmetric", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### See: your codes in the engine
#
# The engine's quantised caches have two methods: `encode` (numbers to codes and scales) and `decode` (back). Paging,
# sharing and attention are the same for all of them. Here `encode` is yours, and the engine completes 24 prompts from
# files that the model was not trained on.

# %%
from minillm.cache.paged_int8 import PagedInt8KVCache

my_quantise = use("l04.quantise_symmetric")


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers [tokens, heads, dim] of these codes, given one scale per token and head."""
    return codes.float() * scale.float()[..., None]


class MyInt8(PagedInt8KVCache):
    """The engine's INT8 layout with your codes in it."""

    def encode(self, x):
        return my_quantise(x, 127)

    def decode(self, codes, scale):
        return dequantise(codes, scale)


# %% tags=["nbval-ignore-output"]
prompts = [p.prompt for p in evaluation_prompts()[:24]]
greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def written(engine: LLM) -> list[list[int]]:
    """The tokens that the engine generates after each prompt."""
    return [output.outputs[0].token_ids for output in engine.generate(prompts, greedy, use_tqdm=False)]


def compare(label: str, tokens: list[list[int]]) -> int:
    """Return and print how many texts equal those of float32, and print at which token the others first differ."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(tokens, exact_tokens, strict=True)]
    firsts = [next((i for i, (a, b) in enumerate(pair) if a != b), None) for pair in pairs]
    where = ", ".join(str(i + 1) for i in sorted(i for i in firsts if i is not None)) or "nowhere"
    print(
        f"{label}: {firsts.count(None)} of {len(firsts)} texts equal those of float32; first different token: {where}"
    )
    return firsts.count(None)


exact_tokens = written(llm)
int8_tokens = written(LLM(NAME, **PLAIN, kv_cache_config={"layout": MyInt8}))
same_int8 = compare("INT8", int8_tokens)
claim("With INT8 all texts, or all but a few, stay the same.", same_int8 >= 20, measured=True)

# %%
claim(
    "The engine's own INT8 generates the same texts.", int8_tokens == written(LLM(NAME, **PLAIN, kv_cache_dtype="int8"))
)

# %% [markdown]
# Which texts change depends on the rounding of sums on your processor. Sometimes two tokens are nearly equally
# probable. Then the smallest error decides between them, and the texts differ from there on. A different text need not
# be *worse*, and equal texts do not mean equal probabilities. A finer measure follows below.
#
# ### Exercises 2 and 3: two codes in one byte
#
# PyTorch cannot compute with four-bit integers, so two codes share a byte: codes 0, 2, 4 … lie in the low halves, codes
# 1, 3, 5 … in the high halves. Negative codes are in two's complement, as in int8 but with four bits: -1 is `1111`, -8
# is `1000`.


# %%
def pack_int4(codes: Tensor) -> Tensor:
    """Pack two signed codes into each byte.

    codes:   [..., n] int8, each -8 … 7, n even
    returns: [..., n / 2] uint8; codes 0, 2, 4 … in the low halves, codes 1, 3, 5 … in the high ones

    Example: [3, 5] gives [0x53], and [-1, 2] gives [0x2F].
    """
    ### BEGIN SOLUTION
    nibbles = codes.to(torch.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
    ### END SOLUTION


# %%
check("l04.pack_int4")


# %%
def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4.

    packed:  [..., n / 2] uint8
    returns: [..., n] int8, each -8 … 7

    Example: [0x2F] gives [-1, 2].
    """
    ### BEGIN SOLUTION
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
    ### END SOLUTION


# %%
check("l04.unpack_int4")

# %% [markdown]
# With these functions and `levels = 7` you have an INT4 cache. The layout's `row_fields` declares what is stored for one
# token and head; the engine computes the bytes from it.

# %% tags=["nbval-ignore-output"]
from minillm.cache.paged_quantized import RowField, PagedQuantizedKVCache

my_pack, my_unpack = use("l04.pack_int4"), use("l04.unpack_int4")


class MyInt4(PagedQuantizedKVCache):
    """Your codes from -7 to 7, two to a byte, and one scale per token and head."""

    @classmethod
    def row_fields(cls, head_dim):
        return RowField((head_dim // 2,), torch.uint8), RowField((), torch.bfloat16)

    def encode(self, x):
        codes, scale = my_quantise(x, 7)
        return my_pack(codes), scale

    def decode(self, packed, scale):
        return dequantise(my_unpack(packed), scale)


same_int4 = compare("INT4", written(LLM(NAME, **PLAIN, kv_cache_config={"layout": MyInt4})))
claim("INT4 changes many more texts than INT8.", same_int4 < same_int8 - 4, measured=True)

# %% [markdown]
# ### Exercise 4: what it costs
#
# A quantised cache stores more than codes. Count the bytes of one token: `bits` per number, and `group_bytes` for each
# group of `group_size` numbers, which hold its scale, or its scale and a zero point (an offset, see exercise 5).


# %%
def cache_bytes(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    """Bytes that one token adds to the cache over all layers, scales included.

    config: has num_layers, num_heads (of the queries), num_kv_heads and head_dim; group_size divides head_dim

    Example: one layer, one KV head of width 4, 8 bits, a scale of 2 bytes for each 4 numbers: 2 · (4 + 2) = 12 bytes.
    """
    ### BEGIN SOLUTION
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * bits // 8 + numbers // group_size * group_bytes
    ### END SOLUTION


# %%
check("l04.cache_bytes")

# %% [markdown]
# The claim to test: "INT8 gives 2×, INT4 gives 4×". One scale of two bytes per token and head, for heads of four
# widths.

# %%
from dataclasses import replace

my_bytes = use("l04.cache_bytes")
print("head width      INT8      INT4")
for width in (128, 64, 32, 16):
    heads = replace(config, head_dim=width)
    half = my_bytes(heads, 16, width, 0)
    print(f"{width:10} {half / my_bytes(heads, 8, width, 2):8.2f}x {half / my_bytes(heads, 4, width, 2):8.2f}x")
reveal("l04.smaller", round(my_bytes(config, 16, 64, 0) / my_bytes(config, 8, 64, 2), 2))
allocated = PagedInt8KVCache.bytes_per_block(config, 1, torch.float16)
claim("The engine allocates as many bytes as you count.", allocated == my_bytes(config, 8, DIM, 2))
print(f"INT4 with a scale and a zero point for every 32 numbers: {4 + 8 * 4 / 32:.0f} bits per number")

# %% [markdown]
# With wide heads the claim is nearly right. The narrower the head, the larger the share of its scale. Smaller groups need
# more scales. INT4 is often stored in smaller groups, because its steps are coarse: a group without a large number then
# gets finer ones. *Bytes against KL* below has such groups, with a zero point each.
#
# The article with this claim also has a table of memory: 160 GB without any technique, 120 GB in the line "+ INT8 KV
# cache". It states no model, context or batch. Its samples load a model of 70 billion weights in float16. Could INT8
# save 40 GB there?

# %%
weights_70b = 2 * 68.98  # GB of Llama-2-70B in float16: 68.98 billion weights (quoted)
most = 160 - weights_70b
print(
    f"70B in float16: {weights_70b:.0f} GB of weights, so at most {most:.0f} of the 160 GB are cache, "
    f"and INT8 saves less than {most / 2:.0f} GB"
)
claim("The 120 GB would not even hold the weights.", weights_70b > 120)

# %% [markdown]
# ### Are the large numbers in rows or in columns?
#
# A scale must cover the largest of the numbers that share it. A **channel** is one position in the vectors of a head, a
# column when each token is a row. If the large numbers are in a few channels, the same for every token, then they
# determine each token's scale, and all other channels use only a few codes. A scale per *channel* would not have that
# problem. Are there such channels? Look at the keys and the values of the layer where they are clearest.

# %% tags=["expected"] alt="Heat maps of keys and values of one head, 64 tokens by 64 channels: the keys have vertical stripes, channels that are large for every token; the values have no clear stripes."
from minillm.cache.paged import PagedKVCache


recorded = {}  # layer → (queries, keys, values)


class RecordingCache(PagedKVCache):
    """The plain cache, which also records the queries, keys and values of each layer."""

    def attend(self, layer, q, k, v, batch):
        recorded[layer] = (q, k, v)
        return super().attend(layer, q, k, v, batch)


tokenizer = llm.engine.tokenizer
encoded = [tokenizer.encode(prompt.prompt) for prompt in evaluation_prompts()]
token_ids = [i for ids in encoded for i in ids][:128]
recorder = LLM(NAME, **PLAIN, kv_cache_config={"layout": RecordingCache}).engine.runner
blocks = list(range(-(-len(token_ids) // recorder.block_size)))
recorder.run([Segment(token_ids, 0, blocks)])
del recorder  # it holds a copy of the weights


def stripe(x: Tensor) -> Tensor:
    """For each head, the strongest channel divided by the median channel, by mean absolute value."""
    size = x.abs().mean(0)
    return size.amax(-1) / size.median(-1).values


strongest = {}
print("strongest channel divided by the median channel, for the head of each layer in which this ratio is largest:")
for name, which in (("keys", 1), ("values", 2)):
    by_layer = [float(stripe(recorded[layer][which]).max()) for layer in range(config.num_layers)]
    strongest[name] = max(by_layer)
    print(f"  {name:7}", " ".join(f"{one:.1f}" for one in by_layer))
claim("The largest ratio is one of the keys'.", strongest["keys"] > strongest["values"], of_model=True)
claim("It is between 2.5 and 5.", 2.5 < strongest["keys"] < 5, of_model=True)
layer = max(range(config.num_layers), key=lambda i: float(stripe(recorded[i][1]).max()))
head = int(stripe(recorded[layer][1]).argmax())
keys, values = recorded[layer][1][:, head], recorded[layer][2][:, head]
ErrorMap(
    {"keys": keys[:64], "values": values[:64]},
    title=f"Keys and values, layer {layer}, head {head}",
    unit="absolute value",
)

# %% [markdown]
# The keys of this head have clear stripes, its values at most weak ones. But the strongest channel is only a few times
# the median channel here. In the KIVI paper's pictures of Llama 2 a few channels are far above all others (quoted, not
# measured here). This model has the pattern, but weakly.
#
# ### Exercise 5: one scale per channel
#
# So change the direction. A scale **[per channel](glossary.md#per-channel)** is shared by the numbers of one channel in
# several tokens: a **[group](glossary.md#group)** of tokens. A channel may lie far from zero and vary little, so the
# sixteen codes cover the range from its minimum to its maximum:
#
# $$z = \min, \qquad s = \frac{\max - z}{15}, \qquad c = \operatorname{round}\!\left(\frac{x - z}{s}\right) \in 0 \dots 15,
# \qquad \hat x = c \cdot s + z$$
#
# The zero point $z$ and the scale $s$ are stored in float16. Again, use the stored values: compute the scale from the
# stored zero point, and the codes from both. Where float16 rounds the zero point *above* the minimum, a code can be
# negative, and an unsigned byte would store -1 as 255. So clamp the codes. (The engine rounds the zero point down and
# the scale up, so that its bound needs no exception.)


# %%
def quantise_per_channel(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise with a scale and a zero point per channel, for each group of `group_size` tokens.

    x:       [tokens, heads, dim] float32; tokens is a multiple of group_size; not changed
    returns: codes [tokens, heads, dim] uint8, each 0 … 15; scale and zero, both [groups, heads, dim] float16
             (scale = (maximum - stored zero) / 15; one that is not above 0 becomes 1)

    Example: one channel with the values 0, 1, 3.2, 2.1 in a group of 4: zero 0, scale 3.2 / 15, codes 0, 5, 15, 10.
    """
    ### BEGIN SOLUTION
    grouped = x.unflatten(0, (-1, group_size))
    low, high = grouped.amin(1), grouped.amax(1)
    zero = low.half()
    scale = ((high - zero.float()) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).to(torch.uint8), scale, zero
    ### END SOLUTION


# %%
check("l04.quantise_per_channel")

# %% [markdown]
# ### See: where the errors go
#
# The same keys, quantised to four bits by each of your two functions.

# %% tags=["expected"] alt="Errors of the keys, one scale per token against one scale per channel, on one colour scale: the left map is dark in most cells, the right one is light everywhere, a little less so in some columns."
my_per_channel = use("l04.quantise_per_channel")


def errors_per_token(x: Tensor) -> Tensor:
    """[tokens, dim]: your INT4 codes with one scale per token."""
    return (dequantise(*my_quantise(x[:, None], 7))[:, 0] - x).abs()


def errors_per_channel(x: Tensor, group_size: int = 32) -> Tensor:
    """[tokens, dim]: your codes with a scale and a zero point per channel."""
    codes, scale, zero = my_per_channel(x[:, None], group_size)
    grouped = codes.unflatten(0, (-1, group_size)).float()
    return ((grouped * scale.float()[:, None] + zero.float()[:, None]).flatten(0, 1)[:, 0] - x).abs()


def errors_by_direction(x: Tensor, group_size: int = 64) -> Tensor:
    """[tokens, dim]: your symmetric codes, without a zero point, with one scale per channel and `group_size` tokens."""
    groups = x.T.unflatten(1, (-1, group_size))  # [dim, groups, group_size]: a row of these shares a scale
    return (dequantise(*my_quantise(groups, 7)) - groups).abs().flatten(1).T


pictured = {"a scale per token": errors_per_token(keys)[:64], "a scale per channel": errors_per_channel(keys)[:64]}
by_token, by_channel = (float(errors.mean()) for errors in pictured.values())
claim(
    "Errors with a scale per channel are less than half as large on average.", by_channel < by_token / 2, of_model=True
)
ErrorMap(pictured, title=f"Errors of INT4 keys, layer {layer}, head {head}")

# %% [markdown]
# On the left, errors are in rows: a token with one large number has a coarse scale for all its channels. On the right
# most are smaller, less than half as large on average, and the larger ones are in columns: those of the channels with a
# wide range. Now the average over all layers, for keys and for values.

# %%
gains, alone = {}, {}
print("mean error with a scale per token, divided by the error with a scale per channel")
for name, which in (("keys", 1), ("values", 2)):
    rows = [recorded[i][which][:, h] for i in range(config.num_layers) for h in range(config.num_kv_heads)]
    ways = errors_per_token, errors_per_channel, errors_by_direction
    token, channel, direction = (float(sum(f(x).mean() for x in rows)) for f in ways)
    gains[name], alone[name] = token / channel, token / direction
    print(f"{name:7} with a zero point {gains[name]:.2f}, without {alone[name]:.2f}")
claim("Scales per channel help keys more than values.", gains["keys"] > gains["values"] > 1, of_model=True)
claim(
    "The direction alone makes errors of keys smaller, 1.2 to 1.5 times, and hardly changes those of values.",
    1.2 < alone["keys"] < 1.5 and 0.95 < alone["values"] < 1.05,
    of_model=True,
)

# %% [markdown]
# Only the gain without a [zero point](glossary.md#zero-point) is the direction's: there 64 numbers share a scale in both
# directions. The rest comes from the zero point, and from smaller groups: with a zero point only 32 numbers share a scale
# per channel here, and a smaller group alone has smaller errors. To show the direction more clearly, here is a
# **made-up** key cache: noise of size 1, and two channels that are thirty times as large. This picture is not from any
# model.

# %% tags=["expected"] alt="Made-up keys with two channels thirty times as large: with a scale per token there are errors in all channels; with a scale per channel they are larger in the two large ones, and small in all others."
torch.manual_seed(4)
made_up = torch.randn(64, 64)
large = torch.tensor([9, 40])
made_up[:, large] *= 30
maps = {"a scale per token": errors_per_token(made_up), "a scale per channel": errors_by_direction(made_up)}
others = torch.ones(64, dtype=torch.bool).index_fill(0, large, False)
for name, errors in maps.items():
    print(f"{name:19} mean error of the two large channels {errors[:, large].mean():.2f}, ", end="")
    print(f"of the others {errors[:, others].mean():.2f}")
one, other = maps.values()
claim(
    "With a scale per channel the others' errors are less than a quarter.",
    other[:, others].mean() < one[:, others].mean() / 4,
)
ErrorMap(
    maps,
    title="Made up: two channels thirty times as large",
)

# %% [markdown]
# Scales per channel confine the coarse steps to the two channels that need them. There the errors grow, because the
# largest of 64 tokens sets the step; with a scale per token the step is that of each token's own largest number.
#
# ### Exercise 6 (optional): how wrong can a score be?
#
# A picture of errors is no guarantee. A bound is. Every number of a key is off by at most $s/2$, so for a query $q$
#
# $$\left| \frac{q \cdot \hat k}{\sqrt d} - \frac{q \cdot k}{\sqrt d} \right| \le \frac{\lVert q \rVert_1 \, s}{2 \sqrt d}$$


# %%
def score_error_bound(q: Tensor, scale: Tensor) -> Tensor:
    """Return how far the scores q · k / √d can move if each number of key j is off by at most scale[j] / 2.

    q:       [queries, dim]
    scale:   [keys]
    returns: [queries, keys]

    Example: q = [[1, 1, 2, 0]], scale = [0.5] gives [[0.5]]: 4 · 0.25 / 2.
    """
    ### BEGIN SOLUTION
    return q.abs().sum(-1)[:, None] * scale[None, :] / (2 * q.shape[-1] ** 0.5)
    ### END SOLUTION


# %%
check("l04.score_error_bound")

# %% [markdown]
# Three bounds are tested, on every score, probability and output of one head per layer. The first is yours. The second:
# if no score of a row moves by more than $\varepsilon$, no probability changes by more than a factor of
# $e^{2\varepsilon}$. The third is for the values alone: with unchanged probabilities an attention output is a weighted
# mean of values, so it moves by at most half of the largest scale among them.

# %%
my_bound = use("l04.score_error_bound")


tries = {}
for label, levels in (("INT8", 127), ("INT4", 7)):
    found = tries[label] = try_bounds(recorded, levels, my_quantise, my_bound)
    print(
        f"{label}: {found.tested:,} numbers, {found.beyond} beyond their bound; "
        f"score errors: mean {found.mean_share:.0%} of the bound, largest {found.largest_share:.0%}"
    )
claim("No number is beyond its bound.", not any(found.beyond for found in tries.values()))
claim(
    "The largest error is less than half of its bound.",
    max(t.largest_share for t in tries.values()) < 0.5,
    of_model=True,
)

# %% [markdown]
# The bound is far from being reached: it assumes that every rounding error is half a step and has the sign that moves
# this score most. Rounding errors behave like noise of size $s/\sqrt{12}$ and mostly cancel, so models tolerate
# quantisation far better than the worst case suggests.
#
# ## Measure
#
# ### How few bits?
#
# Now the question itself. Held-out text goes through the model in steps of 32 tokens. After every token, the
# distribution of the next token is compared with that of a float32 cache. The measure is the **[Kullback-Leibler
# divergence](glossary.md#kl-divergence)** (KL), which is 0 if nothing has changed. Its unit is the nat: it is computed
# with natural logarithms, and one nat is 1.44 bits. First only the keys get fewer bits, then only the values, with one
# scale per token and head.

# %%
quality.CHUNK = 32
few = quality.join(encoded[:8], 128, config.eos_token_ids[:1], tokenizer)  # rows of up to 128 tokens
more = quality.join(encoded[:16], 512, config.eos_token_ids[:1], tokenizer)


def runner_for(texts, whole=False, **options):
    """The model with a cache of these options and room for all rows of the texts."""
    blocks = len(texts.rows) * (1 if whole else -(-llm.max_model_len // 16))
    return LLM(NAME, num_kv_blocks=blocks, **PLAIN, **options).engine.runner


def logprobs(texts, **options) -> Tensor:
    """Log-probabilities of the next token after every token, with a cache of these options."""
    return quality.logprobs(runner_for(texts, **options), texts)


class FewerBits(PagedKVCache):
    """The plain cache, but keys or values go through your quantiser first: fewer bits, and no memory saved."""

    fewer, bits = "keys", 8

    def attend(self, layer, q, k, v, batch):
        k, v = (self.through(x) if name == self.fewer else x for name, x in (("keys", k), ("values", v)))
        return super().attend(layer, q, k, v, batch)

    def through(self, x):
        return dequantise(*my_quantise(x, 2 ** (self.bits - 1) - 1))


# %% tags=["nbval-ignore-output"]
reference = logprobs(few)
BITS = (8, 7, 6, 5, 4, 3, 2)
kl = {"keys": [], "values": []}
fewer = runner_for(few, kv_cache_config={"layout": FewerBits})
for name in kl:
    for bits in BITS:
        FewerBits.fewer, FewerBits.bits = name, bits
        found = quality.judge(reference, quality.logprobs(fewer, few), few)
        kl[name].append(float(f"{found.mean_kl:.2g}"))
print(f"{len(few.targets)} tokens\nbits     " + "".join(f"{bits:9}" for bits in BITS))
for name, found in kl.items():
    print(f"{name:9}" + "".join(f"{value:9.1e}" for value in found))

# %%
each = {name: (found[BITS.index(4)] / found[BITS.index(8)]) ** (1 / 4) for name, found in kl.items()}
for name, times in each.items():
    print(f"{name}: each bit less, from 8 to 4, multiplies KL by about {times:.0f}")
    print(f"  from 4 bits to 3 by {kl[name][-2] / kl[name][-3]:.0f}, from 3 to 2 by {kl[name][-1] / kl[name][-2]:.0f}")
more_for_values = [bits for bits, a, b in zip(BITS, *kl.values(), strict=True) if b > a]
print("values cost more KL than keys at", ", ".join(map(str, more_for_values)), "bits")
claim(
    "From 8 bits to 4, each bit less multiplies the KL by about four, on average.",
    all(3.5 < times < 5 for times in each.values()),
    of_model=True,
)
claim(
    "From 4 bits to 3 the KL grows more than fivefold, from 3 to 2 more than tenfold.",
    all(k[-2] > 5 * k[-3] and k[-1] > 10 * k[-2] for k in kl.values()),
    of_model=True,
)
claim(
    "From 8 bits to 3, values cost more KL than keys; at 2 bits keys cost more.",
    more_for_values == [8, 7, 6, 5, 4, 3],
    of_model=True,
)

# %% tags=["expected", "nbval-ignore-output"] alt="Mean KL against bits, logarithmic: down to four bits both lines rise about fourfold for each bit that is taken away, then faster; values lie above keys, except at two bits."
LineChart(
    "How far the model's predictions move when keys or values lose bits",
    Axis("bits per number", ticks=BITS),
    Axis("mean KL to float32, nats per token", log=True),
    [Series(f"{name} alone", BITS, found) for name, found in kl.items()],
    "Down to four bits, each bit less multiplies the KL by about four, then by more; down to three bits values lose more.",
)

# %% [markdown]
# There is no number of bits at which the model suddenly gets worse, until the last bit. Each bit less makes the steps a
# little more than twice as wide, and KL grows about with the square of the error. So one expects a little more than four
# times per bit, and measures **about four times per bit**, on average, down to 4 bits. The last two bits cost more than the
# square. Most of all the last one: with 2 bits only the codes -1, 0 and 1 are left, steps are three times as wide as with
# 3, and KL grows more than tenfold. How much KL is acceptable is a choice, so a claim of "no loss" without a measure says
# nothing.
#
# **Values cost more KL than keys here**, down to 3 bits. In larger models keys are reported to be the harder ones to
# quantise with a scale per token, because a few of their channels are far above the others (the KIVI and KVQuant papers,
# quoted). In this model such channels are weak, as the picture of the keys showed. So measure keys and values separately
# in your own model.
#
# ### Bytes against KL
#
# Now real layouts, and the bytes per token that each would store for a model in float16, scales and windows included.
# KIVI runs in the engine's layout, with keys quantised by your function. This layout keeps the newest tokens
# unquantised until their group of 32 is full.
#
# That window of unquantised tokens helps too, and has nothing to do with channels. To separate the two effects, the same
# layout runs a second time with its keys quantised *per token*.

# %%
from minillm.cache.kivi import Int4Groups, KiviKVCache
from minillm.ops.kv_quant import dequantize_affine


class MyGroups(Int4Groups):
    """Groups of keys with your scales, zero points and packed codes."""

    def write(self, layer, row, groups, x):
        codes, scale, zero = my_per_channel(x, self.group_shape[1])
        signed = codes.to(torch.int8) - 8  # your pack_int4 takes -8 … 7
        self.codes[layer, row, groups] = my_pack(signed.view(-1, *self.group_shape[1:]).flatten(-2))
        self.scale[layer, row, groups] = scale.view_as(self.scale[layer, row, groups])
        self.zero[layer, row, groups] = zero.view_as(self.zero[layer, row, groups])

    def read(self, layer, row, count, dtype):
        codes = my_unpack(self.codes[layer, row, :count]).view(count, *self.group_shape[1:]) + 8
        x = dequantize_affine(codes, self.scale[layer, row, :count], self.zero[layer, row, :count], dtype)
        return x.flatten(3).flatten(0, 1)


class MyKivi(KiviKVCache):
    """The engine's KIVI layout; `groups` is the class that quantises keys, `dim` the direction of its groups."""

    groups, dim = MyGroups, 1

    def __init__(self, config, num_blocks, block_size, dtype, device, *, group_size=32, residual=32, rollback=0):
        options = {"group_size": group_size, "residual": residual, "rollback": rollback}
        super().__init__(config, num_blocks, block_size, dtype, device, **options)
        lead = tuple(self.keys.codes.shape[:2])
        self.keys = self.groups(lead, self.keys.group_shape, self.dim, device)


class WindowOnly(MyKivi):
    """The same window and bytes, but keys quantised per token."""

    groups, dim = Int4Groups, 4


# %% tags=["nbval-ignore-output"]
class Float16(PagedKVCache):
    """Keys and values rounded to float16. The pool holds the rounded numbers as float32, in which the model computes."""

    def attend(self, layer, q, k, v, batch):
        return super().attend(layer, q, k.half().float(), v.half().float(), batch)


INT4_16 = {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": 16}}
SYSTEMS = {
    "float16": (Float16, {"kv_cache_config": {"layout": Float16}}),
    "INT8, yours": (MyInt8, {"kv_cache_config": {"layout": MyInt8}}),
    "INT4, yours": (MyInt4, {"kv_cache_config": {"layout": MyInt4}}),
    "INT4, groups of 16": (None, INT4_16),
    "window, per token": (WindowOnly, {"kv_cache_config": {"layout": WindowOnly}, "whole": True}),
    "KIVI, yours": (MyKivi, {"kv_cache_config": {"layout": MyKivi}, "whole": True}),
}
CONTEXT = llm.max_model_len
table, bits_per_byte, reference = {}, {}, logprobs(more)
print(f"{'':19} bytes/token   smaller   mean KL   bits per byte   same argmax token")
for name, (layout, options) in SYSTEMS.items():
    if layout is None:
        size = my_bytes(config, 4, 16, 4)
    else:
        size = layout.bytes_per_block(config, CONTEXT, torch.float16) / CONTEXT
    found = quality.judge(reference, logprobs(more, **options), more)
    table[name] = (size, float(f"{found.mean_kl:.2g}"), found.top1)
    bits_per_byte[name] = found.bits_per_byte
    print(
        f"{name:19} {size:11.0f} {my_bytes(config, 16, DIM, 0) / size:8.2f}x {found.mean_kl:9.1e} "
        f"{found.bits_per_byte:15.2f} {found.top1:19.0%}"
    )
reveal("l04.changed", round(100 * (1 - table["INT4, yours"][2])))
groups, window, kivi = (table[name] for name in ("INT4, groups of 16", "window, per token", "KIVI, yours"))
codes = [value for name, (_, value, _) in table.items() if name != "float16"]
claim(
    "Even float16 has a KL above 0, less than a hundredth of INT8's.",
    0 < 100 * table["float16"][1] < min(codes),
    measured=True,
)
claim(
    "INT8 changes the argmax token at less than 2 positions in 100, INT4 at 5 to 15.",
    1 - table["INT8, yours"][2] < 0.02 and 0.05 < 1 - table["INT4, yours"][2] < 0.15,
    measured=True,
)
claim(
    "KIVI has fewer bytes than INT4 in groups of 16, and less KL.",
    kivi[0] < groups[0] and kivi[1] < groups[1],
    measured=True,
)
claim(
    "The window alone, with scales per token, removes more than half of the KL of groups of 16.",
    window[1] < 0.5 * groups[1],
    measured=True,
)
claim("Scales per channel remove another 15 to 50% of what is left.", 0.5 < kivi[1] / window[1] < 0.85, measured=True)
claim(
    "Among the quantised caches KL differs by a factor of more than 100, bits per byte by less than 2%.",
    max(codes) > 100 * min(codes) and max(bits_per_byte.values()) < 1.02 * min(bits_per_byte.values()),
    measured=True,
)

# %%
ranked = sorted(table, key=lambda name: table[name][1])
print("from the least KL to the most: " + " < ".join(ranked))
print(" < ".join(f"{table[name][0]:.0f}" for name in sorted(table, key=lambda name: table[name][0])), "bytes per token")
kivi_bytes = {n: MyKivi.bytes_per_block(config, n, torch.float16) / n for n in (128, 256, 352, 512)}
print("KIVI, bytes per token: " + ", ".join(f"{size:,.0f} at {n} tokens" for n, size in kivi_bytes.items()))
claim(
    "At 512 tokens KIVI takes 1,456 bytes a token, at 352 as many as INT4 in groups of 16, and more in shorter texts.",
    kivi_bytes[512] == 1456 and min(kivi_bytes[128], kivi_bytes[256]) > kivi_bytes[352] == groups[0],
    of_model=True,
)

# %% tags=["expected", "nbval-ignore-output"] alt="Mean KL against bytes per token: INT8 at half of float16's bytes and the lowest KL; INT4 at the fewest bytes and the highest; KIVI lies below INT4 with groups of 16 and takes fewer bytes."
LineChart(
    f"What a smaller cache costs: {NAME}, {len(more.targets)} held-out tokens",
    Axis(f"bytes per token, at a context of {CONTEXT}"),
    Axis("mean KL to float32, nats per token", log=True),
    [Series(name, [size], [value]) for name, (size, value, _) in table.items() if name != "float16"],
    "; ".join(f"{name}: {size:.0f} bytes, KL {value:.1e}" for name, (size, value, _) in table.items()),
)

# %% [markdown]
# (float16 is in the table only: its KL is far below the chart.)
#
# * **KIVI has less KL than finer groups**, and at this context fewer bytes: 1,302 a token, INT4 with groups of 16 takes
#   1,536. But its window in float16 is a fixed cost. In a text of 512 tokens, a little longer than the rows of about 475
#   in which this KL was measured, KIVI takes 1,456 bytes a token, in one of 352 as many as groups of 16, and in
#   shorter ones more.
# * **Much of that is the window.** With keys quantised per token, at the same bytes, most of the gain is already there;
#   scales per channel add to it. A comparison of a method that has a window with one that has none measures both at
#   once. (The texts here are short pieces joined together, which favours any window. On long documents it would gain
#   less.)
# * **[Bits per byte](glossary.md#bits-per-byte) hardly change**, while KL separates the systems. Bits per byte, like
#   [perplexity](glossary.md#perplexity), are an average in which better and worse predictions cancel. To test whether it
#   is still the same model, use KL. (Lesson 3 printed another number of bits per byte for this model: it measured other
#   texts, one at a time.)
#
# ### Where it loses: bytes moved
#
# Decoding a large model is slow because bytes must be moved, and a smaller cache has fewer. Is it therefore faster?
# Count what one decode step moves in PyTorch: for every operation of one layer's attention, the bytes that it reads and
# writes.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BytesMoved(TorchDispatchMode):
    """Counts bytes that operations read and write. Views move nothing; writing a row to a pool moves only that row."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.total += 2 * min(sizes) if "index_copy" in func.__name__ else sum(sizes)
        return result


from minillm.cache.paged_int4 import PagedInt4KVCache

LENGTH, runner = 512, llm.engine.runner
num_blocks = LENGTH // runner.block_size
scattered = [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]  # the request's blocks do not lie one after another
moved = {}
for label, layout, blocks in (
    ("float16", PagedKVCache, scattered),
    ("INT8", PagedInt8KVCache, scattered),
    ("INT4", PagedInt4KVCache, scattered),
    ("float16, blocks in order", PagedKVCache, sorted(scattered)),
):
    batch = runner.batch([Segment([5], LENGTH - 1, blocks)])
    cache = layout(config, num_blocks, runner.block_size, torch.float16, torch.device("cpu"))
    for pool in (*cache.keys, *cache.values):
        pool.zero_()
    q, k, v = (
        torch.zeros(1, heads, DIM).half() for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    cache.attend(0, q, k, v, batch)  # the first call also plans the step
    with BytesMoved() as counter:
        cache.attend(0, q, k, v, batch)
    stored = cache.num_bytes / config.num_layers
    moved[label] = counter.total
    print(
        f"{label:24} stored {stored / 1024:5.0f} KiB, moved {counter.total / 1024:5.0f} KiB, {counter.total / moved['float16']:.1f} times float16"
    )
reveal("l04.moved", round(moved["INT8"] / moved["float16"]))
claim("INT8 and INT4 move several times the bytes of float16.", 3 * moved["float16"] < moved["INT8"] < moved["INT4"])
claim("In order, float16 moves a third.", 0.3 < moved["float16, blocks in order"] / moved["float16"] < 0.36)

# %% [markdown]
# **Dequantising everything at every step moves more bytes, not fewer.** float16 is read, written and read again, because
# PyTorch first gathers the request's blocks into one tensor. (It need not where they lie one after another: then float16
# moves a third of this, and the others seem worse still.) Codes are read once. They are dequantised through float32, and
# the resulting numbers are written and read again. In plain PyTorch a quantised cache saves *memory* (more requests,
# longer texts) and moves more bytes. To move fewer, the attention kernel must read the codes itself and dequantise them
# in registers. Lesson 9 builds such a kernel, and the engine's compiled step has one for the CPU. Then the bytes moved
# are the bytes stored.
#
# It also loses where heads are narrow (the table of exercise 4), where contexts are short (KIVI's window is then most
# of the cache), and where text must not change: INT8 is not exact.
#
# ## Break it
#
# An article's sample of an INT8 cache, in our own words: it divides by `amax / 127` even if that is 0; it keeps one row
# counter and advances it at the end of *every layer's* update; and it stores one row per update, so a prompt cannot be
# stored at once. Two of its mistakes are below, with four from elsewhere.
#
# Each gets four checks. `half a step`: is $|x - \hat x| \le s/2$ everywhere? `zeros`: does a row of zeros get a scale
# that one can divide by? `pieces`: does a prompt in several pieces give the same codes as in one? `tokens`: does the
# engine generate the same tokens as with the right INT8 cache? **Guess first:** which mistakes leave the tokens
# unchanged?


# %%
class Right(MyInt8):
    """No mistake."""


class ScaleOfZero(MyInt8):
    """The sample's division, without a special case for rows of zeros."""

    def encode(self, x):
        scale = (x.abs().amax(-1) / 127).bfloat16()
        return (x / scale.float()[..., None]).round().clamp(-128, 127).nan_to_num().to(torch.int8), scale


class RowPerLayer(MyInt8):
    """The sample's counter, advanced by every layer: with one token a step, layer l of token t goes to row t·L + l."""

    rows = 0

    def attend(self, layer, q, k, v, batch):
        first = int(batch.block_tables[0, 0]) * batch.block_size
        if layer == 0 and int(batch.positions[0]) == 0:
            self.rows = 0
            for pool in (*self.keys, *self.values):
                pool.zero_()  # a new text begins with an empty cache
        slots = (first + self.rows + torch.arange(len(k))) % self.shape[0]
        self.rows += len(k)
        return super().attend(layer, q, k, v, replace(batch, slot_mapping=slots))


class ScalePerStep(MyInt8):
    """One scale for everything that arrives in a step."""

    def encode(self, x):
        scale = (x.abs().amax() / 127).clamp_min(1e-30).expand(x.shape[:2]).bfloat16()
        return (x / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale


class Truncates(MyInt8):
    """`.to(torch.int8)` without `.round()`."""

    def encode(self, x):
        _, scale = my_quantise(x, 127)
        return (x / scale.float()[..., None]).clamp(-127, 127).to(torch.int8), scale


class Levels128(MyInt8):
    """s = amax / 128. The code 128 does not exist, so the largest number of each row is cut."""

    def encode(self, x):
        _, scale = my_quantise(x * 127 / 128, 127)
        return (x / scale.float()[..., None]).round().clamp(-128, 127).to(torch.int8), scale


class NeighboursScale(MyInt8):
    """Multiplies by the scale of the next head."""

    def decode(self, codes, scale):
        return dequantise(codes, scale.roll(1, -1))


# %%
short = sorted(prompts, key=len)[4:9]
brief = replace(greedy, max_tokens=8)


def tokens_of(kind) -> list[list[int]]:
    """The tokens of each text, one request after the other: the sample's single counter allows no more."""
    options = {"max_num_seqs": 1, "enable_prefix_caching": False, "num_kv_blocks": 128}
    engine = LLM(NAME, **PLAIN, **options, kv_cache_config={"layout": kind})
    return [output.outputs[0].token_ids for output in engine.generate(short, brief, use_tqdm=False)]


def check_codes(kind) -> tuple[bool, bool, bool]:
    """Whether the checks half a step, zeros and pieces pass, on real keys and a row of zeros, without an engine."""
    cache = kind(config, 1, 16, torch.float32, torch.device("cpu"))
    x = recorded[0][1]
    back, step = cache.decode(*cache.encode(x)), cache.encode(x)[1].float()[..., None]
    within = bool(((back - x).abs() <= 0.5 * step * (1 + 1e-5)).all())
    scale = cache.encode(torch.zeros_like(x[:1]))[1]
    whole, parts = cache.encode(x), [cache.encode(part) for part in x.split(50)]
    same = all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))
    return within, bool((scale > 0).all()), same


right_tokens, verdicts = tokens_of(Right), {}
print(f"{'':16} half a step   zeros    pieces   tokens")
for kind in (Right, ScaleOfZero, RowPerLayer, ScalePerStep, Truncates, Levels128, NeighboursScale):
    words = ["ok" if passed else "WRONG" for passed in check_codes(kind)]
    same = sum(a == b for a, b in zip(tokens_of(kind), right_tokens, strict=True))
    print(f"{kind.__name__:16} {words[0]:13} {words[1]:8} {words[2]:8} {same} of {len(right_tokens)} texts")
    verdicts[kind.__name__] = (words.count("ok") == 3, same)
unseen = [name for name, (_, same) in verdicts.items() if name != "Right" and same >= len(right_tokens) - 1]
claim("Four of the six wrong caches generate at most one text wrong.", len(unseen) == 4, of_model=True)
claim("Each of these four fails one of the first three checks.", not any(verdicts[name][0] for name in unseen))
claim(
    "RowPerLayer passes the first three checks and gets no text right.",
    verdicts["RowPerLayer"] == (True, 0),
    of_model=True,
)

# %% [markdown]
# Tests that compare tokens are at their weakest for quantisation. Most of its mistakes make numbers a little worse, and
# the model tolerates that. The first three checks take a few lines each, and find what hours of reading the output
# would not. The row counter is the opposite: each number is as exact as it should be, but in the wrong *place*, and no
# text is right.
#
# What does a scale of zero do? $0/0$ is NaN. Then NaN is cast to an integer, and the result of that cast is undefined:

# %%
row = torch.zeros(4)
quotient = row / (row.abs().amax() / 127)
print("0 / 0 before the cast:", quotient.tolist())
print("kept in floating point (an fp8 cache, or simulated quantisation):", float((quotient * 0).sum()))

# %% [markdown]
# Many CPUs cast NaN to code 0, and 0 · 0 is 0 again: there the sample works by luck, and on another machine it may not.
# A NaN that is kept makes the whole softmax NaN, and with it every later token.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM | `kv_cache_dtype="fp8"`: 8-bit floats with the scales that the checkpoint brings, else 1; FlashAttention 3 also computes in fp8. `"int8_per_token_head"`: the scheme of exercise 1, scales computed as a token is written, dequantised inside a Triton kernel; `"int4_per_token_head"`: 4 bits with a zero point, after a rotation that spreads large channels over all |
# | SGLang | fp8 as well, and 4-bit floats on hardware that has them |
# | TensorRT-LLM | INT8 and fp8, scales from calibration |
# | llama.cpp | `-ctk q8_0`, `-ctv q4_0`: blocks of 32 numbers along the head with one float16 scale, for keys and values separately |
# | transformers | `QuantizedCache` (quanto: 2 or 4 bits; HQQ: 8 bits too): groups, and a residual window as in KIVI |
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | INT8 2×, INT4 4× | 1.97× and 3.88× at width 128, 1.88× and 3.56× at width 32; less again with groups | exercise 4 |
# | INT8 cache: 120 GB of memory instead of 160 (model, context and batch not stated) | a 70B model in float16 has 138 GB of weights alone: INT8 saves less than 11 GB, and the table's 120, 125 and 110 GB would not hold the weights | exercise 4 |
# | INT8 is "nearly lossless" | INT8 changes the argmax token at less than 2 positions in 100; INT4 without groups at 5 to 15 | bytes against KL |
# | a smaller cache is a faster cache | a smaller cache is a *smaller* cache; in PyTorch it moves several times the bytes | bytes moved |
# | per-channel scales are needed for quality | at four bits they remove a part of the KL here, the window more; at eight bits KL is small without them. The article that requires them has a scale per token and head in its own sample | bytes against KL |
# | the sample INT8 cache | divides by zero, writes one row per layer and token, takes one token at a time | break it |
#
# **Papers.** Liu et al. 2024, *KIVI* (keys per channel, values per token, the window). Hooper et al. 2024, *KVQuant*
# (keys before RoPE, outliers kept apart). Dettmers et al. 2022, *LLM.int8()* (outlier channels in large models). Tiwari
# et al. 2025, *QuantSpec* (an INT4 cache to draft with, in speculative decoding).
#
# ## Recap
#
# 1. A code times a stored scale: every number is off by at most half a step, if you divide by what you store.
# 2. Scales are bytes too: at width 128 INT8 saves 1.97× and not 2×, and less with narrower heads.
# 3. Down to four bits, each bit less multiplies the KL by about four, then by more. Whether keys or values lose more
#    depends on the model: here values do, down to three bits. A scale per channel instead of per token reduces errors
#    of keys (1.3 times here), not of values; a zero point and smaller groups reduce both. Measure how much of a
#    method's gain is its window's.
# 4. Test quantisation by its bound, with zeros and in pieces: most mistakes change few texts or none.
# 5. Dequantising in PyTorch saves memory and moves several times the bytes. To save both, a kernel must read the codes.
#
# **Next:** lesson 5 stores the weights in fewer bits, which every step reads as well.
