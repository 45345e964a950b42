"""Problems between values, found without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_train import ConfigError, Problem
from forge_train.base.format import format_list

from ..hookspecs import ExpertGroups, expert_groups

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig

    from ..moe import MoE


def check(config: MoE.Config, run: RunConfig) -> Iterator[Problem]:
    """Problems that involve several values."""
    experts, parallel, train = config.experts, run.parallel, run.train
    if config.top_k > experts:
        yield Problem("moe.top_k", f"a token can't choose {config.top_k} of {experts} experts (moe.experts).")
    as_trained = train.init_from and not train.init_map  # an imported model keeps the rule it was trained with
    if config.top_k == 1 and config.normalise and config.router != "expert_choice" and not as_trained:
        yield Problem(
            "moe.normalise",
            "with top_k = 1 the weight would always be 1, and the router would learn nothing; set it to false.",
        )
    if experts % config.groups:
        yield Problem("moe.groups", f"{config.groups} groups do not divide {experts} experts (moe.experts).")
    elif config.top_groups > config.groups:
        yield Problem("moe.top_groups", f"a token can't choose from {config.top_groups} of {config.groups} groups.")
    elif config.top_groups * (experts // config.groups) < config.top_k <= experts:
        yield Problem(
            "moe.top_groups",
            f"{config.top_groups} groups of {experts // config.groups} experts hold fewer than top_k = {config.top_k}.",
        )
    if config.group_best != 2 and config.groups == 1:
        yield Problem("moe.group_best", "has no effect with groups = 1; remove it.")
    if experts % parallel.ep:
        yield Problem("parallel.ep", f"{parallel.ep} ranks do not divide {experts} experts (moe.experts).")
    split = parallel.cp * (parallel.tp if parallel.etp == 1 else 1)
    if train.sequence % split:
        axes = " × ".join(axis for axis in ("cp", "tp") if getattr(parallel, axis) > 1)
        yield Problem(
            "train.sequence",
            f"each of {split} ranks ({axes}) routes its share of a sequence, but {split} does not divide "
            f"{train.sequence}.",
        )
    for key, default in (("alpha", 1.702), ("limit", 7.0)):
        if config.activation != "clamped_swiglu" and getattr(config, key) != default:
            yield Problem(f"moe.{key}", f"has no effect with moe.activation = {config.activation!r}; remove it.")
    if config.bias and parallel.etp > 1:
        yield Problem(
            "parallel.etp",
            "experts with biases (moe.bias) can't be split within an expert; set it to 1, and use parallel.ep instead.",
        )
    if config.router == "expert_choice":
        yield from _expert_choice(config, run)
    mean = (train.micro_batch or train.global_batch) * train.sequence * config.top_k / experts
    if config.capacity and config.capacity * mean < 1:
        yield Problem(
            "moe.capacity",
            f"{config.capacity:g} × the mean of {mean:g} tokens of a micro-batch leaves an expert less than one token: "
            "nearly all would be dropped.",
        )


def groups_of(config: MoE.Config, job: Job) -> ExpertGroups | None:
    """The groups into which a plugin divides tokens and experts; None if no plugin does.

    Raises:
        ConfigError: if two plugins do, or groups do not fit the experts, or the router.
    """
    answers = expert_groups(config.experts, job)
    if not answers:
        return None
    if len(answers) > 1:
        raise ConfigError(f"Plugins {format_list(name for name, _ in answers)} all divide experts; enable one of them.")
    ((name, groups),) = answers
    sizes = [list(groups.of_experts).count(group) for group in range(max(groups.of_experts, default=0) + 1)]
    if sum(sizes) != config.experts or len(groups.of_experts) != config.experts:
        raise ConfigError(
            f"Plugin {name!r} divides {len(groups.of_experts)} experts, and moe.experts = {config.experts}."
        )
    if min(sizes) < config.top_k:
        raise ConfigError(
            f"moe.top_k: plugin {name!r} makes groups of {format_list(sizes)} experts, and a token can't choose "
            f"{config.top_k} of {min(sizes)}."
        )
    if config.router == "expert_choice":
        raise ConfigError(
            f"moe.router: under expert_choice experts choose among all tokens, and plugin {name!r} divides them into "
            "groups; choose another router."
        )
    if config.groups > 1:
        raise ConfigError(f"moe.groups: plugin {name!r} divides the experts; set it to 1.")
    return groups


def _expert_choice(config: MoE.Config, run: RunConfig) -> Iterator[Problem]:
    if run.parallel.tp > 1 and run.parallel.etp == 1:
        yield Problem(
            "moe.router",
            "under expert_choice each expert compares all tokens of a micro-batch, but with parallel.tp = "
            f"{run.parallel.tp} a rank has only a share of them; set parallel.etp = {run.parallel.tp}.",
        )
    if run.parallel.cp > 1:
        yield Problem(
            "moe.router",
            "under expert_choice each expert compares all tokens of a micro-batch, but with parallel.cp = "
            f"{run.parallel.cp} a rank has only a slice of them; choose another router, or set parallel.cp = 1.",
        )
    unused = {"bias_speed": config.bias_speed, "balance": config.balance}
    for key, value in unused.items():
        if value:
            reason = "has no effect under expert_choice, where every expert has the same load; set it to 0."
            yield Problem(f"moe.{key}", reason)
    if config.groups > 1:
        yield Problem("moe.groups", "has no effect under expert_choice, where tokens don't choose experts.")
