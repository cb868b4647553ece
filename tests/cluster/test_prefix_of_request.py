"""The router's hashes of a request are those of the engine's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from minillm import LLM, SamplingParams
from minillm.cluster.prefix_of_request import CHAT, COMPLETIONS, MAX_BLOCKS, PrefixReader
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n"
TEMPLATE = "{{ first }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def reader(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> PrefixReader:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    return PrefixReader(str(tiny.target), 4, str(template))


def hashes(reader: PrefixReader, path: str = COMPLETIONS, **body: Any) -> list[bytes]:
    return reader.block_hashes(path, json.dumps(body).encode())


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_the_hashes_are_those_of_the_blocks_in_the_engines_pool(
    reader: PrefixReader, tiny: TinyPair, salt: str | None
) -> None:
    llm = LLM(str(tiny.target), block_size=4, device="cpu", enforce_eager=True)
    prompt = {"prompt": TEXT, **({"cache_salt": salt} if salt else {})}
    [request] = llm.submit([prompt], SamplingParams(max_tokens=1))
    while not request.finished:
        llm.engine.step()
    found = hashes(reader, prompt=TEXT, cache_salt=salt)
    assert len(found) >= 5
    assert found == request.block_hashes(4)[: len(found)]


def test_special_tokens_are_hashed_as_the_request_asks(reader: PrefixReader, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def with_a_beginning(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + encode(self, text)

    without = hashes(reader, prompt=TEXT)
    monkeypatch.setattr(Tokenizer, "encode", with_a_beginning)
    assert hashes(reader, prompt=TEXT) != without
    assert hashes(reader, prompt=TEXT, add_special_tokens=False) == without
    chat = [{"role": "user", "content": TEXT}]
    assert hashes(reader, CHAT, messages=chat) != hashes(reader, CHAT, messages=chat, add_special_tokens=True)


def test_text_and_its_tokens_have_the_same_hashes(reader: PrefixReader) -> None:
    tokens = reader.tokenizer.encode(TEXT)
    assert hashes(reader, prompt=TEXT) == hashes(reader, prompt=tokens) == hashes(reader, prompt=[tokens, [1]])
    assert hashes(reader, prompt=[TEXT, "other"]) == hashes(reader, prompt=TEXT) != hashes(reader, prompt=f" {TEXT}")


def test_a_chat_is_hashed_as_its_template_writes_it(reader: PrefixReader) -> None:
    first = [{"role": "user", "content": TEXT}]
    more = [*first, {"role": "assistant", "content": "yes"}]
    short, long = hashes(reader, CHAT, messages=first), hashes(reader, CHAT, messages=more)
    assert len(short) >= 5 and long[: len(short)] == short
    assert hashes(reader, CHAT, messages=first, chat_template_kwargs={"first": "think "})[0] != short[0]


def test_a_long_prompt_is_hashed_up_to_a_limit(reader: PrefixReader) -> None:
    assert len(hashes(reader, prompt=[1] * (4 * MAX_BLOCKS + 40))) == MAX_BLOCKS


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": []}', b'{"prompt": 3}', b'{"prompt": [99999999999999999999]}']
)
def test_what_the_replica_will_refuse_has_no_hashes(reader: PrefixReader, body: bytes) -> None:
    assert reader.block_hashes(COMPLETIONS, body) == []
    assert reader.block_hashes(CHAT, body) == []
    assert reader.block_hashes("/v1/models", body) == []


def test_a_model_without_a_template_has_no_hashes_for_chats(tiny: TinyPair) -> None:
    assert hashes(PrefixReader(str(Path(tiny.target)), 4), CHAT, messages=[{"role": "user", "content": TEXT}]) == []
