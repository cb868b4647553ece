"""The processor, memory and GPU of this machine. Facts only: `minillm.doctor` says what they mean for the engine."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIMD = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Instruction sets that change how fast a kernel is, named as the operating system names them."""


@dataclass(frozen=True)
class Cpu:
    """The processor, as the operating system reports it to this process."""

    name: str
    physical_cores: int
    usable_cores: int
    """See `usable_processors`."""
    simd: tuple[str, ...]
    """See `simd`."""


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes, as far as this process may use it."""

    total: int
    free: int
    """Bytes that can be allocated without swapping or an out-of-memory kill."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (7, 5) is Turing (T4), (8, 0) Ampere, (9, 0) Hopper."""
    total: int
    free: int
    """0 as well if the driver does not tell, because another process has the GPU to itself or has filled it."""

    @property
    def architecture(self) -> str:
        """The name that compilers use, such as `sm_75`."""
        return "sm_{}{}".format(*self.capability)


def cpu() -> Cpu:
    """The processor of this machine."""
    import psutil

    usable = usable_processors()
    name = _cpuinfo().get("model name") or platform.processor() or platform.machine()
    return Cpu(name, psutil.cpu_count(logical=False) or usable, usable, simd())


def simd() -> tuple[str, ...]:
    """The members of `SIMD` that the processor has; empty if the operating system does not report them."""
    facts = _cpuinfo()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return tuple(s for s in SIMD if s in flags)


def usable_processors() -> int:
    """The number of logical cores that this process may use. `taskset` and a container's CPU quota lower it; half a
    core counts as one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def memory() -> Memory:
    """Main memory, or the container's memory limit if that is smaller."""
    import psutil

    host = psutil.virtual_memory()
    limit = memory_limit()
    if limit is None or limit[0] >= host.total:  # without a limit, version 1 names a number larger than any memory
        return Memory(host.total, host.available)
    return Memory(limit[0], max(0, min(host.available, limit[1])))


def gpu() -> Gpu | None:
    """The current CUDA device, or None if PyTorch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        free, total = 0, torch.cuda.get_device_properties("cuda").total_memory
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), total, free)


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total memory of a GPU in bytes.

    PyTorch keeps the memory of freed tensors, which the driver counts as used: it is given back first.
    """
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def half_dtype(device: torch.device | None = None) -> torch.dtype:
    """The 16-bit dtype that a GPU multiplies fast: bfloat16 from sm_80 on, else float16. None: the current GPU."""
    import torch

    card = torch.cuda.get_device_properties(device or "cuda")  # a constant to `torch.compile`
    return torch.bfloat16 if card.major >= 8 else torch.float16


def unusable_reason(name: str) -> str | None:
    """Why PyTorch cannot compute on this device, in one line; None if it can.

    PyTorch counts GPUs that its build has no code for, that another process has to itself, or that are full.
    """
    import torch

    try:
        torch.ones(1, device=torch.device(name)).item()
    except Exception as problem:  # each kind of device raises its own errors
        [reason, *_] = [*str(problem).splitlines(), type(problem).__name__]
        return reason if len(reason) < 200 else f"{reason[:200]}…"
    return None


def describe() -> dict[str, Any]:
    """Processor, memory and GPU as plain values, for the `hardware` field of a benchmark's JSON."""
    device = gpu()
    return {
        "platform": platform.platform(terse=True),
        "cpu": asdict(cpu()),
        "memory_bytes": memory().total,
        "gpu": None if device is None else asdict(device),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of `/proc/cpuinfo`; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """This process's CPU quota in processors, from control groups of version 1 or 2; None without a limit.

    The limits of parent groups count as well. `own` is the file that lists the process's groups, one
    `number:controllers:path` a line.
    """
    quotas = [quota for quota in map(_quota_of, _own_groups("cpu", root, own)) if quota is not None]
    return min(quotas, default=None)


def _own_groups(controller: str, root: Path, own: Path) -> set[Path]:
    """The control groups that may limit this process by `controller` (`cpu`, `memory`): its own and those above. Not
    all of these folders exist."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    groups = {root, root / controller, root / "cpu,cpuacct"}  # in a container its own group may be the root
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (root, root / "unified") if not controllers else (root / controller, root / controllers):
            group = mount / path.strip("/")
            groups.update(folder for folder in (group, *group.parents) if folder.is_relative_to(mount))
    return groups


def _quota_of(group: Path) -> float | None:
    """The quota of one control group in processors; None if it sets none."""
    try:
        text = (group / "cpu.max").read_text().split()  # version 2: "max 100000" or "50000 100000"
    except OSError:
        try:  # version 1: -1 is no limit
            text = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    try:
        quota, period = map(int, text)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int] | None:
    """The memory that control groups of version 1 or 2 leave this process, in bytes: the least limit, and the least of
    what is left of any limit. None without a limit. Cached files that were not read lately count as left, because the
    kernel drops them first. `root`, `own`: see `cpu_quota`."""
    found = [group for group in map(_memory_of, _own_groups("memory", root, own)) if group is not None]
    if not found:
        return None
    return min(limit for limit, _ in found), min(limit - used for limit, used in found)


def _memory_of(group: Path) -> tuple[int, int] | None:
    """Limit and use of one control group in bytes; None if it sets no limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bounds = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
        try:
            lines = (group / "memory.stat").read_text().splitlines()
            droppable = next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
        except (OSError, ValueError, IndexError):
            droppable = 0
        return bounds[0], max(0, bounds[1] - droppable)
    return None
