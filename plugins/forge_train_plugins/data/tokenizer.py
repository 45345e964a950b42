"""The tokenizer of a run: bytes, or a tokenizer from files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forge_train import FilePath, Plugin, Problem, Volatile, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig
    from forge_train_kit.tokenizer import Tokenizer as TokenizerProtocol


class Tokenizer(Plugin):
    """Text to token ids and back: bytes, a `tokenizer.json` of Hugging Face's tokenizers, or a SentencePiece model.

    SentencePiece needs `pip install 'forge-train[data]'`. A folder without `tokenizer.json` is read as `transformers`
    reads it, from `tokenizer.model`, from `vocab.json` and `merges.txt`, or from another file of its class; that needs
    `pip install 'forge-train[hf]'`. Files that no class reads are refused.

    `text.tokenizer` is another name for `tokenizer.path`.
    """

    api = (1, 0)

    @section
    class Config:
        path: Annotated[str, FilePath(words=("bytes",)), Volatile()] = "bytes"
        """`bytes`, a `tokenizer.json`, a SentencePiece `tokenizer.model`, or a model's folder. The other files of a
        folder define its special tokens. The files are copied into the run. At resume, their content
        must match, not their path."""
        add: tuple[str, ...] = ()
        """Tokens to add where a run starts from a folder in Hugging Face layout: embedding and head grow, unless they
        have free rows, and the new rows start as the mean of the others."""
        add_special: tuple[str, ...] = ()
        """The same for special tokens, which decoded text leaves out."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        from forge_train_kit.model_files import files, vocabulary_of

        added = (*self.config.add, *self.config.add_special)
        if "" in added:
            yield Problem("tokenizer.add", "a token is empty.")
        if twice := {token for token in added if added.count(token) > 1}:
            yield Problem("tokenizer.add", f"{min(twice)!r} is named twice.")
        if self.config.path == "bytes" and added:
            yield Problem("tokenizer.add", "bytes take no tokens; name a tokenizer.json in tokenizer.path.")
        path = Path(self.config.path)
        if self.config.path == "bytes" or path.is_file():
            return
        if not path.is_dir():
            yield Problem(
                "tokenizer.path",
                f"no file {str(path)!r}; expected 'bytes', a tokenizer.json, a tokenizer.model or its folder.",
            )
        elif not vocabulary_of(files(path)):
            yield Problem(
                "tokenizer.path",
                f"there is no tokenizer.json, and no other file of a tokenizer, in {path}. With transformers, "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW) writes one.",
            )

    @hookimpl
    def tokenizer(self, job: Job) -> TokenizerProtocol:
        return self._tokenizer

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        tokenizer, path = self._tokenizer, self.config.path
        begin = f"tokens {', '.join(map(str, tokenizer.begin))}" if tokenizer.begin else "no token"
        end = "no token" if tokenizer.end is None else f"token {tokenizer.end}"
        yield "tokenise", f"{path}: {tokenizer.vocabulary:,} token ids, {begin} before a document, {end} after it"

    @cached_property
    def _tokenizer(self) -> TokenizerProtocol:
        from forge_train_kit.data.tokenizers import open_tokenizer
        from forge_train_kit.data.tokenizers.added import check_added

        if tokens := (*self.config.add, *self.config.add_special):
            check_added(Path(self.config.path), tokens)
        return open_tokenizer(self.config.path)
