"""The Hugging Face model as the reference: float32, eager, safetensors only, no code from the checkpoint.

Also runs it by its other paths (another attention, grouped experts, a cache, a batch), whose disagreement is the noise
that no verdict may go below.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture, ModuleRecorder, per_token
from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.names import find_layers
from rtp_runtime.errors import CheckpointError, ConfigError, NotJudgedError

SMALL_MODEL = 20_000_000
"""Parameters."""
BATCHED_TOKENS = 64
NO_TENSOR = "the checkpoint has no tensor for it, so transformers draws random values"
WRONG_SHAPE = "the checkpoint's tensor has another shape than the config says, so transformers draws random values"


@dataclass(frozen=True, slots=True)
class Defect:
    """A parameter that transformers could not fill from the checkpoint."""

    parameter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the reference says after a prompt, token by token with its cache."""

    tokens: tuple[int, ...]
    logits: Tensor
    """[tokens, vocab]: from which each token was taken."""


class Reference:
    """One loaded reference. All logits are float32 [tokens, vocab] on the CPU."""

    def __init__(
        self, path: Path, model: nn.Module, defects: Sequence[Defect] = (), unexpected: frozenset[str] = frozenset()
    ) -> None:
        self.path = path
        self.model: Any = model
        self.defects = tuple(defects)
        self.unexpected = unexpected
        """Tensors of the checkpoint that transformers does not use."""
        self.config: Any = model.config
        self.known: dict[Any, Any] = {}
        """Small results by their question, for callers that check many times against one reference."""
        self.layers: Mapping[str, int] = find_layers(model)
        """Dotted name of each decoder layer -> its index."""
        forward = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in forward else "past_key_values"

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_small(self) -> bool:
        """Whether a forward costs so little that a check can afford many."""
        return self.num_parameters <= SMALL_MODEL

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int:
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 4096)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """One full forward over the tokens."""
        return self._forward([ids])[0]

    @torch.inference_mode()
    def capture(self, ids: Sequence[int]) -> tuple[Tensor, Capture]:
        """A full forward with everything recorded."""
        recorder = ModuleRecorder(self.model, dict(self.layers), len(ids))
        with recorder.attached() as capture:
            logits = self._forward([ids])[0]
        return logits, capture

    @torch.inference_mode()
    def replay(self, ids: Sequence[int], capture: Capture, tell: Callable[[str, tuple[Tensor, ...]], None]) -> None:
        """A forward in which each layer gets the capture's input; `tell(module, outputs)` hears of each module's."""
        handles = []
        for name in capture.calls.keys() - capture.repeated:

            def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                rows = [per_token(tensor, capture.num_tokens) for tensor in tensors_of([output])]
                tell(name, tuple(tensor for tensor in rows if tensor is not None))

            handles.append(self.model.get_submodule(name).register_forward_hook(hook))
        try:
            with _grafted(self.model, self.layers, capture):
                self._forward([ids])
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def continuation(self, ids: Sequence[int], num_tokens: int) -> Continuation:
        """Greedy tokens after a prompt; end-of-sequence ids do not stop it."""
        question = ("continuation", tuple(ids), num_tokens)
        if question not in self.known:
            self.known[question] = self._continue(ids, num_tokens)
        known: Continuation = self.known[question]
        return known

    def _continue(self, ids: Sequence[int], num_tokens: int) -> Continuation:
        cache = self._new_cache()
        rows, tokens, feed = [], [], list(ids)
        for _ in range(num_tokens):
            output = self.model(input_ids=torch.tensor([feed]), use_cache=True, **{self._cache_argument: cache})
            rows.append(output.logits[0, -1].float())
            tokens.append(int(rows[-1].argmax()))
            feed = tokens[-1:]
        return Continuation(tuple(tokens), torch.stack(rows))

    def paths(self) -> dict[str, Callable[[Sequence[int]], Tensor]]:
        """The reference's other ways to the same logits, by name, as far as this model offers them."""
        paths: dict[str, Callable[[Sequence[int]], Tensor]] = {
            "cached against full": self._cached,
            "batch of two against one": self._batched,
        }
        for name, setting in self.settings().items():
            paths[name] = _inside(setting, self.logits)
        return paths

    def settings(self) -> dict[str, Callable[[], Any]]:
        """Contexts in which the reference computes the same with other implementations, by name."""
        settings: dict[str, Callable[[], Any]] = {}
        if self._accepts(self.model.set_attn_implementation, "sdpa", "eager"):
            settings["sdpa against eager attention"] = lambda: _set(self.model.set_attn_implementation, "sdpa", "eager")
        experts = getattr(self.model, "set_experts_implementation", None)
        can_set = getattr(type(self.model), "_can_set_experts_implementation", bool)
        if experts is not None and can_set() and self._accepts(experts, "grouped_mm", "eager"):
            settings["grouped against looped experts"] = lambda: _set(experts, "grouped_mm", "eager")
        return settings

    def _forward(self, batch: Sequence[Sequence[int]]) -> Tensor:
        output = self.model(input_ids=torch.tensor([list(ids) for ids in batch]), use_cache=False)
        logits: Tensor = output.logits.float()
        return logits

    @torch.inference_mode()
    def _cached(self, ids: Sequence[int]) -> Tensor:
        cache, middle, parts = self._new_cache(), len(ids) // 2, []
        for part in (ids[:middle], ids[middle:]):
            feed = torch.tensor([list(part)])
            parts.append(self.model(input_ids=feed, use_cache=True, **{self._cache_argument: cache}).logits[0].float())
        return torch.cat(parts)

    @torch.inference_mode()
    def _batched(self, ids: Sequence[int]) -> Tensor:
        """Of the first tokens only: a row of a batch does not say more at greater length, and costs twice."""
        ids = ids[:BATCHED_TOKENS]
        return self._forward([ids, list(reversed(ids))])[0]

    def _new_cache(self) -> Any:
        import transformers

        return transformers.DynamicCache(config=self.config)

    @staticmethod
    def _accepts(setter: Callable[[str], Any], value: str, default: str) -> bool:
        try:
            with _set(setter, value, default):
                return True
        except (ValueError, ImportError, KeyError):
            return False


