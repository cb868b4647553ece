"""The products compiled for ARM, run in an emulator and compared with the same sums in C. Run by hand:

    apt-get install qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    python -m tests.ops.cpu.emulated_products

It takes seconds and prints a line for each processor and tile; a wrong sum ends it with an error.
`emulated_aarch64.sh` emulates the whole step, which takes hours.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from llvmlite import binding

from minillm.bench.machine_code import byte_product, float_product

LINUX = "aarch64-unknown-linux-gnu"
PROCESSORS = {"apple-m1": "max", "neoverse-n1": "neoverse-n1", "cortex-a72": "cortex-a72"}
"""Name of a processor in LLVM → in qemu."""
TILES = [(6, 1), (5, 1), (3, 1), (2, 2), (1, 4)]
COMMON = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
enum { K = 96, ROWS = %d, PANELS = %d };
static uint32_t seed = 1;
static uint32_t draw(void) { return seed = seed * 1664525u + 1013904223u, seed >> 8; }
"""
BYTES = """
void product(int8_t *, int64_t, int64_t, uint8_t *, int64_t, int64_t, int64_t, int32_t *, int64_t, int64_t, int64_t,
             int64_t);
static int8_t w[PANELS * K * 16]; static uint8_t x[ROWS * K]; static int32_t y[ROWS * PANELS * 16];
int main(void) {
    for (size_t i = 0; i < sizeof w; i++) w[i] = (int)(draw() %% 255) - 127;
    for (size_t i = 0; i < sizeof x; i++) x[i] = i %% 7 ? draw() : 128;
    product(w, 0, K * 16, x, 0, K, K / 4, y, 0, PANELS * 16, PANELS, ROWS);
    for (int r = 0; r < ROWS; r++) for (int p = 0; p < PANELS; p++) for (int lane = 0; lane < 16; lane++) {
        int32_t right = 0;
        for (int k = 0; k < K; k++)
            right += (int)w[p * K * 16 + (k / 4) * 64 + lane * 4 + k %% 4] * (NUMBER)x[r * K + k];
        if (y[r * PANELS * 16 + p * 16 + lane] != right) { printf("wrong sum\\n"); return 1; }
    }
    return 0;
}
"""
FLOATS = """
#include <math.h>
void product(float *, int64_t, int64_t, int64_t, float *, int64_t, int64_t, int64_t, float *, int64_t, int64_t, int64_t,
             int64_t, int64_t);
static float w[PANELS * K * 16], x[ROWS * K], y[ROWS * PANELS * 16];
int main(void) {
    for (int i = 0; i < PANELS * K * 16; i++) w[i] = (draw() %% 2001 - 1000.0f) / 777;
    for (int i = 0; i < ROWS * K; i++) x[i] = (draw() %% 2001 - 1000.0f) / 333;
    product(w, 0, K * 16, 16, x, 0, K, K, y, 0, PANELS * 16, 0, PANELS, ROWS);
    for (int r = 0; r < ROWS; r++) for (int p = 0; p < PANELS; p++) for (int lane = 0; lane < 16; lane++) {
        float right = 0;
        for (int k = 0; k < K; k++) right = fmaf(w[p * K * 16 + k * 16 + lane], x[r * K + k], right);
        if (y[r * PANELS * 16 + p * 16 + lane] != right) { printf("wrong sum\\n"); return 1; }
    }
    return 0;
}
"""


def check(name: str, rows: int, panels: int, folder: Path) -> None:
    """Compile, link and run both products. Raises `CalledProcessError` for a wrong sum."""
    signed = "int8_t" if name != "cortex-a72" else "uint8_t"  # `sdot` reads x as signed
    for kind, compiled, source in (
        ("bytes", byte_product(name, rows, panels, LINUX), BYTES.replace("NUMBER", signed)),
        ("floats", float_product(name, rows, panels, LINUX), FLOATS),
    ):
        machine, module = compiled
        (folder / "product.s").write_text(machine.emit_assembly(module))
        (folder / "main.c").write_text(COMMON % (rows, panels) + source.replace("%%", "%"))
        command = ["aarch64-linux-gnu-gcc", "-O1", "-static", "-march=armv8.2-a+dotprod", "main.c", "product.s", "-lm"]
        subprocess.run([*command, "-o", "run"], cwd=folder, check=True)
        subprocess.run(["qemu-aarch64-static", "-cpu", PROCESSORS[name], "./run"], cwd=folder, check=True)
        print(f"{name}: {rows} rows, {panels} panels of {kind}: every sum is right")


if __name__ == "__main__":
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    with tempfile.TemporaryDirectory() as made:
        for processor_name in PROCESSORS:
            for size in TILES:
                check(processor_name, *size, Path(made))
