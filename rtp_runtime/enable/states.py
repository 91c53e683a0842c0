"""Writes the state descriptors of a recognised decoder."""

from __future__ import annotations

from collections.abc import Mapping

from rtp_runtime.enable.code import INDENT, WIDTH, call, choice
from rtp_runtime.enable.findings import Decoder

LAYERS = "for layer in range(config.num_hidden_layers)"
WORDS = {"PagedState": "full", "WindowState": "sliding", "SlotState": "recurrent"}


def state_lines(d: Decoder) -> list[str]:
    """The body of `state_descriptors`."""
    lines = list(dict.fromkeys(line for block in d.blocks for line in block.state_locals()))
    kinds: list[Mapping[str, str]] = d.states.values()
    if len(kinds) == 1:
        return lines + _same(kinds[0])
    names = _names(kinds)
    alone = all(list(kind) == list(kinds[0]) and len(kind) == 1 for kind in kinds)
    for name, kind in zip(names, kinds, strict=True):
        if alone:
            lines.append(f"{name} = {next(iter(kind.values()))}")
        else:
            lines += call(
                f"{name}: Mapping[str, StateDescriptor] = {{",
                [f'"{key}": {code}' for key, code in kind.items()],
                "}",
                indent=4,
            )
    cases = [(condition, name) for (condition, _), name in zip(d.states.cases, names, strict=True)]
    if alone:
        key = next(iter(kinds[0]))
        lines.append(f"kinds = [{choice(cases)} {LAYERS}]")
        return [*lines, f'return StateDescriptors([{{"{key}": kind}} for kind in kinds])']
    return [*lines, f"return StateDescriptors([{choice(cases)} {LAYERS}])"]


def _same(kind: Mapping[str, str]) -> list[str]:
    loop = LAYERS.replace("for layer", "for _") if "layer]" not in str(kind) else LAYERS
    entries = [f'"{key}": {code}' for key, code in kind.items()]
    whole = f"return StateDescriptors([{{{', '.join(entries)}}} {loop}])"
    if len(INDENT + whole) <= WIDTH:
        return [whole]
    named = [f"{key} = {code}" for key, code in kind.items() if "layer]" not in code]
    if len(named) == len(kind) == 1:
        name = WORDS.get(next(iter(kind.values())).partition("(")[0], "state")
        key, code = next(iter(kind.items()))
        return [f"{name} = {code}", f'return StateDescriptors([{{"{key}": {name}}} {loop}])']
    return [
        *call("states = {", entries, "}", indent=4),
        f"return StateDescriptors([states {loop}])",
    ]


def _names(kinds: list[Mapping[str, str]]) -> list[str]:
    names: list[str] = []
    for kind in kinds:
        word = "stateless" if not kind else WORDS.get(next(iter(kind.values())).partition("(")[0], "state")
        names.append(word if word not in names else f"{word}_{len(names)}")
    return names
