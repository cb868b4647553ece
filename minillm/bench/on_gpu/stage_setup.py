"""Where a stage of the GPU benchmark runs: on the GPU at full size, or in a rehearsal on a CPU at a tiny size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TypeVar

import torch

from minillm.bench.device_clock import Clock, TimedFunction, Timing, clock_for, time_calls_in_turn
from minillm.doctor.machine_limits import copy_bandwidth, matmul_rate
from minillm.hardware import gpu_memory, half_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class StageSetup:
    """The device of a stage, its clock, the sizes to run, and the time to do so."""

    is_rehearsal: bool
    clock: Clock
    deadline: float = math.inf
    """When the stage is killed, in seconds on the clock `time.monotonic`, which all processes of a machine share."""

    @classmethod
    def here(cls, is_rehearsal: bool, deadline: float = math.inf) -> StageSetup:
        """Return the current GPU; for a rehearsal the CPU, where kernels run in Triton's interpreter."""
        return cls(is_rehearsal, clock_for("cpu" if is_rehearsal else "cuda"), deadline)

    def seconds_left(self) -> float:
        """Return the seconds until the stage is killed."""
        return self.deadline - time.monotonic()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device(self.clock.device)

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type of large models: bfloat16, float16 before Ampere. The interpreter multiplies neither well."""
        return torch.float32 if self.is_rehearsal else half_dtype()

    def size_for(self, real: T, tiny: T) -> T:
        """Return the size for the GPU, or that of the rehearsal."""
        return tiny if self.is_rehearsal else real

    def bandwidth(self) -> float:
        """Return the bytes per second, read and written, of a large copy."""
        return copy_bandwidth(self.clock.device, num_bytes=self.size_for(None, 2**16)).median

    def product_rate(self) -> float:
        """Return the operations per second of a large matrix product in `half`."""
        return 1.0 if self.is_rehearsal else matmul_rate("cuda", self.half).median

    def time(self, *functions: TimedFunction, seconds: float = 0.05, rounds: int = 7) -> dict[str, Timing]:
        """Time functions in turn (see `time_calls_in_turn`); a rehearsal runs each a few times."""
        return time_calls_in_turn(self.clock, functions, self.size_for(rounds, 1), self.size_for(seconds, 1e-9))

    def free_bytes(self) -> int:
        """Return the bytes that can be allocated; in a rehearsal more than enough."""
        return 2**40 if self.is_rehearsal else gpu_memory(self.device)[0]
