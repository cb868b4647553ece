"""What the processor that numba compiles for can do, as the compiler itself shows.

Tables of processors become outdated, and LLVM's map of features is empty on some processors (Apple's). So three small
functions are compiled for the processor, in some 20 ms, and `inspect_processor` searches the assembly for certain
instructions. That is also right where `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` select another processor than this one.
"""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import dataclass
from functools import cache

from llvmlite import binding

FIRST_VERSION_WITH_PTR = 17
"""Version of LLVM since which every pointer has the type `ptr`."""
PROBE = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare i32 @llvm.vector.reduce.add.v64i32(<64 x i32>)
define void @multiply_and_add(<16 x float>* %p) {
  %x = load <16 x float>, <16 x float>* %p
  %y = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %x, <16 x float> %x)
  store <16 x float> %y, <16 x float>* %p
  ret void
}
define float @convert(half* %p) {
  %x = load half, half* %p
  %y = fpext half %x to float
  ret float %y
}
define i32 @multiply_bytes(<64 x i8>* %p, <64 x i8>* %q) {
  %x = load <64 x i8>, <64 x i8>* %p
  %y = load <64 x i8>, <64 x i8>* %q
  %a = EXTEND <64 x i8> %x to <64 x i32>
  %b = sext <64 x i8> %y to <64 x i32>
  %c = mul <64 x i32> %a, %b
  %d = call i32 @llvm.vector.reduce.add.v64i32(<64 x i32> %c)
  ret i32 %d
}
"""
INSTRUCTIONS = (("vpdpbusd", r"vpdpbusd"), ("sdot", r"sdot"), ("vpmaddwd", r"vpmaddwd .*[yz]mm"))
"""(name, pattern in assembly) of the instructions that add up products of bytes, best first: four products per lane
of unsigned by signed bytes, four of signed by signed ones, two of 16-bit numbers (at least 256 bits wide)."""

BFLOAT_FEATURE = "+avx512bf16"
"""LLVM's name of the feature that adds up products of bfloat16."""
AMX_FEATURES = {"+amx-tile", "+amx-bf16", "+avx512bw"}
"""LLVM's names of the features that `amx.py` needs."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the number of the system call `arch_prctl`, its request for permission to use some registers, and
the number of AMX's registers."""


@dataclass(frozen=True)
class Processor:
    """The properties that the functions of this folder depend on."""

    architecture: str
    """"x86", "arm" or "other"."""
    has_fma: bool
    """Whether it multiplies and adds in one instruction."""
    converts_float16: bool
    """Whether it converts float16 to float32 in one instruction. If not, LLVM calls a function that may be missing."""
    registers: int
    """Number of vectors of sixteen floats that its registers hold."""
    byte_products: str | None
    """The name of one of `INSTRUCTIONS`; None: it has none of them."""
    byte_lanes: int
    """Number of 32-bit sums that one such instruction computes."""
    bfloat_products: bool = False
    """Whether one instruction adds up two products of bfloat16s per lane. Like `amx`, from LLVM's features."""
    amx: bool = False
    """Whether it multiplies tiles of bfloat16. This comes from LLVM's features, not from `PROBE`: LLVM ends the process
    when it cannot compile something."""

    @property
    def is_x86(self) -> bool:
        """Whether it is an x86 processor (Intel, AMD)."""
        return self.architecture == "x86"

    @property
    def unsupported_reason(self) -> str | None:
        """Why the step cannot be compiled for this processor; None if it can."""
        if self.is_x86 and not (self.has_fma and self.converts_float16):
            lacking = [name for name, there in (("FMA", self.has_fma), ("F16C", self.converts_float16)) if not there]
            return (
                "the compiled step needs FMA and F16C (Intel since Haswell, AMD since Piledriver), "
                f"and this processor has no {' and no '.join(lacking)}"
            )
        return None

    @property
    def multiplies_bytes(self) -> bool:
        """Whether one instruction adds up four products of bytes per lane."""
        return self.byte_products in ("vpdpbusd", "sdot")


@cache
def processor() -> Processor:
    """The processor that numba compiles for."""
    from numba.core.registry import cpu_target

    return inspect_processor(*cpu_target.target_context.codegen().magic_tuple())


@cache
def has_amx() -> bool:
    """Whether the processor has AMX and this process may use it. On Linux a process must request that, once for all
    threads."""
    if not processor().amx or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def doctor_report() -> dict[str, str | None]:
    """What `minillm doctor` reports: why the processor is unsupported, and its instruction for products of bytes."""
    found = processor()
    return {
        "unsupported_reason": found.unsupported_reason,
        "byte_products": found.byte_products if found.multiplies_bytes else None,
    }


def inspect_processor(triple: str, name: str, features: str = "") -> Processor:
    """Compile `PROBE` for the processor that LLVM knows by this name, such as "apple-m1", and inspect the assembly."""
    start = triple.split("-")[0]
    is_x86 = start in ("x86_64", "i386", "i686")
    source = PROBE.replace("EXTEND", "zext")
    if not is_x86:  # one vector of 128 bits, both operands signed
        source = PROBE.replace("EXTEND", "sext").replace("64 x", "16 x").replace("v64i32", "v16i32")
    if binding.llvm_version_info[0] >= FIRST_VERSION_WITH_PTR:
        source = re.sub(r"(<\d+ x \w+>|half)\*", "ptr", source)
    module = binding.parse_assembly(source)
    module.triple = triple
    machine = binding.Target.from_triple(triple).create_target_machine(name, features, opt=2)
    code = machine.emit_assembly(module).replace("\t", " ")
    found = [(known, line) for known, pattern in INSTRUCTIONS for line in re.findall(f".*{pattern}.*", code)]
    widest = 16 if "zmm" in code else 8 if "ymm" in code else 4
    instruction, line = found[0] if found else (None, "")
    return Processor(
        "x86" if is_x86 else "arm" if start in ("aarch64", "arm64") else "other",
        bool(re.search(r"vfn?madd|fmla|fmadd", code)),
        not re.search(r"extendhfsf2|gnu_h2f", code),
        32 if widest == 16 else (16 if is_x86 else 32) * widest // 16,
        instruction,
        0 if instruction is None else 16 if "zmm" in line else 8 if "ymm" in line else 4,
        BFLOAT_FEATURE in features.split(","),
        set(features.split(",")) >= AMX_FEATURES,
    )
