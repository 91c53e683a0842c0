"""The conformance suite as a pytest class: a plugin's tests subclass it and name a config.

class TestLlama(ModelConformance):
    config = Path(__file__).with_name("config.json")
    plugins = ("rtp_plugin_llama",)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rtp_runtime.check.options import REQUIRED, CheckOptions
from rtp_runtime.testing.checking import assert_check_passes
from rtp_runtime.testing.checkpoints import tiny_checkpoint
from rtp_runtime.testing.compare import (
    Case,
    assert_export_complete,
    assert_greedy_matches,
    assert_logits_match,
    assert_modes_match,
    one_thread,
)

CHECKED = (14, 45)
"""Tokens of the prompts that `rtp check` draws here."""


class ModelConformance:
    """What every model must satisfy, on a tiny random checkpoint of `config`."""

    config: ClassVar[str | Path | Mapping[str, Any]]
    """A config.json, or its contents; it is shrunk."""
    plugins: ClassVar[Sequence[str]] = ()
    """Plugin modules to load besides those that are installed; a failure of theirs is an error."""

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
        """The checkpoint, loaded by both sides; loading it has audited it."""
        with one_thread():
            directory = tiny_checkpoint(cls.config, tmp_path_factory.mktemp("checkpoint"))
            yield Case.load(directory, cls.plugins)

    def test_whole_prompts_match_the_reference(self, case: Case) -> None:
        with case.engine() as llm:
            assert_logits_match(case, llm, "whole prompts")

    def test_chunks_and_single_tokens_match_the_reference(self, case: Case) -> None:
        assert_modes_match(case)

    def test_batches_continue_as_the_reference_does(self, case: Case) -> None:
        assert_greedy_matches(case)

    def test_rtp_check_passes(self, case: Case, tmp_path: Path) -> None:
        with one_thread():
            options = CheckOptions(
                model=case.directory, plugins=tuple(self.plugins), stages=REQUIRED, lengths=CHECKED, num_new_tokens=4
            )
            assert_check_passes(options, tmp_path)

    def test_export_returns_every_tensor(self, case: Case) -> None:
        assert_export_complete(case)
