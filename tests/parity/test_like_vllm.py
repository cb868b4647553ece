"""minillm and vLLM given one script: nothing differs but what is listed here, with the reason.

`script.py` is run on minillm here; what vLLM answered is kept in `vllm_answers.json` (see `record.py`). Both ran the
bundled model in float32, so tokens, texts and reasons are compared exactly, log-probabilities to `TOLERANCE`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minillm import LLM, EngineArgs, SamplingParams
from minillm.bench.vllm_peer import INTERPRETER
from minillm.errors import ConfigError, UnknownOptionError
from tests.parity import record, script

TOLERANCE = 1e-4
"""Of a log-probability. The two engines add in another order, and five decimals are told."""
MARGIN = 5e-3
"""How much likelier every greedy token is than the next one: far more than rounding moves."""
NOTHING = "(nothing)"


class Difference(NamedTuple):
    """One place where two answers differ: the keys on the way there, and what each says."""

    place: str
    ours: Any
    theirs: Any


class Known(NamedTuple):
    """Why the engines differ in the places that match `places`, as long as what they say there is `as_told`."""

    places: str
    why: str
    as_told: Callable[[Any, Any], bool]


def says(value: Any) -> Callable[[Any, Any], bool]:
    """That minillm says this and nothing else."""
    return lambda ours, theirs: ours == value


def they_say(value: Any) -> Callable[[Any, Any], bool]:
    """That vLLM says this."""
    return lambda ours, theirs: theirs == value


def shows_a_byte(ours: Any, theirs: Any) -> bool:
    """That minillm says something like `\\xc3`, which is how it shows a byte."""
    return "\\x" in str(ours)


def half_a_character(ours: Any, theirs: Any) -> bool:
    """That minillm shows half a character, which vLLM drops, or behind which it repeats the prompt."""
    return "\ufffd" in ours and theirs.endswith(ours.replace("\ufffd", ""))


KNOWN = [
    Known("signatures/*/gpu_memory_utilization", "a tenth is left to others", says(0.9)),
    Known("signatures/EngineArgs/model", "no model is a sensible default", says("required")),
    Known("signatures/EngineArgs/max_num_seqs", "vLLM chooses by the device; one number is easier", says(64)),
    Known("signatures/EngineArgs/max_num_batched_tokens", "as max_num_seqs", says(2048)),
    Known("signatures/EngineArgs/enable_chunked_prefill", "vLLM chooses by the model", says(True)),
    Known("signatures/SamplingParams()/stop*", "params stay what the user wrote; vLLM makes lists", says(None)),
    Known("signatures/SamplingParams()/bad_words", "as above", says(None)),
    Known("signatures/SamplingParams, normalised/stop", "as above", says("a")),
    Known("signatures/SamplingParams, normalised/stop_token_ids", "as above; once or twice is the same", says([5, 5])),
    Known("signatures/SamplingParams, normalised/top_k", "as above; it changes nothing when greedy", says(7)),
    Known("signatures/SamplingParams, normalised/top_p", "as above; it changes nothing when greedy", says(0.5)),
    Known("signatures/SamplingParams, normalised/temperature", "vLLM makes 0.01 of 0 < t < 0.01", says(0.005)),
    Known("objects/SamplingParams/stop*", "as in the signatures: None stays None", says("NoneType")),
    Known("objects/SamplingParams/bad_words", "as above", says("NoneType")),
    Known("objects/SamplingParams/all_stop_token_ids", "params are frozen", says("frozenset")),
    Known("objects/RequestOutput/metrics", "minillm always counts, vLLM if log stats are on", says("RequestMetrics")),
    Known("refused/assigning to a field/refused", "params are frozen: a running request holds them", says(True)),
    Known("refused/SamplingParams/n 2 and nearly greedy/refused", "1e-7 is greedy; vLLM makes it 0.01", says(True)),
    Known("refused/SamplingParams/logprobs True/refused", "a number is meant; vLLM takes True for 1", says(True)),
    Known("refused/generate/prompt and max_tokens over the context/refused", "vLLM just stops earlier", says(True)),
    Known("refused/generate/prompt with a key that nobody has/refused", "vLLM overlooks a misspelt key", says(True)),
    Known("refused/generate/*logprobs *", "vLLM's max_logprobs=20 protects a server; nobody serves here", says(False)),
    Known("refused/generate/*a list of ids/refused", "one way to give ids: {'prompt_token_ids': [...]}", says(True)),
    Known("refused/chat/a variable that is an argument/refused", "vLLM's renderer takes it as its own", says(True)),
    Known("*/prompt", "a prompt of ids is decoded, to be read; vLLM leaves None", they_say(None)),
    Known("cases/no text*/decoded_token/*", "it is no text of the output; vLLM leaves None there too", they_say(None)),
    Known("*/decoded_token/*", "half a character shows its bytes; vLLM joins it to the ones before", shows_a_byte),
    Known("cut characters/*/text", "half a character reads U+FFFD, as in decoding all ids", half_a_character),
]
"""minillm means it this way. Whoever moves to vLLM meets these."""
SHARED_ONLY = ("signatures", "objects")
"""Sections where a name that one side lacks is no difference: those are the tests' below."""
NOT_COMPARED = ("class", "ValueError")
"""An exception's class: each engine has its own. minillm's are all ValueErrors, vLLM 0.32's are not."""

