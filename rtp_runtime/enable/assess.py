"""From a config to a verdict: covered by a plugin, composed as a proven scaffold, or refused with the block named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rtp_runtime.enable.describe import describe
from rtp_runtime.enable.estimates import Estimates, estimate
from rtp_runtime.enable.findings import Decoder, UnrecognisedError
from rtp_runtime.enable.names import PluginNames, plugin_names
from rtp_runtime.enable.pins import find_pins
from rtp_runtime.enable.prove import Proof, importable, prove
from rtp_runtime.enable.recording import Recording, record
from rtp_runtime.enable.reference import Reference, meta_model, reference_class, resized_reference, small_reference
from rtp_runtime.enable.relative import find_relative
from rtp_runtime.enable.scaffold import plugin_files, scaffold
from rtp_runtime.enable.survey import unusual_blocks
from rtp_runtime.errors import CheckpointError, ConfigError, PluginError, UnsupportedModelError
from rtp_runtime.model.assessment import find_served
from rtp_runtime.model.config import ModelConfig
from rtp_runtime.plugins import Plugins
from rtp_runtime.testing.compare import one_thread

Verdict = Literal["covered", "relative", "composed", "bridged", "refused"]


@dataclass(frozen=True)
class Refusal:
    """A block that cannot be built, or a fact that stands in the way."""

    block: str
    reason: str
    needs: str


@dataclass(frozen=True)
class Assessment:
    """What is known of a checkpoint, and the files of the plugin that would serve it."""

    verdict: Verdict
    architecture: str
    served_by: str | None = None
    recognised: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    proof: Proof | None = None
    estimates: Estimates | None = None
    audited: int | None = None
    """Tensors of the checkpoint whose names and shapes the plugin's descriptors account for; None without weights."""
    names: PluginNames | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def covered(config: ModelConfig, plugins: Plugins) -> Assessment | None:
    """The plugin that serves this config already, or one that provides the architecture but declines; else None.

    Raises:
        PluginError: several plugins claim it, or the one that does is broken.
    """
    if not any(model.architecture == config.architecture for model in plugins.models):
        return None
    origin = str(plugins.resolve(config.architecture).target.origin)
    try:
        find_served(config, plugins)
    except UnsupportedModelError as error:
        refusal = Refusal(config.architecture, str(error), f"a change to {origin}, which provides this architecture")
        return Assessment("refused", config.architecture, served_by=origin, refusals=(refusal,))
    return Assessment("covered", config.architecture, served_by=origin)


def assess(
    config: ModelConfig,
    weights: Path | None = None,
    *,
    plugins: Plugins | None = None,
    trust_remote_code: bool = False,
) -> Assessment:
    """Recognise the reference, write the plugin's files, and prove them.

    Args:
        weights: the checkpoint's directory when it holds tensors; only their headers are read.
        plugins: whose models may be relatives.

    Raises:
        ConfigError: names that cannot name a plugin, or a config that transformers cannot read.
        CheckpointError: damaged files.
    """
    with one_thread():
        found = _assess(config, weights, plugins, trust_remote_code)
        return dataclasses.replace(found, estimates=_estimates(config, found, trust_remote_code))


def _assess(config: ModelConfig, weights: Path | None, plugins: Plugins | None, trust_remote_code: bool) -> Assessment:
    names = plugin_names(config.raw.get("model_type"), config.architecture)
    wrapped = _wrapper(config)
    if wrapped is not None:
        return _refused(names, wrapped)
    _check_sizes(config)
    try:
        cls = reference_class(
            config.architecture, config.hf, trust_remote_code, str(config.path and config.path.parent)
        )
        case = _Case(config, weights, names, cls, *_observe(cls, config.hf))
    except UnsupportedModelError as error:
        return _refused(names, Refusal(config.architecture, str(error), "a reference that can be observed"))
    except _UnobservableError as error:
        return _refused(names, *(Refusal(each.block, each.reason, each.needs) for each in error.blocks))
    if plugins is not None:
        relative = _attempted(case, lambda: _as_relative(case, plugins))
        if relative is not None and relative.verdict != "refused":
            return relative
    composed = _attempted(case, lambda: _as_file(case))
    if composed.verdict != "refused":
        return composed
    # What components seemed to compute and do not, the reference's own blocks may.
    bridged = _attempted(case, lambda: _as_file(dataclasses.replace(case, bridging=True)))
    return composed if bridged.verdict == "refused" else bridged


