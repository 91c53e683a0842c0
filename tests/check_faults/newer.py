"""The seeded faults of selections, recurrences, compression, routers with groups and residual streams.

As in `catalogue`, of whose `Fault` they are.
"""

from __future__ import annotations

from functools import partial

from check_faults.catalogue import Fault, scale

v3, v32, v4 = (partial(Fault, base=f"deepseek_v{version}") for version in ("3", "32", "4"))
dsa, kda = partial(Fault, base="glm_moe_dsa"), partial(Fault, base="glm5_next")
gdn, gdn_dense = partial(Fault, base="qwen3_next"), partial(Fault, base="qwen3_5")
lightning, m3 = partial(Fault, base="minimax"), partial(Fault, base="minimax_m3")

LAYER = "model.layers."

NEWER = (
    # Which places are attended to
    v32(
        "index_rotary", "index selection: rope", "probes", "1.self_attn.indexer", 1.04, model="deepseek_v32:IndexRotary"
    ),
    v32(
        "index_norm_eps",
        "index selection: eps",
        "probes",
        "1.self_attn.indexer.k_norm",
        7.3e-05,
        model="deepseek_v32:IndexNormEps",
    ),
    dsa(
        "index_no_relu",
        "index selection: relu left out",
        "probes",
        "0.self_attn.indexer",
        0.81,
        op=("index_scores", "NoRelu"),
    ),
    v4(
        "index_equal_heads",
        "index selection: head weights left out",
        "probes",
        "2.self_attn.compressor.indexer",
        0.97,
        op=("index_scores", "EqualHeads"),
    ),
    v32(
        "index_not_causal",
        "index selection: causality",
        "probes",
        "0.self_attn.indexer",
        0.254,
        op=("index_scores", "SeesOneMore"),
    ),
    dsa(
        "index_one_less",
        "index selection: k off by one",
        "probes",
        "0.self_attn.indexer",
        0.347,
        op=("select", "OneLess"),
    ),
    v4(
        "entries_one_less",
        "index selection: k off by one",
        "probes",
        "2.self_attn.compressor.indexer",
        0.546,
        op=("select", "OneLess"),
    ),
    m3(
        "no_local_block",
        "index selection: the local block",
        "probes",
        "1.self_attn.indexer",
        0.7,
        op=("block_index_scores", "NoLocalBlock"),
    ),
    m3(
        "index_key_weight",
        "a damaged weight",
        "probes",
        "1.self_attn.indexer.k_proj",
        5.5e-05,
        tensors=scale(f"{LAYER}1.self_attn.indexer.k_proj.weight", 1.0003, place=3),
    ),
    # Decay
    gdn("growing_state", "decay: sign", "probes", "0.linear_attn", 310000.0, op=("delta_gates", "GrowingState")),
    gdn_dense(
        "no_softplus", "decay: softplus left out", "probes", "0.linear_attn", 1.21, op=("delta_gates", "NoSoftplus")
    ),
    gdn("no_step_bias", "decay: dt_bias left out", "probes", "0.linear_attn", 0.107, op=("delta_gates", "NoStepBias")),
    gdn_dense(
        "step_bias_a_little",
        "decay: a damaged weight",
        "probes",
        "1.linear_attn",
        8.2e-05,
        tensors=scale(f"{LAYER}1.linear_attn.dt_bias", 1.0005),
    ),
    kda(
        "one_decay_per_head",
        "decay: per channel taken as one per head",
        "probes",
        "0.self_attn",
        0.34,
        op=("gated_delta_rule", "OneDecayPerHead"),
    ),
    # Precision and continuity of state
    gdn(
        "narrow_state",
        "state in a low precision",
        "modes",
        "0.linear_attn",
        0.00027,
        op=("gated_delta_rule", "NarrowDeltaState"),
    ),
    lightning(
        "narrow_lightning",
        "state in a low precision",
        "modes",
        "0.self_attn",
        0.00136,
        op=("lightning_attention", "NarrowLightningState"),
    ),
    gdn_dense(
        "forgotten_inputs",
        "state dropped at a chunk's boundary",
        "modes",
        "0.linear_attn.conv1d",
        0.5,
        op=("causal_conv", "ForgottenInputs"),
    ),
    # Gates
    gdn("silu_gate", "output gate: silu for sigmoid", "probes", "3.self_attn", 1.61, model="qwen3_next:SiluGate"),
    gdn_dense(
        "gate_first",
        "output gate: before the norm",
        "probes",
        "0.linear_attn.norm",
        0.764,
        op=("gated_rms_norm", "GateFirst"),
    ),
    # Compression
    v4(
        "entries_late",
        "compression: an entry seen late",
        "probes",
        "3.self_attn",
        0.0913,
        op=("compressed_attention", "EntriesLate"),
    ),
    v4(
        "no_overlap",
        "compression: overlapping window dropped",
        "probes",
        "2.self_attn.compressor",
        0.93,
        op=("compress", "NoOverlap"),
    ),
    v4(
        "shifted_bias",
        "compression: position bias shifted",
        "probes",
        "2.self_attn.compressor",
        0.118,
        op=("compress", "ShiftedBias"),
    ),
    v4(
        "position_bias",
        "a damaged weight",
        "probes",
        "3.self_attn.compressor",
        2.7e-05,
        tensors=scale(f"{LAYER}3.attn.compressor.ape", 1.001, place=2),
    ),
    v4("no_sinks", "sinks left out", "probes", "0.self_attn", 0.331, op=("compressed_attention", "NoSinks")),
    v4(
        "sink",
        "a damaged weight",
        "probes",
        "1.self_attn",
        3.3e-06,
        tensors=scale(f"{LAYER}1.attn.attn_sink", 1.0005, place=1),
    ),
    v4(
        "no_inverse_rotary",
        "inverse rotary left out",
        "probes",
        "0.self_attn",
        0.467,
        model="deepseek_v4:NoInverseRotary",
    ),
    # Routers
    v3(
        "best_of_group",
        "router groups: best for the two best",
        "probes",
        "1.mlp.gate",
        0.69,
        op=("route", "BestOfGroup"),
    ),
    v3("bias_in_weights", "router: bias in the weights", "probes", "1.mlp.gate", 0.236, op=("route", "BiasInWeights")),
    v3("scaled_twice", "router: scale twice", "probes", "1.mlp.gate", 1.5, op=("route", "ScaledTwice")),
    v32("not_scaled", "router: scale missing", "probes", "1.mlp.gate", 0.6, op=("route", "NotScaled")),
    # Residual streams
    v4(
        "few_iterations",
        "residual mixing: iterations",
        "probes",
        "2.ffn_hc",
        0.00055,
        model="deepseek_v4:FewIterations",
    ),
    v4(
        "half_post",
        "residual mixing: post without its factor",
        "probes",
        "0.attn_hc",
        0.44,
        op=("hyper_connection", "HalfPost"),
    ),
    v4(
        "transposed_mix", "residual mixing: comb transposed", "probes", "0", 0.135, op=("hyper_expand", "TransposedMix")
    ),
    # A little
    v32(
        "index_head_weight",
        "a damaged weight",
        "probes",
        "2.self_attn.indexer.weights_proj",
        0.00023,
        tensors=scale(f"{LAYER}2.self_attn.indexer.weights_proj.weight", 1.001, place=5),
    ),
    gdn(
        "conv_tap",
        "a damaged weight",
        "probes",
        "2.linear_attn.conv1d",
        4.7e-05,
        tensors=scale(f"{LAYER}2.linear_attn.conv1d.weight", 1.001, place=9),
    ),
    kda(
        "output_norm",
        "a damaged weight",
        "probes",
        "1.self_attn.o_norm",
        0.00011,
        tensors=scale("model.language_model.layers.1.self_attn.o_norm.weight", 1.0003, place=2),
    ),
    v4(
        "mixing_scale",
        "a damaged weight",
        "probes",
        "3.attn_hc",
        4.7e-05,
        tensors=scale(f"{LAYER}3.hc_attn_scale", 1.0003),
    ),
    v3(
        "router_bias",
        "router: bias a little off",
        "probes",
        "1.mlp.gate",
        0.227,
        tensors=scale(f"{LAYER}1.mlp.gate.e_score_correction_bias", 1.002, place=3),
    ),
    lightning(
        "gate_weight",
        "a damaged weight",
        "probes",
        "2.self_attn.output_gate",
        5.4e-05,
        tensors=scale(f"{LAYER}2.self_attn.output_gate.weight", 1.0005, place=7),
    ),
    # Norms
    gdn("plain_norm", "norm: 1+w taken as w", "probes", "1.input_layernorm", 0.99, model="qwen3_next:PlainNorm"),
    v3(
        "low_rank_eps",
        "norm: eps of the low-rank query",
        "probes",
        "1.self_attn.q_a_layernorm",
        0.0055,
        model="deepseek_v3:ConfigEps",
    ),
)