OWN_OPTIONS = {"device", "kv_cache_config", "num_kv_blocks", "ops", "block_pool_cls"}
"""Options of `LLM` that vLLM does not have."""
OWN_METHODS = {"engine", "fim_prompt", "max_model_len", "model", "stream", "submit", "trace"}
"""Of `LLM`."""
ABSENT_METHODS = {
    *("apply_model", "beam_search", "classify", "collective_rpc", "embed", "encode", "engine_class", "enqueue"),
    *("enqueue_chat", "finish_weight_update", "from_engine_args", "get_metrics", "get_weight_version"),
    *("get_world_size", "init_weight_transfer_engine", "release_kv_cache_memory", "reset_mm_cache", "score"),
    *("shutdown_weight_transfer_engine", "sleep", "start_draft_weight_update", "start_profile", "start_weight_update"),
    *("stop_profile", "update_weight_version", "update_weights", "wait_for_completion", "wake_up"),
}
"""Of vLLM's `LLM`. README.md names those that users ask for."""
REFUSED_FIELDS = {
    *("extra_args", "flat_logprobs", "logprob_token_ids"),
    *("output_text_buffer_length", "prompt_logprob_start", "prompt_logprob_token_ids"),
    *("repetition_detection", "routed_experts_prompt_start", "skip_clone", "skip_reading_prefix_cache"),
    *("spaces_between_special_tokens", "stream_interval", "structured_outputs", "thinking_token_budget"),
    *("trace_decode_token_ids", "watermarking"),
}
"""Fields of vLLM's SamplingParams that minillm does not have, and says so. README.md names those that users ask for."""
ABSENT = {
    "RequestOutput": {
        *("add", "ec_transfer_params", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"),
        *("lora_request", "num_cache_creation_tokens", "prompt_token_id_logprobs"),
    },
    "CompletionOutput": {
        *("lora_request", "routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"),
    },
    "Logprob": set(),
}
"""Fields of vLLM's outputs for what minillm does not do."""

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
THEIRS = record.load()
ABOUT = THEIRS.pop("about")
"""Which vLLM that was, in which type it computed with which weights, and how to ask it again."""


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What minillm answers; the script is the same file."""
    return script.Script("minillm", record.model()).answers()


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[Difference]:
    """Where two answers differ, and how."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        shared = place.startswith(SHARED_ONLY)
        for key in (k for k in {**theirs, **ours} if k not in NOT_COMPARED):
            if not shared or (key in ours and key in theirs):
                inside = f"{place}/{key}" if place else key
                yield from differences(ours.get(key, NOTHING), theirs.get(key, NOTHING), inside)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not abs(ours - theirs) <= TOLERANCE:
            yield Difference(place, ours, theirs)
    elif ours != theirs or type(ours) is not type(theirs):
        yield Difference(place, ours, theirs)


def explains(known: Known, difference: Difference) -> bool:
    """Whether a difference is one that is known, down to what is said."""
    return fnmatchcase(difference.place, known.places) and known.as_told(difference.ours, difference.theirs)


def test_the_record_says_where_it_is_from() -> None:
    assert ABOUT["engine"] == "vllm" and ABOUT["dtype"] == script.DTYPE
    assert ABOUT["version"] and ABOUT["torch"] and ABOUT["made by"] == record.COMMAND
    assert ABOUT["weights"] == record.weights(), f"the record is of other weights; make it again: {record.COMMAND}"


def parts() -> list[tuple[str, str]]:
    """Every section of the record with every key in it."""
    return [
        (section, key) for section, inside in THEIRS.items() for key in (inside if isinstance(inside, dict) else [""])
    ]


@pytest.mark.parametrize(("section", "key"), parts(), ids=lambda part: part or "all")
def test_minillm_says_what_vllm_says(ours: dict[str, Any], section: str, key: str) -> None:
    place = f"{section}/{key}" if key else section
    mine, theirs = (answers[section][key] if key else answers[section] for answers in (ours, THEIRS))
    found = [d for d in differences(mine, theirs, place) if not any(explains(known, d) for known in KNOWN)]
    assert not found, "\n".join(f"{d.place}: minillm {d.ours!r}, vLLM {d.theirs!r}" for d in found)


def test_every_difference_that_is_listed_is_one(ours: dict[str, Any]) -> None:
    """What has been put right must leave the list, or the list would excuse it when it comes back."""
    found = list(differences(ours, THEIRS))
    stale = [known.places for known in KNOWN if not any(explains(known, d) for d in found)]
    assert not stale


def test_neither_side_has_cases_of_its_own(ours: dict[str, Any]) -> None:
    for section in ("cases", "chats", "cut characters", "sampled", "seeds", "cached", "tokenizer"):
        assert ours[section].keys() == THEIRS[section].keys()
    for section in ("SamplingParams", "generate", "chat", "LLM"):
        assert ours["refused"][section].keys() == THEIRS["refused"][section].keys()


def test_greedy_tokens_are_no_close_call() -> None:
    """Every token of the record that is the model's own choice leads by `MARGIN`: rounding cannot turn it.

    Penalties, biases, forbidden tokens and `min_tokens` bend the choice, so their cases are left out.
    """
    bent = ("penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words")
    prompts = [
        (name, len(told["prompt_token_ids"]), [*told["prompt_token_ids"], *told["outputs"][0]["token_ids"]])
        for name, (_, options) in script.CASES.items()
        if not any(word in str(options) for word in bent)
        for told in THEIRS["cases"][name]
    ]
    assert len(prompts) > 40
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    llm = LLM(record.model(), dtype=script.DTYPE)
    outputs = llm.generate([{"prompt_token_ids": ids} for _, _, ids in prompts], params, use_tqdm=False)
    for (name, start, ids), output in zip(prompts, outputs, strict=True):
        for position in range(start, len(ids)):
            row = output.prompt_logprobs[position]
            others = [entry.logprob for token, entry in row.items() if token != ids[position]]
            assert row[ids[position]].logprob - max(others) > MARGIN, (
                f"{name}: token {position - start} is a close call"
            )


def test_every_field_of_vllms_params_is_there_or_refused_by_name() -> None:
    theirs = {name for name in THEIRS["signatures"]["SamplingParams"] if not name.startswith("_")}
    assert theirs >= set(script.defaults(SamplingParams)), "a field that vLLM does not have"
    assert theirs - set(script.defaults(SamplingParams)) == REFUSED_FIELDS
    for name in REFUSED_FIELDS:
        with pytest.raises(UnknownOptionError, match=f"no option '{name}'"):
            SamplingParams(**{name: None})


def test_every_option_of_vllms_engine_is_there_or_refused_by_name() -> None:
    theirs = {*THEIRS["signatures"]["LLM"], *THEIRS["signatures"]["EngineArgs"]}
    mine = set(script.defaults(LLM))
    assert mine - theirs == OWN_OPTIONS
    assert len(theirs - mine) > 200, "most of what vLLM can be told is about many devices and many models"
    for name in theirs - mine:
        with pytest.raises(UnknownOptionError, match=f"LLM has no option '{name}'"):
            LLM("minicoder", **{name: None})
        with pytest.raises(UnknownOptionError, match=f"EngineArgs has no option '{name}'"):
            EngineArgs("minicoder", **{name: None})


def test_outputs_have_vllms_fields_but_those_of_what_minillm_does_not_do(ours: dict[str, Any]) -> None:
    for kind, absent in ABSENT.items():
        assert set(THEIRS["objects"][kind]) - set(ours["objects"][kind]) == absent
        assert set(ours["objects"][kind]) <= set(THEIRS["objects"][kind])
    assert set(ours["objects"]["LLM"]) - set(THEIRS["objects"]["LLM"]) == OWN_METHODS


def test_what_minillm_lacks_is_listed_and_the_readme_names_only_such() -> None:
    theirs = {name for name, kind in THEIRS["objects"]["LLM"].items() if kind == "method"}
    assert {name for name in theirs if not hasattr(LLM, name)} == ABSENT_METHODS
    [(own, absent)] = re.findall(r"Not in vLLM: (.*)\. Not in minillm: (.*)\. A vLLM", README.replace("\n", " "))
    assert set(re.findall(r"`(\w+)`", own)) - {"LLM", "metrics", "quantization", "speculative_config"} == OWN_METHODS
    [parts] = re.findall(r"fields of `SamplingParams` such as (.*), and methods of `LLM` such as (.*)", absent)
    for part, lacking in zip(parts, (REFUSED_FIELDS, ABSENT_METHODS), strict=True):
        named = re.findall(r"`(\w+)`", part)
        assert len(named) > 2 and set(named) <= lacking


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_a_method_takes_what_vllms_does_or_refuses_it_by_name(ours: dict[str, Any], method: str) -> None:
    mine, theirs = (set(answers["signatures"][method]) for answers in (ours, THEIRS))
    assert mine <= theirs and len(theirs - mine) > 2
    for name in theirs - mine:
        with pytest.raises(UnknownOptionError, match=rf"LLM\.{method} has no option '{name}'; it has: .*use_tqdm"):
            getattr(LLM, method)(LLM, [], **{name: None})


def test_vllms_defaults_of_the_options_of_an_engine_are_taken() -> None:
    defaults = THEIRS["signatures"]["EngineArgs"]
    shared = defaults.keys() & set(script.defaults(EngineArgs)) - {"model"}
    assert len(shared) > 15
    refused = {}
    for name in shared:
        try:
            EngineArgs("m", **{name: defaults[name]})
        except ConfigError:
            refused[name] = defaults[name]
    assert refused == {}


def test_whatever_minillm_refuses_is_a_value_error(ours: dict[str, Any]) -> None:
    refused = {
        k: v for section in ("SamplingParams", "generate", "chat", "LLM") for k, v in ours["refused"][section].items()
    }
    assert len(refused) > 50
    assert [name for name, told in refused.items() if told["refused"] and not told["ValueError"]] == []


@pytest.mark.skipif(INTERPRETER not in os.environ, reason=f"{INTERPRETER} names no interpreter that has vLLM")
@pytest.mark.timeout(record.PATIENCE_S + 60)
def test_the_record_is_what_vllm_says() -> None:
    fresh = record.ask_vllm(os.environ[INTERPRETER])
    about = fresh.pop("about")
    again = f"make it again: {ABOUT['made by']}"
    assert about == {name: ABOUT[name] for name in about}, f"the record is of another version; {again}"
    assert list(differences(fresh, THEIRS)) == [], again
