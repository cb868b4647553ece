"""The decoder step on a CPU, compiled by numba: all layers in one call, no operation between them.

PyTorch pays for every operation with a call, and a small model is hundreds of small operations. Here a step is one
function that every thread of a team runs (`step.py`). What it is made of is the textbook's, one file each: `panels.py`
(linear layers), `attention.py`, `rows.py` (keys and values as each cache layout keeps them), `norms.py`; all written
with vectors of sixteen numbers (`simd.py`) and held together by barriers (`team.py`).

Nothing here needs a C compiler. numba brings LLVM, which writes the instructions of the processor it runs on.
"""
