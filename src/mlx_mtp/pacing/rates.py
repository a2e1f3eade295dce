"""Observed acceptance rates: running estimates with decaying counts, since the text changes."""


class Rates:
    """A running estimate of the acceptance rate in each of n buckets, such as the positions in a window.

    Without new counts, the estimate of a bucket moves towards that of the bucket before it.

    Args:
        n (int): The number of buckets.

    Attributes:
        estimate (list[float]): [n].
    """

    # The decay of a count with each later count: to a third after 25, so it follows the text within a paragraph.
    FADING = 0.96
    PRIOR = 0.7  # the rate of the first bucket before any count: between prose and code
    WEIGHT = 2.0  # the weight of the prior or the bucket before, in drafts

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted."""
        return any(self.n_verified)

    def count(self, bucket: int, accepted: bool) -> None:
        """Count one draft; earlier counts of the same bucket decay."""
        self.n_verified[bucket] = self.FADING * self.n_verified[bucket] + 1
        self.n_accepted[bucket] = self.FADING * self.n_accepted[bucket] + accepted
        self.estimate = self._estimate()

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        """Count a window, whose positions are the buckets; all earlier counts decay.

        If a draft is accepted, the text is predictable, and the next draft is accepted about as often. So an abandoned depth is
        tried again once the drafts before it are accepted more often.
        """
        self.n_verified = [self.FADING * n for n in self.n_verified]
        self.n_accepted = [self.FADING * n for n in self.n_accepted]
        for i in range(min(n_accepted + 1, n_drafted)):  # drafts after the first rejected one tell nothing
            self.n_verified[i] += 1
            self.n_accepted[i] += i < n_accepted
        self.estimate = self._estimate()

    def _estimate(self) -> list[float]:
        estimates, expected = [], self.PRIOR
        for n_verified, n_accepted in zip(self.n_verified, self.n_accepted):
            expected = (n_accepted + self.WEIGHT * expected) / (n_verified + self.WEIGHT)
            estimates.append(expected)
        return estimates
