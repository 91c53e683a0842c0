"""The text stage against real tokenizers and templates: clean ones pass, and each seeded fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rtp_runtime.check import CheckOptions, CheckReport, run_check
from rtp_runtime.check.reference import Reference

TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, END = 0, 1, 3


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A byte-level BPE whose ids fit into the tiny models' vocabulary, and which begins texts with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    tokenizer.add_special_tokens([])
    trainer = trainers.BpeTrainer(
        vocab_size=250,
        initial_alphabet=alphabet,
        limit_alphabet=240,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tokenizer_json: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint with tokenizer, template and generation config; keywords replace parts of these."""

    def make(name: str, template: str = TEMPLATE, eos: Any = (EOS, END), single: str = "<s> $A") -> Path:
        target = tmp_path / name
        shutil.copytree(checkpoint("qwen3"), target)
        content = json.loads(json.dumps(tokenizer_json))
        pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * single.count("<s>")
        content["post_processor"]["single"] = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}]
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "chat_template": template,
        }
        (target / "tokenizer.json").write_text(json.dumps(content))
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
        config = json.loads((target / "config.json").read_text()) | {"eos_token_id": EOS, "bos_token_id": BOS}
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


@pytest.fixture
def check(reference: Callable[[str], Reference]) -> Callable[..., CheckReport]:
    def run(model: Path, against: Path | None = None) -> CheckReport:
        stages = ("audit", "text")
        return run_check(CheckOptions(model=model, reference=against, stages=stages))

    return run


def test_equal_tokenizers_match(model: Callable[..., Path], check: Callable[..., CheckReport]) -> None:
    report = check(model("clean"))
    text = next(stage for stage in report.stages if stage.name == "text")
    assert (text.status, text.findings) == ("MATCH", [])
    assert text.numbers["texts"] >= 14 and text.numbers["chats"] == 9


def test_without_a_tokenizer_it_is_not_judged_and_not_required(
    checkpoint: Callable[[str], Path], check: Callable[..., CheckReport]
) -> None:
    report = check(checkpoint("qwen3"))
    assert next((item.what, item.required) for item in report.not_judged) == ("text", False)


@pytest.mark.parametrize(
    ("ours", "theirs", "module", "what"),
    [
        ({}, {"template": TEMPLATE.replace(" | trim", "")}, "chat template", "rendered text"),
        ({"template": TEMPLATE.replace("assistant\n", "assistant")}, {}, "chat template", "rendered text"),
        ({"single": "<s> <s> $A"}, {}, "tokenizer", "token ids of a text"),
        ({"single": "<s> <s> $A"}, None, "tokenizer", "begin of text, more than once"),
        ({"template": "{{ bos_token }}{{ bos_token }}" + TEMPLATE}, None, "tokenizer", "begin of text, more than once"),
        ({"eos": (EOS,)}, {}, "stop ids", "ids that end a text"),
        ({"eos": (EOS,)}, None, "stop ids", "the end of a turn"),
        ({}, {"template": TEMPLATE + "{{ raise_exception('no') }}"}, "chat template", "what it refuses"),
    ],
)
def test_seeded_faults_are_named(
    ours: dict[str, Any],
    theirs: dict[str, Any] | None,
    module: str,
    what: str,
    model: Callable[..., Path],
    check: Callable[..., CheckReport],
) -> None:
    report = check(model("ours", **ours), None if theirs is None else model("theirs", **theirs))
    first = report.first_wrong
    assert first is not None and report.exit == 1
    assert (first.stage, first.module, first.what) == ("text", module, what)
    assert report.cause is not None and report.cause.fix and report.cause.words == first.detail


def test_ids_beyond_the_vocabulary(model: Callable[..., Path], check: Callable[..., CheckReport]) -> None:
    target = model("large")
    content = json.loads((target / "tokenizer.json").read_text())
    last, first_id = content["added_tokens"][-1], len(content["model"]["vocab"])
    names = [*(f"<|unused {number}|>" for number in range(160)), "<|image|>"]
    content["added_tokens"] += [{**last, "id": first_id + n, "content": name} for n, name in enumerate(names)]
    (target / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((target / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("<|im_start|>assistant", "<|image|>assistant")
    (target / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    report = check(target)
    assert report.first_wrong is not None
    assert (report.first_wrong.module, report.first_wrong.what) == ("tokenizer", "ids beyond the vocabulary")
