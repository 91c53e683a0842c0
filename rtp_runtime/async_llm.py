"""The asyncio twin of `LLM`: streams of outputs from an engine that runs on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.outputs import RequestOutput
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.engine.worker import EngineWorker, Submission
from rtp_runtime.llm import LLM, Messages

if TYPE_CHECKING:
    from rtp_runtime.model import LoadedModel
    from rtp_runtime.text import Tokenizer


class AsyncLLM:
    """A loaded model whose requests are streams; any number of them run together.

    Takes the arguments of `LLM`. Must be closed, or dropped, to end its thread.

    Raises:
        RtpError: a model that cannot be loaded, or options that it cannot be run with.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._open(LLM(model, **options))

    @classmethod
    def from_loaded(
        cls, loaded: LoadedModel, config: EngineConfig | None = None, *, tokenizer: Tokenizer | None = None
    ) -> Self:
        """An engine of its own over a model that is loaded already."""
        llm = cls.__new__(cls)
        llm._open(LLM.from_loaded(loaded, config, tokenizer=tokenizer))
        return llm

    def _open(self, llm: LLM) -> None:
        self._llm = llm
        self._worker = EngineWorker(llm.engine)
        self._ids = itertools.count()
        # The thread knows the worker only, so that dropping the AsyncLLM ends it.
        self._finalizer = weakref.finalize(self, self._worker.close)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._llm.tokenizer

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt: an iterator of the request so far, finished at the end.

        Each output is cumulative; `new_token_ids` and `new_text` hold what came since the one before. Closing the
        iterator, or cancelling the task that reads it, cancels the request.

        Raises (on the first output):
            RequestError: a prompt or parameters that cannot be served.
        """
        return self._stream(prompt, params, special=True)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, as `generate`."""
        return self._stream(self._llm.chat_prompt(messages, tools=tools), params, special=False)

    def close(self) -> None:
        """End all streams with an error, the thread, and let go of the model."""
        self._finalizer()
        self._llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None, *, special: bool
    ) -> AsyncIterator[RequestOutput]:
        text = prompt if isinstance(prompt, str) else None
        ids = prompt if not isinstance(prompt, str) else self._llm.encode(prompt, special=special)
        request_id = f"request-{next(self._ids)}"
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._worker.submit(
            Submission(request_id=request_id, prompt_ids=ids, params=params, prompt=text, deliver=mailbox.deliver)
        )
        try:
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return
        finally:
            self._worker.cancel(request_id)


class _Mailbox:
    """Carries one request's outputs from the worker's thread to the event loop; those not yet taken become one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def deliver(self, item: RequestOutput | BaseException) -> bool:
        """From any thread; False when the loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._put, item)
        except RuntimeError:
            return False
        return True

    async def take(self) -> RequestOutput:
        """The latest output, or the error that ended the request."""
        await self._ready.wait()
        self._ready.clear()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is not None:
            self._ready.set()
        return output

    def _put(self, item: RequestOutput | BaseException) -> None:
        if isinstance(item, BaseException):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            text = None if item.new_text is None else (self._output.new_text or "") + item.new_text
            self._output = replace(item, new_token_ids=self._output.new_token_ids + item.new_token_ids, new_text=text)
        self._ready.set()
