"""Each way in which a plugin can fail gives its own clear error; all at once they stop no other plugin."""

from __future__ import annotations

from typing import Any

import pytest

GOOD = """
@hookimpl
def rtp_register_models(models):
    models.add("GoodForCausalLM", "good.model")
    models.add("BetterForCausalLM", "good.model:Better")


@hookimpl
def rtp_register_commands(app):
    print("a plugin that prints spoils no JSON")
    app.add("shine", "good.model", "shine a light")
"""
MODELS = "@hookimpl\ndef rtp_register_models(models):\n    "
WITHOUT_API = "from rtp_runtime import hookimpl\n\n"

# plugin -> (body, header or None for the usual, kind, words of its error)
FAULTS: dict[str, tuple[str, str | None, str, list[str]]] = {
    "misspelt-name": (
        "@hookimpl\ndef rtp_register_model(models): ...\n",
        None,
        "misspelt",
        ["no hook rtp_register_model", "Did you mean rtp_register_models?"],
    ),
    "misspelt-argument": (
        "@hookimpl\ndef rtp_register_models(model): ...\n",
        None,
        "misspelt",
        ["takes model", "passes one argument, models"],
    ),
    "unmarked": ("def rtp_register_models(models): ...\n", None, "unmarked", ["@rtp_runtime.hookimpl"]),
    "raising": (
        MODELS + "raise ValueError('no luck')",
        None,
        "raising",
        ["rtp_register_models", "ValueError: no luck"],
    ),
    "exiting": (MODELS + "raise SystemExit(3)", None, "raising", ["SystemExit: 3"]),
    "half": (
        MODELS + "models.add('HalfForCausalLM', 'half.model')\n@hookimpl\ndef rtp_register_parsers(parsers): 1 / 0\n",
        None,
        "raising",
        ["rtp_register_parsers", "ZeroDivisionError"],
    ),
    "broken-import": (
        "import a_module_that_is_nowhere\n",
        None,
        "broken",
        ["No module named 'a_module_that_is_nowhere'"],
    ),
    "broken-syntax": ("def (\n", None, "broken", ["SyntaxError"]),
    "broken-string": (
        MODELS + "models.add('XForCausalLM', 'broken_string.modle')",
        None,
        "broken",
        ["'broken_string.modle'"],
    ),
    "broken-object": (
        MODELS + "models.add('XForCausalLM', object)",
        None,
        "broken",
        ["package.module[:name]", "not objects"],
    ),
    "broken-name": (MODELS + "models.add('X-1', 'broken_name.model')", None, "broken", ["'X-1'", "architecture"]),
    "broken-twice": (
        MODELS + "[models.add('XForCausalLM', 'broken_twice.model') for _ in range(2)]",
        None,
        "broken",
        ["XForCausalLM is added twice"],
    ),
    "broken-command": (
        "@hookimpl\ndef rtp_register_commands(app): app.add('plugins', 'broken_command.model', 'x')",
        None,
        "broken",
        ["`rtp plugins` is a command of rtp itself"],
    ),
    "outdated": (
        "import a_name_that_was_removed\n",
        WITHOUT_API + 'RTP_API = "0.0"\n',
        "outdated",
        ["API 0.0", "Upgrade outdated"],
    ),
    "newer": ("", WITHOUT_API + 'RTP_API: str = "9.0"\n', "outdated", ["API 9.0", "Upgrade rtp-runtime"]),
    "silent": (MODELS + "...", WITHOUT_API, "outdated", ["states no API version", 'RTP_API = "0.1"']),
    "computed": (MODELS + "...", WITHOUT_API + 'RTP_API = "0." + "1"\n', "outdated", ["'0.' + '1'", "not a literal"]),
    "heavy": ("import torch\n", None, "heavy", ["imports torch while it registers"]),
    "heavy-hidden": (
        "try:\n    import transformers.utils\nexcept Exception:\n    pass\n" + MODELS + "...",
        None,
        "heavy",
        ["imports transformers while it registers"],
    ),
    "heavy-late": (MODELS + "import rtp_kernel.components", None, "heavy", ["imports torch"]),
    "empty": ("", None, "empty", ["no hook", "rtp_register_models"]),
    "orphan": (
        "@hookimpl\ndef rtp_register_weights(weights): weights.add('NobodysLM', 'gguf', 'orphan.model:layout')",
        None,
        "unknown model",
        ["NobodysLM, which no plugin provides"],
    ),
}


