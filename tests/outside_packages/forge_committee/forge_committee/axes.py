"""The axis along which the members of a committee are spread."""

from forge_train import Axis

MEMBERS = Axis("members", meaning="Ranks that share the members of a committee: each holds and trains its own of them.")
