# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 5. INT8 weights
#
# **Question.** *The weights are most of what a step reads. What happens if each takes a quarter of the bytes?*
#
# Lesson 3 showed what limits a decode step of a large model with a small batch: every weight is read, to be used once
# or a few times, and the arithmetic units are idle meanwhile. So store the weights in fewer bits: 8 instead of 32 is a
# quarter, 4 is an eighth. A model still works when its weights change a little. How much can they change?
#
# You build five pieces, from plain rounding to the ideas of [AWQ](glossary.md#awq) and
# [SqueezeLLM](glossary.md#dense-and-sparse). Each runs inside the real model in place of its linear layers, and two
# numbers show its effect: bits per weight, and how far the model's predictions moved.
#
# You need lesson 1 (what a linear layer does) and lesson 3 (when bytes decide the time). Everything runs on a laptop's
# CPU. The engine runs its steps in plain PyTorch here (`enforce_eager=True`), so that your layers can replace its own
# and every operation can be counted. (By default the engine runs a compiled step, which lesson 15 uses.)

# %%
import os

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.bench import quality
from minillm.models.held_out import calibration_prompts, evaluation_prompts
from minillm.ops.linear import linear
from minillm.models.calibration import calibrate
from minillm.models.quantize import decoder_linears
from minillm.teaching import check, claim, hint, predict, reveal, use
from minillm.viz.charts import Axis, LineChart, Series

# Or another checkpoint, if all its linear layers have a multiple of 128 inputs: docs/other_models.md says which were
# tried.
NAME = os.environ.get("MINILLM_MODEL", "minicoder")
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
PLAIN = {"device": "cpu", "dtype": "float32", "enforce_eager": True}  # plain PyTorch: what is counted here is what runs
llm = LLM(NAME, **PLAIN)
runner = llm.engine.runner
model, config, tokenizer = runner.model, runner.model.config, llm.engine.tokenizer
original = dict(decoder_linears(model))
num_weights = sum(layer.weight.numel() for layer in original.values())
print(
    f"{NAME}: {config.num_layers} layers, {len(original)} linear layers in them with {num_weights / 1e6:.1f}M weights"
)
for name, layer in list(original.items())[:4]:
    print(f"  {name:24} {list(layer.weight.shape)}  (outputs, inputs)")

# %% [markdown]
# ## The question, in numbers
#
# Bytes that one decode step of one request must read, with 512 tokens in its cache. (Arithmetic, from the shapes;
# float32 for all, as on this CPU.)

# %%
linear_bytes, embedding_bytes = 4 * num_weights, model.lm_head.weight.nbytes
cache_bytes = 512 * 2 * config.num_layers * config.kv_size * 4
total = linear_bytes + embedding_bytes + cache_bytes
for label, size in (("linear layers", linear_bytes), ("logits", embedding_bytes), ("KV cache", cache_bytes)):
    print(f"{label:13} {size / 1e6:5.1f} MB  {size / total:4.0%}")
claim("The linear layers are most of what a step reads.", linear_bytes > total / 2)

# %% [markdown]
# ## Predict
#
# Write a number for each before you measure.
#
# 1. Weights in 4 bits; every 128 of them share a scale of 16 bits and a [zero point](glossary.md#zero-point) of 4. How
#    many bits does one weight take in all?
# 2. From 8 bits with a scale per row to 4 bits as in question 1, steps between levels become up to 17 times as wide.
#    How many times larger is the [KL](glossary.md#kl-divergence), the distance between the model's predictions and the
#    original's?
# 3. INT8 weights are a quarter of float32. In *plain PyTorch*, one decode step
#    [dequantises](glossary.md#quantisation) the codes and then multiplies. How long does it take, as a multiple of the
#    step in float32?

# %%
predict("l05.bits", None, unit="bits")
predict("l05.kl", None, unit="times")
predict("l05.step", None, unit="times as long")

# %% [markdown]
# ## Build
#
# ### Exercise 1: one scale per output channel
#
# An integer code $c$ stands for the weight $c \cdot s$. Each output of a linear layer is a sum over **one row** of $W$:
#
# $$y_i = \sum_j W_{ij}\,x_j \approx \sum_j c_{ij}\,s_i\,x_j = s_i \sum_j c_{ij}\,x_j$$
#
# With one scale per row, the scale can be moved out of the sum and costs one multiplication per output. With a scale
# per *column* it could not. The largest weight of the row gets the code 127:
#
# $$s_i = \frac{\max_j |W_{ij}|}{127}, \qquad c_{ij} = \operatorname{round}(W_{ij} / s_i), \qquad
# |W_{ij} - c_{ij}s_i| \le \frac{s_i}{2}$$
#
# Two details: int8 goes from -128 to 127, so there is no code 128; and a row of zeros (pruned models have them) must
# not be divided by zero. Give it the scale 1.


