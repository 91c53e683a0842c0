"""Environment variables are typed, and a bad value is an error."""

from __future__ import annotations

import pytest

from rtp_runtime.env import Environment, read_environment
from rtp_runtime.errors import UsageError


def test_nothing_set_is_the_default() -> None:
    assert read_environment({}) == Environment()


def test_values_are_typed() -> None:
    environment = read_environment({"RTP_PLUGINS": "a.b, c,", "RTP_DEBUG": "Yes"})
    assert environment == Environment(plugins=("a.b", "c"), debug=True)


@pytest.mark.parametrize(
    ("name", "value"), [("RTP_DEBUG", "2"), ("RTP_PLUGINS", "a b"), ("RTP_PLUGINS", "a..b"), ("RTP_PLUGINS", "./a.py")]
)
def test_a_bad_value_is_an_error_that_shows_it(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={value!r}"):
        read_environment({name: value})
