"""Takes a step's results into the requests: tokens, text, log probabilities, and whether that ends them."""

from __future__ import annotations

from rtp_runtime.engine.outputs import Logprob, RequestOutput, StepOutput, TokenLogprobs
from rtp_runtime.engine.request import Request
from rtp_runtime.engine.runner import ChunkResult
from rtp_runtime.engine.sampler import RowLogprobs


def take_result(request: Request, result: ChunkResult) -> StepOutput | None:
    """Record what a step computed for a request that is not finished; the news, if it sampled tokens."""
    _keep_logits(request, result)
    _keep_prompt_logprobs(request, result)
    news: StepOutput | None = None
    for place, token_id in enumerate(result.token_ids):
        news = _take_token(request, token_id, result, place).after(news)
        # Drafts beyond a stop are thrown away with it.
        if request.reason is not None:
            break
    return news


def snapshot(request: Request, news: StepOutput | None = None) -> RequestOutput:
    """The request so far."""
    text = request.text
    params = request.params
    logits = None
    if request.return_logits and request.logits:
        import torch

        logits = torch.cat(request.logits)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids.tolist(),
        token_ids=list(request.ids),
        text=None if text is None else text.text,
        finish_reason=request.reason,
        stop_reason=request.stop_reason,
        logprobs=list(request.logprobs) if params.logprobs is not None else None,
        prompt_logprobs=list(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
        logits=logits,
        new_token_ids=[] if news is None else news.token_ids,
        new_text=None if text is None else "" if news is None else news.text,
        num_cached_tokens=request.num_cached_tokens,
    )


def _take_token(request: Request, token_id: int, result: ChunkResult, place: int) -> StepOutput:
    params = request.params
    request.ids.append(token_id)
    news = StepOutput(request_id=request.request_id, token_ids=[token_id], text=None)
    if params.logprobs is not None:
        chosen, rank, values, ids = result.logprobs[place]
        entry = _logprobs(token_id, chosen, rank, values[: params.logprobs], ids[: params.logprobs])
        request.logprobs.append(entry)
        news.logprobs = [entry]
    may_stop = len(request.ids) > params.min_tokens
    if may_stop and token_id in request.stop_ids:
        request.reason = "stop"
        request.stop_reason = token_id if token_id in params.stop_token_ids else None
    elif len(request.ids) >= request.limit:
        request.reason = "length"
    if request.text is not None:
        news.text = _take_text(request, token_id, may_stop)
    news.finish_reason, news.stop_reason = request.reason, request.stop_reason
    return news


def _take_text(request: Request, token_id: int, may_stop: bool) -> str:
    """Text that the token made certain; ends the request where it completes a stop string."""
    assert request.text is not None
    piece, stop = "", None
    # The text of an id that stops is no part of the answer.
    if request.reason != "stop" or request.params.include_stop_str_in_output:
        piece, stop = request.text.add(token_id, may_stop=may_stop)
    if stop is None and request.reason is not None:
        rest, stop = request.text.finish()
        piece += rest
    if stop is not None:
        request.reason, request.stop_reason = "stop", stop
    return piece


def _keep_logits(request: Request, result: ChunkResult) -> None:
    """Logits of positions that an earlier life of the request has not given already."""
    if result.logits is None:
        return
    known = sum(len(each) for each in request.logits)
    fresh = result.logits[max(known - result.chunk.start, 0) :]
    if len(fresh):
        request.logits.append(fresh.cpu())


def _keep_prompt_logprobs(request: Request, result: ChunkResult) -> None:
    rows: RowLogprobs | None = result.prompt_logprobs
    if rows is None:
        return
    columns = zip(rows.chosen.tolist(), rows.ranks.tolist(), rows.values.tolist(), rows.ids.tolist(), strict=True)
    for offset, (chosen, rank, values, ids) in enumerate(columns):
        place = result.chunk.start + offset + 1
        if place == len(request.prompt_logprobs):
            entry = _logprobs(int(request.prompt_ids[place]), chosen, rank, values, ids)
            request.prompt_logprobs.append(entry)


def _logprobs(token_id: int, chosen: float, rank: int, values: list[float], ids: list[int]) -> TokenLogprobs:
    entry = {token_id: Logprob(chosen, rank)}
    for place, (value, other) in enumerate(zip(values, ids, strict=True)):
        entry.setdefault(other, Logprob(value, place + 1))
    return entry
