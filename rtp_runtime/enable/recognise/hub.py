"""The names under which a checkpoint holds the reference's parameters, found by saving the small copy."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from rtp_runtime.enable.reference import Reference


@dataclass(frozen=True)
class Hub:
    """Tensors of a saved copy, by name and by value: random values are met once."""

    names: frozenset[str]
    by_value: Mapping[str, str]
    prefixes: Mapping[str, str]
    """Beginnings of parameters' names -> what stands there in checkpoints. Names here begin as parameters do."""
    by_first_row: Mapping[str, tuple[str, int]]
    """Of tensors with rows: their names and how many rows they have."""

    @classmethod
    def of(cls, reference: Reference) -> Hub:
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary:
            reference.save(Path(temporary))
            tensors = {name: t for file in Path(temporary).glob("*.safetensors") for name, t in load_file(file).items()}
        by_value = {_digest(tensor): name for name, tensor in tensors.items()}
        prefixes = _prefixes(reference.model, by_value)

        def ours(name: str) -> str:
            old = next((new for new in prefixes if name.startswith(prefixes[new])), None)
            return name if old is None else old + name.removeprefix(prefixes[old])

        rows = {_digest(tensor[0]): (ours(name), len(tensor)) for name, tensor in tensors.items() if tensor.ndim > 1}
        return cls(
            frozenset(map(ours, tensors)), {value: ours(name) for value, name in by_value.items()}, prefixes, rows
        )

    def name_of(self, value: Tensor) -> str | None:
        """The tensor that holds exactly these values, in this shape."""
        return self.by_value.get(_digest(value))

    def parts_of(self, value: Tensor) -> tuple[str, ...]:
        """The tensors that hold these values one after another along their rows; () when several do not."""
        found, place = [], 0
        while place < len(value):
            name, count = self.by_first_row.get(_digest(value[place]), ("", 0))
            if not count:
                return ()
            found.append(name)
            place += count
        return tuple(found) if len(found) > 1 and place == len(value) else ()

    def pattern_of(self, experts: Sequence[Tensor]) -> str | None:
        """One name for the tensors of all experts, with `{expert}` where their number stands; None if there is none."""
        names = [self.name_of(value) for value in experts]
        if any(name is None for name in names):
            return None
        first = str(names[0])
        for place in re.finditer(r"(?<=\.)0(?=\.)", first):
            pattern = f"{first[: place.start()]}{{expert}}{first[place.end() :]}"
            if names == [pattern.replace("{expert}", str(expert)) for expert in range(len(names))]:
                return pattern
        return None

    def renames(self, module: nn.Module, layer: str, name: str) -> dict[str, str]:
        """Names inside the layer `layer` of those parameters of its module `name` that checkpoints call otherwise."""
        found = {}
        for inside, value in (*module.named_parameters(), *module.named_buffers()):
            if f"{layer}.{name}.{inside}" in self.names:
                continue
            stored = self.name_of(value)
            if stored is not None and stored.startswith(f"{layer}."):
                found[f"{name}.{inside}"] = stored.removeprefix(f"{layer}.")
        return found


def _prefixes(model: nn.Module, by_value: Mapping[str, str]) -> dict[str, str]:
    """What all names of a checkpoint have at their beginning in place of what parameters have."""
    pairs: Counter[tuple[str, str]] = Counter()
    for name, value in model.named_parameters():
        stored = by_value.get(_digest(value), name)
        mine, theirs = name.split("."), stored.split(".")
        while mine and theirs and mine[-1] == theirs[-1]:
            mine.pop(), theirs.pop()
        heads = (".".join(mine), ".".join(theirs))
        if mine != theirs and not any(part.isdigit() for part in (*mine, *theirs)):
            pairs[heads] += 1
    found = pairs.most_common(1)
    if not found or 2 * found[0][1] < len(list(model.parameters())) or not all(found[0][0]):
        return {}
    ((old, new), _) = found[0]
    return {f"{old}.": f"{new}."}


def _digest(value: Tensor) -> str:
    data = value.detach().contiguous().cpu().numpy()
    return hashlib.sha256(repr((data.shape, str(data.dtype))).encode() + data.tobytes()).hexdigest()
