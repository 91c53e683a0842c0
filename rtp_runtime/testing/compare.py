"""Comparisons with the reference that a model must stand, each an assertion with the numbers in its message."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rtp_runtime import LLM, EngineConfig
    from rtp_runtime.model import LoadedModel

TOLERANCE = 2e-5
"""Largest difference of logits over their spread, unless the reference's own attention paths differ by more."""
LENGTHS = (1, 5, 37, 90)
NUM_BLOCKS = 64
COMPANY: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"in one batch": {}, "two at a time": {"max_num_seqs": 2, "max_num_batched_tokens": 24}}
)
"""Ways in which prompts run with others: limits of the engine."""
MOST_NOISE = 1e-3
PADDING = 7


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint, loaded by us and by transformers, both in float32."""

    directory: Path
    loaded: LoadedModel
    reference: Any
    _noise: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: str | Path, plugins: Sequence[str] = ()) -> Case:
        """
        Args:
            directory: a checkpoint small enough to be run twice.
            plugins: plugin modules to load besides those that are installed.
        """
        from rtp_runtime.model import load_model
        from rtp_runtime.plugins import load_plugins
        from rtp_runtime.testing.checkpoints import transformers_class

        loaded = load_model(directory, dtype="float32", plugins=load_plugins(plugins))
        config: Any = loaded.config
        reference = transformers_class(config.architecture, config.hf).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        reference.set_experts_implementation("eager")  # the default takes no rows of odd size
        return cls(Path(directory), loaded, reference.eval())

    @property
    def vocabulary(self) -> int:
        config: Any = self.loaded.config
        return int(config.hf.get_text_config().vocab_size)

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Random ids: one token, a few, and lengths on both sides of block edges and windows."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, self.vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]

    def tolerance(self, ids: Sequence[int]) -> float:
        """What logits may differ by: `TOLERANCE`, or three times the reference's own disagreement, measured once."""
        key = tuple(ids)
        if key not in self._noise:
            self._noise[key] = noise(self.reference, ids)
        return max(TOLERANCE, 3 * self._noise[key])

    def engine(self, **limits: Any) -> LLM:
        """A new engine over the loaded model."""
        from rtp_runtime import LLM, EngineConfig

        defaults = {"max_num_seqs": 4, "max_model_len": 160, "num_blocks": NUM_BLOCKS}
        config: EngineConfig = EngineConfig(**(defaults | limits))
        return LLM.from_loaded(self.loaded, config)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] float32."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return logits


def logits_error(llm: LLM, model: Any, ids: Sequence[int]) -> float:
    """max |ours - reference| / std(reference)."""
    wanted = reference_logits(model, ids)
    return float((llm.logits(list(ids)) - wanted).abs().max() / wanted.std())


def noise(model: Any, ids: Sequence[int]) -> float:
    """The same measure between the reference's own paths: its cache token by token, padding before, sdpa attention.

    A path that the reference does not have, or that is off by more than noise, does not count.
    """
    wanted = reference_logits(model, ids)
    errors = []
    for path in (_cached_logits, _padded_logits, _sdpa_logits):
        with suppress(ValueError, KeyError, ImportError, StopIteration, IndexError):
            errors.append(float((path(model, ids) - wanted).abs().max() / wanted.std()))
    return max((error for error in errors if error < MOST_NOISE), default=0.0)


