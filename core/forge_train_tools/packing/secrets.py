"""Texts without passwords, keys and tokens of services."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MASK = "***"
"""Stands for a secret."""
_NAMES = r"api_?key|access_?key|private_?key|secret|secret_?key|passwd|password|credentials?|auth|authorization"
_VALUE = r"""&quot;.*?&quot;|\\?"(?:[^"\\\n]|\\[^"\n])*\\?"|'[^'\n]*'|[^\s"'\\,;\[\]{}<>()]+"""
_SECRET = re.compile(rf"""((?:\b|_)(?:{_NAMES})(?:\\?["']|&quot;)?\s*[=:]\s*)({_VALUE})""", re.IGNORECASE)
_MAYBE = re.compile(rf"""((?:\b|_)(?:token|key)(?:\\?["']|&quot;)?\s*[=:]\s*)({_VALUE})""", re.IGNORECASE)
"""Names that mean a service's token as often as a token of text: the value decides."""
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-./+=]{16,}")
_PLAIN = re.compile(r"true|false|null|none|[-+\d.e]*", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"
)
"""Tokens of well-known services, which begin in their own way, and a name with a password in an address."""
_VARIABLE = re.compile(rf"(?:^|_)(?:{_NAMES}|token|key)$", re.IGNORECASE)
SHORTEST = 8
"""Characters of the value of a variable that is looked for elsewhere; shorter ones would hit ordinary words."""


def is_secret(variable: str) -> bool:
    """Return True for the name of an environment variable whose value is nobody else's business."""
    return _VARIABLE.search(variable) is not None


class Secrets:
    """Everything that looks like a secret, and the values of the variables that do. A value that was masked once is
    masked wherever it stands in what follows.

    Args:
        variables: environment variables; by default those of this process.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        found = os.environ if variables is None else variables
        self._values = {value for name, value in found.items() if is_secret(name) and len(value) >= SHORTEST}

    def mask(self, text: str) -> str:
        """The text with `MASK` for each secret; TOML and JSON that Forge wrote stay what they are."""
        text = _SECRET.sub(self._certain, self._known(text))
        return _MAYBE.sub(self._likely, text)

    def line(self, source: str) -> int:
        """The first line of a program with a secret; 0 if there is none. Names alone are no sign there."""
        lines = enumerate(source.splitlines(), 1)
        return next((number for number, line in lines if self._known(line) != line), 0)

    def _known(self, text: str) -> str:
        for value in sorted(self._values, key=lambda value: (-len(value), value)):
            text = text.replace(value, MASK)
        return _KNOWN.sub(MASK, text)

    def _certain(self, found: re.Match[str]) -> str:
        before, inside, after = _parts(found[2])
        number = _PLAIN.fullmatch(inside) is not None and not (before or (found[1].endswith("=") and inside.isdigit()))
        return found[0] if number or not inside else f"{found[1]}{before}{self._noted(inside)}{after}"

    def _likely(self, found: re.Match[str]) -> str:
        before, inside, after = _parts(found[2])
        return f"{found[1]}{before}{self._noted(inside)}{after}" if _RANDOM.fullmatch(inside) else found[0]

    def _noted(self, value: str) -> str:
        """`MASK`, for a value that is a secret elsewhere too, unless it could be a word or a number there."""
        if len(value) >= SHORTEST and not (value.isalpha() or _PLAIN.fullmatch(value)) and MASK not in value:
            self._values.add(value)
        return MASK


def _parts(value: str) -> tuple[str, str, str]:
    """Quote, text and quote of a value."""
    found = re.fullmatch(r"""(\\?["']|&quot;)(.*?)(\\?["']|&quot;)""", value)
    return (found[1], found[2], found[3]) if found else ("", value, "")
