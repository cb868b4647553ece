"""`AsyncLLM`: the engine for programs that use asyncio, such as a server. The names are vLLM's.

    event loop  │ add_request: check, tokenise in a worker thread ─┐        ┌─▶ output of each request, newest only
    ────────────┼──────────────────────────────────────────────────┼────────┼──────────────────────────────────────
    engine loop │                              between two steps:  ▼  step ─┘  step   step …

One thread runs `LLMEngine.step` for as long as there are requests. Requests are added and aborted between two steps, so
the event loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from queue import SimpleQueue
from threading import Thread

from minillm.config import EngineArgs, at_least, refuses_unknown
from minillm.errors import (
    EngineDeadError,
    EngineGenerateError,
    MinillmError,
    NonFiniteLogitsError,
    QueueOverflowError,
    UnsupportedError,
)
from minillm.input_processor import Prompt, check_sampling_params
from minillm.llm_engine import LLMEngine, check_request_id
from minillm.output_stream import OutputStream
from minillm.outputs import RequestOutput
from minillm.parallel.launch import has_launched_ranks
from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.trace.request_metrics import prompt_id_of

logger = logging.getLogger(__name__)


class AsyncLLM:
    """An engine whose steps run in a thread of their own. Call its methods from an event loop.

    `max_num_queued_reqs` is the most sequences that may be unfinished at once, waiting and running; a request with
    `n=2` has two. None: no limit. As in vLLM, a request over the limit is refused with `QueueOverflowError`.
    The thread ends with `shutdown`, or when the object is no longer used.

    Requests that are added to `llm_engine` itself have no stream here: they run while others do, and their outputs are
    dropped. The stream of a request that is aborted there ends as after `abort`, unless the id is used again at once.

    Raises `UnsupportedError` for ranks that torchrun starts: each schedules for itself, and needs the same requests at
    the same step, but requests arrive when they arrive.
    """

    def __init__(self, args: EngineArgs, *, max_num_queued_reqs: int | None = None) -> None:
        if max_num_queued_reqs is not None:
            at_least("max_num_queued_reqs", max_num_queued_reqs, 1)
        if has_launched_ranks(args):
            raise UnsupportedError(
                "the ranks of torchrun need the same requests at the same step, and those of an AsyncLLM or a server "
                "arrive at any time; use LLM, or leave out distributed_executor_backend and start one process without "
                "torchrun"
            )
        self.llm_engine = LLMEngine(args)
        self.max_num_queued_reqs = max_num_queued_reqs
        self.dead_error: BaseException | None = None
        """What ended the engine loop, if it has ended."""
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the engine loop does before its next step. None: stop."""
        self._streams: dict[str, OutputStream] = {}
        """The requests that are in the engine. Only the engine's thread touches it."""
        self._accepted: set[OutputStream] = set()
        """The streams of all accepted requests, also of those still being tokenised, until their event loop hears of
        the end."""
        self._thread = Thread(
            target=_run_loop, args=(weakref.ref(self), self._inbox), name="minillm engine loop", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._inbox.put, None).atexit = False

    @classmethod
    @refuses_unknown
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Build an engine, as in vLLM. Raises subclasses of `ValueError`."""
        return cls(engine_args)

    @property
    def num_unfinished(self) -> int:
        """Sequences that have been accepted and have not ended. With `RequestOutputKind.FINAL_ONLY`, those of a prompt
        count until all of them have ended. Those of a closed event loop, which hears of no end, do not count."""
        return sum(stream.num_unfinished for stream in [*self._accepted] if not stream.loop.is_closed())

    @property
    def errored(self) -> bool:
        """Whether the engine loop has ended, by a failure or by `shutdown`."""
        return self.dead_error is not None

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine loop has ended."""
        if self.dead_error is not None:
            raise _dead(self.dead_error)

    def check_admission(self, n: int = 1) -> None:
        """Raise `QueueOverflowError` if `n` more sequences would be over `max_num_queued_reqs`."""
        limit = self.max_num_queued_reqs
        if limit is not None and (unfinished := self.num_unfinished) + n > limit:
            raise QueueOverflowError(
                f"{unfinished} sequences are queued or running and the request has {n}; the limit is {limit}: "
                "try again later, or raise max_num_queued_reqs"
            )

    @refuses_unknown
    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far, each time that it has grown; the last one is finished.

        With `RequestOutputKind.FINAL_ONLY` it yields only the last one. Leaving the generator early aborts the request.
        Raises the errors of `add_request`, `EngineGenerateError` or `EngineDeadError`.
        """
        async with aclosing(await self.add_request(request_id, prompt, sampling_params, priority=priority)) as stream:
            async for output in stream:
                yield output

    @refuses_unknown
    async def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> OutputStream:
        """Check and queue a prompt. Returns the stream of its outputs. Without `params`, see `LLMEngine.prepare`.

        Raises `PromptError`, `ConfigError`, `RequestTooLargeError`, `QueueOverflowError`, `EngineDeadError`, or
        `MinillmError` for an id that `check_request_id` refuses, and then nothing is queued. If the id is in use, the
        stream raises `MinillmError`.
        """
        await self.check_health()
        check_sampling_params(params)
        num_sequences = 1 if params is None else params.n
        self.check_admission(num_sequences)
        check_request_id(request_id)
        stream = OutputStream(request_id, num_sequences, self._abort)
        self._accepted.add(stream)
        try:
            group = await asyncio.to_thread(self.llm_engine.prepare, prompt, params, priority, request_id)
            for request in group:
                self.llm_engine.engine.check_fits(request)
        except BaseException:
            self._end(stream)
            raise
        self._inbox.put(partial(self._add, stream, group))
        if self.dead_error is not None:  # the loop may have ended meanwhile and takes no more messages
            self._end(stream)
            raise _dead(self.dead_error)
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by their ids. Their streams end without another output; unknown ids are ignored. The id of one
        completion ends all of its prompt."""
        names = [request_id] if isinstance(request_id, str) else request_id
        prompts = {prompt_id_of(name) for name in names}
        for stream in [*self._accepted]:
            if stream.request_id in prompts:
                self._inbox.put(partial(self._remove_and_tell, stream))

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests and the engine loop; wait for the running step, at most `timeout` seconds.

        Requests that still run raise `EngineDeadError` where they are awaited.
        """
        self._inbox.put(None)
        self._thread.join(timeout)

    def _abort(self, stream: OutputStream) -> None:
        """In the event loop: the request is no longer wanted."""
        if not stream.ended:
            self._end(stream)
            self._inbox.put(partial(self._remove, stream))

    def _end(self, stream: OutputStream) -> None:
        """In the event loop: the request takes no more room in the queue."""
        stream.ended, stream.num_unfinished = True, 0
        self._accepted.discard(stream)

    # ---------------------------------------------------------------------------------------- in the engine's thread

    def _work(self, message: Callable[[], None] | None) -> bool:
        """Do what was asked for, and run steps until there are no requests. Returns False to stop."""
        try:
            while message is not None:
                message()
                while self._inbox.empty():
                    if not (self._streams or self.llm_engine.has_unfinished_requests()):
                        return True
                    self._step()
                message = self._inbox.get()
            self._die(EngineDeadError("the engine has been shut down; start another"))
        except BaseException as problem:
            logger.exception("The engine loop has failed and takes no more requests.")
            self._die(problem)
        return False

    def _add(self, stream: OutputStream, group: Sequence[Request]) -> None:
        if stream.aborted:
            self._deliver([(stream, None, None)])
            return
        try:
            self.llm_engine.add_prepared(stream.request_id, group)
        except MinillmError as problem:
            self._deliver([(stream, None, problem)])
        except BaseException:  # the loop ends, and `_die` informs the streams in `_streams`
            self._streams[stream.request_id] = stream
            raise
        else:
            self._streams[stream.request_id] = stream

    def _remove(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is stream:  # it may have finished, and the id may be in use again
            del self._streams[stream.request_id]
            self.llm_engine.abort_request(stream.request_id)

    def _remove_and_tell(self, stream: OutputStream) -> None:
        stream.aborted = True  # while its prompt is tokenised, it is not in the engine
        if self._streams.get(stream.request_id) is stream:
            self._remove(stream)
            self._deliver([(stream, None, None)])

    def _step(self) -> None:
        """One step. If it fails, the request that it failed for ends; if that is not known, all requests in the engine
        end. The engine has recovered and goes on with the others, unless one of its processes has ended."""
        try:
            outputs = self.llm_engine.step()
        except EngineDeadError:  # of a tensor-parallel engine: no later step can succeed
            raise
        except Exception as problem:
            failed, number = self._failed_by(problem), len(self.llm_engine.metrics.awaited)
            logger.exception("A step failed and ends %d of %d requests.", len(failed), number)
            self.llm_engine.abort_request(failed)
            # After the abort: if that fails, `_die` informs the streams in `_streams`.
            streams = [self._streams.pop(name) for name in failed if name in self._streams]
            self._deliver([(stream, None, _failed(problem)) for stream in streams])
            return
        found = [(stream, output, None) for output in outputs if (stream := self._streams.get(output.request_id))]
        for stream, output, _ in found:
            if output.finished:
                del self._streams[stream.request_id]
        aborted = self._streams.keys() - self.llm_engine.metrics.awaited  # in `llm_engine` itself, by others
        self._deliver([*found, *((self._streams.pop(name), None, None) for name in aborted)])

    def _failed_by(self, problem: Exception) -> list[str]:
        """The requests that cannot go on after this failure of a step."""
        if isinstance(problem, NonFiniteLogitsError) and problem.request_id is not None:
            return [prompt_id_of(problem.request_id)]
        return list(self.llm_engine.metrics.awaited)

    def _die(self, problem: BaseException) -> None:
        """Nothing runs any more: free what is in the engine and tell everyone who waits."""
        self.dead_error = problem
        left = list(self._streams.values())
        self._streams.clear()
        try:
            self.llm_engine.abort_request(list(self.llm_engine.metrics.awaited))
        finally:
            while not self._inbox.empty():  # requests that were about to be added
                message = self._inbox.get()
                if isinstance(message, partial) and message.func == self._add:
                    left.append(message.args[0])
            self._deliver([(stream, None, _dead(problem)) for stream in left])

    def _deliver(self, found: Iterable[tuple[OutputStream, RequestOutput | None, MinillmError | None]]) -> None:
        """Hand outputs or errors to the event loops that wait for them, in one call each."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput | None, MinillmError | None]]]
        by_loop = {}
        for item in found:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._receive, items)
            except RuntimeError:  # the event loop was closed, so nobody waits
                for stream, _, _ in items:
                    self._end(stream)
                    self._remove(stream)

    def _receive(self, items: Sequence[tuple[OutputStream, RequestOutput | None, MinillmError | None]]) -> None:
        """In the event loop: pass on what `_deliver` was given."""
        for stream, output, error in items:
            if not stream.ended:
                stream.put(output, error)
                if output is None or output.finished:
                    self._end(stream)
                else:
                    stream.num_unfinished = sum(not choice.finished() for choice in output.outputs)


def _run_loop(engine: weakref.ref[AsyncLLM], inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    """The engine loop. While it waits it holds no reference to the engine, so that one nobody uses is freed."""
    goes_on = True
    while goes_on:
        message = inbox.get()
        held = engine()
        goes_on = held is not None and held._work(message)
        del held, message


def _failed(problem: Exception) -> EngineGenerateError:
    """The error for one request of a step that failed. Each request gets its own, with its own traceback."""
    error = EngineGenerateError(f"a step failed with this request in the engine: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error


def _dead(problem: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine runs no more: {problem}")
    error.__cause__ = problem
    return error
