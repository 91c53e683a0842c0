"""The seeded faults that only a narrow dtype shows: float32 has nothing to round.

As in `catalogue`, of whose `Fault` they are; `effect` is R, the rounding in units of the reference's own.
"""

from __future__ import annotations

from functools import partial

from check_faults.catalogue import Fault

dtype = partial(Fault, row="kept too narrow", stage="serving")

NARROW = (
    dtype(
        "dtype_softmax",
        at="0.self_attn",
        effect=3.3,
        base="qwen2",
        op=("paged_attention", "NarrowSoftmax"),
    ),
    dtype("dtype_norm", at="0.input_layernorm", effect=2.2, base="qwen3_5", op=("rms_norm", "NarrowNorm")),
    dtype("dtype_early_cast", at="0.input_layernorm", effect=1.8, base="qwen3_next", op=("rms_norm", "EarlyCast")),
    dtype("dtype_sums", at="0.self_attn.q_proj", effect=2.5, base="qwen3", op=("linear", "NarrowSums")),
    dtype(
        "dtype_angles", at="model.rotary_emb", layer=0, effect=11.0, base="qwen3", op=("rotary_angles", "NarrowAngles")
    ),
    dtype("dtype_router", at="1.mlp.gate", effect=24.0, base="deepseek_v3", model="deepseek_v3:NarrowRouter"),
    dtype(
        "dtype_state",
        at="0.linear_attn",
        effect=65536.0,
        base="qwen3_next",
        model="narrow_states:Qwen3NextForCausalLM",
    ),
)
