"""Text to token ids and back: the checkpoint's fast tokenizer, and an incremental detokenizer."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from minillm.errors import CheckpointError, MinillmError, PromptError
from minillm.json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""How SentencePiece vocabularies spell a single byte."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of `tokenizer_config.json`, in the order in which transformers adds their tokens."""


class Tokenizer:
    """The tokenizer of one checkpoint folder."""

    def __init__(self, backend: tokenizers.Tokenizer, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        # The engine handles lengths: a checkpoint's settings for truncation and padding must not alter prompts.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of control tokens, which `skip_special_tokens` removes from the text."""
        self._strings: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and the tokens that `tokenizer_config.json` adds, or convert an older format with
        transformers.

        vLLM takes the tokenizer that transformers makes. For a `LlamaTokenizer` transformers 5 builds it again from
        vocabulary and merges, and then reads a text with n spaces in front as n of SentencePiece's `▁` instead of
        n + 1. The file agrees with SentencePiece, with which such models were trained. Of the older
        `special_tokens_map.json` only `eos_token` is read.

        Raises `CheckpointError` if `folder` has no tokenizer that can be read, a broken `tokenizer_config.json`, or a
        broken `special_tokens_map.json` that is needed.
        """
        file = Path(folder) / "tokenizer.json"
        if file.is_file():
            with _panics_as(CheckpointError, f"{file} is truncated or corrupt", "fetch it again"):
                _check_subword_prefix(file.read_text(encoding="utf-8"))
                backend = tokenizers.Tokenizer.from_file(str(file))
            config = _read(Path(folder), "tokenizer_config.json")
            with _panics_as(CheckpointError, f"a token in {folder}/tokenizer_config.json is invalid", "fetch it again"):
                _add_configured_tokens(backend, config)
        else:
            backend = _convert(Path(folder))
        tokenizer = cls(backend, Path(folder))
        _ = tokenizer.eos_id  # raises here, not at the first prompt
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the checkpoint's tokenizer adds (as in vLLM) unless
        `add_special_tokens` is False.

        Raises `PromptError` for text that is not valid Unicode, or that the checkpoint's tokenizer fails on.
        """
        return self.encode_with_offsets(text, add_special_tokens).ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """As `encode`; the result also has the character range of each token."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            half = text[problem.start]
            raise PromptError(f"the prompt has half a surrogate pair, {half!r}; remove it") from None
        with _panics_as(PromptError, f"the tokenizer in {self.folder} fails on this prompt", "change one of the two"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids outside the vocabulary add nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may have more rows (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_string(self, token_id: int) -> str:
        """The text of one token. Incomplete UTF-8 is shown as `\\xe2`, an id outside the vocabulary as `<7>`."""
        text = self._strings.get(token_id)
        if text is None:
            known = self.backend.id_to_token(token_id) is not None
            text = self.token_bytes(token_id).decode("utf-8", errors="backslashreplace") if known else f"<{token_id}>"
            self._strings[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """`token_string` for pictures: what cannot be printed is shown as `\\x0b`, except for tabs and newlines."""
        text = self._texts.get(token_id)
        if text is None:
            shown = (c if c.isprintable() or c in " \n\t" else ascii(c)[1:-1] for c in self.token_string(token_id))
            text = self._texts[token_id] = "".join(shown)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, perhaps only part of a character. Empty for an id outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._read_bytes(token_id)
        return cached

    def _read_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) or ""
        if self.is_byte_level and all(c in BYTE_OF for c in token):
            return bytes(BYTE_OF[c] for c in token)
        if BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return (token if self.is_byte_level else token.replace("\u2581", " ")).encode()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens use GPT-2's byte alphabet, so that a text is the concatenation of its tokens' bytes."""
        if self.backend.decoder is None:
            return False
        decoder = json.loads(self.backend.decoder.__getstate__())
        kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
        return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a SentencePiece vocabulary."""
        return not self.is_byte_level and BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "") is not None

    @cached_property
    def eos_id(self) -> int | None:
        """The token that ends a text, which `tokenizer_config.json` names or, in older checkpoints, only
        `special_tokens_map.json`; None if they name none of the vocabulary."""
        named = self._config.get("eos_token") or _read(self.folder, "special_tokens_map.json").get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        return self.backend.token_to_id(text) if isinstance(text, str) else None

    @cached_property
    def fim_suffix_first(self) -> bool:
        """Whether the model expects the text after a gap before the text in front of it (`fill_in_the_middle`)."""
        return self._config.get("fim_suffix_first") is True

    @cached_property
    def _config(self) -> dict[str, Any]:
        return _read(self.folder, "tokenizer_config.json")

    def same_vocabulary(self, other: Tokenizer, size: int) -> bool:
        """Whether every id below `size` is the same token in both. A draft model needs that. (A configuration may add
        tokens, such as one for padding, for which a model has no embedding.)"""
        mine, theirs = (
            {token: i for token, i in tokenizer.backend.get_vocab().items() if i < size} for tokenizer in (self, other)
        )
        return mine == theirs

    def hf(self) -> PreTrainedTokenizerBase:
        """The same tokenizer as a transformers object, with its chat template; loaded at the first call.

        With a `tokenizer.json` it is a `PreTrainedTokenizerFast`, whatever class the checkpoint names, so that it gives
        the same token ids with transformers 5 (see `from_folder`). Raises `CheckpointError` if transformers cannot read
        the folder.
        """
        return self._hf

    @cached_property
    def _hf(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import; the engine does without

        reader = PreTrainedTokenizerFast if (self.folder / "tokenizer.json").is_file() else AutoTokenizer
        try:
            return reader.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as problem:  # transformers raises many types of errors for broken files
            reason = " ".join(str(problem).split())
            raise CheckpointError(
                f"{self.folder}: transformers cannot read the tokenizer ({type(problem).__name__}: {reason}); fetch "
                "tokenizer_config.json and the other tokenizer files again"
            ) from None


MAX_BYTES = 4
"""Of a character in UTF-8."""


class Detokenizer:
    """An incremental detokenizer for one request. Its pieces concatenated equal all tokens decoded at once.

    With a byte-level vocabulary it buffers bytes until a character is complete. With any other (SentencePiece) it keeps
    the last token, because the text of a token depends on the one before it; raw byte tokens, such as that of a line
    end, are held back until they form a character. Bytes that never do become U+FFFD, and so do the byte tokens behind
    them. (Decoded at once, so do those in front of them, too.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        """`prompt_ids`: the prompt that the text continues; it makes a SentencePiece word keep the space before it."""
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        plain = (i for i in reversed(prompt_ids) if i not in tokenizer.special_ids and not tokenizer.is_byte(i))
        self._before = [i for i in (next(plain, None),) if i is not None]
        self.restart()

    def restart(self) -> None:
        """Forget all tokens that were added."""
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last = list(self._before)  # the tokens of the last character or word that was given out
        self._held: list[int] = []  # tokens that were not

    def append(self, token_id: int) -> str:
        """Add a token. Returns the text that it completes; empty while a character is incomplete."""
        if token_id in self.skipped:
            return ""
        if self.tokenizer.is_byte_level:
            return self._characters.decode(self.tokenizer.token_bytes(token_id))
        if self.tokenizer.backend.id_to_token(token_id) is None:
            return ""
        if self.tokenizer.is_byte(token_id):
            self._held.append(token_id)
            return self._take() if self._holds_a_character() else ""
        broken = self.flush()
        self._held.append(token_id)
        return broken + self._take()

    def _holds_a_character(self) -> bool:
        """Whether the byte tokens held back are a character; never, if they begin with bytes that are none."""
        try:
            b"".join(map(self.tokenizer.token_bytes, self._held[:MAX_BYTES])).decode()
        except UnicodeDecodeError:
            return False
        return True

    def flush(self) -> str:
        """Return the text that was held back, at the end of a request. Incomplete characters become U+FFFD."""
        if self.tokenizer.is_byte_level:
            return self._characters.decode(b"", final=True)
        if self._held:
            self._last = []  # next to them, the bytes of a character would become U+FFFD again
        return self._take()

    def _take(self) -> str:
        if not self._held:
            return ""
        shown = self._decode(self._last)
        piece = self._decode(self._last + self._held)[len(shown) :]
        self._last, self._held = self._held[-MAX_BYTES:], []
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters map to themselves, the other bytes to U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


@contextmanager
def _panics_as(error: type[MinillmError], what: str, fix: str) -> Iterator[None]:
    """Raise `error` for any error of tokenizers: it raises bare `Exception`s; its Rust panics are not even those."""
    try:
        yield
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise error(f"{what} ({' '.join(str(problem).split())[:300]}); {fix}") from None


def _check_subword_prefix(text: str) -> None:
    """Raise `ValueError` if merges of a BPE lack its prefix of later subwords: tokenizers may abort on them."""
    if not re.search(r'"continuing_subword_prefix"\s*:\s*"[^"]', text):
        return  # most files say null
    model = json.loads(text)["model"]
    prefix = model["continuing_subword_prefix"]
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", []))
    if wrong := next((pair for pair in pairs if not pair[1].startswith(prefix)), None):
        raise ValueError(f"merge {wrong} lacks continuing_subword_prefix {prefix!r}")


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A file of the folder; empty without it. Raises `CheckpointError` if it cannot be read as a JSON object."""
    file = folder / name
    return read_json(file) if file.exists() else {}


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens of `tokenizer_config.json` with the ids and flags that transformers 5 gives them: those of
    `added_tokens_decoder`, then special tokens that are not added tokens yet. New tokens get the next free ids."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    in_order = added.values() if listed is None else [_added_token(listed[i]) for i in sorted(listed, key=int)]
    tokens = {token.content: token for token in in_order}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = dict.fromkeys(SPECIAL_TOKENS) | {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        named, extra = named | extra, config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise TypeError(f"{extra!r} is not a list of tokens")
    for token in (_added_token(given) for given in named.values() if isinstance(given, str | dict)):
        token.special = True
        if token.content in tokens:
            tokens[token.content].special = True
        elif token.content not in added:
            tokens[token.content] = token
    for token in map(_added_token, extra):
        if token.content not in added:
            tokens.setdefault(token.content, token)
    backend.add_tokens(list(tokens.values()))


def _added_token(given: str | Mapping[str, Any]) -> AddedToken:
    """A token of a configuration: a text, which is special, or its flags."""
    if isinstance(given, str):
        return AddedToken(given, special=True)
    flags = {name: value for name, value in given.items() if name != "__type"}  # tokenizers warns of unknown names
    return AddedToken(**flags)


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Convert the tokenizer of a folder without `tokenizer.json`. Code in the folder is never run."""
    fix = "transformers' AutoTokenizer.from_pretrained(…).save_pretrained(folder) writes one"
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if any(not (file.is_file() or file.is_dir()) for file in folder.iterdir()):
        raise CheckpointError(f"{folder} holds something that is neither a file nor a folder; remove it")
    from transformers import AutoTokenizer

    try:
        backend = getattr(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), "backend_tokenizer", None)
    except Exception as problem:  # converters raise many types of errors
        reason = " ".join(str(problem).split())
        raise CheckpointError(f"{folder} has no tokenizer.json, and none can be made: {reason}; {fix}") from None
    if backend is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, and its tokenizer has no fast version; {fix}")
    return backend
