"""What no prompt reached: positions past the length that a rope was stretched from, windows, experts."""

from __future__ import annotations

from collections.abc import Iterator

from rtp_runtime.check.curves import original_length
from rtp_runtime.check.report import NotJudged
from rtp_runtime.check.session import Session


def unreached(session: Session) -> Iterator[NotJudged]:
    """What the numbers say nothing of, since no token came there. A check may pass without."""
    longest = max((len(case.sequence) for case in session.cases), default=0)
    original = original_length(session.reference.config)
    if original is not None and longest <= original:
        why = f"the longest prompt has {longest} tokens; --prompt with a longer text reaches them"
        yield NotJudged(f"positions past {original}, from which the rotary embedding is stretched", why)
    for window in sorted({kind.window for kind in session.kinds if kind.window is not None}):
        if longest <= 2 * window:
            yield NotJudged(f"window {window}", f"it was not crossed twice: the longest prompt has {longest} tokens")
    left = {name: total - len(session.experts[name]) for name, total in session.num_experts.items()}
    routers = [name for name, number in left.items() if number]
    if routers:
        more = f" and {len(routers) - 1} other routers" if len(routers) > 1 else ""
        yield NotJudged("some experts", f"no token was routed to {left[routers[0]]} of {routers[0]}{more}")
