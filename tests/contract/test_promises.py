"""Public names, signatures, hooks, errors and command-line options are as promised in `frozen/`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import pytest


@pytest.mark.parametrize("file", ["public_names.txt", "hooks.txt", "errors.txt", "cli_options.txt"])
def test_promises_are_kept(file: str, promises: Any) -> None:
    promised = (promises.FROZEN / file).read_text(encoding="utf-8")
    now = promises.promises()[file]
    difference = "\n".join(
        difflib.unified_diff(promised.splitlines(), now.splitlines(), "promised", "now", lineterm="")
    )
    assert not difference, (
        f"the API has changed. If that is meant, run tools/freeze and say so in CHANGELOG.md:\n{difference}"
    )


def test_everything_listed_exists_and_is_documented(promises: Any) -> None:
    for name in promises.PUBLIC_MODULES:
        module = importlib.import_module(name)
        assert module.__doc__
        for public in promises.public_names(module):
            value = getattr(module, public)
            needed = inspect.isclass(value) or inspect.isfunction(value)
            assert value.__doc__ or not needed, f"{name}.{public} has no docstring"


def test_packages_state_what_is_public(promises: Any) -> None:
    for name in promises.PUBLIC_MODULES:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            assert hasattr(module, "__all__"), f"{name}/__init__.py has no __all__"
            assert len(set(module.__all__)) == len(module.__all__)


def test_the_lazy_names_of_rtp_runtime() -> None:
    import rtp_runtime

    assert dir(rtp_runtime) == sorted(rtp_runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        rtp_runtime.LLMs  # noqa: B018


def test_the_api_version_of_our_plugins() -> None:
    import rtp_runtime
    from rtp_runtime.hookspecs import API_VERSION
    from rtp_runtime.plugins import load_plugins

    assert rtp_runtime.__version__.startswith(f"{API_VERSION}.")
    assert not [failure for failure in load_plugins().failures if failure.kind == "outdated"]
