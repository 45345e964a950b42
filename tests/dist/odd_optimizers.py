"""Optimizers of a third party, whose state is not what Adam keeps: each moves the weights by what it remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forge_train import Job, Model, Plugin, hookimpl

LR = 0.02


class Odd(torch.optim.Optimizer):
    """What they share: a group with a learning rate, and a step that is theirs for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.before(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)

    def before(self, group: dict[str, Any]) -> None:
        pass

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def value(x: Tensor) -> float:
    return float(x.full_tensor() if hasattr(x, "full_tensor") else x)


class Scalars(Odd):
    """Numbers, text, nothing, nested tables and lists; one tensor in another precision, and some in a list."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, rate=1.0, note="fresh", last=None, pair=(1, 2.5), on=True)
            state["nested"] = {"deep": {"values": [0.0]}}
            state["exact"] = torch.zeros_like(p, dtype=torch.float64)
            state["recent"] = [torch.zeros_like(p), torch.zeros_like(p, dtype=torch.float64)]
        assert state["note"] == ("fresh" if state["count"] == 0 else f"step {state['count']}")
        assert isinstance(state["pair"], tuple)
        state["count"] += 1
        state["note"] = f"step {state['count']}"
        norm = value(g.norm())
        state["rate"] = 0.9 * state["rate"] + 0.1 / (1 + norm)
        state["nested"]["deep"]["values"].append(norm)
        state["last"] = norm if state["on"] else None
        state["exact"].mul_(0.9).add_(g.double())
        assert state["recent"][1].dtype == torch.float64
        state["recent"] = [state["recent"][1].float(), g.double()]
        p.add_((state["exact"].float() + state["recent"][0]) * (-group["lr"] * state["rate"]))
        p.mul_(1 - 1e-4 * len(state["nested"]["deep"]["values"]) * state["pair"][1])


class Factored(Odd):
    """Rows and columns of a matrix instead of the matrix (Shazeer and Stern 2018, arXiv:1804.04235), a norm that is a
    tensor without a dimension, and a history whose length has nothing to do with the weights."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = g.square() + 1e-8
        if not state:
            state["history"] = torch.zeros(4)
        if p.dim() == 2:
            for name, dim in (("row", 1), ("column", 0)):
                mean = square.mean(dim, keepdim=name == "column")
                state[name] = mean if name not in state else state[name] * 0.9 + mean * 0.1
            scale = (state["row"].unsqueeze(1) * state["column"]).sqrt()
        else:
            state["norm"] = square.sum() if "norm" not in state else state["norm"] * 0.9 + square.sum() * 0.1
            scale = state["norm"].sqrt()
        state["history"] = torch.cat([state["history"][1:], torch.tensor([value(g.norm())])])
        p.add_(g / (scale + 1e-3) * (-0.1 * group["lr"] / (1 + float(state["history"].mean()))))


