from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, TrainingError
from minillm.models import bundled
from minillm.training.card import card
from minillm.training.checkpoint import pack_run, unpack_run
from minillm.training.drafter_stages import _loading
from minillm.training.pair import Pair
from minillm.training.pretrain import Recipe, Trainer, new_model
from minillm.training.recipes import DECAY_SHARE, DRAFTER_SHARE, EXTRAPOLATION, SHARES, TARGET, unlikelihood_recipe
from minillm.training.record import Hardware, RunRecord
from minillm.training.run import DEVICES, add_arguments, run_from_args, train
from minillm.training.stage_runs import run_to_the_end
from minillm.training.stages import PAIR_STAGES, STAGES, run_stages
from minillm.training.target_evaluation import Amount
from minillm.training.trained_drafters import TRAINED

from .conftest import bits_per_byte, config

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "minicoder"


def recipe(steps: int) -> Recipe:
    return Recipe(tokens=steps * 256, tokens_per_step=256, lengths=(64,))


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory):
    """A pair taken through all stages after the corpus."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(corpus, folder / "corpus")
    pair = Pair(
        target_recipe=replace(recipe(30), decay_from=1.0),
        decay_lengths=(64,),
        unlikelihood_recipe=Recipe(tokens=2 * 512, tokens_per_step=512, lengths=(128,), warmup_steps=1),
        draft_recipe=recipe(10),
        distill_recipe=recipe(10),
        drafters=dict.fromkeys(TRAINED, recipe(3)),
        folder=folder,
        target=config(),
        draft=config(layers=1),
        continuation_parts=2,
        continuation_rows=8,
        continuation_length=96,
        evaluation_rows=2,
        alone=Amount(
            (0, 60, 120),
            gaps=2,
            gap_characters=(90, 60),
            rows=2,
            repetition_tokens=16,
            texts=2,
            text_tokens=8,
            prompt_characters=90,
        ),
        export_to=folder / "weights",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minillm.training.compiling.has_compiler", lambda: False)
        run_stages(pair, list(STAGES))
    return pair


def test_both_folders_hold_a_model_and_its_card(made):
    for name in ("minicoder", "minicoder-draft"):
        files = {file.name for file in (made.export_to / name).iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "training.json", "loss.svg"} <= files
    facts = json.loads((made.export_to / "minicoder-draft" / "training.json").read_text())
    assert facts["runs"]["pretraining"]["tokens"] == facts["runs"]["distillation"]["tokens"] == 10 * 256
    kept = json.loads((made.folder / "evaluation.json").read_text())["evaluations"]
    assert facts["evaluation"] == kept


def test_finished_target_lies_beyond_its_last_stage(made):
    """On the line from the decayed weights through those of the last stage."""
    decayed, last = (made.trained(stage).state_dict() for stage in ("decay", "unlikelihood"))
    finished = made.trained_target().state_dict()
    moved = sum((last[name] - decayed[name]).abs().sum().item() for name in last)
    assert moved > 0
    beyond = sum((finished[name] - last[name]).abs().sum().item() for name in last)
    assert beyond == pytest.approx((EXTRAPOLATION - 1) * moved, rel=1e-3)
    for name, weight in finished.items():
        torch.testing.assert_close(
            weight - decayed[name], EXTRAPOLATION * (last[name] - decayed[name]), rtol=1e-3, atol=1e-6
        )
    assert json.loads((made.export_to / "minicoder" / "training.json").read_text())["extrapolation"] == EXTRAPOLATION


def test_another_target_is_evaluated_anew(made, tmp_path, monkeypatch):
    """Even if it has seen as many tokens."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("minillm.training.pair.EXTRAPOLATION", 9.0)
    run_stages(replace(made, folder=tmp_path, export_to=tmp_path / "weights"), ["export"])
    bits = [
        json.loads((folder / "minicoder" / "training.json").read_text())["evaluation"]["distilled"][
            "target_bits_per_byte"
        ]
        for folder in (made.export_to, tmp_path / "weights")
    ]
    assert bits[0] != bits[1]


