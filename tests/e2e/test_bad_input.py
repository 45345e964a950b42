"""Bad input, through the real command line: the right exit code, one message that names the matter, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import DECODER, TESTS, Ended, command, environment, forge, forge_process, one_message
from forge_train import Applied, Phase, Plugin, Transform, hookimpl
from forge_train_tools.testing import Installed, installed

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: object, **more: Any) -> Ended:
    """Train the toys."""
    return forge("train", toys.write_config(Path.cwd()), "--quiet", *arguments, **more)


def refused(*arguments: object, code: int = 2, **more: Any) -> str:
    """The message that a run of the toys is refused with; nothing of it may be left."""
    message = one_message(train(*arguments, **more), code)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    return message


def toy_run(*arguments: object, name: str = "toy") -> Path:
    ended = train("--name", name, "-s", "checkpoint.every=2", *arguments)
    assert ended.code == 0, ended.err
    return Path("runs") / name


# -- plugins --------------------------------------------------------------------------------------


def test_an_unknown_plugin() -> None:
    assert refused("-p", "loin") == "--plugins: there is no plugin named 'loin'. Did you mean 'lion'?"


def test_two_plugins_for_one_slot() -> None:
    message = refused("-p", "lion,adamw")
    assert "'adamw' (forge-train " in message
    assert "'lion' (forge-train " in message
    assert "both fill the slot 'optimizer'; leave adamw or lion out of --plugins." in message


def test_a_missing_dependency() -> None:
    class Needy(toys.Bare):
        """It needs what is not there."""

        needs = {"no_such_package": "pip install 'no-such[fast]'"}

    with installed([Needy]):
        message = refused("-p", "needy")
    assert message == "Plugin 'needy' (under-test 0) needs 'no_such_package'. Install it: pip install 'no-such[fast]'"


def test_a_plugin_for_another_api() -> None:
    class Future(Plugin):
        """Of tomorrow."""

        api = (2, 0)

    with installed() as found:
        found.add(Future, distribution="forge-future", version="9.0")
        message = refused("-p", "future")
    assert message.startswith("Plugin 'future' (forge-future 9.0) was written for plugin API (2, 0), this is (1, ")


@pytest.fixture
def broken(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugin that raises on import, installed beside all others."""
    (here / "broken_module.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    with installed() as found:
        found.add_broken("broken", "broken_module:Broken", distribution="forge-broken", version="0.3")
        yield found


def test_a_plugin_that_raises_on_import(broken: Installed) -> None:
    assert train("--name", "fine").code == 0
    shutil.rmtree("runs")
    message = refused("-p", "broken")
    assert message.startswith(
        "Plugin 'broken' (forge-broken 0.3) failed to import: ZeroDivisionError: division by zero ("
    )
    assert "`forge plugins check broken`" in message


def test_a_broken_plugin_is_marked_and_hides_no_other(broken: Installed) -> None:
    listed = forge("plugins", "list")
    assert listed.code == 0
    assert "broken" in listed.out
    assert "lion" in listed.out
    checked = forge("plugins", "check", "broken")
    assert checked.code == 1
    assert "ZeroDivisionError" in checked.out + checked.err
    doctor = forge("doctor", "--json")
    (line,) = [check for check in doctor.json["checks"] if "broken" in check["text"]]
    assert line["status"] in ("warn", "fail")


def test_a_misspelt_hook() -> None:
    class Typo(Plugin):
        """It means on_step."""

        @hookimpl
        def on_stpe(self, step: Any) -> None: ...

    with installed([Typo]):
        message = refused("-p", "typo")
    assert message.startswith("Plugin 'typo' (under-test 0) implements unknown hook 'on_stpe' (")
    assert message.endswith("Did you mean 'on_step'?")


def test_cyclic_after() -> None:
    def transforming(slot: str, after: str) -> type[Plugin]:
        transform = Transform(Phase.ADAPT, slot, lambda part: Applied(part, ("head",)), after=(after,))
        return type(slot.title(), (Plugin,), {"parallelize": hookimpl(lambda self, job: transform)})

    with installed([transforming("chicken", "egg"), transforming("egg", "chicken")]):
        message = refused("-p", "chicken,egg")
    assert message == "The `after` of slots 'chicken', 'egg' form a cycle."


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (Applied, "matched nothing in this model; leave careless out of --plugins"),
        (lambda part: Applied([part], ("x",)), "only a PIPELINE transform may give several parts."),
    ],
)
def test_a_composition_that_can_not_be_leaves_no_folder(transform: Any, says: str) -> None:
    given = Transform(Phase.ADAPT, "careless", transform)
    careless = type("Careless", (Plugin,), {"parallelize": hookimpl(lambda self, job: given)})
    with installed([careless]):
        ended = train("-p", "careless")
    assert says in one_message(ended, ended.code)
    if ended.code == 2:
        assert not list(Path("runs").iterdir())


