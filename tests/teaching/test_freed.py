"""Freed memory goes back to the system before a lesson goes on."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from minillm.teaching.freed import give_back_freed_memory

MIB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_freed_tensors_are_no_longer_part_of_the_process():
    """Freeing one large block makes glibc keep later ones of up to that size."""
    torch.zeros(7 * MIB)
    before = resident()
    many = [torch.ones(MIB // 2) for _ in range(100)]
    assert resident() > before + 150 * MIB
    del many
    give_back_freed_memory()
    assert resident() < before + 50 * MIB


def test_a_c_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_freed_memory()
