"""Observed acceptance rates: running estimates, in which old counts fade because the text changes."""


class Rates:
    """A running estimate of the acceptance rate in each of n buckets, such as the positions in a window.

    Without new counts, the estimate of a bucket fades towards that of the bucket before it.

    Args:
        n (int): The number of buckets.

    Attributes:
        estimate (list[float]): [n].
    """

    # The weight of a count after the next one: a third after 25, so it follows the text within a paragraph.
    FADING = 0.96
    PRIOR = 0.7  # the rate of the first bucket before any count: between prose and code
    WEIGHT = 2.0  # the number of drafts that the prior, or the bucket before, counts as

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted."""
        return any(self.n_verified)

    def count(self, bucket: int, accepted: bool) -> None:
        """Count one draft; earlier counts of the same bucket fade."""
        self.n_verified[bucket] = self.FADING * self.n_verified[bucket] + 1
        self.n_accepted[bucket] = self.FADING * self.n_accepted[bucket] + accepted
        self.estimate = self._estimate()

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        """Count a window, whose buckets are its positions; all earlier counts fade.

        Where a draft is accepted, the text is easy and the next draft does about as well. So an abandoned depth is tried
        again once the drafts before it are accepted more often.
        """
        self.n_verified = [self.FADING * n for n in self.n_verified]
        self.n_accepted = [self.FADING * n for n in self.n_accepted]
        for i in range(min(n_accepted + 1, n_drafted)):  # nothing is learned of drafts after the first rejected one
            self.n_verified[i] += 1
            self.n_accepted[i] += i < n_accepted
        self.estimate = self._estimate()

    def _estimate(self) -> list[float]:
        estimates, expected = [], self.PRIOR
        for n_verified, n_accepted in zip(self.n_verified, self.n_accepted):
            expected = (n_accepted + self.WEIGHT * expected) / (n_verified + self.WEIGHT)
            estimates.append(expected)
        return estimates
