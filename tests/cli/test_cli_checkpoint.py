"""`forge checkpoint prune`, `move` and `diff`."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forge_cli
from forge_cli import Ended
from forge_command import Forge
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.seal import ALONE, check
from forge_train_kit.hf.folder import Folder
from forge_train_kit.lock import take
from forge_train_tools.offline import differences
from full_disk import full_for
from saving import save_step

pytestmark = [pytest.mark.unit]


def save(folder: Path, step: int, **state: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    held = {"model": {"a": torch.full((3, 2), float(step))}, "progress": {"step": step, "tokens": 8 * step}, **state}
    return save_step(folder, step, held, ALONE, beside=[]).path


@pytest.fixture
def run(folder: Path) -> Path:
    """A run with checkpoints of steps 1 to 6."""
    path = folder / "runs" / "first"
    for step in range(1, 7):
        save(path / "checkpoints", step, best={"metric": "evaluation.loss", "value": abs(step - 3.0)})
    (path / "config.toml").write_text("[checkpoint]\nkeep = 3\n", encoding="utf-8")
    (path / "plugins.json").write_text("[]", encoding="utf-8")
    return path


def steps(run: Path) -> list[int]:
    return [saved.step for saved in checkpoint.found(run / "checkpoints")]


def flip(path: Path) -> None:
    data = next(path.glob("rank-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


# -- prune ----------------------------------------------------------------------------------------


def test_prune_shows_and_removes_what_the_run_does_not_keep(forge: Forge, run: Path) -> None:
    shown = forge("checkpoint", "prune", str(run), "--dry-run").out
    assert [line.split()[0] for line in shown.splitlines()] == [
        str(run / "checkpoints" / f"step-0000000{step}") for step in (3, 2, 1)
    ]
    assert "would be removed" in shown
    assert steps(run) == [6, 5, 4, 3, 2, 1]
    removed = forge("checkpoint", "prune", str(run), "--keep-every", "2", "--json").json
    assert (removed["dry_run"], [one["step"] for one in removed["removed"]]) == (False, [3, 1])
    assert steps(run) == [6, 5, 4, 2]
    assert "is removed" in forge("checkpoint", "prune", str(run), "--keep", "1").out
    assert steps(run) == [6]
    assert "nothing to remove" in forge("checkpoint", "prune", str(run), "--keep", "1").out
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(one["event"], one["step"]) for one in events] == [("checkpoint_pruned", step) for step in (3, 1, 5, 4, 2)]
    assert not list((run / "checkpoints").glob(".*"))
    assert not list(run.glob(".lock.*"))


def test_prune_keeps_what_the_run_is_told_to_keep(forge: Forge, run: Path) -> None:
    (run / "config.toml").write_text(
        '[checkpoint]\nkeep = 1\nearly = 3\nbest = "evaluation.loss"\nkeep_best = 2\n', encoding="utf-8"
    )
    forge("checkpoint", "prune", str(run))
    assert steps(run) == [6, 3, 2, 1]  # the newest, the powers of two up to 3, and of the best two the one left


def test_prune_never_takes_the_last_whole_one(forge: Forge, run: Path) -> None:
    for step in (6, 5, 3):
        flip(run / "checkpoints" / f"step-0000000{step}")
    forge("checkpoint", "prune", str(run), "--keep", "1")
    assert steps(run) == [6, 5, 4]  # a damaged one that is newer is for the user to look at
    flip(run / "checkpoints" / "step-00000004")
    assert "no checkpoint is whole" in forge("checkpoint", "prune", str(run), "--keep", "1", fails=2).err
    assert steps(run) == [6, 5, 4]


def test_prune_refuses_what_it_can_not_know(forge: Forge, run: Path, folder: Path) -> None:
    assert "is not a run" in forge("checkpoint", "prune", str(folder), fails=2).err
    forge("checkpoint", "prune", str(run), "--keep", "0", fails=2)
    (run / "config.toml").write_text("[checkpoint]\nkeep = 'x'\n", encoding="utf-8")
    assert "checkpoint.keep: expected int, found 'x'." in forge("checkpoint", "prune", str(run), fails=2).err
    (run / "config.toml").write_text("", encoding="utf-8")
    lock = take(run)
    try:
        assert "is training this run" in forge("checkpoint", "prune", str(run), fails=2).err
    finally:
        lock.release()
    assert steps(run) == [6, 5, 4, 3, 2, 1]


# -- move -----------------------------------------------------------------------------------------


def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other folder is on another file system."""
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("across", [False, True])
def test_a_checkpoint_is_moved_whole(
    forge: Forge, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, across: bool
) -> None:
    if across:
        other_disk(monkeypatch)
    path, new = run / "checkpoints" / "step-00000006", folder / "kept" / "best"
    assert forge("checkpoint", "move", str(path), str(new)).out == f"{new}: whole\n"
    assert check(new, contents=True) == ""
    assert checkpoint.load(new, {}, ALONE)["model"]["a"].eq(6).all()
    assert steps(run) == [5, 4, 3, 2, 1]
    assert (run / "checkpoints" / "latest").read_text() == "step-00000005\n"
    assert not [*(run / "checkpoints").glob(".*"), *new.parent.glob(".*"), *run.glob(".lock.*")]