# -- configuration --------------------------------------------------------------------------------


def with_text(text: str, *arguments: object) -> str:
    file = toys.write_config(Path.cwd(), text=text)
    message = one_message(forge("train", file, "--quiet", *arguments), 2)
    assert not Path("runs").exists()
    return message.replace(f"{Path.cwd()}/", "")


def line_of(text: str) -> int:
    return toys.write_config(Path.cwd()).read_text(encoding="utf-8").splitlines().index(text) + 1


def test_the_section_of_a_plugin_that_is_not_enabled() -> None:
    last = len(toys.write_config(Path.cwd()).read_text(encoding="utf-8").splitlines())
    assert with_text("[lion]\nlr = 1.0\n") == (
        f"toy.toml:{last + 1}: section [lion] belongs to a plugin that is not enabled: add --plugins lion."
    )


def test_every_mistake_in_values_at_once() -> None:
    message = with_text(
        "[toy_model]\nlayers = 0\ntide = true\n[adamw]\nlr = 'fast'\nbetas = [0.9, 1.5]\n", "-s", "log.evry=5"
    )
    last = len(toys.write_config(Path.cwd()).read_text(encoding="utf-8").splitlines())
    assert sorted(message.splitlines()) == sorted(
        [
            f"toy.toml:{last + 2}: toy_model.layers: expected a number greater than 0, found 0.",
            f"toy.toml:{last + 3}: toy_model.tide: there is no such key. Did you mean 'tied'?",
            f"toy.toml:{last + 5}: adamw.lr: expected a number, found 'fast'.",
            f"toy.toml:{last + 6}: adamw.betas: expected a number less than 1.0, found 1.5.",
            "--set log.evry=5: log.evry: there is no such key. Did you mean 'every'?",
        ]
    )


def test_a_syntax_error() -> None:
    last = len(toys.write_config(Path.cwd()).read_text(encoding="utf-8").splitlines())
    message = with_text("[adamw]\nlr = \n")
    assert message.startswith(f"toy.toml:{last + 2}: not valid TOML: Invalid value")


