"""`PrefixReader`: the block hashes of the prompt in an HTTP request, which are those that the engine will compute."""

from __future__ import annotations

from minillm.cache.prefix import extend_block_hashes
from minillm.chat_template import ChatTemplate
from minillm.errors import MinillmError
from minillm.fill_in_the_middle import fim_prompt
from minillm.models.hub import resolve
from minillm.serve.requests import ChatRequest, CompletionRequest
from minillm.tokenizer import Tokenizer

MAX_BLOCKS = 256
"""Blocks that are hashed; two prompts that agree in so many are the same to a router."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class PrefixReader:
    """Reads request bodies with the tokenizer and the chat template of a model, without its weights.

    Raises `CheckpointError` if the tokenizer cannot be read. `block_size`: that of the replicas' engines.
    """

    def __init__(self, model: str, block_size: int, chat_template: str | None = None) -> None:
        self.model = model
        self.block_size = block_size
        self.tokenizer = Tokenizer.from_folder(resolve(model))
        self.template = ChatTemplate(self.tokenizer, model, chat_template)

    def block_hashes(self, path: str, body: bytes) -> list[bytes]:
        """The hashes of the first full blocks, 32 bytes each; of several prompts, those of the first one.

        Empty if the request has no prompt or is one that the replica will refuse, which then says why.
        """
        try:
            if path == COMPLETIONS:
                request = CompletionRequest.model_validate_json(body)
                token_ids = self._completion_tokens(request)
            elif path == CHAT:
                request = ChatRequest.model_validate_json(body)
                text = request.prompt_text(self.template)
                token_ids = self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
            else:
                return []
            tokens = token_ids[: MAX_BLOCKS * self.block_size]
            return extend_block_hashes([], tokens, self.block_size, request.cache_salt or "")
        except (MinillmError, ValueError, OverflowError):  # pydantic's errors are ValueErrors; a token id over 64 bits
            return []

    def _completion_tokens(self, request: CompletionRequest) -> list[int]:
        given = request.prompt
        if isinstance(given, list):
            if not given or isinstance(given[0], int):
                return list(given)  # type: ignore[arg-type]
            given = given[0]
            if isinstance(given, list):
                return given
        if request.suffix is not None:
            given = fim_prompt(self.tokenizer, self.model, given, request.suffix)
        return self.tokenizer.encode(given, add_special_tokens=request.add_special_tokens)
