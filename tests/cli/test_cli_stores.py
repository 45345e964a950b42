"""`forge checkpoint` and `--resume` with addresses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import toys
from bucket import bucket, keys
from forge_cli import Ended, forge, one_message
from forge_train.checkpoint.checkpoint import check, found
from forge_train_kit.stores.store import Store

pytestmark = [pytest.mark.unit]

RUN = "bucket://b/first"
TWO, FOUR = f"{RUN}/checkpoints/step-00000002", f"{RUN}/checkpoints/step-00000004"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A mirror with steps 2 and 4 of a run; nothing else is left of it."""
    monkeypatch.chdir(tmp_path)
    more = {"checkpoint.every": 2, "checkpoint.keep": 2, "checkpoint.mirror": "bucket://b", "checkpoint.keep_every": 4}
    config = toys.write_config(tmp_path, **more)
    with bucket(tmp_path / "bucket"):
        assert forge("train", config, "--name", "first", "-q").code == 0
        shutil.rmtree(tmp_path / "runs")
        yield tmp_path


def damage(folder: Path, key: str) -> None:
    """Change one byte of an object."""
    (file,) = (file for file in (folder / "bucket").iterdir() if file.name.endswith(key))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rows(ended: Ended) -> list[tuple[str, str, bool]]:
    return [(row["name"], row["problem"], row["latest"]) for row in ended.json]


def test_listing_and_verifying_a_run_at_an_address(folder: Path) -> None:
    four, two = ("step-00000004", "", True), ("step-00000002", "", False)
    assert rows(forge("checkpoint", "list", RUN, "--json")) == [four, two]
    assert forge("checkpoint", "verify", RUN).out.splitlines() == [f"{FOUR}: whole", f"{TWO}: whole"]
    damage(folder, "step-00000004%2Frank-00000-0.safetensors")
    assert rows(forge("checkpoint", "list", f"{RUN}/checkpoints", "--json")) == [four, two]
    assert "has other contents than were saved" in (shown := forge("checkpoint", "verify", FOUR)).out
    assert shown.code == 1
    key = next(file for file in (folder / "bucket").iterdir() if file.name.endswith("step-00000004%2Fstate.json"))
    key.write_bytes(key.read_bytes()[:-9])
    (damaged, problem, _), whole = rows(forge("checkpoint", "list", RUN, "--json"))
    assert (damaged, whole) == ("step-00000004", ("step-00000002", "", True))
    assert problem.startswith("state.json has ")


def test_what_a_checkpoint_at_an_address_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert forge("checkpoint", "inspect", TWO, "--json").json["step"] == 2
    assert forge("checkpoint", "diff", RUN, FOUR).code == 0
    assert forge("checkpoint", "diff", RUN, TWO).code == 1
    assert list(temporary.iterdir()) == []


def test_pruning_a_run_at_an_address(folder: Path) -> None:
    shown = forge("checkpoint", "prune", RUN, "--keep", 1, "--dry-run", "--json").json
    assert [one["path"] for one in shown["removed"]] == [TWO]
    assert forge("checkpoint", "prune", RUN).out == f"{RUN}: there is nothing to remove.\n"
    assert "is removed" in forge("checkpoint", "prune", RUN, "--keep", 1).out
    assert [stored.step for stored in Store.of_run("bucket://b", "first").found()] == [4]
    assert "is not a run" in one_message(forge("checkpoint", "prune", FOUR), 2)


def test_copies_to_and_from_an_address(folder: Path) -> None:
    assert forge("checkpoint", "copy", RUN, folder / "here" / "best").code == 0
    assert check(folder / "here" / "best", contents=True) == ""
    assert forge("checkpoint", "copy", folder / "here" / "best", "bucket://other/best").code == 0
    assert {key.partition("/")[0] for key in keys(folder / "bucket")} == {"b", "other"}
    assert forge("checkpoint", "diff", "bucket://other/best", FOUR).code == 0
    assert forge("checkpoint", "copy", "bucket://other/best", "bucket://other/again").code == 0
    assert forge("checkpoint", "verify", "bucket://other/again").out == "bucket://other/again: whole\n"
    message = one_message(forge("checkpoint", "copy", RUN, "bucket://other/again"), 2)
    assert message == "bucket://other/again exists; name a new folder."
    message = one_message(forge("checkpoint", "copy", RUN, "bucket://other/step-00000003"), 2)
    assert message == "bucket://other/step-00000003 names another step: this checkpoint is from step 4."
    message = one_message(forge("checkpoint", "inspect", "bucket://b/none"), 2)
    assert message == "bucket://b/none: there is no such run or checkpoint."