# %%
def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to INT8, symmetrically, with one scale per output channel.

    weight:  [out, in] float32; not changed
    returns: codes [out, in] int8, within ±127; scale [out] float32, 1 for a row of zeros

    Example: weight = [[12.7, -3.04, 0.26]] gives codes [[127, -30, 3]] and scale [0.1].
    """
    ### BEGIN SOLUTION
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    return (weight / scale[:, None]).round().to(torch.int8), scale
    ### END SOLUTION


# %%
check("l05.quantise_rows")

# %% [markdown]
# Stuck? `hint("l05.quantise_rows", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# ### See: your codes in the engine
#
# A `Replacement` takes the place of a linear layer. `keep` is called once with the weight, `product` at every step; the
# weight itself is not stored. Below, all linear layers of the running engine are replaced, and it generates.


# %%
class Replacement(torch.nn.Module):
    """Takes the place of one linear layer. The bias, if there is one, stays as it is."""

    def __init__(self, name: str, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.name, self.bias = name, layer.bias
        self.keep(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


def install(kind: type[Replacement] | None) -> float:
    """Replace every linear layer by a `kind` (None: the originals). Return bits per weight, with all that is stored."""
    bits = 0
    for name, layer in original.items():
        new = layer if kind is None else kind(name, layer)
        model.set_submodule(name, new)
        bits += 32 * layer.weight.numel() if kind is None else new.num_bits()
    return bits / num_weights


my_rows = use("l05.quantise_rows")


class Int8(Replacement):
    """Your codes, dequantised for every product."""

    def keep(self, weight):
        self.codes, self.scale = my_rows(weight)

    def product(self, x):
        return linear(x, self.codes * self.scale[:, None])

    def num_bits(self):
        return 8 * self.codes.numel() + 32 * self.scale.numel()


prompts = [p.prompt for p in evaluation_prompts()[:12]]
greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def written(engine: LLM) -> list[list[int]]:
    """The tokens that the engine generates after each prompt."""
    engine.reset_prefix_cache()  # it holds keys and values of other weights
    return [output.outputs[0].token_ids for output in engine.generate(prompts, greedy, use_tqdm=False)]


install(None)
exact_tokens = written(llm)
print(f"{install(Int8):.2f} bits per weight")
int8_tokens = written(llm)
same = sum(a == b for a, b in zip(int8_tokens, exact_tokens, strict=True))
print(f"{same} of {len(prompts)} texts of 24 tokens equal those of float32")
own = LLM(NAME, **PLAIN, quantization="int8")
own.engine.runner.model.lm_head = model.lm_head  # the engine rounds this one as well; more about that below
claim("The engine's own INT8 generates the same texts.", int8_tokens == written(own))
claim("Most of the texts stay the same.", same > len(prompts) / 2, of_model=True)
del own  # it holds its own copy of the weights

# %% [markdown]
# The model is not bit for bit the same, but close. Whether a changed text is *worse* is another question, and the
# measure for it is that of lesson 4: held-out text goes through the model, and its predictions are compared with those
# of float32. The **KL** divergence is 0 when nothing has changed; its unit is the nat (1.44 bits). [Bits per
# byte](glossary.md#bits-per-byte) say how well the text is predicted.

# %%
quality.CHUNK = 128  # a row of text in two steps
encoded = [tokenizer.encode(prompt.prompt) for prompt in evaluation_prompts()]
texts = quality.join(encoded[:14], 256, config.eos_token_ids[:1], tokenizer)


def measure(kind: type[Replacement] | None) -> tuple[float, quality.Quality]:
    """Bits per weight, and the quality of the model with its linear layers replaced by `kind`."""
    bits = install(kind)
    return bits, quality.judge(reference, quality.logprobs(runner, texts), texts)


install(None)
reference = quality.logprobs(runner, texts)
table, bits_per_byte = {}, {}


def row(label: str, kind: type[Replacement] | None) -> None:
    """Measure `kind`, store the result in `table` and print it."""
    show(label, *measure(kind))


def show(label: str, bits: float, found: quality.Quality) -> None:
    """Store a result in `table` and print it. With so few tokens, a KL that differs by a tenth means nothing."""
    table[label] = (bits, float(f"{found.mean_kl:.1e}"))
    bits_per_byte[label] = found.bits_per_byte
    print(f"{label:22} {bits:5.2f} bits   KL {1000 * found.mean_kl:6.2g}   bits per byte {found.bits_per_byte:.2f}")


print(f"{len(texts.targets)} tokens; KL in thousandths of a nat per token")
row("float32", None)
row("INT8, yours", Int8)
claim("INT8 weights: a KL below 0.001 nats per token.", table["INT8, yours"][1] < 1e-3, of_model=True)

# %% [markdown]
# Bits per byte do not even change in the second decimal. For most uses, INT8 weights with a scale per row are enough.
# (With one scale per *tensor*, rows of small weights would get few codes; that mistake is in the table at the end.)
#
# ### Exercise 2: multiply integers
#
# The product above was still computed in floats. Processors with instructions for 8-bit integers multiply them two to
# four times as fast as floats (data sheets; not measured here). For that the inputs $x$ of the layer, its
# **[activations](glossary.md#activations)**, must be codes too: **[W8A8](glossary.md#w8a8)**, weights and activations
# both in 8 bits. Activations are not known in advance, so they are rounded at every step, which is called **dynamic
# quantisation**. Each **token** gets a scale of its own:
#
# $$y_{ti} = \sum_j (c^x_{tj}\,s^x_t)\,(c^w_{ij}\,s^w_i) = s^x_t\, s^w_i \sum_j c^x_{tj}\, c^w_{ij}$$
#
# The sum is over integers, and exact if its type is wide enough: a single product may be $127 \cdot 127$, more than int8
# can hold. Processors accumulate in int32. But PyTorch's product of integer tensors does not use those instructions, so
# convert the codes with `.float()`. That is exact, too: float32 represents every integer up to $2^{24}$, enough for 1040
# such products. (The engine's W8A8 has a product of integers; *Bytes, and time* measures it.)


# %%
def w8a8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Round each token by its own scale, multiply integers, rescale.

    x:       [tokens, in] float32
    codes:   [out, in] int8 and scale: [out] float32, a weight as quantise_rows returns it
    returns: [tokens, out] float32

    my_rows is your quantise_rows, or the reference if yours does not pass.

    Example: x = [[1, -0.37]] becomes codes [[127, -47]] with scale 1/127. With codes = [[127, 40]], scale = [0.01]
    the sum is 127·127 - 47·40 = 14249, and the result 14249 · 0.01 / 127 = 1.122.
    """
    ### BEGIN SOLUTION
    x_codes, x_scale = quantise_rows(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale
    ### END SOLUTION


# %%
check("l05.w8a8_linear")

# %%
my_w8a8 = use("l05.w8a8_linear")


class W8A8(Int8):
    """The same weights; activations are quantised at every step."""

    def product(self, x):
        return my_w8a8(x, self.codes, self.scale)


row("W8A8, yours", W8A8)
times = table["W8A8, yours"][1] / table["INT8, yours"][1]
print(f"rounding the activations as well: {times:.0f} times the KL")
claim("Rounding the activations costs several times as much KL as rounding the weights.", 3 < times < 15, of_model=True)

# %% [markdown]
# The bits in memory are the same. In a row of weights the numbers are of similar size; in a token's activations they are
# not. More about that below.
#
# ### Exercise 3: four bits, in groups
#
# With 4 bits there are 16 levels, and a single large weight makes them coarse for its whole row. So fewer weights share
# a scale: **[groups](glossary.md#group)** of neighbouring weights in a row. A group need not be symmetric around 0, so
# its levels lie between its own minimum and maximum, with a **zero point** $z$, the code that stands for 0:
#
# $$s = \frac{\max - \min}{15}, \qquad z = \operatorname{round}(-\min / s), \qquad
# c = \operatorname{round}(w / s) + z \in 0 \dots 15, \qquad \hat w = (c - z)\,s$$
#
# (In lesson 4 the zero point was a number, the minimum, which is added after scaling. Here it is a code, which is
# subtracted before scaling, so that it fits into four bits.)
#
# 0 must be a level (a weight of zero stays zero), so a range that does not contain 0 is extended until it does. The scale
# is *stored* in float16; divide by the stored scale. This is **round to nearest** (RTN), the usual baseline in papers.


# %%
def quantise_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to 16 levels; every group_size neighbours in a row share a scale and a zero point.

    weight:  [out, in] float32; in is a multiple of group_size; not changed
    returns: codes [out, in] uint8, each 0 … 15; scale [out, groups] float16, 1 where it would be 0;
             zero [out, groups] uint8, the code that stands for 0

    Example: weight = [[-0.5, 1.0, 0.23, 0.0]], one group of 4: scale 0.1, zero 5, codes [[0, 15, 7, 5]].
    """
    ### BEGIN SOLUTION
    grouped = weight.unflatten(1, (-1, group_size))
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scale = ((high - low) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)
    ### END SOLUTION


# %%
check("l05.quantise_groups")

# %%
my_groups = use("l05.quantise_groups")
GROUP = 128


def restored(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The matrix that codes, scales and zero points stand for."""
    grouped = codes.unflatten(1, (scale.shape[1], -1)).float()
    return ((grouped - zero[..., None]) * scale.float()[..., None]).flatten(1)


class Int4(Replacement):
    """Your groups. Here each code takes a byte; in a file two would share a byte, so four bits are counted."""

    group_size = GROUP

    def keep(self, weight):
        self.stored = my_groups(weight, self.group_size)

    def product(self, x):
        return linear(x, restored(*self.stored))

    def num_bits(self):
        codes, scale, zero = self.stored
        return 4 * codes.numel() + 16 * scale.numel() + 4 * zero.numel()


def groups_of(size: int) -> type[Int4]:
    return type(f"Int4Groups{size}", (Int4,), {"group_size": size})


for size in (128, 64, 32):
    row(f"INT4, groups of {size}", groups_of(size))
reveal("l05.bits", round(table["INT4, groups of 128"][0], 2))
growth = table["INT4, groups of 128"][1] / table["INT8, yours"][1]
reveal("l05.kl", round(growth, -1))
by_groups = [table[f"INT4, groups of {size}"] for size in (128, 64, 32)]
claim("From 8 bits to 4, the KL grows more than fiftyfold.", growth > 50, of_model=True)
smaller = [round(16 / table[name][0], 2) for name in ("INT8, yours", "INT4, groups of 128")]
claim(
    "INT8 is 1.98 times smaller than 16 bits, INT4 in groups of 128 3.85 times.", smaller == [1.98, 3.85], of_model=True
)
claim(
    "Smaller groups have less KL and more bits.",
    by_groups == sorted(by_groups) and by_groups[2][1] < by_groups[1][1] < by_groups[0][1],
    of_model=True,
)

# %% [markdown]
# Why so much? Steps are up to 17 times as wide, so errors are up to 17 times as large, and KL grows about with the
# *square* of the error: $17^2 = 289$. Groups and zero points win back a part of that, and KL need not follow the square
# over such a range. Every further method must do better than smaller groups do at the same number of bits.
#
# ### Exercise 4: AWQ
#
# RTN treats all weights alike. But a weight's error is multiplied by the activation, and some input channels
# are much larger than others. **Activation-aware weight quantisation** (AWQ) makes the important columns of $W$ larger
# before rounding, and $x$ smaller by the same factors:
#
# $$W x = (W \operatorname{diag}(s))\,(x / s) \quad\text{exactly}, \qquad
# \text{after rounding the error of column } j \text{ is divided by } s_j$$
#
# as long as the column does not extend the range of its group. (This $s$ is a factor per input channel, as in the
# paper. It is not the scale of the codes, which $Q$ below chooses.) Which $s$? AWQ tries
# $s_j = (\operatorname{mean}_t |x_{tj}|)^a$ for several $a$, and keeps the one whose outputs on a sample of inputs are
# nearest to the original's. $a = 0$ is plain rounding, so on that sample AWQ is never worse.

# %%
from collections.abc import Callable, Sequence


def awq_scale(
    weight: Tensor, x: Tensor, rounded: Callable[[Tensor], Tensor], exponents: Sequence[float]
) -> tuple[float, Tensor]:
    """Return the exponent a, and s = mean|x|^a per input channel, with the least ‖Q(W s)(x / s) − W x‖².

    weight:    [out, in] float32; not changed
    x:         [tokens, in] float32, a sample of the layer's inputs; not changed
    rounded:   the function Q: quantises a matrix [out, in] and dequantises it again
    exponents: the values of a to try
    returns:   the best a, and its s [in]: max(mean|x|^a, 1e-4), raised to the power first
               (so that a channel that is never active gets no s of 0)

    Example: exponents = [0.0] always gives 0.0 and a row of ones.
    """
    ### BEGIN SOLUTION
    mean, exact = x.abs().mean(0), x @ weight.T
    best, least = (0.0, torch.ones_like(mean)), float("inf")
    for a in exponents:
        s = mean.pow(a).clamp_min(1e-4)
        error = ((x / s) @ rounded(weight * s).T - exact).square().sum().item()
        if error < least:
            best, least = (a, s), error
    return best
    ### END SOLUTION


# %%
check("l05.awq_scale")

# %% [markdown]
# The sample comes from **calibration** text: held-out code on which quality is not measured. No source file is in both.

# %%
my_awq = use("l05.awq_scale")
calibration_ids = [tokenizer.encode(prompt.prompt) for prompt in calibration_prompts()]
install(None)
calibration = calibrate(model, calibration_ids[:12], "inputs", max_rows=128)
kept = len(next(iter(calibration.layers.values())).inputs)
print(f"{calibration.num_tokens} calibration tokens; of each layer's inputs {kept} are kept")


chosen = {}  # layer → (a, s), so that each is searched for once


class Awq(Int4):
    """Your search and your groups. The layer stores 1/s and multiplies its input by it."""

    def keep(self, weight):
        if self.name not in chosen:
            x = calibration.layers[self.name].inputs
            tried = [i / 10 for i in range(11)]
            chosen[self.name] = my_awq(weight, x, lambda w: restored(*my_groups(w, GROUP)), tried)
        s = chosen[self.name][1]
        self.inverse = 1 / s
        super().keep(weight * s)

    def product(self, x):
        return super().product(x * self.inverse)

    def num_bits(self):
        return super().num_bits() + 32 * self.inverse.numel()


row("AWQ, yours", Awq)
helped = sum(a > 0 for a, _ in chosen.values())
print("layers in which scaling helped on the sample:", helped, "of", len(chosen))
claim(
    "On its sample, scaling helps in most layers; on held-out text the KL hardly changes.",
    helped > len(chosen) / 2 and abs(table["AWQ, yours"][1] / by_groups[0][1] - 1) < 0.15,
    of_model=True,
)

# %% [markdown]
# ### Exercise 5: dense and sparse
#
# Another way to deal with a few large weights is not to round them at all. *SqueezeLLM* stores half a percent in 16
# bits in a sparse matrix (nine tenths of it because they are large, the others because the loss depends on them most;
# you take the largest) and rounds the rest, whose ranges are now narrower. (Half a percent is the example of the
# authors' code, and what the engine does; the paper reports 0.45%.) This costs 16 bits for each value and 16 for its
# column: $0.5\% \cdot 32 = 0.16$ bits per weight. A sparse matrix also stores where each row starts in the list of
# values, 32 bits per row: 0.08 bits per weight for rows of 384.


# %%
def split_outliers(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Separate the int(share · numel) weights of the largest magnitude from the others.

    weight:  [out, in] float32; not changed
    returns: dense and sparse, both [out, in], ordinary tensors (not torch.sparse): dense has 0 in the places of the
             outliers, sparse has 0 everywhere else

    Example: weight = [[0.1, 9.0], [0.3, -0.2]], share = 0.25: dense [[0.1, 0], [0.3, -0.2]], sparse [[0, 9.0], [0, 0]].
    """
    ### BEGIN SOLUTION
    kept = torch.zeros(weight.numel(), dtype=torch.bool)
    kept[weight.abs().flatten().topk(int(share * weight.numel())).indices] = True
    kept = kept.view_as(weight)
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)
    ### END SOLUTION


# %%
check("l05.split_outliers")

# %%
my_split = use("l05.split_outliers")


class DenseSparse(Int4):
    """Half a percent of the weights in float16, the rest in your groups."""

    def keep(self, weight):
        dense, sparse = my_split(weight, 0.005)
        self.sparse = sparse.half()
        super().keep(dense)

    def product(self, x):
        return linear(x, restored(*self.stored) + self.sparse.float())

    def num_bits(self):
        return super().num_bits() + 32 * int(self.sparse.count_nonzero()) + 32 * (len(self.sparse) + 1)


row("dense + sparse, yours", DenseSparse)

# %% [markdown]
# ### The engine's versions
#
# Your versions lack two ideas. The engine's AWQ also **clips**: it tries narrower ranges for each group, which clips
# the largest weights and makes all steps finer. Below, its clipping is applied with your scales. And SqueezeLLM
# replaces equal steps by a **codebook** of 16 values per row, found by k-means in which each weight is weighted by its
# squared gradient. (Gradients of four texts only, to be quick.)

# %%
from minillm.models.quantize import linear_bytes as bytes_of
from minillm.models.quantize import quantize_model
from minillm.quantization.schemes import make_scheme

engine_awq = make_scheme("awq")


class AwqClipped(Replacement):
    """Your scales, with the range of each group clipped as the engine finds best."""

    def keep(self, weight):
        inputs = calibration.layers[self.name].inputs
        self.stored = engine_awq.clipped(weight, 1 / chosen[self.name][1], inputs)

    def product(self, x):
        return linear(x, engine_awq.dequantize(self.stored, x.shape[-1]))

    def num_bits(self):
        return sum(8 * part.nbytes for part in self.stored.values())


row("AWQ, clipped", AwqClipped)
install(None)
gradients = calibrate(model, calibration_ids[:4], "gradients")
quantize_model(model, make_scheme("squeezellm"), gradients)
del gradients  # as many numbers as the weights
found = quality.judge(reference, quality.logprobs(runner, texts), texts)
show("SqueezeLLM, engine", 8 * sum(bytes_of(model).values()) / num_weights, found)
plain, g64, g32 = (table[f"INT4, groups of {size}"] for size in (128, 64, 32))
awq, sparse, squeeze = (table[name] for name in ("AWQ, clipped", "dense + sparse, yours", "SqueezeLLM, engine"))
print(
    f"of the KL of INT4 in groups of 128, AWQ removes {1 - awq[1] / plain[1]:.0%}, "
    f"the sparse part {1 - sparse[1] / plain[1]:.0%}"
)
claim(
    "AWQ removes less than a third of that KL, and adds hardly any bits.",
    0 < 1 - awq[1] / plain[1] < 0.33 and awq[0] < plain[0] + 0.1,
    of_model=True,
)
claim(
    "AWQ with clipping has fewer bits than groups of 64, and less KL.",
    awq[0] < g64[0] and awq[1] < g64[1],
    of_model=True,
)
claim(
    "The sparse part removes less than a third of it, and costs more bits than groups of 64.",
    0 < 1 - sparse[1] / plain[1] < 0.33 and sparse[0] > g64[0],
    of_model=True,
)
claim(
    "SqueezeLLM needs more bits here than groups of 32, for about the same KL.",
    squeeze[0] > g32[0] and 0.85 < squeeze[1] / g32[1] < 1.15,
    of_model=True,
)
wide = sum(8 * spec.num_bytes for spec in make_scheme("squeezellm").tensors(4096, 4096).values()) / 4096**2
claim(
    "Its codebooks take 0.67 bits per weight in rows of 384, 0.06 in rows of 4096: there it needs 4.2 bits, not 4.8.",
    [round(16 * 16 / columns, 2) for columns in (384, 4096)] == [0.67, 0.06]
    and (round(wide, 1), round(squeeze[0], 1)) == (4.2, 4.8),
    of_model=True,
)

# %% [markdown]
# ## Measure
#
# ### Bits against KL

# %% tags=["expected"] alt="Mean KL against bits per weight, both on logarithmic axes: a line falls from INT4 with groups of 128 over 64 and 32 to INT8, more than fifty times lower. W8A8 lies above INT8 at the same bits. AWQ, dense and sparse and SqueezeLLM lie between 4.2 and 4.9 bits: AWQ below the line, dense and sparse near it, SqueezeLLM a little above."
ROUNDED = [f"INT4, groups of {size}" for size in (128, 64, 32)] + ["INT8, yours"]
ALONE = {
    "W8A8": "W8A8, yours",
    "AWQ": "AWQ, clipped",
    "sparse": "dense + sparse, yours",
    "SqueezeLLM": "SqueezeLLM, engine",
}
added = [found - bits_per_byte["float32"] for name, found in bits_per_byte.items() if table[name][0] < 5]
claim("At 4 bits, bits per byte grow by 0.01 to 0.02.", min(added) > 0.005 and max(added) < 0.025, of_model=True)
LineChart(
    f"What fewer bits per weight cost: {NAME}, {len(texts.targets)} held-out tokens",
    Axis("bits per weight, everything counted", log=True, ticks=(4, 5, 6, 7, 8)),
    Axis("mean KL to float32, nats per token", log=True),
    [
        Series("round to nearest: INT4 g128, g64, g32, INT8", *zip(*[table[n] for n in ROUNDED], strict=True)),
        *(Series(short, [table[n][0]], [table[n][1]]) for short, n in ALONE.items()),
    ],
    "; ".join(f"{name}: {bits:.2f} bits, KL {value:.1e}" for name, (bits, value) in table.items()),
)

# %% [markdown]
# * **INT8 costs almost nothing.** At 4 bits the KL is more than fifty times larger, and bits per byte still grow by only
#   0.01 to 0.02.
# * **Nothing gains much here.** AWQ, with the engine's clipping, removes less than a third of the KL, for hardly any
#   bits. It has less KL than groups of 64, with fewer bits. Scaling alone, without clipping, hardly changed the KL
#   (exercise 4). The sparse part costs more bits than groups of 64, and removes less than a third, too. (Where each
#   row has so few [outliers](glossary.md#outlier), the list of row starts costs half as much as the outliers themselves.)
# * **SqueezeLLM loses on narrow layers.** It has about the KL of groups of 32, for more bits. Sixteen values of two
#   bytes per row are 0.67 bits per weight when a row has 384 weights. At 4096, the width of a 7B model, they are 0.06,
#   and the total is 4.2 bits instead of 4.8.
#
# The papers report larger gains, on models of billions of weights (quoted). Why not here? Scaling gains where some
# input channels are much larger than others. Look for such channels, and for the layers where the errors are:

# %%
KINDS = {"INT8": Int8, "W8A8": W8A8, "INT4": Int4, "scaled": Awq, "sparse": DenseSparse}
errors, strongest = {}, {}
print("mean |x| of the strongest input channel divided by that of the median one, by layer; scaling needs it large")
for part in dict.fromkeys(name.split(".")[-1] for name in original):
    names = [name for name in original if name.endswith(part)]
    size = [calibration.layers[name].inputs.abs().mean(0) for name in names]
    strongest[part] = [float(one.max() / one.median()) for one in size]
    print(f"  {part:13}", " ".join(f"{ratio:4.1f}" for ratio in strongest[part]))
    for label, kind in KINDS.items():
        for name in names:
            inputs = calibration.layers[name].inputs
            right = inputs @ original[name].weight.T
            errors.setdefault((label, part), []).append(
                float((kind(name, original[name]).product(inputs) - right).norm() / right.norm())
            )
print("\nerror of a layer's output, in percent of its size, mean over the layers")
print(" " * 15 + "".join(f"{label:>8}" for label in KINDS))
for part in dict.fromkeys(part for _, part in errors):
    print(f"  {part:13}" + "".join(f"{100 * sum(errors[k, part]) / len(errors[k, part]):8.1f}" for k in KINDS))
part, found = max(strongest.items(), key=lambda item: max(item[1]))
at = found.index(max(found))
removed = {
    key: [1 - b / a for a, b in zip(errors["INT4", key], errors["scaled", key], strict=True)] for key in strongest
}
average = sum(map(sum, removed.values())) / sum(map(len, removed.values()))
print(
    f"\nthe strongest channel is in {part} of layer {at}, {max(found):.0f} times the median one: "
    f"scaling (AWQ without clipping) removes {removed[part][at]:.0%} of INT4's error there, "
    f"{average:.0%} in a linear layer on average"
)
claim("Scaling removes more of INT4's error there than on average.", removed[part][at] > average, of_model=True)
ratios = [ratio for each in strongest.values() for ratio in each]
standing_out = sum(ratio > 10 for ratio in ratios)
print(f"{standing_out} of {len(ratios)} linear layers have a channel more than ten times the median one")
claim("They are fewer than a quarter.", standing_out < len(ratios) / 4, of_model=True)
w8a8 = {part: sum(found) / len(found) for (label, part), found in errors.items() if label == "W8A8"}
worst = max(w8a8, key=w8a8.get)
others = max(error for part, error in w8a8.items() if part != worst)
claim(
    f"Under W8A8, {worst} has at least twice the error of every other kind of layer.",
    w8a8[worst] > 2 * others,
    of_model=True,
)

# %% tags=["expected"] alt="Relative output error of every layer for four kinds of linear layer under W8A8: qkv, o and gate_up stay between one and 1.6 percent in all layers, down is highest in every layer, between 1.8 and 3.3 percent."
LineChart(
    "W8A8: error of each layer's output",
    Axis("layer", ticks=tuple(range(config.num_layers))),
    Axis("percent of the output's size"),
    [
        Series(part, list(range(config.num_layers)), [round(100 * e, 1) for e in found])
        for (label, part), found in errors.items()
        if label == "W8A8"
    ],
    "On average over the layers, down_proj has more than twice the error of the others.",
)

# %% [markdown]
# Few linear layers have an input channel that stands out, and where the strongest one is, scaling gains more than on
# average. In most of the others the strongest channel is only a few times the median one, so scaling has little to win.
#
# Most of W8A8's extra error is in `down_proj`. Its input is a product of two numbers (gate times up), so most of its
# numbers are small and a few are large, and the large ones set the scale for the whole token. Its *weights* are as easy
# to round as the others (column INT8). INT8 activations fail first where one number of a token is much larger than the
# rest.
#
# ### An artificial outlier channel
#
# Large models have input channels that are 20 to 100 times larger than the others, the same ones for every token (quoted
# from the LLM.int8() and SmoothQuant papers). Build a layer with one. SmoothQuant uses AWQ's algebra with another aim:
# divide the channel of $x$ by $s_j$, and multiply the column of $W$ by it, so that both ranges are balanced:
# $s_j = \sqrt{\max|x_j| / \max|W_j|}$.

# %%
draw = torch.Generator().manual_seed(0)
x, weight = torch.randn(256, 512, generator=draw), torch.randn(512, 512, generator=draw)


def percent_off(y: Tensor, exact: Tensor) -> float:
    return float(100 * (y - exact).norm() / exact.norm())


measured_off = {}
print("one channel is   INT8   W8A8   W8A8 smoothed   INT4   INT4 with AWQ (its a)       errors in percent")
for factor in (1, 10, 100):
    outlier = x.clone()
    outlier[:, 7] *= factor
    exact = outlier @ weight.T
    codes, scale = my_rows(weight)
    s = (outlier.abs().amax(0) / weight.abs().amax(0)).sqrt()
    smoothed = my_w8a8(outlier / s, *my_rows(weight * s))
    a, t = my_awq(weight, outlier, lambda w: restored(*my_groups(w, GROUP)), [i / 10 for i in range(11)])
    found = (
        outlier @ (codes * scale[:, None]).T,
        my_w8a8(outlier, codes, scale),
        smoothed,
        outlier @ restored(*my_groups(weight, GROUP)).T,
        (outlier / t) @ restored(*my_groups(weight * t, GROUP)).T,
    )
    off = measured_off[factor] = [percent_off(y, exact) for y in found]
    print(f"{factor:4} times larger {off[0]:6.1f} {off[1]:6.1f} {off[2]:15.1f} {off[3]:6.1f} {off[4]:15.1f} ({a:.1f})")
without, with_outlier = measured_off[1], measured_off[100]
claim(
    "An outlier channel makes W8A8 several times worse, and smoothing makes up for it.",
    with_outlier[1] > 3 * without[1] and with_outlier[2] < 1.2 * without[1],
)
claim(
    "With an outlier channel, AWQ's scaling removes more than half of INT4's error.",
    with_outlier[4] < with_outlier[3] / 2,
)

# %% [markdown]
# AWQ's scaling found little to gain in the real model, where few linear layers have such a channel. Here it gains little
# at a factor of 10, and much at 100. Smoothing (for W8A8) and AWQ's scaling (for INT4) both help against outlier
# channels. **Whether your model has them is the first thing to measure.**
#
# ### Why the embedding comes last
#
# The embedding (the table of token vectors) is an eighth of the model's weights here, and none of your schemes touched it.
# Round only this table:

# %%
install(None)
vectors = model.embed_tokens.weight
exact_vectors = vectors.clone()
rounded_by = {
    "INT8": lambda w: (lambda c, s: c * s[:, None])(*my_rows(w)),
    "INT4": lambda w: restored(*my_groups(w, GROUP)),
}
share = vectors.numel() / (vectors.numel() + num_weights)
print(f"the embedding is {share:.0%} of the matrices' weights")
embedding_kl = {}
for label, linears in (("INT8", "INT8, yours"), ("INT4", "INT4, groups of 128")):
    vectors.copy_(rounded_by[label](exact_vectors))
    alone = quality.judge(reference, quality.logprobs(runner, texts), texts).mean_kl
    vectors.copy_(exact_vectors)
    per_weight = (alone / vectors.numel()) / (table[linears][1] / num_weights)
    embedding_kl[linears] = alone
    print(
        f"{label}: KL {1000 * alone:5.2g} from the embedding alone, {1000 * table[linears][1]:5.2g} from all linear "
        f"layers; per weight {per_weight:.0f} times as much"
    )

claim(
    "Rounding the embedding costs more KL than rounding all linear layers, which have more than six times the weights.",
    num_weights > 6 * vectors.numel()
    and all(alone > 1.3 * table[linears][1] for linears, alone in embedding_kl.items()),
    of_model=True,
)
claim("At 8 bits the embedding costs a KL below 0.001.", embedding_kl["INT8, yours"] < 1e-3, of_model=True)

# %% [markdown]
# Per weight it costs many times as much as a linear layer does, because this matrix is both the first and the last: an
# error there goes straight into every logit, and no later layer can absorb it. In a model that has a second matrix for
# the logits, rounding the table of token vectors also saves no time: looking up a token reads *one row* of it. Each of
# the two is 2% of the weights of Llama 2 7B and 6.5% of Llama 3 8B, whose vocabulary is four times as large
# (arithmetic, from their `config.json`). Most systems leave them in 16 bits, or use 6 to 8. In a small model it is
# more, and at 8 bits its cost is small (above, a KL below 0.001 for both uses together): with `quantization="int8"` or
# `"w8a8"` the engine computes logits from a copy in INT8, and looks tokens up in the original table. With INT4 it
# leaves both alone.
#
# ### Bytes, and time
#
# A step could read a quarter of the bytes. Is it four times as fast? First count the bytes that the operations of PyTorch
# read and write for each weight, in one decode step of one token.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BytesMoved(TorchDispatchMode):
    """Counts bytes that operations read and write. Views move nothing."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


one = torch.randn(1, config.hidden_size, generator=draw)
layer = original[next(iter(original))]
moved = {}
print("bytes per weight    stored   moved by PyTorch")
for label, kind in (("float32", None), ("INT8", Int8), ("INT4", Int4)):
    stand_in = kind("", layer) if kind else None
    with BytesMoved() as counter:
        stand_in(one) if kind else linear(one, layer.weight)
    stored = stand_in.num_bits() / 8 / layer.weight.numel() if kind else 4.0
    moved[label] = counter.total
    print(f"{label:16} {stored:9.2f} {counter.total / layer.weight.numel():18.0f}")
claim("Fewer bits in memory, and more bytes moved.", moved["float32"] < moved["INT8"] < moved["INT4"])

# %% [markdown]
# **Dequantising at every step moves more bytes than float32 did.** The codes are read once; then they become floats, which
# are written and read again. Now measure the time: the engine's own schemes in plain PyTorch, one decode step of one
# request and of 32.

# %% tags=["nbval-ignore-output"]
import statistics

from minillm.bench.timing import clock
from minillm.teaching.submitted import submitted

long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def step_seconds(engine: LLM, batch: int) -> float:
    """Median time of a decode step of `batch` requests."""
    took = []
    with submitted(engine, [prompts[1]] * batch, long):
        engine.engine.step()
        for _ in range(3):
            began = clock()
            engine.engine.step()
            took.append(clock() - began)
    return statistics.median(took)


def against_float32(engine: LLM) -> dict[int, float]:
    """For each batch size, the time of a step as a multiple of float32's; measured alternately, after a warm-up."""
    step_seconds(engine, 1)
    ratios = {1: [], 32: []}
    for _ in range(3):
        for batch, found in ratios.items():
            found.append(step_seconds(engine, batch) / step_seconds(llm, batch))
    return {batch: statistics.median(found) for batch, found in ratios.items()}


install(None)
print("times as long as the step in float32 (measured here; bytes are of the decoder's linear layers)")
print("          bytes   batch 1   batch 32\nfloat32    1.00       1.0        1.0")
slower = {}
for scheme in ("int8", "w8a8", "int4"):
    engine = LLM(NAME, **PLAIN, quantization=scheme)
    size = sum(bytes_of(engine.engine.runner.model).values()) / (4 * num_weights)
    slower[scheme] = against_float32(engine)
    print(f"{scheme:8} {size:6.2f} {slower[scheme][1]:9.1f} {slower[scheme][32]:10.1f}")
    del engine  # it holds its own copy of the weights
reveal("l05.step", round(slower["int8"][1], 1))
claim(
    "INT8 and INT4 weights are slower than float32 in plain PyTorch.",
    min(slower["int8"].values()) > 1 and min(slower["int4"].values()) > 1,
    measured=True,
)
faster = [str(n) for n in (1, 32) if slower["w8a8"][n] < slower["int8"][n]]
print(f"W8A8 is faster than INT8 at batch {' and '.join(faster)}" if faster else "W8A8 is not faster than INT8")
claim(
    "Nothing here is four times as fast.",
    all(slower[name][n] > 0.25 for name in slower for n in (1, 32)),
    measured=True,
)

# %% [markdown]
# A quarter or an eighth of the bytes, and **slower**. In plain PyTorch, INT8 and INT4 weights save *memory*: a model
# that did not fit in memory fits. The speed comes from kernels that read the codes and dequantise them in registers, so
# that the bytes moved are the bytes stored. Lesson 9 writes one for the KV cache, and the engine's compiled step has
# them for weights on a CPU (lesson 15).
#
# W8A8 differs: its product reads the codes, if the processor has instructions for that. Then it can be as fast as
# float32 even here, or faster, but not nearly four times as fast: rounding the activations is extra work, and in a
# model this small the overhead of each call costs more than its bytes. (On a processor without such instructions
# PyTorch's product of integers can be inexact, or many times slower than that of floats. The engine tests both once,
# and in these cases multiplies the codes as floats.)
#
# With such kernels, where would quantised weights win? The chart is *modelled*: time is bytes divided by bandwidth or
# operations divided by rate, whichever is longer, with the numbers from an H100's data sheet (*quoted*: 3.35 TB/s, 989
# T operations a second in bf16, 1979 in INT8).

# %% tags=["expected"] alt="Modelled speed-up over bf16 weights against batch size on an H100: INT4 weights start at nearly 4 and fall from about 75 tokens on, reaching 1 at about 300; INT8 weights with bf16 products start at 2, fall from about 150 on and reach 1 at about 300; W8A8 is 2 at every batch."
BANDWIDTH, BF16, INT8_RATE = 3.35e12, 989e12, 1979e12
BATCHES = (1, 4, 16, 64, 77, 100, 125, 148, 175, 200, 250, 295, 512, 1024)


def weight_seconds(batch: int, bits: float, rate: float) -> float:
    """Time that one weight takes in a step: read once, used twice (multiply, add) for each of `batch` tokens."""
    return max(bits / 8 / BANDWIDTH, 2 * batch / rate)


plans = {"INT4 (4.16 bits), bf16 products": (4.16, BF16), "INT8, bf16 products": (8, BF16), "W8A8": (8, INT8_RATE)}
LineChart(
    "Linear layers against bf16, modelled for an H100",
    Axis("tokens in the step", log=True, ticks=(1, 4, 16, 64, 256, 1024)),
    Axis("times as fast"),
    [
        Series(
            label, BATCHES, [weight_seconds(n, 16, BF16) / weight_seconds(n, *plan) for n in BATCHES], style="modelled"
        )
        for label, plan in plans.items()
    ],
    "Fewer bits help while reading is the limit; from about 300 tokens on, only faster arithmetic does.",
)

# %% [markdown]
# (INT8's line is the same as W8A8's until 148 tokens, and then the same as INT4's.) **Where it loses:**
#
# * *Large batches.* From about 300 tokens in a step on, arithmetic is the limit here: reading fewer bytes gains nothing,
#   and unpacking costs. Prefill is such a step. Only W8A8 still gains there, if the hardware multiplies INT8 faster.
# * *Tiny models.* Their weights fit into a processor's cache, and their steps are mostly overhead.
# * *Outlier activations*, for W8A8.
# * *Exactness.* Speculative decoding and caching keep the model's distribution; quantisation changes the model.
#
# ## Break it
#
# Here are nine mistakes and four checks. `half a step` (only where a row has one step; elsewhere a dash): is
# $|W - \hat W| \le s/2$ in a real layer? `zeros`: is the output finite for a layer with a row of zeros, and for a token of zeros?
# `alone`: does a token get the same output alone as beside a token that is a hundred times as large? `KL`: how many times
# the KL of the right version, on the text above? **Guess first:** which mistakes would you never find by reading the
# model's text?


# %%
class Int8PerTensor(Int8):
    """One scale for the matrix."""

    def keep(self, weight):
        scale = (weight.abs().amax() / 127).clamp_min(1e-30)
        self.codes, self.scale = (weight / scale).round().to(torch.int8), scale.expand(len(weight))


class Int8Levels128(Int8):
    """s = amax / 128, and the code 128 is clamped to 127."""

    def keep(self, weight):
        self.scale = (weight.abs().amax(1) / 128).clamp_min(1e-30)
        self.codes = (weight / self.scale[:, None]).round().clamp(-128, 127).to(torch.int8)


class Int8Truncates(Int8):
    """No rounding before `.to(torch.int8)`."""

    def keep(self, weight):
        self.scale = my_rows(weight)[1]
        self.codes = (weight / self.scale[:, None]).to(torch.int8)


class ZeroScale(W8A8):
    """Divides a token of zeros by its scale of 0."""

    def product(self, x):
        x_scale = x.abs().amax(1, keepdim=True) / 127
        return ((x / x_scale).round() @ self.codes.float().T) * x_scale * self.scale


class OneTokenScale(W8A8):
    """One scale for all tokens of the step."""

    def product(self, x):
        x_scale = (x.abs().amax() / 127).clamp_min(1e-30)
        return ((x / x_scale).round() @ self.codes.float().T) * x_scale * self.scale


class Int8Sum(W8A8):
    """Accumulates in int8: a sum that does not fit wraps around."""

    def product(self, x):
        x_codes, x_scale = my_rows(x)
        whole = x_codes.float() @ self.codes.float().T
        return ((whole + 128) % 256 - 128) * x_scale[:, None] * self.scale


class AwqForgetsX(Awq):
    """Scales the weights, and not the input."""

    def product(self, x):
        return Int4.product(self, x)


class AwqInverted(Awq):
    """Divides the weights by s and multiplies the input."""

    def keep(self, weight):
        super().keep(weight)
        s = 1 / self.inverse
        self.inverse = s
        Int4.keep(self, weight / s)


class OutliersTwice(DenseSparse):
    """Leaves the outliers in the dense part, and adds them again."""

    def keep(self, weight):
        self.sparse = my_split(weight, 0.005)[1].half()
        Int4.keep(self, weight)


# %%
few = quality.join(encoded[:8], 256, config.eos_token_ids[:1], tokenizer)
install(None)
few_reference = quality.logprobs(runner, few)
probe_name, probe = next(iter(original.items()))


def kl_of(kind: type[Replacement]) -> float:
    install(kind)
    return quality.judge(few_reference, quality.logprobs(runner, few), few).mean_kl


def within_half_a_step(made: Replacement) -> str:
    """For the schemes with one step per row; the others are compared by KL only."""
    if not isinstance(made, Int8):
        return "-"
    step = made.scale[:, None]
    off = (made.codes * step - probe.weight).abs()
    return "ok" if (off <= step / 2 * (1 + 1e-4)).all() else "WRONG"


def finite_with_zeros(kind: type[Replacement]) -> str:
    empty = torch.nn.Linear(probe.in_features, probe.out_features, bias=False)
    empty.weight.copy_(probe.weight)
    empty.weight[0] = 0
    tokens = torch.cat((torch.zeros(1, probe.in_features), calibration.layers[probe_name].inputs[:1]))
    return "ok" if kind(probe_name, empty)(tokens).isfinite().all() else "WRONG"


def same_alone(made: Replacement) -> str:
    token = calibration.layers[probe_name].inputs[5:6]
    alone, beside = made(token), made(torch.cat((token, 100 * token)))[:1]
    return "ok" if percent_off(beside, alone) < 0.01 else "WRONG"


FAMILIES = {
    Int8: (Int8PerTensor, Int8Levels128, Int8Truncates),
    W8A8: (ZeroScale, OneTokenScale, Int8Sum),
    Awq: (AwqForgetsX, AwqInverted),
    DenseSparse: (OutliersTwice,),
}
grown, passed, amounts = {}, [], {Int4: kl_of(Int4)}
print(f"{'':15} half a step   zeros   alone   KL, times the right one")
for right, mistakes in FAMILIES.items():
    for kind in (right, *mistakes):
        made = kind(probe_name, probe)
        amounts[kind] = kl_of(kind)
        times = amounts[kind] / amounts[right]
        cells = within_half_a_step(made), finite_with_zeros(kind), same_alone(made)
        amount = f"{times:.2g}" if times < 1000 else "over 1000"
        grown[kind.__name__] = times
        if kind is not right and "WRONG" not in cells:
            passed.append(kind.__name__)
        print(f"{kind.__name__:15} {cells[0]:13} {cells[1]:7} {cells[2]:7} {amount}")
_ = install(None)
upside_down = percent_off((outlier * t) @ restored(*my_groups(weight / t, GROUP)).T, exact)
print(
    f"AwqInverted on the layer with an outlier channel: {upside_down:.1f} percent off; plain INT4 is {with_outlier[3]:.1f}"
)
several = [grown[name] for name in ("Int8PerTensor", "Int8Truncates", "OneTokenScale", "AwqForgetsX", "OutliersTwice")]
silent = [grown[name] for name in ("Int8Levels128", "ZeroScale")]
claim(
    "One mistake ruins the model, five at least double the KL.",
    grown["Int8Sum"] > 1000 and min(several) > 2,
    of_model=True,
)
claim("Two mistakes add less than a fifth to the KL of the right version.", max(silent) < 1.2, of_model=True)
claim("AwqInverted about doubles the KL.", 1.5 < grown["AwqInverted"] < 2.7, of_model=True)
claim(
    "Five of the nine mistakes pass those of the first three checks that they get, and multiply the KL by more than 1.5.",
    len(passed) == 5 and min(grown[name] for name in passed) > 1.5,
    of_model=True,
)
of_int4 = {kind: amount / amounts[Int4] for kind, amount in amounts.items()}
print(
    "of INT4's KL: "
    + ", ".join(f"{k.__name__} {of_int4[k]:.0%}" for k in (Int8PerTensor, Int8Truncates, OneTokenScale))
)
claim(
    "Int8PerTensor and Int8Truncates stay below a tenth of plain INT4's KL; OneTokenScale has more than half of it.",
    max(of_int4[Int8PerTensor], of_int4[Int8Truncates]) < 0.1 and of_int4[OneTokenScale] > 0.5,
    of_model=True,
)
claim("AwqInverted is visible on a layer with an outlier channel.", upside_down > 2 * with_outlier[3])

# %% [markdown]
# `Int8Sum` multiplies the KL by more than a thousand, which ruins any text. `AwqForgetsX` and `OutliersTwice` multiply
# a KL that was large already, so a reader should notice. `Int8PerTensor` and `Int8Truncates` multiply the tiny KL of
# INT8, which stays tiny: a reader should hardly notice. `OneTokenScale` multiplies that of W8A8 to more than half of
# plain INT4's. The inverted scales only double the KL in this model, because few of its linear layers have an outlier
# channel. The last two (the code that is clipped, the token of zeros) are nearly as good as the right ones on ordinary
# text. So test the *parts* (the bound of half a step, rows and tokens of zeros, a token alone and beside others, a
# layer built to have an outlier channel) *and* the whole, by its KL: five of the nine pass those of the first three
# checks that they get.
#
# ## In the field
#
# | method | idea | where |
# |---|---|---|
# | RTN in blocks | exercise 3 in groups of 32; symmetric, or with a minimum | llama.cpp `Q8_0`, `Q4_0` (symmetric), `Q4_1` (with a minimum); `Q4_K` also rounds the scales, in blocks of blocks, at about 4.5 bits |
# | LLM.int8() | W8A8, with the outlier channels of $x$ kept in 16 bits | bitsandbytes, transformers `load_in_8bit` |
# | SmoothQuant | moves outliers from $x$ into $W$, then W8A8 | vLLM and TensorRT-LLM INT8 checkpoints |
# | GPTQ | rounds column by column, each time correcting the columns to come | vLLM, SGLang, transformers; Marlin kernels |
# | AWQ | exercise 4, with clipping | vLLM: the same kernels as for GPTQ, where the GPU supports them |
# | SqueezeLLM | exercise 5 and codebooks | its own kernels |
#
# *Marlin* is a kernel for 4-bit weights with 16-bit activations. Its authors report nearly four times float16's speed up to
# batches of 16 to 32, and less beyond (quoted, not measured here): the first line of the chart above in practice.
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | INT8 is 2× and INT4 4× smaller than 16 bits | 1.98× and 3.85× with scales and zero points, here; and the embedding stays | exercises 1 and 3 |
# | SqueezeLLM: "lossless compression to ultra-low precisions of up to 3-bit" | here, with codes of 4 bits, it has about the KL of INT4 in groups of 32, far above INT8's; 3 bits were not tested | bits against KL |
# | a smaller model is a faster model | only with a kernel that reads codes; dequantising at every step moves *more* bytes | bytes, and time |
# | AWQ, SqueezeLLM beat rounding to nearest | where there are outliers and wide rows; here AWQ removes less than a third of the KL, and SqueezeLLM has about the KL of groups of 32, for more bits | bits against KL |
# | 0.5% sparse values are nearly free | 0.16 bits per weight and the row starts: 0.16 + 32/384 = 0.24 in all for rows of 384, less for longer ones | exercise 5 |
#
# **Papers.** Dettmers et al. 2022, *LLM.int8()*. Xiao et al. 2023, *SmoothQuant*. Frantar et al. 2023, *GPTQ*. Lin et al.
# 2023, *AWQ*. Kim et al. 2023, *SqueezeLLM*. Frantar et al. 2024, *MARLIN*.
#
# ## Recap
#
# 1. One scale per output row can be multiplied in after the sum, so INT8 weights cost one more multiplication per
#    output and almost no quality.
# 2. W8A8 also rounds each token by its own scale and multiplies integers; one large activation makes the steps
#    coarse for its whole token.
# 3. At 4 bits the steps are up to 17 times as wide: groups, scaled channels, sparse outliers and codebooks each win back
#    a part and cost bits. Count the bits, and look for outlier channels before you choose a method against them.
# 4. Fewer bytes save time only if the kernel reads the codes, and only while bytes are the limit.
# 5. Models tolerate wrong rounding, so reading the text is not enough. Test the bound, zeros, a token beside others,
#    and the KL against float32: none of these finds every mistake.
#
# **Next:** lesson 6 stores the keys and values of many texts in blocks, like the pages of a computer's memory.
