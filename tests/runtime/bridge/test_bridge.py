"""Blocks of transformers under our scheduler: logits and tokens are those of the whole transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DogeConfig, JetMoeConfig, MistralConfig
from transformers.masking_utils import chunked_causal_mask_function

from rtp_runtime.bridge import bridged_blocks, bridged_states, bridged_weights, proven_with
from rtp_runtime.bridge.cache import Piece, RequestStates
from rtp_runtime.bridge.modules import causal_mask
from rtp_runtime.bridge.target import Target, installed_version
from rtp_runtime.errors import UnsupportedModelError
from rtp_runtime.testing import check_plugin, tiny_checkpoint
from rtp_runtime.testing.compare import Case, one_thread
from rtp_runtime.testing.tiny_models import tiny_config

HERE = Path(__file__).parent

PLUGIN = """
from rtp_runtime import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models):
    models.add("{architecture}", "{module}"{replaces})
"""

DOGE = DogeConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=160, architectures=["DogeForCausalLM"],
)  # fmt: skip
ATTENTION = "transformers.models.doge.modeling_doge:DogeAttention"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(architecture: str, module: str, replaces: str = "") -> str:
        monkeypatch.syspath_prepend(HERE)
        monkeypatch.syspath_prepend(tmp_path)
        name = f"bridged_{module}"
        text = PLUGIN.format(
            architecture=architecture, module=module, replaces=f', replaces="{replaces}"' if replaces else ""
        )
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_attention_with_a_mask_of_its_own(plugin: Any, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(DOGE.to_dict(), tmp_path / "checkpoint")
    check_plugin(checkpoint, [plugin("DogeForCausalLM", "doge")])


def test_attention_with_a_window(plugin: Any, tmp_path: Path) -> None:
    """Blocks behind the window are freed; what is left is what the block is given."""
    config = MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=160, sliding_window=8, architectures=["MistralForCausalLM"],
    )  # fmt: skip
    checkpoint = tiny_checkpoint(config.to_dict(), tmp_path / "checkpoint")
    check_plugin(checkpoint, [plugin("MistralForCausalLM", "mistral")])


def test_recurrence_convolution_and_experts(plugin: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    config = tiny_config("qwen3_next", mlp_only_layers=[]).to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    name = plugin("Qwen3NextForCausalLM", "qwen3_next", replaces="rtp-plugin-qwen")
    check_plugin(tiny_checkpoint(config, checkpoint), [name])
    with one_thread():
        case = Case.load(checkpoint, [name])
    blocks = bridged_blocks(case.loaded.module)
    assert blocks["model.layers.0.mlp"].endswith(":Qwen3NextSparseMoeBlock")
    assert sum(target.endswith("GatedDeltaNet") for target in blocks.values()) == 3


def test_states_and_weights_are_read_off_the_block() -> None:
    states = bridged_states(ATTENTION, DOGE, 0, rotary=ATTENTION.replace("Attention", "RotaryEmbedding"))
    assert {name: dict(state.axes) for name, state in states.items()} == {
        "key": {"kv heads": 2, "head dim": 16},
        "value": {"kv heads": 2, "head dim": 16},
    }
    weights = {weight.parameter for weight in bridged_weights(ATTENTION, DOGE, 0, prefix="a.")}
    assert {"a.A", "a.q_proj.weight", "a.dt_proj.weight"} <= weights


def test_states_of_a_block_whose_steps_depend_on_values() -> None:
    """Its router counts tokens, which no tensor without data can."""
    home = "transformers.models.jetmoe.modeling_jetmoe:JetMoe"
    config = JetMoeConfig(hidden_size=32, kv_channels=8, num_key_value_heads=2, num_local_experts=4)
    states = bridged_states(f"{home}Attention", config, 0, rotary=f"{home}RotaryEmbedding")
    axes = {"kv heads": 2, "head dim": 8}
    assert {name: dict(state.axes) for name, state in states.items()} == {"key": axes, "value": axes}


@pytest.mark.parametrize(("first", "end"), [(0, 7), (5, 6), (9, 17)])
def test_chunks_are_those_of_transformers(first: int, end: int) -> None:
    batch: Any = None  # which the mask does not ask
    states = RequestStates({}, batch, Piece(0, range(end - first), first), window=4, slots={})
    seen = causal_mask(states, torch.empty(0), chunked=True)[0, 0] == 0
    wanted = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    asked = [[bool(wanted(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(end)] for q in range(first, end)]
    held = torch.tensor(asked)
    assert torch.equal(seen, held[:, states.start :]) and not held[:, : states.start].any()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("transformers.models.doge.modeling_doge:DogeDecoderLayer", "decoder layer"),
        ("transformers.models.doge.modeling_doge:DogeForCausalLM", "whole model"),
        ("transformers.models.doge.modeling_doge:DogeConfig", "no torch module"),
        ("transformers.cache_utils:DynamicCache", "a block of the installed transformers"),
        ("transformers.models.doge.modeling_doge:Nothing", "has no such class"),
        ("os:path", "a block of the installed transformers"),
    ],
)
def test_only_blocks_are_taken(target: str, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        Target.parse(target).block()


def test_what_keeps_no_state_is_no_mixer() -> None:
    with pytest.raises(UnsupportedModelError, match="not made of a config alone"):
        bridged_states("transformers.models.llama.modeling_llama:LlamaMLP", DOGE, 0)


def test_the_version_is_pinned() -> None:
    assert proven_with(installed_version())
    answer = proven_with("4.0")
    assert not answer.ok and installed_version() in answer.reasons[0]


def test_a_bridge_has_the_names_of_its_block() -> None:
    with torch.device("meta"):
        from rtp_runtime.bridge import BridgedMixer

        mixer = BridgedMixer(ATTENTION, DOGE, 0, states=("key", "value"))
        block = Target.parse(ATTENTION).build(DOGE, 0)
    assert mixer.state_dict().keys() == block.state_dict().keys()
