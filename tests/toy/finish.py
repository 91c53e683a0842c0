"""Runs an engine to its end, with everything that nobody owns poisoned and requests preempted on the way."""

from __future__ import annotations

from collections.abc import Sequence

from rtp_runtime import RequestOutput
from rtp_runtime.engine.engine import Engine

MOST_STEPS = 5000


def finish(engine: Engine, ids: Sequence[str], preempt_every: int = 0) -> list[RequestOutput]:
    """Outputs of `ids`; every `preempt_every`th step one of them in turn is preempted (0: none)."""
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        if not engine._tickets:
            engine._state.poison()
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            engine.preempt(ids[(steps // preempt_every - 1) % len(ids)])
        for news in engine.step():
            if news.finish_reason is not None:
                outputs[news.request_id] = engine.output(news.request_id)
        assert steps <= MOST_STEPS, "the engine makes no progress"
    assert not engine._state._requests
    return [outputs[each] for each in ids]
