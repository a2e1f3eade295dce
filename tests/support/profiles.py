"""How long the properties are tested: briefly by default, as CI does, and at length with ``pytest --long``."""

from hypothesis import settings

LONG = False  # set by tests/conftest.py before test modules are imported
LONGER = 50  # times as many examples


def examples(n: int) -> settings:
    """n examples of a property, and ``LONGER`` times as many with ``--long``."""
    return settings(max_examples=n * LONGER if LONG else n)
