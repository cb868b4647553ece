"""Freed memory goes back to the system before a lesson goes on."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from minillm.teaching.free_memory import give_back_freed_memory

LESSON = """
import psutil, torch
from minillm.teaching.free_memory import give_back_freed_memory

MIB = 1 << 20
resident = lambda: psutil.Process().memory_info().rss

torch.zeros(7 * MIB)  # freeing one large block makes glibc keep later ones of up to that size
before = resident()
many = [torch.ones(MIB // 2) for _ in range(100)]
assert resident() > before + 150 * MIB
del many[:-1]  # what is left keeps the memory below it
assert resident() > before + 150 * MIB
give_back_freed_memory()
assert resident() < before + 50 * MIB
"""


def test_freed_tensors_are_no_longer_part_of_the_process():
    """In a process of its own: one that has freed much before takes that memory first."""
    subprocess.run([sys.executable, "-c", LESSON], check=True, timeout=120)


def test_a_c_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_freed_memory()
