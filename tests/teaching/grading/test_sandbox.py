"""No way leads to the answers, through links either; and what a submission leaves behind is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minillm
from minillm.teaching.grading import sandbox
from tests.teaching.grading.isolation import possible

GRADING = Path(minillm.__file__).resolve().parent / "teaching" / "grading"
INSIDE = Path("lib") / "python3" / "site-packages" / "minillm"
PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import landlock, sandbox
mode, prefix, package, root, *paths = sys.argv[2:]
sys.prefix = sys.exec_prefix = prefix
sys.path += os.environ["PLACES"].split()
try:
    if mode == "namespaces":
        sandbox.enter(Path(root), Path(package), 0)
    else:
        landlock.close_in(sandbox.needed(Path(package)), sandbox.hidden(Path(package)), Path(root))
except (FileExistsError, FileNotFoundError, NotADirectoryError):
    raise
except OSError as problem:
    sys.exit(f"impossible: {problem}")
for path in paths:
    try:
        print(open(path).read())
    except OSError:
        print("nothing")
"""


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
@pytest.mark.parametrize("prefix", ["real/venv", "linked/venv", "venv"])
def test_answers_are_hidden_where_python_is_reached_through_links(mode: str, prefix: str, tmp_path: Path) -> None:
    venv, root = tmp_path / "real" / "venv", tmp_path / "root"
    package = venv / INSIDE
    (package / "teaching" / "exercises").mkdir(parents=True)
    (package / "teaching" / "exercises" / "l02.py").write_text("the answer")
    (package / "version.py").write_text("1.0")
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "venv").symlink_to("linked/venv")
    (venv / "lib64").symlink_to("lib")
    root.mkdir()
    ways = [tmp_path / name for name in ("real/venv", "linked/venv", "venv")]
    places = [way / lib / INSIDE.relative_to("lib") for way in ways for lib in ("lib", "lib64")]
    answers = [str(place / "teaching" / "exercises" / "l02.py") for place in places]
    plain = str(tmp_path / prefix / INSIDE / "version.py")
    command = [sys.executable, "-I", "-c", PROGRAM, str(GRADING), mode, str(tmp_path / prefix), str(package), str(root)]
    environment = {**os.environ, "PLACES": ""}
    done = subprocess.run([*command, plain, *answers], capture_output=True, text=True, env=environment)
    if done.stderr.startswith("impossible") and not possible(mode):
        pytest.skip(done.stderr)
    assert done.stdout.split("\n") == ["1.0", *["nothing"] * len(answers), ""], done.stderr


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
def test_answers_of_every_copy_are_hidden(mode: str, tmp_path: Path) -> None:
    """A clone that lies where Python does, and a copy that is installed beside it."""
    venv, root = tmp_path / "venv", tmp_path / "root"
    package, other = venv / "clone" / "minillm", venv / INSIDE
    answers = [
        package / "teaching" / "exercises" / "l02.py",
        *(venv / "clone" / name for name in ("solutions/02_kv_cache.py", ".git/config", "dist/it.whl", "tests/l02.py")),
        other / "teaching" / "exercises" / "l02.py",
        other / "_solutions" / "02_kv_cache.py",
    ]
    for file in (*answers, other / "version.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1.0" if file.name == "version.py" else "the answer")
    root.mkdir()
    command = [sys.executable, "-I", "-c", PROGRAM, str(GRADING), mode, str(venv), str(package), str(root)]
    environment = {**os.environ, "PLACES": str(other.parent)}
    paths = [str(file) for file in (other / "version.py", *answers)]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, env=environment)
    if done.stderr.startswith("impossible") and not possible(mode):
        pytest.skip(done.stderr)
    assert done.stdout.split("\n") == ["1.0", *["nothing"] * len(answers), ""], done.stderr


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("mode", ["namespaces", "landlock"])
def test_of_a_clone_what_python_needs_stays(mode: str, tmp_path: Path) -> None:
    """The virtual environment is in the clone, and both are where Python is."""
    prefix, root = tmp_path / "prefix", tmp_path / "root"
    package, needs = prefix / "clone" / "minillm", prefix / "clone" / "venv" / INSIDE.parent
    files = [package / "version.py", needs / "torch.py", prefix / "clone" / ".git" / "config"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.stem)
    root.mkdir()
    command = [sys.executable, "-I", "-c", PROGRAM, str(GRADING), mode, str(prefix), str(package), str(root)]
    environment = {**os.environ, "PLACES": str(needs)}
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, env=environment)
    if done.stderr.startswith("impossible") and not possible(mode):
        pytest.skip(done.stderr)
    assert done.stdout.split("\n") == ["version", "torch", "nothing", ""], done.stderr


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import sandbox
kinds = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
for kind in kinds:
    resource.setrlimit(kind, (100, 100))
sandbox.limit_files_and_processes(True)
print(*(resource.getrlimit(kind) for kind in kinds))
"""


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
def test_a_limit_of_the_machine_that_is_lower_stays() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", LIMITED, str(GRADING)], capture_output=True, text=True)
    assert done.stdout == "(100, 100) (100, 100)\n", done.stderr


def test_a_folder_that_was_closed_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may close it, and then cannot list it. Root can, so a refusal is planted."""
    listed = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if not folder.stat().st_mode & 0o500:
            raise PermissionError(folder)
        return listed(folder)

    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").touch()
    tmp_path.chmod(0)
    monkeypatch.setattr(Path, "iterdir", iterdir)
    sandbox.empty(tmp_path)
    assert not list(tmp_path.iterdir())