@dataclass(frozen=True)
class _Case:
    """A config, and the small reference that was observed."""

    config: ModelConfig
    weights: Path | None
    names: PluginNames
    cls: Any
    reference: Reference
    recording: Recording
    bridging: bool = False
    """Whether blocks that are neither norms nor feed-forward are transformers' own."""

    @property
    def modeling(self) -> str:
        return f"{self.cls.__module__.rpartition('.')[2]}.py"


def _as_relative(case: _Case, plugins: Plugins) -> Assessment | None:
    """An installed model that has the same tensors, with few differences; None where there is none."""
    found = find_relative(case.reference, case.names, plugins, case.config)
    if found is None:
        return None
    relative, text = found
    recognised = tuple(relative.describe())
    requires = (relative.requirement,)
    files = plugin_files(case.names, text, case.config.raw, case.modeling, recognised, requires=requires)
    return _proven(case, files, recognised, "relative")


def _as_file(case: _Case) -> Assessment:
    """A model file of components, and of bridged blocks where nothing else is left."""
    decoder = _recognise(case)
    recognised = tuple(describe(decoder))
    files = scaffold(case.names, decoder, case.config.hf, case.config.raw, case.modeling, recognised)
    return _proven(case, files, recognised, "bridged" if decoder.targets else "composed")


