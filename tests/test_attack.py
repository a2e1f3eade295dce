"""A few cases of each attack in scripts/attack."""

from attack import loop


def test_fuzzed_loop():
    assert loop.attack(count=8, seed=7) == 0
