"""A step of speculative decoding, over the moves of ``Decoder``, in this order:

    accept       the tokens of the window in flight, which the call before has submitted: the drafts before the first wrong one,
                 and the target model's choice after them
    move         sequences leave and join
    plan, draft  the next drafts of each sequence
    roll back    the caches to the accepted tokens, while the device drafts
    verify       the committed tokens and their drafts in one pass: the next window in flight

A call begins with the window of the call before, so that the device verifies one while the caller handles the tokens before it.
docs/develop/design.md draws the positions of a window, the target model's choices, and the head's inputs.
"""

from collections.abc import Callable

from .decoder import Decoder
from .planner import Planner
from .window import Stepped, choose


def step(decoder: Decoder, planner: Planner, move: Callable[[], None]) -> list[Stepped]:
    """Make a step of all sequences -> the tokens of each.

    ``move`` lets sequences leave and join. Call it on one stream, as the moves.
    """
    window = decoder.window
    done = None
    if window is not None:
        choice = choose(window)
        # The host waits for the choice if it decides on drafts. Otherwise the device runs the next pass first.
        if len(window.drafts) > 0 or any(s.task.needs_tokens for s in window.plan.sequences):
            done = decoder.read(choice)
            planner.record(done)
        decoder.accept(choice, done)
    move()
    if len(decoder) > 0:
        plan = planner.next(decoder)
        drafts = decoder.draft(plan)
        decoder.roll_back()  # The drafts are submitted, so the device has work meanwhile.
        decoder.verify(plan, drafts)
        planner.start_window(plan, drafts)
    if window is not None and done is None:
        done = decoder.read(choice)
        if len(decoder) > 0:
            planner.record(done)
    return [] if done is None else done.tokens_of_each()
