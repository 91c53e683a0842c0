"""Weight descriptors with one fault each, under the model classes that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from rtp_runtime.weights import Concat, Descriptor, Interleave, Skip, Source, Stack, Tie, Weight, WeightDescriptors

Edit = Callable[[list[Descriptor]], list[Descriptor]]


def edited(module: ModuleType, edit: Edit) -> Callable[[Any], WeightDescriptors]:
    """The module's `weight_descriptors` with its first layout edited."""

    def weight_descriptors(config: Any) -> WeightDescriptors:
        return WeightDescriptors(*edit(list(module.weight_descriptors(config).layouts[0].descriptors)))

    return weight_descriptors


def change(parameter: str, source: Callable[[Source], Source]) -> Edit:
    """Another source for the parameters whose name ends so."""

    def edit(descriptors: list[Descriptor]) -> list[Descriptor]:
        return [
            replace(each, source=source(each.source))
            if isinstance(each, Weight) and each.parameter.endswith(parameter)
            else each
            for each in descriptors
        ]

    return edit


def swapped(source: Source) -> Source:
    """The first two parts of a concat exchanged, inside a stack too."""
    if isinstance(source, Stack):
        return replace(source, part=swapped(source.part))
    assert isinstance(source, Concat)
    first, second, *rest = source.parts
    return Concat((second, first, *rest), source.dim)


def interleaved(source: Source) -> Source:
    return Interleave(source, groups=2)


def tie_head(descriptors: list[Descriptor]) -> list[Descriptor]:
    kept = [each for each in descriptors if not (isinstance(each, Weight) and each.parameter == "lm_head.weight")]
    return [*kept, Tie("lm_head.weight", "model.embed_tokens.weight")]


def untie_head(descriptors: list[Descriptor]) -> list[Descriptor]:
    from rtp_runtime.weights import FromCheckpoint

    embedding = next(each for each in descriptors if isinstance(each, Weight) and "embed_tokens" in each.parameter)
    assert isinstance(embedding.source, FromCheckpoint)
    head = Weight(parameter="lm_head.weight", source=replace(embedding.source, name="lm_head.weight"))
    return [*(each for each in descriptors if not isinstance(each, Tie)), head]


def drop_biases(descriptors: list[Descriptor]) -> list[Descriptor]:
    kept = [each for each in descriptors if not (isinstance(each, Weight) and each.parameter.endswith(".bias"))]
    return [*kept, Skip(r".*_proj\.bias", "biases are zero")]
