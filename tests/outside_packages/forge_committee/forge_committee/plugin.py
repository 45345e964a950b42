"""The committee, the axis that spreads it, and two ways to count its votes. This file imports no torch."""

from __future__ import annotations

from typing import Annotated

from forge_train import Applied, Gt, Phase, Plugin, Problem, Transform, hookimpl, section


class Committee(Plugin):
    """An output layer of several members, each trained on its own, that vote (arXiv:1511.06314).

    Members share the model and differ in their initial weights and, with `bootstrap`, in how often they see each
    sequence. In training, the loss is the mean of their losses. In evaluation and generation they vote; how, the slot
    `vote` decides. Evaluations log `committee.gain`, by how much the vote's loss is below the mean of the members', and
    `committee.disagreement`, the mutual information between member and next token: high where the model does not know.
    """

    api = (1, 0)
    requires = ("vote",)
    facts = {"plan.per_unit": True}

    @section
    class Config:
        members: Annotated[int, Gt(0)] = 4
        """Number of members."""
        bootstrap: bool = False
        """Weigh each sequence for each member by a Poisson number of mean 1 (online bagging, Oza & Russell 2001)."""

    @hookimpl
    def check_config(self, config):
        members, ranks = self.config.members, getattr(config.parallel, "members", 1)
        if ranks > 0 and members % ranks:
            yield Problem(
                "parallel.members", f"{ranks} ranks can't share {members} members evenly (committee.members)."
            )

    @hookimpl
    def head(self, spec, job):
        from forge_committee.head import CommitteeHead
        from forge_committee.hookspecs import vote

        return CommitteeHead(spec, self.config.members, vote(job), job)

    @hookimpl
    def loss(self, job):
        from forge_committee.head import CommitteeLoss

        self.losses = CommitteeLoss(self.config.members, self.config.bootstrap, job)
        return self.losses

    @hookimpl
    def metrics(self):
        from forge_train_kit.metrics import Ratio

        self.losses.gain, self.losses.disagreement = Ratio(), Ratio()
        return {"gain": self.losses.gain, "disagreement": self.losses.disagreement}


class Members(Plugin):
    """Spreads the members of a committee over the ranks of the axis `members`."""

    api = (1, 0)
    layout = True
    requires = ("committee",)
    provides = ("members",)
    facts = {"plan.per_unit": True}

    @hookimpl
    def parallelize(self, job):
        if job.dist.layout.size("members") == 1:
            return None

        def apply(part):
            from forge_committee.head import spread

            return Applied(part, spread(part, job.dist.mesh("dense", "members")), note="committee")

        return Transform(Phase.TENSOR, "members", apply, covers=("members",))


class MeanVote(Plugin):
    """Averages the members' probabilities (a linear opinion pool)."""

    api = (1, 0)
    facts = {"committee.rule": "linear", "check.example": ("plugins=committee",)}

    @hookimpl
    def vote(self):
        from forge_committee.head import LinearPool

        return LinearPool()


class LogVote(Plugin):
    """Averages the members' log-probabilities (a logarithmic opinion pool): a token that one member rules out loses."""

    api = (1, 0)
    facts = {"committee.rule": "log", "check.example": ("plugins=committee",)}

    @hookimpl
    def vote(self):
        from forge_committee.head import LogPool

        return LogPool()


class Disagreement(Plugin):
    """Offers the members' disagreement as a measure of uncertainty, for `selective` of the package forge-selective."""

    api = (1, 0)
    requires = ("committee", "selective")

    @hookimpl
    def uncertainty(self):
        from forge_committee.head import disagreement

        return disagreement
