"""Writing evidence and reading the ladder from it: what commands, and whatever else judges a model, call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.env import read_environment
from rtp_runtime.errors import RtpError, UsageError
from rtp_runtime.readiness.checkpoint import Progress
from rtp_runtime.readiness.ladder import SOUND, Available, Ladder, climb
from rtp_runtime.readiness.record import FAIL, KINDS, PARTIAL, PASS, RESULTS, Conditions, Record, utc_now
from rtp_runtime.readiness.staleness import concerns, staleness
from rtp_runtime.readiness.store import Evidence, EvidenceStore
from rtp_runtime.readiness.subject import Subject, gather_subject
from rtp_runtime.readiness.targets import Targets, read_targets

if TYPE_CHECKING:
    from rtp_runtime.check import CheckOptions, CheckReport
    from rtp_runtime.plugins import Plugins
    from rtp_runtime.readiness.bench.run import BenchReport

EVIDENCE, TARGETS = Path(".rtp/evidence"), Path(".rtp/targets.toml")
"""Where both are looked for, from the working directory: evidence belongs to the project that vouches for a model, not
to the checkpoint, which often lies in a cache or where nobody may write."""


def evidence_directory(given: str | Path | None = None) -> Path:
    """The directory that was given, or that RTP_EVIDENCE names, or the default.

    Raises:
        UsageError: something that is there and is no directory.
    """
    chosen = given or read_environment().evidence or EVIDENCE
    directory = Path(chosen).expanduser()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is no directory: evidence is kept in a directory of its own")
    return directory


def record(
    kind: str,
    model: str | Path,
    *,
    result: str,
    summary: str,
    numbers: Mapping[str, Any] | None = None,
    evidence: str | Path | None = None,
    device: str = "cpu",
    dtype: str,
    seed: int = 0,
    layout: str = "1",
    settings: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
) -> Path:
    """Write a record about a model as it stands here now; the file.

    Args:
        kind: "check", "bench", "serve-conformance", "canary" or "production".
        result: "pass", "fail", or "partial" (not everything that the kind asks for was judged).
        summary: one sentence for people.
        numbers: whatever was measured, as JSON.
        evidence: the directory; None: RTP_EVIDENCE, or `.rtp/evidence`.
        layout: how the model was spread over devices, "1" for one.
        settings: what else was asked for and could change the result, as JSON.
        plugins: plugin modules besides those that are installed.

    Raises:
        UsageError: an unknown kind or result, or a directory that cannot be written.
        ModelError: a checkpoint that cannot be read.
    """
    from rtp_runtime.plugins import load_plugins

    for what, value, known in (("kind", kind, KINDS), ("result", result, RESULTS)):
        if value not in known:
            raise UsageError(f"{what}={value!r} is unknown: give one of {', '.join(known)}")
    store = EvidenceStore(evidence_directory(evidence))
    subject = gather_subject(str(model), load_plugins(plugins), store.cache)
    conditions = subject.conditions(device=device, dtype=dtype, seed=seed, layout=layout, settings=settings)
    return store.add(make_record(kind, result, summary, conditions, numbers or {}), subject.contents)


def make_record(kind: str, result: str, summary: str, conditions: Conditions, numbers: Mapping[str, Any]) -> Record:
    """A record of now."""
    return Record(
        kind=kind, result=result, summary=summary, date=utc_now(), conditions=conditions, numbers=dict(numbers)
    )


@dataclass(frozen=True, slots=True)
class Recorder:
    """Takes the conditions before a run, and writes its record after it, if nothing was changed in between."""

    model: str
    plugins: Plugins
    store: EvidenceStore
    before: Subject

    @classmethod
    def open(
        cls,
        model: str | Path,
        plugins: Plugins,
        *,
        evidence: str | Path | None = None,
        wanted: bool | None = None,
        progress: Progress | None = None,
    ) -> Recorder | None:
        """A recorder, or None where nothing is to be recorded.

        `wanted` None: record where a directory was given, or RTP_EVIDENCE names one, or the default one exists.
        """
        directory = evidence_directory(evidence)
        asked = bool(evidence or read_environment().evidence or directory.is_dir())
        if not (asked if wanted is None else wanted):
            return None
        store = EvidenceStore(directory)
        return cls(str(model), plugins, store, gather_subject(str(model), plugins, store.cache, progress))

    def keep(self, kind: str, result: str, summary: str, numbers: Mapping[str, Any], **conditions: Any) -> Path:
        """Write the record; `conditions` as `Subject.conditions` takes them.

        Raises:
            UsageError: code or checkpoint changed while the run went on, so that nobody can say what was judged.
        """
        after = gather_subject(self.model, self.plugins, self.store.cache)
        made = make_record(kind, result, summary, self.before.conditions(**conditions), numbers)
        changes = staleness(made, after, self._manifest).reasons
        if changes:
            raise UsageError(f"not recorded, since this changed while it ran: {'; '.join(changes)}. Run it again.")
        return self.store.add(made, self.before.contents)

    def _manifest(self, digest: str) -> Mapping[str, str] | None:
        return next((content.files for content in self.before.contents if content.digest == digest), None)


def keep_check(recorder: Recorder, report: CheckReport, options: CheckOptions) -> Path:
    """Write the record of a check."""
    return recorder.keep("check", *judge_check(report, options), **conditions_of_check(report, options))


def conditions_of_check(report: CheckReport, options: CheckOptions) -> dict[str, Any]:
    """The conditions of a check, as `Subject.conditions` takes them."""
    return {
        "device": "cpu",
        "dtype": str(report.conditions.get("dtype", "float32")),
        "seed": options.seed,
        "settings": check_settings(options) | _kept(report),
    }


def _kept(report: CheckReport) -> dict[str, Any]:
    """Layers and experts that were kept of a model, also where the check chose them because the memory was short."""
    cut = report.conditions.get("cut") or {}
    return {name: str(cut[name]["kept"]) for name in ("layers", "experts") if name in cut}


def keep_bench(recorder: Recorder, report: BenchReport) -> Path:
    """Write the record of a bench."""
    return recorder.keep("bench", report.result, report.summary, report.numbers(), **conditions_of_bench(report))


def conditions_of_bench(report: BenchReport) -> dict[str, Any]:
    """The conditions of a bench, as `Subject.conditions` takes them."""
    options = report.options
    return {
        "device": options.device,
        "dtype": report.dtype,
        "seed": options.seed,
        "settings": options.settings() | {"threads": report.threads},
    }


def check_settings(options: CheckOptions) -> dict[str, Any]:
    """What was asked of a check, as JSON: all that is not told elsewhere in the conditions."""
    told = {"model", "plugins", "seed", "explain", "reference"}
    settings = {
        each.name: _plain(getattr(options, each.name)) for each in dataclasses.fields(options) if each.name not in told
    }
    same = options.reference is None or options.reference.resolve() == options.model.resolve()
    return settings | {"reference": None if same else str(options.reference)}


def judge_check(report: CheckReport, options: CheckOptions) -> tuple[str, str, dict[str, Any]]:
    """(result, summary, numbers) of a check's report."""
    from rtp_runtime.check.options import REQUIRED

    values = report.to_json()
    first = values["first_wrong"]
    numbers = {
        "verdict": values["verdict"],
        "exit": values["exit"],
        "required": list(REQUIRED),
        "stages": {
            stage["name"]: {
                "status": stage["status"],
                "measures": len(stage["measures"]),
                "not_judged": sorted(item["what"] for item in stage["not_judged"]),
            }
            for stage in values["stages"]
        },
        "first_wrong": None
        if first is None
        else {key: first[key] for key in ("module", "layer", "error", "tolerance")},
        "judged_by": values["judged_by"],
        "seconds": values["seconds"],
    }
    part = options.random or options.layers or options.experts or report.conditions.get("cut")
    whole = not (part or check_settings(options)["reference"])
    result = {0: PASS if whole else PARTIAL, 1: FAIL}.get(values["exit"], PARTIAL)
    return result, _check_summary(values), numbers


