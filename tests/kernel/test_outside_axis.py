"""A package adds an axis: copies of the model in pods. It also implements a hook of another package's optimizer."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge_cli
import toys
from forge_train import Axis, ConfigError, Plugin, hookimpl, section
from forge_train.compose.coverage import check_coverage
from forge_train.config.sections import ParallelSection
from forge_train.mesh.layout import Layout
from forge_train_kit.axes import of_distribution, parallel_section
from forge_train_tools.configuration.comments import field_docs
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Pool, Verifier
from packages import package

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-an-axis.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```python title="pods/(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL))
"""The package, as the page has it."""
HALF = '''


class Half(Plugin):
    """Halves the gradient, for the optimizer of another package."""

    api = (1, 0)

    @hookimpl
    def update_rule(self, job):
        return lambda gradient: gradient / 2
'''
SPECS = '''
from collections.abc import Callable

from forge_train import Job, hookspec


@hookspec("slot")
def update_rule(job: Job) -> Callable[..., object]:
    """Turns a gradient into an update."""
'''
RULED = '''
from forge_train import Plugin, hookimpl


class Ruled(Plugin):
    """Gradient descent by a rule that another plugin gives."""

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @hookimpl
    def optimizer(self, model, job):
        import torch

        from ruled.specs import update_rule

        rule = update_rule(job)

        class Descent(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.sub_(rule(parameter.grad) * group["lr"])

        return Descent([parameter for _, parameter in model.named_parameters()], {"lr": 0.1})
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    plugins = {"pods": "pods.plugin:Pods", "half": "pods.plugin:Half"}
    points = {"plugins": plugins, "axes": {"pods": "pods.axes:PODS"}}
    package(folder, "pods", {"axes.py": FILES["axes.py"], "plugin.py": FILES["plugin.py"] + HALF}, points)
    points = {"plugins": {"ruled": "ruled.plugin"}, "hookspecs": {"ruled": "ruled.specs"}}
    package(folder, "ruled", {"specs.py": SPECS, "plugin.py": RULED}, points)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    (folder / "mine.toml").write_text(
        f'plugins = ["ruled", "half"]\n{forge_cli.DECODER}[text]\npath = "{folder / "text.txt"}"\n', encoding="utf-8"
    )
    return folder


def forge(site: Path, *arguments: object) -> forge_cli.Ended:
    """A command in a process of its own, to which the packages are installed."""
    mine = forge_cli.environment()
    mine["PYTHONPATH"] = os.pathsep.join([str(site), mine["PYTHONPATH"]])
    done = forge_cli.forge_process(*arguments, preloaded=True, env=mine, cwd=site)
    assert done.code == 0, done.out + done.err
    return done


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


PODS_OF_ONE = ("-p", "pods", "-s", "parallel.pods=2", "-s", "parallel.dp_shard=1")
TWO = ("--nproc", 2, *PODS_OF_ONE)


def test_trains_like_one_process_and_resumes_on_another_layout(site: Path) -> None:
    forge(site, "train", "mine.toml", "--name", "one")
    forge(site, "train", "mine.toml", "--name", "two", *TWO)
    one, two = losses(site / "runs" / "one"), losses(site / "runs" / "two")
    assert len(one) == 3
    assert two == pytest.approx(one, rel=1e-5)
    assert "pods = 2" in (site / "runs" / "two" / "config.toml").read_text(encoding="utf-8")
    forge(site, "generate", "runs/two", "--prompt", "the", "--tokens", 2)  # in one process
    forge(site, "train", "mine.toml", "--name", "one", "-s", "train.steps=5")
    said = forge(site, "train", "mine.toml", "--name", "two", "-s", "train.steps=5")
    assert "pods 2 then, 1 now" in said.out + said.err
    assert losses(site / "runs" / "two") == pytest.approx(losses(site / "runs" / "one"), rel=1e-5)


@pytest.mark.extended
def test_verify_agrees(site: Path) -> None:
    assert "They agree." in forge(site, "verify", "mine.toml", *TWO, "--steps", 2).out


@pytest.fixture(scope="module")
def verify(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    """`forge verify` on ranks that have the packages installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), forge_cli.environment()["PYTHONPATH"]]))
        with Pool(tmp_path_factory.mktemp("ranks"), size=4) as pool:
            yield Verifier(pool)


