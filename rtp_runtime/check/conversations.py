"""Texts and conversations on which tokenizers and chat templates are known to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXTS = (
    "Hello, world! It's 3:45 – isn't it?",
    "  two spaces,\ttabs \t and   runs of    them  \n\n\n  and lines\r\n  ",
    "def f(x):\n    return {'a': [1, 2.5, None]}\n\n\t# done",
    "Größe, naïve café; Ελληνικά; Привет, мир; こんにちは、世界; 你好",
    "e\u0301 \u00e9 \ufb01 \u2126 \u200b\u200d \u00a0 \U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \x00",
    "12345678901234567890 1,000,000.00 0x1F",
    " leading and trailing ",
)
MAX_SPECIAL = 8
_PONG = "Pong-7"
_SYSTEM = {"role": "system", "content": "You answer briefly."}
_USER = {"role": "user", "content": "  What is 6 × 7?\n"}
_ANSWER = {"role": "assistant", "content": "42. "}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name, e.g. Zürich"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}],
}
_RESULT = {"role": "tool", "name": "get_weather", "content": '{"degrees": 21}'}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None


CHATS = (
    Chat("a question", [_USER]),
    Chat("a question, no generation prompt", [_USER], add_generation_prompt=False),
    Chat("system and user", [_SYSTEM, _USER]),
    Chat("several turns", [_SYSTEM, _USER, _ANSWER, {"role": "user", "content": "Really? 你好 <b>&amp;</b>"}]),
    Chat("several turns, no generation prompt", [_USER, _ANSWER], add_generation_prompt=False),
    Chat("reasoning", [_USER, {**_ANSWER, "reasoning_content": "Six sevens."}, {"role": "user", "content": "Why?"}]),
    Chat("reasoning, no generation prompt", [_USER, {**_ANSWER, "reasoning_content": "Six sevens."}], False),
    Chat("tools", [_SYSTEM, _USER], tools=[_TOOL]),
    Chat("a tool's answer", [_USER, _CALL, _RESULT], tools=[_TOOL]),
)


def plain_texts(tokenizer: Any) -> list[str]:
    """The texts, and one with special tokens of a transformers tokenizer written in it."""
    special = list(dict.fromkeys(map(str, tokenizer.all_special_tokens)))[:MAX_SPECIAL]
    return [*TEXTS, *([f"a {' '.join(special)} b{''.join(special)}c"] if special else [])]


def end_of_turn(tokenizer: Any) -> int | None:
    """The id with which a transformers tokenizer's template ends an assistant's turn; None where it has none.

    After the last message, or, where nothing follows that, what begins the next turn.
    """
    marks = {*map(int, tokenizer.added_tokens_decoder), *map(int, tokenizer.all_special_ids)} - {tokenizer.bos_token_id}
    answer = {"role": "assistant", "content": _PONG}
    for messages in ([_USER, answer], [_USER, answer, _USER]):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception:  # a template raises what it likes
            continue
        _, found, tail = text.rpartition(_PONG)
        ids = tokenizer.encode(tail, add_special_tokens=False) if found else []
        end = next((each for each in ids if each in marks), None)
        if end is not None:
            return int(end)
    return None
