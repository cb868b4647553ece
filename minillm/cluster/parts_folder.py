"""`PartsFolder`: the results of a job that is done in parts, each part in a file of its own, each written once.

    results/
      job.json                              what the job is: its kind, settings, and the hash of its input
      lock                                  held by the program that writes here
      part-000000000-000000256-9f3ab1.jsonl     name = range + hash of job and range

A part is written to a temporary file and renamed, so a file that is there is whole. Its name follows from the job and
its range. So there is one file per part, however often the part is computed, and the results of other settings have
other names. A folder that holds another job is refused. Only the program that holds the lock writes: workers return
their results to it. So no part is written twice, and workers need no shared file system.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.whole_file import write_whole_file

JOB, LOCK = "job.json", "lock"


class PartsFolder:
    """The folder of one job. `job`: JSON values that decide the results; equal jobs may share a folder."""

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        self.folder = folder
        self.job = json.loads(json.dumps(job))
        text = json.dumps(self.job, sort_keys=True)
        self._hash = hashlib.sha256(text.encode()).hexdigest()

    @contextmanager
    def open(self) -> Iterator[PartsFolder]:
        """Create or continue the folder and hold its lock.

        Raises `ConfigError` if it holds another job, or files that are none of a job's, or if another program writes.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"--out {self.folder}: {problem.strerror or problem}; name another folder") from None
        self._check_files()
        with _locked(self.folder / LOCK, self.folder):
            self._check_job()
            for left in self.folder.glob("*.tmp"):
                left.unlink()
            yield self

    def path(self, begin: int, end: int) -> Path:
        """The file of the part from item `begin` to before item `end`."""
        name = hashlib.sha256(f"{self._hash} {begin} {end}".encode()).hexdigest()[:12]
        return self.folder / f"part-{begin:09}-{end:09}-{name}.jsonl"

    def has(self, begin: int, end: int) -> bool:
        """Whether the part is done."""
        return self.path(begin, end).exists()

    def write(self, begin: int, end: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of a part, one JSON object per line, all or nothing. Raises `OSError`."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file = self.path(begin, end)
        write_whole_file(file, text, file.with_suffix(".tmp"))

    def read(self, parts: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """The rows of these parts, in order."""
        for begin, end in parts:
            with self.path(begin, end).open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)

    def _check_files(self) -> None:
        """Raise `ConfigError` if the folder has files of something else; nothing of it is touched."""
        file = self.folder / JOB
        if not file.exists():
            # A program that was ended while it wrote the first file has left an empty lock and a temporary file.
            own = (LOCK, file.with_suffix(".tmp").name)
            others = [path.name for path in self.folder.iterdir() if path.name not in own]
            lock = self.folder / LOCK
            if not others and lock.exists() and (not lock.is_file() or lock.stat().st_size):
                others = [LOCK]
            if others:
                raise ConfigError(f"--out {self.folder} has {others[0]} but no {JOB}; name an empty folder")

    def _check_job(self) -> None:
        file = self.folder / JOB
        if not file.exists():
            write_whole_file(file, json.dumps(self.job, indent=2) + "\n", file.with_suffix(".tmp"))
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("no object")
        except ValueError as problem:
            raise ConfigError(f"{file} is not JSON of a job ({problem}); name another folder") from None
        if found != self.job:
            keys = [key for key in {**found, **self.job} if found.get(key) != self.job.get(key)]
            was, now = ({key: each.get(key) for key in keys[:3]} for each in (found, self.job))
            raise ConfigError(f"--out {self.folder} holds another job ({was}, not {now}); name another folder")


@contextmanager
def _locked(file: Path, folder: Path) -> Iterator[None]:
    """Hold a lock that ends with the process. Where the system has no `fcntl` (Windows), nothing is locked."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another program writes to {folder}; wait for its end, or name another folder") from None
        yield
