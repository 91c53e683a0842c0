"""Which definition serves an architecture, and what is said when none or several do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rtp_runtime.errors import PluginError, UnsupportedModelError
from rtp_runtime.lazy import Origin
from rtp_runtime.model.registry import ModelDefinition, ModelRegistry
from rtp_runtime.plugins import LoadedPlugin, PluginFailure, Plugins, load_plugins


@pytest.fixture
def load(site: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads the plugins of `site` in this process, and forgets their modules afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site.path))
    yield load_plugins
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


def definition(architecture: str, plugin: str, replaces: str | None = None) -> ModelDefinition:
    registry = ModelRegistry(Origin(plugin, f"rtp-plugin-{plugin}", "1.0"))
    registry.add(architecture, "rtp_runtime.errors", replaces=replaces)
    return next(iter(registry))


def test_one_claim_is_taken() -> None:
    plugins = Plugins(models=(definition("AForCausalLM", "one"), definition("BForCausalLM", "two")))
    assert plugins.resolve("BForCausalLM").plugin == "two"
    assert plugins.conflicts() == []


def test_two_claims_are_an_error_that_names_both() -> None:
    plugins = Plugins(models=(definition("AForCausalLM", "one"), definition("AForCausalLM", "two")))
    with pytest.raises(
        PluginError, match=r"rtp-plugin-one 1\.0.* and .*rtp-plugin-two 1\.0.*replaces='rtp-plugin-one'"
    ):
        plugins.resolve("AForCausalLM")
    assert len(plugins.conflicts()) == 1


@pytest.mark.parametrize("replaces", ["one", "rtp-plugin-one"])
def test_a_claim_may_replace_another(replaces: str) -> None:
    claims = (definition("AForCausalLM", "two", replaces), definition("AForCausalLM", "one"))
    for models in (claims, claims[::-1]):
        assert Plugins(models=models).resolve("AForCausalLM").plugin == "two"
        assert Plugins(models=models).conflicts() == []


def test_claims_that_replace_each_other_are_an_error() -> None:
    plugins = Plugins(models=(definition("AForCausalLM", "one", "two"), definition("AForCausalLM", "two", "one")))
    with pytest.raises(PluginError, match="provided by"):
        plugins.resolve("AForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "package"),
    [
        ("Qwen9ForCausalLM", "rtp-plugin-qwen"),
        ("DeepseekV9ForCausalLM", "rtp-plugin-deepseek"),
        ("Glm4MoeForCausalLM", "rtp-plugin-glm"),
        ("MiniMaxM9ForCausalLM", "rtp-plugin-minimax"),
    ],
)
def test_a_known_family_names_its_package(architecture: str, package: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"The package {package} serves this family: install it"):
        Plugins().resolve(architecture)


def test_a_known_family_that_is_installed_is_not_to_be_installed_again() -> None:
    loaded = LoadedPlugin("qwen", "rtp-plugin-qwen", "0.1.0", "rtp_plugin_qwen", (), ())
    with pytest.raises(UnsupportedModelError, match=r"rtp-plugin-qwen 0\.1\.0, .* is installed and lacks it"):
        Plugins(loaded=(loaded,)).resolve("Qwen9ForCausalLM")


def test_no_claim_repeats_what_failed_and_names_what_is_near() -> None:
    failed = PluginFailure("bad", "rtp-plugin-bad", "2.0", "raising", "it raised ValueError: no luck", "")
    plugins = Plugins(models=(definition("LlamaForCausalLM", "one"),), failures=(failed,))
    with pytest.raises(UnsupportedModelError) as caught:
        plugins.resolve("LamaForCausalLM")
    text = str(caught.value)
    assert "no plugin provides LamaForCausalLM" in text
    assert "nearest that is provided is LlamaForCausalLM" in text
    assert "rtp-plugin-bad 2.0) is raising: it raised ValueError: no luck" in text
    assert "rtp enable MODEL" in text
    assert "The package" not in text


def test_a_definition_loads_its_module(site: Any, load: Any) -> None:
    source = "class {0}: ...\ndef weight_descriptors(config): return 1\ndef state_descriptors(config): return 2\n"
    hooks = """
@hookimpl
def rtp_register_models(models):
    models.add("AcmeForCausalLM", "acme.good")
    models.add("AcmeOther", "acme.good:AcmeForCausalLM")
    models.add("AcmeMissing", "acme.good")
    models.add("AcmeBare", "acme.bare")
    models.add("AcmeBroken", "acme.broken")
"""
    site.plugin("acme", hooks)
    (site.path / "acme" / "good.py").write_text(source.format("AcmeForCausalLM"))
    (site.path / "acme" / "bare.py").write_text("class AcmeBare: ...\ndef weight_descriptor(config): ...\n")
    (site.path / "acme" / "broken.py").write_text("import nowhere_at_all\n")
    plugins = load()
    for architecture in ("AcmeForCausalLM", "AcmeOther"):
        loaded = plugins.resolve(architecture).load()
        assert loaded.model_class.__name__ == "AcmeForCausalLM"
        assert (loaded.weight_descriptors(None), loaded.state_descriptors(None), loaded.accepts) == (1, 2, None)
    with pytest.raises(PluginError, match=r"acme 1\.0\): acme\.good has no 'AcmeMissing'"):
        plugins.resolve("AcmeMissing").load()
    with pytest.raises(PluginError, match=r"has no 'weight_descriptors'. Did you mean 'weight_descriptor'\?"):
        plugins.resolve("AcmeBare").load()
    with pytest.raises(PluginError, match=r"acme\.broken cannot be imported: .*nowhere_at_all"):
        plugins.resolve("AcmeBroken").load()


def test_extensions_are_kept_with_their_plugin(site: Any, load: Any) -> None:
    hooks = """
@hookimpl
def rtp_register_models(models): models.add("AcmeForCausalLM", "acme.model")
@hookimpl
def rtp_register_weights(weights): weights.add("AcmeForCausalLM", "fused", "acme.model:fused")
@hookimpl
def rtp_register_states(states): states.add("AcmeForCausalLM", "short", "acme.model:short")
@hookimpl
def rtp_register_kernels(ops): ops.add("linear", "acme.model:linear")
@hookimpl
def rtp_register_parsers(parsers): parsers.add("tool_call", "acme", "acme.model:Parser")
@hookimpl
def rtp_register_processors(processors): processors.add("AcmeForCausalLM", "image", "acme.model:Images")
@hookimpl
def rtp_register_commands(app): app.add("acme-run", "acme.model", "run it")
"""
    site.plugin("acme", hooks)
    (site.path / "acme" / "model.py").write_text("linear = 'the op'\ndef configure(parser): ...\ndef run(args): ...\n")
    plugins = load()
    for extensions, subject, name in (
        (plugins.weights, "AcmeForCausalLM", "fused"),
        (plugins.states, "AcmeForCausalLM", "short"),
        (plugins.ops, "linear", "acme.model:linear"),
        (plugins.parsers, "tool_call", "acme"),
        (plugins.processors, "AcmeForCausalLM", "image"),
    ):
        mine = [each for each in extensions if each.target.origin.plugin == "acme"]
        assert [(each.subject, each.name) for each in mine] == [(subject, name)]
    assert next(each for each in plugins.ops if each.target.origin.plugin == "acme").load() == "the op"
    assert plugins.commands.load("acme-run").__name__ == "acme.model"
