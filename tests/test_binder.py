"""The files from which Binder builds its image, as far as they can be tried without Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BINDER = ROOT / "binder"
REQUIRED = (BINDER / "requirements.txt").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w-]+)==([\w.]+)", REQUIRED, re.MULTILINE))


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_every_dependency_is_there_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    assert sorted(PINS) == sorted(map(name_of, needed))


def test_versions_are_those_that_are_known_to_work_together() -> None:
    known = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert {name: known[name] for name in PINS if name in known} == {n: v for n, v in PINS.items() if n in known}
    assert set(PINS) - set(known) == {"triton"}  # which torch pins in its GPU builds


def test_the_layer_can_be_kept_while_the_code_changes() -> None:
    """A local path in the requirements makes the image install everything again after each commit."""
    lines = [line for line in REQUIRED.splitlines() if not line.startswith("#")]
    assert all(re.match(r"[\w-]+==|--extra-index-url https://", line) for line in lines)


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_scripts_can_be_run(name: str) -> None:
    file = BINDER / name
    assert os.access(file, os.X_OK) and file.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Binder runs on Linux")
def test_a_launch_uses_as_many_threads_as_the_container_may_and_keeps_the_arguments() -> None:
    command = [BINDER / "start", "bash", "-c", 'echo "$OMP_NUM_THREADS|$1"', "-", "two words"]
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    core = min(os.sched_getaffinity(0))
    on_one = ["taskset", "-c", str(core), *command]
    done = subprocess.run(on_one, env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "1|two words\n"


def test_a_failed_step_stops_the_build(tmp_path: Path) -> None:
    """Better no image than one whose lessons do not run."""
    for name in ("python", "minillm"):
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\necho {name}\n[ {name} = python ]\n")
        program.chmod(0o755)
    done = subprocess.run([BINDER / "postBuild"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert done.returncode != 0


def test_the_dev_container_installs_the_same() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert "-r binder/requirements.txt" in settings["postCreateCommand"]
    python = (BINDER / "runtime.txt").read_text().strip().removeprefix("python-")
    assert settings["image"].endswith(f":{python}")
