"""Text to ids and back, whole and piece by piece, for byte-level and for SentencePiece vocabularies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from minillm.errors import CheckpointError, PromptError
from minillm.models import bundled
from minillm.tokenizer import Detokenizer, Tokenizer
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import TEXTS, TinyPair


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM: a character outside the training text is two to four byte tokens."""
    backend = train_tokenizer(TEXTS, 400)
    backend.add_tokens([AddedToken("<tool call é>", special=False)])
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(backend, Path("byte-level"))


def sentencepiece() -> Tokenizer:
    """As Llama 2 and the first Mistral: spaces are ▁, unknown characters fall back to bytes, a text starts with <s>."""
    words = ["▁", "a", "b", "c", "▁a", "bc", "▁abc", "é", "\n"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    ids = {token: i for i, token in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, Path("sentencepiece"))


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
FIRST_BYTE = SENTENCEPIECE.backend.token_to_id("<0x00>")
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])


def pieces(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(train_tokenizer(TEXTS, 320), tmp_path, 256)
    return tmp_path


@given(st.text())
@example("a<|endoftext|>b")
def test_any_text_comes_back_from_its_tokens_piece_by_piece(text: str) -> None:
    """Special tokens included, where they are not skipped."""
    token_ids = BYTE_LEVEL.encode(text)
    assert "".join(pieces(BYTE_LEVEL, token_ids, skip=False)) == BYTE_LEVEL.decode(token_ids, False) == text


@BOTH
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_pieces_are_the_whole_whatever_the_model_says(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    """Also for control tokens in the middle, ids without a token and, byte-level, bytes that are no characters."""
    one = st.integers(0, tokenizer.vocab_size + 2).filter(lambda i: not tokenizer.is_byte(i)).map(lambda i: [i])
    character = st.characters(codec="utf-8").map(lambda c: [FIRST_BYTE + byte for byte in c.encode()])
    drawn = data.draw(st.lists(one if tokenizer is BYTE_LEVEL else one | character, max_size=12))
    token_ids = [token_id for part in drawn for token_id in part]
    assert "".join(pieces(tokenizer, token_ids, skip)) == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁a", "<0x0A>", "▁a"], ["a", "\n", " a", ""]),
        (["<0x0A>", "<0x0A>", "a"], ["\n", "\n", "a", ""]),
        (["<0xE2>", "<0x86>", "<0x92>", "<0xE2>", "<0x86>", "<0x92>"], ["", "", "→", "", "", "→", ""]),
        (["a", "<0x0A>", "<0x80>", "b"], ["a", "\n", "", "�b", ""]),
        (["<0xC3>", "<0xA9>", "<0x80>", "b"], ["", "é", "", "�b", ""]),
        (["a", "<0xE2>", "<0x86>"], ["a", "", "", "��"]),
        (["<0xC3>", "<0xA9>", "<0xE2>"], ["", "é", "", "�"]),
        (["<0xEF>", "<0xBF>", "<0xBD>", "<0x0A>"], ["", "", "�", "\n", ""]),
    ],
    ids=[
        "line end",
        "two line ends",
        "arrows",
        "a byte that is no character",
        "one behind a character of two bytes",
        "an unfinished character",
        "one behind a character of two bytes and at the end",
        "the character that stands for others",
    ],
)
def test_a_character_of_raw_bytes_is_shown_as_soon_as_it_is_whole(tokens: list[str], expected: list[str]) -> None:
    token_ids = [SENTENCEPIECE.backend.token_to_id(token) for token in tokens]
    assert None not in token_ids
    assert pieces(SENTENCEPIECE, token_ids) == expected


def test_a_long_run_of_bytes_that_are_no_text_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, token_ids: list[int], **options: bool) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    a, newline, broken = (SENTENCEPIECE.backend.token_to_id(token) for token in ("a", "<0x0A>", "<0x80>"))
    assert "".join(pieces(SENTENCEPIECE, [a, newline, *[broken] * 500, a, newline])) == "a\n" + "\ufffd" * 500 + "a\n"
    assert sum(decoded) < 1600


@given(st.text("abc é\n→😀", max_size=12))
def test_sentencepiece_pieces_are_the_whole(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text)
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == SENTENCEPIECE.decode(token_ids)


@BOTH
def test_a_character_is_given_out_when_it_is_complete(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a→b")
    given_out = pieces(tokenizer, token_ids)
    assert len(token_ids) >= 5, "the arrow must be three tokens for this test to mean anything"
    assert "".join(given_out) == "a→b"
    assert not any("\ufffd" in piece for piece in given_out)


def test_text_of_whole_characters_is_never_held_back() -> None:
    for token_id in BYTE_LEVEL.encode("for line in path:"):
        assert Detokenizer(BYTE_LEVEL).append(token_id) != ""


def test_a_character_cut_off_by_the_end_is_marked() -> None:
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("→")[:2]) == ["", "", "\ufffd"]


