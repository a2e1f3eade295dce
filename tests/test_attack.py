"""A few cases of each attack in scripts/attack."""

from scripts.attack import batch, caches, loop


def test_fuzzed_loop():
    assert loop.attack(count=8, seed=7) == 0


def test_fuzzed_batch():
    assert batch.attack(count=4, seed=7) == 0


def test_fuzzed_prompt_cache_files():
    assert caches.attack(count=40, seed=7) == 0
