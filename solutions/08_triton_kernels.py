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
# **Question.** *A tensor has thirteen elements, and each program handles eight. Which program touches which element, and
# what does the second program do with the three positions past the end?*
#
# Lessons 4 and 5 met the same limit. A quantised cache is smaller, but PyTorch dequantises it with several operations, and
# each of them reads all of its input from memory and writes all of its output back. To read once and write once, you must
# write everything between the load and the store yourself. That is a *[kernel](glossary.md#kernel)*.
#
# Triton is a language for kernels that looks like Python. You write one **[program](glossary.md#program)**; the GPU
# runs thousands of copies of it at once. Each copy knows only its **program id**, a number. From this id it computes which
# **block** of the tensor it handles: a range of its elements (not a block of the cache). Then it loads the block,
# computes, and stores the result. Most mistakes in kernels are mistakes in computing the block.
#
# You build four kernels of the kind that engines use: a copy of rows, softmax, [RMSNorm](glossary.md#rmsnorm), and
# [dequantising](glossary.md#quantisation) INT8 codes. The last two then run inside the real engine.
#
# You need lesson 4 (codes and scales). Triton exists for Linux, which includes WSL and Colab.
#
# **With or without a GPU.** The cells are the same. With a GPU, Triton compiles your kernels for it. Without one, Triton's
# *interpreter* runs the programs in Python, one after the other, with NumPy arrays for blocks. Its results are the same up
# to the last bits; its times say nothing about a GPU. `TRITON_INTERPRET=1` switches it on. Set it **before Triton is
# imported**: some of Triton's own functions are kernels too (`tl.sum` is one), and they are created on import.

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
from minillm.viz.tensors.kernel_tiles import find_writers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = os.environ.get("MINILLM_MODEL", "minicoder")  # or another checkpoint: docs/other_models.md says which were tried
torch.set_grad_enabled(False)
torch.set_num_threads(1)  # steady on a busy machine, and enough for a small model
np.seterr(all="ignore")  # the interpreter computes with NumPy, which warns of infinities; a GPU does not
print("kernels are", "compiled for the GPU" if DEVICE == "cuda" else "interpreted, one program after the other")

# %% [markdown]
# ## Predict
#
# Write a number for each before you measure.
#
# 1. A block has one **lane** per element, and its size must be a power of two. (A lane is a position in a block here.
#    GPU manuals call the 32 threads of a warp lanes, and Triton gives a thread one or more positions.) One program
#    handles a row of 384 elements as one block. What percentage of its lanes is idle?
# 2. Softmax can be five PyTorch operations (maximum, difference, exponential, sum, quotient) or one kernel. How many times
#    as many bytes do the five operations move?
# 3. A **mask** says which lanes are on. The others are *masked*: they load nothing and store nothing. Four kernels for
#    one block have one mistake each: a copy without a mask, a softmax whose masked lanes hold 0, an RMSNorm that divides
#    by the block size, and an RMSNorm that loads without a mask. All are right when the row fills the block. A test
#    compares their results on a row that does *not* fill it; the memory around the row holds zeros. In how many of the
#    four does it find the mistake?

# %%
predict("l08.idle", None, unit="%")
predict("l08.moved", None, unit="times")
predict("l08.found", None, unit="of 4")

# %% [markdown]
# ## Build
#
# ### A whole kernel to begin with
#
# Each program writes its program id into its elements of `out`. Read it line by line; the other kernels differ only in
# what they load and compute.
#
# * `@triton.jit` turns the function into a kernel. A tensor arrives as a *pointer*: the address of its first element.
# * `tl.program_id(0)` is the id of this program.
# * `tl.arange(0, BLOCK)` is the block 0, 1, … BLOCK - 1, one number per lane. Its length must be a power of two, known
#   when the kernel is compiled: hence `tl.constexpr`.
# * `out_ptr + place` is a block of addresses.
# * `tl.store(out_ptr + place, x, mask=…)` stores a block there. `x = tl.load(x_ptr + place, mask=…)` loads one.
# * `mask` says which lanes are on. The others are masked.
# * Between load and store you compute with whole blocks: `x + y`, `x * y`, `tl.exp(x)`, `tl.sqrt(x)`, as with tensors.
#
# A kernel is launched with a **grid**, the number of programs, in square brackets.


