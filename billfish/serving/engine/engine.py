"""One model for many: in each step, all answers get a token, and all prompts are read a bit further.

A thread of its own makes the steps. `submit` and `embed` put work into a queue, from any thread, and do not wait.
"""

from __future__ import annotations

import atexit
import logging
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from threading import Condition, current_thread
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, DeviceLost, ModelError, bad_argument, explained, failure
from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder, PendingStep
from billfish.llm.drafting.drafter import MOST_DRAFTED, Controller, StepSeconds
from billfish.llm.grammar import CompiledGrammar, Grammar, Vocabulary
from billfish.llm.kv_cache import NO_ADAPTER, NoRoom
from billfish.llm.model import Model
from billfish.llm.sampler import NextToken, Sampling, Scored
from billfish.serving.engine.grammar_compiler import GrammarCompiler, start_thread
from billfish.serving.engine.jobs import Answer, Embedding, Job, OnToken, Scoring
from billfish.serving.engine.kv_slots import PAGE, SMALLEST, Slots, cuts_for
from billfish.serving.engine.requests import EngineCounts, QueueFull, Request, ServerClosing, Ticket
from billfish.serving.engine.scheduler import PromptsInReading, share_out

LOG = logging.getLogger("billfish.serving")
CALL = "serving.Engine"
USUAL_CONTEXT = 4096
SPARE = PAGE  # positions that are left for each request that runs, when another one starts
WARM = 64  # rows with drafts that steps are made ready for
FULL = "The KV cache has no room for this request. Shorten it, or start the server with a shorter context."


class Submitted(NamedTuple):
    """A step, and whose tokens it chooses. drafts: what was fed of drafts for some of these. decoding_rows: of a step
    that reads no prompt, else 0. started: when it was planned."""

    step: PendingStep
    answers: list[Answer]
    drafts: dict[Answer, list[int]]
    decoding_rows: int
    started: float


