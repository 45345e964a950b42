"""The modules and functions of a committee."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_train import MASKED, Init

SHARES = tuple(accumulate(math.exp(-1) / math.factorial(k) for k in range(9)))  # no tensor: it would be on meta


class LinearPool:
    def ballot(self, log_probabilities: Tensor) -> Tensor:
        return log_probabilities.exp()

    def count(self, mean: Tensor) -> Tensor:
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


class LogPool:
    def ballot(self, log_probabilities: Tensor) -> Tensor:
        return log_probabilities

    def count(self, mean: Tensor) -> Tensor:
        return mean.log_softmax(-1)


def along_members(job):
    """Two functions: the sum over the ranks that share a committee, and the same tensor, whose gradient is that sum."""
    if job.dist.layout.size("members") == 1:
        return (lambda x: x), (lambda x: x)

    def summed(x):
        return job.dist.all_reduce(x.contiguous().clone(), axis="members")

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return summed(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return summed(gradient)

    return Sum.apply, Shared.apply


class CommitteeHead(nn.Module):
    """Hidden states → the vote's log-probabilities; with `each`, those of this rank's members, `[members, …]`."""

    def __init__(self, spec, members, vote, job):
        super().__init__()
        self.members, self.std, self.divisor, self.soft_cap = members, spec.std, spec.divisor, spec.soft_cap
        self.vote, (self.sum, self.shared) = vote, along_members(job)
        self.weight = nn.Parameter(torch.empty(members, spec.vocabulary, spec.dim))

    def initial(self, name):
        return Init("normal", std=self.std)

    def forward(self, hidden: Tensor, each: bool = False) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        logits = torch.einsum("bsd,mvd->mbsv", self.shared(hidden), weight.to(hidden.dtype)).float() / self.divisor
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        scores = logits.log_softmax(-1)
        return scores if each else self.counted(scores)

    def counted(self, scores: Tensor) -> Tensor:
        return self.vote.count(self.sum(self.vote.ballot(scores).sum(0)) / self.members)

    def flops_per_token(self, sequence):
        return 6 * self.weight.numel()


def spread(part: nn.Module, mesh) -> tuple[str, ...]:
    head = getattr(part, "head", None)
    if not isinstance(head, CommitteeHead):
        return ()
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    return ("head.weight",)


def entropy(scores: Tensor) -> Tensor:
    return -(scores.exp() * scores).sum(-1)


def disagreement(part: nn.Module, hidden: Tensor, batch) -> Tensor:
    """The mutual information between member and token at each position, as a share of its largest value."""
    head = part.head
    scores = head(hidden, each=True)
    spent = entropy(head.counted(scores)) - head.sum(entropy(scores).sum(0)) / head.members
    return (spent / math.log(max(head.members, 2))).clamp(0, 1)


class CommitteeLoss:
    """In training the mean of the members' losses, in evaluation the vote's loss."""

    gain = disagreement = None

    def __init__(self, members, bootstrap, job):
        self.members, self.bootstrap, self.job = members, bootstrap, job
        self.size, self.sum = job.dist.layout.size("members"), along_members(job)[0]

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        whole = isinstance(head, CommitteeHead)  # any other head is a committee of one
        scores = head(hidden, each=True) if whole else head(hidden).float().log_softmax(-1)[None]
        members, total = (self.members, self.sum) if whole else (1, lambda x: x)
        known, targets = labels != MASKED, labels.clamp_min(0)
        losses = -scores.gather(-1, targets.expand(len(scores), *targets.shape)[..., None])[..., 0] * known
        if head.training:
            rows = losses.sum(-1)
            if self.bootstrap and self.job.step.batch is not None:
                rows = rows * self.weights(self.job.step.batch.sample_ids, len(rows), rows)
            return total(rows.sum() / members)
        vote = head.counted(scores) if whole else scores[0]
        loss = -(vote.gather(-1, targets[..., None])[..., 0] * known).sum()
        if self.gain is not None:
            mean = total((losses.sum() / members).detach())
            inner = total((entropy(scores).sum(0) / members).detach())
            self.gain.update(mean - loss.detach(), known)
            self.disagreement.update((entropy(vote.detach()) - inner) * known, known)
        return loss

    def weights(self, samples: Tensor, count: int, like: Tensor) -> Tensor:
        """How often each of this rank's members sees each sequence: a function of seed, member and sequence alone."""
        first = count * (self.job.dist.mesh("dense", "members").get_local_rank() if self.size > 1 else 0)
        member = torch.arange(first, first + count, device=samples.device)[:, None]
        x = samples * 0x9E3779B97F4A7C1 + member * 0x632BE59BD9B4E01 + self.job.seed * 0x2545F4914F6CDD1
        for _ in range(2):
            x = (x ^ (x >> 31)) * 0x5851F42D4C957F2
        uniform = ((x ^ (x >> 29)) & 0xFFFFFFFF).double() / 2**32
        return torch.bucketize(uniform, uniform.new_tensor(SHARES)).to(like.dtype)
