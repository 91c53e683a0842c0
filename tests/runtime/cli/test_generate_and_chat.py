"""`rtp generate` and `rtp chat` on a tiny checkpoint: streams, standard input, JSON, and bad input in one message."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.cli import main
from rtp_runtime.testing.tiny_models import write_tiny

TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("bare")
    write_tiny("qwen3", path)
    return path


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talker")
    write_tiny("qwen3", path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


class Stdin(io.StringIO):
    def __init__(self, text: str, *, terminal: bool = False) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def rtp(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command: (status, stdout, stderr)."""

    def run(*arguments: object, stdin: str = "", terminal: bool = False) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", Stdin(stdin, terminal=terminal))
        status = main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def answer(path: Path, prompt: Any, count: int = 6) -> Any:
    return LLM(path, num_blocks=64).generate(prompt, SamplingParams(max_tokens=count))[0]


def test_ids(rtp: Any, bare: Path) -> None:
    expected = answer(bare, [5, 7, 9])
    status, out, err = rtp("generate", bare, "--token-ids", "5,7, 9", "--max-tokens", 6)
    assert (status, out, err) == (0, ",".join(map(str, expected.token_ids)) + "\n", "")


def test_text(rtp: Any, talker: Path) -> None:
    expected = answer(talker, "Hello")
    assert rtp("generate", talker, "Hello", "--max-tokens", 6)[:2] == (0, expected.text + "\n")
    assert rtp("generate", talker, "--max-tokens", 6, stdin="Hello")[:2] == (0, expected.text + "\n")


def test_json(rtp: Any, talker: Path) -> None:
    status, out, _ = rtp("generate", talker, "Hello", "--max-tokens", 6, "--json", "--logprobs", 2)
    report = json.loads(out)
    expected = answer(talker, "Hello")
    assert status == 0
    assert (report["text"], report["token_ids"]) == (expected.text, expected.token_ids)
    assert report["finish_reason"] == "length" and len(report["logprobs"]) == 6
    assert report["logprobs"][0][0]["token_id"] == expected.token_ids[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["some text"], "no tokenizer"),
        (["--token-ids", "5,x"], "--token-ids '5,x'"),
        (["--token-ids", ""], "--token-ids ''"),
        (["--token-ids", "5,400"], "token id 400 at position 1"),
        (["--token-ids", ",".join(["5"] * 600)], "600 tokens, but the longest request is 512"),
        (["text", "--token-ids", "5"], "give one"),
        ([""], "empty"),
        ([], "the prompt is empty"),
        (["--token-ids", "5", "--temperature", "nan"], "temperature=nan"),
        (["--token-ids", "5", "--max-tokens", "-3"], "max_tokens=-3"),
        (["--token-ids", "5", "--top-p", "7"], "top_p=7"),
        (["--token-ids", "5", "--logprobs", "2"], "--json"),
        (["--token-ids", "5", "--max-model-len", "100000"], "max_model_len=100000"),
        (["--token-ids", "5", "--dtype", "float3"], "float3"),
        (["--token-ids", "5", "--stop", "x"], "needs a tokenizer"),
    ],
)
def test_bad_input(rtp: Any, bare: Path, arguments: list[str], words: str) -> None:
    status, out, err = rtp("generate", bare, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


def test_no_prompt_at_a_terminal(rtp: Any, bare: Path) -> None:
    status, _, err = rtp("generate", bare, terminal=True)
    assert status == 2 and "there is no prompt" in err


def conversation(path: Path, *turns: str) -> list[str]:
    """What a greedy chat answers."""
    llm = LLM(path, num_blocks=64)
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = llm.chat(messages, SamplingParams(max_tokens=5))[0].text
        messages.append({"role": "assistant", "content": text or ""})
    return [message["content"] for message in messages[1::2]]


def test_one_message(rtp: Any, talker: Path) -> None:
    status, out, err = rtp("chat", talker, "--message", "Hi", "--max-tokens", 5)
    assert (status, out, err) == (0, conversation(talker, "Hi")[0] + "\n", "")


def test_turns_keep_their_history(rtp: Any, talker: Path) -> None:
    expected = conversation(talker, "Hi", "More")
    status, out, _ = rtp("chat", talker, "--max-tokens", 5, stdin="Hi\n\nMore\n")
    assert (status, out) == (0, "".join(text + "\n" for text in expected))
    status, out, _ = rtp("chat", talker, "--max-tokens", 5, "--json", stdin="Hi\nMore")
    messages = json.loads(out)["messages"]
    assert [message["content"] for message in messages] == ["Hi", expected[0], "More", expected[1]]


def test_at_a_terminal(rtp: Any, talker: Path) -> None:
    """A turn that is too long is refused and forgotten; the end of input ends the chat."""
    expected = conversation(talker, "Hi", "More")
    turns = "Hi\n" + "x" * 600 + "\nMore\n"
    status, out, err = rtp("chat", talker, "--max-tokens", 5, stdin=turns, terminal=True)
    assert (status, out) == (0, "".join(text + "\n" for text in expected))
    assert err.count("> ") == 4 and "error: the prompt has" in err


def test_interrupting_an_answer_keeps_what_was_said(rtp: Any, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        whole = stream(*args, **options)
        yield next(whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, out, _ = rtp("chat", talker, "--max-tokens", 5, stdin="Hi\nMore\n", terminal=True)
    assert status == 0 and out.count("\n") == 2


@pytest.mark.parametrize(
    ("which", "arguments", "words"),
    [
        ("bare", ["--message", "Hi"], "no tokenizer"),
        ("untold", ["--message", "Hi"], "no chat template"),
        ("talker", ["--message", " "], "--message is empty"),
        ("talker", [], "there is no message"),
        ("talker", ["--message", "x" * 600], "the longest request is 512"),
    ],
)
def test_bad_chats(rtp: Any, bare: Path, talker: Path, tmp_path: Path, which: str, arguments: Any, words: str) -> None:
    untold = tmp_path / "untold"
    untold.mkdir()
    for file in talker.iterdir():
        if file.name != "tokenizer_config.json":
            (untold / file.name).symlink_to(file)
    status, out, err = rtp("chat", {"bare": bare, "talker": talker, "untold": untold}[which], *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and words in err and err.count("\n") == 1
