"""A file is written all or nothing, by each writer for itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minillm.whole_file import write_whole_file


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sync = tmp_path / "grades.json", os.fsync

    def another_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_whole_file(file, "of the other")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", another_writes)
    write_whole_file(file, "of the last")
    assert file.read_text() == "of the last"
    assert list(tmp_path.iterdir()) == [file]