# %%
@triton.jit
def stamp_kernel(out_ptr, size, BLOCK: tl.constexpr):
    """Write to every element of out the id of the program that writes it."""
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, program, mask=place < size)


out = torch.zeros(13, dtype=torch.int32, device=DEVICE)
stamp_kernel[(2,)](out, 13, BLOCK=8)
print(out.tolist())

# %% [markdown]
# Here is the same as a picture. `find_writers` launches the kernel with growing grids, each with exactly one program
# that has not run before. What is new after a launch was written by that program. So it works for any kernel whose
# programs write different elements, including yours.

# %% tags=["expected"] alt="Thirteen elements in a row and two programs of eight lanes: program 0 writes elements 0 to 7, program 1 writes 8 to 12; its last three lanes are masked and therefore hatched."
find_writers(lambda grid, out: stamp_kernel[(grid[1],)](out, 13, BLOCK=8), (1, 13), (1, 8), "stamp_kernel, 13 elements")

# %% [markdown]
# The last three lanes exist. They take time like the others, and without a mask they would write past the end of the
# tensor, into memory that holds something else.
#
# ### Exercise 1: count programs and masked lanes
#
# Cut the rows of a tensor into blocks. Each program handles `block` columns of *one* row: a block never continues in the
# next row.


# %%
def lanes(rows: int, columns: int, block: int) -> tuple[int, int]:
    """Return (programs, masked lanes) for a tensor of rows × columns.

    Example: 1 row of 13 columns in blocks of 8: 2 programs with 16 lanes, 3 of them masked: (2, 3).
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
# Softmax and RMSNorm sum over a row, so one program must see the whole row. Its block size is the number of columns,
# rounded up to a power of two. The share of idle lanes depends on the number of columns alone:

# %% tags=["expected"] alt="Share of idle lanes against columns per row, one block per row: zero at powers of two, most right after each of them (nearly half from 128 on), 25 percent at 384."
my_lanes = use("l08.lanes")


def idle(columns: int) -> float:
    """Percentage of the lanes of a row that are idle."""
    block = triton.next_power_of_2(columns)
    return 100 * my_lanes(1, columns, block)[1] / block


widths = range(16, 1025, 8)
reveal("l08.idle", round(idle(384)))
claim(
    "No lane is idle at a power of two; a quarter of the lanes are idle at 384.",
    idle(256) == idle(512) == 0 and idle(384) == 25,
)
LineChart(
    "One block per row: idle lanes",
    Axis("columns of a row", ticks=(64, 128, 256, 384, 512, 768, 1024)),
    Axis("idle lanes, per cent"),
    [Series("next power of two", widths, [idle(width) for width in widths], style="modelled")],
    "Idle lanes: none at powers of two, most just above them (nearly half from 128 on), 25 % at 384 and at 768.",
)

# %% [markdown]
# An idle lane computes, but it moves no bytes. Where memory is the limit, as it is for these kernels on large tensors,
# it costs little.
#
# ### Exercise 2: copy rows
#
# The rows of a tensor are often not **contiguous**: there are gaps between them. For example, one matrix product computes
# the queries, keys and values of a batch, and the keys are a *slice* of its result: rows of 5 columns may begin 12 elements
# apart. That distance is the **stride** of the rows, `x.stride(0)`. Here the grid has two dimensions: `program_id(0)` is the
# row, `program_id(1)` the block in that row.


# %%
@triton.jit
def copy_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    """Copy x to out. Program (r, b) copies block b of row r: the columns from b · BLOCK on, at most BLOCK of them.

    x_ptr, out_ptr:        first element of each tensor; rows begin x_stride and out_stride elements apart
    columns:               columns of a row; not always a multiple of BLOCK
    grid:                  (rows, blocks per row)
    Example: BLOCK 4, columns 6: program (2, 1) copies columns 4 and 5 of row 2, and two of its lanes are masked.
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
# The check puts NaN around each tensor, and into the result before your kernel runs. (INT8 has no NaN: around the codes
# of Exercise 5 lies 99.) So a `nan` in what you *got* was never written, was read from outside a tensor, or is the result
# of something like ∞/∞. *numbers of out never written* counts the first kind. *numbers written outside of out* counts the
# elements of other memory that you overwrote. The check also launches your kernel once more without the last program (of
# each row, if a row has several). What these programs write must then stay unwritten: *numbers of the last program
# written by others* counts those that do not.
#
# ### See: your programs on a tensor
#
# `x` is four rows of 13 columns, a slice of a wider tensor. The picture numbers the programs row by row.