def test_what_can_not_be_moved_stays(forge: Forge, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "checkpoints" / "step-00000006"
    new = folder / "new"

    def says(*arguments: Path) -> str:
        return forge("checkpoint", "move", *map(str, arguments), fails=2).err

    assert "is a run, and may have several checkpoints" in says(run, new)
    assert "exists; name a new folder" in says(path, run)
    assert "is inside the checkpoint itself" in says(path, path / "inside")
    assert "names another step: this checkpoint is from step 6" in says(path, folder / "step-00000007")
    flip(run / "checkpoints" / "step-00000005")
    assert "not a whole checkpoint" in says(run / "checkpoints" / "step-00000005", new)
    other_disk(monkeypatch)
    real = shutil.copytree

    def rots(*arguments: Any, **more: Any) -> Any:
        copy = real(*arguments, **more)
        flip(Path(copy))
        return copy

    monkeypatch.setattr(shutil, "copytree", rots)
    said = forge("checkpoint", "move", str(path), str(new), fails=1).err
    assert "the copy can't be read back: rank-00000-0.safetensors has other contents" in said

    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    said = forge("checkpoint", "move", str(path), str(new), fails=1).err
    assert f"{new}: can't be written: No space left on device. {path} is unchanged." in said
    assert check(path, contents=True) == ""
    assert not list(folder.glob("*new*"))


def test_a_run_that_trains_keeps_its_newest_checkpoint(forge: Forge, run: Path, folder: Path) -> None:
    lock = take(run)
    try:
        newest = run / "checkpoints" / "step-00000006"
        said = forge("checkpoint", "move", str(newest), str(folder / "new"), fails=2).err
        assert f"{newest} is its newest whole checkpoint, which it may need." in said
        forge("checkpoint", "move", str(run / "checkpoints" / "step-00000002"), str(folder / "new"))
    finally:
        lock.release()
    assert steps(run) == [6, 5, 4, 3, 1]


# -- diff -----------------------------------------------------------------------------------------


def diff(*arguments: object, code: int = 0) -> Ended:
    ended = forge_cli.forge("checkpoint", "diff", *arguments)
    assert (ended.code, ended.err) == (code, "")
    return ended


def test_diff_says_which_tensors_differ_and_by_how_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "PIECE", 4)  # so that a tensor takes several
    base = torch.arange(1.0, 11.0)
    changed = base.clone()
    changed[9] += 3
    nan = torch.tensor([1.0, float("nan")])
    first = {
        "same": base,
        "changed": base,
        "shape": base,
        "gone": base,
        "nan": nan,
        "dtype": base,
        "lost": nan,
        "codes": torch.tensor([1, 2], dtype=torch.uint8),
        "zero": torch.zeros(2),
    }
    second = {
        "same": base,
        "changed": changed,
        "shape": base.reshape(2, 5),
        "new": base,
        "nan": nan,
        "dtype": base.bfloat16(),
        "lost": torch.ones(2),
        "codes": torch.tensor([1, 255], dtype=torch.uint8),
        "zero": torch.tensor([0.0, 2.0]),
    }
    a = save(folder / "a", 1, model=first, config={"adamw.lr": 0.1, "x": 1}, odd={}, enabled=[])
    b = save(folder / "b", 2, model=second, config={"adamw.lr": 0.2, "x": 1}, odd={}, enabled=[])
    found = diff(a, b, "--json", code=1).json
    assert (found["same"], found["equal"]) == (False, 2)
    tensors = {one["name"].removeprefix("model."): one for one in found["tensors"]}
    assert tensors.keys() == {"changed", "shape", "gone", "new", "lost", "codes", "zero", "dtype"}
    kinds = {name: one["kind"] for name, one in tensors.items() if one["kind"] != "values"}
    assert kinds == {"shape": "shape", "gone": "only in the first", "new": "only in the second"}
    assert (tensors["changed"]["max_abs"], tensors["changed"]["values"]) == (3.0, 1)
    assert tensors["changed"]["relative"] == pytest.approx(3 / float(base.norm()))
    assert tensors["shape"]["shapes"] == [[10], [2, 5]]
    assert (tensors["dtype"]["dtypes"], tensors["dtype"]["values"]) == (["float32", "bfloat16"], 0)
    assert (tensors["codes"]["max_abs"], tensors["codes"]["values"]) == (253.0, 1)
    assert tensors["zero"]["not_finite"] == {"relative": "inf"}
    assert tensors["lost"]["not_finite"]["max_abs"] == "inf"
    state = {one["key"]: (one["first"], one["second"]) for one in found["state"]}
    assert state == {"adamw.lr": (0.1, 0.2), "step": (1, 2), "tokens": (8, 16)}
    shown = diff(a, b, code=1).out
    assert "2 tensors are equal to the bit, 8 differ." in shown
    assert "float32 and bfloat16" in shown
    assert "[10] and [2, 5]" in shown