class Engine:
    """Answers requests of many users with one model.

    streams: so many answers run at once. context: positions that each may have with its prompt; None: the model's, at
    most 4096. queue: so many requests may wait for a stream. cache_tokens: that the KV caches of all streams hold
    together; None: as many as all streams can have, or on a GPU as there is memory for. Where that ends, the request
    that came last is preempted: it waits, is read again when another one has ended, and goes on.
    activations: as in :meth:`billfish.llm.Model.generate`. On the CPU, a request gets the tokens that `generate`
    gives it alone, whatever runs beside it.
    draft, draft_length: as in :meth:`billfish.llm.Model.generate`, for all requests that do not switch it off. Each
    answer is drafted by itself, as far as that pays.
    """

    def __init__(
        self,
        model: Model,
        *,
        streams: int = 8,
        context: int | None = None,
        queue: int = 64,
        cache_tokens: int | None = None,
        activations: Activations | None = None,
        draft: str | Model | None = None,
        draft_length: int | None = None,
    ) -> None:
        decoder = model.decoder
        self.model, self._decoder = model, decoder
        self.streams, self.context = streams, min(USUAL_CONTEXT, decoder.config.context) if context is None else context
        self.queue_limit = queue
        self._activations = decoder.check_activations(CALL, activations, decoder.usual)
        for name, value, least, most in (
            ("streams", streams, 1, None),
            ("context", self.context, 1, decoder.config.context),
            ("queue", queue, 0, None),
            ("cache_tokens", self.context if cache_tokens is None else cache_tokens, self.context, None),
        ):
            if value < least or (most is not None and value > most):
                expected = f"{least} or more" if most is None else f"{least} to {most}"
                raise DataError(bad_argument(CALL, name, value, expected))
        self._make_drafter = model.drafters(CALL, draft, draft_length, self._activations)
        self._step_seconds = StepSeconds()
        self._cuts = cuts_for(decoder, self._activations)
        try:
            exact = self._activations == "exact"
            self._slots = Slots(decoder, streams, self.context, self._cuts, exact=exact, tokens=cache_tokens)
            drafting = 0 if draft in (None, "off") else max(streams, min(WARM, streams * (1 + MOST_DRAFTED)))
            decoder.warm(streams, self._activations, drafting)
        except (MemoryError, ModelError) as error:  # a GPU's cache raises the latter
            said = str(error).removeprefix("llm.generate: ").rstrip(".")
            why = f" ({said})" if said else ""
            problem = f"out of memory: the KV cache of {streams} streams of {self.context} tokens does not fit{why}"
            raise DataError(failure(CALL, problem, "Lower --streams or --context.")) from None
        # Rows of an answer have their own bits, unlike those of a prompt. What was said before does not change.
        self._rows_again = decoder.rows_alike("exact") if exact else decoder.chunk
        self._full = False  # whether nothing was given back since memory ended
        self._grammars = GrammarCompiler(Vocabulary(model.tokenizer, decoder.config.vocabulary))
        self._changed = Condition()  # held for what follows
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._numbers = count()
        self._in_reading = PromptsInReading(self._cuts)  # the engine's thread's alone
        self._pending: Submitted | None = None
        self._last_taken = 0.0  # when tokens of a step were taken last
        self._closing = self._recovering = False
        self.failure = ""  # a sentence, when the engine has ended by an error
        self._counts = EngineCounts(cache_bytes_bound=self._slots.bytes_bound)
        self.after_step: Callable[[], object] = lambda: None  # called in the engine's thread, after tokens were given
        self._thread = start_thread(self._work, "billfish engine")
        atexit.register(self.close, finish=False)

    # ---- what any thread may call -------------------------------------------------------------------------------

    def submit(self, request: Request, on_token: OnToken) -> Ticket:
        """Begin an answer. `on_token` gets its tokens in the engine's thread, and must not block; the answer of one
        that raises is cancelled. Stop texts are not looked for: see :class:`Ticket`. Raises QueueFull or ServerClosing
        at once, and ModelError or DataError for a request that cannot be answered."""
        self._decoder.check_answers(CALL)
        self._check(request.prompt)
        self._decoder.check_tokens(CALL, "logit_bias", list(request.sampling.logit_bias))
        adapter = NO_ADAPTER if request.adapter is None else self.model.adapters.get(request.adapter)
        if adapter is None:
            raise DataError(bad_argument(CALL, "adapter", repr(request.adapter), "the name of a loaded adapter"))
        matcher = None if request.grammar is None else request.grammar.matcher()
        if request.thought is not None:
            matcher = request.thought.matcher(self.model.tokenizer, self.model.config.vocabulary, matcher)
        ticket = Ticket(len(request.prompt), self._wake)
        ends, cuts = self.model.tokenizer.ends, self._cuts
        more: dict[str, Any] = {"context": self.context, "rows_again": self._rows_again, "adapter": adapter}
        drafter = self._make_drafter() if request.draft else None
        if drafter is not None:
            most = min(drafter.most, self._decoder.rows_alike(self._activations) - 1)
            watching = drafter.watched and not self._decoder.drafting
            controller = Controller(most, drafter.acceptance, self._step_seconds, watching=watching)
            more |= {"drafter": drafter, "controller": controller}
        self._put(Answer(request, on_token, ticket, ends, matcher, cuts, self._counts.times, **more))
        return ticket

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile a grammar for :class:`Request`. Make one for each request. Raises as
        :meth:`billfish.serving.engine.grammar_compiler.GrammarCompiler.compile` does."""
        return self._grammars.compile(grammar)

    def warm_grammars(self) -> None:
        """Make the first grammar as quick as later ones."""
        self._grammars.warm()

    def embed(self, texts: Sequence[list[int]]) -> Future[list[NDArray[np.float32]]]:
        """A vector [hidden] for each text, as :meth:`billfish.llm.Model.embed_text` gives it. All texts together have
        one place in the queue. The future may be cancelled as long as it is not done. Raises as `submit` does."""
        for text in texts:
            self._check(text)
        job = Embedding(texts, self.model)
        self._put(job)
        return job.future

    def score(self, texts: Sequence[list[int]], alternatives: int) -> Future[list[list[list[Scored]]]]:
        """For each text and each of its tokens but the first, the token and the best `alternatives` with their log
        probabilities. Otherwise as `embed`."""
        self._decoder.check_answers(CALL)
        for text in texts:
            self._check(text)
        job = Scoring(texts, self.model, alternatives)
        self._put(job)
        return job.future

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered: not by a thread that has ended, nor while it finds out whether the model runs
        after an error. `failure` says why it has ended."""
        return self._thread.is_alive() and not self._recovering and not self.failure

    def counts(self) -> EngineCounts:
        """What has been done, and what is."""
        with self._changed:
            running, waiting, finished = len(self._running), len(self._waiting), dict(self._counts.finished)
            held, pages, captures = self._slots.bytes_held, self._slots.pages, self._decoder.captures
            now: dict[str, Any] = {"running": running, "waiting": waiting, "finished": finished}
            return replace(self._counts, cache_bytes=held, pages=pages, captures=captures, **now)

    def close(self, *, finish: bool = True) -> None:
        """Take nothing more, and wait until nothing runs. finish: what runs or waits is answered, else cancelled."""
        with self._changed:
            self._closing = True
            if not finish:
                for job in (*self._waiting, *self._running):
                    job.cancel()
            self._changed.notify()
        self._grammars.close()
        if self._thread is not current_thread():
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=error is None)

    def _check(self, prompt: list[int]) -> None:
        """Raises unless there is room for a prompt of such tokens."""
        self._decoder.check_prompt(prompt, CALL)
        if len(prompt) > self.context:
            problem = f"prompt has {len(prompt)} tokens; the context of a stream is {self.context}"
            raise ModelError(failure(CALL, problem, "Shorten it, or pass a larger context=."))

    def _put(self, job: Job) -> None:
        with self._changed:
            if self._closing:
                self._counts.refused += 1
                raise ServerClosing(self.failure or "The engine is closing. Retry later.")
            if len(self._waiting) + len(self._running) >= self.streams + self.queue_limit:
                self._counts.refused += 1
                raise QueueFull(f"The queue is full ({self.queue_limit} requests wait). Retry later, or raise --queue.")
            job.number = next(self._numbers)
            self._waiting.append(job)
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # ---- the engine's thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._has_work():
                try:
                    self._step()
                except BaseException as error:  # a panic inside llguidance is no Exception
                    self._recover(error)
                self.after_step()
        except BaseException as error:
            self.failure = f"The engine has stopped: {explained(error)}"
            LOG.critical("%s", self.failure)
        finally:
            with self._changed:
                self._closing = True  # nothing waits for a thread that has ended
            self._fail_all(self.failure)
            with suppress(BaseException):
                self.after_step()

    def _has_work(self) -> bool:
        """Wait for something to do. False: there is nothing more, as the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
            return bool(self._waiting or self._running)

    def _recover(self, error: BaseException) -> None:
        """After an error that no request is to blame for: all of them end, and the next ones are answered if the model
        still runs. Raises if it does not."""
        LOG.error("a step of the engine failed", exc_info=error)
        self._recovering = True
        self._fail_all(explained(error))
        if isinstance(error, DeviceLost):
            raise error
        self._decoder.check_device()
        self._decoder.choose([(self._decoder.cache(1), [0])], [Sampling().sampler()], self._activations)
        self._recovering = False

    def _fail_all(self, error: str) -> None:
        """End whatever runs or waits. All slots are free afterwards."""
        with self._changed:
            jobs = [*self._waiting, *self._running]
            self._waiting, self._running = [], []
            self._slots.clear()
            self._pending = None
            self._in_reading = PromptsInReading(self._cuts)
        for job in jobs:
            with suppress(Exception):
                job.end("failed", error)
                self._counts.finished[job.finished] += 1
                job.tell_end()

    def _step(self) -> None:
        started = time.perf_counter()
        self._await_drafted()  # before a slot of its answers is given to another text
        self._end_cancelled()
        self._start_waiting()
        drafted = self._draft()
        jobs, parts, drafts = self._plan(drafted)
        reading = [job for job in parts if not job.decodes]
        answers = {job: part for job, part in parts.items() if isinstance(job, Answer)}
        texts = {job: part for job, part in parts.items() if isinstance(job, Embedding)}
        self._counts.prefill_tokens += sum(parts[job] for job in reading if job in answers)
        submitted = self._submit_step(answers, drafts, started)
        for answer, draft in drafted.items():
            if submitted is None or answer not in submitted.drafts:
                answer.could_not_try(len(draft))
        before, self._pending = self._pending, submitted
        self._take_tokens(before)  # while the device is busy with what was submitted
        if submitted is not None:
            submitted.step.sample_late()
        if not self._decoder.overlaps:
            self._pending = None
            self._take_tokens(submitted)
        self._read_texts(texts, answering=bool(answers))
        for job in reading:
            if isinstance(job, Answer) and len(job.slot.cache.tokens) >= len(job.prompt):
                self._in_reading.remove(job)
        self._counts.steps += 1
        self._remove([job for job in jobs if job.finished])
        for job in texts:
            if job.between_texts and not job.finished:
                self._wait_again(job)

    def _read_texts(self, parts: dict[Embedding, int], *, answering: bool) -> None:
        """Feed so many tokens of each text whose vector is wanted. They take passes of their own, with the exact
        kernels. answering: there are answers, which wait for one such pass and no more; other texts have their turn in
        later steps."""
        decoder, jobs = self._decoder, list(parts)
        if decoder.config.encoder is not None:
            for job in jobs:
                with _failing([job], decoder):
                    job.read_together()
            return
        passages = [(job.slot.cache, job.tokens(part)) for job, part in parts.items()]
        passes = sorted(decoder.passes(passages, decoder.exact))  # whoever came first is in the first one
        for numbers in passes[:1] if answering else passes:
            fed, together = [passages[i] for i in numbers], [jobs[i] for i in numbers]
            with _failing(together, decoder):
                ends = np.cumsum([len(tokens) for _, tokens in fed])[:-1]
                self._counts.prefill_tokens += sum(len(tokens) for _, tokens in fed)
                for job, hidden in zip(together, np.split(decoder.run(fed, decoder.exact), ends), strict=True):
                    with _failing([job], decoder):
                        job.take(hidden)

    def _await_drafted(self) -> None:
        """Take the tokens of the pending step, if one of its answers had a draft, or would have one now: what follows
        must be known."""
        if self._pending is None:
            return
        others = sum(job.decodes for job in self._running) - 1
        if self._pending.drafts or any(job.draft_length(others) for job in self._pending.answers if not job.finished):
            self._take_pending()

    def _take_pending(self) -> None:
        before, self._pending = self._pending, None
        self._take_tokens(before)
        self._remove([job for job in self._running if job.finished])

    def _draft(self) -> dict[Answer, list[int]]:
        """What may come next in answers whose last token is known, as far as it pays to try."""
        rows, asked = sum(job.decodes for job in self._running), list[tuple[Answer, int]]()
        for job in self._running:
            if isinstance(job, Answer) and job.pending is None:
                length = job.draft_length(rows - 1)
                if length > 0:
                    asked.append((job, length))
                    rows += length
        if not asked:
            return {}
        given: list[Any] = [(job.drafter, job.text, length) for job, length in asked]
        together = type(given[0][0]).draft_together
        try:
            drafted = together(given)
        except NoRoom:  # of a draft model's caches: each alone, and who has none is not drafted for any more
            drafted = []
            for (job, _), one in zip(asked, given, strict=True):
                try:
                    drafted += together([one])
                except NoRoom:
                    drafted.append([])
                    job.drafter = None
        return {job: draft for (job, _), draft in zip(asked, drafted, strict=True) if draft}

    def _plan(self, drafts: dict[Answer, list[int]]) -> tuple[list[Job], dict[Job, int], dict[Answer, list[int]]]:
        """All that runs, how many tokens each job is fed in this step, and what was drafted behind them. There is
        memory for them: where it ends, nothing is drafted, and then who came last is preempted."""
        decoder = self._decoder
        drafted: dict[Any, list[int]] = drafts
        while True:
            jobs = list(self._running)
            decoding = sum(job.decodes for job in jobs) + sum(map(len, drafted.values()))
            budget = min(decoder.prefill_budget(decoding), decoder.chunk - SMALLEST - decoding)
            parts = share_out(jobs, budget, self._cuts.smallest)
            rows = {job: part + len(drafted.get(job, ())) for job, part in parts.items()}
            if all(self._slots.make_room(job.slot, job.position + count + 1, count) for job, count in rows.items()):
                return jobs, parts, drafts if drafted else {}
            if drafted:
                drafted = {}
            elif self._pending is not None:  # tokens that may end a request, and that a preempted one must know
                self._take_pending()
            elif len(jobs) > 1:
                self._preempt(jobs[-1])
            else:
                jobs[0].end("failed", FULL)
                self._remove(jobs)

    def _preempt(self, job: Job) -> None:
        """Take the memory of a request, which waits and goes on later. It is before all that came after it."""
        with self._changed:
            self._running.remove(job)
            self._slots.give_back(job.slot, keep=False)
            insort(self._waiting, job, key=lambda job: job.number)
            self._counts.preemptions += 1
            self._full = True
        if isinstance(job, Answer):
            self._in_reading.remove(job)
        job.restart()

    def _submit_step(
        self, parts: dict[Answer, int], drafts: dict[Answer, list[int]], started: float
    ) -> Submitted | None:
        """Feed so many tokens of each text, and have the next one chosen where nothing is left, or the next ones behind
        what was drafted. started: when the step was."""
        going_on = [job for job, part in parts.items() if part >= job.left]
        feeding = [*going_on, *(job for job, part in parts.items() if part < job.left)]
        passages = [(job.slot.cache, job.tokens(parts[job])) for job in feeding]
        if not passages:
            return None
        with _failing(feeding, self._decoder):
            drafted = [drafts.get(job, []) for job in going_on] if drafts else []
            if drafts:
                self._decoder.begin_drafting()
            samplers = [job.sampler for job in going_on]
            pending = self._decoder.submit(passages, samplers, self._activations, drafted)
            for job in feeding:
                job.was_fed()
            for job in going_on:
                job.pending = pending
            tried = {job: list(draft) for job, draft in zip(going_on, pending.drafts, strict=True) if draft}
            rows = sum(len(tokens) for _, tokens in passages) + sum(map(len, tried.values()))
            only_decodes = all(part == 1 for part in parts.values())
            return Submitted(pending, going_on, tried, rows if only_decodes else 0, started)
        return None

    def _take_tokens(self, submitted: Submitted | None) -> None:
        """Give the tokens of a step to its answers. Of an answer that has ended meanwhile, nobody takes them."""
        if submitted is None:
            return
        pending, answers, chosen = submitted.step, submitted.answers, list[list[NextToken]]()
        with _failing(answers, self._decoder):
            chosen = pending.choices()
        now = time.perf_counter()
        if submitted.decoding_rows:
            self._step_seconds.note(submitted.decoding_rows, now - max(submitted.started, self._last_taken))
        self._last_taken = now
        for job, choices in zip(answers, chosen, strict=False):  # none, if the step failed
            if job.pending is pending:
                job.pending = None
            if not job.finished:
                with _failing([job]):
                    self._take(job, choices, submitted.drafts.get(job, ()))

    def _take(self, job: Answer, choices: Sequence[NextToken], draft: Sequence[int]) -> None:
        before = job.ticket.drafts
        taken = job.take(choices, len(draft))
        self._counts.generated_tokens += taken
        if draft:
            self._counts.drafts += 1
            self._counts.drafted_tokens += len(draft)
            self._counts.accepted_tokens += job.ticket.drafts.accepted - before.accepted
        if taken < len(choices):  # tokens behind the end of the answer
            job.slot.cache.rollback(len(job.text) - 1)

    def _end_cancelled(self) -> None:
        with self._changed:
            gone = [job for job in (*self._waiting, *self._running) if job.cancelled]
        for job in gone:
            job.end("cancelled")
        self._remove(gone)

    def _remove(self, jobs: list[Job]) -> None:
        """What is over makes room for others, before whoever waits for it is told."""
        if not jobs:
            return
        gone = set(jobs)
        with self._changed:
            for job in jobs:
                self._counts.finished[job.finished] += 1
            for job in self._running:
                if job in gone:
                    if isinstance(job, Answer):
                        self._in_reading.remove(job)
                    self._slots.give_back(job.slot, keep=isinstance(job, Answer) and job.finished != "failed")
                    self._full = False
            self._waiting = [job for job in self._waiting if job not in gone]
            self._running = [job for job in self._running if job not in gone]
        for job in jobs:
            job.tell_end()

    def _wait_again(self, job: Embedding) -> None:
        with self._changed:
            job.between_texts, job.number, job.started, self._full = False, next(self._numbers), False, False
            self._running.remove(job)
            self._slots.give_back(job.slot, keep=False)
            self._waiting.append(job)

    def _start_waiting(self) -> None:
        """In order. A prompt that begins like one that is being read waits for that one; others pass it."""
        with self._changed:
            waiting, free, running = list(self._waiting), self._slots.free, len(self._running)
        if not waiting or not free or (self._full and running):
            return
        self._full = False
        self._slots.note_growth()
        started = set[Job]()
        for job in waiting:
            if len(started) == free or self._full:
                break
            with _failing([job]):
                if not (isinstance(job, Answer) and self._is_being_read(job)):
                    self._full = not self._start(job, running + len(started))
                    if not self._full:
                        started.add(job)
        with self._changed:
            self._waiting = [job for job in self._waiting if job not in started]
            self._running = sorted([*self._running, *started], key=lambda job: job.number)
        self._remove([job for job in waiting if job.finished])

    def _is_being_read(self, job: Answer) -> bool:
        """Whether a running request will soon have read more of the job's prompt than any cache holds."""
        if self._in_reading.still_waits(job):
            return True
        return self._in_reading.has_more_of(job, self._slots.reuse(job.prompt, job.hashes))

    def _start(self, job: Job, running: int) -> bool:
        """Give a request a slot, if there is memory for its text, and for all that run to go on for a while."""
        slots, slot = self._slots, None
        with suppress(NoRoom):
            slot = slots.take(job.prompt, job.hashes, job.tenant) if isinstance(job, Answer) else slots.take()
            slot.cache.adapt(job.adapter)
        if slot is None or not slots.make_room(slot, len(job.text) + 1, 0, running * SPARE):
            if slot is not None:
                slots.give_back(slot, keep=False)
            if not running:
                raise NoRoom(FULL)
            return False
        job.slot = slot
        if isinstance(job, Answer) and job.drafter is not None:
            job.drafter.follow(slot.cache)
        cached = job.position
        if not job.started:
            job.started = True
            self._counts.prompt_tokens += len(job.prompt)
            self._counts.cached_tokens += cached
            if isinstance(job, Answer):
                job.begin_prefill()
        if isinstance(job, Answer):
            self._in_reading.add(job)
        return True


@contextmanager
def _failing(jobs: Sequence[Job], decoder: Decoder | None = None) -> Iterator[None]:
    """What is raised ends these jobs, and no others, unless the device of the decoder is lost."""
    try:
        yield
    except DeviceLost:
        raise
    except BaseException as error:  # a panic inside llguidance is no Exception
        if decoder is not None:
            decoder.check_device()
        for job in jobs:
            job.end("failed", explained(error))
