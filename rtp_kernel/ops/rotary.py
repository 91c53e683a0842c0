"""Rotary embedding: frequency tables, angles, and the layouts in which heads are rotated.

The tables are those of transformers' `modeling_rope_utils`, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved", "interleaved_to_half")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """The numbers of a rotary table, named as in `config.rope_parameters`."""

    rope_type: str = "default"
    theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    mrope_section: tuple[int, ...] | None = None
    """Frequencies that turn by each axis of positions [axes, T] (time, height, width); None = one axis."""
    mrope_interleaved: bool = False
    """Whether the axes take turns among the frequencies, or have contiguous sections."""

    def __post_init__(self) -> None:
        if self.rope_type not in _TABLES:
            raise ValueError(f'rope_type "{self.rope_type}" is unknown; known: {", ".join(_TABLES)}')
        missing = [name for name in _NEEDED[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f'rope_type "{self.rope_type}" needs {", ".join(missing)} in rope_parameters')

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RopeParameters:
        """From `config.rope_parameters` (or a flat `rope_scaling`, whose "type" is an old name of "rope_type").

        The type "mrope" of older files is the default table with sections. Keys that no table reads are ignored. Raises
        ValueError when theta or a number the type needs is missing.
        """
        theta = values.get("rope_theta", values.get("theta"))
        if theta is None:
            raise ValueError(f"rope_parameters {dict(values)} have no rope_theta")
        rope_type = values.get("rope_type", values.get("type", "default"))
        rope_type = "default" if rope_type == "mrope" else rope_type
        section = values.get("mrope_section")
        known = {spec.name for spec in fields(cls)} - {"rope_type", "theta", "mrope_section"}
        return cls(
            rope_type=rope_type,
            theta=theta,
            mrope_section=None if section is None else tuple(section),
            **{key: value for key, value in values.items() if key in known},
        )

    def table(self, rotary_dim: int) -> tuple[Tensor, float]:
        """inv_freq [rotary_dim / 2] float32 on the CPU, and the factor that cos and sin are multiplied by."""
        return _TABLES[self.rope_type](self, rotary_dim)

    def softmax_factor(self) -> float:
        """What a scaled table multiplies the scale of attention by: yarn's magnitude squared where `mscale_all_dim` is
        given (DeepSeek), else 1."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        assert self.factor is not None
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def axes(self, rotary_dim: int) -> Tensor | None:
        """[rotary_dim / 2] int64 on the CPU: by which axis of positions [3, T] each frequency turns; None = one axis.

        Contiguous sections (Qwen2.5-VL) must add up to rotary_dim / 2, or ValueError is raised. Where they are
        interleaved (Qwen3-VL), height has every third frequency from 1 on, width from 2 on, as many as their section
        says and the table holds, and time has the others.
        """
        if self.mrope_section is None:
            return None
        num_freqs, section = rotary_dim // 2, torch.tensor(self.mrope_section)
        if not self.mrope_interleaved:
            if int(section.sum()) != num_freqs:
                raise ValueError(f"mrope_section {list(self.mrope_section)} must add up to {num_freqs} frequencies")
            return torch.repeat_interleave(torch.arange(len(section)) % 3, section)
        axes = torch.zeros(num_freqs, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim


def _default_table(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    return 1.0 / (rope.theta ** _exponents(dim)), 1.0


def _linear_table(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    assert rope.factor is not None
    return _default_table(rope, dim)[0] / rope.factor, 1.0


def _llama3_table(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    context = rope.original_max_position_embeddings
    assert factor is not None and low is not None and high is not None and context is not None
    inv_freq, _ = _default_table(rope, dim)
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > context / low, wavelength < context / high
    scaled = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~is_short * ~is_long, smoothed, scaled), 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude scale for a context extended `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: RopeParameters) -> float:
    assert rope.factor is not None
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return float(yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim))
    return yarn_mscale(rope.factor)


def _yarn_range(rope: RopeParameters, dim: int) -> tuple[float, float]:
    """The dimensions between which interpolation is faded in."""
    context = rope.original_max_position_embeddings
    assert context is not None

    def dimension(rotations: float) -> float:
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def _yarn_table(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    assert rope.factor is not None
    low, high = _yarn_range(rope, dim)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = rope.theta ** _exponents(dim)
    extrapolated, interpolated = 1.0 / frequencies, 1.0 / (rope.factor * frequencies)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, _yarn_attention_factor(rope)


_TABLES = {"default": _default_table, "linear": _linear_table, "llama3": _llama3_table, "yarn": _yarn_table}
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rotary_angles(
    positions: Tensor, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """positions [T] -> cos, sin [T, rotary_dim] in `dtype`, as cat(freqs, freqs), computed in float32.

    With positions [3, T] (time, height, width), `axes` [rotary_dim / 2] int64 says which of them each frequency takes.
    """
    if positions.ndim == 1:
        freqs = positions[:, None].float() * inv_freq  # [T, rotary_dim / 2]
    else:
        if axes is None:
            raise ValueError(f"positions of {len(positions)} axes need mrope_section in rope_parameters")
        freqs = positions.index_select(0, axes).T.float() * inv_freq
    angles = torch.cat((freqs, freqs), dim=-1)
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> tuple[Tensor, Tensor]:
    """Rotate the leading rotary_dim dimensions of q [T, heads, dim] and k [T, kv heads, dim]; the rest passes.

    cos, sin [T, rotary_dim] as `rotary_angles` gives them. Layouts: "half" pairs i with i + rotary_dim/2 (Llama, Qwen);
    "interleaved" pairs 2i with 2i + 1 and leaves them there (GLM, DeepSeek-V2); "interleaved_to_half" pairs 2i with
    2i + 1 and puts the results into halves (DeepSeek-V3).
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos, sin, layout), _rotate(k, cos, sin, layout) if k.shape[1] else k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    dim = cos.shape[-1]
    turned, passed = x[..., :dim], x[..., dim:]
    if layout == "half":
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    else:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
        pair = (even * cos - odd * sin, odd * cos + even * sin)
        turned = torch.cat(pair, dim=-1) if layout == "interleaved_to_half" else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned
