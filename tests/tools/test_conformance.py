"""The conformance suite finds what is wrong with a plugin, and nothing wrong with forge's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import pytest

import hf_images
import items_data
from crossed import marked
from forge_train import ConfigError, Job, LogRecord, Plugin, StepResult, hookimpl
from forge_train.registry.discovery import DISTRIBUTION, discover
from forge_train_kit.data.prepare import Preparation, prepare
from forge_train_kit.data.prepare import Report as Progress
from forge_train_tools.testing import Installed, Pool, Report, assert_conforms, check, run_forge


def failed(report: Report) -> set[str]:
    return {one.name for one in report.of("fail")}


def detail(report: Report, name: str) -> str:
    return next(one.detail for one in report.checks if one.name == name)


BUILT_IN = [found.name for found in discover() if found.distribution == DISTRIBUTION]


CHEAPER = {"compile": {"compile.backend": "aot_eager"}}
"""Without inductor's C++: tests/plugins/test_compile.py and tests/dist/test_compositions.py have that."""


def of_a_head(name: str, folder: Path) -> dict[str, Any]:
    """Data for a head, or a head for the data."""
    texts = [f"say {number}" for number in range(400)]
    if name in ("dpo", "embed", "reward"):
        pairs = [{"anchor": one, "positive": one, "prompt": one, "chosen": "yes", "rejected": "no"} for one in texts]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        kind = (
            {"text_pairs.kind": "embedding", "embed.group": 1} if name == "embed" else {"text_pairs.template": "plain"}
        )
        more = {"text_pairs.path": str(folder / "pairs.jsonl"), "text_pairs.cache": str(folder / "cache")}
        if name == "dpo":
            kind |= {"dpo.weights": str(run_forge([], steps=1, folder=folder / "base").run)}
        return {**more, **kind, "text_pairs.long": "right", "train.micro_batch": 4, "plugins": ["text_pairs"]}
    plugin = "classify" if name == "text_labels" else name
    words = [{"tokens": text.split(), "labels": [0, 1], "text": text, "label": 1} for text in texts]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, words)))
    more = {"text_labels.path": str(folder / "labelled.jsonl"), "text_labels.cache": str(folder / "cache")}
    classes = {f"{plugin}.classes": ["no", "yes"], "text_labels.held_out": 0.3}
    return {**more, **classes, "plugins": ["classify" if name == "text_labels" else "text_labels"]}


def of_feedback(name: str, folder: Path) -> dict[str, Any]:
    """Judged answers, a reference, and the plugin that goes with the other one."""
    lines = [json.dumps({"prompt": f"say {at}", "completion": str(at), "label": at % 2 > 0}) for at in range(400)]
    (folder / "feedback.jsonl").write_text("\n".join(lines))
    size = {"decoder.vocabulary": 320}
    base = run_forge([], size, steps=1, folder=folder / "base").run
    more = {**size, "text_feedback.cache": str(folder / "cache"), "text_feedback.template": "plain"}
    more |= {"text_feedback.long": "right", "kto.weights": str(base)}
    plugins = ["text_feedback" if name == "kto" else "kto"]
    return {"text_feedback.path": str(folder / "feedback.jsonl"), **more, "plugins": plugins}


def of_records(name: str, folder: Path) -> dict[str, Any]:
    """Records in a folder of `datasets`, or with items."""
    if name == "hf_datasets":
        records = [{"text": f"line {number}\n" * 20} for number in range(400)]
        datasets.Dataset.from_list(records).save_to_disk(folder / "records")
        return {"hf_datasets.path": str(folder / "records"), "hf_datasets.cache": str(folder / "cache")}
    if name == "hf_images":
        source = hf_images.saved(folder / "llava", "llava")
        texts = [" ".join("abcdefgh"[at >> 3 * place & 7] for place in range(3)) for at in range(400)]
        given = [{"text": text, "images": []} for text in texts]
        given[::2] = [{"text": f"<image> {text}", "images": ["a.png"]} for text in texts[::2]]
        path = str(items_data.write_records(source / "rows.jsonl", given))
        data = {"multimodal.path": path, "multimodal.cache": str(folder / "cache"), "multimodal.held_out": 0.3}
        return {"hf.weights": str(source), **data, "plugins": ["hf", "multimodal"]}
    scans = items_data.write_scans(folder, (1, 3, 2, 4))
    marked = [{"text": f"say {at} <scan>", "scans": [scans[at % 4]]} for at in range(400)]
    path = str(items_data.write_records(folder / "records.jsonl", marked))
    more = {"multimodal.cache": str(folder / "cache"), "multimodal.held_out": 0.3, "decoder.vocabulary": 257}
    return {"multimodal.path": path, **more, "plugins": ["items_data:Scans"]}