# %% tags=["expected"] alt="Four rows of thirteen elements, eight programs of eight lanes: two programs per row, the last three lanes of every second one are hatched."
my_copy = use("l08.copy_kernel")
wide = torch.arange(4 * 20.0, device=DEVICE).view(4, 20)
keys = wide[:, 5:18]  # 13 columns; the stride of the rows is 20


def launch_copy(grid: tuple[int, int], out: Tensor) -> None:
    """Launch your kernel on the slice, with any grid."""
    my_copy[grid](keys, out, 13, keys.stride(0), out.stride(0), BLOCK=8)


find_writers(launch_copy, (4, 13), (1, 8), "copy_kernel, 4 rows of 13 columns")

# %% [markdown]
# No program waits for another, and none reads what another writes. That is the contract of a grid: its programs may run in
# any order, or all at once. The interpreter always runs them in order. So a kernel that relies on the order may pass here
# and fail on a GPU. The check finds it if a program writes elements that belong to the last one.
#
# ### Exercise 3: softmax
#
# One program per row, the whole row in one block:
#
# $$y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \qquad m = \max_j x_j$$
#
# Now the lanes are combined by **reductions**: `tl.max(x, 0)` and `tl.sum(x, 0)` run over **all** lanes of a block, the
# masked ones too. You choose the value of the masked lanes: `tl.load(…, mask=…, other=…)`. (Without `other` it is undefined:
# the interpreter has zeros there, a GPU may have anything.)


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Softmax of each row: program r handles row r. x and out are contiguous: row r begins at r · columns.

    columns: at most BLOCK. Scores may be ±1000, or -inf for a key that attention must not see.
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
    """Softmax of each row of x [rows, columns], by your kernel."""
    out = torch.empty_like(x)
    my_softmax[(len(x),)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


torch.manual_seed(8)
scores = 5 * torch.randn(6, 100, device=DEVICE)
claim(
    "Your softmax differs from torch.softmax by less than 1e-6.",
    bool((softmax(scores) - scores.softmax(-1)).abs().max() < 1e-6),
)

# %% [markdown]
# ### Exercise 4: RMSNorm
#
# $$y_i = \frac{x_i}{\sqrt{\frac1n \sum_j x_j^2 + \varepsilon}} \cdot w_i$$
#
# It stands before every attention and every MLP. The row may be float16: 300 is a modest activation, and 300² overflows in
# float16. So cast to float32 (`.to(tl.float32)`) before you square. `tl.store` casts the result to the dtype of `out`.


# %%
@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    """RMSNorm of each row: program r handles row r. x and out are contiguous, float32 or float16; sums are float32.

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
# `minillm.ops.triton` holds the engine's own kernels. First, your RMSNorm and the engine's get the same inputs. Then your
# kernel replaces every norm of a token's row, and the engine completes a prompt. (With `enforce_eager=True` the engine runs
# plain PyTorch layers, which can be replaced.)

# %%
from minillm.models.layers import RMSNorm
from minillm.ops.triton.rms_norm import rms_norm as engines_rms_norm

PLAIN = {"dtype": "float32", "enforce_eager": True, "num_kv_blocks": 64}
my_rms_norm = use("l08.rms_norm_kernel")
grid_sizes = []  # programs of each launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row of x [rows, columns], by your kernel."""
    x, out, columns = x.contiguous(), torch.empty_like(x), x.shape[-1]
    grid_sizes.append(x.numel() // columns)
    my_rms_norm[(grid_sizes[-1],)](x, weight, out, columns, eps, BLOCK=triton.next_power_of_2(columns))
    return out


x, weight = torch.randn(3, 384, device=DEVICE), torch.rand(384, device=DEVICE)
difference = (rms_norm(x, weight, 1e-5) - engines_rms_norm(x, weight, 1e-5)).abs().max()
claim("Your RMSNorm differs from the engine's own kernel by less than 1e-6.", bool(difference < 1e-6))

# %%
prompt = "def is_even(n):\n    "
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def completion(engine: LLM) -> list[int]:
    """The tokens that the engine generates after the prompt."""
    return engine.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids


plain = LLM(NAME, **PLAIN)
expected = completion(plain)
with_kernel = LLM(NAME, **PLAIN)
modules = with_kernel.engine.runner.model.named_modules()  # Qwen3's norms of heads are never called as modules
norms = [x for name, x in modules if isinstance(x, RMSNorm) and not name.endswith(("q_norm", "k_norm"))]
for norm in norms:
    norm.forward = lambda x, norm=norm: rms_norm(x, norm.weight, norm.eps)
grid_sizes.clear()
tokens = completion(with_kernel)
print("the completion:", repr(plain.engine.tokenizer.decode(tokens)))
claim("With your kernel the engine generates the same tokens.", tokens == expected)
claim("More than half of the launches have one program.", grid_sizes.count(1) > len(grid_sizes) / 2)
print(f"{len(norms)} norms of rows, {len(grid_sizes)} launches, {sum(grid_sizes)} programs")

# %% [markdown]
# Most launches belong to decode steps, and each of those has **one** program: one token, one row. A large GPU has a hundred
# or more **multiprocessors**, the units that run programs, and would keep one of them busy. *Where it loses* comes back to this.
#
# ### Exercise 5: dequantise INT8 codes
#
# In the cache of lesson 4, each token and head has one row of codes (one signed byte each) and one scale. A row has only 64
# elements, which is little for a program. So give each program a **[tile](glossary.md#tile)** of several rows:
#
# * `row` is a block of row indices, `column` a block of column indices.
# * `row[:, None]` has the shape [ROWS, 1] and `column[None, :]` the shape [1, BLOCK]. They broadcast, so
#   `row[:, None] * columns + column[None, :]` is a *two-dimensional* block of offsets, [ROWS, BLOCK]: a tile.
# * The mask has two dimensions too: a lane is on if both its row and its column exist.
#
# And mind the dtype. In PyTorch the product of an INT8 code and a bfloat16 scale is bfloat16, which keeps only 8
# significant bits of it. Triton has other rules: here the product is float32, but with a float16 scale it is float16. And the
# interpreter of Triton 3.9.0 converts integers to bfloat16 wrongly. If you cast both to float32 first, none of this matters.


# %%
@triton.jit
def dequantise_kernel(codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantise: out = code · scale of its row, in float32. Program i handles ROWS rows, from row i · ROWS on.

    codes_ptr: [rows, columns] int8, contiguous
    scale_ptr: [rows] float32 or bfloat16; the product is computed in float32 with both
    out_ptr:   [rows, columns] float32, contiguous
    grid:      (⌈rows / ROWS⌉,); columns is at most BLOCK
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

# %% tags=["expected"] alt="Seven rows of twelve elements in tiles of four rows and sixteen columns: program 0 has rows 0 to 3, program 1 rows 4 to 6; four columns on the right and one row below are hatched."
my_dequantise = use("l08.dequantise_kernel")
seven = torch.ones(7, 12, dtype=torch.int8, device=DEVICE), torch.ones(7, device=DEVICE)


def launch_tiles(grid: tuple[int, int], out: Tensor) -> None:
    """Launch your kernel on seven contiguous rows of twelve codes."""
    my_dequantise[(grid[0],)](*seven, out, 7, 12, ROWS=4, BLOCK=16)


find_writers(launch_tiles, (7, 12), (4, 16), "dequantise_kernel, tiles of 4 × 16 lanes", gaps=False)

# %% [markdown]
# ### Use: an INT8 cache that your kernel dequantises
#
# As in lesson 4, a cache layout has two methods. `encode` stays the engine's. `decode` dequantises, with your kernel. The
# engine calls it once for the keys and once for the values, in every layer and every step.

# %%
from minillm.cache.paged_int8 import PagedInt8KVCache

tiles = []


class MyInt8(PagedInt8KVCache):
    """The engine's INT8 layout, dequantised by your kernel."""

    def decode(self, codes, scale):
        rows, columns = scale.numel(), codes.shape[-1]
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        tiles.append(triton.cdiv(rows, 16))
        block = triton.next_power_of_2(columns)
        my_dequantise[(tiles[-1],)](codes, scale, out, rows, columns, ROWS=16, BLOCK=block)
        return out.to(self.dtype)


tokens = completion(LLM(NAME, **PLAIN, kv_cache_config={"layout": MyInt8}))
own = completion(LLM(NAME, **PLAIN, kv_cache_dtype="int8"))
claim("The engine generates the same tokens as with its own INT8 cache.", tokens == own)
print(f"{len(tiles)} launches, {sum(tiles)} programs")

# %% [markdown]
# The kernel does one multiplication and one rounding per element, as PyTorch does. So the results are equal to the last
# bit, and the tokens must be equal.
#
# ## Measure
#
# ### Bytes and launches
#
# What does a kernel gain? Count the bytes that each PyTorch operation reads and writes, as in lesson 4. Your kernels read
# each row once and write each result once, as their source shows. (Every program of the RMSNorm also loads the one row of
# weights. It is counted once here, because it stays in the GPU's cache; the last line printed says what follows if it is
# counted for each program.) Such a kernel is **fused**: it does the work of several operations in one.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.ops.kv_quant import dequantize_symmetric
from minillm.ops.rms_norm import rms_norm as reference_rms_norm


class Moved(TorchDispatchMode):
    """Count operations and the bytes that they read and write. Views move nothing."""

    launches = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            self.total += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


def unfused_softmax(x: Tensor) -> Tensor:
    """Softmax as five PyTorch operations."""
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
    ("softmax", "unfused", lambda: unfused_softmax(x)),
    ("softmax", "torch.softmax", lambda: x.softmax(-1)),
    ("RMSNorm", "unfused", lambda: reference_rms_norm(x, weight, 1e-5)),
    ("INT8 to float32", "unfused", lambda: dequantize_symmetric(codes, scale)),
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
reveal("l08.moved", round(ratios["softmax", "unfused"], 1))
claim(
    "Unfused, each of the three moves more than twice the bytes of your kernel.",
    min(r for (_, way), r in ratios.items() if way == "unfused") > 2,
)
claim("torch.softmax moves as many bytes as your kernel.", ratios["softmax", "torch.softmax"] == 1)
claim(
    "Most of the bytes that the INT8 kernel moves are the float32 results it writes.",
    2 * x.nbytes > kernel_bytes["INT8 to float32"],
)
once = kernel_bytes["RMSNorm"]
weights_per_program = ratios["RMSNorm", "unfused"] * once / (once + (rows - 1) * weight.nbytes)
claim(
    "With the weights counted for each program, the ratio of the RMSNorm is 2.3.", round(weights_per_program, 1) == 2.3
)

# %% [markdown]
# Three things follow from this table.
#
# * **The gain comes from intermediate results that are neither written nor read back.** Between load and store
#   everything stays in **registers**, the numbers that a multiprocessor holds beside its arithmetic units. The five
#   operations write four intermediate tensors, and read them.
# * **`torch.softmax` is no worse.** It *is* one kernel. Where PyTorch has a fused operation, your own kernel saves no bytes.
#   It saves them where PyTorch has only separate operations.
# * **The INT8 kernel still writes float32**, four bytes for each byte it reads. The attention kernel of lesson 9 uses the
#   dequantised values while they are in registers, so only the codes and scales move.
#
# ### Where it loses
#
# A **kernel launch** takes the CPU a few microseconds, most of it in Python and in the driver. It is *asynchronous*: the
# CPU does not wait for the kernel, but goes on to the next launch. So while the GPU still has work, launches cost no
# time. They cost time where the GPU has finished its work and waits for the next launch.
#
# The table below is calculated, not measured. It assumes 5 µs per launch and two memory bandwidths from NVIDIA's data
# sheets (quoted: T4 320 GB/s, H100 SXM 3,350 GB/s). The work is the bytes at full bandwidth, a lower bound: a launch with
# one program keeps one multiprocessor busy and does not reach that bandwidth, so for one token the true ratio is smaller.

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
    "On both GPUs the work of one token's norm takes less time than its launch, and that of 4096 tokens more.",
    min(shares_of["Llama 3 8B, one token"]) > 1 > max(shares_of["Llama 3 8B, 4096 tokens"]),
)
for gpu, speed in BANDWIDTH.items():
    print(f"{gpu}: the work takes as long as the launch at {LAUNCH * speed / 1e6:.1f} MB")

# %% [markdown]
# For one token a norm moves next to nothing, so a better kernel gains next to nothing. Whether its launch costs time is
# decided by the rest of the step. In a large model, such as that of the second line, the GPU is busy reading the weight
# matrices while the CPU launches the next kernels. In a small one every kernel is short, the GPU runs out of work, and
# the step takes as long as its launches. What always remains is the time that even the shortest kernel takes on the GPU.
#
# Fusing the norm with the addition before it saves a launch and a short kernel. **CUDA graphs**, which record all
# launches of a step once and replay them, save the launches only. With thousands of tokens the work takes longer than the
# launch, and then bytes decide.
#
# A kernel also loses in three other cases:
#
# * A row is too long for the registers of one program. The program must then loop over blocks.
# * Rows are so short that a program has little to do. Hence tiles.
# * The machine has no GPU. The interpreter is for finding mistakes; the engine uses PyTorch or compiled CPU code there.
#
# ### On your GPU
#
# If there is one, this cell measures the bytes per second of a plain copy, and what share of it each kernel reaches.

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
        "unfused softmax": (2 * x.nbytes, lambda: unfused_softmax(x)),
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
    print("No GPU here, so nothing is timed. The interpreter's time says nothing about a kernel.")

# %% [markdown]
# ## Break it
#
# Here are four kernels with one mistake each. All four are right when the row fills the block. Three tests compare
# their results with the right ones:
#
# * `full`: 8 columns in a block of 8.
# * `remainder`: 5 columns in a block of 8. The memory around the tensors happens to hold zeros.
# * `poison`: 5 columns in a block of 8. The memory around the input holds NaN. The memory before and after the result
#   holds 7, and must hold 7 afterwards.
#
# **Guess first:** which test finds which mistake?


# %%
@triton.jit
def copy_no_mask(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Copy without a mask: all lanes load and store."""
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + column, tl.load(x_ptr + column))


@triton.jit
def softmax_zeros(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Softmax whose masked lanes hold 0 instead of -inf, so that they count in the sum."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + column, e / tl.sum(e, 0), mask=column < columns)


@triton.jit
def square_mean_of_block(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """RMSNorm that divides the sum of squares by BLOCK, not by columns."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
    tl.store(out_ptr + column, x / tl.sqrt(tl.sum(x * x, 0) / BLOCK), mask=column < columns)


@triton.jit
def norm_loads_all(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """RMSNorm that stores with a mask, and loads without one."""
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column)
    tl.store(out_ptr + column, x / tl.sqrt(tl.sum(x * x, 0) / columns), mask=column < columns)


def copied(x: Tensor) -> Tensor:
    """The right result of copy_no_mask."""
    return x


def normalised(x: Tensor) -> Tensor:
    """The right result of square_mean_of_block and norm_loads_all."""
    return x / x.square().mean().sqrt()


def passes(kernel, right, columns: int, around_x: float = 0.0, around_out: float | None = None) -> bool:
    """Whether the result is right and, if around_out is given, the memory before and after it is unchanged."""
    memory = torch.full((24,), around_x, device=DEVICE)
    results = torch.full((24,), around_out or 0.0, device=DEVICE)
    x, out = memory[8 : 8 + columns], results[8 : 8 + columns]
    x.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0, 2.0, 0.25])[:columns])
    kernel[(1,)](x, out, columns, BLOCK=8)
    fine = torch.allclose(out, right(x), rtol=1e-5)
    around = torch.cat([results[:8], results[8 + columns :]])
    return fine and (around_out is None or bool((around == around_out).all()))


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
claim(
    "Full blocks find none of the four mistakes, a remainder finds two, and poison finds all four.", caught == [0, 2, 4]
)

