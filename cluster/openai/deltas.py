"""Runs a request's answers in the engine: submits them, and yields what its steps add to their texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from cluster.engine.engine_client import EngineClient
from cluster.errors import BadRequest
from cluster.observe.answer_record import AnswerRecord
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.resumption import Place, Replay
from workers.comm.ipc import TokenChunk


class GenerationFailed(RuntimeError):
    """The engine failed on one request; the message says why."""


class Sink(Protocol):
    """Takes the deltas of a stream without waiting, while it is open."""

    @property
    def is_open(self) -> bool:
        """Return whether it takes more now."""

    def write(self, deltas: Sequence[tuple[int, TextDelta]]) -> None:
        """Take deltas of several answers, at most one of each."""


async def deltas_of(
    engine: EngineClient,
    generations: Sequence[Generation],
    records: Sequence[AnswerRecord],
    places: Sequence[Place | None] = (),
    interval: int = 1,
    pause_s: Callable[[], float] = lambda: 0.0,
    sink: Sink | None = None,
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Run the answers to one request. Yield (answer, delta); the last delta of each answer has a finish_reason.

    A delta is what one engine step added. Steps that have come while the reader was busy are one delta, so that a slow
    one costs little. records: by answer. places: how far the client has each answer (None = not at all); empty = it has
    none of them. A step that ends after such a place gives two deltas. interval: fewest tokens of a delta, apart from
    an answer's first and its last one. pause_s: how long to wait after a delta for the steps that the next one joins.
    sink: gets, instead of the caller, what comes while the caller waits, unless an answer may end with it.
    Closing the generator early aborts what is not finished.

    Raises GenerationFailed, EngineDead, BadRequest, and HttpError (409) if an answer is not the one that it continues.
    """
    answers = {generation.submit.id: index for index, generation in enumerate(generations)}
    replays = {index: Replay(place) for index, place in enumerate(places) if place is not None}
    waiting: dict[int, TextDelta] = {}  # by answer

    def direct(chunks: list[TokenChunk]) -> bool:
        assert sink is not None
        if not sink.is_open or any(chunk.finish_reason or chunk.prompt_logprobs is not None for chunk in chunks):
            return False
        deltas: dict[int, TextDelta] = {}
        for chunk in chunks:
            index = answers[chunk.id]
            record = records[index]
            record.arrived(chunk)
            delta = generations[index].process(chunk)
            record.returned(len(delta.token_ids), delta.num_accepted, None, is_copied=delta.is_copied)
            if (before := deltas.setdefault(index, delta)) is not delta:
                before.join(delta)
        sink.write(list(deltas.items()))
        return True

    is_direct = sink is not None and interval == 1 and not replays
    if any(generation.stop or generation.submit.has_trees for generation in generations):
        is_direct = False  # a step may end an answer, or steps are not to be joined
    submits = [generation.submit for generation in generations]
    failure: Exception | None = None
    reason = "abort"  # cancelled or closed early
    for generation, record in zip(generations, records, strict=True):
        record.submitted(pays_for_prompt=generation.number == 0)
    try:
        async with aclosing(engine.arrivals(*submits, direct=direct if is_direct else None)) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    index = answers[chunk.id]
                    generation, record, replay = generations[index], records[index], replays.get(index)
                    if generation.last.finish_reason is not None:
                        continue  # a stop string has ended it, which the engine did not know
                    if chunk.finish_reason == "error":
                        if chunk.error_code is None:
                            failure = GenerationFailed(chunk.error or "the engine failed on this request")
                        else:
                            failure = BadRequest(chunk.error or "the request failed", param=None, code=chunk.error_code)
                        break
                    if chunk.prompt_logprobs is not None:
                        generation.prompt_scores += chunk.prompt_logprobs
                        continue
                    record.arrived(chunk)
                    for delta in [generation.process(chunk)] if replay is None else replay.deltas(chunk, generation):
                        record.returned(
                            len(delta.token_ids), delta.num_accepted, delta.finish_reason, is_copied=delta.is_copied
                        )
                        if (before := waiting.get(index)) is None:
                            waiting[index] = delta
                        elif before.joins(delta):
                            before.join(delta)
                        else:
                            yield index, before
                            waiting[index] = delta
                        if delta.finish_reason is not None:
                            engine.abort(chunk.id)
                            break
                for index, delta in list(waiting.items()):
                    if delta.finish_reason or delta.is_first or len(delta.token_ids) >= interval or failure:
                        yield index, waiting.pop(index)
                if failure is not None:
                    raise failure
                if (seconds := pause_s()) and any(own.last.finish_reason is None for own in generations):
                    await asyncio.sleep(seconds)
    except Exception:
        reason = "error"
        raise
    finally:
        for record in records:
            record.ended(reason)
