"""A plugin starts a run from weights in a format of its own (`initial_weights`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.contract import InitialWeights
from forge_train_kit.weights import fill_model

pytestmark = pytest.mark.unit


class Npz(Plugin):
    """Starts a run from the arrays of an .npz file."""

    api = (1, 0)

    @hookimpl
    def initial_weights(self, path: Path, model: Any, job: Any) -> InitialWeights | None:
        if path.suffix != ".npz":
            return None
        tensors = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        return fill_model(model, job, path, tensors)


def run(folder: Path, *plugins: type[Plugin], **config: Any) -> Any:
    still = {"adamw.lr": 1e-30, "adamw.weight_decay": 0.0}
    return toys.run(folder, *plugins, config={**still, **{key.replace("__", "."): one for key, one in config.items()}})


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Tensor]:
    """The weights of a trained model, which are in `given.npz` too."""
    found = {name: one.clone() + 1 for name, one in run(tmp_path / "before").model.state_dict().items()}
    np.savez(tmp_path / "given.npz", **{name: one.numpy() for name, one in found.items()})
    return found


def test_a_run_starts_from_a_format_of_a_plugin(tmp_path: Path, given: dict[str, Tensor]) -> None:
    found = run(tmp_path, Npz, train__init_from=str(tmp_path / "given.npz"))
    assert all(torch.equal(one, given[name]) for name, one in found.model.state_dict().items())
    (event,) = [one for one in found.events if one["event"] == "initialised"]
    assert event["checkpoint"] == str(tmp_path / "given.npz")


def test_says_what_does_not_fit_and_leaves_out_what_is_asked(tmp_path: Path, given: dict[str, Tensor]) -> None:
    file = tmp_path / "other.npz"
    others = {name: one.numpy() for name, one in given.items() if name != "head.weight"}
    np.savez(file, **{**others, "layers.0.norm.weight": np.ones(3, np.float32), "more": np.ones(2, np.float32)})
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, Npz, train__init_from=str(file))
    assert str(caught.value).splitlines() == [
        f"{file}: its tensors are not those of this model:",
        "  head.weight: missing (23 × 8)",
        "  more: not in this model",
        "  layers.0.norm.weight: 3 stored, 8 in this model",
    ]
    np.savez(file, **others, more=np.ones(2, np.float32))
    options = {"train__init_missing": ["head.*"], "train__init_unexpected": ["more"]}
    found = run(tmp_path, Npz, train__init_from=str(file), **options)
    (event,) = [one for one in found.events if one["event"] == "initialised"]
    assert (event["missing"], event["unexpected"]) == (["head.weight"], ["more"])


def test_a_map_changes_weights_of_any_format(tmp_path: Path, given: dict[str, Tensor]) -> None:
    (tmp_path / "maps.py").write_text(
        "from forge_train_kit.state_map import Renumber\nSWAPPED = Renumber('layers.{i}.{rest*}', (1, 0))\n"
    )
    source = {"train__init_from": str(tmp_path / "given.npz"), "train__init_map": f"{tmp_path}/maps.py:SWAPPED"}
    found = run(tmp_path, Npz, **source).model.state_dict()
    assert torch.equal(found["layers.0.up.weight"], given["layers.1.up.weight"])
    with pytest.raises(ConfigError, match=r"train\.init_map: no enabled plugin changes weights \(initial_weights\)"):
        toys.run(tmp_path, config={key.replace("__", "."): one for key, one in source.items()}, without=["pretrained"])


def test_a_run_resumes_without_the_plugin_of_its_start(tmp_path: Path, given: dict[str, Tensor]) -> None:
    source = {"train.init_from": str(tmp_path / "given.npz")}
    begun = toys.run(tmp_path, Npz, config=source, steps=1)
    again = toys.run(tmp_path, config=source, steps=2, resume=str(begun.run))
    assert again.finished.step == 2


def test_weights_that_are_no_checkpoint_cannot_lie_beneath_one(tmp_path: Path, given: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.only needs a checkpoint .* and .*given\.npz is none"):
        run(tmp_path, Npz, train__init_from=str(tmp_path / "given.npz"), checkpoint__only=["head.*"])


def test_a_path_that_no_plugin_reads_is_an_error_of_the_kernel(tmp_path: Path, given: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"given\.npz: not a run or a checkpoint"):
        run(tmp_path, train__init_from=str(tmp_path / "given.npz"))
