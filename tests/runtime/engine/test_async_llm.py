"""Streams over asyncio: together, cancelled, failing, closed; nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from rtp_runtime import AsyncLLM, SamplingParams
from rtp_runtime.engine import EngineConfig, RequestOutput
from rtp_runtime.errors import RequestError, UsageError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def llm(loaded: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_loaded(loaded, EngineConfig(num_blocks=64, block_size=4))
    yield llm
    llm.close()


async def last(llm: AsyncLLM, prompt: Any, **params: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, SamplingParams(**params))]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    new = [token for output in outputs for token in output.new_token_ids]
    assert new == outputs[-1].token_ids
    return outputs[-1]


async def quiet(llm: AsyncLLM) -> None:
    """Wait until the engine has nothing left."""
    while llm._worker._engine.has_work or llm._worker._open:
        await asyncio.sleep(0.005)


async def test_many_streams(llm: AsyncLLM, fake: Any) -> None:
    prompts = [[seed, *PROMPT] for seed in range(10)]
    outputs = await asyncio.gather(*(last(llm, prompt, max_tokens=12) for prompt in prompts))
    assert [output.token_ids for output in outputs] == [fake.greedy(prompt, 12) for prompt in prompts]


async def test_refused(llm: AsyncLLM) -> None:
    for prompt in ([], [99], "text", [1] * 100, None):
        with pytest.raises(RequestError):
            await last(llm, prompt)
    assert (await last(llm, PROMPT)).finished


async def test_closing_a_stream_cancels(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=50))
    await anext(stream)
    await stream.aclose()
    await quiet(llm)
    assert not llm._worker._engine._state._requests


async def test_cancelling_a_task_cancels(llm: AsyncLLM, fake: Any) -> None:
    tasks = [asyncio.create_task(last(llm, PROMPT, max_tokens=50)) for _ in range(3)]
    await asyncio.sleep(0.02)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[0].token_ids == results[2].token_ids == fake.greedy(PROMPT, 50)
    await quiet(llm)


async def test_a_failing_step_reaches_every_stream(llm: AsyncLLM, fake: Any) -> None:
    fake.fail_at = 5
    tasks = [last(llm, PROMPT, max_tokens=50) for _ in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, RuntimeError) for result in results)
    assert (await last(llm, PROMPT, max_tokens=3)).token_ids == fake.greedy(PROMPT, 3)


async def test_close_ends_open_streams(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=58))
    await anext(stream)
    thread = llm._worker._thread
    await asyncio.to_thread(llm.close)
    assert not thread.is_alive()
    with pytest.raises(UsageError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(UsageError, match="closed"):
        await last(llm, PROMPT)


async def test_context_manager_and_several_loops(loaded: Any, fake: Any) -> None:
    async with AsyncLLM.from_loaded(loaded, EngineConfig(num_blocks=64, block_size=4, depth=1)) as llm:
        here = await last(llm, PROMPT, max_tokens=8)
        there = await asyncio.to_thread(lambda: asyncio.run(last(llm, PROMPT, max_tokens=8)))
        assert here.token_ids == there.token_ids == fake.greedy(PROMPT, 8)


async def test_dropping_ends_the_thread(loaded: Any) -> None:
    llm = AsyncLLM.from_loaded(loaded, EngineConfig(num_blocks=64, block_size=4))
    await last(llm, PROMPT, max_tokens=3)
    engine = weakref.ref(llm._worker._engine)
    names = {thread.name for thread in threading.enumerate()}
    assert "rtp-engine" in names
    del llm
    gc.collect()
    assert engine() is None
    assert "rtp-engine" not in {thread.name for thread in threading.enumerate()}
