"""A hook that a third party declares works like the kernel's: a package of the test declares it, others implement it.

Each package lies on the path with metadata of its own, as pip leaves it there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, PluginError, hookimpl, hookspec
from forge_train.base.names import PluginRef
from forge_train.plugin.calls import EnabledPlugin
from forge_train.plugin.job import Hooks
from forge_train.plugin.specs import HookSpec
from forge_train.registry import declared
from forge_train.registry.declared import SpecModule, Specs, spec_modules
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_kit.blame import note_plugin
from forge_train_kit.return_checks import Returns
from forge_train_tools.configuration.inspection import inspector
from forge_train_tools.hook_table import declarations
from forge_train_tools.testing import TinyRun, check
from packages import package

SPECS = '''
"""The hooks that the judge calls."""

from collections.abc import Callable
from typing import Protocol

from forge_train import Job, hookspec


class Score(Protocol):
    def __call__(self, text: str) -> float: ...


@hookspec("slot", checked=True, asked="start", trials="judge.trials")
def score(scale: float, job: Job) -> Score:
    """What scores a text."""
    raise AssertionError


@hookspec("questions")
def remarks(
    text: str,
    job: Job,
) -> str | None:
    """What anybody remarks on a text."""


@hookspec("event", asked=None)
def on_verdict(verdict: float, job: Job) -> None:
    """A text was judged."""
'''
JUDGE = '''
"""Judges a text at each step."""

from forge_train import Plugin, hookimpl


class Judge(Plugin):
    """Judges a text at each step."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job):
        from judge.specs import remarks, score

        self.job, self.score, self.remarks = job, score(2.0, job), remarks("abc", job)

    @hookimpl
    def on_step(self, step):
        from judge.specs import on_verdict

        on_verdict(self.score("abc"), self.job)
'''
TRIALS = """
def tells_apart(bench):
    score = bench.answer("score", scale=1.0)
    assert score("a") != score("abc"), "all texts get one score"


TRIALS = {"score": [("tells texts apart", tells_apart)]}
"""
CHECKS = """
from pathlib import Path

from forge_train.run.run import MODEL_FILES

TABLE = Path(__file__).with_name("table")


def suits(hooks, config):
    if config.train.total_steps > 1:
        yield f"{hooks.provider('score')} scores one step only, and the run has {config.train.total_steps}."


def keep(config, hooks, folder, *, fresh):
    if fresh:
        (folder / MODEL_FILES).mkdir()
        (folder / MODEL_FILES / "table").write_text(TABLE.read_text())
    return config


def digest(job):
    return TABLE.read_text()
"""
SCORER = '''
from forge_train import Plugin, hookimpl


class Length(Plugin):
    """Scores a text by its length."""

    api = (1, 0)
    facts = {"check.example": ("plugins=judge",)}

    @hookimpl
    def score(self, scale, job):
        return lambda text: scale * len(text)
