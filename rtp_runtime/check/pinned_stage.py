"""The pinned stage: tables and pinned tensors, bit for bit, in float32 and in the serving dtype.

A numeric comparison cannot see all of this: a rotary table in bfloat16 is what a bfloat16 reference has too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.compare import RelativeError
from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.ours import OurModel
from rtp_runtime.check.report import Finding, Measure, NotJudged, StageResult
from rtp_runtime.check.session import Session
from rtp_runtime.errors import RtpError


@dataclass(frozen=True, slots=True)
class Pinned:
    """A tensor of ours, and what it must be, bit for bit."""

    name: str
    ours: Tensor
    wanted: Tensor


class PinnedStage:
    """Compares module after module; `finish` gives the result."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stage = StageResult("pinned")
        self._seen: set[str] = set()

    def serving(self) -> None:
        """Compare what our model is in the serving dtype, without its weights: tables and dtypes need none."""
        dtype = serving_dtype(self._session)
        try:
            module = _build(self._session, dtype)
        except RtpError as error:
            self._stage.not_judged.append(NotJudged(f"tables in {dtype}", str(error), required=True))
        else:
            self._add(module, dtype, _tables(self._session, module))

    def loaded(self, model: OurModel) -> None:
        """Compare the tables and pinned tensors of the loaded float32 model."""
        self._add(model.module, "float32", (*_tables(self._session, model.module), *_weights(model)))

    def _add(self, module: nn.Module, dtype: str, compared: Iterable[Pinned]) -> None:
        for pinned in compared:
            self._compare(pinned, dtype)
        for name, found in _kept_in_float32(self._session, module):
            how = f"the reference keeps it in float32, ours is {found.dtype}"
            self._fail(name, dtype, 1.0, how)

    def finish(self) -> StageResult:
        """Say what was compared."""
        stage = self._stage
        stage.numbers = {"tensors": len(self._seen), "serving_dtype": serving_dtype(self._session)}
        stage.summary = (
            f"{len(stage.findings)} differ"
            if stage.findings
            else f"{len(self._seen)} tables and pinned tensors are equal bit for bit"
        )
        return stage

    def _compare(self, pinned: Pinned, dtype: str) -> None:
        self._seen.add(pinned.name)
        ours, wanted = pinned.ours, pinned.wanted
        if ours.shape != wanted.shape:
            how = f"{list(ours.shape)}, the reference has {list(wanted.shape)}"
            self._fail(pinned.name, dtype, math.inf, how)
        elif ours.dtype != wanted.dtype or not torch.equal(ours, wanted):
            error = RelativeError()
            error.add(ours.reshape(1, -1), wanted.reshape(1, -1), torch.zeros(1, dtype=torch.int64))
            how = f"{int((ours != wanted).sum())} of {ours.numel()} values differ"
            if ours.dtype != wanted.dtype:
                how = f"{ours.dtype}, the reference has {wanted.dtype}"
            self._fail(pinned.name, dtype, error.value, how)
        else:
            self._measure(pinned.name, 0.0)

    def _measure(self, name: str, error: float) -> None:
        layer = layer_of(name, self._session.reference.layers)
        self._stage.measures.append(Measure(parent_of(name), layer, name.rpartition(".")[2], error, 0.0))

    def _fail(self, name: str, dtype: str, error: float, how: str) -> None:
        session, module = self._session, parent_of(name)
        inside = layer_of(module, session.reference.layers)
        self._measure(name, error)
        self._stage.findings.append(
            Finding(
                stage="pinned",
                module=module,
                layer=session.consumers.get(module) if inside is None else inside,
                error=error,
                tolerance=0.0,
                what=f"{name.rpartition('.')[2]}, bit for bit",
                detail=f"model in {dtype}: {how}",
                rank=session.rank(module) - 0.93,
            )
        )


def serving_dtype(session: Session) -> str:
    """The dtype asked for, else the checkpoint's; bfloat16 where that is float32, which narrows nothing."""
    wanted = session.options.dtype
    if wanted != "auto":
        return wanted
    from rtp_runtime.model import load_config

    declared = load_config(session.options.model).declared_dtype()
    return declared if declared in ("bfloat16", "float16") else "bfloat16"


def _build(session: Session, dtype: str) -> nn.Module:
    """Our module in this dtype, bound but not loaded."""
    from rtp_runtime.model import load_config
    from rtp_runtime.model.assessment import find_served
    from rtp_runtime.model.building import bind_module, build_module, make_op_table
    from rtp_runtime.weights.dtypes import torch_dtype

    served = find_served(load_config(session.options.model), session.plugins)
    run_dtype = torch_dtype(dtype)
    module = build_module(served.definition, served.implementation, served.config, run_dtype)
    ops = make_op_table(session.plugins, "cpu", run_dtype)
    bind_module(served.definition, module, ops, torch.device("cpu"), run_dtype)
    return module


def _tables(session: Session, module: nn.Module) -> Iterator[Pinned]:
    """The reference's tables (buffers that no checkpoint holds) of which ours has one of the same name."""
    ours = dict(module.named_buffers())
    for name, wanted in session.reference.buffers():
        if name in ours:
            yield Pinned(name, ours[name], wanted)


def _weights(model: OurModel) -> Iterator[Pinned]:
    """Parameters with a dtype of their own, against the checkpoint's values in that dtype."""
    from safetensors import safe_open

    from rtp_runtime.weights.dtypes import torch_dtype
    from rtp_runtime.weights.operations import invert

    loaded: Any = model.loaded
    tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    for parameter in loaded.weights.layout.parameters:
        if parameter.dtype == "model" or parameter.name not in tensors:
            continue
        for leaf, view in invert(parameter.source, tensors[parameter.name]):
            with safe_open(loaded.weights.headers.tensors[leaf.name].file, "pt") as file:
                whole = file.get_tensor(leaf.name)
            wanted = whole[tuple(slice(*bounds) for bounds in leaf.region)].to(torch_dtype(parameter.dtype))
            yield Pinned(parameter.name, view.reshape(wanted.shape), wanted)


def _kept_in_float32(session: Session, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Our parameters and buffers that are narrower than float32 where the reference insists on it."""
    kept: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(session.reference.model, attribute, None) or ())
    known = session.reference.stored_names()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in known and kept & set(name.split(".")) and tensor.dtype != torch.float32:
            yield name, tensor
