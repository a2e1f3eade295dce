"""The planner chooses the number and the source of each step's drafts, and reports each step's time to the depths."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import cast

from ..models.protocol import MTPModel
from ..pacing.batch_depth import BatchDepth, BatchTimes, Timing, timing_of
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth, expected_tokens
from ..pacing.step_times import PLAIN_PLAN, Plan, StepTimes
from ..traces import n_traces
from .decoder import Decoder, draft_limit
from .exchange import Exchange
from .sequence import Sequence
from .window import Drafts, Step

Observed = tuple[Depth, Plan, float]  # a step: its depth, its plan, and the number of accepted drafts


class Clock:
    """Measures how long each step took. Where several ranks run the model, all of them use rank 0's seconds, which come later.

    A caller may alternate between generations that are open at once. The device runs their passes in the order in which they
    were queued, so a step may also wait for a pass of another generation.

    Args:
        timing (Timing): The times of the model, and the generation that last submitted work to the device.
        exchange (Exchange, optional): Sends seconds to the other ranks. Default: ``None`` for one process.
    """

    def __init__(self, timing: Timing, exchange: Exchange | None):
        self.timing, self.turn = timing, object()
        timing.turn = self.turn  # the prefill of this generation submits work first
        self.is_alone = True  # no other generation has submitted work since the last step
        self.last: float | None = None  # the time at which the last step was over
        self.n_traces = 0  # the traces made up to that time
        # Steps that wait for their seconds: (step, whether its time is clear, whether no other generation ran in between).
        self.steps: deque[tuple[Observed, bool, bool]] = deque()
        self.unsent: deque[float] = deque() if exchange is None else exchange.unsent
        # One process uses its own seconds at once.
        self.received = self.unsent if exchange is None else exchange.received

    def take_turn(self) -> None:
        """Call after submitting work to the device, before the caller can run another generation."""
        self.is_alone = self.is_alone and self.timing.turn is self.turn
        self.timing.turn = self.turn

    def interrupt(self) -> None:
        """Do not measure the next step: other work, such as prefill, took time since the last one."""
        self.last = None

    def record(self, step: Observed, is_clear: bool, now: float) -> bool:
        """Call when a step is over.

        Args:
            step (Observed): The step, which ``timed`` yields with its seconds.
            is_clear (bool): Whether the time since the last step was spent only on this step, judged by the steps around it.
            now (float): The time, in seconds.

        Returns:
            bool: Whether ``timed`` will yield the step. It does not yield the first one, nor the first after ``interrupt``.
        """
        before = self.last
        self.take_turn()
        is_clear = is_clear and self.n_traces == n_traces()  # a new shape is traced, and its kernels are compiled
        self.n_traces = n_traces()
        if before is not None:
            self.steps.append((step, is_clear, self.is_alone))
            self.unsent.append(now - before)
        self.last, self.is_alone = now, True
        return before is not None

    def timed(self) -> Iterator[tuple[Observed, float | None, bool]]:
        """Yield the recorded steps whose seconds have arrived, the oldest first.

        Yields:
            Tuple[Observed, Optional[float], bool]: The step, its seconds, which are ``None`` where they are not clear, and
            whether no other generation ran in between.
        """
        while self.received:
            (step, is_clear, is_alone), seconds = self.steps.popleft(), self.received.popleft()
            yield step, seconds if is_clear else None, is_alone


class Planner:
    """Makes the plan of each sequence: by its own ``Depth`` for a single sequence, by a ``BatchDepth`` for several.

    Args:
        model (MTPModel): The model. Where several ranks run it, the depths observe the times of rank 0.
        times (Union[StepTimes, BatchTimes], optional): The step times that this generation updates. ``None`` where numbers of
          drafts are given.
    """

    def __init__(self, model: MTPModel, times: StepTimes | BatchTimes | None):
        self.model = model
        self.exchange = None if model.ranks is None else Exchange(model.ranks, times)
        self.clock = Clock(timing_of(model), self.exchange)
        self.batch_depth = BatchDepth(timing_of(model).of_batches)
        # For copies without drafts of the head: these steps have separate times.
        self.copies_depth = BatchDepth(BatchTimes())
        self.latest: list[Drafts] = []  # the drafts of the latest windows
        # The sequences of the latest step, and the time and the number of traces at its end.
        self.last_end: tuple[list[Sequence], float, int] = [], 0.0, 0

    def next(self, decoder: Decoder) -> Drafts:
        """Plan the drafts of the next window. ``Decoder.draft`` makes them."""
        sequences, limits = decoder.sequences, [draft_limit(decoder, b) for b in range(len(decoder))]
        if len(sequences) == 1:
            plan, depth = self._next_of_one(sequences[0], limits[0])
            return Drafts(sequences, [plan], plan, depth)
        k, depth = self._shared(sequences, limits)
        return Drafts(sequences, [_best_in_batch(s, k, n)[0] for s, n in zip(sequences, limits)], Plan(k), depth)

    def _next_of_one(self, s: Sequence, limit: int) -> tuple[Plan, Depth | None]:
        offers, depth = s.offers(), depth_of(self.model, s)
        fixed = ((name, s.sources[name].fixed) for name in offers)
        plan = next((Plan(min(n, len(offers[name])), name) for name, n in fixed if n is not None), None)
        if plan is None and depth is not None:
            plan = depth.next(offers)
        if plan is None:
            plan = Plan(cast(int, s.options.num_draft_tokens))
        if plan.k > limit:
            plan = Plan(limit, plan.source) if limit > 0 else PLAIN_PLAN
        return plan, depth

    def _shared(self, sequences: list[Sequence], limits: list[int]) -> tuple[int, Depth | None]:
        """Choose the number of drafts that several sequences share.

        Returns:
            Tuple[int, Optional[Depth]]: The number, and the depth that chose it; ``None`` if sequences have given numbers.
        """
        # The draft limits of sequences with a given number, of those without, and of those that copy the shared number.
        given, auto, follow = [0], [0], [0]
        for s, limit in zip(sequences, limits):
            if isinstance(s.options.num_draft_tokens, int):
                given.append(min(s.options.num_draft_tokens, limit))
            else:
                auto.append(limit)
            if limit > 0 and any(s.sources[name].fixed is None for name in s.offers()):
                follow.append(limit)
        most = min(max(auto + follow), MAX_DRAFT_TOKENS)
        if most == 0 or (max(auto) == 0 and max(given) > 0):
            return max(given), None
        depths = self.batch_depth if any(s.options.num_draft_tokens != 0 for s in sequences) else self.copies_depth
        k = depths.next(len(sequences), [_rates(s) for s in sequences if s.end is None])
        return max(min(k, most), *given), depths.of(len(sequences))  # a window is as wide as its longest drafts

    def start_window(self, decoder: Decoder) -> None:
        """Call after submitting a window to the device, before the caller can run another generation."""
        assert decoder.drafts is not None
        self.clock.take_turn()
        self.latest = [*self.latest[-2:], decoder.drafts]

    def record_drafting(self, step: Step) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if len(step.drafts) > 0:
            self._record(step)

    def record_plain(self, step: Step) -> None:
        """Call when the tokens of a step without drafts have been read, while the device runs the next step."""
        if len(step.drafts) == 0:
            self._record(step)

    def _record(self, step: Step) -> None:
        now = perf_counter()
        self._count_seconds(step, now)
        drafts, is_plain, several = step.drafts, len(step.drafts) == 0, len(step.sequences) > 1
        windows = self.latest[-3:] if is_plain else self.latest[-2:]  # the window after a plain step has begun already
        depth, plan = drafts.depth, drafts.plan
        if several or depth is None:
            for s, own, n in zip(step.sequences, drafts.plans, step.n_accepted):
                if own.k > 0 and not own.skips_head:
                    s.rates.count_window(own.k, n)
        if depth is None or (several and len(drafts) > plan.k):
            self.clock.interrupt()  # no depth observes a step whose number of drafts it did not choose
            return
        if several:
            plan, n_accepted = Plan(len(drafts)), sum(step.n_accepted) / len(step.sequences)
        else:
            # Drafts dropped by ``p_min`` count as rejected: the head has computed them.
            plan, n_accepted = drafts.plans[0] if plan.skips_head else plan, step.n_accepted[0]
        is_first = not self.clock.record((depth, plan, n_accepted), _is_clear(windows, is_plain), now)
        if is_first and (several or len(self.latest) > 2):
            depth.observe(plan, n_accepted, None, True)
        for (depth, plan, n_accepted), seconds, is_alone in self.clock.timed():
            depth.observe(plan, n_accepted, seconds, is_alone)

    def _count_seconds(self, step: Step, now: float) -> None:
        """Count the time since the latest step for the sequences of both, unless a trace was made since then."""
        (sequences, before, n_before), n = self.last_end, n_traces()
        for b, s in enumerate(step.sequences):
            if s in sequences and n == n_before:
                s.counts.n_timed += step.n_decided(b)
                s.counts.seconds += now - before
        self.last_end = step.sequences, now, n

    def clear(self) -> None:
        """Forget the latest windows, after all sequences have left."""
        self.latest, self.last_end = [], ([], 0.0, 0)
        self.clock.interrupt()

    def interrupt(self) -> None:
        """Do not measure the next step: other work, such as prefill, took time since the last one."""
        self.clock.interrupt()


def _is_clear(windows: list[Drafts], is_plain: bool) -> bool:
    """Whether the time between the ends of two steps was spent only on the second, judged by the latest windows."""
    last = windows[-1]
    if any(d.sequences != last.sequences or len(d) > d.plan.k for d in windows):
        return False
    if is_plain:  # where plain and drafting steps alternate, the device may have run more or less than this pass
        return all(d.plan == PLAIN_PLAN for d in windows)
    # After a plain step, part of the time may belong to that step. After drafts of another source, the head has more pairs to
    # catch up with.
    return len(windows) == 2 and len(windows[0]) > 0 and windows[0].plan.skips_head <= last.plan.skips_head


def _best_in_batch(s: Sequence, k: int, limit: int) -> tuple[Plan, list[float]]:
    """The plan of one of several sequences that share k, with the source that is expected to yield the most tokens.

    Returns:
        Tuple[Plan, List[float]]: The plan, and the acceptance rates of its source.
    """
    n = s.options.num_draft_tokens
    best, rates = Plan(min(n if isinstance(n, int) else k, limit)), s.rates.estimate
    tokens = expected_tokens(rates)[best.k]
    for name, offered in s.offers().items():
        fixed = s.sources[name].fixed
        n_free = min(k if fixed is None else fixed, limit, len(offered))
        if n_free > 0 and (more := expected_tokens(offered)[n_free]) > tokens:
            best, rates, tokens = Plan(n_free, name), offered, more
    return best, rates


def _rates(s: Sequence) -> list[float]:
    """The acceptance rates of a sequence's best source, [MAX_DRAFT_TOKENS], 0 where it may not draft as many."""
    plan, rates = _best_in_batch(s, MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS)
    return [rates[i] if i < plan.k else 0.0 for i in range(MAX_DRAFT_TOKENS)]


def depth_of(model: MTPModel, s: Sequence) -> Depth | None:
    """The depth that chooses for a single sequence, with the model's step times; ``None`` for given numbers."""
    number = s.options.num_draft_tokens
    if s.depth is None and (number == "auto" or s.options.copy_drafts == "auto"):
        only = number if isinstance(number, int) else None
        s.depth = Depth(MAX_DRAFT_TOKENS, times=timing_of(model).of_one, only=only, rates=s.rates)
    return s.depth
