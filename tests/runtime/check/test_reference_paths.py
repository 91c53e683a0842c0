"""The reference against itself: what is noise, what is inconsistent, and when nothing can judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_runtime.check import CheckOptions, run_check
from rtp_runtime.check.loading import load_reference
from rtp_runtime.check.names import Naming, find_layers, match_names
from rtp_runtime.check.noise import Noise, add_noise
from rtp_runtime.check.options import REQUIRED
from rtp_runtime.check.paths import Effort
from rtp_runtime.check.reference import Feeding, Reference
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (10, 14, 40)
References = Callable[[str], Reference]


def measured(reference: Reference, num_tokens: int = 40) -> Noise:
    ids = [(7 * place + 3) % 300 for place in range(num_tokens)]
    noise = Noise()
    add_noise(noise, reference, "a prompt", ids, reference.capture(ids), Effort.ALL)
    return noise


def test_cached_decode_that_restarts_positions_is_inconsistent(reference: References) -> None:
    noise = measured(reference("minimax"))
    name = "cache, one token at a time, positions left to the model"
    found = noise.inconsistent[name]
    assert (found.module, found.token) == ("model.rotary_emb", 36)
    assert found.logits_error > 0.1
    assert any(other.raised for other in noise.inconsistent.values())  # a second chunk of several tokens
    assert noise.is_sound and "cache, one token at a time" in noise.confirmed_by
    assert noise.logits_tolerance < 1e-4  # what is inconsistent widens nothing


def test_inconsistent_reference_still_judges_by_its_sound_path(
    checkpoint: Callable[[str], Path], reference: References
) -> None:
    report = run_check(
        CheckOptions(model=checkpoint("minimax"), lengths=LENGTHS, num_new_tokens=6, stages=REQUIRED),
        reference=reference("minimax"),
    )
    assert (report.verdict, report.exit) == ("MATCH", 0)
    data = report.to_json()
    assert len(data["reference_inconsistent"]) == 4
    assert "cache" in data["judged_by"]


def test_without_a_sound_path_nothing_is_judged(
    checkpoint: Callable[[str], Path], reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Reference.logits

    def cached_otherwise(self: Reference, ids: Any, feeding: Feeding = Feeding()) -> torch.Tensor:  # noqa: B008
        logits = original(self, ids, feeding)
        return logits.flip(-1) if feeding.parts else logits

    monkeypatch.setattr(Reference, "logits", cached_otherwise)
    fresh = Reference(checkpoint("qwen3"), reference("qwen3").model)
    options = CheckOptions(model=checkpoint("qwen3"), lengths=LENGTHS, num_new_tokens=6, stages=REQUIRED)
    report = run_check(options, reference=fresh)
    assert (report.verdict, report.exit) == ("REFERENCE-INCONSISTENT", 2)
    assert report.inconsistent and not report.judged_by


def test_recurrences_differ_from_their_chunks_by_rounding(reference: References) -> None:
    noise = measured(reference("qwen3_next"))
    assert not noise.inconsistent
    assert any(".linear_attn" in name and error > 0 for name, error in noise.modules.items())


def test_recurrent_layers_alone_have_their_cached_paths(tmp_path: Path) -> None:
    """transformers' cache counts tokens by attention layers, and refuses without any unless it is told."""
    layers = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_only_layers": []}
    write_tiny("qwen3_next", tmp_path, **layers)
    noise = measured(load_reference(tmp_path))
    assert noise.is_sound and "cache, one token at a time" in noise.confirmed_by
    assert {name for name, found in noise.inconsistent.items() if found.raised} == {
        f"cache, {feeding}, positions left to the model" for feeding in ("in two chunks", "one token at a time")
    }
    report = run_check(CheckOptions(model=tmp_path, lengths=LENGTHS, num_new_tokens=6, stages=REQUIRED))
    assert (report.verdict, report.exit) == ("MATCH", 0)


def test_decoder_inside_a_wrapper_speaks_our_names(reference: References) -> None:
    wrapper = reference("qwen3_vl")
    wrapper.use_names(match_names(find_layers(wrapper.model), ["model.layers.0"]))
    assert wrapper.naming == Naming("model.language_model", "model")
    assert next(iter(wrapper.layers)) == "model.layers.0"
    assert "model.layers.0.self_attn.q_proj" in wrapper.modules and "model" in wrapper.modules
    assert "model.embed_tokens.weight" in wrapper.used
    assert not any(name.startswith("model.visual") for name in wrapper.used)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("model.text", "model"), ("model", None), ("model.text.norm", "model.norm"), ("lm_head", "lm_head")],
)
def test_names_around_the_decoder_have_no_counterpart(name: str, ours: str | None) -> None:
    assert Naming("model.text", "model").ours_of(name) == ours
