"""Tokenizers of folders without a `tokenizer.json`: transformers makes one of the files that are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.errors import describe
from forge_train_kit.model_files import files, vocabulary_of

from ...lfs import pointer
from . import special

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def names_class(folder: Path) -> bool:
    """True if a file names the class of the tokenizer, or the type of the model, which decides it."""
    return bool(
        special.table(folder / special.TOKENIZER_CONFIG).get("tokenizer_class")
        or special.table(folder / special.MODEL_CONFIG).get("model_type")
    )


def converted(folder: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer that transformers makes of a folder's files, and its end of a text.

    Raises:
        ConfigError: there are no such files, transformers is missing or can't read them, or its class does not use
            them.
    """
    found = files(folder)
    name = vocabulary_of(found)
    if not name:
        raise ConfigError(
            f"tokenizer.path: {folder} has no tokenizer: neither a tokenizer.json nor another file of one."
        )
    for file in found.values():
        with file.open("rb") as opened:
            if reason := pointer(opened.read(64)):
                raise ConfigError(f"tokenizer.path: {file} {reason}")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"tokenizer.path: {folder / name} needs transformers to be read: pip install 'forge-train[hf]'."
        ) from error
    try:
        opened_as: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a class may raise anything
        raise _refused(folder, name, f"transformers can't read it: {describe(error)}") from error
    kind = type(opened_as)
    used = {file for key, file in kind.vocab_files_names.items() if key not in ("tokenizer_file", _CONFIG_KEY)}
    if not isinstance(opened_as, transformers.TokenizersBackend):
        raise _refused(folder, name, f"{kind.__name__} of transformers is no fast tokenizer")
    read = Path(
        getattr(opened_as, "vocab_file", None) or ""
    ).name  # tiktoken.model goes by another name than the class's
    lacking = sorted(file for file in used if not (folder / file).is_file()) if read != "tiktoken.model" else []
    if name not in used and lacking:
        raise _refused(folder, name, f"{kind.__name__} of transformers reads {', '.join(sorted(used))} instead")
    if lacking:
        raise _refused(folder, name, f"{kind.__name__} of transformers also needs {', '.join(lacking)}")
    return opened_as.backend_tokenizer, opened_as.eos_token_id


_CONFIG_KEY = "tokenizer_config_file"


def _refused(folder: Path, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"tokenizer.path: {folder / name} can't be used as a tokenizer ({why.rstrip('.')}); put a tokenizer.json "
        f"into {folder}, or name another tokenizer."
    )
