"""Ratios by quantity, pooled over prompts, and what they say: as `probe_table`, with R where that has an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rtp_runtime.check.names import layer_of, relative_name
from rtp_runtime.check.pairs import Pair, Pairing
from rtp_runtime.check.probe_table import OUTPUT, WHAT, Probe, ProbeKey, ProbeTable
from rtp_runtime.check.report import DRIFT, WRONG, Finding, Measure
from rtp_runtime.check.selections import Choices
from rtp_runtime.check.serving.ratio import LEAST, Ratio

TOO_MUCH = 1.25
"""R from which rounding is worse than the reference's. Its own other paths stay below."""
FAR_TOO_MUCH = 4.0
"""R from which it is no rounding."""
POOLED = "all prompts"


class RatioProbe(Probe):
    """One quantity over all prompts."""

    def __init__(self, unit: float, least: float) -> None:
        super().__init__()
        self.ratio = self.output = Ratio(unit, least)  # type: ignore[assignment]
        self.given = self.inputs = Ratio(unit)  # type: ignore[assignment]
        self.gaps: list[Tensor] = []
        """[flips, 2]: scores between which the experts lie that one side chose alone."""

    @property
    def error(self) -> float:
        return self.ratio.value

    @property
    def compared(self) -> bool:
        return self.ratio.num_tokens > 0 or self.ratio.broken

    def add(self, pairing: Pairing, index: Tensor, keep: Tensor) -> Tensor:
        """Add one call's outputs, of the rows `keep` [rows] bool. Returns the rows for which we chose other experts."""
        flips = keep & False
        for pair in pairing.pairs:
            if pair.changed is not None:
                flips |= pair.changed
                self.num_changed += int(pair.changed.sum())
                if pair.gaps is not None:
                    self.gaps.append(pair.gaps[pair.changed])
            _add(self.ratio, pair, index, keep & ~flips)
        return flips

    def add_inputs(self, pairing: Pairing, index: Tensor, keep: Tensor) -> None:
        """Add one call's inputs."""
        for pair in pairing.pairs:
            _add(self.given, pair, index, keep if pair.changed is None else keep & ~pair.changed)

    def add_choices(self, choices: Choices, index: Tensor, changed: Tensor, ties: Tensor) -> None:
        """Count selections that differ: which of two close scores is larger, rounding decides."""
        self.num_changed += int(changed.sum())


def _add(ratio: Ratio, pair: Pair, index: Tensor, rows: Tensor) -> None:
    if pair.narrow is not None:
        ratio.add(pair.ours[rows], pair.narrow[rows], pair.reference[rows], index[rows])


class RatioTable(ProbeTable):
    """Ratios by probe. `unit`: what one rounding to the serving dtype adds, relatively."""

    def __init__(
        self, layers: Mapping[str, int], order: Sequence[str], consumers: Mapping[str, int], unit: float
    ) -> None:
        super().__init__(layers, order, consumers)
        self._unit = unit

    def probe(self, key: ProbeKey, prompt: str) -> RatioProbe:
        """The one of this quantity, whatever the prompt."""
        # A table in the serving dtype, where the reference's is float32, tells by what it does in the layers.
        least = self._unit if layer_of(key.module, self.layers) is None else LEAST
        probes = self._probes.setdefault(key, {})
        if POOLED not in probes:
            probes[POOLED] = RatioProbe(self._unit, least)
        return probes[POOLED]  # type: ignore[return-value]

    def ratio(self, key: ProbeKey) -> Ratio:
        """R of one quantity."""
        return self.probe(key, POOLED).ratio

    def probes(self) -> list[tuple[ProbeKey, RatioProbe]]:
        """All that was probed, whether or not there was anything to compare."""
        return [(key, self.probe(key, POOLED)) for key in self._probes]

    def _measure(self, key: ProbeKey, allowed: float) -> Measure:
        probe = self.probe(key, POOLED)
        column = "layer" if key.module in self.layers else relative_name(key.module, self.layers)
        return Measure(
            name=key.module,
            layer=layer_of(key.module, self.layers),
            column=f"{column} R" if key.what == OUTPUT else f"{column} {key.what} R",
            error=probe.ratio.measured,
            tolerance=allowed * probe.ratio.allowance,
            inputs_agree=probe.given.value <= allowed,
            worst_token=probe.ratio.worst_token,
        )

    def _finding(
        self, key: ProbeKey, wrong: Sequence[tuple[bool, str, Probe]], allowed: float, stage: str, where: str
    ) -> Finding:
        cause, ratio = wrong[0][0], self.ratio(key)
        far = FAR_TOO_MUCH / TOO_MUCH * allowed
        return Finding(
            stage=stage,
            module=self._culprit(key),
            layer=self.layer(key.module),
            error=ratio.measured,
            tolerance=allowed * ratio.allowance,
            what=f"{WHAT[key.what]}: rounding, in units of the reference's",
            detail=f"the reference loses {ratio.own_noise:.1e} there, over {ratio.num_tokens} tokens",
            cause=cause,
            rank=self.rank(key),
            verdict=WRONG if ratio.of_serving > far else DRIFT,
        )
