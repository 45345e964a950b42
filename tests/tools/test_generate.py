"""Generation: what becomes of tokens, and what is left as it was."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import tiny_models
from forge_train import ConfigError, ForgeError, Model
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train_cli.app import run as forge
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.requests import Requests
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.generation.texts import Stops, Stream
from forge_train_tools.offline.read_only import ReadOnlyRun

GREEDY = Sampling(tokens=20, temperature=0)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tokens": 0}, ["tokens"]),
        ({"temperature": -0.1, "top_k": -1}, ["temperature", "top_k"]),
        ({"temperature": math.nan}, ["temperature"]),
        ({"temperature": math.inf}, ["temperature"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"top_p": math.nan}, ["top_p"]),
        ({"top_p": 1.1, "seed": -1, "stop": ("a", "")}, ["top_p", "seed", "stop"]),
        ({"min_p": -0.1, "repetition_penalty": -1.0}, ["min_p", "repetition_penalty"]),
        ({"min_p": 1.5, "repetition_penalty": 0.0}, ["min_p", "repetition_penalty"]),
        ({"min_p": math.nan, "repetition_penalty": math.nan}, ["min_p", "repetition_penalty"]),
        ({"drafts": -1}, ["drafts"]),
    ],
)
def test_values_out_of_range_are_named_all_at_once(values: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Sampling(**values)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == named


# -- with a model ----------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("qk_norm", ["true", "false"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(tokens=40, temperature=1.0, top_k=20, seed=3)])
def test_the_cache_changes_no_token(monkeypatch: pytest.MonkeyPatch, sampling: Sampling, qk_norm: str) -> None:
    job, model = tiny_models.composed(f"decoder.qk_norm={qk_norm}")
    cached = Completion(job, model, "def ", sampling)
    with_cache = "".join(cached)
    monkeypatch.setattr(type(model.parts[0]), "new_cache", None)
    assert "".join(Completion(job, model, "def ", sampling)) == with_cache
    assert len(with_cache) > 3


@pytest.mark.unit
def test_an_attention_without_a_cache_generates_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    job, model = tiny_models.composed()
    expected = "".join(Completion(job, model, "x", GREEDY))
    attention = next(m for name, m in model.named_modules() if name == "layers.1.attention")
    monkeypatch.delattr(type(attention), "new_cache")
    assert "".join(Completion(job, model, "x", GREEDY)) == expected


@pytest.mark.unit
def test_a_model_that_looks_ahead_is_refused_with_its_reason() -> None:
    job, model = tiny_models.composed("moe.router=expert_choice", "moe.balance=0", plugins=("moe",))
    reason = r"can't generate text: under moe\.router = 'expert_choice' .*layers\.0\.feed_forward\.routed"
    with pytest.raises(ConfigError, match=reason):
        Completion(job, model, "x", GREEDY)


@pytest.mark.unit
@pytest.mark.parametrize("values", [{"moe.capacity": 0.5}, {"moe.jitter": 0.3}, {"moe.router": "sigmoid"}])
def test_the_cache_changes_no_token_with_experts_either(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    job, model = tiny_models.composed(*(f"{key}={value}" for key, value in values.items()), plugins=("moe",))
    with_cache = "".join(Completion(job, model, "def main(", GREEDY))
    monkeypatch.setattr(type(model.parts[0]), "new_cache", None)
    assert "".join(Completion(job, model, "def main(", GREEDY)) == with_cache


@pytest.mark.unit
def test_a_seed_gives_the_same_text_and_another_one_another() -> None:
    job, model = tiny_models.composed()
    texts = ["".join(Completion(job, model, "def ", Sampling(tokens=30, seed=seed))) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.unit
def test_nothing_else_is_disturbed() -> None:
    import numpy as np

    job, model = tiny_models.composed()
    model.train()
    model.parts[0].get_submodule("layers.0").eval()
    modes = [module.training for module in model.parts[0].modules()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    pieces = iter(Completion(job, model, "def ", Sampling(tokens=30)))
    next(pieces)
    assert torch.is_grad_enabled()
    pieces.close()  # type: ignore[attr-defined]  # given up half-way
    assert [module.training for module in model.parts[0].modules()] == modes
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.unit
def test_a_text_ends_where_the_model_can_go_no_further() -> None:
    job, model = tiny_models.composed()
    completion = Completion(job, model, "a" * 60, Sampling(tokens=50))
    assert "".join(completion) == completion.text
    assert completion.stopped == "length"
    assert completion.tokens == 4
    with pytest.raises(ConfigError, match="64 tokens; the model supports sequences of at most 64"):
        Completion(job, model, "a" * 64, Sampling(tokens=1))


@pytest.mark.unit
def test_weights_that_are_no_numbers_are_said_to_be_damaged() -> None:
    job, model = tiny_models.composed()
    next(iter(model.parameters())).data.fill_(math.nan)
    with pytest.raises(ForgeError, match="NaN"):
        list(Completion(job, model, "a", GREEDY))


# -- with a model that writes what it is told ------------------------------------------------------------------------


class Scripted(nn.Module):
    """Writes the tokens of a script after a prompt of one token."""

    def __init__(self, script: Sequence[int], vocabulary: int = 257) -> None:
        super().__init__()
        self.script, self.vocabulary, self.head = list(script), vocabulary, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        wanted = [self.script[min(place, len(self.script) - 1)] for place in range(x.shape[1])]
        return nn.functional.one_hot(torch.tensor([wanted]), self.vocabulary).float()


def scripted(script: Sequence[int], tokenizer: Any = None, prompt: str = "", **values: Any) -> Completion:
    tokenizer = tokenizer or ByteTokenizer()
    task = SimpleNamespace(outputs=lambda part, hidden, batch: hidden)
    answers = {"tokenizer": tokenizer, "task": task, "intervene": [], "modalities": []}
    hooks = SimpleNamespace(provider={"tokenizer": "text"}.get, call=lambda spec, _: answers[spec.name])
    hooks.gives = lambda slot: "token_logits"
    dist = DistributedContext(Layout(), torch.device("cpu"))
    job = SimpleNamespace(hooks=hooks, dist=dist, device=torch.device("cpu"), run=ReadOnlyRun(Path("nowhere")))
    model = Model([Scripted(script)])
    return Completion(job, model, prompt, Sampling(**({"tokens": len(script), "temperature": 0} | values)))  # type: ignore[arg-type]


@pytest.mark.unit
def test_the_documents_end_ends_the_text() -> None:
    completion = scripted([*b"so", 256, *b"more"])
    assert "".join(completion) == completion.text == "so"
    assert (completion.stopped, completion.tokens) == ("end", 2)


class Instructed(ByteTokenizer):
    """Bytes that begin with 1, and that 2 ends too."""

    begin = (1,)
    stops = (256, 2)


@pytest.mark.unit
def test_a_prompt_that_is_cut_keeps_its_beginning() -> None:
    asked = Requests(
        given=["abcdefghij"],
        files=(),
        field="",
        chat=False,
        long="left",
        sampling=Sampling(tokens=4),
        longest=9,
        tokenizer=Instructed(),
        chats=lambda: pytest.fail("there is no chat"),
    )
    request = asked.request(*next(asked.read()))
    assert (request.ids, request.cut) == ((1, *b"ghij"), 6)


@pytest.mark.unit
def test_a_prompt_begins_as_the_tokenizer_says_and_every_stop_ends_it() -> None:
    completion = scripted([*b"_so", 2, *b"more"], Instructed())
    assert completion.prompt == [1], "not the end of another document"
    completion = scripted([*b"_so", 2, *b"more"], Instructed(), prompt="a")
    assert completion.prompt == [1, *b"a"]
    assert scripted(b"_so", Instructed(), prompt="\x01a").prompt == [1, *b"a"], "it is there once"
    assert ("".join(completion), completion.stopped, completion.tokens) == ("so", "end", 2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [
        (("END",), "one ENE ", "stop"),
        (("ENE",), "one ", "stop"),
        (("x", " two"), "one ENE END", "stop"),
        (("END two!",), "one ENE END two", "tokens"),
        (("two", "o"), "", "stop"),
    ],
)
def test_stop_strings_are_never_shown(stop: tuple[str, ...], text: str, stopped: str) -> None:
    completion = scripted(b"one ENE END two", stop=stop)
    assert "".join(completion) == completion.text == text
    assert completion.stopped == stopped


@pytest.mark.unit
def test_a_character_appears_when_it_is_whole() -> None:
    text = "a €😀ä\n"
    assert list(scripted(text.encode())) == list(text)
    assert "".join(scripted(text.encode()[:-3])) == "a €😀\ufffd"[:-1]
    assert "".join(scripted("€".encode()[:2])) == "\ufffd"


@pytest.mark.unit
@given(st.lists(st.integers(0, 255), max_size=60), st.text(max_size=5))
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_any_bytes_are_their_text(ids: list[int], before: str) -> None:
    tokenizer = ByteTokenizer()
    stream = Stream(tokenizer, tokenizer.encode(before))
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.unit
def test_a_token_is_decoded_with_few_others_however_long_the_prompt() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return ByteTokenizer().decode(ids)

    tokenizer: Any = SimpleNamespace(decode=decode)
    stream = Stream(tokenizer, [*b"a " * 500, *"€€".encode()])
    assert "".join(stream.push(token) for token in b" and so on" * 10) == " and so on" * 10
    assert len([size for size in sizes if size > 900]) <= 4, "the prompt, to find where its last characters begin"
    assert sum(size for size in sizes if size < 900) < 10 * 100


@pytest.mark.unit
@given(st.text(alphabet="aä€😀 ", max_size=30), st.text(alphabet="aä€😀 ", max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_pieces_of_byte_fallback_tokens_are_their_text(text: str, before: str) -> None:
    tokenizer = byte_fallback()
    prompt, ids = tokenizer.encode("b" + before), tokenizer.encode(text)
    stream = Stream(tokenizer, prompt)
    pieces = [stream.push(token) for token in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]


def byte_fallback() -> Any:
    """A tokenizer in the way of Llama 2: words with their space in front, and bytes for what it does not know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁": 256,
        "a": 257,
        "b": 258,
        "▁a": 259,
        "[U]": 260,
    }
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="[U]", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return SimpleNamespace(
        encode=lambda text: made.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: made.decode(list(ids), skip_special_tokens=True),
    )


