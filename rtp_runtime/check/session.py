"""The two sides of one check and what they share: prompts, the reference's continuations and logits, the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.noise import MOST_NOISE, Noise, add_continuation, add_noise
from rtp_runtime.check.options import CheckOptions
from rtp_runtime.check.ours import OurModel, Output
from rtp_runtime.check.paths import Effort
from rtp_runtime.check.prompts import PROMPT_LENGTHS, Prompt, PromptLimits, draw_prompt, make_prompts
from rtp_runtime.check.reference import Continuation, Reference
from rtp_runtime.check.structure import LayerKind, layer_kinds
from rtp_runtime.model.config import stated_context

if TYPE_CHECKING:
    from rtp_runtime.plugins import Plugins

MAX_EXPERT_PROMPTS = 12
"""Prompts drawn, at most, to visit the experts that no other prompt visits."""
MAX_FRUITLESS = 2
"""Prompts in a row that visited no new expert, after which the rest is taken to be out of reach."""
NEW_TOKENS = 8
"""Of models that are not small."""
FEW_NEW_TOKENS = 4
"""Of large ones."""
FEW_LENGTHS = (9, 72)
FEW_TOKENS = 300
"""Of large ones, a window or a compressed entry is crossed twice by prompts of at most this length."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with what the reference says of it."""

    prompt: Prompt
    continuation: tuple[int, ...]
    """The reference's greedy tokens."""
    logits: Tensor
    """[len(sequence), vocab]: of the prompt and all of the continuation but its last token."""
    extra: bool = False
    """Drawn for experts that no other prompt visits: not run in every mode."""

    @property
    def name(self) -> str:
        return self.prompt.name

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and the continuation's tokens that are fed again."""
        return self.prompt.ids + self.continuation[:-1]


@dataclass(slots=True)
class Session:
    """Everything the stages need. `ours` is loaded once the audit has passed."""

    options: CheckOptions
    plugins: Plugins
    reference: Reference
    ours: OurModel | None = None
    cases: list[Case] = field(default_factory=list)
    noise: Noise = field(default_factory=Noise)
    kinds: list[LayerKind] = field(default_factory=list)
    experts: dict[str, set[int]] = field(default_factory=dict)
    """Module that chose -> the experts that some token was routed to."""
    num_experts: dict[str, int] = field(default_factory=dict)
    selections: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Layer -> (places that it selects, places that it selected them from at most)."""
    first_ties: dict[str, int] = field(default_factory=dict)
    """Prompt -> its first token whose experts changed by a tie; logits from there on say nothing."""
    modules_differ: bool = False
    """Whether a sub-block was found to differ, given the reference's input."""
    settled: set[tuple[str, str]] = field(default_factory=set)
    """(prompt, schedule) in which choices among near equals were looked for."""
    noisy: dict[str, Effort] = field(default_factory=dict)
    """Prompts on which the reference is compared with itself, and how."""
    whole: dict[str, Output] = field(default_factory=dict)
    """What ordinary runs of the prompts gave, one after another."""
    unsound_continuations: list[str] = field(default_factory=list)
    """Prompts whose continuation through the reference's cache is not what its full forwards say."""
    kernels: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    """Set of kernels that was judged -> op -> the implementations in it."""
    order: list[str] = field(default_factory=list)
    consumers: dict[str, int] = field(default_factory=dict)
    say: Progress = lambda message: None
    """Told what is being done."""

    @property
    def model(self) -> OurModel:
        assert self.ours is not None, "our model is loaded after the audit"
        return self.ours

    @property
    def num_new_tokens(self) -> int:
        """Length of the continuations: steps of large models are dear."""
        wanted = self.options.num_new_tokens
        if self.reference.is_large:
            return min(wanted, FEW_NEW_TOKENS)
        return wanted if self.reference.is_small else min(wanted, NEW_TOKENS)

    def note_selections(self, exercised: Mapping[int, tuple[int, int]]) -> None:
        """Keep, of each layer that selects, from how many places it did."""
        for layer, (chosen, seen) in exercised.items():
            self.selections[layer] = (chosen, max(seen, self.selections.get(layer, (chosen, 0))[1]))

    def rank_after_layers(self) -> float:
        """Place right after the last decoder layer."""
        return float(
            max((self.order.index(name) for name in self.reference.layers if name in self.order), default=-1) + 1
        )

    def rank(self, module: str) -> float:
        """Place of a module in the reference's execution order."""
        inside = [place for place, name in enumerate(self.order) if name == module or name.startswith(f"{module}.")]
        return float(inside[-1] if module in self.order else inside[0] if inside else len(self.order))


