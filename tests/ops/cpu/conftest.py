"""LLVM's code generators."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def every_target() -> None:
    """LLVM can compile for all its processors."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