@pytest.mark.unit
@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4))
)
def test_the_first_stop_string_ends_any_pieces(pieces: list[str], stop: list[str]) -> None:
    stops, shown = Stops(stop), ""
    for piece in pieces:
        shown += stops.push(piece)
    shown += stops.flush()
    text = "".join(pieces)
    ends = [text.find(one) for one in stop if one in text]
    assert stops.found == bool(ends)
    assert shown == (text[: len(shown)] if ends else text)
    assert not any(one in shown for one in stop)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.trained(tmp_path_factory.mktemp("trained"))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(file): file.stat() for file in sorted(folder.rglob("*"))}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.mark.unit
def test_the_command_goes_on_from_a_run_and_leaves_no_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    assert forge(["generate", str(run), "--prompt", "The ", "--tokens", "12", "--seed", "4"]) == 0
    shown = capsys.readouterr().out
    assert forge(["generate", str(run), "--prompt", "The ", "--tokens", "12", "--seed", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert shown == f"The {told['text']}\n"
    assert (told["tokens"], told["stopped"], told["step"]) == (12, "tokens", 3)
    assert files(run) == before


@pytest.mark.unit
def test_the_prompt_can_come_from_stdin(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("ä\n".encode())))
    assert forge(["generate", str(run), "--prompt", "-", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("ä\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert forge(["generate", str(run), "--prompt", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0", "--top-p", "2"], "top_p: expected a number greater than 0"),
        (["--temperature", "warm"], "'warm' is not a valid float"),
        (["--prompt", "a" * 100], "The prompt has 100 tokens"),
        (["--stop", ""], "stop: expected non-empty texts"),
    ],
)
def test_a_mistake_is_one_message(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(["generate", str(run), *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


@pytest.mark.unit
def test_what_is_no_checkpoint_is_said_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    started = tmp_path / "started"
    shutil.copytree(run, started, ignore=shutil.ignore_patterns("step-*", "latest"))
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoints" / "step-00000003", damaged)
    with next(damaged.glob("rank-*.safetensors")).open("r+b") as file:
        file.truncate(100)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for path, message in (
        (started, "no whole checkpoint"),
        (damaged, "has 100 bytes"),
        (tmp_path / "nothing", "there is no such run or checkpoint"),
        (tmp_path, "neither a run nor a checkpoint"),
        (tmp_path / "hf", "found neither model.safetensors nor model.safetensors.index.json"),
    ):
        assert forge(["generate", str(path)]) == 2
        assert message in capsys.readouterr().err
