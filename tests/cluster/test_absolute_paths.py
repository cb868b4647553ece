"""Relative folders and files mean the same on workers, which run in another folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minillm.cluster.absolute_paths import absolute_model, with_absolute_models
from minillm.cluster.generation import GenerationSettings
from minillm.cluster.sweep import SweepSettings
from tests.conftest import TinyPair


@pytest.fixture
def here(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which holds the models."""
    monkeypatch.chdir(tiny.target.parent)
    return tiny.target.parent


def test_names_that_are_no_folder_stay_as_they_are(here: Path, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "minicoder",
        "owner/name",
        "no-such-folder",
        str(tiny.target),
        "a\0b",
        "x" * 5000,
        "~no-such-user/x",
        None,
        5,
    ):
        assert absolute_model(name) == name
    monkeypatch.setenv("HOME", str(here))
    for name in (tiny.target.name, Path(tiny.target.name), f"./{tiny.target.name}", f"~/{tiny.target.name}"):
        assert absolute_model(name) == str(tiny.target)


def test_draft_models_are_made_absolute_too(here: Path, tiny: TinyPair) -> None:
    fallback = {"method": "draft_model", "model": tiny.draft.name}
    given = {"seed": 3, "speculative_config": {"method": "heads", "model": tiny.target.name, "fallback": fallback}}
    config = with_absolute_models(given)["speculative_config"]
    assert (config["model"], config["fallback"]["model"]) == (str(tiny.target), str(tiny.draft))
    assert fallback["model"] == tiny.draft.name, "what was given is not changed"
    assert with_absolute_models({"seed": 3}) == {"seed": 3}


def test_the_settings_of_every_job_name_absolute_paths(here: Path, tiny: TinyPair) -> None:
    engine = {"speculative_config": {"method": "draft_model", "model": tiny.draft.name}}
    made = GenerationSettings(tiny.target.name, engine)
    assert (made.model, made.engine["speculative_config"]["model"]) == (str(tiny.target), str(tiny.draft))
    assert replace(made) == made
    swept = SweepSettings(model=tiny.target.name, draft=tiny.draft.name, methods=("ngram",), prompts=1, new_tokens=2)
    assert (swept.model, swept.draft) == (str(tiny.target), str(tiny.draft))


def test_a_replica_keeps_the_name_that_was_given_for_requests(here: Path, tiny: TinyPair) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from minillm.cluster.replica import ReplicaSettings

    made = ReplicaSettings(tiny.target.name, chat_template="template.jinja")
    assert (made.model, made.model_names) == (str(tiny.target), (tiny.target.name,))
    assert made.chat_template == str(here / "template.jinja")
    assert made.server_settings().model_names == (tiny.target.name,)
    assert ReplicaSettings("minicoder", model_names=("mine",)).model_names == ("mine",)