def test_diff_of_the_same_says_so(run: Path, folder: Path) -> None:
    copy = shutil.copytree(run / "checkpoints" / "step-00000006", folder / "copy")
    assert diff(run, copy).out == "1 tensors are equal to the bit, 0 differ.\n"
    assert diff(run, copy, "--json").json["same"] is True
    older = run / "checkpoints" / "step-00000005"
    weights = diff(copy, older, "--weights", "--json", code=1).json
    assert (weights["state"], weights["tensors"][0]["max_abs"]) == ([], 1.0)


def test_diff_holds_one_tensor_of_each_in_memory(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {f"layer{n}": torch.ones(1000) for n in range(10)}
    a, b = save(folder / "a", 1, model=model), save(folder / "b", 1, model=model)
    read: list[str] = []
    real: Callable[..., Any] = differences.read_range

    def read_range(path: Path, name: str, *arguments: Any) -> Any:
        read.append(name)
        return real(path, name, *arguments)

    monkeypatch.setattr(differences, "read_range", read_range)
    monkeypatch.setattr(checkpoint, "load", None)
    diff(a, b)
    assert read == [name for name in sorted(f"model.{name}" for name in model) for _ in range(2)]


# -- export at the end of a run -------------------------------------------------------------------


def test_train_exports_the_model_of_a_run_that_is_done(forge: Forge, folder: Path) -> None:
    def stored(run: Path) -> dict[str, Any]:
        return Folder.open(run / "export").tensors | {"w": Folder.open(run / "export").read("model.norm.weight")}

    command = ("train", "tiny.toml", "--name", "first", "--export")
    assert "Exported to runs/first/export: " in forge(*command).out
    run = folder / "runs" / "first"
    first = stored(run)
    recorded = forge("runs", "show", str(run), "--json").json["artifacts"]
    assert "export/model.safetensors" in {one["path"] for one in recorded}
    forge(*command, "-q")  # is done already, and says the same
    assert torch.equal(stored(run)["w"], first["w"])
    forge(*command, "-q", "-s", "train.steps=8")
    assert not torch.equal(stored(run)["w"], first["w"])
    forge("checkpoint", "export", str(run), str(folder / "again"))
    assert (folder / "again" / "model.safetensors").read_bytes() == (run / "export/model.safetensors").read_bytes()
    assert not list(run.glob(".export*"))


def test_an_export_that_fails_is_told_and_the_run_is_done(forge: Forge, folder: Path) -> None:
    command = ("train", "tiny.toml", "--name", "first", "--export", "-q")
    run = folder / "runs" / "first"
    with full_for("model.safetensors", below=".new"):
        said = forge(*command, fails=1).err
    assert "export.new: can't be written: No space left on device" in said
    assert not list(run.glob("*export*"))
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "done"
    forge(*command)
    assert (run / "export" / "model.safetensors").is_file()


def test_a_model_that_can_not_be_exported_is_refused_before_it_is_trained(forge: Forge, folder: Path) -> None:
    (folder / "toy.toml").write_text("[train]\nsteps = 1\n", encoding="utf-8")
    said = forge("train", "toy.toml", "-p", "toys:ToyModel,toys:ToyData", "--name", "toy", "--export", fails=2).err
    assert "--export: no enabled plugin can write the model in Hugging Face layout (export_hf)." in said
    assert not (folder / "runs" / "toy").exists()
