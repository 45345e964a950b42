"""Parameter groups: what decays, and what a user's patterns change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge_train import ConfigError
from forge_train_kit.optim import decay_groups, parameter_groups
from forge_train_kit.sections import ParameterGroup

pytestmark = [pytest.mark.unit]

JOB: Any = SimpleNamespace(
    dist=SimpleNamespace(complete=True, gather_stages=lambda value: [value]),
    hooks=SimpleNamespace(provider=lambda slot: "adamw"),
)
SETTINGS: Any = {"lr": 0.2, "weight_decay": 0.1}


def model(**parameters: nn.Parameter) -> Any:
    return SimpleNamespace(
        named_parameters=parameters.items, named_modules=lambda: (), roles={"table": "embedding", "head": "head"}
    )


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*(shape or (2, 2))))


def grouped(
    *patterns: ParameterGroup, decay_embeddings: bool = False, job: Any = JOB, **parameters: nn.Parameter
) -> list[dict[str, Any]]:
    config = SimpleNamespace(decay_embeddings=decay_embeddings, groups=patterns, **SETTINGS)
    return decay_groups(model(**parameters), job, config)


def of(groups: list[dict[str, Any]], key: str) -> dict[int, Any]:
    return {id(p): group.get(key) for group in groups for p in group["params"]}


@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_matrices_decay_and_vectors_do_not(decay_embeddings: bool) -> None:
    table, weight, head, norm = matrix(), matrix(), matrix(), matrix(2)
    groups = grouped(table=table, weight=weight, head=head, norm=norm, decay_embeddings=decay_embeddings)
    assert of(groups, "weight_decay") == {
        id(weight): 0.1,
        id(head): 0.1,
        id(norm): 0.0,
        id(table): 0.1 if decay_embeddings else 0.0,
    }
    assert len(groups) == 2


def test_frozen_parameters_are_left_out() -> None:
    ((group),) = grouped(frozen=matrix().requires_grad_(False), weight=matrix())
    assert len(group["params"]) == 1


def test_each_mesh_has_its_own_group() -> None:
    here, there = matrix(), matrix()
    there.device_mesh = "expert"  # type: ignore[attr-defined]
    assert len(grouped(here=here, there=there)) == 2


def test_a_pattern_changes_the_rate_and_on_demand_the_decay() -> None:
    slow, norm, kept, other = matrix(), matrix(2), matrix(), matrix()
    groups = grouped(
        ParameterGroup(match="slow.*", lr=0.5),
        ParameterGroup(match="ke?t", weight_decay=0.3),
        **{"slow.weight": slow, "slow.norm": norm, "kept": kept, "other": other},
    )
    assert of(groups, "lr") == {id(slow): 0.1, id(norm): 0.1, id(kept): 0.2, id(other): 0.2}
    assert of(groups, "weight_decay") == {id(slow): 0.1, id(norm): 0.0, id(kept): 0.3, id(other): 0.1}
    assert of(groups, "match") == {id(slow): "slow.*", id(norm): "slow.*", id(kept): "ke?t", id(other): None}
    assert groups[0]["params"] == [other], "the rest comes first: its learning rate is the one that is logged"


def test_a_decay_of_its_own_reaches_vectors() -> None:
    norm = matrix(2)
    (group,) = grouped(ParameterGroup(match="norm", weight_decay=0.3), norm=norm)
    assert group["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (("heed",), r"adamw\.groups: 'heed' matches no trainable parameter\. Did you mean 'head'\?"),
        (("*", "h*"), r"adamw\.groups: '\*' and 'h\*' both match 'head'\. Each parameter belongs to one group\."),
        (("frozen",), "'frozen' matches no trainable parameter"),
        (("head",), r"adamw\.groups: 'head' changes nothing; set its lr or its weight_decay\."),
    ],
)
def test_patterns_that_are_mistakes(patterns: tuple[str, ...], says: str) -> None:
    frozen = matrix().requires_grad_(False)
    with pytest.raises(ConfigError, match=says):
        grouped(*(ParameterGroup(match=one) for one in patterns), head=matrix(), frozen=frozen)


def test_the_stages_of_a_pipeline_have_the_same_groups_and_one_matches_for_all() -> None:
    said: list[Any] = [None, None]
    together = threading.Barrier(2, timeout=20)

    def stage(number: int) -> list[dict[str, Any]]:
        def gather(value: Any) -> list[Any]:
            said[number] = value
            together.wait()
            everybody = list(said)
            together.wait()
            return everybody

        job: Any = SimpleNamespace(dist=SimpleNamespace(complete=True, gather_stages=gather), hooks=JOB.hooks)
        own = {"first": matrix()} if number == 0 else {"second": matrix(), "norm": matrix(2)}
        return grouped(ParameterGroup(match="second", lr=2.0), job=job, **own)

    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(stage, (0, 1))
    assert [len(group["params"]) for group in here] == [1, 0, 0]
    assert [len(group["params"]) for group in there] == [0, 1, 1]
    for one, other in zip(here, there, strict=True):
        assert {**one, "params": []} == {**other, "params": []}


def test_settings_of_any_kind_make_groups() -> None:
    groups = parameter_groups(model(a=matrix(), b=matrix(3)), JOB, lambda name, p: {"lr": 1.0, "kind": p.ndim})
    assert [group["kind"] for group in groups] == [2, 1]
