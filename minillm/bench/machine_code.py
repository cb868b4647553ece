"""The assembly of a product's inner loop for any processor, including processors that this machine does not have.

The assembly shows the cost of a loop: its multiply instructions, and the sums that spill to memory for lack of
registers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from llvmlite import binding, ir
from numba import types

from minillm.ops.cpu import register_tiles, simd
from minillm.ops.cpu.processor import Processor, inspect_processor

TARGETS = {
    "haswell": "x86_64-unknown-linux-gnu",
    "skylake-avx512": "x86_64-unknown-linux-gnu",
    "cascadelake": "x86_64-unknown-linux-gnu",
    "alderlake": "x86_64-unknown-linux-gnu",
    "apple-m1": "arm64-apple-macosx14.0.0",
    "neoverse-n1": "aarch64-unknown-linux-gnu",
    "neoverse-v1": "aarch64-unknown-linux-gnu",
    "cortex-a72": "aarch64-unknown-linux-gnu",
}
"""LLVM's name of a processor → its target triple."""
STACK = re.compile(r"[xyz]mm.*\(%rsp|\(%rsp.*[xyz]mm|\bq\d+,.*\[sp")
MULTIPLY = re.compile(r"\b(vf\w*add\w*ps|fmla|vpdpbusd|sdot|vpmaddwd|vpmulld|mla|mul)\b")


@dataclass(frozen=True)
class Loop:
    """The assembly lines of one iteration of an inner loop."""

    lines: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Number of instructions that read or write vectors on the stack (register spills)."""
        return sum(bool(STACK.search(line)) for line in self.lines)

    @property
    def multiplications(self) -> dict[str, int]:
        """Multiply instruction → number of occurrences."""
        names = [found.group(1) for line in self.lines if (found := MULTIPLY.search(line))]
        return {name: names.count(name) for name in sorted(set(names))}


def float_loop(name: str, rows: int, panels: int) -> Loop:
    """The inner loop of the float32 `register_tiles.tile` for the processor with LLVM name `name`."""
    return Loop(_longest_loop(_text(float_product(name, rows, panels))))


def byte_loop(name: str, rows: int, panels: int) -> Loop:
    """The inner loop of `register_tiles.tile_dots` for the processor with LLVM name `name`."""
    return Loop(_longest_loop(_text(byte_product(name, rows, panels))))


Compiled = tuple[Any, Any]
"""LLVM's target machine, and a module for it whose function `product` computes one tile. Arrays are passed as bare
pointers, all other arguments as 64-bit integers."""


def float_product(name: str, rows: int, panels: int, triple: str | None = None) -> Compiled:
    """The float32 `register_tiles.tile` for the processor with LLVM name `name`; `triple` overrides `TARGETS`."""
    f32, intp, size = types.float32[::1], types.intp, (types.literal(n) for n in (panels, rows))
    kinds = [f32, intp, intp, intp, f32, intp, intp, intp, f32, intp, intp, types.literal(False), *size]
    return _compiled(register_tiles.tile, kinds, name, triple or TARGETS[name])


def byte_product(name: str, rows: int, panels: int, triple: str | None = None) -> Compiled:
    """`register_tiles.tile_dots`, compiled as in `float_product`."""
    u8, f32, intp, size = types.uint8[::1], types.float32[::1], types.intp, (types.literal(n) for n in (panels, rows))
    kinds = [u8, intp, intp, u8, intp, intp, intp, f32, intp, intp, types.literal(False), *size]
    return _compiled(register_tiles.tile_dots, kinds, name, triple or TARGETS[name])


def _compiled(intrinsic: Any, kinds: list[Any], name: str, triple: str) -> Compiled:
    module = _module(intrinsic, kinds, triple, inspect_processor(triple, name))
    machine = binding.Target.from_triple(triple).create_target_machine(name, opt=3)
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(module, builder)
    return machine, module


def _text(compiled: Compiled) -> str:
    machine, module = compiled
    text: str = machine.emit_assembly(module)
    return text


def _module(intrinsic: Any, kinds: list[Any], triple: str, chip: Processor) -> Any:
    """A module with one function `product` that wraps the intrinsic. Arrays are bare pointers in it."""
    signature, code = intrinsic._defn(None, *kinds)
    module = ir.Module()
    module.triple = triple
    pointers = {types.float32: simd.F32.as_pointer(), types.uint8: simd.I8.as_pointer()}
    parameters = [pointers[kind.dtype] if isinstance(kind, types.Array) else simd.I64 for kind in signature.args]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    context = SimpleNamespace(
        make_array=lambda kind: lambda context, builder, value: SimpleNamespace(data=value),
        get_dummy_value=lambda: None,
    )
    with (
        mock.patch.object(register_tiles, "processor", lambda: chip),
        mock.patch.object(register_tiles, "REGISTERS", chip.registers),
    ):
        code(context, builder, signature, function.args)
    builder.ret_void()
    return binding.parse_assembly(str(module))


def _longest_loop(code: str) -> tuple[str, ...]:
    """The body of the longest loop: the lines from a label to the jump back to it."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in code.splitlines()]
    begins = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"(\.?L\w+)$", line)
        if target and begins.get(target.group(1), i) < i:
            body = lines[begins[target.group(1)] + 1 : i + 1]
            loops.append(tuple(part for part in body if part and not part.startswith((".", "#"))))
    return max(loops, key=len)