@pytest.mark.parametrize("method", TRAINED)
def test_trained_drafters_belong_to_the_exported_target(made, method, recwarn):
    """Their folder loads beside the target without a warning, and says what was measured."""
    folder = made.export_to / f"minicoder-{method}"
    facts = json.loads((folder / "training.json").read_text())
    assert facts["run"]["tokens"] == 3 * 256
    assert set(facts["acceptance"]) == {"code", "greedy", "sampled"}
    rows = (folder / "README.md").read_text().splitlines()
    assert any(f"{facts['acceptance']['greedy']['greedy'][0]:.1%}" in row for row in rows)
    llm = LLM(
        str(made.export_to / "minicoder"),
        enforce_eager=True,
        speculative_config={"method": method, "model": str(folder), "adaptive": False},
    )
    plain = LLM(str(made.export_to / "minicoder"), enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert not [warning for warning in recwarn if "was trained for" in str(warning.message)]
    assert llm.generate("def a", params)[0].outputs[0].text == plain.generate("def a", params)[0].outputs[0].text


@pytest.mark.parametrize("name", ["minicoder", "minicoder-draft", *(f"minicoder-{method}" for method in TRAINED)])
def test_the_code_of_a_card_loads_the_models_beside_it(made, monkeypatch, name):
    """The bundled models have the same names."""
    loaded = []

    def load(model, **options):
        loaded.extend([model, *(given["model"] for given in options.values())])
        return LLM(model, enforce_eager=True, **options)

    monkeypatch.setattr("minillm.LLM", load)
    code = re.search(r"```python\n(.*?)```", (made.export_to / name / "README.md").read_text(), re.DOTALL)[1]
    exec(code, {})
    assert str(made.export_to / name) in loaded and {str(Path(path).parent) for path in loaded} == {str(made.export_to)}


def test_the_card_of_a_bundled_model_names_it(made):
    there = replace(made, export_to=bundled.WEIGHTS)
    assert there.load_name("minicoder") == "minicoder"
    target = SimpleNamespace(name="minicoder")
    assert _loading(there, target, "spire") == 'llm = LLM("minicoder", speculative_config={"method": "spire"})'
    assert 'LLM("some/minicoder"' in _loading(replace(there, drafters_for="some/minicoder"), target, "spire")
    assert 'LLM("minicoder"' in _loading(replace(made, drafters_for="minicoder"), target, "spire")


def test_an_interrupted_export_of_a_drafter_leaves_the_old_files(made, tmp_path, monkeypatch):
    to = tmp_path / "minicoder-heads"
    shutil.copytree(made.export_to / to.name, to)
    for file in to.iterdir():
        file.write_text("old")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("minillm.speculative.trained_drafter.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stages(replace(made, export_to=tmp_path), ["heads"])
    assert {file.read_text() for file in to.iterdir()} == {"old"}
    assert [file.name for file in tmp_path.iterdir()] == [to.name]
    run_stages(replace(made, export_to=tmp_path), ["heads"])
    assert b"old" not in {file.read_bytes() for file in to.iterdir()}


def test_an_export_that_is_interrupted_between_two_files_leaves_no_drafter(made, tmp_path, monkeypatch):
    """The old `config.json` would say that the new weights are for the old target."""
    to, move, moved = tmp_path / "minicoder-heads", Path.replace, []
    shutil.copytree(made.export_to / to.name, to)

    def interrupted(file, target):
        if target.parent == to:
            if moved:
                raise KeyboardInterrupt
            moved.append(target.name)
        return move(file, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stages(replace(made, export_to=tmp_path), ["heads"])
    assert len(moved) == 1
    with pytest.raises(CheckpointError, match=r"cannot read config\.json"):
        LLM(
            str(made.export_to / "minicoder"),
            enforce_eager=True,
            speculative_config={"method": "heads", "model": str(to)},
        )


def test_drafters_can_be_trained_for_another_checkpoint(made, tmp_path):
    other = replace(
        made, drafters_for=str(made.export_to / "minicoder-draft"), drafters=dict.fromkeys(TRAINED, recipe(1))
    )
    run_stages(other, ["prompt_tokens"])
    stored = json.loads((made.export_to / "minicoder-draft-prompt_tokens" / "config.json").read_text())
    assert stored["target"] == "minicoder-draft"
    assert (made.folder / "text-minicoder-draft" / "passes").exists()
    assert (
        stored["target_fingerprint"]
        != json.loads((made.export_to / "minicoder-prompt_tokens" / "config.json").read_text())["target_fingerprint"]
    )


@pytest.mark.parametrize("key", ["target", "tokens"])
def test_the_acceptance_of_other_weights_is_measured_anew(made, tmp_path, key):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "heads" / "acceptance.json"
    kept = json.loads(file.read_text())
    assert kept["inputs"].pop(key)
    kept["inputs"][key], kept["acceptance"] = 7, {}
    file.write_text(json.dumps(kept))
    run_stages(replace(made, folder=tmp_path, export_to=tmp_path / "weights"), ["heads"])
    found, expected = (json.loads((folder / "heads" / file.name).read_text()) for folder in (tmp_path, made.folder))
    assert found == expected


@pytest.mark.parametrize(("changed", "folder"), [("text-m/inputs.json", "prompt_tokens-m"), ("no file", "text-m")])
def test_a_target_with_the_same_norms_is_another_target(made, tmp_path, changed, folder):
    """Such as a fine-tune with merged LoRA. `changed`: what is removed to get further."""
    shutil.copytree(made.folder, tmp_path / "runs")
    shutil.copytree(made.export_to / "minicoder", tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    here = replace(made, folder=tmp_path / "runs", export_to=tmp_path / "weights", drafters_for=str(tmp_path / "m"))
    run_stages(here, ["prompt_tokens"])
    tensors = load_file(weights)
    tensors["model.layers.1.self_attn.v_proj.weight"] += 0.1
    save_file(tensors, weights)
    (tmp_path / "runs" / changed).unlink(missing_ok=True)
    if changed != "no file":
        shutil.rmtree(tmp_path / "runs" / "text-m" / "continuations")
    with pytest.raises(TrainingError, match=rf"{folder} was started with .*; remove it to start again"):
        run_stages(here, ["prompt_tokens"])


def test_a_target_with_the_same_norms_is_evaluated_anew(made, tmp_path, monkeypatch):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    lerp = torch.lerp
    monkeypatch.setattr("minillm.training.pair.torch.lerp", lambda a, b, w: lerp(a, b, 9.0 if a.ndim == 2 else w))
    run_stages(replace(made, folder=tmp_path, export_to=tmp_path / "weights"), ["export"])
    kept = [json.loads((folder / "evaluation.json").read_text())["inputs"] for folder in (made.folder, tmp_path)]
    assert kept[0]["target"] != kept[1]["target"]


def test_a_drafter_is_not_trained_further_for_another_target(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "heads" / "inputs.json").write_text(json.dumps({"target": "of another day"}))
    with pytest.raises(TrainingError, match=r"of another day.*remove it to start again"):
        run_stages(replace(made, folder=tmp_path), ["heads"])


def test_done_stages_are_skipped(made):
    states = {
        stage: (made.folder / stage / "state.pt").stat().st_mtime_ns
        for stage in ("target", "decay", "unlikelihood", "draft", "distill")
    }
    weights = (made.export_to / "minicoder" / "model.safetensors").read_bytes()
    run_stages(made, list(STAGES))
    assert states == {stage: (made.folder / stage / "state.pt").stat().st_mtime_ns for stage in states}
    assert (made.export_to / "minicoder" / "model.safetensors").read_bytes() == weights


def test_draft_is_not_distilled_further_from_another_target(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    other = replace(made, folder=tmp_path)
    state = torch.load(tmp_path / "unlikelihood" / "state.pt")
    torch.save({**state, "tokens_seen": state["tokens_seen"] + 512}, tmp_path / "unlikelihood" / "state.pt")
    with pytest.raises(TrainingError, match="remove it to start again"):
        run_stages(other, ["distill"])


def weights_of_another_run(state: Path) -> None:
    """Change the weights of a state, which has seen as many tokens as before."""
    found = torch.load(state)
    found["model"]["norm.weight"] += 1
    torch.save(found, state)


@pytest.mark.parametrize(
    ("changed", "stage"),
    [
        ("target", "decay"),
        ("decay", "unlikelihood"),
        ("decay", "distill"),
        ("decay", "export"),
        ("unlikelihood", "distill"),
        ("draft", "distill"),
    ],
)
def test_a_stage_does_not_go_on_from_other_weights(made, tmp_path, changed, stage):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    weights_of_another_run(tmp_path / changed / "state.pt")
    if stage == "decay":
        (tmp_path / "decay" / "state.pt").unlink()  # interrupted before its first step
    with pytest.raises(TrainingError, match=rf"was started with .*{changed}_weights.*remove it to start again"):
        run_stages(replace(made, folder=tmp_path), [stage])


def test_other_weights_are_evaluated_anew(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    weights_of_another_run(tmp_path / "distill" / "state.pt")
    run_stages(replace(made, folder=tmp_path, export_to=tmp_path / "weights"), ["export"])
    kept = [
        json.loads((folder / "evaluation.json").read_text())["evaluations"]["distilled"]["draft_bits_per_byte"]
        for folder in (made.folder, tmp_path)
    ]
    assert kept[0] != kept[1]


@pytest.mark.parametrize("stage", ["target", "decay", "unlikelihood", "draft", "distill", "export", "heads"])
@pytest.mark.parametrize("file", ["tokenizer.json", "corpus.json"])
def test_a_run_does_not_go_on_with_another_corpus(made, tmp_path, stage, file):
    """Its tokens would have another meaning, or held-out files were trained on."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    other = tmp_path / "corpus" / file
    other.write_text(other.read_text() + "\n")
    with pytest.raises(
        TrainingError, match=rf"was started with .*{file}.*, or train with the new one in another --folder"
    ):
        run_stages(replace(made, folder=tmp_path, export_to=tmp_path / "weights"), [stage])


def test_two_processes_do_not_train_in_one_folder(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    longer = replace(made, folder=tmp_path, target_recipe=replace(recipe(31), decay_from=1.0))
    code = (
        "import sys, time; from pathlib import Path; from minillm.training.state_files import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "target")], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"locked\n"
        before = (tmp_path / "target" / "state.pt").read_bytes()
        (tmp_path / "target" / "state.pt.1.new").touch()
        with pytest.raises(TrainingError, match=rf"^process {other.pid} trains in .*target; wait for its end"):
            run_stages(longer, ["target"])
        assert (tmp_path / "target" / "state.pt").read_bytes() == before
    finally:
        other.kill()
        other.communicate()
    run_stages(longer, ["target"])  # a killed process has left no lock
    assert not list(tmp_path.glob("target/*.new")), "nor a part of a state"
    assert RunRecord.load(tmp_path / "target").tokens == 31 * 256


@pytest.mark.parametrize("steps", [35, 40])
def test_what_another_process_trained_before_the_lock_was_free_is_not_trained_again(made, tmp_path, capsys, steps):
    """The trainer reads the saved state before its run has the lock."""
    shutil.copytree(made.folder / "target", tmp_path / "target")
    early, other = (
        Trainer(made.new_model("target"), made.training_text(), replace(recipe(n), decay_from=1.0), tmp_path / "target")
        for n in (40, steps)
    )
    run_to_the_end("target", other)
    state, log = ((tmp_path / "target" / name).read_bytes() for name in ("state.pt", "log.jsonl"))
    capsys.readouterr()
    run_to_the_end("target", early)
    assert early.step == 40 and len((tmp_path / "target" / "log.jsonl").read_text().splitlines()) == 40
    if steps == 40:
        assert (tmp_path / "target" / "state.pt").read_bytes() == state
        assert (tmp_path / "target" / "log.jsonl").read_bytes() == log
        assert "target: done (10,240 tokens" in capsys.readouterr().out


def test_a_session_that_ends_before_its_first_step_logs_nothing(made, tmp_path, monkeypatch):
    shutil.copytree(made.folder / "target", tmp_path / "target")
    trainer = Trainer(made.new_model("target"), made.training_text(), recipe(40), tmp_path / "target")
    log = (tmp_path / "target" / "log.jsonl").read_bytes()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert (tmp_path / "target" / "log.jsonl").read_bytes() == log


def test_a_run_that_lacks_its_recipes_is_named(made, tmp_path):
    shutil.copytree(made.folder / "draft", tmp_path, dirs_exist_ok=True)
    (tmp_path / "recipes.json").unlink()
    with pytest.raises(TrainingError, match=r"recipes\.json is missing; restore it, or remove .* to start again"):
        RunRecord.load(tmp_path)


def test_stable_run_goes_on_after_a_branch_which_stays_as_it_is(made, tmp_path, capsys):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    longer = replace(made, folder=tmp_path, target_recipe=replace(recipe(40), decay_from=1.0))
    run_stages(longer, ["target"])
    assert RunRecord.load(tmp_path / "target").tokens == 40 * 256
    state = (tmp_path / "decay" / "state.pt").read_bytes()
    capsys.readouterr()
    run_stages(longer, ["decay"])
    assert "from the stable run at 7,680 tokens; the stable run has 10,240 now" in capsys.readouterr().out
    assert (tmp_path / "decay" / "state.pt").read_bytes() == state


def test_an_unfinished_branch_does_not_go_on_from_a_later_state(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "decay" / "inputs.json").write_text(json.dumps({"target": 31_000_000}))
    with pytest.raises(TrainingError, match="remove it to start again"):
        run_stages(replace(made, folder=tmp_path), ["decay"])


def test_drafters_do_not_learn_from_texts_of_an_earlier_target(made, tmp_path):
    """The target has unlearned repetition once more; its old continuations are still there."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    again = replace(made, folder=tmp_path)
    for folder in ("heads", "unlikelihood"):
        shutil.rmtree(tmp_path / folder)
    longer = replace(again, unlikelihood_recipe=replace(made.unlikelihood_recipe, tokens=4 * 512))
    run_stages(longer, ["unlikelihood"])
    with pytest.raises(TrainingError, match=r"continuations was started with .*remove it to start again"):
        run_stages(longer, ["heads"])


def test_two_targets_of_one_name_do_not_share_their_text(made, tmp_path):
    shutil.copytree(made.folder, tmp_path / "runs")
    for owner in "ab":
        shutil.copytree(made.export_to / f"minicoder{'-draft' * (owner == 'b')}", tmp_path / owner / "m")
    here = replace(made, folder=tmp_path / "runs", export_to=tmp_path / "weights")
    one, other = (
        replace(here, drafters_for=str(tmp_path / owner / "m"), drafters=dict.fromkeys(TRAINED, recipe(1)))
        for owner in "ab"
    )
    run_stages(one, ["prompt_tokens"])
    with pytest.raises(TrainingError, match=r"text-m was started with .*remove it to start again"):
        run_stages(other, ["heads"])
    tokenizer = tmp_path / "a" / "m" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(TrainingError, match=r"text-m was started with \{'tokenizer': .*remove it to start again"):
        run_stages(one, ["heads"])


def test_a_run_does_not_go_on_with_another_budget(made, tmp_path):
    """Its learning rate would jump from zero to a higher one."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(TrainingError, match=r"draft was started with a budget of 2,560 tokens, now it is 5,120 tokens"):
        run_stages(replace(made, folder=tmp_path, draft_recipe=recipe(20)), ["draft"])
    run_stages(replace(made, folder=tmp_path, draft_recipe=recipe(5)), ["draft"])  # is done by this budget, too


@pytest.mark.parametrize(
    ("stage", "message"),
    [("target", "stage `corpus`"), ("distill", "stage `corpus`"), ("export", "stage `unlikelihood`")],
)
def test_missing_input_names_the_stage_that_makes_it(tmp_path, stage, message):
    with pytest.raises(TrainingError, match=message):
        train(folder=tmp_path, stages=[stage], export_to=tmp_path / "weights")


def test_unfinished_target_is_not_distilled_from(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(TrainingError, match=r"`unlikelihood` has run .* finish it first"):
        run_stages(replace(made, folder=tmp_path, unlikelihood_recipe=recipe(99)), ["distill"])
    (tmp_path / "decay" / "inputs.json").write_text(json.dumps({"target": 31_000_000}))
    with pytest.raises(TrainingError, match=r"`decay` has run .* finish it first"):
        run_stages(replace(made, folder=tmp_path), ["unlikelihood"])


def test_a_drafter_that_fails_does_not_stop_the_others(made, monkeypatch):
    ran = []

    def train_drafter(pair, method, target, batches):
        ran.append(method)
        if method != "prompt_tokens":
            raise TrainingError("the loss became nan at step 2")

    monkeypatch.setattr("minillm.training.drafter_stages.train_drafter", train_drafter)
    with pytest.raises(TrainingError, match=r"^heads: the loss became nan at step 2; spire: the loss"):
        run_stages(made, ["spire", "heads", "prompt_tokens"])
    assert ran == ["heads", "prompt_tokens", "spire"]


def test_another_stage_that_fails_stops_those_after_it(monkeypatch):
    def fails(pair):
        raise TrainingError("the loss became nan at step 2")

    ran = []
    monkeypatch.setitem(PAIR_STAGES, "draft", fails)
    monkeypatch.setattr("minillm.training.stages.train_drafters", lambda pair, methods: ran.extend(methods))
    with pytest.raises(TrainingError, match=r"^the loss became nan at step 2$"):
        run_stages(None, ["draft", "prompt_tokens"])
    assert ran == []


def test_what_all_drafters_lack_is_said_once(tmp_path, capsys):
    with pytest.raises(TrainingError, match=r"^there is no corpus in \S+; run the stage `corpus` first$"):
        train(folder=tmp_path, stages=TRAINED, export_to=tmp_path / "weights")
    assert "no corpus" not in capsys.readouterr().out


def test_unknown_stage_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="no such stage: finetune"):
        train(folder=tmp_path, stages=["finetune"])


def test_each_change_of_hardware_is_noted_once(tmp_path):
    two = Hardware("Some CPU", cores=2, threads=2, torch="2.9.9", python="3.11.1")
    one = replace(two, threads=1)
    for session in (two, two, one, one, two):
        session.append_to(tmp_path)
    assert Hardware.load(tmp_path) == (two, one, two)


def test_steps_lost_in_a_crash_count_once(made, tmp_path):
    shutil.copytree(made.folder / "draft", tmp_path, dirs_exist_ok=True)
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines()
    # The crash came at step 10, the last saved state was step 6, and the new session is at step 8.
    log.write_text("\n".join([*lines, *lines[6:8]]) + "\n")
    record = RunRecord.load(tmp_path)
    assert [row.step for row in record.log] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert record.tokens == 8 * 256


@pytest.mark.parametrize("by", ["SIGINT", "SIGTERM"])
def test_command_line_reaches_train_and_reports_an_interrupt(tmp_path, monkeypatch, capsys, by):
    seen, before = {}, signal.getsignal(signal.SIGTERM)

    def stopped(**options):
        seen.update(options)
        if by == "SIGINT":  # not raised: a process in the background may ignore it
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("minillm.training.run.train", stopped)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--folder", str(tmp_path), "--stages", "distill", "export", "--distill-minutes", "3.5"])
    assert run_from_args(args) == 130
    assert seen["stages"] == ["distill", "export"] and seen["distill_minutes"] == 3.5 and seen["target_minutes"] is None
    assert f"the same command continues from what is saved in {tmp_path}" in capsys.readouterr().out
    args.begin_with = tmp_path / "packed"
    assert run_from_args(args) == 130
    assert "stopped; the same command continues" in capsys.readouterr().out, "it was not unpacked yet"
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "state.pt").touch()
    assert run_from_args(args) == 130
    assert "the same command without --begin-with continues" in capsys.readouterr().out, "it does not replace a run"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--target-minutes", "0"], "--target-minutes: '0' must be a finite number above 0"),
        (["--minutes", "nan"], "--minutes: 'nan' must be a finite number above 0"),
        (["--minutes", "ten"], "--minutes: 'ten' must be a finite number above 0"),
        (["--minutes", "inf"], "--minutes: 'inf' must be a finite number above 0"),
        (["--ablation-tokens", "inf"], "--ablation-tokens: 'inf' must be a finite number above 0"),
        (["--threads", "0"], "--threads: 0 must be from 1 to"),
        (["--threads", "two"], "--threads: 'two' must be an integer from 1 to"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_its_limits(capsys, option, message):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(option)
    assert message in capsys.readouterr().err


def test_stable_run_that_travelled_goes_on_elsewhere(made, tmp_path):
    pack_run(made.folder, tmp_path / "packed")
    unpack_run(tmp_path / "packed", tmp_path / "runs")
    shutil.copytree(made.folder / "corpus", tmp_path / "runs" / "corpus", dirs_exist_ok=True)
    here = replace(made, folder=tmp_path / "runs", target_recipe=replace(recipe(40), decay_from=1.0))
    recipe_before = Trainer(made.new_model("target"), made.training_text(), made.target_recipe, made.folder / "target")
    arrived = Trainer(here.new_model("target"), here.training_text(), here.target_recipe, here.folder / "target")
    assert (arrived.step, arrived.tokens_seen) == (recipe_before.step, recipe_before.tokens_seen) == (30, 30 * 256)
    held_out = made.held_out()
    before, after = (bits_per_byte(t.model, held_out, held_out.tokens.size, 64) for t in (recipe_before, arrived))
    assert after == pytest.approx(before, rel=0.01), "rounding to 8 bits is hardly seen"
    run_stages(here, ["target", "decay"])
    assert RunRecord.load(tmp_path / "runs" / "target").tokens == 40 * 256


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the source distribution has no checkpoints")
def test_the_stable_run_in_the_repository_goes_on(tmp_path):
    unpack_run(CHECKPOINT, tmp_path)
    record = RunRecord.load(tmp_path / "target")
    trainer = Trainer(new_model(TARGET), None, replace(recipe(1), decay_from=1.0), tmp_path / "target")
    assert (trainer.step, trainer.tokens_seen) == (34_111, record.tokens) == (record.log[-1].step, 419_155_968)
    assert record.recipes[0].recipe.keys() == recipe(1).without_budget().keys()


def test_a_run_that_goes_on_by_another_recipe_says_so(made, tmp_path):
    """In its record, in the checkpoint that travels, and in the card."""
    pack_run(made.folder, tmp_path / "packed")
    unpack_run(tmp_path / "packed", tmp_path / "runs")
    shutil.copytree(made.folder / "corpus", tmp_path / "runs" / "corpus", dirs_exist_ok=True)
    stable = replace(recipe(40), decay_from=1.0, weight_decay=0.1)
    here = replace(made, folder=tmp_path / "runs", target_recipe=stable)
    run_stages(here, ["target"])
    run_stages(replace(here, target_recipe=replace(stable, tokens=50 * 256)), ["target"])  # only another budget
    record = RunRecord.load(here.folder / "target")
    assert [change.tokens for change in record.recipes] == [0, 30 * 256]
    assert record.recipe_changes() == [{"after_tokens": 30 * 256, "weight_decay": 0.1}]
    facts = json.loads((made.export_to / "minicoder" / "training.json").read_text())
    assert facts["runs"]["pretraining"]["recipe_changes"] == []
    facts["runs"]["pretraining"] |= record.summary()
    assert "no decay; after 7,680 tokens weight decay 0.1\n" in card(facts)
    facts["runs"]["pretraining"]["recipe"]["weight_decay"] = 0.2
    assert "no decay, weight decay 0.2 (Muon); after 7,680 tokens weight decay 0.1\n" in card(facts)


def test_a_run_that_travelled_keeps_its_shares_of_a_total_of_minutes(made, tmp_path, monkeypatch):
    pairs, packed = [], tmp_path / "packed"
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pairs.append(pair))
    for name in ("corpus", "target"):
        shutil.copytree(made.folder / name, tmp_path / "there" / name)
    (tmp_path / "there" / "shares.json").write_text('"cuda"')
    pack_run(tmp_path / "there", packed)
    train(tmp_path / "here", minutes=60, device="cpu", begin_with=packed)
    assert pairs[0].target_recipe.minutes == 60 * SHARES["cuda"]["target"]
    pack_run(made.folder, packed)
    assert not (packed / "shares.json").exists(), "that of another run does not stay"


@pytest.mark.parametrize("name", ["target/state.pt", "target/recipes.json", "corpus/tokenizer.json"])
def test_a_run_that_lacks_a_file_is_not_packed(made, tmp_path, name):
    shutil.copytree(made.folder, tmp_path / "runs")
    (tmp_path / "runs" / name).unlink()
    with pytest.raises(TrainingError, match=f"{name} is missing.*run the stage"):
        pack_run(tmp_path / "runs", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_packing_leaves_the_signals_as_they_are(made, tmp_path):
    parser, before = argparse.ArgumentParser(), signal.getsignal(signal.SIGTERM)
    add_arguments(parser)
    assert run_from_args(parser.parse_args(["--folder", str(made.folder), "--pack", str(tmp_path / "packed")])) == 0
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "--threads 0 must be at least 1"),
        ({"device": "tpu"}, "--device tpu is not supported; there are cpu and cuda"),
        ({"device": "cuda"}, "--device cuda needs a GPU"),
    ],
)
def test_an_option_that_this_machine_cannot_have_is_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TrainingError, match=message):
        train(folder=tmp_path, stages=["corpus"], **options)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(TrainingError, match="--device cuda:1 is not there; the last GPU of this machine is cuda:0"):
        train(folder=tmp_path, stages=["corpus"], device="cuda:1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"minutes": 0}, "minutes=0"),
        ({"target_minutes": -1.0}, "target_minutes=-1.0"),
        ({"draft_minutes": math.inf}, "draft_minutes=inf"),
        ({"distill_minutes": math.nan}, "distill_minutes=nan"),
        ({"drafter_minutes": {"heads": 0.0}}, "heads_minutes=0.0"),
        ({"ablation_tokens": math.inf}, "ablation_tokens=inf"),
    ],
)
def test_a_budget_without_an_end_or_of_nothing_is_refused(tmp_path, options, named):
    with pytest.raises(TrainingError, match=f"^{named} must be a finite number above 0$"):
        train(folder=tmp_path, stages=["corpus"], **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut off", "of something else"])
def test_a_damaged_checkpoint_leaves_nothing_behind(made, tmp_path, damage):
    pack_run(made.folder, tmp_path / "packed")
    weights = tmp_path / "packed" / "stable.safetensors"
    if damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        save_file({"x": torch.zeros(2)}, weights)
    with pytest.raises(TrainingError, match=r"stable.safetensors is cut off or no checkpoint"):
        unpack_run(tmp_path / "packed", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_state_is_named(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    here = replace(made, folder=tmp_path)
    state = tmp_path / "unlikelihood" / "state.pt"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    for stages in (["unlikelihood"], ["distill"], ["heads"]):
        with pytest.raises(TrainingError, match=r"unlikelihood/state.pt is cut off or no state"):
            run_stages(here, stages)
    torch.save({"model": {}}, state)
    with pytest.raises(TrainingError, match=r"is no state of a run: it has no optimizers"):
        run_stages(here, ["distill"])
    shutil.copy(tmp_path / "draft" / "state.pt", state)
    with pytest.raises(TrainingError, match=r"state of another model"):
        run_stages(replace(here, unlikelihood_recipe=recipe(1)), ["distill"])


def test_a_log_that_was_cut_off_in_a_crash_is_read_to_its_last_step(made, tmp_path):
    shutil.copytree(made.folder / "draft", tmp_path, dirs_exist_ok=True)
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text()[:-9])
    assert [row.step for row in RunRecord.load(tmp_path).log] == list(range(1, 10))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], "{\n", *lines[2:9]]))
    with pytest.raises(TrainingError, match=r"line 2 of .*log.jsonl is no step of a run: '{'"):
        RunRecord.load(tmp_path)
    (tmp_path / "hardware.json").write_text("[")
    log.write_text(lines[0])
    with pytest.raises(TrainingError, match=r"hardware.json is cut off or no JSON"):
        RunRecord.load(tmp_path)


def test_a_run_whose_log_was_cut_off_goes_on(made, tmp_path):
    shutil.copytree(made.folder / "target", tmp_path / "target")
    log = tmp_path / "target" / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 31, "tok')
    longer = replace(recipe(40), decay_from=1.0)
    Trainer(made.new_model("target"), made.training_text(), longer, tmp_path / "target").run()
    assert [row.step for row in RunRecord.load(tmp_path / "target").log] == list(range(1, 41))


def test_steps_behind_the_saved_state_do_not_count(made, tmp_path):
    """A killed process leaves them in the log. A branch begins with the state, and its budget is a share of that."""
    shutil.copytree(made.folder / "target", tmp_path / "target")
    shutil.copytree(made.corpus, tmp_path / "corpus")
    log = tmp_path / "target" / "log.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 60, "tokens": 60 * 256, "seconds": 9, "loss": 1.0}) + "\n")
    assert RunRecord.load(tmp_path / "target").tokens == 30 * 256
    run_stages(replace(made, folder=tmp_path), ["decay"])
    assert json.loads((tmp_path / "decay" / "inputs.json").read_text())["target"] == 30 * 256


def test_damaged_inputs_are_named(made, tmp_path):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "decay" / "inputs.json").write_text('{"target"')
    with pytest.raises(TrainingError, match=r"decay/inputs.json is cut off or no JSON"):
        run_stages(replace(made, folder=tmp_path), ["unlikelihood"])


def test_checkpoint_does_not_go_with_a_corpus_of_another_tokenizer(made, tmp_path):
    pack_run(made.folder, tmp_path / "packed")
    (tmp_path / "runs" / "corpus").mkdir(parents=True)
    (tmp_path / "runs" / "corpus" / "tokenizer.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"tokens of another tokenizer than .*packed; name another folder"):
        unpack_run(tmp_path / "packed", tmp_path / "runs")
    assert not (tmp_path / "runs" / "target").exists()


def test_checkpoint_never_replaces_a_run(made, tmp_path):
    pack_run(made.folder, tmp_path / "packed")
    with pytest.raises(TrainingError, match="has a run already"):
        unpack_run(tmp_path / "packed", made.folder)
    with pytest.raises(TrainingError, match="has no stable"):
        unpack_run(tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("device", DEVICES)
def test_all_stages_fit_into_a_total_of_minutes(device) -> None:
    """A twentieth of the time is left for the text that the target writes."""
    shares = SHARES[device]
    assert set(shares) | {"corpus", "decay", "export", *TRAINED} == set(STAGES)
    own = sum(shares.values()) + shares["target"] * DECAY_SHARE + len(TRAINED) * DRAFTER_SHARE
    assert own < 0.95


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:1", "cuda")])
def test_minutes_are_shared_among_all_stages(tmp_path, monkeypatch, device, kind):
    pairs, shares = [], SHARES[kind]
    monkeypatch.setattr("minillm.training.run._check_device", lambda device: None)
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pairs.append(pair))
    train(tmp_path, minutes=10, device=device)
    train(tmp_path, device=device)
    shared, default = pairs
    assert {stage: shared.recipe(stage).minutes for stage in shares} == {s: 10 * shares[s] for s in shares}
    assert {shared.recipe(method).minutes for method in TRAINED} == {10 * DRAFTER_SHARE}
    assert default.unlikelihood_recipe == unlikelihood_recipe()


def test_the_first_stage_that_trains_records_the_shares(made, tmp_path):
    shutil.copytree(made.corpus, tmp_path / "corpus")
    here = replace(made, folder=tmp_path, shares_of="cuda", draft_recipe=recipe(1))
    run_stages(here, ["corpus"])
    assert not (tmp_path / "shares.json").exists()
    run_stages(here, ["draft"])
    assert json.loads((tmp_path / "shares.json").read_text()) == "cuda"


def test_a_refused_total_of_minutes_leaves_no_folder(tmp_path):
    with pytest.raises(TrainingError, match="run the stage `corpus` first"):
        train(tmp_path / "runs", stages=["target"], minutes=3)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--minutes 3 --target-minutes 400", "--minutes and --target-minutes"),
        ("--minutes 3 --prompt-tokens-minutes 4", "--minutes and --prompt-tokens-minutes"),
        ("--pack {0}/packed --begin-with {0}/other", "--pack and --begin-with"),
        ("--pack {0}/packed --stages target", "--pack and --stages"),
        ("--pack {0}/packed --ablations spire", "--pack and --ablations"),
        ("--pack {0}/packed --draft-minutes 3", "--pack and --draft-minutes"),
        ("--ablations spire --stages spire", "--ablations and --stages"),
        ("--ablations spire --minutes 3", "--ablations and --minutes"),
        ("--ablations spire --spire-minutes 3", "--ablations and --spire-minutes"),
        ("--ablations spire --export-to {0}/models", "--ablations and --export-to"),
    ],
)
def test_options_of_which_one_would_be_ignored_are_refused(tmp_path, monkeypatch, arguments, named):
    for name in ("run_stages", "print_ablations", "pack_run"):
        monkeypatch.setattr(f"minillm.training.run.{name}", lambda *given, **options: pytest.fail("it ran"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--folder", str(tmp_path / "runs"), *arguments.format(tmp_path).split()])
    with pytest.raises(TrainingError, match=f"^{named} exclude each other"):
        run_from_args(args)
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_ablations_without_ablations_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("minillm.training.run.run_stages", lambda *given, **options: pytest.fail("it ran"))
    with pytest.raises(TrainingError, match="--ablation-tokens is for --ablations"):
        train(folder=tmp_path, ablation_tokens=2e6)


def test_by_default_the_models_are_written_beside_the_run(tmp_path, monkeypatch):
    """A call without options must not replace the bundled models."""
    pairs = []
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pairs.append(pair))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run_from_args(parser.parse_args(["--folder", str(tmp_path)])) == 0
    train(tmp_path, export_to=tmp_path / "mine")
    assert [pair.export_to for pair in pairs] == [tmp_path / "models", tmp_path / "mine"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_written_to_is_refused_before_the_first_stage(tmp_path, monkeypatch, place):
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"--export-to \S+: nothing can be written there \(Not a directory\)"):
        train(tmp_path / "runs", export_to=tmp_path / place)
    assert not (tmp_path / "runs").exists()


def test_a_target_that_is_missing_or_has_no_tokenizer_is_refused_before_the_first_stage(made, tmp_path, monkeypatch):
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pytest.fail("it ran"))
    with pytest.raises(CheckpointError, match="no model 'nobody'"):
        train(tmp_path / "runs", target="nobody")
    shutil.copytree(made.export_to / "minicoder", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(TrainingError, match=r"--target \S+ needs a `tokenizer.json` in"):
        train(tmp_path / "runs", target=str(tmp_path / "m"))
    with pytest.raises(TrainingError, match=r"--target \S+ needs a `tokenizer.json` in"):
        run_stages(replace(made, drafters_for=str(tmp_path / "m")), ["heads"])
    assert not (tmp_path / "runs").exists()


def test_a_run_keeps_the_shares_of_the_device_that_it_began_on(made, tmp_path, monkeypatch):
    """With others, the same total would be another budget, and a finished stage would count as unfinished."""
    pairs = []
    monkeypatch.setattr("minillm.training.run._check_device", lambda device: None)
    monkeypatch.setattr("minillm.training.run.run_stages", lambda pair, stages: pairs.append(pair))
    train(tmp_path, minutes=60, device="cpu")  # nothing is trained, as with the stage `corpus`
    assert list(tmp_path.iterdir()) == [], "nor is anything recorded"
    train(tmp_path, minutes=60, device="cuda")
    (tmp_path / "shares.json").write_text(json.dumps(pairs[1].shares_of))  # as its first stage does
    state = torch.load(made.folder / "distill" / "state.pt")
    (tmp_path / "distill").mkdir()
    minutes = pairs[1].recipe("distill").minutes
    torch.save({**state, "seconds": 60 * minutes + 1}, tmp_path / "distill" / "state.pt")
    train(tmp_path, minutes=60, device="cpu")
    found = [[pair.recipe(stage).minutes for stage in SHARES["cpu"]] for pair in pairs]
    assert found == [[60 * share for share in SHARES[kind].values()] for kind in ("cpu", "cuda", "cuda")]
    assert pairs[2].is_finished("distill")
    (tmp_path / "shares.json").write_text('"tpu"')
    with pytest.raises(TrainingError, match=r"shares\.json has 'tpu'; it must name the first device, cpu or cuda"):
        train(tmp_path, minutes=60)
