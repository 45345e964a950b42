"""Packs hold no passwords and tokens."""

from __future__ import annotations

import json
import tomllib

import pytest

from forge_train_tools.packing.secrets import Secrets, is_secret

pytestmark = pytest.mark.unit

HF = "hf_" + "aB3" * 8


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('api_key = "sesame-42"', 'api_key = "***"'),
        ('password = "123456"', 'password = "***"'),
        ('["-s", "tracker.api_key=sesame-42", "-q"]', '["-s", "tracker.api_key=***", "-q"]'),
        ('["tracker.password=123456"]', '["tracker.password=***"]'),
        ('{"secret": "sesame-42", "n": 3}', '{"secret": "***", "n": 3}'),
        ("api_key = &quot;sesame-42&quot;", "api_key = &quot;***&quot;"),
        (r'{"text": "api_key = \"sesame-42\"\nx"}', r'{"text": "api_key = \"***\"\nx"}'),
        (f'path = "hf://x?t={HF}"', 'path = "hf://x?t=***"'),
        ('uri = "https://me:sesame@host/x"', 'uri = "https://***@host/x"'),
        ('token = "abcdefgh12345678"', 'token = "***"'),
    ],
)
def test_masks(text: str, left: str) -> None:
    assert Secrets({}).mask(text) == left


@pytest.mark.parametrize(
    "text",
    [
        'api_key = ""',
        "secret = true",
        "auth = 0.5",
        'image_token = "<|image_pad|>"',
        'bos_token = "<s>"',
        "tokens = 300",
        'author = "somebody"',
        '{"tokens_per_second": 2771.306106317543, "loss": 4.5}',
        'path = "https://host/x"',
    ],
)
def test_leaves_what_is_no_secret(text: str) -> None:
    assert Secrets({}).mask(text) == text


def test_a_secret_is_masked_wherever_it_stands_later() -> None:
    secrets = Secrets({"SERVICE_TOKEN": "from-outside-1", "HOME": "/home/somebody"})
    assert tomllib.loads(secrets.mask('[a]\napi_key = "sesame-42"\nb = 1')) == {"a": {"api_key": "***", "b": 1}}
    assert secrets.mask("it said sesame-42 and from-outside-1 at /home/somebody") == (
        "it said *** and *** at /home/somebody"
    )
    assert json.loads(secrets.mask('{"reason": "refused: sesame-42"}')) == {"reason": "refused: ***"}


def test_a_program_may_have_such_names_but_no_values() -> None:
    secrets = Secrets({})
    assert secrets.line('api_key = os.environ["KEY"]\nsecret = load()') == 0
    assert secrets.line(f'x = 1\nkey = "{HF}"') == 2


def test_variables() -> None:
    assert [name for name in ("HF_TOKEN", "A_API_KEY", "OMP_NUM_THREADS", "MY_SECRET") if is_secret(name)] == [
        "HF_TOKEN",
        "A_API_KEY",
        "MY_SECRET",
    ]
