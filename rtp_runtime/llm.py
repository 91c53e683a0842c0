"""The Python entry: a model that generates, in process.

Turns texts, messages and ids into engine requests and collects their outputs; all computing is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.outputs import RequestOutput, StepOutput
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.errors import RequestError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rtp_runtime.engine.engine import Engine
    from rtp_runtime.model import LoadedModel
    from rtp_runtime.text import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""One conversation: `{"role": ..., "content": ...}` in order."""


class LLM:
    """A loaded model and an engine over it, for one thread; `AsyncLLM` serves many callers.

    Raises:
        RtpError: a model that cannot be loaded, or options that it cannot be run with.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        plugins: Sequence[str] = (),
        trust_remote_code: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **limits: Any,
    ) -> None:
        """
        Args:
            model: a checkpoint directory or hub id.
            dtype: "auto" (the checkpoint's), or a torch dtype or its name.
            plugins: plugin modules to load besides those that are installed.
            progress: called with the bytes of weights read, and those to be read, as they are loaded.
            limits: the fields of `EngineConfig`.
        """
        from rtp_runtime.model import load_model
        from rtp_runtime.plugins import load_plugins

        config = engine_config(limits)
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            plugins=load_plugins(plugins),
            deterministic=config.deterministic,
            block_size=config.block_size,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        self._open(loaded, config)

    @classmethod
    def from_loaded(
        cls, loaded: LoadedModel, config: EngineConfig | None = None, *, tokenizer: Tokenizer | None = None
    ) -> Self:
        """A new engine over a model that is loaded already; several may share it."""
        llm = cls.__new__(cls)
        llm._open(loaded, config or EngineConfig(), tokenizer)
        return llm

    def _open(self, loaded: LoadedModel, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        from rtp_runtime.engine.engine import Engine
        from rtp_runtime.text import load_tokenizer

        self.loaded: LoadedModel | None = loaded
        self.tokenizer: Tokenizer | None = tokenizer if tokenizer is not None else load_tokenizer(loaded.path)
        self._engine: Engine | None = Engine(loaded, config, tokenizer=self.tokenizer)
        self._news: dict[str, StepOutput | None] = {}
        """What followed requests gained since it was last handed out."""

    @property
    def engine(self) -> Engine:
        """
        Raises:
            UsageError: the LLM was closed.
        """
        if self._engine is None:
            raise UsageError("this LLM is closed: make another one")
        return self._engine

    @property
    def model(self) -> nn.Module:
        """The model's module."""
        if self.loaded is None:
            raise UsageError("this LLM is closed: make another one")
        return self.loaded.module

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of such.
            params: for all prompts, or one for each.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing is run then.
        """
        each = prompt_list(prompts)
        return self._run([(self._ids(prompt), prompt) for prompt in each], params_list(params, len(each)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Raises:
            RequestError: as `generate`; also a model without a tokenizer or chat template.
        """
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(each, tools=tools, add_generation_prompt=add_generation_prompt) for each in conversations
        ]
        encoded = [(self.encode(prompt, special=False), prompt) for prompt in prompts]
        return self._run(encoded, params_list(params, len(encoded)))

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, special: bool = True
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; yields the request after each token, the last time finished.

        `special=False` adds no special tokens to a text that holds them already, as a rendered chat does.
        Closing the iterator cancels the request.
        """
        ids = self.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        request_id = self.engine.add(ids, params, prompt=prompt if isinstance(prompt, str) else None)
        outputs = self._follow(request_id)
        # Arms its clean-up, so that an iterator that is dropped unread cancels too.
        next(outputs)
        return outputs

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 logits [tokens, vocabulary] of every position, through the path that generation takes.

        Raises:
            RequestError: ids that cannot be served.
        """
        engine = self.engine
        request_id = engine.add(token_ids, SamplingParams(max_tokens=1, ignore_eos=True), return_logits=True)
        try:
            logits = self._finish([request_id])[0].logits
        finally:
            self._cancel([request_id])
        assert logits is not None
        return logits

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the model's template renders it.

        Raises:
            RequestError: no tokenizer, no template, or messages that the template refuses.
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it cannot chat: use generate with token ids")
        told = isinstance(messages, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in messages)
        if not messages or not told:
            raise RequestError(
                f"messages={messages!r:.200}: give a list of {{'role': ..., 'content': ...}}, at least one"
            )
        return self.tokenizer.render_chat(list(messages), add_generation_prompt=add_generation_prompt, tools=tools)

    def close(self) -> None:
        """End all requests and let go of the model and its state."""
        if self._engine is not None:
            self._engine.abort_all()
        self._engine = self.loaded = self.tokenizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, prompts: Sequence[tuple[Sequence[int], Any]], params: list[SamplingParams]) -> list[RequestOutput]:
        request_ids: list[str] = []
        try:
            for (ids, prompt), each in zip(prompts, params, strict=True):
                request_ids.append(self.engine.add(ids, each, prompt=prompt if isinstance(prompt, str) else None))
            return self._finish(request_ids)
        finally:
            self._cancel(request_ids)

    def _finish(self, request_ids: list[str]) -> list[RequestOutput]:
        """Step until these requests are done."""
        self._news.update(dict.fromkeys(request_ids))
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            while (news := self._news[request_id]) is None or news.finish_reason is None:
                self._step(request_id)
            outputs.append(self.engine.output(request_id))
        return outputs

    def _follow(self, request_id: str) -> Iterator[RequestOutput]:
        self._news[request_id] = None
        try:
            yield self.engine.output(request_id)
            while True:
                while (news := self._news[request_id]) is None:
                    self._step(request_id)
                self._news[request_id] = None
                yield self.engine.output(request_id, news)
                if news.finish_reason is not None:
                    return
        finally:
            self._cancel([request_id])

    def _step(self, request_id: str) -> None:
        """One step on behalf of a request; keeps the news of all that are being followed."""
        if request_id not in self.engine:
            raise RequestError(
                f"request {request_id!r} was aborted when another one failed, or by close(): send it again"
            )
        for news in self.engine.step():
            if news.request_id in self._news:
                self._news[news.request_id] = news.after(self._news[news.request_id])

    def _cancel(self, request_ids: Sequence[str]) -> None:
        """End what is not finished, whatever interrupted it."""
        for request_id in request_ids:
            self._news.pop(request_id, None)
            if self._engine is not None:
                self._engine.cancel(request_id)

    def _ids(self, prompt: Any) -> Any:
        return self.encode(prompt, special=True) if isinstance(prompt, str) else prompt

    def encode(self, prompt: str, *, special: bool = True) -> list[int]:
        """The text's token ids, with the special tokens that the tokenizer adds.

        Raises:
            RequestError: an empty text, or no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give token ids instead of a text")
        if not prompt:
            raise RequestError("the prompt is empty: give a text, or token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=special)


def engine_config(limits: Mapping[str, Any]) -> EngineConfig:
    """
    Raises:
        UsageError: a name that is none of EngineConfig's.
    """
    known = EngineConfig.__dataclass_fields__
    for name in limits:
        if name not in known:
            raise UsageError(
                f"{name!r} is no option of LLM: its options are model, dtype, device, plugins, {', '.join(known)}"
            )
    return EngineConfig(**limits)


def prompt_list(prompts: Any) -> list[Any]:
    """One or several prompts as a list of them.

    Raises:
        RequestError: something that is neither a text, ids, nor a list of such.
    """
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"{prompts!r} is a {type(prompts).__name__}: give a text, a list of token ids, or a list of such"
        )
    if not prompts:
        raise RequestError("there is no prompt: give a text, a list of token ids, or a list of such")
    nested = [
        isinstance(each, (str, Sequence)) or (hasattr(each, "tolist") and getattr(each, "ndim", 1) > 0)
        for each in prompts
    ]
    if any(nested) and not all(nested):
        place = nested.index(False)
        raise RequestError(f"prompt {place} is {prompts[place]!r}: give a text or a list of token ids")
    return list(prompts) if all(nested) else [prompts]


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts.

    Raises:
        UsageError: another number of them, or something else.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise UsageError(f"params={params!r}: give SamplingParams, or a list of one for each prompt")
    if len(params) != count:
        raise UsageError(f"{len(params)} SamplingParams for {count} prompts: give one, or one for each")
    return list(params)
