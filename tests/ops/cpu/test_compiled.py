"""The cache folders of compiled steps: one for each version, and unused ones are deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from minillm.ops.cpu import compiled
from minillm.ops.cpu.compiled import PREFIX, UNUSED_DAYS, cache_folder

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


def folder() -> Path:
    return cache_folder.__wrapped__()


def test_versions_and_processors_have_a_cache_folder_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [folder()]
    monkeypatch.setattr(compiled, "numba_version", "0.1")
    found.append(folder())
    monkeypatch.setattr(compiled, "llvm_version", "0.2")
    found.append(folder())
    codegen = compiled.cpu_target.target_context.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda self: ("x86_64", "other", "+avx"))
    found.append(folder())
    assert len(set(found)) == 4 and "other" in found[-1].name
    (found[0] / "step.nbc").touch()
    assert folder() == found[-1] and (found[0] / "step.nbc").exists()
    assert sorted(root.iterdir()) == sorted(found)


def test_only_folders_that_were_not_used_for_long_are_deleted(root: Path) -> None:
    def made(name: str, days: float) -> Path:
        (root / name).mkdir()
        os.utime(root / name, (time.time() - days * DAY,) * 2)
        return root / name

    recent, old = made(f"{PREFIX}recent", UNUSED_DAYS - 1), made(f"{PREFIX}old", UNUSED_DAYS + 1)
    foreign = made("somebody-elses", UNUSED_DAYS + 1)
    own = folder()
    os.utime(own, (time.time() - 2 * UNUSED_DAYS * DAY,) * 2)
    assert folder() == own and own.stat().st_mtime > time.time() - DAY  # using it renews its time
    assert recent.exists() and foreign.exists() and not old.exists()