def needed(name: str, folder: Path) -> dict[str, Any]:
    """What a plugin can't be tried without."""
    if name == "distill":
        return {"distill.weights": str(run_forge([], steps=1, folder=folder / "teacher").run)}
    if name in ("sft", "lm_eval", "grpo"):
        lines = [json.dumps({"prompt": f"say {n}", "completion": str(n), "answer": str(n)}) for n in range(400)]
        (file := folder / f"{name}.{'txt' if name == 'lm_eval' else 'jsonl'}").write_text("\n".join(lines))
        asked = {"lm_eval.tasks": [str(file)], "lm_eval.limit": 2, "train.evaluate_every": 1}
        learned = {"sft.path": str(file), "sft.template": "plain", "sft.cache": str(folder / "cache")}
        drawn = {"grpo.prompts": str(file), "grpo.group": 2, "grpo.tokens": 4, "grpo.held_out": 0.3}
        return {"sft": learned, "lm_eval": asked, "grpo": drawn}[name]
    if name == "text_pairs":
        lines = [json.dumps({"anchor": f"say {number}", "positive": str(number)}) for number in range(400)]
        (folder / "pairs.jsonl").write_text("\n".join(lines))
        more = {
            "text_pairs.kind": "embedding",
            "text_pairs.cache": str(folder / "cache"),
            "plugins": ["pair_task:Contrast"],
        }
        return {"text_pairs.path": str(folder / "pairs.jsonl"), **more}
    if name in ("hf_datasets", "hf_images", "multimodal"):
        return of_records(name, folder)
    judged = name in ("kto", "text_feedback")
    if judged or name in ("classify", "token_classify", "text_labels", "embed", "reward", "dpo"):
        return of_feedback(name, folder) if judged else of_a_head(name, folder)
    if name in ("tokens", "mixture"):
        (folder / "text.txt").write_text("".join(f"line {number}\n" for number in range(4000)))
        prepare(Preparation((str(folder / "text.txt"),), folder / "tokens", held_out=0.2), Progress())
        path = str(folder / "tokens")
        return {"tokens.path": path} if name == "tokens" else {"mixture.sources": [{"path": path}]}
    if name == "hf":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        return {"hf.type": "gpt_neox", "hf.set": sizes}
    scans: dict[str, Any] = {"plugins": ["scans:Scans"]}
    fusions = {"prefix": scans, "mot": scans, "cross_attention": {**scans, "cross_attention.every": 1}}
    fusions["moma"] = {"plugins": ["scans:Scans", "moe"]}
    return {"mla": {"decoder.kv_heads": 4}, **fusions}.get(name, {})


