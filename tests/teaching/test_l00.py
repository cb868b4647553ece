"""Lesson 00: what its code must do on machines that the tests do not run on."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "solutions" / "00_tour.py"


def test_every_engine_computes_in_float32_on_a_gpu_too():
    """There `auto` is bfloat16, in which drafts can change a token where two are almost equally probable."""
    calls = [node for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    engines = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "LLM"]
    assert len(engines) == 2
    assert all("dtype='float32'" in engine for engine in engines)
