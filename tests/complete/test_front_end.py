"""The prebuilt front end: it is built from the committed source, and an installed wheel puts it where Jupyter looks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from minillm.complete import EXTENSION, FRONT_END, _jupyter_server_extension_points

ROOT = Path(__file__).parents[2]
BUILT = FRONT_END / "@minillm" / "complete"


def build_module():
    spec = importlib.util.spec_from_file_location("labextension_build", ROOT / "labextension" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_front_end_is_built_from_the_committed_source() -> None:
    build = build_module()
    assert build.BUILT == BUILT
    assert (BUILT / "source.sha256").read_text().strip() == build.source_hash(), "run `make labextension`"


@pytest.mark.parametrize("name", ["index.js", "package.json", "package-lock.json", "webpack.config.js"])
def test_a_change_of_any_source_is_noticed(tmp_path, monkeypatch, name) -> None:
    build = build_module()
    for source in build.SOURCES:
        (tmp_path / source).write_bytes((build.SOURCE / source).read_bytes())
    before = build.source_hash()
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    assert build.source_hash() == before
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b" ")
    assert build.source_hash() != before


def test_what_jupyterlab_loads_is_there_and_small() -> None:
    package = json.loads((BUILT / "package.json").read_text())
    build = package["jupyterlab"]["_build"]
    assert build["extension"] == "./extension" and (BUILT / build["load"]).is_file()
    assert f"{BUILT.parent.name}/{BUILT.name}" == package["name"]
    assert sum(file.stat().st_size for file in BUILT.rglob("*") if file.is_file()) < 50_000


def test_the_source_names_no_registry() -> None:
    assert "resolved" not in (ROOT / "labextension" / "package-lock.json").read_text()


def test_the_server_extension_can_be_found() -> None:
    [point] = _jupyter_server_extension_points()
    assert importlib.util.find_spec(point["module"]) is not None
    config = json.loads((ROOT / "minillm" / "complete" / "jupyter_server_config.json").read_text())
    assert config == {"ServerApp": {"jpserver_extensions": {EXTENSION: True}}}
