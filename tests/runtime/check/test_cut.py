"""Checks of a part of a model: random weights from a bare config, some layers, fewer experts, a streamed reference."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.check import CheckOptions, CheckReport, run_check
from rtp_runtime.check.cut import prepared
from rtp_runtime.check.cut.copying import cut_ids
from rtp_runtime.check.cut.edits import TextPart
from rtp_runtime.check.cut.experts import find_routing
from rtp_runtime.check.cut.layers import choose_layers, parse_layers
from rtp_runtime.check.cut.telling import Numbering
from rtp_runtime.check.loading import load_reference, quiet_transformers
from rtp_runtime.check.report import MATCH, Finding
from rtp_runtime.check.streaming import StreamedReference, stream_model
from rtp_runtime.errors import UsageError
from rtp_runtime.model.config import ModelConfig
from rtp_runtime.testing.tiny_models import tiny_config

SHORT: dict[str, Any] = {"lengths": (9, 24), "num_new_tokens": 3, "stages": ("audit", "pinned", "probes", "logits")}
IDS = [5, 7, 11, 200, 30, 44, 3, 9, 17, 250, 31, 2, 77]

Checkpoint = Callable[[str], Path]


def part_of(name: str, **overrides: Any) -> TextPart:
    raw = json.loads(tiny_config(name, **overrides).to_json_string(use_diff=False))
    raw["architectures"] = [ARCHITECTURES[name]]
    return TextPart.of(ModelConfig(raw))


ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm5_next": "Glm5NextForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def assert_matches(report: CheckReport) -> None:
    wrong = [(finding.module, finding.what, finding.error) for finding in report.failed]
    assert not wrong
    assert all(stage.status == MATCH for stage in report.stages if stage.name in SHORT["stages"])


class TestLayers:
    """The wanted sequence is checked by building transformers' model of the edited config."""

    @pytest.mark.parametrize(
        ("name", "overrides", "kept"),
        [
            ("deepseek_v3", {"num_hidden_layers": 7, "first_k_dense_replace": 3}, (0, 3)),
            ("qwen2_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": []}, (0, 2)),
            ("qwen3_next", {}, (0, 1, 3)),
            ("deepseek_v4", {}, (0, 2, 3)),
            ("qwen3", {}, (0,)),
        ],
    )
    def test_one_of_each_kind(self, name: str, overrides: dict[str, Any], kept: tuple[int, ...]) -> None:
        part = part_of(name, **overrides)
        chosen = choose_layers(part, "kinds")
        assert chosen.layers == kept
        assert not chosen.note
        assert layer_shapes(part, {}, kept) == layer_shapes(part, chosen.edits, range(len(kept)))

    def test_named_layers(self) -> None:
        part = part_of("deepseek_v3", num_hidden_layers=9, first_k_dense_replace=3)
        chosen = choose_layers(part, "1-2,8")
        assert chosen.layers == (1, 2, 8)
        assert layer_shapes(part, {}, (1, 2, 8)) == layer_shapes(part, chosen.edits, range(3))

    def test_where_no_edit_helps_the_first_layers_stay(self) -> None:
        # Two layers with experts, then one without: no interval makes this sequence.
        part = part_of("qwen2_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[])
        chosen = choose_layers(part, "1,3,4")
        assert chosen.layers == (0, 1)
        assert "no edit of the config leaves layers 1, 3, 4 alone" in chosen.note
        assert layer_shapes(part, {}, chosen.layers) == layer_shapes(part, chosen.edits, range(2))

    @pytest.mark.parametrize("text", ["0", "9", "0-9", "3-1", "x", "", "1,,2", "-1"])
    def test_what_is_no_layer_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="layer"):
            parse_layers(text, 4)

    def test_how_layers_are_named(self) -> None:
        assert parse_layers("4", 4) == (0, 1, 2, 3)
        assert parse_layers("0-1, 3", 4) == (0, 1, 3)
        assert parse_layers("kinds", 4) is None


class TestExperts:
    def test_groups_and_choices_follow(self) -> None:
        routing = find_routing(part_of("deepseek_v3"), {})
        assert routing is not None
        assert (routing.num_experts, routing.groups, routing.chosen_groups, routing.chosen) == (8, 4, 2, 2)
        edits, words = routing.kept(4)
        assert edits == {("n_routed_experts",): 4, ("n_group",): 2, ("topk_group",): 1}
        assert len(words) == 2
        for count in range(1, 9):
            values = {key[0]: value for key, value in routing.kept(count)[0].items()}
            groups, some = values.get("n_group", 4), values.get("topk_group", 2)
            assert count % groups == 0
            assert values.get("num_experts_per_tok", 2) <= some * count // groups
        for count in (0, 9):
            with pytest.raises(UsageError, match="8 routed experts"):
                routing.kept(count)

    def test_a_model_without_experts_has_no_routing(self) -> None:
        assert find_routing(part_of("qwen3"), {}) is None

    def test_ids_stay_different(self) -> None:
        table = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(50)])
        ids = cut_ids(table, 5, 3)
        assert ids.shape == (50, 3)
        assert int(ids.max()) < 5
        assert all(len(set(row)) == 3 for row in ids.tolist())


