"""Results in parts: each written once, whole, and only for the job that the folder belongs to."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from minillm.cluster.parts_folder import PartsFolder
from minillm.errors import ConfigError

JOB = {"kind": "test", "sampling": {"seed": 1}}


def test_a_part_is_there_for_the_next_program(tmp_path: Path) -> None:
    with PartsFolder(tmp_path / "out", JOB).open() as folder:
        folder.write(0, 2, [{"id": 0, "text": "ä"}, {"id": 1}])
    with PartsFolder(tmp_path / "out", JOB).open() as again:
        assert again.has(0, 2) and not again.has(2, 4)
        assert list(again.read([(0, 2)])) == [{"id": 0, "text": "ä"}, {"id": 1}]


def test_a_part_written_twice_is_one_file(tmp_path: Path) -> None:
    with PartsFolder(tmp_path, JOB).open() as folder:
        folder.write(0, 2, [{"id": 0}])
        folder.write(0, 2, [{"id": 0}])
    assert len(list(tmp_path.glob("part-*"))) == 1


def test_a_part_that_the_disk_has_no_room_for_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with PartsFolder(tmp_path, JOB).open() as folder:
        before = set(tmp_path.iterdir())
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            folder.write(0, 2, [{"id": 0}])
    assert caught.value.filename == str(folder.path(0, 2)) and set(tmp_path.iterdir()) == before


def test_names_sort_by_range_and_depend_on_job_and_range(tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path, JOB)
    paths = [folder.path(begin, begin + 5) for begin in range(0, 2000, 5)]
    assert sorted(paths) == paths
    other = PartsFolder(tmp_path, JOB | {"kind": "other"})
    assert len({folder.path(0, 5), folder.path(0, 6), other.path(0, 5)}) == 3


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    with PartsFolder(tmp_path, JOB).open():
        pass
    with (
        pytest.raises(ConfigError, match=r"another job .*'seed': 1.*'seed': 2"),
        PartsFolder(tmp_path, JOB | {"sampling": {"seed": 2}}).open(),
    ):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"has thesis\.tex but no job\.json"), PartsFolder(tmp_path, JOB).open():
        pass
    assert not (tmp_path / "job.json").exists() and not (tmp_path / "lock").exists()


def test_a_lock_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(ConfigError, match=r"has lock but no job\.json"), PartsFolder(tmp_path, JOB).open():
        pass
    assert (tmp_path / "lock").read_text() == "mine"


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_damaged_job_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"job\.json is not JSON of a job"), PartsFolder(tmp_path, JOB).open():
        pass


def test_a_second_program_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    refused = pytest.raises(ConfigError, match="another program writes")
    with PartsFolder(tmp_path, JOB).open(), refused, PartsFolder(tmp_path, JOB).open():
        pass
    with PartsFolder(tmp_path, JOB).open():
        pass


def test_half_a_part_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def power_fails(source: Path, target: Path) -> None:
        raise OSError("no power")

    with PartsFolder(tmp_path, JOB).open() as folder:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", power_fails)
            with pytest.raises(OSError, match="no power"):
                folder.write(0, 2, [{"id": 0}])
        assert not folder.has(0, 2)
    with PartsFolder(tmp_path, JOB).open():
        assert not list(tmp_path.glob("*.tmp"))


def test_a_program_that_ended_while_it_wrote_the_first_file_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_fails(source: Path, target: Path) -> None:
        raise OSError("no power")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
        patch.setattr(Path, "replace", power_fails)
        patch.setattr(Path, "unlink", lambda path: None)  # the program ends before that
        with PartsFolder(tmp_path, JOB).open():
            pass
    assert (tmp_path / "job.tmp").exists()
    with PartsFolder(tmp_path, JOB).open():
        assert (tmp_path / "job.json").exists() and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another folder"), PartsFolder(tmp_path / "file", JOB).open():
        pass


def test_the_job_is_readable(tmp_path: Path) -> None:
    with PartsFolder(tmp_path, JOB).open():
        assert json.loads((tmp_path / "job.json").read_text()) == JOB
