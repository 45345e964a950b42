"""Single-line mutants of Python source: each is one small fault, such as `<=` for `<`, or a call left out.

What only people or type checkers read is left alone: annotations, messages, logging, docstrings, assertions. So are the
constants of a module, which are sizes to tune.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Operator → how it is written, and what takes its place."""
CALCULATED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
UNWRAPPED = re.compile(r"reduce|gather|scatter|wait|sorted|reversed|clamp|abs|sqrt|square")
"""Calls that may be left out, so that their argument or object remains."""
COMMUTE = {"min", "max", "isinstance", "getattr", "hasattr", "setattr", "cast"}
"""Calls whose arguments are not swapped: nothing would change, or nothing would run."""
UNREAD = {"strict", "run_check", "exc_info", "extra"}
"""Keywords that change no result where the code is right."""

Change = tuple[int, int, str]
"""From this byte to that one, another text."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    """Path below the root."""
    was: str
    now: str
    """The line, or a longer statement as one line, before and after."""
    number: int
    """Which of the places in the file that would change alike."""
    start: int
    end: int
    text: str
    """What replaces the bytes from `start` to `end`."""

    @property
    def key(self) -> str:
        """Depends on the text of the change alone, so that it survives changes elsewhere in the file."""
        return hashlib.sha256(f"{self.file}\n{self.was}\n{self.now}\n{self.number}".encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return f"{self.key} {self.file}\n    - {self.was}\n    + {self.now}"

    def apply(self, root: Path) -> None:
        """Change the file below `root`."""
        source = (root / self.file).read_bytes()
        (root / self.file).write_bytes(source[: self.start] + self.text.encode() + source[self.end :])


def mutants(root: Path, file: str, unread: Collection[str] = ()) -> list[Mutant]:
    """Every mutant of a file, in the order of their places.

    Args:
        root: what `file` lies below.
        file: the source.
        unread: names of functions whose results only people read.
    """
    source = (root / file).read_bytes()
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for start, end, text in sorted(set(_Finder(source, unread).changes())):
        first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
        before, after = source[first:start].decode(), source[end:last].decode()
        was, now = _flat(before + source[start:end].decode() + after), _flat(before + text + after)
        found.append(Mutant(file, was, now, seen[was, now], start, end, text))
        seen[was, now] += 1
    return found


def draw(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, by a hash of their keys: changes elsewhere in the code do not change which."""
    return sorted(found, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())[:count]


def _flat(text: str) -> str:
    return " ".join(text.split())


