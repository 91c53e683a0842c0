"""Our side: one loaded model whose attention ops can be listened to, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.kernels import Kernels, RankedRegistry
from rtp_runtime.check.recorder import RecordingOps
from rtp_runtime.errors import RtpError

if TYPE_CHECKING:
    from rtp_runtime.engine.engine import Engine
    from rtp_runtime.engine.outputs import RequestOutput
    from rtp_runtime.model import LoadedModel
    from rtp_runtime.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Output:
    """What an engine gave back for one request."""

    tokens: tuple[int, ...]
    logits: Tensor
    """[tokens that were fed, vocab] float32; empty unless they were to be kept."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests meet the engine: its limits, and what is done between steps."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig` besides the sizes that the requests need."""
    together: bool = False
    """All requests in one engine at once, each joining one step after the one before; else one after another."""
    preempt_after: tuple[int, ...] = ()
    """Steps after which a running request loses its state, each time another one."""
    reverse: bool = False
    """The last request comes first."""
    temperature: float = 0.0
    """Above 0 tokens are sampled, with `seed`."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts by name, and what is asked for each."""

    prompts: Mapping[str, Sequence[int]]
    num_new_tokens: int
    keep_logits: bool


@dataclass(frozen=True, slots=True)
class Again:
    """The second run of a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of these tokens."""
    num_cached_tokens: int
    """Tokens of the prompt that were not computed again."""
    keeps: bool
    """Whether the engine keeps anything of this model for requests to come."""


class ModuleError(Exception):
    """Our model raised while it ran. `module`: the innermost module that was entered."""

    def __init__(self, module: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.module = module


class OurModel:
    """The model that a plugin provides, in float32."""

    def __init__(self, loaded: LoadedModel, ops: RecordingOps) -> None:
        self.loaded = loaded
        self.ops = ops

    @property
    def module(self) -> nn.Module:
        return self.loaded.module

    @property
    def ratios(self) -> frozenset[int]:
        """How many tokens one entry of a compressed state stands for, of all such states."""
        return frozenset(int(getattr(state, "tokens_per_entry", 1)) for *_, state in self.loaded.states.named()) - {1}

    def run(
        self,
        prompts: Mapping[str, Sequence[int]],
        num_new_tokens: int,
        schedule: Schedule | None = None,
        keep_logits: bool = True,
    ) -> dict[str, Output]:
        """Greedy continuations of all prompts through the ordinary engine, with the logits of every position.

        Raises:
            ModuleError: the model, or what feeds it, raised.
        """
        schedule = schedule or Schedule()
        named = list(prompts.items())[:: -1 if schedule.reverse else 1]
        groups = [dict(named)] if schedule.together else [{name: ids} for name, ids in named]
        outputs: dict[str, Output] = {}
        with _entered_modules(self.module) as entered:
            try:
                for group in groups:
                    requests = Requests(group, num_new_tokens, keep_logits)
                    outputs |= _run_group(self._engine(requests, schedule), requests, schedule)
            except RtpError:
                raise
            except Exception as error:
                raise ModuleError(entered[-1] if entered else "", error) from error
        return outputs

    @property
    def has_slots(self) -> bool:
        """Whether some state is one entry per request, so that only copies of it, snapshots, can be reused."""
        from rtp_runtime.state import SlotState

        return any(isinstance(state, SlotState) for *_, state in self.loaded.states.named())

    def run_twice(
        self,
        prompts: Mapping[str, Sequence[int]],
        num_new_tokens: int,
        then: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Again]:
        """Each prompt twice in an engine that keeps what the first run computed; what the second run gave.

        `then`: the second run's prompts, where they are others; they go on for one token.

        Raises:
            ModuleError: the model, or what feeds it, raised.
        """
        found: dict[str, Again] = {}
        with _entered_modules(self.module) as entered:
            try:
                for name, ids in prompts.items():
                    second = (then or prompts)[name]
                    requests = Requests({name: max(ids, second, key=len)}, num_new_tokens, keep_logits=False)
                    engine = self._engine(requests, Schedule({"prefix_caching": True, "max_chunk_tokens": 64}))
                    asked = [(list(ids), num_new_tokens), (list(second), 1 if then else num_new_tokens)]
                    found[name] = _run_again(engine, asked)
            except RtpError:
                raise
            except Exception as error:
                raise ModuleError(entered[-1] if entered else "", error) from error
        return found

    def free(self) -> None:
        """Give up weights that are kept besides the form that is computed with."""
        from rtp_kernel.components.base import components

        for _, component in components(self.module):
            component.free()

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of the last hidden state [rows, hidden], as the engine asks for them."""
        module: Any = self.module
        with torch.inference_mode():
            logits: Tensor = module.logits(hidden.to(self.loaded.dtype))
            return logits.float()

    def _engine(self, requests: Requests, schedule: Schedule) -> Engine:
        from rtp_runtime.engine.config import EngineConfig
        from rtp_runtime.engine.engine import Engine

        lengths = [len(ids) for ids in requests.prompts.values()]
        longest = max(lengths) + requests.num_new_tokens
        limits = {
            "max_num_seqs": len(lengths),
            "max_num_batched_tokens": max(sum(lengths), len(lengths)),
            "max_model_len": longest,
            "prefix_caching": False,
        }
        return Engine(self.loaded, EngineConfig(**(limits | dict(schedule.limits))))


def _run_group(engine: Engine, requests: Requests, schedule: Schedule) -> dict[str, Output]:
    from rtp_runtime.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=schedule.temperature, seed=schedule.seed, max_tokens=requests.num_new_tokens, ignore_eos=True
    )
    waiting, victims = list(requests.prompts), list(requests.prompts)
    step, finished = 0, set[str]()
    while waiting or engine.has_work:
        if waiting:
            name = waiting.pop(0)
            engine.add(list(requests.prompts[name]), params, request_id=name, return_logits=requests.keep_logits)
        finished |= {news.request_id for news in engine.step() if news.finish_reason is not None}
        step += 1
        if step in schedule.preempt_after:
            victim = next((name for name in victims if name not in finished and engine.preempt(name)), None)
            if victim is not None:
                victims.remove(victim)
                victims.append(victim)
    return {name: _output(engine.output(name)) for name in requests.prompts}


def _run_again(engine: Engine, asked: Sequence[tuple[list[int], int]]) -> Again:
    from rtp_runtime.engine.sampling_params import SamplingParams

    for name, (ids, num_tokens) in zip(("first", "again"), asked, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
        engine.add(ids, params, request_id=name)
        while engine.has_work:
            engine.step()
    output = engine.output("again")
    tokens = tuple(output.token_ids)
    chosen = tuple(place[token].logprob for place, token in zip(output.logprobs or (), tokens, strict=True))
    return Again(tokens, chosen, output.num_cached_tokens, engine.stats.prefix_lookups > 0)


def _output(output: RequestOutput) -> Output:
    return Output(tuple(output.token_ids), torch.empty(0) if output.logits is None else output.logits)


@contextmanager
def _entered_modules(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are running, outermost first; after an error, those that did not return."""
    entered: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            entered.append(name)

        return hook

    def leave(*_: Any) -> None:
        entered.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield entered


def load_ours(path: Path, plugins: Plugins, dtype: str, kernels: Kernels | None = None) -> OurModel:
    """Load our model of the checkpoint, by default with the kernels that a server would take.

    Raises ModelError, PluginError, KernelError.
    """
    from rtp_runtime.model import load_model
    from rtp_runtime.model.building import make_op_table
    from rtp_runtime.weights.dtypes import torch_dtype

    kernels = kernels or Kernels()
    table = make_op_table(plugins, "cpu", torch_dtype(dtype), deterministic=kernels.deterministic)
    registry = RankedRegistry(table.registry, kernels.rank) if kernels.rank else table.registry
    ops = RecordingOps(registry, device=table.device, dtype=table.dtype, deterministic=kernels.deterministic)
    return OurModel(load_model(path, dtype=dtype, plugins=plugins, ops=ops), ops)
