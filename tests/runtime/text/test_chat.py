"""Rendered chats equal transformers' `apply_chat_template`; templates cannot leave their sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from rtp_runtime.errors import ConfigError, RequestError
from rtp_runtime.text import ChatTemplate, load_tokenizer

Saver = Callable[..., Path]

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content.strip() + '</think>' }}
    {%- endif %}
    {% generation %}{{- message.content or '' }}{% endgeneration %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if not call.function %}{% continue %}{% endif %}
            {{- '<tool_call>' + call.function.arguments | tojson(indent=2) + '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
PLAIN = """
{{ bos_token }}{% for m in messages %}
  {% if loop.first %}
  [{{ m['role'] }}]
  {% endif %}
{{ m['content'] | trim }}
{% endfor %}
{{ dict(a=1) | tojson }} {{ documents }} {{ strftime_now('%Y')|length }} {{ missing_token }}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "<b>Wetter</b> für 'Orte' & mehr",
        "parameters": {"n": [1, 2.5, None]},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief. <&>'\""}, {"role": "user", "content": "Grüße 你好"}],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "thinking": " hm ",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"ort": "Köln", "ok": True}}}, {"id": 3}],
        },
        {"role": "tool", "content": '{"t": 3}'},
    ],
]


@pytest.mark.parametrize("template", [CHATML, PLAIN])
@pytest.mark.parametrize("place", ["config", "file", "list"])
def test_rendering_equals_transformers(template: str, place: str, byte_level: Backend, save: Saver) -> None:
    from transformers import AutoTokenizer

    config: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    files: dict[str, str] = {}
    if place == "file":
        files["chat_template__jinja"] = template
        config["chat_template"] = "not this one"
    else:
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "T" + template}]
        config["chat_template"] = template if place == "config" else named
    directory = save(byte_level, config, **files)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
    assert ours is not None
    for messages in CONVERSATIONS:
        for options in ({}, {"tools": [TOOL]}, {"enable_thinking": False}):
            for add in (True, False):
                expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add, **options)
                assert ours.render_chat(messages, add_generation_prompt=add, **options) == expected


def test_what_a_template_refuses_is_told(byte_level: Backend, save: Saver) -> None:
    tokenizer = load_tokenizer(save(byte_level, {"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    assert tokenizer is not None
    with pytest.raises(RequestError, match="refuses these messages: Unknown role: clown"):
        tokenizer.render_chat([{"role": "clown", "content": "x"}])
    with pytest.raises(RequestError, match="at least one message"):
        tokenizer.render_chat([])
    with pytest.raises(RequestError, match="is not a message"):
        tokenizer.render_chat(["hello"])  # type: ignore[list-item]


def test_no_template_and_broken_templates(byte_level: Backend, save: Saver) -> None:
    tokenizer = load_tokenizer(save(byte_level))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.render_chat(CONVERSATIONS[0])
    with pytest.raises(ConfigError, match="not valid at line 2"):
        ChatTemplate("x\n{% for %}", {})
    with pytest.raises(ConfigError, match="chat_template is a int"):
        load_tokenizer(save(byte_level, {"chat_template": 3}))
    with pytest.raises(ConfigError, match="has no text under 'template'"):
        load_tokenizer(save(byte_level, {"chat_template": [{"name": "default"}]}))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 2 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for _ in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=r"stopped|refuses"):
        ChatTemplate(attack, {}).render([{"role": "user", "content": "x"}])


def test_a_template_cannot_read_files() -> None:
    with pytest.raises(RequestError, match="refuses"):
        ChatTemplate("{% include '/etc/hostname' %}", {}).render([{"role": "user", "content": "x"}])


def test_objects_with_methods_never_reach_a_template() -> None:
    class Dangerous:
        def write(self) -> str:
            raise AssertionError("the template called it")

    messages = [{"role": "user", "content": Dangerous()}]
    with pytest.raises(RequestError, match="write"):
        ChatTemplate("{{ messages[0].content.write() }}", {}).render(messages)
    assert ChatTemplate("{{ messages[0].content }}", {}).render(messages) == "<Dangerous>"


def test_the_callers_messages_stay_as_they_are() -> None:
    message: dict[str, Any] = {"role": "user", "content": None, "reasoning": "r"}
    ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}", {}).render([message])
    assert message == {"role": "user", "content": None, "reasoning": "r"}
