"""Acceptance rates that were observed: estimates that forget, since the text changes."""


class Rates:
    """A running estimate of the acceptance rate at each of n ranks, such as the positions in a window.

    What is known of a rank fades towards the estimate of the rank before it.

    Args:
        n (int): The number of ranks.

    Attributes:
        estimate (list[float]): [n].
    """

    FADING = 0.96  # of a count: 25 counts back weigh a third, so a change of the text shows within a paragraph
    PRIOR = 0.7  # of the first rank: between prose and code
    WEIGHT = 2.0  # drafts that the prior and the rank before count for

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted."""
        return any(self.n_verified)

    def count(self, bucket: int, accepted: bool) -> None:
        """Count one draft; earlier ones of the same rank fade."""
        self.n_verified[bucket] = self.FADING * self.n_verified[bucket] + 1
        self.n_accepted[bucket] = self.FADING * self.n_accepted[bucket] + accepted
        self.estimate = self._estimate()

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        """Count a window, whose ranks are its positions; all earlier ones fade.

        So where one draft is accepted, the text is easy, and the next does about as well: a depth that was given up is tried
        again once the drafts before it do well.
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
