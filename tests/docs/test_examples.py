"""The programs in the documentation run: a block with a title is a file, and what a page says of it is tried here."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forge_train_tools.testing import TinyRun, run_forge

ROOT = Path(__file__).parents[2]
FILE = re.compile(r'^```(?:python|toml) title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


def unpack(page: str, folder: Path) -> list[Path]:
    """Write the files that a page holds."""
    files = []
    for name, text in FILE.findall((ROOT / page).read_text(encoding="utf-8")):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        files.append(file)
    return files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        spec = getattr(sys.modules[name], "__spec__", None)
        homes = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        if any(home.startswith(str(tmp_path)) for home in homes):
            del sys.modules[name]


class TestTheModelOfModelDesign:
    """docs/model-design.md"""

    SMALL: ClassVar = {"parallel_lm.dim": 32, "parallel_lm.layers": 2, "parallel_lm.max_sequence": 64, "adamw.lr": 1e-2}

    @pytest.fixture
    def run(self, files: Path) -> TinyRun:
        unpack("docs/model-design.md", files)
        return run_forge(["parallel_lm.plugin:ParallelLM"], self.SMALL, steps=12, folder=files / "runs")

    def test_trains(self, run: TinyRun) -> None:
        assert run.losses[-1] < 0.8 * run.losses[0]
        assert run.job.hooks.provider("build_model") == "parallel_lm"

    def test_does_not_look_ahead_nor_across_documents(self, run: TinyRun) -> None:
        import torch

        (part,) = run.model.parts
        part.eval()
        ids = torch.randint(0, 256, (1, 16))
        document_ids = torch.tensor([[0] * 8 + [1] * 8])
        last, first = ids.clone(), ids.clone()
        last[0, -1] += 1
        first[0, 0] += 1
        with torch.no_grad():
            hidden = part(ids, document_ids=document_ids)
            assert torch.equal(part(last, document_ids=document_ids)[:, :-1], hidden[:, :-1])
            assert torch.equal(part(first, document_ids=document_ids)[:, 8:], hidden[:, 8:])
            assert not torch.equal(part(first, document_ids=document_ids)[:, :8], hidden[:, :8])

    def test_generates_with_its_cache_what_it_gives_at_once(self, run: TinyRun) -> None:
        import torch

        (part,) = run.model.parts
        part.eval()
        ids = torch.randint(0, 256, (2, 9))
        with torch.no_grad():
            cache = part.new_cache(2, 9)
            pieces = [part(ids[:, at : at + 1], cache=cache) for at in range(9)]
            torch.testing.assert_close(torch.cat(pieces, dim=1), part(ids))

    def test_what_it_declares_names_modules_and_covers_them(self, run: TinyRun) -> None:
        (part,) = run.model.parts
        modules, parameters = dict(part.named_modules()), dict(part.named_parameters())
        assert set(part.units) <= modules.keys()
        assert [name for stage in part.stages for name in stage] == [
            *("embedding", "places"),
            *part.units,
            *("norm", "head"),
        ]
        assert part.roles.keys() <= parameters.keys()
        plan = part.tensor_plan()
        assert plan.keys() <= modules.keys()
        unplanned = [name for name in parameters if name.rpartition(".")[0] not in plan]
        assert unplanned == []
        assert part.flops_per_token(32) > 6 * sum(p.numel() for p in part.head.parameters())

    def test_goes_on_with_parts_missing(self, run: TinyRun) -> None:
        """As a pipeline leaves it: the first part without its end, the last without its beginning."""
        import copy

        import torch

        (part,) = run.model.parts
        part.eval()
        first, last = copy.deepcopy(part), copy.deepcopy(part)
        first.norm = first.head = None
        del first.layers["1"]
        last.embedding = last.places = None
        del last.layers["0"]
        ids = torch.randint(0, 256, (2, 8))
        with torch.no_grad():
            torch.testing.assert_close(last(first(ids)), part(ids))
        assert (first.stages, last.stages) == (
            (("embedding", "places"), ("layers.0",)),
            (("layers.1",), ("norm", "head")),
        )
        assert "head" not in first.tensor_plan()
        assert first.roles == {"embedding.weight": "embedding"}
        assert 0 < first.flops_per_token(8) < last.flops_per_token(8)

    def test_says_what_does_not_fit(self, files: Path) -> None:
        from forge_train import ConfigError

        unpack("docs/model-design.md", files)
        wrong: dict[str, Any] = {"parallel_lm.dim": 20, "parallel_lm.heads": 4, "parallel_lm.max_sequence": 16}
        with pytest.raises(ConfigError, match=r"(?s)2 × 4 does not divide dim \(20\).*max_sequence"):
            run_forge(["parallel_lm.plugin:ParallelLM"], wrong, folder=files / "runs")


@pytest.mark.parametrize("page", ["README.md"])
def test_the_ten_line_plugin_trains(page: str, files: Path) -> None:
    (file,) = unpack(page, files)
    sys.path.insert(0, str(file.parent))
    try:
        run = run_forge(["sgd:SGD"], {"sgd.lr": 0.5}, steps=8, folder=files / "runs")
    finally:
        sys.path.remove(str(file.parent))
    assert run.job.hooks.provider("optimizer") == "sgd"
    assert run.losses[-1] < run.losses[0]


def test_the_run_that_lends_its_memory_trains(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/sleep.md"""
    (file,) = unpack("docs/how-to/sleep.md", files)
    lent = run_forge([str(file)], {"lend.folder": str(files)}, steps=20, name="lent", folder=files / "runs")
    kept = run_forge((), {}, steps=20, name="kept", folder=files / "runs")
    assert re.fullmatch(r"([\d,]+ bytes are free\n){2}", capsys.readouterr().out)
    assert lent.losses == kept.losses