'''


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs the judge, and whatever else a test wants; what was imported of it is forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def judge(specs: str = SPECS) -> None:
        files = {"specs.py": specs, "plugin.py": JUDGE, "trials.py": TRIALS, "checks.py": CHECKS}
        package(
            site, "judge", files, {"plugins": {"judge": "judge.plugin:Judge"}, "hookspecs": {"judge": "judge.specs"}}
        )

    def scorer(name: str = "length", text: str = SCORER) -> None:
        package(site, f"by_{name}", {"plugin.py": text}, {"plugins": {name: f"by_{name}.plugin"}})

    def other(name: str, specs: str) -> None:
        package(site, name, {"specs.py": specs}, {"hookspecs": {name: f"{name}.specs"}})

    yield lambda what="judge", *more: {"judge": judge, "scorer": scorer, "other": other}[what](*more)
    for name in [one for one in sys.modules if one.split(".")[0].startswith(("judge", "jury", "by_"))]:
        del sys.modules[name]


def run(folder: Path, *plugins: str, steps: int = 1) -> TinyRun:
    return toys.run(folder / "runs", *plugins, steps=steps)


def told(folder: Path, *plugins: str) -> str:
    with pytest.raises((ConfigError, PluginError)) as caught:
        run(folder, *plugins)
    return str(caught.value)


def scoring(body: str, arguments: str = "scale, job", hook: str = "score") -> str:
    return SCORER.replace("score(self, scale, job)", f"{hook}(self, {arguments})").replace(
        "return lambda text: scale * len(text)", body
    )


# -- a hook at work -------------------------------------------------------------------------------


def test_one_package_declares_a_hook_and_another_implements_it(tmp_path: Path, install: Install) -> None:
    install()
    verdicts = (
        '    @hookimpl\n    def on_verdict(self, verdict):\n        self.seen = [*getattr(self, "seen", []), verdict]\n'
    )
    remark = '    @hookimpl\n    def remarks(self, text):\n        return f"{text}!"\n'
    install("scorer", "length", f"{SCORER}\n{verdicts}\n{remark}")
    done = run(tmp_path, "judge", "length", steps=2)
    assert done.plugin("length").seen == [6.0, 6.0]
    assert done.plugin("judge").remarks == [("length", "abc!")]


def test_nothing_of_it_is_imported_until_a_plugin_needs_it(tmp_path: Path, install: Install) -> None:
    install("judge", "raise SystemExit('imported')")
    install("scorer")
    run(tmp_path)
    assert not {"judge", "judge.specs", "by_length"} & sys.modules.keys()
    said = told(tmp_path, "judge")
    assert "The hook specs of judge 1.0 failed to import (judge.specs): SystemExit: imported." in said


def test_a_plugin_in_a_file_declares_a_hook_in_that_file(tmp_path: Path) -> None:
    both = f"{SPECS.replace('judge.trials', '')}\n{JUDGE.replace('from judge.specs import', 'from __main__ import')}"
    file = tmp_path / "judging.py"
    file.write_text(re.sub(r"\n +from __main__ import .*\n", "\n", both), encoding="utf-8")
    other = tmp_path / "length.py"
    other.write_text(SCORER, encoding="utf-8")
    for order in ((file, other), (other, file)):
        assert run(tmp_path, *map(str, order)).plugin("judging").score("abcd") == 8.0


# -- its mistakes ---------------------------------------------------------------------------------


def test_what_it_returns_is_checked_at_the_call(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer", "length", scoring("return 3"))
    said = told(tmp_path, "judge", "length")
    assert re.search(
        r"^Plugin 'length' \(by_length 1\.0\), hook score \(.*plugin\.py:11\): expected a function, found 3", said
    )


def test_what_its_function_gives_is_checked_too(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer", "length", scoring("return lambda text: text"))
    said = told(tmp_path, "judge", "length")
    assert re.search(r"^Plugin 'length' \(by_length 1\.0\), hook score .*must return a number, found 'abc'", said)


def test_a_failure_names_the_plugin_and_the_hook(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer", "length", scoring("raise LookupError('no scale')"))
    with pytest.raises(LookupError) as caught:
        run(tmp_path, "judge", "length")
    assert "in plugin 'length' (by_length 1.0), hook score" in caught.value.__notes__


def test_two_providers_of_its_slot_are_an_error(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer")
    install("scorer", "longer", SCORER.replace("Length", "Longer"))
    said = told(tmp_path, "judge", "length", "longer")
    assert "Plugins 'length' (by_length 1.0) and 'longer' (by_longer 1.0) both fill the slot 'score'" in said


def test_its_slot_is_empty_when_it_is_called(tmp_path: Path, install: Install) -> None:
    install()
    said = told(tmp_path, "judge")
    assert re.search(r"fills the slot 'score' \(declared by judge 1\.0, .*judge/specs\.py:14\)", said)


def test_two_distributions_declare_one_name(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer")
    install("other", "jury", SPECS)
    judge, jury = (rf"by {name} 1\.0 \(.*{name}/specs\.py:14\)" for name in ("judge", "jury"))
    both = f"Hook 'score' is declared {judge} and {jury}: uninstall one"
    assert re.search(both, told(tmp_path, "judge", "length"))
    assert re.search(both, told(tmp_path, "length"))
    run(tmp_path)  # neither is in use


def test_a_name_of_the_kernels_is_taken(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("def score(", "def task("))
    said = told(tmp_path, "judge")
    assert re.search(r"Hook 'task' is declared by forge-train .*hookspecs\.py:\d+\) and by judge 1\.0 \(", said)


def test_an_argument_that_its_new_version_no_longer_has(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("scale: float, job: Job", "job: Job"))
    install("scorer")
    said = told(tmp_path, "length")
    assert re.search(
        r"^Plugin 'length' \(by_length 1\.0\) does not fit the hooks: score \(.*plugin\.py:11\) takes 'scale', which "
        r"the hook \(declared by judge 1\.0, .*judge/specs\.py:14\) does not have\. It has job\.$",
        said,
    )


def test_a_call_with_arguments_that_it_does_not_have(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("scale: float, job: Job", "job: Job"))
    install("scorer", "length", scoring("return len", "job"))
    said = told(tmp_path, "judge", "length")
    assert "Hook 'score' (declared by judge 1.0" in said
    assert "is called with other arguments than (job): too many positional arguments" in said


def test_a_hook_that_nothing_calls_in_this_run(tmp_path: Path, install: Install, caplog: Any) -> None:
    install()
    install("scorer", "length", scoring("return text", "text", "remarks"))
    run(tmp_path, "length")
    (said,) = [one.getMessage() for one in caplog.records if "nothing in this run calls" in one.getMessage()]
    assert re.search(
        r"^Plugin 'length' \(by_length 1\.0\), hook remarks \(.*plugin\.py:11\): nothing in this run calls", said
    )
    assert "(declared by judge 1.0, " in said


def test_a_default_that_nobody_named_may_implement_more_than_is_called(
    tmp_path: Path, install: Install, caplog: Any
) -> None:
    aside = '\n\n@hookspec("questions")\ndef aside(text: str, job: Job) -> str | None: ...\n'
    install("judge", SPECS.replace('"slot",', '"slot", required=True, default="length",') + aside)
    install("scorer", "length", SCORER + "\n    @hookimpl\n    def aside(self, text):\n        return text\n")
    run(tmp_path, "judge")
    assert "nothing in this run calls" not in caplog.text
    run(tmp_path, "judge", "length")
    assert "hook aside" in caplog.text


def test_a_plugin_that_only_fills_a_slot_that_nothing_asks_for(tmp_path: Path, install: Install, caplog: Any) -> None:
    install()
    install("scorer")
    run(tmp_path, "length")
    assert "Plugin 'length' has nothing to do: nothing in this run asks for score." in caplog.text


def test_a_slot_that_is_called_at_the_start_is_in_use(tmp_path: Path, install: Install, caplog: Any) -> None:
    install()
    install("scorer")
    done = run(tmp_path, "judge", "length")
    assert "has nothing to do" not in caplog.text
    assert not done.job.hooks.unused & {"judge", "length"}
    assert "length" in next(event for event in done.events if event["event"] == "run_started")["plugins"]


def test_a_slot_must_be_filled_where_its_declarer_is_enabled(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", required=True,'))
    install("scorer", "remarker", scoring("return text", "text", "remarks"))
    with pytest.raises(ConfigError, match=r"fills the slot 'score' \(declared by judge 1\.0, "):
        toys.setup("judge", folder=tmp_path)
    run(tmp_path, "remarker")  # knows the hook, but nobody is there who calls it


def test_who_declares_a_slot_checks_its_provider_at_setup(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", suits="judge.checks",'))
    toys.setup("judge", folder=tmp_path, config={"train.steps": 2})  # nobody fills the slot
    install("scorer")
    with pytest.raises(ConfigError, match=r"^length scores one step only, and the run has 2\.$"):
        toys.setup("judge", "length", folder=tmp_path, config={"train.steps": 2})
    assert run(tmp_path, "judge", "length").finished.outcome == "done"


def test_what_its_slot_reads_is_kept_with_the_run_and_compared_at_resume(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", keeps="judge.checks",'))
    install("scorer")
    table = tmp_path / "site" / "judge" / "table"

    def train(steps: int, *allowed: str) -> TinyRun:
        config = {"checkpoint.every": 1, "checkpoint.allow_changes": list(allowed)}
        return toys.run(tmp_path, "judge", "length", steps=steps, name="a", config=config)

    table.write_text("one")
    done = train(1)
    assert (done.run / "checkpoints" / "step-00000001" / "tokenizer" / "table").read_text() == "one"
    table.write_text("two")
    with pytest.raises(ConfigError, match=r"\n  score: another one, or its files have changed\n.*\[\"score\"\]"):
        train(2)
    assert train(2, "score").finished.step == 2


def test_its_slot_has_a_default(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", required=True, default="length",'))
    install("scorer")
    install("scorer", "other", SCORER.replace("Length", "Other").replace("scale *", "10 * scale *"))
    done = run(tmp_path, "judge")
    assert done.plugin("judge").score("abc") == 6.0
    assert 'score = "length"' in (done.run / "config.toml").read_text(encoding="utf-8")
    assert run(tmp_path, "judge", "other").plugin("judge").score("abc") == 60.0
    assert "length" not in run(tmp_path).job.hooks.enabled
    with pytest.raises(ConfigError, match=r"fills the slot 'score' \(declared by judge 1\.0"):
        toys.run(tmp_path / "runs", "judge", steps=1, without=["length"])


def test_its_default_can_not_be_found_or_does_not_fill_it(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", required=True, default="length",'))
    says = r"default of the hook 'score' \(declared by judge 1\.0, .*specs\.py:14\): "
    assert re.search(says + "there is no plugin named 'length'", told(tmp_path, "judge"))
    install("scorer", "length", scoring("return text", "text", "remarks"))
    assert re.search(says + "plugin 'length' does not fill the slot 'score'", told(tmp_path, "judge"))


def test_a_default_counts_where_a_plugin_requires_the_slot(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace('"slot",', '"slot", default="length",'))
    install("scorer")
    install("scorer", "asking", scoring("return text", "text", "remarks").replace("Length", "Asking"))
    assert "length" not in run(tmp_path, "asking").job.hooks.enabled
    needing = scoring("return text", "text", "remarks").replace("Length", "Needing")
    install("scorer", "needing", needing.replace("api =", 'requires = ("score",)\n    api ='))
    assert "length" in run(tmp_path, "needing").job.hooks.enabled


FAILING = scoring("raise LookupError('no pen')", "verdict", "on_verdict")


@pytest.mark.parametrize("observes", [True, False])
def test_whoever_only_observes_by_its_hook_costs_no_step(
    tmp_path: Path, install: Install, caplog: Any, observes: bool
) -> None:
    install("judge", SPECS.replace('"event",', f'"event", observes={observes},'))
    install("scorer")
    install("scorer", "writer", FAILING.replace("Length", "Writer"))
    if not observes:
        with pytest.raises(LookupError):
            run(tmp_path, "judge", "length", "writer")
        return
    done = run(tmp_path, "judge", "length", "writer", steps=2)
    assert done.finished.step == 2
    assert caplog.text.count("failed in on_verdict and is left out from here on: LookupError: no pen") == 1
    assert "writer" in done.job.config.neutral


def test_an_attribute_that_hides_a_hook(tmp_path: Path, install: Install) -> None:
    install()
    hiding = "\n    def __init__(self, config):\n        super().__init__(config)\n        self.score = 3\n"
    install("scorer", "length", SCORER + hiding)
    said = told(tmp_path, "judge", "length")
    assert re.search(
        r"^Plugin 'length' \(by_length 1\.0\): __init__ sets the attribute 'score', which hides the hook score "
        r"\(.*plugin\.py:11\)\. Rename the attribute\.$",
        said,
    )


def test_an_argument_with_a_default_in_the_spec(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("scale: float, job: Job", "scale: float, job: Job, unit: int = 3"))
    install("scorer", "length", scoring("return lambda text: unit * scale", "scale, unit"))
    assert run(tmp_path, "judge", "length").plugin("judge").score("abc") == 6.0


def test_a_method_with_its_name_and_without_the_decorator(tmp_path: Path, install: Install) -> None:
    install()
    install(
        "scorer",
        "length",
        SCORER.replace("@hookimpl\n    def score", "@hookimpl\n    def on_verdict(self): ...\n\n    def score"),
    )
    assert "Length.score (" in (said := told(tmp_path, "judge", "length"))
    assert "is named like a hook, but is not marked with @hookimpl" in said


def test_a_spec_without_job_or_of_no_kind(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("verdict: float, job: Job", "verdict: float"))
    install("scorer")
    assert "Hook 'on_verdict' (declared by judge 1.0" in (said := told(tmp_path, "judge", "length"))
    assert "is called with other arguments than (verdict): too many positional arguments" in said

    @hookspec("questions")
    def asked(text: str) -> str | None: ...

    with pytest.raises(PluginError, match=r"no argument `job`, so .* reaches no plugins; pass it to job\.hooks\.call"):
        asked("a")
    assert toys.setup(folder=tmp_path).hooks.call(asked, {"text": "a"}) == []
    with pytest.raises(PluginError, match="is of an unknown kind 'slots'; kinds are slot, chain, "):
        hookspec("slots")(lambda job: None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("*, scale, job", "'scale' after a *"),
        ("scale, /, job", "'scale' before a /"),
        ("job, *scales", "*scales"),
        ("job, **more", "**more"),
    ],
)
def test_a_spec_takes_plain_arguments(tmp_path: Path, install: Install, arguments: str, found: str) -> None:
    install("judge", SPECS.replace("scale: float, job: Job", arguments))
    said = told(tmp_path, "judge")
    assert re.search(
        r"judge 1\.0 failed to import \(judge\.specs\): Hook 'score' \(.*judge/specs\.py:14\) takes ", said
    )
    assert f"takes {found}; write plain arguments, which implementations get by name." in said


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (
            "slot",
            {"asked": "step"},
            "says asked='step'; write one of 'composition', 'assembly', 'start', 'run', or None",
        ),
        ("event", {"gives": "scores"}, "is of the kind 'event', where 'gives' has no effect"),
        ("event", {"suits": "judge.checks"}, "is of the kind 'event', where 'suits' has no effect"),
        ("chain", {"required": True}, "is of the kind 'chain', where 'required' has no effect"),
        ("slot", {"used_later": True}, "is of the kind 'slot', where 'used_later' has no effect"),
        ("slot", {"optional": True, "required": True}, "is both optional and required; remove one"),
    ],
)
def test_options_that_mean_nothing(kind: Any, options: Any, text: str) -> None:
    with pytest.raises(PluginError, match=rf"^Hook '<lambda>' \(.*test_hookspecs\.py:\d+\) {re.escape(text)}\.$"):
        hookspec(kind, **options)(lambda job: None)


def test_an_unknown_option_of_a_spec() -> None:
    says = r"^Hook '<lambda>' \(.*test_hookspecs\.py:\d+\): there is no option 'observe'\. Did you mean 'observes'\?$"
    with pytest.raises(PluginError, match=says):
        hookspec("event", observe=True)(lambda job: None)  # type: ignore[call-overload]


def test_a_spec_of_the_kernels_without_a_job_is_not_called() -> None:
    from forge_train.plugin import hookspecs

    with pytest.raises(
        PluginError, match=r"^Hook 'on_log' has no argument `job`.*; pass it to job\.hooks\.call\(\)\.$"
    ):
        hookspecs.on_log("record")  # type: ignore[arg-type]


def test_an_annotation_that_can_not_be_checked(tmp_path: Path, install: Install) -> None:
    install("judge", SPECS.replace("-> Score:", '-> "Missing":'))
    install("scorer")
    said = told(tmp_path, "judge", "length")
    assert "Hook 'score' (declared by judge 1.0" in said
    assert "what it returns can't be checked: name 'Missing' is not defined" in said


# -- trials ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_conformance_suite_tries_it(tmp_path: Path, install: Install) -> None:
    install()
    install("scorer")
    install("scorer", "flat", SCORER.replace("Length", "Flat").replace("scale * len(text)", "1.0"))
    found = {name: {one.name: one for one in check(name, folder=tmp_path).checks} for name in ("length", "flat")}
    assert found["length"]["score: tells texts apart"].status == "ok"
    assert found["flat"]["score: tells texts apart"].status == "fail"
    assert "all texts get one score" in found["flat"]["score: tells texts apart"].detail
    assert found["length"]["trains three steps"].status == "ok"


# -- every kind -----------------------------------------------------------------------------------


class Step:
    def __init__(self, phase: int) -> None:
        self.phase = phase


def hooks(spec: HookSpec[..., Any], **answers: Any) -> tuple[Hooks, Any]:
    """Plugins by name, each with its answer to a hook; the job to call it with."""

    def answering(answer: Any) -> type[Plugin]:
        return type("Answering", (Plugin,), {spec.name: hookimpl(lambda self: answer)})

    pairs = [
        (EnabledPlugin(PluginRef(name, "dist", "1", "m:X"), cls, specs={spec.name: spec}), cls(None))
        for name, cls in ((name, answering(answer)) for name, answer in answers.items())
    ]
    made = Hooks(pairs, {}, {spec.name: spec}, Returns())
    job = SimpleNamespace(hooks=made)
    return made, job


@pytest.mark.parametrize("used_later", [True, False])
def test_a_failure_in_what_a_question_gave_names_the_hook(used_later: bool) -> None:
    @hookspec("questions", used_later=used_later)
    def scores(job: Any) -> Any: ...

    def failing() -> None:
        raise LookupError

    made, job = hooks(scores, a=failing)
    made.enabled = {
        name: replace(one, ref=replace(one.ref, object=f"{__name__}:X")) for name, one in made.enabled.items()
    }
    ((_, score),) = scores(job)
    with pytest.raises(LookupError) as caught:
        score()
    note_plugin(caught.value, made.enabled.values(), made.specs)
    (note,) = caught.value.__notes__
    assert note.startswith("in plugin 'a' (dist 1)")
    assert ("hook scores" in note) == used_later


def test_answers_of_phases_come_in_order() -> None:
    @hookspec("phases")
    def stages(job: Any) -> Step | list[Step] | None: ...

    late, early, middle = Step(3), Step(1), Step(2)
    _, job = hooks(stages, a=[late, early], b=middle, c=None)
    assert stages(job) == [("a", early), ("b", middle), ("a", late)]


def test_a_chain_takes_the_one_that_claims_the_thing() -> None:
    @hookspec("chain")
    def part(name: str, job: Any) -> int | None: ...

    assert part("x", hooks(part, a=None, b=3)[1]) == 3
    with pytest.raises(ConfigError, match="Plugins 'a' and 'b' both build part for name x; use --without a or"):
        part("x", hooks(part, a=2, b=3)[1])
    with pytest.raises(ConfigError, match="No enabled plugin builds part for name x"):
        part("x", hooks(part, a=None)[1])


def test_a_chain_is_asked_about_its_first_argument_beside_the_job() -> None:
    @hookspec("chain")
    def part(job: Any, layer: Any) -> int | None: ...

    with pytest.raises(ConfigError, match="No enabled plugin builds part for layer 7"):
        part(hooks(part, a=None)[1], SimpleNamespace(index=7))


def test_results_are_checked_against_a_protocol_only() -> None:
    @hookspec("slot", checked=True)
    def size(job: Any) -> int | None: ...

    with pytest.raises(
        PluginError, match=r"Hook 'size': `checked=True` needs a protocol as annotation, found int \| None"
    ):
        size(hooks(size, a=3)[1])


def test_spans_are_one_function_that_makes_a_context_manager() -> None:
    from contextlib import contextmanager

    @hookspec("spans")
    def around_it(job: Any) -> Any: ...

    seen: list[str] = []

    def span(name: str) -> Any:
        @contextmanager
        def inside() -> Iterator[None]:
            seen.append(name)
            yield
            seen.append(name.upper())

        return inside

    with around_it(hooks(around_it, b=span("b"), a=span("a"))[1])():
        seen.append("-")
    assert seen == ["a", "b", "-", "B", "A"]


def test_a_slots_provider_must_give_what_its_caller_takes() -> None:
    @hookspec("slot", takes={"head": ("scores",)})
    def ranking(job: Any) -> int: ...

    @hookspec("slot", gives="logits")
    def head(job: Any) -> int: ...

    made = hooks(ranking, a=1)[0]
    other = type("Head", (Plugin,), {"head": hookimpl(lambda self: 2)})
    both = Hooks(
        [
            (made.enabled["a"], made.plugins["a"]),
            (EnabledPlugin(PluginRef("h", "dist", "1", "m:X"), other, specs={"head": head}), other(None)),
        ],
        {},
        {"ranking": ranking, "head": head},
        Returns(),
    )
    with pytest.raises(ConfigError, match=r"Plugin 'a' \(dist 1\) takes 'scores' from the slot 'head', but plugin 'h'"):
        ranking(SimpleNamespace(hooks=both))


def test_two_hooks_of_one_name_are_told_apart_at_the_call() -> None:
    def made() -> HookSpec[..., Any]:
        @hookspec("slot")
        def size(job: Any) -> int: ...

        return size

    ours, theirs = made(), made()
    with pytest.raises(ConfigError, match="Two hooks are named 'size'"):
        theirs(hooks(ours, a=1)[1])


def test_a_module_of_forges_own_that_was_deleted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = SpecModule(DISTRIBUTION, "0", "forge_train_plugins.experts.gone")
    monkeypatch.setattr(declared, "SOURCES", [*declared.SOURCES, lambda: [gone]])
    mistakes: list[str] = []
    assert {"optimizer", "attention", "token_dispatch"} <= Specs(mistakes).keys()
    assert not mistakes


def test_metadata_older_than_the_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "SOURCES", [])
    (ref,) = (one for one in discover() if one.name == "gqa")
    (said,) = inspector()(EnabledPlugin(ref, load(ref), specs=Specs([])))
    assert "Plugin 'gqa' (forge-train " in said
    assert said.endswith("Forge's metadata is older than its code: install it again with `pip install -e .`.")


def test_the_kernels_hooks_go_through_the_same_door() -> None:
    from forge_train.plugin import hookspecs

    kernel = spec_modules()[0]
    assert list(declarations(kernel)) == list(hookspecs.SPECS) == list(kernel.load())
    for name, one in declarations(kernel).items():
        spec = hookspecs.SPECS[name]
        assert (one.kind, one.optional) == (spec.kind, spec.optional)
        assert (spec.function.__doc__ or "").startswith(one.summary)
        assert one.summary
