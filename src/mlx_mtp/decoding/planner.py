"""The planner chooses the number and the source of each step's drafts, and reports each step's time to the depths."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter

from ..models.mixin import MTPModel
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth, Offer, expected_tokens
from ..pacing.step_times import FREE, HEAD, PLAIN_PLAN, Plan, Timing, timing_of
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
    """Plans the drafts of each window by the ``Depth`` of its number of sequences, and reports the times of steps to it.

    Args:
        model (MTPModel): The model. Where several ranks run it, the depths observe the times of rank 0.
        given (Depth, optional): The depth to use for one sequence, with times of its own.
        uses_times (bool): Whether any number of drafts is chosen by times, which ranks then share.
    """

    def __init__(self, model: MTPModel, given: Depth | None = None, uses_times: bool = True):
        self.timing = timing_of(model) if given is None else Timing(given.times)
        self.exchange = None if model.ranks is None else Exchange(model.ranks, self.timing if uses_times else None)
        self.clock = Clock(timing_of(model), self.exchange)
        self.depths = {} if given is None else {1: given.for_text()}  # by the number of sequences
        self.latest: list[Drafts] = []  # the drafts of the latest windows
        # The sequences of the latest step, and the time and the number of traces at its end.
        self.last_end: tuple[list[Sequence], float, int] = [], 0.0, 0

    def next(self, decoder: Decoder) -> Drafts:
        """Plan the drafts of the next window. ``Decoder.draft`` makes them."""
        sequences = decoder.sequences
        limits = [draft_limit(decoder, b) for b in range(len(decoder))]
        offers = [s.offers(limit) for s, limit in zip(sequences, limits)]
        given = max((min(s.number or 0, limit) for s, limit in zip(sequences, limits)), default=0)
        plan, depth = Plan(given), None
        if any(_is_chosen(s, offer) for s, offer in zip(sequences, offers)):
            depth = self.depth_of(len(sequences))
            plan = depth.next([offer for s, offer in zip(sequences, offers) if s.end is None], given)
        plans = [_own_plan(s, offer, plan, len(sequences) == 1) for s, offer in zip(sequences, offers)]
        width = max(own.k for own in plans)
        if width > plan.k:
            depth = None  # it did not choose this number
        uses_head = any(own.k > 0 and not own.skips_head for own in plans)
        return Drafts(sequences, plans, Plan(width, HEAD if uses_head or width == 0 else FREE), depth)

    def depth_of(self, n: int) -> Depth:
        if n not in self.depths:
            self.depths[n] = Depth(MAX_DRAFT_TOKENS, times=self.timing.of(n))
        return self.depths[n]

    def start_window(self, decoder: Decoder) -> None:
        """Call after submitting a window to the device, before the caller can run another generation."""
        assert decoder.drafts is not None
        self.clock.take_turn()
        self.latest = [*self.latest[-2:], decoder.drafts]

    def record_drafting(self, step: Step | None) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if step is not None and len(step.drafts) > 0:
            self._record(step)

    def record_plain(self, step: Step | None) -> None:
        """Call when the tokens of a step without drafts have been read, while the device runs the next step."""
        if step is not None and len(step.drafts) == 0:
            self._record(step)

    def _record(self, step: Step) -> None:
        now = perf_counter()
        self._count_seconds(step, now)
        drafts, is_plain = step.drafts, len(step.drafts) == 0
        windows = self.latest[-3:] if is_plain else self.latest[-2:]  # the window after a plain step has begun already
        depth, plan, several = drafts.depth, drafts.plan, len(step.sequences) > 1
        for s, own, n in zip(step.sequences, drafts.planned, step.n_accepted):
            # Drafts dropped by ``p_min`` count as rejected: the head has computed them.
            if own.k > 0 and not own.skips_head:
                s.rates.count_window(own.k, n)
        if depth is None:
            self.clock.interrupt()
            return
        if plan.skips_head:
            plan = Plan(len(drafts), plan.source)  # a source may give fewer than it offers
        n_accepted = sum(step.n_accepted) / len(step.sequences)
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
                s.counts.n_timed += step.counts[b]
                s.counts.seconds += now - before
        self.last_end = step.sequences, now, n

    def clear(self) -> None:
        """Forget the latest windows, after all sequences have left."""
        self.latest, self.last_end = [], ([], 0.0, 0)
        self.clock.interrupt()


def _is_clear(windows: list[Drafts], is_plain: bool) -> bool:
    """Whether the time between the ends of two steps was spent only on the second, judged by the latest windows."""
    last = windows[-1]
    if any(d.sequences != last.sequences for d in windows):
        return False
    if is_plain:  # where plain and drafting steps alternate, the device may have run more or less than this pass
        return all(d.plan == PLAIN_PLAN for d in windows)
    # After a plain step, part of the time may belong to that step. After drafts of another source, the head has more pairs to
    # catch up with.
    return len(windows) == 2 and len(windows[0]) > 0 and windows[0].plan.skips_head <= last.plan.skips_head


def _is_chosen(s: Sequence, offer: Offer) -> bool:
    """Whether a number of drafts is to be chosen for a sequence."""
    has_auto_source = any(name != HEAD and s.sources[name].fixed is None for name in offer)
    return has_auto_source or (s.number is None and HEAD in offer)


def _own_plan(s: Sequence, offer: Offer, plan: Plan, is_alone: bool) -> Plan:
    """The plan of one sequence in a window, with the source that is expected to yield the most tokens."""
    best, most = PLAIN_PLAN, 0.0
    for name, acceptance in offer.items():
        fixed = s.number if name == HEAD else s.sources[name].fixed
        k = min(plan.k if fixed is None else fixed, len(acceptance))
        if name != HEAD and fixed is not None:
            return Plan(k, name)
        # A single sequence drafts from the source that was chosen, and several from the head only if it is used at all.
        is_chosen = (name != HEAD) is plan.skips_head or not (is_alone or plan.skips_head)
        if is_chosen and k > 0 and (tokens := expected_tokens(acceptance[:k])[-1]) > most:
            best, most = Plan(k, name), tokens
    return best