class Lazy(Odd):
    """Nothing at first; a mean from the third step, and for matrices only; a copy of the weights at the fourth."""

    def before(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["steps"] >= 3 and p.dim() == 2:
            state["mean"] = g.clone() if "mean" not in state else state["mean"] * 0.9 + g
            g = state["mean"]
        if group["steps"] == 4:
            state["slow"] = p.clone()
        p.add_(g * -group["lr"])
        if "slow" in state:
            p.lerp_(state["slow"], 0.1)


class Groups(Odd):
    """What it remembers is the group's: numbers, a list, a tuple, nothing, a tensor; and what is nobody's."""

    def before(self, group: dict[str, Any]) -> None:
        group.setdefault("weights", torch.zeros((), dtype=torch.float64))
        group.setdefault("seen", [])
        group.setdefault("pair", (0, None))
        everybody = self.state.setdefault("everybody", {"steps": 0, "tensor": torch.zeros(3)})  # type: ignore[call-overload]
        everybody["steps"] += 1
        everybody["tensor"] += 1
        group["weights"] += 0.5
        group["seen"].append(float(group["weights"]))
        assert isinstance(group["pair"], tuple)
        group["pair"] = (group["pair"][0] + 1, None)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        everybody = self.state["everybody"]  # type: ignore[index]
        groups = len(self.param_groups)
        steps = everybody["steps"] / groups + float(everybody["tensor"].mean()) / groups
        p.add_(g * (-group["lr"] / (1 + sum(group["seen"]) + group["pair"][0] + steps)))


class Extras(Odd):
    """A state_dict of its own, with tensors beside `state`, and a list with one tensor per parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.means = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "means": list(self.means), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)
        self.means, self.steps = list(state["means"]), state["steps"]

    def before(self, group: dict[str, Any]) -> None:
        self.steps += 1

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameters = [one for each in self.param_groups for one in each["params"]]
        mean = self.means[next(n for n, one in enumerate(parameters) if one is p)]
        mean.mul_(0.9).add_(g)
        p.add_(mean * (-group["lr"] / (1 + self.steps)))


class Own(Odd):
    """Keeps its part of a sharded weight as a tensor like any other: no other layout could make sense of it."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        part = g.to_local() if hasattr(g, "to_local") else g
        state["mean"] = part.clone() if "mean" not in state else state["mean"] * 0.9 + part
        (p.to_local() if hasattr(p, "to_local") else p).add_(state["mean"] * -group["lr"])


class Apart(Odd):
    """A number that differs from rank to rank."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        part = g.to_local() if hasattr(g, "to_local") else g
        state["norm"] = float(part.norm())
        p.add_(g * -group["lr"])


class PerParameter(Odd):
    """One kind of state for every third parameter."""

    before = Lazy.before  # type: ignore[assignment]

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        index = next(n for n, one in enumerate(group["params"]) if one is p)
        (Scalars, Factored, Lazy)[index % 3].move(self, p, g, state, group)  # type: ignore[arg-type]


class Elsewhere(Extras):
    """State that is no parameter's: the groups', nobody's, and beside `state`."""

    def before(self, group: dict[str, Any]) -> None:
        Extras.before(self, group)
        Groups.before(self, group)  # type: ignore[arg-type]

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        Extras.move(self, p, g, state, group)
        Groups.move(self, p, g, state, group)  # type: ignore[arg-type]


class OddOptimizer(Plugin):
    """One of them; which, a subclass says."""

    api = (1, 0)
    optimizer_class: type[Odd]

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        from forge_train_kit.optim import decay_groups

        return self.optimizer_class(decay_groups(model, job, SimpleNamespace(lr=LR, weight_decay=0.1)))


class PerParameterPlugin(OddOptimizer):
    """State of each kind that belongs to a parameter."""

    optimizer_class = PerParameter


class ElsewherePlugin(OddOptimizer):
    """State that belongs to no parameter."""

    optimizer_class = Elsewhere


class OwnPlugin(OddOptimizer):
    """State that only this rank has."""

    optimizer_class = Own


class ApartPlugin(OddOptimizer):
    """A number that only this rank has."""

    optimizer_class = Apart


def placed() -> dict[str, str]:
    """What saved state is read into beside a sharded parameter of 4 × 6."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from forge_train.store.placement import place

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = {"a.weight": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]), "plain": torch.zeros(4)}
    odd = {"plain": ["optimizer.state.a.weight.copy", "optimizer.state.a.weight.list.4"]}
    odd["spread"] = ["optimizer.state.a.weight.table", "optimizer.state.a.weight.norm"]

    def seen(name: str, *shape: int) -> str:
        made = place(f"optimizer.{name}", shape, torch.float64, parameters, odd)
        assert made.shape == shape
        assert made.dtype == torch.float64
        return "".join(str(one) for one in made.placements) if hasattr(made, "placements") else "plain"

    return {
        "as the parameter": seen("state.a.weight.mean", 4, 6),
        "nested": seen("state.a.weight.deep.0.mean", 4, 6),
        "a copy that was no shard": seen("state.a.weight.copy", 4, 6),
        "one in a list": seen("state.a.weight.list.4", 6),
        "rows": seen("state.a.weight.row", 4),
        "columns": seen("state.a.weight.column", 1, 6),
        "another table that was sharded": seen("state.a.weight.table", 9, 9),
        "a number": seen("state.a.weight.step"),
        "a number that was sharded": seen("state.a.weight.norm"),
        "a history": seen("state.a.weight.history", 10),
        "of a plain parameter": seen("state.plain.mean", 4),
        "nobody's": seen("state.everybody.mean", 4),
        "beside the state": seen("means.0", 4, 6),
    }
