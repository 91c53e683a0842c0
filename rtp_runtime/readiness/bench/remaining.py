"""How long a bench will still take, from what it took so far."""

from __future__ import annotations

from rtp_runtime.readiness.bench.options import BenchOptions


class Remaining:
    """Counts runs that are still to come; a point not yet run is taken to cost as much per token as those before it."""

    def __init__(self, options: BenchOptions) -> None:
        self._new_tokens = options.new_tokens
        self._left = dict.fromkeys(options.points, options.warmup + options.repeats)
        self._seconds: dict[tuple[int, int], float] = {}
        """The latest run of each point."""

    def done(self, batch: int, prompt: int, seconds: float) -> None:
        """A run has ended."""
        self._left[batch, prompt] -= 1
        self._seconds[batch, prompt] = seconds

    def skip(self, batch: int, prompt: int) -> None:
        """A point will not be run any further."""
        self._left[batch, prompt] = 0

    def seconds(self) -> float | None:
        """None before the first run has ended."""
        tokens = sum(self._tokens(point) for point in self._seconds)
        if not tokens:
            return None
        rate = sum(self._seconds.values()) / tokens
        return sum(left * self._seconds.get(point, rate * self._tokens(point)) for point, left in self._left.items())

    def words(self) -> str:
        """ ", 1:05 left", or nothing while that is not known."""
        seconds = self.seconds()
        return "" if seconds is None else f", {int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _tokens(self, point: tuple[int, int]) -> int:
        batch, prompt = point
        return batch * (prompt + self._new_tokens)
