"""Documents whose keys and values are on disk: exact where they stand as computed, refused where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from minillm.ops.rerotation import rerotate
from minillm.reuse import document_store
from minillm.reuse.document_store import DocumentStore
from minillm.reuse.edit import edited_prompt
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DOCUMENTS = [
    "def add(a, b):\n    return a + b\n",
    "import os\n\n\ndef walk(root):\n",
    "for line in lines:\n    print(line)\n",
]


@pytest.fixture(scope="module")
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True)


@pytest.fixture
def store(llm: LLM, tmp_path: Path) -> DocumentStore:
    llm.reset_prefix_cache()
    return DocumentStore(llm, tmp_path / "store")


def tokens(llm: LLM, prompt: object) -> list[int]:
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_document_in_its_own_place_gives_the_plain_tokens(llm: LLM, store: DocumentStore) -> None:
    store.add(DOCUMENTS[0])
    prompt = store.prompt([DOCUMENTS[0]], "add(")
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == len(store.load(DOCUMENTS[0]).token_ids) // 4 * 4 > 0
    assert output.outputs[0].token_ids == tokens(llm, {"prompt_token_ids": prompt["prompt_token_ids"]})


def test_what_is_loaded_is_what_was_computed_to_the_last_bit(llm: LLM, store: DocumentStore) -> None:
    store.add(DOCUMENTS[1])
    ids = llm.engine.tokenizer.encode(DOCUMENTS[1])
    with document_store.Scratch(llm, len(ids)) as scratch:
        scratch.forward(ids, 0)
        right = scratch.read(0, len(ids), ids)
    found = store.load(DOCUMENTS[1])
    assert torch.equal(found.keys, right.keys) and torch.equal(found.values, right.values)


def test_several_documents_stand_one_after_the_other(llm: LLM, store: DocumentStore) -> None:
    for document in DOCUMENTS:
        store.add(document)
    spans = [store.load(document) for document in DOCUMENTS]
    prompt = store.prompt(DOCUMENTS, "x")
    config = llm.engine.runner.model.config
    ids, start = prompt["prompt_token_ids"], 0
    with document_store.Scratch(llm, len(ids)) as scratch:
        known = scratch.copy_cached(ids, prompt["cache_salt"])
        stored = sum(len(span.token_ids) for span in spans)
        assert known == stored // 4 * 4 > stored - len(spans[-1].token_ids)  # into the last document
        for span in spans:
            end = min(start + len(span.token_ids), known)
            there = scratch.read(start, end, ids[start:end])
            assert torch.equal(there.keys, span.moved_to(start, config).keys[:, : end - start])
            assert torch.equal(there.values, span.values[:, : end - start])
            start = end
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == known and len(output.outputs[0].token_ids) == 12
    assert prompt["cache_salt"] != store.prompt(DOCUMENTS, "x", rerotate=False)["cache_salt"]


def test_another_model_precision_or_format_does_not_find_it(
    llm: LLM, store: DocumentStore, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = llm.engine.tokenizer.encode(DOCUMENTS[0])
    names = {store.path(ids)}
    store.add(DOCUMENTS[0])
    others = [LLM(str(tiny.draft), enforce_eager=True), LLM(str(tiny.target), quantization="int8", enforce_eager=True)]
    for other in others:
        found = DocumentStore(other, store.folder)
        names.add(found.path(ids))
        with pytest.raises(CheckpointError, match=r"does not have this document .* add it first"):
            found.load(DOCUMENTS[0])
    monkeypatch.setattr(document_store, "FORMAT", -1)
    names.add(DocumentStore(llm, store.folder).path(ids))
    assert len(names) == 4


def test_equal_weights_with_another_rope_do_not_find_it(store: DocumentStore, tiny: TinyPair, tmp_path: Path) -> None:
    ids = store.llm.engine.tokenizer.encode(DOCUMENTS[0])
    for changed, is_found in (({}, True), ({"eos_token_id": 3}, True), ({"rope_theta": 77.0}, False)):
        copy = tmp_path / f"copy{len(changed)}{is_found}"
        shutil.copytree(tiny.target, copy)
        config = json.loads((copy / "config.json").read_text())
        config.pop("rope_parameters" if "rope_theta" in changed else "", None)
        (copy / "config.json").write_text(json.dumps(config | changed))
        other = DocumentStore(LLM(str(copy), block_size=4, enforce_eager=True), store.folder)
        assert (other.path(ids) == store.path(ids)) is is_found


def test_damage_is_noticed(llm: LLM, store: DocumentStore) -> None:
    path = store.add(DOCUMENTS[0])
    good = path.read_bytes()
    for damaged in (good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], good[: len(good) // 2], b"", b"x" * 40):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="delete it and add the document again"):
            DocumentStore(llm, store.folder).load(DOCUMENTS[0])
    path.unlink()
    assert store.add(DOCUMENTS[0]).read_bytes() == good


def test_a_file_of_another_model_under_this_name_is_refused(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.add(DOCUMENTS[0])
    monkeypatch.setattr(store, "identity", "another")
    path.rename(store.path(store.llm.engine.tokenizer.encode(DOCUMENTS[0])))
    with pytest.raises(CheckpointError, match="damaged"):
        store.load(DOCUMENTS[0])


def test_the_least_recently_used_documents_make_room(llm: LLM, tmp_path: Path) -> None:
    documents = [[token] * 20 for token in (5, 6, 7)]
    size = DocumentStore(llm, tmp_path / "one").add(documents[0]).stat().st_size
    store = DocumentStore(llm, tmp_path / "two", max_bytes=int(2.5 * size))
    first, second = store.add(documents[0]), store.add(documents[1])
    for age, path in ((100, first), (50, second)):
        os.utime(path, (age, age))
    store.load(documents[0])
    third = store.add(documents[2])
    assert first.exists() and third.exists() and not second.exists()
    assert store.num_bytes <= 2.5 * size
    assert DocumentStore(llm, tmp_path / "three", max_bytes=1).add(documents[0]).exists()


def test_what_an_interrupted_write_leaves_is_nothing(store: DocumentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: object, name: str, metadata: object) -> None:
        Path(name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(document_store, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        store.add(DOCUMENTS[0])
    assert list(store.folder.iterdir()) == []


def test_what_a_killed_write_left_goes_and_others_may_read_a_file(store: DocumentStore) -> None:
    old, new, foreign = (store.folder / f"{name}.part" for name in ("minillm-kv-old", "minillm-kv-new", "foreign"))
    for part in (old, new, foreign):
        part.write_bytes(b"half")
    for part in (old, foreign):
        os.utime(part, (0, 0))
    path = store.add(DOCUMENTS[0])
    assert not old.exists() and new.exists()  # another process may be writing it
    assert foreign.exists(), "the store has not written it"
    if os.name == "posix":
        assert path.stat().st_mode & 0o044 == 0o044


def test_the_store_cleans_up_what_it_writes(store: DocumentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(tensors: object, part: Path, metadata: object) -> None:
        part.write_bytes(b"half")
        os.utime(part, (0, 0))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(document_store, "save_file", killed)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # the process ends before that
        store.add(DOCUMENTS[0])
    assert len(list(store.folder.iterdir())) == 1
    path = store.add(DOCUMENTS[0])
    assert list(store.folder.iterdir()) == [path]


def test_files_that_may_not_be_deleted_stay_and_a_document_is_added(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [[token] * 20 for token in (5, 6, 7)]
    size = DocumentStore(llm, tmp_path / "one").add(documents[0]).stat().st_size
    store = DocumentStore(llm, tmp_path / "two", max_bytes=int(1.5 * size))
    of_others, own = store.add(documents[0]), store.path(documents[1])
    shutil.copy(of_others, own)
    part = store.folder / "minillm-kv-old.part"
    part.write_bytes(b"half")
    for age, path in enumerate((part, of_others, own)):
        os.utime(path, (age, age))
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path in (part, of_others):
            raise PermissionError(f"Operation not permitted: {path}")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert store.add(documents[2]).exists()
    assert part.exists() and of_others.exists() and not own.exists()


def test_two_writers_of_one_document_leave_one_whole_file(llm: LLM, store: DocumentStore) -> None:
    """The second has looked before the first had written, as in another process."""
    ids = llm.engine.tokenizer.encode(DOCUMENTS[0])
    span = store.load(DOCUMENTS[0]) if store.path(ids).exists() else None
    assert span is None
    path = store.add(DOCUMENTS[0])
    again = DocumentStore(llm, store.folder)
    loaded = again.load(DOCUMENTS[0])
    again._write(path, loaded)
    assert [p.name for p in store.folder.iterdir()] == [path.name]
    assert torch.equal(again.load(DOCUMENTS[0]).keys, loaded.keys)


def test_refusals(llm: LLM, store: DocumentStore, tiny: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes=0"):
        DocumentStore(llm, tmp_path, max_bytes=0)
    with pytest.raises(ConfigError, match="max_bytes=nan"):
        DocumentStore(llm, tmp_path, max_bytes=float("nan"))
    (tmp_path / "a-file.py").write_text("")
    with pytest.raises(ConfigError, match=r"a-file\.py is a file"):
        DocumentStore(llm, tmp_path / "a-file.py")
    for given in (None, 5):
        with pytest.raises(PromptError, match=f"documents must be a list, .* not {type(given).__name__}"):
            store.prompt(given, "x")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="without tokens"):
        store.add("")
    with pytest.raises(PromptError, match="documents must be a list"):
        store.prompt(DOCUMENTS[0], "add(")
    with pytest.raises(PromptError, match=r"not int; .* give documents as a list"):
        store.prompt([5, 6, 7], "add(")
    with pytest.raises(PromptError, match="text or token ids, not NoneType"):
        store.add(None)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype"):
        DocumentStore(LLM(str(tiny.target), kv_cache_dtype="int4", enforce_eager=True), tmp_path)


def test_adding_a_stored_document_counts_as_use(llm: LLM, tmp_path: Path) -> None:
    first, second, third = (f"def f{i}(a, b):\n    return a + {i}\n" for i in range(3))
    one = DocumentStore(llm, tmp_path / "one")
    size = one.add(first).stat().st_size
    store = DocumentStore(llm, tmp_path / "two", max_bytes=int(2.5 * size))
    for age, document in enumerate((first, second)):
        os.utime(store.add(document), (age, age))
    store.add(first)
    store.add(third)
    assert store.path(store._tokens(first)).exists() and not store.path(store._tokens(second)).exists()


def test_a_store_that_moves_keys_differently_is_not_found_in_the_prefix_cache(llm: LLM, tmp_path: Path) -> None:
    def leave(keys: torch.Tensor, frequencies: torch.Tensor, delta: int) -> torch.Tensor:
        return keys

    documents = ["def add(a, b):\n    return a + b\n" * 3, "class Stack:\n    pass\n" * 3]
    salts = []
    for rotate in (leave, rerotate, leave):
        store = DocumentStore(llm, tmp_path, rotate=rotate)
        for document in documents:
            store.add(document)
        salts.append(store.prompt(documents, "x = ")["cache_salt"])
    assert len(set(salts)) == 3


def test_tokens_outside_the_vocabulary_are_refused_before_they_are_computed(llm: LLM, store: DocumentStore) -> None:
    for token in (10**9, -1, 5.7, True, "x"):
        with pytest.raises(PromptError, match=f"prompt token 1 is {token!r}; ids must be integers"):
            store.add([5, token])
    for raw in (b"def f", bytearray(b"def f"), memoryview(b"def f")):
        with pytest.raises(PromptError, match=f"not {type(raw).__name__}; decode bytes"):
            store.add(raw)
    assert not list(store.folder.glob("*"))


def test_without_prefix_caching_nothing_can_be_reused(tiny: TinyPair, tmp_path: Path) -> None:
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, enable_prefix_caching=False)
    with pytest.raises(UnsupportedError, match="with enable_prefix_caching=False no request can find"):
        DocumentStore(llm, tmp_path)
    with pytest.raises(UnsupportedError, match="with enable_prefix_caching=False no request can find"):
        edited_prompt(llm, list(range(3, 20)), 4, 6, [7], salt="a")


def test_a_layout_whose_rows_cannot_be_moved_is_named_though_it_has_no_prefix_caching(
    tiny: TinyPair, tmp_path: Path
) -> None:
    llm = LLM(str(tiny.target), kv_cache_config={"layout": "contiguous"}, enforce_eager=True)
    with pytest.raises(UnsupportedError, match="use cache layout 'paged'"):
        DocumentStore(llm, tmp_path)
    with pytest.raises(UnsupportedError, match="use cache layout 'paged'"):
        edited_prompt(llm, list(range(3, 20)), 4, 6, [7], salt="a")


def test_a_question_has_no_beginning_of_text_of_its_own(
    llm: LLM, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = llm.engine.tokenizer.encode
    begun = lambda text, add_special_tokens=True: [1] * add_special_tokens + real(text)  # noqa: E731
    monkeypatch.setattr(llm.engine.tokenizer, "encode", begun)
    store.add(DOCUMENTS[0])
    found = store.prompt([DOCUMENTS[0]], "add(")["prompt_token_ids"]
    assert found == [1, *real(DOCUMENTS[0]), *real("add(")]
    with pytest.raises(PromptError, match="without tokens"):
        store.add("")
