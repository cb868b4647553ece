# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 8. Triton, first kernels
#
# **Question.** *Thirteen numbers, and programs that work on eight at a time. Which program touches which number, and what
# do the last three lanes do?*
#
# Lessons 4 and 5 met the same limit. A quantised cache is smaller, but PyTorch dequantises it with several operations, and
# each of them reads all of its input from memory and writes all of its output back. To read once and write once, you must
# write yourself what happens between the load and the store. That is a *[kernel](glossary.md#kernel)*.
#
# Triton is a language for kernels that looks like Python. You write one **[program](glossary.md#program)**; the GPU
# runs thousands of copies of it at once. A copy knows only its number. From that number it works out which **block** of
# the tensor is its own: it loads the block, computes, and stores. Most mistakes in kernels are mistakes in working out
# the block.
#
# You build four kernels of the kind that engines use: a copy of rows, softmax, [RMSNorm](glossary.md#rmsnorm), and
# [dequantising](glossary.md#quantisation) INT8 codes. The last two then run inside the real engine.
#
# You need lesson 4 (codes and scales). Triton exists for Linux, so also for WSL and Colab.
#
# **With or without a GPU.** The cells are the same. With a GPU, Triton compiles your kernels for it. Without one, Triton's
# *interpreter* runs the programs in Python, one after the other, with NumPy arrays for blocks. It gives the same results, up
# to the last bits, and says nothing about speed. `TRITON_INTERPRET=1` asks for it, and must be set **before Triton is
# imported**: parts of Triton are kernels too (`tl.sum` is one), and they are made on import.

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
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.kernel_tiles import touched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # any Llama, Mistral, Qwen or SmolLM checkpoint works too
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of infinities; a GPU does not
print("kernels are", "compiled for the GPU" if DEVICE == "cuda" else "interpreted, one program after the other")

# %% [markdown]
# ## Predict
#
# Write a number for each before you measure.
#
# 1. A row of 384 numbers, one program per row, and a block must be a power of two. What percentage of the lanes is idle?
# 2. A softmax made of five PyTorch operations (maximum, difference, exponential, sum, quotient), and one kernel that does
#    all of it. How many times as many bytes do the five move?
# 3. Four kernels are right whenever the block divides the row. A test with a row that does *not* fill its block compares
#    the results. In how many of the four does it find the mistake?

# %%
predict("l08.idle", None, unit="%")
predict("l08.moved", None, unit="times")
predict("l08.found", None, unit="of 4")

# %% [markdown]
# ## Build
#
# ### A whole kernel to begin with
#
# Each program writes its own number into its places. Read it line by line; the other kernels differ only in what they
# compute.
#
# * `@triton.jit` makes a kernel of the function. Tensors arrive as *pointers*: the address of their first number.
# * `tl.program_id(0)` is the number of this copy.
# * `tl.arange(0, BLOCK)` is the block 0, 1, … BLOCK - 1, one number per **lane**. Its length must be a power of two, known
#   when the kernel is compiled: hence `tl.constexpr`.
# * `out_ptr + place` is a block of addresses.
# * `mask` switches lanes off. A lane that is off loads nothing and stores nothing.
#
# A kernel is launched with a **grid**, the number of programs, in square brackets.


# %%
@triton.jit
def stamp_kernel(out_ptr, size, BLOCK: tl.constexpr):
    """Every number of out becomes the number of the program that wrote it."""
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, program, mask=place < size)


out = torch.zeros(13, dtype=torch.int32, device=DEVICE)
stamp_kernel[(2,)](out, 13, BLOCK=8)
print(out.tolist())

# %% [markdown]
# The same as a picture. To find out which program wrote what, it launches grids of one program, of two, and so on, and
# looks at what has changed. So it works for any kernel, also for yours.

# %% tags=["expected"] alt="Thirteen numbers in a row and two programs of eight lanes: program 0 writes numbers 0 to 7, program 1 writes 8 to 12, and its last three lanes are hatched, for they are masked."
touched(lambda grid, out: stamp_kernel[(grid[1],)](out, 13, BLOCK=8), (1, 13), (1, 8), "stamp_kernel, 13 numbers")

# %% [markdown]
# The last three lanes exist. They take time like the others, and without a mask they would write behind the tensor's end,
# into the memory of something else.
#
# ### Exercise 1: count them
#
# A tensor of rows. Each program gets `block` columns of *one* row: blocks do not run on into the next row.