class TestRealWeights:
    def test_tensors_of_kept_layers_are_the_originals(self, checkpoint: Checkpoint) -> None:
        source = checkpoint("deepseek_v3")
        options = CheckOptions(model=source, layers="0,2", experts=4)
        before = load_file(source / "model.safetensors")
        with prepared(options, print, lambda config: None) as ready:
            after = load_file(ready.options.model / "model.safetensors")
            assert ready.layers == (0, 2)
            assert ready.cut["experts"] == {"kept": 4, "of": 8}
        assert not ready.options.model.exists()
        for name, tensor in after.items():
            old = before[name.replace("layers.1.", "layers.2.")]
            assert torch.equal(tensor, old[: len(tensor)]), name
            assert tensor.shape == old.shape or ".mlp.gate." in name
        kept = {
            name
            for name in before
            if ".layers.1." not in name and not any(f"experts.{i}." in name for i in range(4, 8))
        }
        assert len(after) == len(kept)

    def test_the_folder_goes_when_the_check_is_ended(self, checkpoint: Checkpoint) -> None:
        options = CheckOptions(model=checkpoint("qwen2"), layers="1")
        with pytest.raises(SystemExit), prepared(options, print, lambda config: None) as ready:
            assert ready.options.model.exists()
            signal.raise_signal(signal.SIGTERM)
        assert not ready.options.model.exists()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_a_cut_checkpoint_matches(self, checkpoint: Checkpoint) -> None:
        # One with tables of expert ids: an id that was left as it is would raise.
        report = run_check(CheckOptions(model=checkpoint("deepseek_v4"), layers="0,3", experts=4, **SHORT))
        assert_matches(report)
        assert report.conditions["cut"]["weights"] == "the checkpoint's"

    def test_a_fault_is_found_under_its_own_number(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        source = checkpoint("qwen2")
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.2.self_attn.v_proj.weight"][3] *= 1.5
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        report = run_check(CheckOptions(model=tmp_path, reference=source, layers="0,2", explain=False, **SHORT))
        assert report.first_wrong is not None
        assert report.first_wrong.module == "model.layers.2.self_attn.v_proj"
        assert report.first_wrong.layer == 2
        assert report.model == str(tmp_path)


class TestRandom:
    @pytest.mark.parametrize("name", ["qwen3_next", "minimax"])
    def test_a_bare_config_is_enough(self, checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
        bare = tmp_path / "config.json"
        bare.write_text((checkpoint(name) / "config.json").read_text())
        report = run_check(CheckOptions(model=bare, random=True, layers="kinds", **SHORT))
        assert_matches(report)
        assert "random weights (seed 0)" in report.conditions["cut"]["words"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]

    def test_a_config_without_weights_says_which_option(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        bare = tmp_path / "config.json"
        bare.write_text((checkpoint("qwen3") / "config.json").read_text())
        for model in (bare, tmp_path):
            with pytest.raises(UsageError, match="--random"):
                run_check(CheckOptions(model=model))


class TestStreaming:
    @pytest.mark.parametrize("name", ["deepseek_v4", "qwen3_next", "qwen2"])
    def test_logits_are_those_of_the_loaded_reference(self, checkpoint: Checkpoint, name: str) -> None:
        streamed, loaded = stream(checkpoint(name)), load_reference(checkpoint(name))
        assert torch.equal(streamed.logits(IDS), loaded.logits(IDS))
        assert streamed.used == loaded.used
        assert streamed.continuation(IDS, 2).tokens == loaded.continuation(IDS, 2).tokens

    def test_little_is_held_at_a_time(self, checkpoint: Checkpoint) -> None:
        reference = stream(checkpoint("qwen3_moe"))
        reference.logits(IDS)
        every = 4 * reference.num_parameters
        # Nothing is kept but the parameters of one module: here the largest stack of experts.
        largest = max(
            4 * sum(parameter.numel() for parameter in module.parameters(recurse=False))
            for module in reference.modules.values()
        )
        assert reference.pool.most <= largest < every / 3

    def test_a_check_with_it_matches(self, checkpoint: Checkpoint) -> None:
        report = run_check(
            CheckOptions(model=checkpoint("deepseek_v3"), **SHORT), reference=stream(checkpoint("deepseek_v3"))
        )
        assert_matches(report)


def test_findings_are_told_in_the_whole_models_numbers() -> None:
    numbering = Numbering(["model.layers.0", "model.layers.1"], (0, 27))
    finding = Finding(
        stage="probes", module="model.layers.1.mlp", layer=1, error=1.0, tolerance=0.0, what="output",
        detail="input of model.layers.1; xmodel.layers.1",
    )  # fmt: skip
    told = numbering.told({"failed": [finding], "kinds": [{"layers": [0, 1]}], "model.layers.1": "layer 1"})
    assert told["failed"][0].module == "model.layers.27.mlp"
    assert told["failed"][0].layer == 27
    assert told["failed"][0].detail == "input of model.layers.27; xmodel.layers.1"
    assert told["kinds"] == [{"layers": [0, 27]}]
    assert told["model.layers.27"] == "layer 27"


def stream(path: Path) -> StreamedReference:
    from rtp_runtime.check.loading import _model_class

    model_class = _model_class(path)
    with quiet_transformers():
        config = model_class.config_class.from_pretrained(str(path), local_files_only=True)
        model, pool, missing = stream_model(path, model_class, config, capacity=0, small=0, block=0)
    assert not missing
    return StreamedReference(path, model, pool, [])


def layer_shapes(part: TextPart, edits: Any, layers: Any) -> list[dict[str, tuple[int, ...]]]:
    """Of these layers, the parameters of transformers' own model of the edited config."""
    from rtp_runtime.testing.checkpoints import transformers_class

    config = ModelConfig(part.edited(edits)).hf
    with torch.device("meta"):
        model = transformers_class(part.architecture, config)(config)
    found = [model.model.layers[layer] for layer in layers]
    return [{name: tuple(value.shape) for name, value in layer.named_parameters()} for layer in found]
