"""A step of speculative decoding, over the moves of ``Decoder``: plan, draft, verify, accept, commit, roll back.

docs/develop/design.md draws a step: its positions, the target model's choices, and the head's inputs.
"""

from collections.abc import Callable

from .decoder import Decoder
from .planner import Planner
from .window import Stepped, choose


def step(decoder: Decoder, planner: Planner, move: Callable[[], None]) -> list[Stepped]:
    """Plan, draft, verify, accept, commit -> the tokens of each sequence.

    A call begins with the window that the call before has verified, and returns its tokens while the device verifies the next.
    ``move`` lets sequences leave and join in between. Call it on one stream, as the moves.
    """
    window, done = decoder.window, None
    if window is not None:
        choice = choose(window)
        # The host waits for the choice if it decides on drafts. Otherwise the device runs the next pass first.
        if len(window.drafts) > 0 or any(s.needs_tokens for s in window.sequences):
            done = decoder.read(choice)
            planner.record(done)
        decoder.accept(choice, done)
    move()
    if len(decoder) > 0:
        planned = planner.next(decoder)
        drafts = decoder.draft(planned)
        decoder.commit()  # after the drafts are submitted, so that the device has work
        decoder.verify(planned, drafts)
        planner.start_window(planned, drafts)
    if window is not None and done is None:
        done = decoder.read(choice)
        if len(decoder) > 0:
            planner.record(done)
    return [] if done is None else done.tokens_of_each()