SURPRISES = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    PluginError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What an attempt may stumble over in a reference that nobody here has seen; errors of bad input pass."""

Found = TypeVar("Found", bound=Assessment | None)


def _attempted(case: _Case, attempt: Callable[[], Found]) -> Found | Assessment:
    """What the attempt found, or the refusal that it ran into."""
    try:
        return attempt()
    except UnsupportedModelError as error:
        refusal = Refusal(case.config.architecture, str(error), "a reference that can be observed")
    except UnrecognisedError as error:
        refusal = Refusal(error.block, error.reason, error.needs)
    except SURPRISES as error:
        reason = f"it does something that recognition has not met ({type(error).__name__}: {error})."
        refusal = Refusal(case.config.architecture, reason, "a plugin by hand")
    return _refused(case.names, refusal)


def _resized(cls: Any, config: Any) -> Any:
    """A copy of other sizes; None where the config cannot be cut to them."""
    try:
        return resized_reference(cls, config)
    except Exception:  # code of a reference that nobody here has seen
        return None


def _wrapper(config: ModelConfig) -> Refusal | None:
    """A model around a text model: images, sound, an encoder."""
    parts = [key for key, value in config.raw.items() if key.endswith("_config") and isinstance(value, Mapping)]
    parts = [key for key in parts if _is_model(getattr(config.hf, key, None), config.raw[key])]
    if config.raw.get("is_encoder_decoder") and not _decodes_alone(config.architecture):
        parts.append("is_encoder_decoder")
    if not parts:
        return None
    return Refusal(
        config.architecture,
        f"it is more than one decoder ({', '.join(parts)}).",
        "a plugin by hand for what stands around the text model; rtp enable takes the text model's own config",
    )


def _estimates(config: ModelConfig, found: Assessment, trust_remote_code: bool) -> Estimates | None:
    """None where the reference cannot even be laid out."""
    import tempfile

    try:
        folder = str(config.path and config.path.parent)
        model = meta_model(reference_class(config.architecture, config.hf, trust_remote_code, folder), config.hf)
    except Exception:  # code of a reference that nobody here has seen
        return None
    if found.names is None or not found.files:
        return estimate(model, config.hf)
    with (
        tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary,
        importable(found.names, found.files, Path(temporary)) as plugins,
    ):
        return estimate(model, config.hf, find_served(config, plugins).states)


SIZES = ("num_hidden_layers", "hidden_size", "depth")


def _is_model(part: Any, raw: Mapping[str, Any]) -> bool:
    """Whether a config inside the config describes a model of its own rather than options of one."""
    return any(getattr(part, key, None) or raw.get(key) for key in SIZES) or bool(raw.get("model_type"))


def _decodes_alone(architecture: str) -> bool:
    """Whether transformers has a decoder of this name, which may share its config with a model that has an encoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _check_sizes(config: ModelConfig) -> None:
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        value = getattr(config.hf, key, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{config.path or 'the config'}: {key} is {value!r}; it must be a positive integer.")


def _observe(cls: Any, config: Any) -> tuple[Reference, Recording]:
    """The small reference and one run of it. Raises _UnobservableError when that fails."""
    try:
        reference = small_reference(cls, config)
        return reference, record(reference.model, reference.config.vocab_size)
    except Exception as error:  # code of a reference that nobody here has seen, at sizes that it has not seen
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        try:
            whole = meta_model(cls, config)
        except Exception:
            unknown = UnrecognisedError(cls.__name__, f"it could not be built ({cause}).", "a plugin by hand")
            raise _UnobservableError([unknown]) from error
        raise _UnobservableError(unusual_blocks(whole, config, cause)) from error


class _UnobservableError(Exception):
    def __init__(self, blocks: list[UnrecognisedError]) -> None:
        super().__init__("; ".join(map(str, blocks)))
        self.blocks = blocks


def _recognise(case: _Case) -> Decoder:
    from rtp_runtime.enable.recognise import recognise_decoder
    from rtp_runtime.enable.recognise.rotary import check_tables
    from rtp_runtime.enable.recognise.view import View

    view = View(case.reference, case.recording, bridging=case.bridging)
    decoder = recognise_decoder(view)
    if decoder.rope is None or decoder.rope.target is None:
        check_tables(view, case.config)
    return dataclasses.replace(decoder, pinned=find_pins(case.reference, case.config.hf))


def _proven(case: _Case, files: Mapping[str, str], recognised: tuple[str, ...], verdict: Verdict) -> Assessment:
    config, names = case.config, case.names
    made = Assessment(verdict, config.architecture, recognised=recognised, names=names, files=files)
    if case.weights is not None:
        try:
            made = dataclasses.replace(made, audited=_audit(config, case.weights, names, files))
        except CheckpointError as error:
            refusal = Refusal("tensors of the checkpoint", str(error), "weight descriptors for these tensors")
            return _refused(names, refusal, recognised=recognised)
    try:
        proof = prove(case.reference, _resized(case.cls, config.hf), names, files)
    except (CheckpointError, UnsupportedModelError) as error:
        reason = f"the plugin does not take a copy of the reference: {error}"
        return _refused(names, Refusal(config.architecture, reason, "descriptors by hand"), recognised=recognised)
    if not proof.holds:
        refusal = Refusal(
            config.architecture,
            "every block was recognised, but the whole differs: logits by "
            f"{proof.error:.1e} of their spread (tolerance {proof.tolerance:.0e}; {proof.worst}).",
            "a step that no block shows; compare the reference by hand",
        )
        return _refused(names, refusal, recognised=recognised)
    return dataclasses.replace(made, proof=proof)


def _audit(config: ModelConfig, weights: Path, names: PluginNames, files: Mapping[str, str]) -> int:
    """Hold the checkpoint's headers against the scaffold's descriptors.

    Returns the number of tensors. Raises CheckpointError.
    """
    import tempfile

    from rtp_runtime.model.dtypes import choose_dtype
    from rtp_runtime.weights.audit import choose_layout
    from rtp_runtime.weights.headers import read_headers

    headers = read_headers(weights)
    with (
        tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary,
        importable(names, files, Path(temporary)) as plugins,
    ):
        served = find_served(config, plugins)
        dtype = choose_dtype("auto", config, headers, "cpu")
        choose_layout(served.weights, headers, dtype, config.tie_flags())
    return len(headers.tensors)


def _refused(names: PluginNames, *refusals: Refusal, recognised: tuple[str, ...] = ()) -> Assessment:
    return Assessment("refused", names.architecture, recognised=recognised, refusals=refusals, names=names)