@pytest.fixture(scope="module")
def report(shared_site: Any) -> dict[str, Any]:
    """`rtp plugins --json` with a good plugin and all the bad ones installed."""
    shared_site.plugin("good", GOOD)
    for name, (body, header, _, _) in FAULTS.items():
        shared_site.plugin(name, body, **({} if header is None else {"header": header}))
    shared_site.plugin("stale", "", value="gone_away")
    (shared_site.path / "stale" / "__init__.py").unlink()
    (shared_site.path / "stale" / "model.py").unlink()
    shared_site.plugin("misdirected", "", value="misdirected_module")
    shared_site.plugin("interrupted", "", metadata=False)
    shared_site.plugin("first-owner", GOOD.replace("Good", "First"), plugin="shared-name")
    shared_site.plugin("second-owner", GOOD.replace("Good", "Second"), plugin="shared-name")
    result: dict[str, Any] = shared_site.plugins()
    return result


def failure(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [each for each in report["failures"] if each["name"] == name]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_error(name: str, report: dict[str, Any]) -> None:
    _, _, kind, words = FAULTS[name]
    found = failure(report, name)
    assert (found["kind"], found["distribution"], found["version"]) == (kind, name, "1.0")
    for word in words:
        assert word in found["cause"]


@pytest.mark.parametrize("name", ["raising", "half", "broken-import", "heavy", "heavy-hidden", "heavy-late"])
def test_the_traceback_shows_the_plugins_line(name: str, report: dict[str, Any]) -> None:
    assert f"{name.replace('-', '_')}/__init__.py" in failure(report, name)["traceback"]


def test_stale_metadata(report: dict[str, Any]) -> None:
    found = failure(report, "stale")
    assert found["kind"] == "stale"
    assert "'gone_away' is not installed any more" in found["cause"]
    assert "pip uninstall stale" in found["cause"]
    assert failure(report, "misdirected")["kind"] == "broken"
    assert "does not contain" in failure(report, "misdirected")["cause"]
    interrupted = failure(report, "interrupted")
    assert interrupted["kind"] == "stale"
    assert "interrupted-1.0.dist-info" in interrupted["cause"]


def test_a_name_taken_twice_refuses_both(report: dict[str, Any]) -> None:
    found = [each for each in report["failures"] if each["name"] == "shared-name"]
    assert sorted(each["distribution"] for each in found) == ["first-owner", "second-owner"]
    for each in found:
        assert each["kind"] == "duplicate"
        assert "first-owner 1.0" in each["cause"]
        assert "second-owner 1.0" in each["cause"]


def test_the_good_plugin_is_served(report: dict[str, Any]) -> None:
    good = next(each for each in report["plugins"] if each["name"] == "good")
    assert good == {
        "name": "good",
        "distribution": "good",
        "version": "1.0",
        "module": "good",
        "hooks": ["rtp_register_commands", "rtp_register_models"],
        "architectures": ["GoodForCausalLM", "BetterForCausalLM"],
    }


def test_nothing_half_registered(report: dict[str, Any]) -> None:
    architectures = [name for plugin in report["plugins"] for name in plugin["architectures"]]
    assert "HalfForCausalLM" not in architectures
    assert not {"half", "raising"} & {plugin["name"] for plugin in report["plugins"]}


def test_every_failure_is_expected(report: dict[str, Any]) -> None:
    names = {each["name"] for each in report["failures"]}
    assert names == {*FAULTS, "stale", "misdirected", "interrupted", "shared-name"}


def test_people_are_told_the_same(report: dict[str, Any], shared_site: Any) -> None:
    told = shared_site.rtp("plugins").stdout
    for each in report["failures"]:
        assert each["cause"] in told
    assert "Traceback" not in told
    assert "raise ValueError('no luck')" in shared_site.rtp("plugins", "--debug").stdout


def test_help_lists_a_plugins_command(report: dict[str, Any], shared_site: Any) -> None:
    assert "shine a light" in shared_site.rtp("--help").stdout
    refused = shared_site.rtp("shine")
    assert refused.returncode == 2
    assert "good.model has no configure and no run" in refused.stderr