def test_the_check_of_a_plugin_tries_the_axis_of_its_package(site: Path) -> None:
    assert "✓ agrees with one process (pods = 2)" in forge(site, "plugins", "check", "pods").out


@pytest.mark.parametrize(
    ("plugins", "sizes"),
    [
        (("fsdp2",), {"dp_shard": 2}),
        pytest.param(("fsdp2",), {"dp_replicate": 2}, marks=pytest.mark.extended),
        pytest.param(("zero1",), {"dp_shard": 2}, marks=pytest.mark.extended),
        pytest.param(("ddp",), {"dp_shard": 2}, marks=pytest.mark.extended),
        (("tp",), {"tp": 2}),
        (("cp",), {"cp": 2}),
        (("pp",), {"pp": 2}),
        (("moe", "ep"), {"dp_shard": 2, "ep": 2}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_goes_with_every_axis_of_forge(
    site: Path, verify: Verifier, plugins: tuple[str, ...], sizes: dict[str, int]
) -> None:
    settings = [f"parallel.{axis}={size}" for axis, size in {"dp_shard": 1, "pods": 2, **sizes}.items()]
    settings += ["train.global_batch=16", "decoder.layers=2"]
    request = Request(str(site / "mine.toml"), plugins=("pods", *plugins), set=tuple(settings))
    verdict = verify(request, 4, steps=2)
    assert verdict.agree, verdict


def test_plan_shows_it(site: Path) -> None:
    plan = json.loads(forge(site, "plan", "mine.toml", "--world", 2, *PODS_OF_ONE, "--json").out)
    assert plan["meshes"]["dense"]["pods"] == 2
    assert any(one["axis"] == "pods" for one in plan["communication"])


def test_hooks_lists_the_slot_of_one_package_and_its_provider_in_another(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    (rule,) = [one for one in forge_cli.forge("plugins", "hooks", "--json").json if one["hook"] == "update_rule"]
    assert (rule["kind"], rule["declared_by"]["distribution"], rule["implemented_by"]) == ("slot", "ruled", ["half"])


# -- in this process ------------------------------------------------------------------------------


def test_nobody_implements_it(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    layout = Layout(others=((Axis("pods", splits_data=True, averages=True), 2),))
    with toys.job(folder=tmp_path, world=layout) as job, pytest.raises(ConfigError) as caught:
        check_coverage(job, [])
    says = "parallel.pods is 2, but no enabled plugin covers the axis 'pods'. Installed plugins that do: pods; enable"
    assert says in str(caught.value)


def test_a_plugin_of_an_axis_that_the_configuration_does_not_name(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Rows(Plugin):
        provides = ("pods",)

        @hookimpl
        def parallelize(self, job: object) -> None:
            return None

    monkeypatch.syspath_prepend(str(site))
    toys.run(tmp_path, Rows, steps=1)
    assert "Plugin 'rows' does nothing here: parallel.pods is 1; set it, as in -s parallel.pods=2." in caplog.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("X = 3", "must be a forge_train.Axis, found int."),
        (
            "from forge_train import Axis\nX = Axis('other')",
            "is named 'other'; its entry point must have the same name.",
        ),
        ("from forge_train import Axis\nX = Axis('odd', ('dense',))", "sets `domains`, `divides` or `configured`"),
        ("from forge_train import Axis\nX = Axis('odd', splits_data=True)", "must be averaged along it"),
        ("import nowhere_at_all", "failed to import: ModuleNotFoundError"),
    ],
)
def test_mistakes_of_a_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str) -> None:
    name = f"odd_{abs(hash(value))}"
    package(tmp_path / "site", name, {"axes.py": value}, {"axes": {"odd": f"{name}.axes:X"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    toys.setup(folder=tmp_path / "idle")  # nothing is imported until a configuration names the axis
    with pytest.raises(ConfigError) as caught:
        toys.setup(folder=tmp_path / "run", config={"parallel.odd": 2})
    assert f"Axis 'odd' of {name} 1.0 ({name}.axes:X)" in str(caught.value)
    assert said in str(caught.value)


def test_a_name_of_two_packages_or_of_forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = "from forge_train import Axis\nX, TP = Axis('twice'), Axis('tp')"
    package(
        tmp_path / "site", "first", {"axes.py": declared}, {"axes": {"twice": "first.axes:X", "tp": "first.axes:TP"}}
    )
    package(tmp_path / "site", "second", {}, {"axes": {"twice": "first.axes:X"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError) as caught:
        toys.setup(folder=tmp_path / "run", config={"parallel.twice": 2, "train.stepz": 1})
    assert "The axis 'twice' is declared by first 1.0 and by second 1.0: uninstall one." in str(caught.value)
    assert "train.stepz: there is no such key" in str(caught.value), "with the other mistakes"
    toys.setup(folder=tmp_path / "idle", config={"parallel.tp": 1})  # which is Forge's, whatever is installed
    with pytest.raises(ConfigError, match=r"^Axis 'tp' of first 1\.0 \(first\.axes:TP\) must be .* no axis of Forge's"):
        of_distribution("first")


def test_a_name_that_is_almost_that_of_an_installed_axis(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    for key, nearest in (("pod", "pods"), ("dp_shards", "dp_shard")):
        with pytest.raises(ConfigError, match=rf"parallel\.{key}: there is no such key\. Did you mean '{nearest}'\?"):
            toys.setup(folder=tmp_path / key, config={f"parallel.{key}": 2})


def test_a_configuration_with_it_can_be_pickled() -> None:
    made = parallel_section((Axis("pods", meaning="Copies of the model."),))(pods=2, dp_shard=1)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(ParallelSection(tp=2))) == ParallelSection(tp=2)


def test_an_axis_or_an_option_may_have_any_name() -> None:
    @section
    class Config:
        docs: str = "x"
        axes: int = 1

    assert field_docs(Config) == {}
    made = parallel_section((Axis("axes", meaning="Rows."), Axis("docs", meaning="Pages.")))
    assert {key: field_docs(made)[key] for key in ("axes", "docs")} == {"axes": "Rows.", "docs": "Pages."}
    layout = Layout.of(made(axes=2, docs=3, dp_shard=1), 6)  # type: ignore[call-arg]
    assert (layout.size("axes"), layout.size("docs"), Layout.of(made(), 1).size("axes")) == (2, 3, 1)


def test_its_meaning_is_in_the_configuration() -> None:
    documented = field_docs(parallel_section((Axis("pods", meaning="Copies of the model."),)))
    assert documented["pods"] == "Copies of the model."
    assert documented["tp"] == field_docs(ParallelSection)["tp"] != ""


def test_where_it_nests_and_what_it_divides() -> None:
    pods = Axis("pods", splits_data=True, averages=True)
    members = Axis("members")
    layout = Layout(pp=2, dp_shard=3, tp=2, ep=2, others=((pods, 2), (members, 5)))
    assert list(layout.domain("dense")) == ["pp", "members", "pods", "dp_replicate", "dp_shard", "cp", "tp"]
    for domain in ("dense", "expert", "batch", "flat"):
        sizes = layout.domain(domain).values()
        assert layout.world == 2 * 5 * 2 * 3 * 2 == math.prod(sizes), domain
    assert (layout.dp, layout.grad_average_size, layout.shard_average_size) == (6, 6, 3)
    assert "parallel.pods=2" in layout.settings()
