"""What is installed without an extra says in one line which one it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.commands import book, build, serve
from minillm.errors import UnsupportedError
from minillm.extras import need

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_everything_that_is_missing_is_named_at_once() -> None:
    need("serve", "argparse", "json")
    with pytest.raises(UnsupportedError) as refused:
        need("serve", "argparse", "no_such_module", "no_such_other")
    said = 'no_such_module, no_such_other are not installed; run: pip install "minillm-lessons[serve]"'
    assert str(refused.value) == said


@pytest.mark.parametrize(("extra", "modules"), [("book", book.NEEDED), ("dev", build.NEEDED), ("serve", serve.NEEDED)])
def test_an_extra_installs_what_its_command_asks_for(extra: str, modules: tuple[str, ...]) -> None:
    installed = {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]}
    assert {name.replace("_", "-") for name in modules} <= installed


@pytest.mark.parametrize("module", ["jupytext", "nbclient", "nbformat"])
@pytest.mark.parametrize(
    ("command", "extra"),
    [(["book"], "book"), (["build", "--check"], "dev"), (["build", "--nbgrader", "x"], "dev")],
    ids=lambda words: " ".join(words) if isinstance(words, list) else words,
)
def test_a_command_that_needs_notebooks_looks_before_it_imports(command: list[str], extra: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nfrom minillm.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f'minillm: {module} is not installed; run: pip install "minillm-lessons[{extra}]"\n'