@torch.no_grad()
def _cached_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary], each token in a step of its own over the cache of those before."""
    argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    rows: list[Tensor] = []
    cache: dict[str, Any] = {}
    for place, token in enumerate(ids):
        step = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[place]])}
        out = model(**step, **cache, use_cache=True)
        cache = {argument: out[argument]}
        rows.append(out.logits)
    return torch.cat(rows, dim=1)[0].float()


@torch.no_grad()
def _padded_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary] behind padding, as a shorter prompt stands in a batch."""
    mask = torch.tensor([[0] * PADDING + [1] * len(ids)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = torch.tensor([[ids[0]] * PADDING + list(ids)])
    out = model(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False)
    logits: Tensor = out.logits[0, PADDING:].float()
    return logits


def _sdpa_logits(model: Any, ids: Sequence[int]) -> Tensor:
    try:
        model.set_attn_implementation("sdpa")
        return reference_logits(model, ids)
    finally:
        model.set_attn_implementation("eager")


def assert_logits_match(case: Case, llm: LLM, what: str, longest: int = LENGTHS[-1]) -> None:
    """Every position's logits of several prompts of at most `longest` tokens equal the reference's."""
    for ids in (ids for ids in case.prompts() if len(ids) <= longest):
        error = logits_error(llm, case.reference, ids)
        tolerance = TOLERANCE if error <= TOLERANCE else case.tolerance(ids)
        assert error <= tolerance, (
            f"{what}, {len(ids)} tokens: logits differ by {error:.2e} of their spread (≤ {tolerance:.0e})"
        )


def assert_modes_match(case: Case) -> None:
    """Prompts in chunks and one token at a time give the logits that whole prompts give."""
    for chunk, longest in ((16, LENGTHS[-1]), (1, LENGTHS[-2])):
        with case.engine(max_chunk_tokens=chunk) as llm:
            assert_logits_match(case, llm, f"chunks of {chunk}", longest)


def assert_greedy_matches(case: Case, new_tokens: int = 8, modes: Sequence[str] = tuple(COMPANY)) -> None:
    """Prompts run together, and with room for too few of them at a time, continue as the reference does alone."""
    from rtp_runtime import SamplingParams

    prompts = case.prompts(seed=1)
    wanted = [_continuation(case.reference, ids, new_tokens) for ids in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for name in modes:
        with case.engine(**COMPANY[name]) as llm:
            for ids, output, expected in zip(prompts, llm.generate(prompts, params), wanted, strict=True):
                _assert_same_tokens(case, ids, list(output.token_ids), expected, name)


@torch.no_grad()
def _continuation(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy, by the reference's own loop; without its cache where that would hold linear attention only."""
    if not _has_attention(model.config.get_text_config()):
        found = list(ids)
        for _ in range(count):
            found.append(int(reference_logits(model, found)[-1].argmax()))
        return found[len(ids) :]
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    continuation: list[int] = out[0, len(ids) :].tolist()
    return continuation


def _has_attention(config: Any) -> bool:
    types = getattr(config, "layer_types", None) or ["full_attention"]
    return any(each != "linear_attention" for each in types)


def check_tiny(name: str, seed: int = 0, plugins: Sequence[str] = (), **overrides: Any) -> None:
    """`check_plugin` of the tiny checkpoint `name` (`TINY_NAMES`), its text config changed by `overrides`.

    A changed config runs its prompts in company in the narrower way only, which has both kinds of step.
    """
    from rtp_runtime.testing.tiny_models import write_tiny

    with tempfile.TemporaryDirectory() as directory:
        write_tiny(name, directory, seed, **overrides)
        check_plugin(directory, plugins, list(COMPANY)[-1:] if overrides else list(COMPANY))


def _assert_same_tokens(case: Case, ids: list[int], found: list[int], wanted: list[int], what: str) -> None:
    """Equal up to a tie: a token whose logit the reference holds equal to the best, within the tolerance."""
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours != theirs:
            logits = reference_logits(case.reference, ids + wanted[:place])[-1]
            gap = float((logits[theirs] - logits[ours]) / logits.std())
            assert gap <= 2 * TOLERANCE, (
                f"{what}, {len(ids)} tokens: token {place} is {ours}, not {theirs} (gap {gap:.1e})"
            )
            return


def assert_export_complete(case: Case) -> None:
    """Every tensor that is not skipped comes back from the loaded module with its name, dtype and bytes."""
    from rtp_runtime.weights.export import export_weights

    def read(name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        owner: Any = case.loaded.module.get_submodule(path)
        found: Tensor = owner.logical(leaf) if hasattr(owner, "logical") else getattr(owner, leaf)
        return found

    with tempfile.TemporaryDirectory() as temporary:
        export_weights(read, case.loaded.weights, "float32", temporary)
        skipped = case.loaded.weights.audit.skipped
        before = {name: tensor for name, tensor in _tensors(case.directory) if name not in skipped}
        after = dict(_tensors(Path(temporary)))
        assert before.keys() == after.keys(), f"lost or added: {sorted(before.keys() ^ after.keys())}"
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), f"{name} came back changed"


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    for file in sorted(directory.glob("*.safetensors")):
        yield from load_file(file).items()


def check_plugin(model_dir: str | Path, plugins: Sequence[str] = (), company: Sequence[str] = tuple(COMPANY)) -> None:
    """Hold the plugin that serves a tiny checkpoint against transformers: all that `ModelConformance` tests.

    Args:
        model_dir: the checkpoint.
        plugins: plugin modules to load besides those that are installed.
        company: ways in which prompts run with others, of `COMPANY`.

    Raises:
        AssertionError: the first comparison that fails, with its numbers.
        RtpError: the checkpoint cannot be loaded, its audit is not clean, or no plugin serves it.
    """
    with one_thread():
        case = Case.load(model_dir, plugins)
        with case.engine() as llm:
            assert_logits_match(case, llm, "whole prompts")
        assert_modes_match(case)
        assert_greedy_matches(case, modes=company)
        assert_export_complete(case)
