"""The text stage: what stands around the model, token ids of texts and rendered chats and the ids that stop.

Ours are what `LLM.generate` and `LLM.chat` feed and stop at; they are held against transformers' own tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.check.conversations import CHATS, Chat, end_of_turn, plain_texts
from rtp_runtime.check.report import Cause, Finding, NotJudged, StageResult
from rtp_runtime.check.session import Session

if TYPE_CHECKING:
    from rtp_runtime.text import Tokenizer

TOKENIZER, TEMPLATE, STOPS = "tokenizer", "chat template", "stop ids"
MAX_FINDINGS = 6
FIXES = {
    "token ids of a text": "compare tokenizer.json and tokenizer_config.json with the reference's",
    "token ids of a chat": "compare tokenizer.json and tokenizer_config.json with the reference's",
    "ids beyond the vocabulary": "take a tokenizer that belongs to these weights, or weights with a row for every id",
    "begin of text, more than once": "write it in the chat template or let the tokenizer add it, not both",
    "rendered text": "compare chat_template.jinja, or chat_template in tokenizer_config.json, with the reference's",
    "what it refuses": "compare chat_template.jinja, or chat_template in tokenizer_config.json, with the reference's",
    "ids that end a text": "name them in eos_token_id of generation_config.json",
    "the end of a turn": "name it in eos_token_id of generation_config.json, or chats run on",
}
"""Which quantity differs -> what to change."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What rendering a chat gave: its text and ids, or that it was refused."""

    text: str = ""
    ids: tuple[int, ...] = ()
    refused: str = ""


def run_text(session: Session) -> StageResult:
    """Compare our token ids, rendered chats and stop ids with those of transformers' tokenizer.

    Raises:
        CheckpointError, ConfigError: files of our tokenizer that cannot be read.
    """
    from rtp_runtime.text import load_tokenizer

    stage = StageResult("text")
    ours = load_tokenizer(session.options.model)
    if ours is None:
        return _nothing(stage, "the checkpoint has no tokenizer")
    try:
        reference = _load_reference(session.options.reference_path)
    except Exception as error:  # whatever a format's reader raises
        return _nothing(stage, f"transformers cannot read a tokenizer there: {str(error).splitlines()[0]}")
    TextComparison(session, stage, ours, reference).run()
    return stage


def text_cause(finding: Finding) -> Cause:
    """The cause of a finding of this stage, which says itself what differs."""
    return Cause(status="named", kind=finding.module, words=finding.detail, fix=FIXES.get(finding.what, ""))


def _nothing(stage: StageResult, why: str) -> StageResult:
    stage.left_out = True
    stage.not_judged.append(NotJudged("text", why))
    return stage


def _load_reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


