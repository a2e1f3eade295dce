"""Chi-square tests. scipy.special has the distribution; scipy.stats takes seconds to import."""

import numpy as np
from scipy.special import chdtrc


def p_value(observed, expected) -> float:
    """The probability of counts as far from the expected ones, [N] each."""
    observed, expected = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    return float(chdtrc(len(expected) - 1, ((observed - expected) ** 2 / expected).sum()))


def independence(table) -> float:
    """The probability of a table [M, N] as far from that of two independent numbers."""
    table = np.asarray(table, np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    n_free = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(chdtrc(n_free, ((table - expected) ** 2 / expected).sum()))