def make_cases(
    session: Session, encode: Callable[[str], Sequence[int]] | None = None
) -> Iterator[tuple[Case, Capture]]:
    """The prompts one by one, each with the reference's capture; more are drawn while experts were not visited."""
    limits = prompt_limits(session)
    options = session.options
    prompts = make_prompts(limits, options.seed, encode, options.prompts)
    prompts = [prompt for prompt in prompts if max(prompt.ids) < limits.vocab_size]
    longest = max(prompts, key=len)
    session.noisy = {longest.name: Effort.MODULES}
    if session.reference.is_large:
        prompts = [prompt for prompt in prompts if prompt in (prompts[0], longest) or prompt.name.startswith("your")]
    elif session.reference.is_small:
        few = dict.fromkeys((prompt.name for prompt in prompts), Effort.LOGITS)
        session.noisy = few | {longest.name: Effort.MODULES, prompts[0].name: Effort.ALL}
    for prompt in prompts:
        yield _make_case(session, prompt)
    fruitless = 0
    for number in range(0 if session.reference.is_large else MAX_EXPERT_PROMPTS):
        visited = _num_visited(session)
        if visited == sum(session.num_experts.values()) or fruitless == MAX_FRUITLESS:
            return
        drawn = draw_prompt(limits, min(96, limits.max_tokens), options.seed + 100 + number)
        if session.reference.is_small:
            session.noisy[drawn.name] = Effort.LOGITS
        yield _make_case(session, drawn, extra=True)
        fruitless = 0 if _num_visited(session) > visited else fruitless + 1


def _num_visited(session: Session) -> int:
    return sum(map(len, session.experts.values()))


def prompt_limits(session: Session) -> PromptLimits:
    """Lengths that both configs allow, and the windows to cross, as they declare them."""
    reference, ours = session.reference, session.model.loaded.config.hf.get_text_config()
    declared = [getattr(text, "sliding_window", None) for text in (reference.config.get_text_config(), ours)]
    windows = tuple(window for window in declared if isinstance(window, int) and window > 0)
    lengths = session.options.lengths
    if reference.is_large:
        crossed = (*windows, *session.model.ratios)
        windows = tuple(window for window in crossed if 2 * window + 5 <= FEW_TOKENS)
        lengths = FEW_LENGTHS if lengths == PROMPT_LENGTHS else lengths
    vocab_size, positions = common_sizes(session)
    return PromptLimits(vocab_size, max(1, positions - session.num_new_tokens), windows, lengths)


def common_sizes(session: Session) -> tuple[int, int]:
    """How many token ids, and how many positions, both configs allow."""
    reference, ours = session.reference, session.model.loaded.config.hf.get_text_config()
    positions = stated_context(lambda key: getattr(ours, key, None)) or reference.max_positions
    return min(int(ours.vocab_size), reference.vocab_size), min(positions, reference.max_positions)


def _make_case(session: Session, prompt: Prompt, extra: bool = False) -> tuple[Case, Capture]:
    session.say(f"probes: {prompt.name}, the reference")
    continuation = session.reference.continuation(prompt.ids, session.num_new_tokens)
    logits, capture = session.reference.capture((*prompt.ids, *continuation.tokens[:-1]))
    if not _agrees(continuation, logits[len(prompt) - 1 :]):
        session.unsound_continuations.append(prompt.name)
        continuation = session.reference.continuation_by_full_forwards(prompt.ids, session.num_new_tokens)
        logits, capture = session.reference.capture((*prompt.ids, *continuation.tokens[:-1]))
    elif session.reference.is_large and session.reference.keeps_cache:
        add_continuation(session.noise, continuation.logits, logits[len(prompt) - 1 :])
    if not session.order or len(capture.order) > len(session.order):
        session.order, session.consumers = capture.order, capture.consumers
    _note_experts(session, capture)
    _note_kinds(session, capture)
    case = Case(prompt, continuation.tokens, logits, extra)
    session.cases.append(case)
    return case, capture


def _agrees(continuation: Continuation, logits: Tensor) -> bool:
    """Whether a full forward over the continuation says the same, a tie or rounding apart."""
    best = logits.argmax(dim=-1).tolist()
    gaps = [float(row[one] - row[other]) for row, one, other in zip(logits, best, continuation.tokens, strict=True)]
    return max(gaps) <= MOST_NOISE * float(logits.std())


def _note_kinds(session: Session, capture: Capture) -> None:
    """Keep the kinds as the longest prompt shows them: a window is seen only by prompts longer than it."""
    longest = max((len(case.sequence) for case in session.cases), default=0)
    if capture.num_tokens > longest:
        session.kinds = layer_kinds(session.reference.modules, capture, session.reference.layers)


def _note_experts(session: Session, capture: Capture) -> None:
    for name, call in capture.calls.items():
        ids = next((t for t in call.outputs if not t.is_floating_point() and t.ndim == 2), None)
        weight: Any = getattr(session.reference.modules[name], "weight", None)
        if ids is not None and weight is not None:
            session.experts.setdefault(name, set()).update(ids.flatten().tolist())
            session.num_experts[name] = int(weight.shape[0])


def measure_noise(session: Session, case: Case, capture: Capture) -> None:
    """The reference against itself, on the prompts that were chosen for it."""
    if case.name not in session.noisy:
        return
    question = ("noise", case.sequence)
    known = session.reference.known
    if question not in known:
        session.say(f"probes: {case.name}, the reference against itself")
        known[question] = Noise()
        first = (case.logits, capture)
        add_noise(known[question], session.reference, case.name, case.sequence, first, session.noisy[case.name])
    session.noise.merge(known[question])
