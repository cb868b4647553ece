"""Every solution, run again, gives its recorded outputs and pictures: `minillm build --check --run`, lesson by lesson,
so that lessons and tests wait in one queue and no worker is idle."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import cli
from minillm.teaching.course import choose

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [lesson.name for lesson in choose(ROOT)])
def test_a_solution_gives_its_recorded_outputs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed = cli.main(["build", "--check", "--run", name, "--root", str(ROOT)])
    assert not failed, capsys.readouterr().err