def test_text_goes_on_from_the_prompt_with_its_space() -> None:
    prompt, word = SENTENCEPIECE.encode("abc"), SENTENCEPIECE.encode("abc")[-1]
    assert Detokenizer(SENTENCEPIECE).append(word) == "abc"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=prompt).append(word) == " abc"


def test_control_tokens_are_in_the_text_only_if_asked_for() -> None:
    end = BYTE_LEVEL.backend.token_to_id("<|im_end|>")
    ids = [*BYTE_LEVEL.encode("a"), end]
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids) == "a"
    assert "".join(pieces(BYTE_LEVEL, ids, skip=False)) == BYTE_LEVEL.decode(ids, False) == "a<|im_end|>"
    assert BYTE_LEVEL.special_ids == {0, 1, 2, 3, end}, "end of text, the three marks of a gap, and this one"


def test_the_checkpoint_decides_what_stands_before_a_text() -> None:
    assert SENTENCEPIECE.encode("a")[0] == 1
    assert BYTE_LEVEL.encode("a") == [BYTE_LEVEL.backend.token_to_id("a")]


def test_lengths_that_a_checkpoint_was_trained_with_do_not_cut_prompts(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = {text: backend.encode(text).ids for text in ("a", "a long text")}
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert {text: tokenizer.encode(text) for text in expected} == expected


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(PromptError, match=r"half a surrogate pair, '\\ud83d'"):
        BYTE_LEVEL.encode("ab\ud83d")


def test_a_token_is_shown_as_what_it_stands_for() -> None:
    def shown(tokenizer: Tokenizer, token: str) -> str:
        return tokenizer.token_text(tokenizer.backend.token_to_id(token))

    assert shown(BYTE_LEVEL, "Ġreturn") == " return"
    assert shown(BYTE_LEVEL, "Ċ") == "\n"
    assert shown(BYTE_LEVEL, "â") == r"\xe2", "the first byte of an arrow"
    assert shown(BYTE_LEVEL, "Ā") == r"\x00"
    assert shown(BYTE_LEVEL, "<|im_end|>") == "<|im_end|>"
    assert shown(BYTE_LEVEL, "<tool call é>") == "<tool call é>"
    assert shown(SENTENCEPIECE, "▁abc") == " abc"
    assert shown(SENTENCEPIECE, "<0xE2>") == r"\xe2"
    assert BYTE_LEVEL.token_text(9999) == "<9999>"


def test_the_string_of_a_token_is_its_text_unless_it_is_half_a_character() -> None:
    for text in ("\r", "\x0b", "\u3000", "a", "\n", " return"):
        tokens = BYTE_LEVEL.encode(text)
        if len(tokens) == 1:
            assert BYTE_LEVEL.token_string(tokens[0]) == text
    assert BYTE_LEVEL.token_string(BYTE_LEVEL.encode("\r")[0]) == "\r"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode("\r")[0]) == r"\r"
    assert BYTE_LEVEL.token_string(BYTE_LEVEL.backend.token_to_id("â")) == r"\xe2"
    assert BYTE_LEVEL.token_string(9999) == "<9999>"


def test_vocabularies_are_compared_token_by_token() -> None:
    assert BYTE_LEVEL.same_vocabulary(byte_level(), 1000)
    assert not BYTE_LEVEL.same_vocabulary(SENTENCEPIECE, 1000)
    stranger = Tokenizer(train_tokenizer(["other words make other tokens"] * 9, 270), Path("stranger"))
    assert not stranger.same_vocabulary(Tokenizer(train_tokenizer(TEXTS, 270), Path("of one size")), 270)
    other = byte_level()
    other.backend.add_tokens(["one more"])
    assert not BYTE_LEVEL.same_vocabulary(other, 1000)
    assert BYTE_LEVEL.same_vocabulary(other, BYTE_LEVEL.vocab_size)
    assert other.vocab_size == BYTE_LEVEL.vocab_size + 1


def test_transformers_has_the_same_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "def f(x):\n    return 'ü→😀', 12345"
    assert tokenizer.hf().encode(text) == tokenizer.encode(text)
    assert tokenizer.hf() is tokenizer.hf()
    assert len(tokenizer.hf()) == tokenizer.vocab_size


def added(content: str, **flags: bool) -> dict[str, Any]:
    """A token as `tokenizer_config.json` has it."""
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "special": False, **flags}


LISTED = {"1000": added("<b>", lstrip=True), "999": added("<a>", special=True), "9": added("<c>")}
CONFIGS = {
    "listed": {"added_tokens_decoder": LISTED},
    "listed again": {"added_tokens_decoder": {"4": added("<tool>", special=True)}},
    "named": {"mask_token": "<a>", "pad_token": "<b>", "image_token": "<c>"},
    "named, in the vocabulary": {"unk_token": "<tool>", "eos_token": "def"},
    "named with flags": {"bos_token": {"__type": "AddedToken", **added("<a>", lstrip=True)}},
    "listed and named": {"added_tokens_decoder": {"999": added("<a>")}, "pad_token": "<a>", "eos_token": "<tool>"},
    "further": {"extra_special_tokens": [{"__type": "AddedToken", **added("<a>")}, "<b>", "<tool>"]},
    "further, with names": {"extra_special_tokens": {"audio": "<a>"}, "bos_token": "<b>"},
    "further, by both names": {"extra_special_tokens": {"audio": "<a>"}, "additional_special_tokens": ["<b>"]},
    "further, by the older name": {"additional_special_tokens": ["<b>", "<a>"], "extra_special_tokens": []},
    "listed and further": {"added_tokens_decoder": LISTED, "additional_special_tokens": ["<c>", "<tool>"]},
}
"""What a `tokenizer_config.json` may say of tokens."""


