"""A few cases of each attack in scripts/attack."""

import pytest

from scripts.attack import batch, caches, driver, images, loop


@pytest.mark.parametrize(("module", "count"), [(loop, 8), (batch, 4), (caches, 40), (images, 60)])
def test_fuzzed(module, count):
    assert driver.attack(module.random_case, module.run_case, count, seed=1) == 0