@contextmanager
def _set(setter: Callable[[str], Any], value: str, default: str) -> Iterator[None]:
    try:
        setter(value)
        yield
    finally:
        setter(default)


def _inside(setting: Callable[[], Any], run: Callable[[Sequence[int]], Tensor]) -> Callable[[Sequence[int]], Tensor]:
    def run_inside(ids: Sequence[int]) -> Tensor:
        with setting():
            return run(ids)

    return run_inside


@contextmanager
def _grafted(model: nn.Module, layers: Mapping[str, int], graft: Capture) -> Iterator[None]:
    """Give each layer, in place of its input, the input that `graft` recorded."""
    handles = []
    for name in layers:
        value = graft.calls[name].inputs[0][None]  # [1, tokens, hidden]

        def hook(module: nn.Module, args: Any, kwargs: Any, value: Tensor = value) -> Any:
            if args:
                return (value, *args[1:]), kwargs
            first = next(key for key, item in kwargs.items() if isinstance(item, Tensor))
            return args, {**kwargs, first: value}

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load_reference(path: Path) -> Reference:
    """Load the checkpoint directory with transformers.

    Raises:
        ConfigError: no config, or one without architectures.
        NotJudgedError: transformers does not know the architecture, or cannot be used with this checkpoint.
        CheckpointError: transformers cannot read the weights.
    """
    model_class = _model_class(path)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if getattr(model_class, "_can_set_experts_implementation", bool)():
        options["experts_implementation"] = "eager"
    with _quiet_transformers():
        try:
            model, info = model_class.from_pretrained(
                str(path),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"{path}: transformers cannot load the reference: {reason}") from error
    unexpected = frozenset(str(name) for name in info["unexpected_keys"])
    return Reference(path, model.eval().requires_grad_(False), _defects(info), unexpected)


def outline_reference(path: Path, defects: Sequence[Defect]) -> Reference:
    """The reference's modules without values, for a checkpoint that transformers cannot load because of `defects`."""
    model_class = _model_class(path)
    with _quiet_transformers(), torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(str(path), local_files_only=True))
    return Reference(path, model, defects)


def _model_class(path: Path) -> Any:
    import json

    config = path / "config.json"
    if not config.is_file():
        raise ConfigError(f"{path} has no config.json: give the directory of a checkpoint, or --reference one")
    try:
        raw = json.loads(config.read_text(encoding="utf-8"))
        architectures = raw.get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{config} is not a JSON object: {error}") from error
    if not architectures:
        raise ConfigError(f'{config} names no architecture: it should have "architectures": ["…ForCausalLM"]')
    import transformers

    model_class = getattr(transformers, str(architectures[0]), None)
    if model_class is None or not hasattr(model_class, "from_pretrained"):
        raise NotJudgedError(
            f"transformers {transformers.__version__} has no {architectures[0]}, so there is no reference to check "
            "against: install a version that has it, or give --reference a checkpoint it knows"
        )
    return model_class


def _defects(info: Mapping[str, Any]) -> list[Defect]:
    missing = [Defect(str(name), NO_TENSOR) for name in sorted(info["missing_keys"])]
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    return missing + [Defect(name, WRONG_SHAPE) for name in mismatched]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