class TestTheTutorial:
    """docs/tutorial.md"""

    @pytest.fixture
    def versions(self, files: Path) -> list[str]:
        """The plugin as it is first written, and with what is added later."""
        first, added = [
            text
            for name, text in FILE.findall((ROOT / "docs/tutorial.md").read_text(encoding="utf-8"))
            if name == "forge_train_norm_guard.py"
        ]
        return [first, first + added.partition("# as before\n")[2]]

    def load(self, text: str, files: Path) -> Any:
        (files / "forge_train_norm_guard.py").write_text(text, encoding="utf-8")
        sys.modules.pop("forge_train_norm_guard", None)
        return importlib.import_module("forge_train_norm_guard").NormGuard

    @pytest.mark.slow
    def test_the_check_finds_the_missing_state_and_nothing_else(self, versions: list[str], files: Path) -> None:
        from forge_train_tools.testing import check

        first = check(self.load(versions[0], files), folder=files / "first")
        assert [one.name for one in first.checks if one.status == "fail"] == ["resumes exactly"]
        importlib.invalidate_caches()
        second = check(self.load(versions[1], files), folder=files / "second")
        assert {one.status for one in second.checks} == {"ok"}

    def test_the_claim_of_its_last_test(self, versions: list[str], files: Path) -> None:
        self.load(versions[1], files)
        (test,) = [file for file in unpack("docs/tutorial.md", files) if file.name == "test_claim.py"]
        self.load(versions[1], files)
        names: dict[str, Any] = {}
        exec(compile(test.read_text(encoding="utf-8"), str(test), "exec", dont_inherit=True), names)
        names["test_a_strict_guard_skips_steps_and_keeps_the_weights"](partial(run_forge, folder=files / "runs"))


TOML = re.compile(r"^```toml(?: title=\"[^\"]+\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIGURATIONS = [
    (str(page.relative_to(ROOT)), text)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for text in TOML.findall(page.read_text(encoding="utf-8"))
    # Left out: packages, tasks of `forge eval`, and job files (see test_launch_pages.py).
    if not any(other in text for other in ("[project", 'kind = "choice"', "[launch]"))
]


@pytest.mark.parametrize(("page", "text"), CONFIGURATIONS)
def test_every_configuration_has_only_keys_that_exist(page: str, text: str, tmp_path: Path) -> None:
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.configuration.setup import resolve

    file = tmp_path / "example.toml"
    file.write_text(text, encoding="utf-8")
    resolve(Request(config=str(file)), training=False)