class _Finder:
    """Finds what can change in a source."""

    def __init__(self, source: bytes, unread: Collection[str]) -> None:
        self.source, self.unread = source, unread
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def changes(self) -> Iterator[Change]:
        for node in ast.parse(self.source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from self._below(node, node)

    def _below(self, node: ast.AST, function: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.FunctionDef) and node.name in self.unread:
            return
        for start, end, text in self._of(node, function):
            if b"\n" not in self.source[start:end] or isinstance(node, ast.stmt):
                yield start, end, text
        function = node if isinstance(node, ast.FunctionDef) else function
        for child in _children(node):
            yield from self._below(child, function)

    def _of(self, node: ast.AST, function: ast.AST) -> Iterator[Change]:
        """Changes of this node itself."""
        match node:
            case ast.Constant(value=bool()):
                yield self._change(node, str(not node.value))
            case ast.Constant(value=int() | float()):
                yield self._change(node, repr(node.value + 1))
                if node.value == 1:
                    yield self._change(node, "0")
            case ast.Call():
                yield from self._of_call(node)
            case ast.expr() if not isinstance(node, ast.IfExp):
                yield from self._of_operator(node)
            case ast.Return(value=ast.expr() as value) if isinstance(function, ast.FunctionDef):
                returns = ast.unparse(function.returns) if function.returns else ""
                if returns == "bool":
                    yield self._change(node, f"return not ({self._text(value)})")
                elif "None" in returns and ast.unparse(value) != "None":
                    yield self._change(node, "return None")
            case ast.If() | ast.IfExp():
                yield self._change(node.test, "True")
                yield self._change(node.test, "False")
            case ast.comprehension():
                for condition in node.ifs:
                    yield self._change(condition, "True")
            case ast.stmt():
                yield from self._of_statement(node, function)

    def _of_operator(self, node: ast.expr) -> Iterator[Change]:
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in COMPARED:
                written, *others = COMPARED[type(operator)]
                for other in others:
                    yield from self._between([node.left, *node.comparators], written, other)
            case ast.BoolOp():
                pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                yield from self._between(node.values, *pair)
            case ast.BinOp() if type(node.op) in CALCULATED and not _is_text(node):
                yield from self._between([node.left, node.right], *CALCULATED[type(node.op)])
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield self._change(node, re.sub(r"^(not\s+|-)", "", self._text(node)))

    def _of_call(self, node: ast.Call) -> Iterator[Change]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        match node.args:
            case [] if isinstance(node.func, ast.Attribute) and UNWRAPPED.search(name):
                yield self._change(node, self._text(node.func.value))
            case [ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript() as first, *_] if UNWRAPPED.search(name):
                yield self._change(node, self._text(first))
        match node.args:
            case [ast.Name() | ast.Attribute() as first, ast.Name() | ast.Attribute() as second, *_]:
                if name not in COMMUTE:
                    start, between, end = self._start(first), self._end(first), self._end(second)
                    gap = self.source[between : self._start(second)].decode()
                    yield start, end, f"{self._text(second)}{gap}{self._text(first)}"

    def _of_statement(self, node: ast.stmt, function: ast.AST) -> Iterator[Change]:
        match node:
            case ast.AugAssign():
                yield self._change(node, "pass")
            case ast.Expr(value=ast.Call() as call) if not _tells(call):
                yield self._change(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if getattr(function, "name", "") != "__init__":
                yield self._change(node, "pass")
            case ast.Continue():
                yield self._change(node, "break")
            case ast.Break():
                yield self._change(node, "continue")

    def _between(self, nodes: Sequence[ast.expr], written: str, other: str) -> Iterator[Change]:
        """Another operator between expressions."""
        text, at = "", self._start(nodes[0])
        pattern = re.compile(r"\s+".join(map(re.escape, written.split())))
        for left, right in itertools.pairwise(nodes):
            gap = self.source[self._end(left) : self._start(right)].decode()
            text += self.source[at : self._end(left)].decode() + pattern.sub(other, gap, count=1)
            at = self._start(right)
        yield self._start(nodes[0]), at, text

    def _change(self, node: ast.expr | ast.stmt, text: str) -> Change:
        return self._start(node), self._end(node), text

    def _text(self, node: ast.expr) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What of a node may change."""
    unread: list[ast.AST | None] = []
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return
        case ast.Expr(value=ast.Call() as call) if _tells(call):
            return
        case ast.keyword() if node.arg in UNREAD:
            return
        case ast.FunctionDef():
            unread = [node.returns, *node.decorator_list]
        case ast.ClassDef():
            unread = [*node.bases, *node.keywords, *node.decorator_list]
        case ast.arg() | ast.AnnAssign():
            unread = [node.annotation]
        case ast.Call(func=ast.Name(id="cast")):
            unread = [node.args[0]]
        case ast.Call(func=ast.Name(id="isinstance")):
            unread = [node.args[1]]
    for child in ast.iter_child_nodes(node):
        if child not in unread:
            yield child


def _tells(call: ast.Call) -> bool:
    """Whether a call only tells people something, or has to be there."""
    text = ast.unparse(call.func)
    return text.startswith(("log.", "warnings.")) or text.endswith(".add_note") or text == "super().__init__"


def _is_text(node: ast.BinOp) -> bool:
    """Whether strings or lists are joined: another operator would only raise TypeError."""
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )
