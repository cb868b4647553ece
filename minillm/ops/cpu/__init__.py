"""The decoder step on a CPU, compiled by numba: all layers in one call.

PyTorch pays for every operation with a call, and a small model is hundreds of small operations. Here a step is one
function that all threads run (`step.py`). Its parts are one file each: `panels.py` (linear layers, on
`register_tiles.py`), `attention.py`, `kv_rows.py` (keys and values as each cache layout stores them), `norms.py`. All
are written with vectors of sixteen numbers (`simd.py`); threads are synchronised by barriers (`team.py`).

Nothing here needs a C compiler: numba brings LLVM, which generates the instructions of the processor it runs on.
"""