@pytest.mark.skipif(int(version("transformers").split(".")[0]) < 5, reason="adds other tokens before version 5")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_that_only_the_configuration_names_are_those_of_transformers(
    folder: Path, config: dict[str, Any]
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    tokenizer, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("def <a> and <b><c> and <tool>: <|endoftext|>")
    assert ids == theirs.encode("def <a> and <b><c> and <tool>: <|endoftext|>")
    assert tokenizer.backend.get_vocab() == theirs.get_vocab()
    for skip in (True, False):
        text = theirs.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip) == text
    assert tokenizer.eos_id == theirs.eos_token_id


def test_a_configuration_that_names_nothing_new_changes_nothing() -> None:
    folder = bundled.path("minicoder")
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).backend.to_str() == expected.to_str()


@pytest.mark.parametrize("legacy", [None, True, False])
def test_spaces_in_front_of_a_text_are_those_of_sentencepiece(tmp_path: Path, legacy: bool | None) -> None:
    """transformers' `LlamaTokenizer` gives four `▁` for four spaces, SentencePiece one more."""
    SENTENCEPIECE.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": legacy}
    config["chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    token_ids = tokenizer.encode("    a bc")
    assert tokenizer.hf().convert_ids_to_tokens(token_ids) == ["<s>", *"▁▁▁▁", "▁a", "▁", "bc"]
    assert tokenizer.hf().encode("    a bc") == token_ids
    chat = [{"role": "user", "content": "    a bc"}]
    assert tokenizer.hf().apply_chat_template(chat, tokenize=False) == "<s>    a bc"


def test_an_older_format_is_converted(folder: Path) -> None:
    """`vocab.json` and `merges.txt`, as GPT-2 and the first Qwen2 checkpoints have them."""
    expected = Tokenizer.from_folder(folder)
    expected.backend.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("def f():")) == "def f():"
    assert expected.backend.get_vocab().items() <= tokenizer.backend.get_vocab().items()


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json.*save_pretrained\(folder\) writes one"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        Tokenizer.from_folder(tmp_path / "missing")


def test_a_corrupt_tokenizer_is_refused(folder: Path) -> None:
    content = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer.json is truncated or corrupt"):
        Tokenizer.from_folder(folder)


def test_importing_the_tokenizer_leaves_transformers_alone() -> None:
    code = "import sys, minillm.tokenizer, minillm.models.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not valid JSON"),
        ("\xff", "is not valid JSON"),
        (None, "is not a regular file"),
    ],
)
def test_a_broken_configuration_of_a_tokenizer_is_named(
    tiny: TinyPair, tmp_path: Path, text: str | None, words: str
) -> None:
    """None: a folder of that name."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    file = folder / "tokenizer_config.json"
    if text is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    else:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"tokenizer_config.json {words}"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("named", ["<|endoftext|>", {"content": "<|endoftext|>"}, None, "<|new|>", 5])
def test_the_tokenizers_configuration_names_the_end_of_text(tiny: TinyPair, tmp_path: Path, named: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    next_id = Tokenizer.from_folder(tiny.target).vocab_size
    expected = next_id if named == "<|new|>" else None if named in (None, 5) else 0
    assert Tokenizer.from_folder(folder).eos_id == expected


@pytest.mark.parametrize("named", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}, None])
@pytest.mark.parametrize("config", [None, {}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_an_older_checkpoint_names_the_end_of_text_in_a_file_of_its_own(
    tiny: TinyPair, tmp_path: Path, config: dict[str, str] | None, named: object
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny.target / "tokenizer.json", folder)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if named is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": named}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_id == (None if named is None else 0)
    if config:
        assert tokenizer.hf().eos_token_id == tokenizer.eos_id


def test_what_the_configuration_names_goes_before_the_older_file(tiny: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "special_tokens_map.json").write_text("{")
    assert Tokenizer.from_folder(folder).eos_id == 0
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json is not valid JSON"):
        Tokenizer.from_folder(folder)


def test_bytes_of_a_character_stay_together_if_the_decoder_is_a_sequence() -> None:
    plain, nested = byte_level(), byte_level()
    nested.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    for text in ("a你b", "é → ü"):
        ids = plain.encode(text)
        detokenizer = Detokenizer(nested)
        assert "".join([*map(detokenizer.append, ids), detokenizer.flush()]) == text
        assert b"".join(map(nested.token_bytes, ids)) == text.encode()