class TextComparison:
    """Two tokenizers with their templates and stop ids, compared into a stage."""

    def __init__(self, session: Session, stage: StageResult, ours: Tokenizer, reference: Any) -> None:
        from rtp_runtime.engine.limits import model_limits
        from rtp_runtime.model import load_config

        self._session, self._stage = session, stage
        self._ours, self._reference = ours, reference
        model = session.options.model
        self._limits = model_limits(load_config(model), model, ours.eos_ids)
        self._stops = _stops_of(session, reference)
        self._num_texts = self._num_chats = self._num_refused = 0

    def run(self) -> None:
        """Texts, then chats, then stop ids."""
        for text in plain_texts(self._reference):
            for special in (True, False):
                self._compare_text(text, special)
        if self._ours.has_chat_template or getattr(self._reference, "chat_template", None):
            for chat in CHATS:
                self._compare_chat(chat)
        else:
            self._stage.not_judged.append(NotJudged("chats", "the tokenizer has no chat template"))
        self._compare_stops()
        if self._ours.vocab_size > self._limits.vocab_size:
            more = self._ours.vocab_size - self._limits.vocab_size
            self._stage.notes.append(f"the tokenizer knows {more} ids for which the model has no embedding")
        self._stage.numbers = {"texts": self._num_texts, "chats": self._num_chats, "refused": self._num_refused}
        ids = ", ".join(map(str, sorted(self._limits.eos_ids))) or "none"
        self._stage.summary = f"{self._num_texts} texts and {self._num_chats} rendered chats; stop ids {ids}"

    def _compare_text(self, text: str, special: bool) -> None:
        self._num_texts += 1
        ours = self._ours.encode(text, add_special_tokens=special)
        wanted = list(self._reference.encode(text, add_special_tokens=special))
        where = f"{text[:48]!r}{'' if special else ', without special tokens'}"
        self._judge_ids("token ids of a text", where, ours, wanted)

    def _compare_chat(self, chat: Chat) -> None:
        ours, wanted = _outcome(self._ours_of, chat), _outcome(self._reference_of, chat)
        if ours.refused and wanted.refused:
            self._num_refused += 1
            return
        self._num_chats += 1
        if ours.refused or wanted.refused:
            who = "our rendering" if ours.refused else "the reference's"
            words = f"{chat.name}: {who} alone refuses it: {ours.refused or wanted.refused}"
            self._find(TEMPLATE, "what it refuses", words)
        elif ours.text != wanted.text:
            self._find(TEMPLATE, "rendered text", f"{chat.name}: {_first_difference(ours.text, wanted.text)}")
        else:
            self._judge_ids("token ids of a chat", chat.name, ours.ids, wanted.ids)

    def _ours_of(self, chat: Chat) -> Outcome:
        text = self._ours.render_chat(chat.messages, chat.add_generation_prompt, chat.tools)
        return Outcome(text, tuple(self._ours.encode(text, add_special_tokens=False)))

    def _reference_of(self, chat: Chat) -> Outcome:
        def apply(**more: Any) -> Any:
            messages, prompt = [dict(message) for message in chat.messages], chat.add_generation_prompt
            return self._reference.apply_chat_template(messages, tools=chat.tools, add_generation_prompt=prompt, **more)

        return Outcome(apply(tokenize=False), tuple(apply(tokenize=True, return_dict=False)))

    def _judge_ids(self, what: str, where: str, ours: Sequence[int], wanted: Sequence[int]) -> None:
        beyond = [each for each in ours if each >= self._limits.vocab_size]
        bos = self._reference.bos_token_id
        if list(ours) != list(wanted):
            place = next((n for n, pair in enumerate(zip(ours, wanted, strict=False)) if pair[0] != pair[1]), None)
            place = min(len(ours), len(wanted)) if place is None else place
            found = f"ours {list(ours[place : place + 4])}, the reference's {list(wanted[place : place + 4])}"
            twice = "; ours begins the text twice" if _is_twice(ours, bos) else ""
            self._find(TOKENIZER, what, f"{where}: id {place} on: {found}{twice}")
        elif _is_twice(ours, bos):
            name = self._reference.bos_token
            self._find(TOKENIZER, "begin of text, more than once", f"{where}: it begins with {name} {name} (id {bos})")
        if beyond:
            rows = self._limits.vocab_size
            self._find(TOKENIZER, "ids beyond the vocabulary", f"{where}: id {beyond[0]}, the model has {rows} rows")

    def _compare_stops(self) -> None:
        ours, stage = self._limits.eos_ids, self._stage
        missing, more = sorted(self._stops - ours), sorted(ours - self._stops)
        if missing:
            self._find(STOPS, "ids that end a text", f"ours goes on after {self._named(missing)}; the reference stops")
        if more:
            self._find(STOPS, "ids that end a text", f"ours stops at {self._named(more)}; the reference goes on")
        if not getattr(self._reference, "chat_template", None):
            return
        end = end_of_turn(self._reference)
        if end is None:
            stage.notes.append("the chat template ends an assistant's turn with no token of its own")
        elif end not in ours and end not in missing:
            words = f"the template ends a turn with {self._named([end])}, which no eos_token_id names"
            self._find(STOPS, "the end of a turn", words)

    def _named(self, ids: Iterable[int]) -> str:
        return ", ".join(f"{self._reference.convert_ids_to_tokens(each)} (id {each})" for each in ids)

    def _find(self, module: str, what: str, detail: str) -> None:
        if len(self._stage.findings) < MAX_FINDINGS:
            self._stage.findings.append(
                Finding(
                    stage="text", module=module, layer=None, error=math.inf, tolerance=0.0, what=what, detail=detail,
                    rank=-2.0 + 0.01 * len(self._stage.findings),
                )
            )  # fmt: skip


def _stops_of(session: Session, tokenizer: Any) -> frozenset[int]:
    """What transformers reads of the ids that end a text: generation config, config, the text part's, tokenizer."""
    from transformers import GenerationConfig

    path, config = session.options.reference_path, session.reference.config
    sources = [config, config.get_text_config()]
    if (path / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(str(path)))
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(each for each in found if 0 <= each < session.reference.vocab_size)


def _outcome(render: Callable[[Chat], Outcome], chat: Chat) -> Outcome:
    try:
        return render(chat)
    except Exception as error:  # a template raises what it likes
        return Outcome(refused=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _is_twice(ids: Sequence[int], bos: int | None) -> bool:
    return bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos


def _first_difference(ours: str, wanted: str) -> str:
    """The place from which two texts differ, with a little before it."""
    place = next((n for n, pair in enumerate(zip(ours, wanted, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(ours), len(wanted)) if place is None else place
    piece = slice(max(0, place - 12), place + 28)
    return f"at character {place} ours has …{ours[piece]!r}, the reference …{wanted[piece]!r}"
