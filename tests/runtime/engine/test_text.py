"""Text in and out of a tiny checkpoint with a byte-level tokenizer: decoding, stop strings, chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rtp_runtime import LLM, AsyncLLM, SamplingParams
from rtp_runtime.engine import EngineConfig
from rtp_runtime.errors import RequestError
from rtp_runtime.testing.tiny_models import write_tiny

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talker")
    write_tiny("qwen3", path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, num_blocks=256)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3} | more))


@pytest.fixture(scope="module")
def whole(llm: LLM) -> str:
    text = llm.generate("Hello", params())[0].text
    assert text is not None and len(text) > 15
    return text


def test_text_is_what_the_tokenizer_decodes(llm: LLM, whole: str) -> None:
    output = llm.generate("Hello", params())[0]
    assert llm.tokenizer is not None
    assert output.prompt == "Hello" and output.prompt_token_ids == llm.tokenizer.encode("Hello")
    assert output.text == whole == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert llm.generate(output.prompt_token_ids, params())[0].text == whole


def test_pieces_are_the_text(llm: LLM, whole: str) -> None:
    outputs = list(llm.stream("Hello", params()))
    assert "".join(output.new_text or "" for output in outputs) == outputs[-1].text == whole
    assert all(whole.startswith(output.text or "") for output in outputs)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("make", [lambda text: text[6:9], lambda text: text[9], lambda text: text[4:14]])
def test_stop_strings(llm: LLM, whole: str, make: Callable[[str], str], keep: bool) -> None:
    stop = make(whole)
    outputs = list(llm.stream("Hello", params(stop=["never there", stop], include_stop_str_in_output=keep)))
    end = whole.index(stop) + (len(stop) if keep else 0)
    assert outputs[-1].text == whole[:end] == "".join(output.new_text or "" for output in outputs)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_what_is_held_back_comes_at_the_end(llm: LLM, whole: str) -> None:
    output = llm.generate("Hello", params(stop=whole[-3:] + "never there"))[0]
    assert (output.text, output.finish_reason) == (whole, "length")


def test_the_text_of_a_stop_id_is_not_shown(llm: LLM, whole: str) -> None:
    tokens = llm.generate("Hello", params())[0].token_ids
    output = llm.generate("Hello", params(stop_token_ids=[tokens[8]]))[0]
    assert output.stop_reason == tokens[8] == output.token_ids[-1]
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1], skip_special_tokens=True)


def test_eos_ids_are_a_union(checkpoint: Path, llm: LLM) -> None:
    assert llm.tokenizer is not None
    end = llm.tokenizer.encode("<|end|>")[0]
    assert {2, end} <= llm.engine.limits.eos_ids


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, params())[0]
    assert output.prompt == "<|user|>Hi\n<|assistant|>"
    assert output.text == llm.generate(output.prompt, params())[0].text
    both = llm.chat([messages, [*messages, {"role": "assistant", "content": "Ho"}]], params())
    assert both[0].text == output.text and both[1].prompt == "<|user|>Hi\n<|assistant|>Ho\n<|assistant|>"


@pytest.mark.parametrize("messages", [[], [[]], "Hi", ["Hi"], [{"content": "x"}], None, [{"role": "user"}, 3]])
def test_messages_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages)


@pytest.mark.parametrize("prompt", ["", ["a", ""], ["a", 3]])
def test_texts_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt)


def test_async(llm: LLM, whole: str) -> None:
    async def ask() -> list[str]:
        assert llm.loaded is not None
        async with AsyncLLM.from_loaded(llm.loaded, EngineConfig(num_blocks=256), tokenizer=llm.tokenizer) as twin:
            messages = [{"role": "user", "content": "Hi"}]
            streams = [twin.generate("Hello", params()), twin.chat(messages, params())]
            return ["".join([output.new_text or "" async for output in stream]) for stream in streams]

    chat = llm.chat([{"role": "user", "content": "Hi"}], params())[0].text
    assert asyncio.run(ask()) == [whole, chat]
