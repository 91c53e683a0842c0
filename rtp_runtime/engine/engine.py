"""Continuous batching in one process: admits requests, plans, submits and collects steps, and finishes requests."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rtp_runtime.engine.admission import Admission, make_state, prefix_namespace, resolve_model_len
from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.drafts import DraftProposer, propose_drafts
from rtp_runtime.engine.limits import ModelLimits, model_limits
from rtp_runtime.engine.outputs import EngineStats, RequestOutput, StepOutput
from rtp_runtime.engine.progress import snapshot, take_result
from rtp_runtime.engine.request import Request
from rtp_runtime.engine.runner import ChunkResult, Runner, Ticket
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.engine.scheduler import Scheduler
from rtp_runtime.engine.text_stream import TextStream
from rtp_runtime.errors import RequestError, StateError, UsageError
from rtp_runtime.state.keys import ContentKeys, namespace

if TYPE_CHECKING:
    from rtp_runtime.model import LoadedModel
    from rtp_runtime.state.capacity import Capacity
    from rtp_runtime.text import Tokenizer


class Engine:
    """Runs many requests over one loaded model.

    Several engines may share a loaded model; each has state of its own. Not thread-safe.

    Raises:
        UsageError: limits that the model cannot keep.
        StateError: state that cannot be sized.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        proposer: DraftProposer | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        if self.config.deterministic and not loaded.ops.deterministic:
            raise UsageError(
                "deterministic=True needs a model loaded with it: pass deterministic=True to LLM(...) or OpTable(...)"
            )
        self.limits: ModelLimits = model_limits(loaded.config, loaded.path, tokenizer.eos_ids if tokenizer else ())
        self._tokenizer = tokenizer
        self._proposer = proposer
        self._state = make_state(loaded, self.config, self.limits, proposer.max_drafts if proposer else 0)
        self.max_model_len = resolve_model_len(self.config, self.limits, self._state.max_tokens_per_request())
        self._admission = Admission(self.max_model_len, self.limits, has_text=tokenizer is not None)
        self._scheduler = Scheduler(self.config, self._state, run_ahead=proposer is None)
        self._runner = Runner(
            loaded.module,
            self._state,
            num_rows=self.config.max_num_seqs,
            vocab_size=self.limits.vocab_size,
            device=torch.device(loaded.device),
        )
        self._tickets: deque[Ticket] = deque()
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._seeds = random.Random(self.config.seed)
        self._namespace = prefix_namespace(loaded, self.config, self._state)

    @property
    def has_work(self) -> bool:
        """Whether some request is unfinished, or a submitted step was not collected."""
        return self._scheduler.has_work or bool(self._tickets)

    @property
    def capacity(self) -> Capacity:
        """How much state there is, and how much a request takes."""
        return self._state.capacity

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        reuse, prefixes = self._scheduler.reuse, self._state.prefixes
        return EngineStats(
            num_preemptions=self.num_preemptions,
            prefix_lookups=reuse.lookups,
            prefix_hits=reuse.hits,
            lookup_tokens=reuse.lookup_tokens,
            cached_tokens=reuse.cached_tokens,
            prefix_evictions=0 if prefixes is None else prefixes.num_evictions,
            prefix_bytes=self._state.memory.cached_bytes,
        )

    def clear_prefixes(self) -> None:
        """Forget what is kept of earlier requests, as after a change of weights; running requests go on."""
        self._state.clear_prefixes()

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        return_logits: bool = False,
    ) -> str:
        """Admit a request; its id.

        With `return_logits` its output holds the float32 logits of every position that was fed.

        Raises:
            RequestError: a prompt or parameters that this engine cannot serve, with the numbers.
        """
        params = params or SamplingParams()
        ids = self._admission.check_prompt(prompt_ids, return_logits=return_logits)
        self._admission.check_params(params)
        name = request_id if request_id is not None else f"request-{self._arrivals}"
        if name in self._requests:
            raise RequestError(f"a request with the id {name!r} is running: give another id")
        room = max(self.max_model_len - len(ids), 1)
        request = Request(
            name,
            ids,
            params,
            arrival=self._arrivals,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.limits.eos_ids),
            prompt=prompt,
            text=self._text_stream(params),
            return_logits=return_logits,
            keys=self._keys(params),
        )
        request.extend_keys(request.num_prompt)
        self._arrivals += 1
        self._requests[name] = request
        self._scheduler.add(request)
        return name

    def step(self) -> list[StepOutput]:
        """Submit the next step and collect the one that is `depth` before it; what that one added, by request.

        A failure aborts every request before it is raised again.
        """
        try:
            if self._proposer is not None:
                propose_drafts(self._proposer, self._scheduler.running)
            plan = self._scheduler.schedule()
            if plan.chunks:
                self._tickets.append(self._runner.submit(plan))
            elif not self._tickets and self._scheduler.has_work:
                raise StateError(
                    f"{len(self._requests)} requests wait and none can be given state: raise num_blocks or memory"
                )
            if self._tickets and (len(self._tickets) > self.config.depth or not plan.chunks):
                return self._take(self._runner.collect(self._tickets.popleft()))
            return []
        except BaseException:
            self.abort_all()
            raise

    def __contains__(self, request_id: str) -> bool:
        """Whether the request was added and its finished output not yet taken."""
        return request_id in self._requests

    def output(self, request_id: str, news: StepOutput | None = None) -> RequestOutput:
        """The whole of a request so far; a finished one is forgotten by this."""
        request = self._requests[request_id]
        if request.reason is not None:
            del self._requests[request_id]
        return snapshot(request, news)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request as if it had finished, whatever it is doing; None when there is no such request."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.reason is None:
            request.reason = "abort"
            self._forget(request)
        return snapshot(request)

    def abort_all(self) -> None:
        """End every request and drop the steps in flight."""
        while self._tickets:
            self._runner.drop(self._tickets.popleft())
        for request_id in list(self._requests):
            self.cancel(request_id)

    def preempt(self, request_id: str) -> bool:
        """Take a running request's state, so that it is recomputed; False when it is not running."""
        request = self._requests.get(request_id)
        if request is None or request.row < 0:
            return False
        self._scheduler.preempt(request)
        return True

    def _take(self, results: list[ChunkResult]) -> list[StepOutput]:
        news: list[StepOutput] = []
        for result in results:
            request = result.chunk.request
            request.in_flight -= 1
            # What was computed after the end of a request is thrown away.
            if request.reason is not None:
                continue
            step = take_result(request, result)
            self._settle(request, result)
            if step is not None:
                news.append(step)
            if request.reason is not None:
                self._forget(request)
        return news

    def _settle(self, request: Request, result: ChunkResult) -> None:
        """Commit what stands of a step, unless the state it went into was given up."""
        chunk = result.chunk
        end = chunk.start + result.num_tokens
        current = chunk.generation == request.generation
        if current:
            if result.num_tokens < chunk.num_tokens:
                self._state.truncate(request.request_id, end)
            # What follows a stop is thrown away.
            final = min(end, request.num_prompt + len(request.ids))
            request.extend_keys(final)
            self._state.commit(request.request_id, final)
        if chunk.drafts:
            request.settle(len(result.token_ids), end if current else None)

    def _keys(self, params: SamplingParams) -> ContentKeys | None:
        prefixes = self._state.prefixes
        if prefixes is None:
            return None
        first = self._namespace if params.cache_salt is None else namespace(self._namespace.hex(), params.cache_salt)
        return ContentKeys(first, prefixes.key_unit)

    def _forget(self, request: Request) -> None:
        """The clean-up of completion, cancelling and failure alike."""
        self._scheduler.finish(request)
        self._runner.release(request)

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        from rtp_runtime.text import Detokenizer

        decoder = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        return TextStream(decoder, params.stop, keep_stop=params.include_stop_str_in_output)
