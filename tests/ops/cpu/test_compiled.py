"""The cache folders of compiled steps: one for each version, and unused ones are deleted."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path

import pytest
from numba import njit
from numba.core.caching import UserProvidedCacheLocator

from minillm.ops.cpu import compiled
from minillm.ops.cpu.compiled import LONGEST_FILE, LONGEST_FOLDER, OPTIONS, PART, PREFIX, UNUSED_DAYS, cache_folder

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


def folder() -> Path:
    found: Path | None = cache_folder.__wrapped__()
    assert found is not None
    return found


def test_versions_and_processors_have_a_cache_folder_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [folder()]
    monkeypatch.setattr(compiled, "numba_version", "0.1")
    found.append(folder())
    monkeypatch.setattr(compiled, "llvm_version", "0.2")
    found.append(folder())
    codegen = compiled.cpu_target.target_context.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda self: ("x86_64", "other", "+avx"))
    found.append(folder())
    assert len(set(found)) == 4
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


def test_where_the_chosen_place_cannot_be_written_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert folder().parent == Path(compiled.__file__).parent / "__pycache__"


@pytest.mark.skipif(not hasattr(os, "pathconf"), reason="the test needs to know how long a path may be")
@pytest.mark.parametrize("room", [30, 60, 90, 115, 140])
def test_a_place_where_the_paths_of_numba_are_too_long_is_left_out(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`room`: the number of characters that a path may have below the place. The cache folder's name has 29."""
    length = os.pathconf(tmp_path, "PC_PATH_MAX") - 1 - room  # the last byte ends the path
    deep = Path((str(tmp_path) + f"/{'d' * 99}" * 50)[:length])
    roots = [deep, tmp_path / "near"]
    monkeypatch.setattr(compiled, "_roots", lambda: iter(roots))
    monkeypatch.setattr(compiled, "cache_folder", cache_folder.__wrapped__)

    @compiled.entry_point()
    def double(number):  # type: ignore[no-untyped-def]
        return 2 * number

    assert double(4) == 8
    assert Path(double.stats.cache_path).is_relative_to(roots[1])


@pytest.mark.parametrize("module", ["ops.cpu.step", "ops.cpu.heads", "ops.cpu.tile_rate", "bench.kernels_cpu"])
def test_no_entry_point_has_longer_paths_than_were_tried(module: str) -> None:
    found = [
        f
        for f in vars(import_module(f"minillm.{module}")).values()
        if getattr(f, "_cache", None) and f.stats.cache_path
    ]
    assert found
    for function in found:
        file = f"{function._cache._cache_file._data_name(99)}.tmp.{'0' * 16}"
        assert len(Path(function.stats.cache_path).name) <= LONGEST_FOLDER and len(file) <= LONGEST_FILE


def test_where_no_place_can_be_written_every_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba must not look for a place of its own: its name would not depend on the other files."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled, "_roots", lambda: iter([tmp_path / "file"]))
    assert cache_folder.__wrapped__() is None
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)

    @compiled.entry_point()
    def double(number):  # type: ignore[no-untyped-def]
        return 2 * number

    assert double(4) == 8 and double.stats.cache_path is None


def test_where_numba_takes_a_place_of_its_own_nothing_is_cached(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba does so without a word where it cannot write, or as `NUMBA_CACHE_LOCATOR_CLASSES` says."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: root)
    monkeypatch.setattr(UserProvidedCacheLocator, "from_function", lambda function, file: None)

    @compiled.entry_point()
    def double(number):  # type: ignore[no-untyped-def]
        return 2 * number

    assert double(4) == 8 and double.stats.cache_path is None


def test_what_only_others_call_is_a_type_error_in_python() -> None:
    @njit(**PART)
    def half(number):  # type: ignore[no-untyped-def]
        return number / 2

    @njit(**OPTIONS)
    def quarter(number):  # type: ignore[no-untyped-def]
        return half(half(number))

    assert quarter(8.0) == 2.0
    with pytest.raises(TypeError, match="not callable"):
        half(8.0)
    [[part], [whole]] = (function.overloads.values() for function in (half, quarter))
    engine = whole.library._codegen._engine
    assert engine.is_symbol_defined(whole.fndesc.llvm_func_name)
    assert not engine.is_symbol_defined(part.fndesc.llvm_func_name)  # no machine code of its own