EXTENDED = (
    *("ac", "compile", "cp", "ddp", "deepseek_fp8", "ep", "fp4", "fp8", "fsdp2", "lora", "mxfp8", "pp", "tp", "zero1"),
    *("bf16_parameters", "lm_eval", "hf_images", "image_tiles", "multimodal", "hf_datasets"),
    *("constant", "inverse_sqrt", "linear", "piecewise", "polynomial", "rex", "wsd"),
    *("lion", "normuon", "torch_optimizer", "eager", "sdpa", "varlen", "mot", "moma", "prefix", "gqa"),
    *(
        "text_feedback",
        "text_labels",
        "text_pairs",
        "token_classify",
        "csv",
        "mfu",
        "trackio",
        "statistics",
        "resources",
    ),
)
"""Those of the first line take longest, and tests/dist trains each of them on several ranks and resumes it; so it does
with optimizers and attention. The others are of a kind of which CI checks one: `cosine`, `image`, `cross_attention`,
`tensorboard`; each has tests of its own that train it, and rows of data are resumed in tests/kit/test_streams.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(BUILT_IN, EXTENDED))
def test_forges_own_plugins_conform(name: str, tmp_path: Path, ranks: Pool) -> None:
    settings = {**CHEAPER.get(name, {}), **needed(name, tmp_path)}
    strict = name != "hf"  # whose models have no stages
    assert_conforms(name, settings, folder=tmp_path, strict=strict, ranks=ranks)


# -- the class ----------------------------------------------------------------------------------------------------


def test_a_hook_without_its_decorator_fails(tmp_path: Path) -> None:
    class Undecorated(Plugin):
        """Forgets one decorator."""

        api = (1, 0)

        @hookimpl
        def on_log(self, record: LogRecord) -> None: ...

        def on_step(self, step: StepResult) -> None: ...

    report = check(Undecorated, folder=tmp_path)
    assert failed(report) == {"no hook is left undecorated"}
    assert "on_step" in detail(report, "no hook is left undecorated")


def test_a_method_named_much_like_a_hook_warns(tmp_path: Path) -> None:
    class Alike(Plugin):
        """Misspells what it does not decorate."""

        api = (1, 0)

        @hookimpl
        def on_log(self, record: LogRecord) -> None: ...

        def on_steps(self, step: StepResult) -> None: ...

    report = check(Alike, folder=tmp_path)
    assert report.passed
    assert "on_steps (meant is on_step?)" in detail(report, "no hook is left undecorated")


def test_a_hook_that_does_not_exist_fails(tmp_path: Path) -> None:
    class Typo(Plugin):
        """Misspells a hook."""

        api = (1, 0)

        @hookimpl
        def paralelize(self, job: Job) -> None: ...

    report = check(Typo, folder=tmp_path)
    assert "Did you mean 'parallelize'?" in detail(report, "hooks exist")


def test_an_argument_that_the_hook_does_not_have_fails(tmp_path: Path) -> None:
    class Wrong(Plugin):
        """Asks for too much."""

        api = (1, 0)

        @hookimpl
        def on_step(self, step: StepResult, job: Job) -> None: ...

    assert "arguments fit the hooks" in failed(check(Wrong, folder=tmp_path))


def test_an_api_that_is_left_out_warns(tmp_path: Path) -> None:
    class Silent(Plugin):
        """Does not say its API."""

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    report = check(Silent, folder=tmp_path)
    assert report.passed
    assert [one.name for one in report.of("warn")] == ["says its plugin API"]
    with pytest.raises(AssertionError, match="api = "):
        assert_conforms(Silent, strict=True, folder=tmp_path / "strict")


def test_names_in_a_string_instead_of_a_tuple_fail(tmp_path: Path) -> None:
    class Strung(Plugin):
        """Forgets a comma."""

        api = (1, 0)
        requires = "loss"  # type: ignore[assignment]

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    assert failed(check(Strung, folder=tmp_path)) == {"metadata has the right form"}


def test_a_section_that_takes_any_key_fails(tmp_path: Path) -> None:
    class Lax(Plugin):
        """Has a class of its own instead of a section."""

        api = (1, 0)

        class Config:  # type: ignore[assignment]
            rate: float = 1.0

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    assert failed(check(Lax, folder=tmp_path)) == {"the section is strict"}


def test_state_without_its_counterpart_fails(tmp_path: Path) -> None:
    class Half(Plugin):
        """Can be saved, not loaded."""

        api = (1, 0)

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    assert failed(check(Half, folder=tmp_path)) == {"state is saved and loaded"}


def test_a_missing_need_is_skipped_with_its_command(tmp_path: Path) -> None:
    class Needy(Plugin):
        """Needs what nobody has."""

        api = (1, 0)
        needs = MappingProxyType({"no_such_module_anywhere": "pip install 'it[now]'"})

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    report = check(Needy, folder=tmp_path)
    assert report.passed
    assert "pip install 'it[now]'" in detail(report, "has what it needs")
    assert report.checks[-1].status == "skip"


# -- the module ---------------------------------------------------------------------------------------------------

BODY = '''
from forge_train import Plugin, hookimpl

class Mine(Plugin):
    """Watches."""
    api = (1, 0)

    @hookimpl
    def on_log(self, record): ...
'''


def write(folder: Path, patch: pytest.MonkeyPatch, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    patch.syspath_prepend(str(folder))
    return f"{name}:Mine"


@pytest.mark.slow
def test_a_module_that_imports_torch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write(tmp_path, monkeypatch, "eager_plugin", "import torch\n" + BODY)
    report = check(spec, folder=tmp_path)
    assert failed(report) == {"imports nothing slow"}
    assert "imports torch" in detail(report, "imports nothing slow")


def test_a_module_that_imports_rich_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(write(tmp_path, monkeypatch, "richer_plugin", "import rich\n" + BODY), folder=tmp_path)
    assert report.passed
    assert "imports rich" in detail(report, "imports nothing slow")


@pytest.mark.parametrize("fault", ["import no_such_thing", "raise SystemExit(3)", "1 / 0"])
def test_a_module_that_does_not_import_fails_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge_plugins: Installed, fault: str
) -> None:
    module = f"faulty_{abs(hash(fault))}"
    forge_plugins.add_broken("faulty", write(tmp_path, monkeypatch, module, fault + "\n" + BODY))
    report = check("faulty", folder=tmp_path)
    assert failed(report) == {"imports"}
    assert f"{module}.py" in detail(report, "imports")
    assert report.plain()["passed"] is False


def test_a_name_that_nobody_has_is_the_callers_mistake(forge_plugins: Installed) -> None:
    forge_plugins.restore("adamw")
    with pytest.raises(ConfigError, match="Did you mean 'adamw'"):
        check("adamv")