def assess(
    model: str | Path,
    *,
    evidence: str | Path | None = None,
    targets: str | Path | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
) -> Ladder:
    """The ladder of a model: a checkpoint directory or hub id.

    Raises:
        UsageError: a targets file that is not one, or an evidence directory that is no directory.
        ModelError: no readable config.
    """
    from rtp_runtime.plugins import load_plugins

    plugins = load_plugins() if plugins is None else plugins
    store = EvidenceStore(evidence_directory(evidence))
    found = store.read()
    # Nothing to compare with: then the weights need not be read.
    cache = store.cache if found.records else None
    subject = gather_subject(str(model), plugins, cache, progress, weights=bool(found.records))
    mine = Evidence(tuple(each for each in found.records if concerns(each.record, subject)), found.problems)
    return climb(
        available(subject, plugins, str(model)),
        mine,
        lambda each: staleness(each, subject, store.manifest),
        _targets(targets),
        str(model),
    )


def available(subject: Subject, plugins: Plugins, model: str) -> Available:
    """Whether a plugin serves the model and its weights are all there, found from config and headers now."""
    from rtp_runtime.model.assessment import find_served
    from rtp_runtime.model.config import load_config
    from rtp_runtime.model.dtypes import choose_dtype
    from rtp_runtime.weights.audit import choose_layout
    from rtp_runtime.weights.headers import read_headers

    try:
        config = load_config(subject.directory)
        served = find_served(config, plugins)
        headers = read_headers(subject.directory)
        headers.require_data()
        audit = choose_layout(served.weights, headers, choose_dtype("auto", config, headers, "cpu"), config.tie_flags())
    except RtpError as error:
        unserved = not subject.plugins
        return Available(False, str(error).splitlines()[0], f"rtp {'enable' if unserved else 'inspect'} {model}")
    origin = served.definition.target.origin
    return Available(
        True, f"served by {origin}; the audit of {len(headers.tensors)} tensors is clean ({audit.layout.name})"
    )


def _targets(given: str | Path | None) -> Targets | None:
    if given is not None:
        return read_targets(Path(given))
    return read_targets(TARGETS) if TARGETS.is_file() else None


def _check_summary(values: Mapping[str, Any]) -> str:
    verdict, first = values["verdict"], values["first_wrong"]
    if first is not None:
        where = f" of layer {first['layer']}" if first["layer"] is not None else ""
        numbers = f"{first['error']:.1e}, allowed {first['tolerance']:.1e}"
        return f"{verdict}: {first['module']}{where} ({first['stage']}), {numbers}"
    missing = [item["what"] for item in values["not_judged"] if item["required"]]
    if missing:
        return f"{verdict}: not judged: {', '.join(dict.fromkeys(missing))}"
    judged = [stage["name"] for stage in values["stages"] if stage["status"] in SOUND]
    return f"{verdict}: {', '.join(judged)}"


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return [_plain(each) for each in value] if isinstance(value, Iterable) else str(value)
