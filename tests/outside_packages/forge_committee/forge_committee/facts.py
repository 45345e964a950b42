"""What the command `forge votes` wants to know of a plugin that counts votes."""

from forge_train_kit.facts import Fact

RULE = Fact(
    "committee.rule", str, "What the vote averages: `linear` (probabilities) or `log` (their logarithms).", literal=True
)