# %% [markdown]
# Widths of 64, 128 and 4096 are powers of two, so a block of that size is always full, and such mistakes survive if tests
# use no other widths. The first and the last mistake pass the second test as well: the results *are* right, as long as the
# memory after the row holds zeros or is not used. In an engine it holds other data. That is why the tests of this project's
# kernels put NaN wherever a kernel must not read: a NaN that enters a sum or a product stays NaN in the result. (Around the
# *result* the value must not be NaN: a copy without a mask reads NaN and writes NaN over NaN, which changes nothing. The
# checks of the exercises do put NaN there, but one with other bits, and compare bits.)
#
# This is the copy without a mask on four rows:

# %% tags=["expected"] alt="Four rows of thirteen elements: the last three lanes of every second program are crossed out in vermillion, because they wrote beyond the end of their row."


@triton.jit
def copy_rows_no_mask(x_ptr, out_ptr, x_stride, out_stride, BLOCK: tl.constexpr):
    """Exercise 2 without its mask."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + column)
    tl.store(out_ptr + tl.program_id(0) * out_stride + column, x)


def launch_broken(grid: tuple[int, int], out: Tensor) -> None:
    """Launch the broken kernel on rows that have room after them."""
    copy_rows_no_mask[grid](wide, out, wide.stride(0), out.stride(0), BLOCK=8)


find_writers(launch_broken, (4, 13), (1, 8), "Without a mask: 4 rows of 13 columns")

# %% [markdown]
# Poison does *not* find a load without a mask if the extra lanes are not stored and enter no sum: a copy that masks only
# its store, for example. (`tl.max` may ignore a NaN, so a maximum is not enough.) The result is right and nothing is
# overwritten, but a GPU may stop with an illegal memory access when the tensor lies at the end of its memory. Without a
# GPU, the checks of this lesson therefore also run your kernels on tensors that end exactly where their memory ends.
#
# ## In the field
#
# | system | what it does |
# |---|---|
# | vLLM | norms and activations by default fused by `torch.compile` into Triton kernels, without it in hand-written CUDA; attention also in Triton, the same source on NVIDIA and AMD |
# | SGLang | Triton kernels for attention, norms and samplers beside CUDA ones |
# | PyTorch | `torch.compile` writes Triton for you: it fuses a chain of operations, like the unfused softmax, into one kernel |
# | transformers | with `use_kernels=True`, kernels from the Hub replace RMSNorm and some other layers; on an NVIDIA GPU RMSNorm is Liger's |
# | Liger Kernel | RMSNorm, RoPE, SwiGLU and cross entropy for training, in Triton |
# | llama.cpp | hand-written CUDA, Metal and Vulkan: no compiler to ship |
# | minillm | `minillm/ops/triton`: each kernel beside its PyTorch reference, tested in the interpreter, with NaN around its tensors |
#
# **Claims, checked.**
#
# | claim | what holds | tested where |
# |---|---|---|
# | an article on caches: optimised CUDA kernels reduce the use of memory bandwidth | fewer *bytes* is right, by the factors in the table. But PyTorch's own softmax is such a kernel already | bytes and launches |
# | a fused kernel is faster | where the bytes take most of the time. Those of one token's norm take less time than its launch, which counts where the GPU runs out of work | where it loses (modelled) |
# | it passes the tests, so it is right | right where the row fills its block; two of four mistakes pass a test with a remainder too | break it |
# | tested in the interpreter, so it runs on a GPU | its results are tested. Races, undefined values in masked lanes and illegal reads do not show there by themselves; this lesson's checks look for the last two separately, and for one kind of race: a program that writes elements of another | exercises 2 and 3 and *Break it* explain it |
#
# **Papers.** Tillet, Kung and Cox 2019, *Triton: an intermediate language and compiler for tiled neural network
# computations*. Milakov and Gimelshein 2018, *Online normalizer calculation for softmax* (the step from this lesson to the
# next). Zhang and Sennrich 2019, *Root mean square layer normalization*. Hsu et al. 2024, *Liger Kernel*.
#
# ## Recap
#
# 1. A program knows its program id. From the id it computes its block, loads the block, computes, and stores the result.
# 2. Block sizes are powers of two and tensor sizes often are not: mask every load and every store, and choose an `other` that
#    changes neither the sum nor the maximum.
# 3. Rows have a stride, codes have a scale per row, and sums are computed in float32.
# 4. A kernel wins by the intermediate results that it neither writes to memory nor reads back. It gains nothing where there
#    is little to move: even the shortest kernel takes time, and a launch takes microseconds, if the GPU waits for it.
# 5. Test with a row that does not fill its block, with NaN around every input, and around the result with a value that you
#    compare afterwards.
#
# **Next:** lesson 9 walks a block table with these tools: attention over blocks in one pass, and INT8 codes dequantised in
# registers.