def test_a_configuration_that_is_not_there() -> None:
    message = one_message(forge("train", "quickstrat"), 2)
    assert "There is no preset 'quickstrat' and no file or model of that name. Did you mean 'quickstart'?" in message
    message = one_message(forge("train", "my.toml"), 2)
    assert message == "my.toml: can't read the configuration: No such file or directory."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nmae", "x"], "No such option '--nmae'"),
        (["--set", "train.steps"], "--set 'train.steps': expected key=value, like train.steps=200."),
        (["--plugins", "a,,b"], "expected names, separated by commas."),
        (["--name", ""], "expected a name of printable characters"),
        (["--name", "../x"], "run.name: expected the name of a folder, found the path '../x'"),
        (["--name", ".."], "run.name: expected the name of a folder"),
        (["--without", "lion"], "--without: 'lion' would not be enabled anyway."),
        (["-s", "run.device=cuda"], "run.device = 'cuda', but torch finds no CUDA device here; use 'auto' or 'cpu'."),
        (
            ["-s", "train.global_batch=3"],
            "train.global_batch: 3 is not a multiple of micro_batch × data-parallel ranks",
        ),
        (["-s", "parallel.tp=2"], "pp × dp_replicate × dp_shard × cp × tp = 1 × 1 × 1 × 1 × 2 = 2, but there is 1 pro"),
        (["-s", "run.seed=99999999999999999999"], "run.seed: expected a number "),
        (["-s", "train.init_from=nowhere"], "nowhere: there is no such run or checkpoint."),
    ],
)
def test_options_and_values_that_can_not_be(arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


def test_forge_set_is_named_where_a_value_came_from() -> None:
    message = refused(environment={"FORGE_SET": "train.steps=many; log.every=2"})
    assert message == "FORGE_SET: train.steps: expected an integer, found 'many'."


# -- the corpus -----------------------------------------------------------------------------------


def corpus(path: str) -> str:
    Path("decoder.toml").write_text(DECODER + f"[text]\npath = {json.dumps(path)}\n", encoding="utf-8")
    message = one_message(forge("train", "decoder.toml", "--quiet"), 2)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    return message


def test_a_corpus_that_can_not_be_read() -> None:
    assert "text.path: 'absent.txt': no such file or folder" in corpus("absent.txt")
    Path("empty-folder").mkdir()
    assert "text.path: 'empty-folder': no file of a known kind in that folder (.arrow, " in corpus("empty-folder")
    os.mkfifo("pipe.txt")
    assert "pipe.txt is not a regular file" in corpus("pipe.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_corpus_without_permission() -> None:
    Path("secret.txt").write_text("x" * 100, encoding="utf-8")
    Path("secret.txt").chmod(0)
    assert "secret.txt can't be read: permission denied" in corpus("secret.txt")


def test_an_empty_corpus() -> None:
    Path("empty.txt").touch()
    assert "empty" in corpus("empty.txt")
    Path("short.txt").write_text("too short", encoding="utf-8")
    assert "train.sequence" in corpus("short.txt")


def test_a_binary_corpus() -> None:
    Path("binary.txt").write_bytes(bytes(range(256)) * 50)
    message = corpus("binary.txt")
    assert "binary.txt" in message
    assert "text" in message


# -- the run folder -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file/inside", "/proc/forge-runs"])
def test_a_run_folder_that_can_not_be_written(place: str) -> None:
    Path("file").touch()
    message = one_message(train("--run-dir", place), 2)
    assert place in message
    assert "can't write the run folder" in message


@pytest.mark.slow
def test_a_name_that_is_something_else(here: Path) -> None:
    (here / "runs" / "photos").mkdir(parents=True)
    (here / "runs" / "photos" / "cat.jpg").touch()
    (here / "runs" / "file").touch()
    for name in ("photos", "file"):
        message = one_message(train("--name", name), 2)
        assert message == f"runs/{name}: exists and is not a run; choose another --name or --run-dir."
    assert (here / "runs" / "photos" / "cat.jpg").exists()


# -- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_that_is_none(here: Path) -> None:
    message = refused("--resume", "nowhere")
    assert message == "--resume nowhere: expected auto, never, or the path of a run or a checkpoint."
    (here / "folder").mkdir()
    assert "--resume folder: expected auto, never, or the path" in refused("--resume", "folder")


@pytest.mark.parametrize("content", ["{}", "[]", "null", "not json", '{"format": 99}', '{"format": null}'])
def test_a_foreign_checkpoint(here: Path, content: str) -> None:
    (here / "foreign").mkdir()
    (here / "foreign" / "state.json").write_text(content, encoding="utf-8")
    assert "foreign: not a whole checkpoint: manifest.json is missing." in refused("--resume", "foreign")
    (here / "foreign" / "manifest.json").write_text('{"files": {}}', encoding="utf-8")
    message = refused("--resume", "foreign")
    assert message.startswith("foreign: ")
    assert "checkpoint" in message
    (here / "foreign" / "manifest.json").write_text("[]", encoding="utf-8")
    assert "manifest.json can't be read" in refused("--resume", "foreign")


def test_a_damaged_checkpoint_that_was_named() -> None:
    whole = toy_run() / "checkpoints" / "step-00000002"
    (data,) = whole.glob("rank-*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    message = one_message(train("--resume", whole), 2)
    assert message.startswith(f"{whole}: not a whole checkpoint: {data.name} has ")
    assert len(list(Path("runs").iterdir())) == 1


def test_a_run_without_a_whole_checkpoint_to_start_from() -> None:
    run = toy_run()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert f"{run}: this run has no whole checkpoint." in one_message(train("-s", f"train.init_from={run}"), 2)


def test_a_checkpoint_of_another_model_or_of_other_plugins() -> None:
    run = toy_run()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    message = one_message(train("--name", "toy", "-s", "toy_model.layers=3", "-s", "train.steps=8", "-p", "lion"), 2)
    checkpoint = run / "checkpoints" / "step-00000004"
    assert message.splitlines()[0] == f"{checkpoint}: this run differs from the one that saved the checkpoint:"
    for part in (
        "adamw: plugin no longer enabled",
        "lion: plugin not enabled then",
        "toy_model.layers: 2 in the checkpoint, 3 now",
        'checkpoint.allow_changes = ["adamw", "lion", "toy_model.layers"]',
        "--resume never",
    ):
        assert part in message
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    weights = one_message(train("-s", "toy_model.layers=3", "-s", f"train.init_from={run}"), 2)
    assert "holds another model" in weights
    assert "layers.2.down.weight: absent in the checkpoint, 8 × 16 in this model" in weights


def test_a_finished_run_is_not_said_to_be_finished_where_it_would_be_another(here: Path) -> None:
    toy_run()
    assert "this run differs" in one_message(train("--name", "toy", "-s", "run.seed=1"), 2)
    assert "the run would end at step 3" in one_message(train("--name", "toy", "-s", "train.steps=3"), 2)


def test_a_truncated_newest_checkpoint_falls_back_with_a_warning() -> None:
    run = toy_run("-s", "checkpoint.keep=5", "-s", "train.steps=6")
    newest = run / "checkpoints" / "step-00000006"
    (data,) = newest.glob("rank-*.safetensors")
    data.write_bytes(data.read_bytes()[:-10])
    ended = train("--name", "toy", "-s", "checkpoint.every=2", "-s", "checkpoint.keep=5", "-s", "train.steps=8")
    assert ended.code == 0
    assert ended.err.count("Warning:") == 2  # the other is about the schedule of more steps
    assert "step-00000006 is not whole" in ended.err
    assert "falling back to the checkpoint before it" in ended.err
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    resumed = [event for event in events if event["event"] == "resumed"]
    assert [event["checkpoint"] for event in resumed] == [str(run / "checkpoints" / "step-00000004")]


@pytest.mark.slow
@pytest.mark.extended
def test_a_full_disk_while_saving(here: Path) -> None:
    run = toy_run("-s", "train.steps=2")
    whole = run / "checkpoints" / "step-00000002"
    before = {file.name: file.read_bytes() for file in whole.iterdir()}
    size = max(len(content) for content in before.values())
    arguments = ["train", here / "toy.toml", "--quiet", "--name", "toy", "-s", "checkpoint.every=2"]
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 100}, {size - 100}))"
    (here / "sitecustomize.py").write_text(limit, encoding="utf-8")
    ended = forge_process(*arguments, env=environment(PYTHONPATH=f"{here}{os.pathsep}{TESTS}"))
    message = one_message(ended, 1)
    assert "step-00000004: can't save the checkpoint: " in message
    assert "The newest whole checkpoint is step-00000002." in message
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == before
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name != "latest"] == ["step-00000002"]
    assert (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step-00000002"
    (here / "sitecustomize.py").unlink()
    assert train("--name", "toy", "-s", "checkpoint.every=2").code == 0


# -- the same from outside ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "-p", "loin"], 2, "Did you mean 'lion'?"),
        (["trian"], 2, "No such command 'trian'. Did you mean 'train'?"),
        (
            ["train", "-s", "decoder.dim=ten"],
            2,
            "--set decoder.dim=ten: decoder.dim: expected an integer, found 'ten'.",
        ),
    ],
)
def test_from_outside(arguments: list[str], code: int, says: str) -> None:
    assert says in one_message(forge_process(*arguments, preloaded=True), code)


@pytest.mark.slow
def test_bytes_that_are_no_text() -> None:
    process = subprocess.run(
        [*map(os.fsencode, command("train")), b"-s", b"run.name=\xff\xfe"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    message = one_message(Ended(process.returncode, "", process.stderr.decode(errors="replace")), 2)
    assert "run.name" in message
