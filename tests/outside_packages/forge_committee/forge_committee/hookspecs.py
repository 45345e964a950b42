"""The hook by which a committee's votes are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forge_train import Job, hookspec

if TYPE_CHECKING:
    from torch import Tensor


class Vote(Protocol):
    """Makes one distribution of those of all members: `count` of the mean of their `ballot`s.

    Ranks add up ballots and never exchange logits, so that a vote costs the same for any number of members.
    """

    def ballot(self, log_probabilities: Tensor) -> Tensor:
        """`[…, vocabulary]` of one or more members → a tensor of that shape, whose mean over members is taken."""
        ...

    def count(self, mean: Tensor) -> Tensor:
        """The mean ballot → log-probabilities."""
        ...


@hookspec("slot", optional=True, default="mean_vote", asked="composition", trials="forge_committee.trials")
def vote(job: Job) -> Vote:
    """How the members' predictions become one."""
    raise AssertionError