# %%
def lanes(rows: int, columns: int, block: int) -> tuple[int, int]:
    """(programs, lanes that the mask switches off) for a tensor of rows × columns.

    Example: 1 row of 13 columns in blocks of 8: 2 programs with 16 lanes, 3 of them off: (2, 3).
    """
    ### BEGIN SOLUTION
    programs = rows * -(-columns // block)
    return programs, programs * block - rows * columns
    ### END SOLUTION


# %%
check("l08.lanes")

# %% [markdown]
# Stuck? `hint("l08.lanes", 1)`, then 2, 3 and 4: each says more, and the last is the solution.
#
# When a program must see its whole row (softmax and RMSNorm must: they sum over it), the block is the next power of two.
# How much is wasted depends on the width alone:

# %% tags=["expected"] alt="Share of idle lanes against row width, one block per row: zero at powers of two, just under half right after each of them, 25 percent at 384."
my_lanes = use("l08.lanes")


def idle(columns: int) -> float:
    """Per cent of the lanes of a row that do nothing."""
    block = triton.next_power_of_2(columns)
    return 100 * my_lanes(1, columns, block)[1] / block


widths = range(16, 1025, 8)
reveal("l08.idle", round(idle(384)))
claim("No lane is idle at a power of two, a quarter of them at 384.", idle(256) == idle(512) == 0 and idle(384) == 25)
LineChart(
    "One block per row: lanes that do nothing",
    Axis("columns of a row", ticks=(64, 128, 256, 384, 512, 768, 1024)),
    Axis("idle lanes, per cent"),
    [Series("next power of two", widths, [idle(width) for width in widths], style="modelled")],
    "Idle lanes: none at powers of two, nearly half just above them, 25 % at 384 and at 768.",
)

# %% [markdown]
# An idle lane computes, but it moves no bytes. Where memory is the limit, as for all kernels of this lesson, it costs little.
#
# ### Exercise 2: copy rows
#
# Rows are seldom packed. The keys of a batch are a *slice* of what one matrix product made for queries, keys and values
# together: rows of 5 columns may lie 12 numbers apart. That distance is the **stride**, and `x.stride(0)` is what it is.
# Here the grid has two dimensions: `program_id(0)` is the row, `program_id(1)` the block in that row.


# %%
@triton.jit
def copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    """Program (r, b) copies columns b · BLOCK … of row r, those that exist.

    x_ptr, out_ptr:        first number of each tensor; rows lie x_stride and out_stride numbers apart
    columns:               of a row; not always a multiple of BLOCK
    grid:                  (rows, blocks that a row needs)
    Example: BLOCK 4, columns 6: program (2, 1) copies columns 4 and 5 of row 2, and two of its lanes are off.
    """
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside)
    tl.store(out_ptr + row * out_stride + column, x, mask=inside)
    ### END SOLUTION


# %%
check("l08.copy_kernel")

# %% [markdown]
# The check puts NaN around each tensor, and into the result before your kernel runs. So `nan` in what you *got* is a number
# that was never written, and *numbers written beyond out* overwrote other memory.
#
# ### See: your programs on a tensor
#
# Four rows of 13 columns, out of a wider tensor. Programs are numbered row by row.

# %% tags=["expected"] alt="Four rows of thirteen numbers, eight programs of eight lanes: two programs per row, the last three lanes of every second one are hatched."
my_copy = use("l08.copy_kernel")
wide = torch.arange(4 * 20.0, device=DEVICE).view(4, 20)
keys = wide[:, 5:18]  # 13 columns, rows 20 apart


def launch_copy(grid: tuple[int, int], out: Tensor) -> None:
    """Your kernel on the slice, with any grid."""
    my_copy[grid](keys, out, 13, keys.stride(0), out.stride(0), BLOCK=8)


touched(launch_copy, (4, 13), (1, 8), "copy_kernel, 4 rows of 13 columns")

