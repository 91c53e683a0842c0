"""Sampling parameters refuse what makes no sense, naming the value and what is allowed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from rtp_runtime.engine import EngineConfig, SamplingParams
from rtp_runtime.errors import UsageError

NAN = float("nan")
INF = float("inf")

BAD = [
    *[("temperature", value) for value in (NAN, -0.1, INF, 1e6, "0.5", True, None)],
    *[("top_p", value) for value in (NAN, 0.0, -1.0, 1.1, "x")],
    *[("min_p", value) for value in (NAN, -0.1, 1.5)],
    *[("top_k", value) for value in (-2, 1.5, True)],
    *[("presence_penalty", value) for value in (NAN, -2.1, 2.1)],
    *[("frequency_penalty", value) for value in (NAN, -3, INF)],
    *[("repetition_penalty", value) for value in (NAN, 0.0, -1.0, INF)],
    *[("seed", value) for value in (-1, 2**63, 1.0, True)],
    *[("max_tokens", value) for value in (0, -5, 2.0, NAN, True)],
    *[("min_tokens", value) for value in (-1, None)],
    *[("logprobs", value) for value in (-1, 1.5)],
    *[("prompt_logprobs", value) for value in (-1, True)],
    *[("stop", value) for value in (5, [5], [""], "", None)],
    *[("stop_token_ids", value) for value in (5, [-1], ["a"], [True], "12")],
    *[("ignore_eos", value) for value in (1, None)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_message_gives_value_and_range() -> None:
    with pytest.raises(UsageError, match=r"temperature=-0\.1 is out of range: give a number from 0 up to 1000"):
        SamplingParams(temperature=-0.1)
    with pytest.raises(UsageError, match="min_tokens=9 is above max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_defaults_are_greedy_and_unpenalised() -> None:
    params = SamplingParams()
    assert params.greedy and not params.penalised
    assert SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 3}, "one token of each of max_num_seqs=4"),
        ({"depth": 3}, "depth=3"),
        ({"block_size": -1}, "block_size=-1"),
        ({"memory": 1.5}, "memory=1.5"),
        ({"max_model_len": True}, "max_model_len=True"),
    ],
)
def test_engine_config(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EngineConfig(**limits)


def test_import_is_light() -> None:
    code = (
        "import sys, rtp_runtime; rtp_runtime.SamplingParams; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