def resumed(folder: Path, *more: object) -> Ended:
    return forge("train", *more, "--json", "-s", "train.steps=6")


def test_a_run_is_continued_from_its_address(folder: Path) -> None:
    assert (ended := resumed(folder, "--resume", RUN).json)["run"] == "runs/first"
    assert ended["step"] == 6
    assert [saved.step for saved in found(folder / "runs" / "first" / "checkpoints")] == [6, 4]
    assert [stored.step for stored in Store.of_run("bucket://b", "first").found()] == [6, 4]
    assert "the run had finished before" in forge("train", "--resume", RUN, "-s", "train.steps=6").out


def test_a_checkpoint_at_an_address_starts_a_new_run(folder: Path) -> None:
    ended = resumed(folder, "--resume", TWO, "--name", "second").json
    assert (ended["run"], ended["step"]) == ("runs/second", 6)
    assert [stored.step for stored in Store.of_run("bucket://b", "second").found()] == [6, 4]
    assert [stored.step for stored in Store.of_run("bucket://b", "first").found()] == [4, 2]


def test_a_damaged_checkpoint_at_an_address_is_passed_over_or_refused(folder: Path) -> None:
    damage(folder, "step-00000004%2Frank-00000-0.safetensors")
    message = one_message(forge("train", "--resume", FOUR), 2)
    assert message == f"{FOUR}: not a whole checkpoint: rank-00000-0.safetensors has other contents than were saved."
    ended = resumed(folder, "--resume", RUN)
    assert "has other contents than were saved" in ended.err
    assert ended.json["step"] == 6
    assert [saved.step for saved in found(folder / "runs" / "first" / "checkpoints")] == [6, 4]


def test_addresses_that_lead_nowhere(folder: Path) -> None:
    message = one_message(forge("train", "--resume", "bucket://b/none"), 2)
    assert message == "bucket://b/none: there is no such run or checkpoint."
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "runs" / "first" / "notes.txt").touch()
    message = one_message(forge("train", "--resume", RUN), 2)
    assert message == "runs/first: exists and is not a run; choose another --run-dir."


def test_an_address_of_this_machine_is_a_path(folder: Path) -> None:
    assert resumed(folder, "--resume", RUN).code == 0
    run = folder / "runs" / "first"
    newest = f"{run}/checkpoints/step-00000006"
    assert forge("checkpoint", "list", f"file://{run}", "--json").json[0]["path"] == newest
    assert forge("checkpoint", "verify", f"file://{newest}").out == f"{newest}: whole\n"
    assert forge("checkpoint", "inspect", f"file://{run}", "--json").json["step"] == 6
    assert forge("checkpoint", "diff", f"file://{run}", newest).code == 0
    assert forge("checkpoint", "prune", f"file://{run}", "--keep", 1).code == 0
    assert forge("checkpoint", "copy", "runs/first", f"file://{folder}/copied").out == f"{folder}/copied: whole\n"
    assert check(folder / "copied", contents=True) == ""
    assert not (folder / "file:").exists()
    ended = forge("train", "--resume", f"file://{run}", "--json", "-s", "train.steps=7")
    assert (ended.json["run"], ended.json["step"]) == (str(run), 7)


def test_the_folder_of_a_copied_run_is_as_an_address(folder: Path) -> None:
    nas = folder / "nas" / "first"
    for key in keys(folder / "bucket"):
        (file := folder / "nas" / key.partition("/")[2]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "bucket" / quote(key, safe=""), file)
    four, two = f"{nas}/checkpoints/step-00000004", f"{nas}/checkpoints/step-00000002"
    assert [row["path"] for row in forge("checkpoint", "list", nas, "--json").json] == [four, two]
    assert forge("checkpoint", "verify", "nas/first").out.splitlines() == [f"{four}: whole", f"{two}: whole"]
    assert forge("checkpoint", "inspect", nas, "--json").json["step"] == 4
    assert "is removed" in forge("checkpoint", "prune", nas, "--keep", 1).out
    assert resumed(folder, "--resume", "nas/first").json["run"] == "runs/first"
    assert [saved.step for saved in found(folder / "runs" / "first" / "checkpoints")] == [6, 4]


def test_hostile_names_in_a_manifest_at_an_address_are_refused(folder: Path) -> None:
    manifest = next(f for f in (folder / "bucket").iterdir() if f.name.endswith("step-00000004%2Fmanifest.json"))
    manifest.write_text(manifest.read_text().replace('"plugins.json"', '"../../plugins.json"'))
    message = one_message(forge("checkpoint", "copy", FOUR, "here"), 2)
    assert "names '../../plugins.json', which is not in this folder" in message
    assert not (folder / "here").exists()