# %% [markdown]
# No program waits for another, and none reads what another writes. That is the contract of a grid: any order, or all at
# once. The interpreter always takes them in order. So a kernel that relies on the order passes here and fails on a GPU.
#
# ### Exercise 3: softmax
#
# One program per row, the whole row in one block:
#
# $$y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j$$
#
# Now the lanes are combined: `tl.max(x, 0)` and `tl.sum(x, 0)` run over **all** lanes of a block, the masked ones too. You
# choose what those hold: `tl.load(…, mask=…, other=…)`. (Without `other` it is undefined: the interpreter has zeros there, a
# GPU may have anything.)


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Program r: the softmax of row r. x and out are packed: row r begins at r · columns.

    columns: at most BLOCK. Scores may be ±1000, or -inf for a key that must not be seen.
    grid:    (rows,)
    Example: the row 1, 2, 3 with BLOCK 4 gives 0.0900, 0.2447, 0.6652; the fourth lane adds nothing to the sum.
    """
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + column, e / tl.sum(e, 0), mask=inside)
    ### END SOLUTION


# %%
check("l08.softmax_kernel")

# %%
my_softmax = use("l08.softmax_kernel")


def softmax(x: Tensor) -> Tensor:
    """[rows, columns] → the same, by your kernel."""
    out = torch.empty_like(x)
    my_softmax[(len(x),)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


torch.manual_seed(8)
scores = 5 * torch.randn(6, 100, device=DEVICE)
claim(
    "It differs from torch.softmax by less than 1e-6.", bool((softmax(scores) - scores.softmax(-1)).abs().max() < 1e-6)
)

# %% [markdown]
# ### Exercise 4: RMSNorm
#
# $$y_i = \frac{x_i}{\sqrt{\frac1n \sum_j x_j^2 + \varepsilon}} \cdot w_i$$
#
# It stands before every attention and every MLP. The row may be float16: 300 is a modest activation, and 300² does not fit
# into float16. Square in float32 (`.to(tl.float32)`). Storing rounds to the type of `out` by itself.


# %%
@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    """Program r: the RMSNorm of row r. x and out are packed, float32 or float16; sums are float32.

    weight_ptr: one row of `columns` weights, the same for all programs
    grid:       (rows,)
    Example: the row 3, 4, weights 1, 1, eps 0: the mean square is 12.5, and the result 0.8485, 1.1314.
    """
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    tl.store(out_ptr + row * columns + column, x / tl.sqrt(mean + eps) * weight, mask=inside)
    ### END SOLUTION


# %%
check("l08.rms_norm_kernel")

# %% [markdown]
# ### See: your kernel beside the engine's, and in the engine
#
# `minillm.ops.triton` holds this project's own kernels. Same inputs, yours and theirs; then every norm of the model is
# replaced by yours, and it writes a text. (`enforce_eager=True`: the engine runs plain PyTorch layers, which can be replaced.)

# %%
from minillm.models.layers import RMSNorm
from minillm.ops.triton.rms_norm import rms_norm as engines_rms_norm

PLAIN = {"dtype": "float32", "enforce_eager": True, "num_kv_blocks": 64}
my_rms_norm = use("l08.rms_norm_kernel")
launched = []


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, columns] → the same, by your kernel."""
    x, out, columns = x.contiguous(), torch.empty_like(x), x.shape[-1]
    launched.append(x.numel() // columns)
    my_rms_norm[(launched[-1],)](x, weight, out, columns, eps, BLOCK=triton.next_power_of_2(columns))
    return out


x, weight = torch.randn(3, 384, device=DEVICE), torch.rand(384, device=DEVICE)
difference = (rms_norm(x, weight, 1e-5) - engines_rms_norm(x, weight, 1e-5)).abs().max()
claim("It differs from the engine's own kernel by less than 1e-6.", bool(difference < 1e-6))

# %%
prompt = "def is_even(n):\n    "
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def written(engine: LLM) -> list[int]:
    """The tokens that the engine writes after the prompt."""
    return engine.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids


plain = LLM(NAME, **PLAIN)
expected = written(plain)
with_kernel = LLM(NAME, **PLAIN)
norms = [module for module in with_kernel.engine.runner.model.modules() if isinstance(module, RMSNorm)]
for norm in norms:
    norm.forward = lambda x, norm=norm: rms_norm(x, norm.weight, norm.eps)
launched.clear()
tokens = written(with_kernel)
print("the text:", repr(plain.engine.tokenizer.decode(tokens)))
claim("With your kernel the engine writes the same tokens.", tokens == expected)
claim("More than half of the launches have one program.", launched.count(1) > len(launched) / 2)
print(f"{len(norms)} norms, {len(launched)} launches, {sum(launched)} programs")

# %% [markdown]
# Most launches belong to decode steps, and each of those has **one** program: one token, one row. A GPU with a hundred
# processors would keep one of them busy. *Where it loses* comes back to this.
#
# ### Exercise 5: dequantise INT8 codes
#
# The keys of lesson 4: a row of codes (one signed byte each) per token and head, and one scale per row. A row has only 64
# numbers, which is little for a program. So give each program a **[tile](glossary.md#tile)** of several rows:
#
# * `row` is a block of row numbers, `column` one of column numbers.
# * `row[:, None]` is a column of them, `column[None, :]` a row. Together, `row[:, None] * columns + column[None, :]` is a
#   *two-dimensional* block of places: a tile.
# * The mask has two dimensions too: one for the rows that exist, one for the columns.
#
# And mind the type. A code is an INT8. 100 · 2 in INT8 is not 200 but -56.


# %%
@triton.jit
def dequantise_kernel(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: rows i · ROWS …, all columns: out = code · scale of the row, in float32.

    codes_ptr: [rows, columns] int8, packed
    scale_ptr: [rows] float32 or bfloat16
    out_ptr:   [rows, columns] float32, packed
    grid:      (rows / ROWS, rounded up,); columns is at most BLOCK
    Example: codes 1, -2 with scale 0.5 and codes 3, 4 with scale 2 give 0.5, -1 and 6, 8.
    """
    ### BEGIN SOLUTION
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    tl.store(out_ptr + place, codes.to(tl.float32) * scale.to(tl.float32)[:, None], mask=inside)
    ### END SOLUTION


# %%
check("l08.dequantise_kernel")

# %% tags=["expected"] alt="Seven rows of twelve numbers in tiles of four rows and sixteen columns: program 0 has rows 0 to 3, program 1 rows 4 to 6; four columns on the right and one row below are hatched."
my_dequantise = use("l08.dequantise_kernel")
seven = torch.ones(7, 12, dtype=torch.int8, device=DEVICE), torch.ones(7, device=DEVICE)


def launch_tiles(grid: tuple[int, int], out: Tensor) -> None:
    """Your kernel on seven packed rows of twelve codes."""
    my_dequantise[(grid[0],)](*seven, out, 7, 12, ROWS=4, BLOCK=16)


touched(launch_tiles, (7, 12), (4, 16), "dequantise_kernel, tiles of 4 × 16 lanes", gaps=False)

# %% [markdown]
# ### Use: an INT8 cache that your kernel reads
#
# As in lesson 4, a cache layout has two methods. `encode` stays the engine's. `decode`, which dequantises, is yours: it is
# called once for the keys and once for the values, in every layer and every step.

# %%
from minillm.cache.paged_int8 import PagedInt8KVCache

tiles = []


class MyInt8(PagedInt8KVCache):
    """The engine's INT8 layout, read by your kernel."""

    def decode(self, codes, scale):
        rows, columns = scale.numel(), codes.shape[-1]
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        tiles.append(triton.cdiv(rows, 16))
        block = triton.next_power_of_2(columns)
        my_dequantise[(tiles[-1],)](codes, scale, out, rows, columns, ROWS=16, BLOCK=block)
        return out.to(self.dtype)


tokens = written(LLM(NAME, **PLAIN, kv_cache_config={"layout": MyInt8}))
own = written(LLM(NAME, **PLAIN, kv_cache_dtype="int8"))
claim("The engine writes the tokens of its own INT8 cache.", tokens == own)
print(f"{len(tiles)} launches, {sum(tiles)} programs")

# %% [markdown]
# The kernel makes one product and one rounding per number, as PyTorch does. So the numbers are equal to the last bit, and
# the tokens must be equal.
#
# ## Measure
#
# ### Bytes and launches
#
# What is gained? Count, as in lesson 4: for each PyTorch operation, the bytes it reads and the bytes it writes. Your kernels
# read each number once and write each result once, as their source shows.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.ops.kv_quant import dequantize_symmetric
from minillm.ops.rms_norm import rms_norm as reference_rms_norm


class Moved(TorchDispatchMode):
    """Counts operations, and adds up what they read and write. Views move nothing."""

    launches = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            self.total += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


def softmax_in_parts(x: Tensor) -> Tensor:
    """Five operations."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


rows, columns = 256, 512
x, weight = torch.randn(rows, columns, device=DEVICE), torch.rand(columns, device=DEVICE)
codes, scale = torch.ones(rows, columns, dtype=torch.int8, device=DEVICE), torch.ones(rows, device=DEVICE)
kernel_bytes = {
    "softmax": 2 * x.nbytes,
    "RMSNorm": 2 * x.nbytes + weight.nbytes,
    "INT8 to float32": codes.nbytes + scale.nbytes + x.nbytes,
}
calls = [
    ("softmax", "in parts", lambda: softmax_in_parts(x)),
    ("softmax", "torch.softmax", lambda: x.softmax(-1)),
    ("RMSNorm", "in parts", lambda: reference_rms_norm(x, weight, 1e-5)),
    ("INT8 to float32", "in parts", lambda: dequantize_symmetric(codes, scale)),
]
ratios = {}
print(f"{rows} rows of {columns}     PyTorch          launches       KiB   your kernel   PyTorch / yours")
for name, way, call in calls:
    with Moved() as counter:
        call()
    yours = kernel_bytes[name]
    print(
        f"{name:20} {way:15} {counter.launches:9} {counter.total / 1024:9.0f} {yours / 1024:9.0f} KiB "
        f"{counter.total / yours:13.1f}x"
    )
    ratios[name, way] = counter.total / yours
reveal("l08.moved", round(ratios["softmax", "in parts"], 1))
claim(
    "In parts, every operation moves at least twice the bytes.",
    min(r for (_, way), r in ratios.items() if way == "in parts") > 2,
)
claim("torch.softmax moves as many bytes as your kernel.", ratios["softmax", "torch.softmax"] == 1)
claim(
    "Most bytes that the INT8 kernel moves are the float32 numbers it writes.",
    2 * x.nbytes > kernel_bytes["INT8 to float32"],
)

# %% [markdown]
# Three things follow from this table.
#
# * **The gain is in what is not written.** Between load and store everything stays in registers. The five operations made
#   four intermediate tensors.
# * **`torch.softmax` is no worse.** It *is* one kernel. Where PyTorch has the whole operation, your own kernel saves no bytes.
#   It saves them where PyTorch has only the parts.
# * **The INT8 kernel still writes float32**, four bytes for each byte it reads. The attention kernel of lesson 9 uses the
#   numbers at once, in registers, and then only the codes move.
#
# ### Where it loses
#
# Every launch takes a few microseconds, most of it in Python and in the driver. Below is arithmetic, not a measurement: 5 µs
# per launch (an assumption), and two memory bandwidths from NVIDIA's data sheets (quoted: T4 320 GB/s, H100 SXM
# 3,350 GB/s).

# %%
LAUNCH, BANDWIDTH = 5e-6, {"T4": 320e9, "H100": 3350e9}
shapes = [("minicoder, one token", 1, 384), ("Llama 3 8B, one token", 1, 4096), ("Llama 3 8B, 4096 tokens", 4096, 4096)]
shares_of = {}
print(f"{'RMSNorm in float16':26} {'bytes':>12}" + "".join(f"{gpu:>9}: launch / work" for gpu in BANDWIDTH))
for label, rows, columns in shapes:
    size = 2 * (2 * rows * columns + columns)
    times = shares_of[label] = [LAUNCH / (size / speed) for speed in BANDWIDTH.values()]
    shares = "".join(f"{time:18,.0f} times" if time > 10 else f"{time:18.2f} times" for time in times)
    print(f"{label:26} {size:12,}{shares}")
claim(
    "For one token the launch takes longer than the work on both GPUs, for 4096 tokens less.",
    min(shares_of["Llama 3 8B, one token"]) > 1 > max(shares_of["Llama 3 8B, 4096 tokens"]),
)
for gpu, speed in BANDWIDTH.items():
    print(f"{gpu}: work takes as long as its launch at {LAUNCH * speed / 1e6:.1f} MB")

# %% [markdown]
# In decoding, nearly all of a norm's time is the launch. A better kernel gains nothing there; **fewer launches** do: one
# kernel for the norm and the addition before it, or all launches of a step recorded once and replayed (CUDA graphs). With
# thousands of tokens the work takes longer than the launch, and then bytes decide.
#
# A kernel also loses where a row is too long for the registers of one program (it must then loop over blocks), where rows
# are so short that a program has little to do (hence tiles), and on a machine without a GPU: the interpreter is for finding
# mistakes, and the engine uses PyTorch or compiled CPU code there.
#
# ### On your GPU
#
# If there is one: the measured bytes per second of a plain copy, and what share of that each of your kernels reaches.

# %% tags=["nbval-ignore-output"]
if DEVICE == "cuda":
    from triton.testing import do_bench

    rows, columns = 16384, 4096
    x, out, weight = (
        torch.randn(rows, columns, device=DEVICE),
        torch.empty(rows, columns, device=DEVICE),
        x.new_ones(4096),
    )
    codes, scale = torch.ones(rows, columns, dtype=torch.int8, device=DEVICE), torch.ones(rows, device=DEVICE)
    timed = {
        "torch copy": (2 * x.nbytes, lambda: out.copy_(x)),
        "copy_kernel": (2 * x.nbytes, lambda: my_copy[(rows, 4)](x, out, columns, columns, columns, BLOCK=1024)),
        "softmax_kernel": (2 * x.nbytes, lambda: my_softmax[(rows,)](x, out, columns, BLOCK=4096)),
        "torch.softmax": (2 * x.nbytes, lambda: x.softmax(-1)),
        "softmax in parts": (2 * x.nbytes, lambda: softmax_in_parts(x)),
        "rms_norm_kernel": (2 * x.nbytes, lambda: my_rms_norm[(rows,)](x, weight, out, columns, 1e-5, BLOCK=4096)),
        "dequantise_kernel": (
            codes.nbytes + x.nbytes,
            lambda: my_dequantise[(rows,)](codes, scale, out, rows, columns, ROWS=1, BLOCK=4096),
        ),
    }
    speeds = {name: size / do_bench(run, return_mode="median") / 1e6 for name, (size, run) in timed.items()}
    for name, speed in speeds.items():
        print(f"{name:18} {speed:7,.0f} GB/s of useful bytes, {speed / speeds['torch copy']:4.0%} of the copy")
else:
    print("No GPU here, so nothing is timed. The seconds of the interpreter say nothing about a kernel.")

# %% [markdown]
# ## Break it
#
# Four kernels with one mistake each. All four are right whenever the block divides the row. There are three tests:
#
# * `full`: 8 columns in a block of 8, results compared.
# * `remainder`: 5 columns in a block of 8, results compared; the memory around the tensors happens to hold zeros.
# * `poison`: the same, but the memory around the input is NaN, and that around the result is 7 and must be 7 afterwards.
#
# **Guess first:** which test finds which mistake?


# %%
@triton.jit
def copy_no_mask(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Loads and stores all lanes."""
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + column, tl.load(x_ptr + column))


@triton.jit
def softmax_zeros(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Masked lanes are 0, and e to the power of 0 is 1."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + column, e / tl.sum(e, 0), mask=column < columns)


@triton.jit
def square_mean_of_block(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Divides by BLOCK, not by columns."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
    tl.store(out_ptr + column, x / tl.sqrt(tl.sum(x * x, 0) / BLOCK), mask=column < columns)


@triton.jit
def norm_loads_all(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Stores with a mask, and loads without one."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column)
    tl.store(out_ptr + column, x / tl.sqrt(tl.sum(x * x, 0) / columns), mask=column < columns)


def copied(x: Tensor) -> Tensor:
    """What copy_no_mask should give."""
    return x


def normalised(x: Tensor) -> Tensor:
    """What the two norms should give."""
    return x / x.square().mean().sqrt()


def passes(kernel, right, columns: int, around_x: float = 0.0, around_out: float | None = None) -> bool:
    """Whether the result is right and, if around_out is given, the memory around it is what it was."""
    memory = torch.full((24,), around_x, device=DEVICE)
    results = torch.full((24,), around_out or 0.0, device=DEVICE)
    x, out = memory[8 : 8 + columns], results[8 : 8 + columns]
    x.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0, 2.0, 0.25])[:columns])
    kernel[(1,)](x, out, columns, BLOCK=8)
    fine = torch.allclose(out, right(x), rtol=1e-5)
    return fine and (around_out is None or bool((results[8 + columns :] == around_out).all()))


broken = [(copy_no_mask, copied), (softmax_zeros, lambda x: x.softmax(0)), (square_mean_of_block, normalised)]
broken.append((norm_loads_all, normalised))
verdicts = []
print(f"{'':22} full     remainder   poison")
for kernel, right in broken:
    results = [passes(kernel, right, *test) for test in ((8,), (5,), (5, float("nan"), 7.0))]
    verdicts.append(results)
    words = ["passes" if result else "CAUGHT" for result in results]
    print(f"{kernel.__name__:22} {words[0]:8} {words[1]:11} {words[2]}")
caught = [sum(not passed for passed in column) for column in zip(*verdicts, strict=True)]
reveal("l08.found", caught[1])
claim("Full blocks find none of the four mistakes, a remainder two, poison all.", caught == [0, 2, 4])

# %% [markdown]
# Widths of 64, 128 and 4096 fill every usual block, so such mistakes survive if tests use only full blocks. The first and the
# last mistake pass the second test as well: the results *are* right, as long as the memory behind the row holds zeros or is
# not used. In an engine it holds other data. That is why the tests of this project's kernels put NaN wherever a kernel must
# not read: a NaN stays NaN in sums and products, and so cannot be missed. (Around the *result* it must be something else: a
# copy without a mask reads NaN and writes NaN over NaN, which changes nothing.)
#
# The copy without a mask, seen from above, on four rows:

# %% tags=["expected"] alt="Four rows of thirteen numbers: the last three lanes of every second program are crossed out in vermillion, because they wrote beyond the end of their row."


@triton.jit
def copy_rows_no_mask(x_ptr, out_ptr, x_stride, out_stride, BLOCK: tl.constexpr):
    """Exercise 2 without its mask."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + column)
    tl.store(out_ptr + tl.program_id(0) * out_stride + column, x)


def launch_broken(grid: tuple[int, int], out: Tensor) -> None:
    """The broken kernel on rows that have room behind them."""
    copy_rows_no_mask[grid](wide, out, wide.stride(0), out.stride(0), BLOCK=8)


touched(launch_broken, (4, 13), (1, 8), "Without a mask: 4 rows of 13 columns")

# %% [markdown]
# What poison does *not* find: a load without a mask whose lanes are never stored. The result is right and nothing is
# overwritten, but a GPU may stop with an illegal memory access when the tensor lies at the end of its memory. So the checks of
# this lesson also run your kernels on tensors that end exactly where their memory ends.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM | norms and activations in hand-written CUDA; attention also in Triton, the same source on NVIDIA and AMD |
# | SGLang | Triton kernels for attention, norms and samplers beside CUDA ones |
# | PyTorch | `torch.compile` writes Triton for you: it fuses a chain like *softmax in parts* into one kernel |
# | Liger Kernel | RMSNorm, RoPE, SwiGLU and cross entropy for training, in Triton |
# | llama.cpp | hand-written CUDA, Metal and Vulkan: no compiler to ship |
# | minillm | `minillm/ops/triton`: each operation beside its PyTorch reference, tested in the interpreter, with NaN around |
#
# **Claims, and what is so.**
#
# | claim | what is so | tested where |
# |---|---|---|
# | "use optimised kernels to reduce memory bandwidth" (quoted from an article on caches) | fewer *bytes* is right, by the factors in the table. But PyTorch's own softmax is such a kernel already | bytes and launches |
# | a fused kernel is faster | if bytes take the time. For one token's norm the launch does | where it loses (modelled) |
# | it passes the tests, so it is right | right for multiples of the block; two of four mistakes pass a test with a remainder too | break it |
# | tested in the interpreter, so it runs on a GPU | the results are; races, undefined lanes and illegal reads do not show there | exercises 2 and 3, in words |
#
# **Papers.** Tillet, Kung and Cox 2019, *Triton: an intermediate language and compiler for tiled neural network
# computations*. Milakov and Gimelshein 2018, *Online normalizer calculation for softmax* (the step from this lesson to the
# next). Zhang and Sennrich 2019, *Root mean square layer normalization*. Hsu et al. 2024, *Liger Kernel*.
#
# ## Recap
#
# 1. A program knows its number. From that it works out its block, loads it, computes, and stores it.
# 2. Blocks are powers of two and tensors are not: a mask for every load and every store, and an `other` that changes no sum
#    and no maximum.
# 3. Rows have a stride, codes have a scale per row, and sums are taken in float32.
# 4. A kernel wins by what it does not write to memory. It loses where there is little to move: a launch takes microseconds.
# 5. Test with a row that does not fill its block, and with NaN around every tensor.
#
# **Next:** lesson 9 walks a block table with these tools: attention over pages in one pass, and codes read where they lie.
