"""What `forge plugins check` tries of a plugin that counts votes."""

import torch


def is_a_distribution(bench):
    vote = bench.answer("vote")
    scores = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    total = vote.count(vote.ballot(scores).mean(0)).exp().sum(-1)
    assert torch.allclose(total, torch.ones(5), atol=1e-5), f"probabilities sum to {total.tolist()}"


def agrees_with_the_unanimous(bench):
    vote = bench.answer("vote")
    one = torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    counted = vote.count(vote.ballot(one.expand(4, 5, 7)).mean(0))
    assert torch.allclose(counted, one, atol=1e-5), "four equal members are not counted as one"


TRIALS = {
    "vote": [
        ("gives a distribution", is_a_distribution),
        ("agrees with members that agree", agrees_with_the_unanimous),
    ]
}
