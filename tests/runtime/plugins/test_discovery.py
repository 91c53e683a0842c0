"""Where plugins come from: entry points, each once however they are installed, and modules named by the user."""

from __future__ import annotations

from typing import Any

import pytest

OURS = ("deepseek", "glm", "minimax", "qwen")
"""The plugins of this repository, which its environment has installed."""

MODELS = "@hookimpl\ndef rtp_register_models(models):\n    models.add('{name}ForCausalLM', '{module}.model')\n"


def body(name: str) -> str:
    return MODELS.format(name=name.title(), module=name)


def names(report: dict[str, Any]) -> list[str]:
    return [plugin["name"] for plugin in report["plugins"] if plugin["name"] not in OURS]


def test_an_editable_install_is_listed_once(site: Any, tmp_path: Any) -> None:
    """An editable install has its metadata in site-packages and, left by a build, beside the sources."""
    site.plugin("acme", body("acme"))
    site.plugin("acme", body("acme"), info="acme.egg-info")
    (site.path / "acme.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    assert names(site.plugins()) == ["acme"]


def test_what_an_interrupted_upgrade_leaves_is_listed_once(site: Any) -> None:
    site.plugin("acme", body("acme"))
    site.plugin("acme", body("acme"), info="~cme-0.9.dist-info")
    report = site.plugins()
    assert names(report) == ["acme"]
    assert report["failures"] == []


def test_an_entry_point_may_name_an_object(site: Any) -> None:
    source = """
class Plugin:
    @hookimpl
    def rtp_register_models(self, models):
        models.add("AcmeForCausalLM", "acme.model")

plugin = Plugin()
"""
    site.plugin("acme", source, value="acme:plugin")
    assert site.plugins()["plugins"][0]["architectures"] == ["AcmeForCausalLM"]


def test_the_api_version_of_a_module_may_stand_in_its_package(site: Any) -> None:
    hooks = body("acme").replace("acme.model", "acme.model")
    sources = {"acme/__init__.py": 'RTP_API = "0.1"\n', "acme/model.py": ""}
    site.install("acme", sources | {"acme/hooks.py": "from rtp_runtime import hookimpl\n" + hooks}, value="acme.hooks")
    assert names(site.plugins()) == ["acme"]


def test_checking_strings_imports_no_package_of_a_plugin(site: Any) -> None:
    sources = {
        "acme/__init__.py": 'from rtp_runtime import hookimpl\nRTP_API = "0.1"\n'
        + "@hookimpl\ndef rtp_register_models(models): models.add('AcmeForCausalLM', 'acme.models.one')\n",
        "acme/models/__init__.py": "import torch\n",
        "acme/models/one.py": "",
    }
    site.install("acme", sources)
    assert names(site.plugins()) == ["acme"]


def test_a_plugin_may_look_whether_torch_is_there(site: Any) -> None:
    site.plugin("acme", "import importlib.util\nassert importlib.util.find_spec('torch')\n" + body("acme"))
    assert names(site.plugins()) == ["acme"]


@pytest.mark.parametrize("how", ["option", "environment", "both"])
def test_modules_named_by_the_user_need_no_metadata(how: str, site: Any) -> None:
    site.plugin("acme", body("acme"))
    for file in (site.path / "acme-1.0.dist-info").iterdir():
        file.unlink()
    arguments = [] if how == "environment" else ["--plugin", "acme"]
    env = {} if how == "option" else {"RTP_PLUGINS": " acme , "}
    report = site.plugins(*arguments, env=env)
    assert names(report) == ["acme"]
    assert report["plugins"][-1]["distribution"] is None


def test_an_installed_plugin_that_is_named_is_loaded_once(site: Any) -> None:
    site.plugin("acme", body("acme"))
    assert names(site.plugins("--plugin", "acme")) == ["acme"]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("acme", ["plugin 'acme' (acme 1.0), which you named, is raising", "ZeroDivisionError"]),
        ("nowhere", ["plugin 'nowhere', which you named, is missing", "no module 'nowhere'"]),
    ],
)
def test_a_failure_of_a_named_plugin_is_fatal(module: str, words: list[str], site: Any) -> None:
    site.plugin("acme", "@hookimpl\ndef rtp_register_models(models): 1 / 0\n")
    assert site.plugins()["failures"][0]["kind"] == "raising"
    for result in (site.rtp("plugins", "--plugin", module), site.rtp("plugins", env={"RTP_PLUGINS": module})):
        assert (result.returncode, result.stdout) == (2, "")
        assert all(word in result.stderr for word in words)
        assert "Traceback" not in result.stderr


def test_a_value_that_names_no_module_is_an_error(site: Any) -> None:
    result = site.rtp("plugins", env={"RTP_PLUGINS": "acme,no/module"})
    assert result.returncode == 2
    assert "'no/module' is not the name of a module" in result.stderr
