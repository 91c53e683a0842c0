"""A thread that owns an engine: takes requests from other threads, steps while there is work, reports by callbacks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rtp_runtime.engine.outputs import RequestOutput
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    from rtp_runtime.engine.engine import Engine

Deliver = Callable[[RequestOutput | BaseException], bool]
"""Called on the worker's thread with each output, or the error that ends the request; False when nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request on its way to the worker."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams | None
    prompt: str | None
    deliver: Deliver


class EngineWorker:
    """Runs one engine on a thread of its own.

    Every submission ends in a finished output or an error: also when a step fails or the worker is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Submission | str | None] = queue.SimpleQueue()
        self._open: dict[str, Deliver] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rtp-engine", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        """
        Raises:
            UsageError: the worker is closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("this AsyncLLM is closed: make another one")
            self._inbox.put(submission)

    def cancel(self, request_id: str) -> None:
        """End a request; nothing is delivered for it any more."""
        self._inbox.put(request_id)

    def close(self) -> None:
        """End all requests with an error and wait for the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self._engine.has_work:
                    self._step()
        finally:
            self._fail(UsageError("the AsyncLLM was closed while the request ran"))
            self._engine.abort_all()

    def _take_messages(self) -> bool:
        """Handle what has come, waiting for it when there is nothing to do; False to end."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, Submission):
                self._add(message)
            else:
                self._open.pop(message, None)
                self._engine.cancel(message)

    def _add(self, submission: Submission) -> None:
        try:
            self._engine.add(
                submission.prompt_ids, submission.params, request_id=submission.request_id, prompt=submission.prompt
            )
        except Exception as error:
            submission.deliver(error)
        else:
            self._open[submission.request_id] = submission.deliver

    def _step(self) -> None:
        try:
            news = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        for each in news:
            deliver = self._open.get(each.request_id)
            if deliver is None:
                continue
            heard = deliver(self._engine.output(each.request_id, each))
            if not heard or each.finish_reason is not None:
                del self._open[each.request_id]
                self._engine.cancel(each.request_id)

    def _fail(self, error: BaseException) -> None:
        """End every open request, and those still in the inbox when the worker ends, with an error."""
        while self._open:
            _, deliver = self._open.popitem()
            deliver(error)
        while self._closed and not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Submission):
                message.deliver(error)
