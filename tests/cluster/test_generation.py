"""Batch generation: the tokens of one engine, each prompt once, over stops and lost workers. Without Ray."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.cluster.generation import GenerationSettings, generate_file, read_items, shards
from minillm.cluster.worker_pool import Worker
from minillm.errors import ConfigError, EngineDeadError, NonFiniteLogitsError, PromptError, UnknownOptionError
from tests.cluster.this_process import ThisProcess
from tests.conftest import TinyPair

PROMPTS = [f"def f{number}(a, b):\n    return" for number in range(11)]
ENGINE = {"device": "cpu", "enforce_eager": True, "block_size": 4}


@pytest.fixture(scope="module")
def settings(tiny: TinyPair) -> GenerationSettings:
    return GenerationSettings(str(tiny.target), ENGINE, {"temperature": 0.0, "max_tokens": 8})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "prompts.jsonl"
    found.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return found


def rows(parts: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


class Stops:
    """A pool that ends after some tasks, as a program does that is killed; it counts what it was given."""

    def __init__(self, after: int) -> None:
        self.after, self.given = after, 0

    def map(self, make: Callable[[], Worker[Any, Any]], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        self.given = len(tasks)
        for done, pair in enumerate(ThisProcess().map(make, tasks)):
            if done == self.after:
                raise KeyboardInterrupt
            yield pair


def test_the_tokens_are_those_of_generate(file: Path, tmp_path: Path, settings: GenerationSettings) -> None:
    found = rows(generate_file(file, tmp_path / "out", settings, ThisProcess(), shard=4))
    llm = LLM(settings.model, **ENGINE)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [row["id"] for row in found] == list(range(11))
    assert [row["token_ids"] for row in found] == [output.outputs[0].token_ids for output in outputs]
    assert [row["text"] for row in found] == [output.outputs[0].text for output in outputs]
    assert [row["num_prompt_tokens"] for row in found] == [len(output.prompt_token_ids) for output in outputs]


def test_a_stopped_run_goes_on_and_repeats_nothing(file: Path, tmp_path: Path, settings: GenerationSettings) -> None:
    whole = rows(generate_file(file, tmp_path / "whole", settings, ThisProcess(), shard=2))
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        generate_file(file, out, settings, Stops(2), shard=2)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert len(before) == 2
    pool = Stops(99)
    assert rows(generate_file(file, out, settings, pool, shard=2)) == whole
    assert pool.given == 4
    assert all((out / name).stat().st_mtime_ns == time for name, time in before.items())
    again = Stops(0)
    assert rows(generate_file(file, out, settings, again, shard=2)) == whole
    assert again.given == 0


@pytest.mark.parametrize("change", ["input", "sampling", "shard"])
def test_results_of_something_else_are_never_mixed_in(
    file: Path, tmp_path: Path, settings: GenerationSettings, change: str
) -> None:
    generate_file(file, tmp_path / "out", settings, ThisProcess(), shard=4)
    shard, other = (3 if change == "shard" else 4), settings
    if change == "input":
        file.write_text(file.read_text() + '{"prompt": "one more"}\n')
    if change == "sampling":
        other = replace(settings, sampling={"temperature": 0.0, "max_tokens": 9})
    with pytest.raises(ConfigError, match=f"another job .*{change}"):
        generate_file(file, tmp_path / "out", other, ThisProcess(), shard=shard)


@pytest.mark.parametrize("seed", [{}, {"seed": -1}], ids=str)
def test_a_sampled_run_without_a_seed_is_the_same_when_done_again(
    file: Path, tmp_path: Path, settings: GenerationSettings, seed: dict[str, int]
) -> None:
    sampled = replace(settings, sampling={"temperature": 1.0, "max_tokens": 8, **seed})
    first = rows(generate_file(file, tmp_path / "a", sampled, ThisProcess(), shard=4))
    with pytest.raises(KeyboardInterrupt):
        generate_file(file, tmp_path / "b", sampled, Stops(1), shard=4)
    assert rows(generate_file(file, tmp_path / "b", sampled, ThisProcess(), shard=4)) == first  # by another engine
    assert len({tuple(row["token_ids"]) for row in first}) > 1


def test_the_engines_seed_decides_the_samples(file: Path, tmp_path: Path, settings: GenerationSettings) -> None:
    found = []
    for number, seed in enumerate((7, 7, 8)):
        own = replace(settings, engine={**ENGINE, "seed": seed}, sampling={"temperature": 1.0, "max_tokens": 8})
        found.append(rows(generate_file(file, tmp_path / str(number), own, ThisProcess())))
    assert found[0] == found[1] != found[2]


def test_results_of_another_checkpoint_of_this_name_are_not_kept(file: Path, tmp_path: Path, tiny: TinyPair) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny.target, copy)
    settings = GenerationSettings(str(copy), ENGINE, {"temperature": 0.0, "max_tokens": 4})
    before = settings.job(b"", 4)
    assert settings.job(b"", 4) == before
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    changed = settings.job(b"", 4)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    configured = settings.job(b"", 4)
    (copy / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert len({job["weights"] for job in (before, changed, configured, settings.job(b"", 4))}) == 4


def test_results_of_another_draft_model_are_not_kept(tmp_path: Path, tiny: TinyPair) -> None:
    copy = tmp_path / "draft"
    shutil.copytree(tiny.draft, copy)
    draft, ngram = {"method": "draft_model", "model": str(copy)}, {"method": "ngram", "fallback_below": 1}
    choices = [{"speculative_config": given} for given in (draft, {**ngram, "fallback": draft})]
    settings = [GenerationSettings(str(tiny.target), {**ENGINE, **given}) for given in (*choices, {})]
    before = [own.job(b"", 4) for own in settings]
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert [own.job(b"", 4) == old for own, old in zip(settings, before, strict=True)] == [False, False, True]


def test_a_prompt_that_cannot_run_does_not_stop_the_others(tmp_path: Path, settings: GenerationSettings) -> None:
    file = tmp_path / "prompts.jsonl"
    bad = [
        {"id": "long", "prompt": "x " * 400},
        {"id": "empty", "prompt": ""},
        {"id": "ids", "prompt_token_ids": [999]},
    ]
    lines = [{"id": "good", "prompt": "def"}, *bad, {"id": 7, "prompt_token_ids": [5, 9]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = rows(generate_file(file, tmp_path / "out", settings, ThisProcess()))
    assert [row["id"] for row in found] == ["good", "long", "empty", "ids", 7]
    assert ["error" in row for row in found] == [False, True, True, True, False]
    assert "over the context" in found[1]["error"]


def test_a_prompt_whose_logits_are_nan_does_not_stop_the_others(
    file: Path, tmp_path: Path, settings: GenerationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(generate_file(file, tmp_path / "whole", settings, ThisProcess()))
    generate = LLM.generate

    def overflows(self: LLM, prompts: list[Any], *args: Any, **options: Any) -> list[Any]:
        if PROMPTS[3] in prompts:
            raise NonFiniteLogitsError("the model gave NaN", "3")
        return generate(self, prompts, *args, **options)

    monkeypatch.setattr(LLM, "generate", overflows)
    found = rows(generate_file(file, tmp_path / "out", settings, ThisProcess()))
    assert found == [*whole[:3], {"id": 3, "error": "the model gave NaN"}, *whole[4:]]


def test_a_worker_that_has_lost_a_rank_is_lost(
    file: Path,
    tmp_path: Path,
    settings: GenerationSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dies(*_: Any, **__: Any) -> list[Any]:
        raise EngineDeadError("the process of rank 1 has ended: killed by SIGKILL")

    monkeypatch.setattr(LLM, "generate", dies)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        generate_file(file, tmp_path / "out", settings, ThisProcess())
    assert ended.value.code == 1
    assert "rank 1 has ended: killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 must be an object"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 1 must be an object"),
        ('{"prompt": "a", "max_tokens": 5}', "line 1 has 'max_tokens', which is not used"),
        ('{"prompt": 3}', "prompt must be text"),
        ('{"prompt_token_ids": "3"}', "must be a list of token ids"),
        ('{"prompt": "a", "id": null}', "must be text or an integer"),
        ('{"prompt": "a", "id": "x"}\n\n{"prompt": "b", "id": "x"}', "line 3: the id 'x' is also that of line 1"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b"}', "line 2: the id 1 is also"),
        ("\n", "has no prompts"),
        ('{"prompt": "a", "id": "\\ud800"}', "has half of a surrogate pair"),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_a_bad_file_is_refused_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(PromptError, match=message):
        read_items(tmp_path / "prompts.jsonl")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.timeout(60)
def test_a_file_that_could_be_read_without_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_items(tmp_path / "prompts.jsonl")


def test_bad_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a file"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(UnknownOptionError):
        GenerationSettings("minicoder", {"no_such_option": 1})
    with pytest.raises(ConfigError, match="n=2"):
        GenerationSettings("minicoder", {}, {"n": 2, "temperature": 1.0})
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ConfigError, match=f"^{name}=0: batch generation writes no log probabilities"):
            GenerationSettings("minicoder", {}, {name: 0})


def test_shards_cover_every_item_once() -> None:
    for size in (1, 3, 4, 100):
        covered = [item for begin, end in shards(10, size) for item in range(begin, end)]
        assert covered == list(range(10))
    with pytest.raises(ConfigError, match="shard"):
        shards(10, 0)
