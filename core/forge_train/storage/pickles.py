"""Pickles read as plain data. Nothing that they name is imported, made or called.

Python's own unpickler runs what a pickle says, and can be made to take any amount of memory or time by a few bytes: a
large index into its memo, the hash of nested tuples. Here a call is kept as a record of what would have been called,
keys are strings or such records, and every object that is made costs at least a byte of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any


class Call:
    """What a pickle would have called: a function or class, its arguments, and the state that was then set."""

    __slots__ = ("arguments", "function", "state")

    def __init__(self, function: object, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None


class Mark:
    """A name that a pickle may hold, and that can be called."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


def read(data: bytes, known: Callable[[str, str], object]) -> Any:
    """The value of a pickle: None, booleans, integers, strings, tuples, lists, dictionaries and `Call`s.

    Args:
        data: the pickle.
        known: gives what stands for a module's name, a `Mark` where it may be called; raises for any other name.

    Raises:
        ValueError: for a pickle that is damaged, or holds anything else.
    """
    return _Machine(data, known).run()


class _Machine:
    """The stack machine of https://docs.python.org/3/library/pickletools.html, without the instructions that plain
    data does not need."""

    def __init__(self, data: bytes, known: Callable[[str, str], object]) -> None:
        self.data, self.at, self.known = data, 0, known
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, table = self.data, _TABLE
        try:
            while True:
                code = data[self.at]
                self.at += 1
                if code == _STOP:
                    break
                table[code](self)
        except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"a damaged pickle, at byte {self.at:,}") from error
        if len(self.stack) != 1 or self.below:
            raise ValueError("a damaged pickle: it ends too early")
        return self.stack[0]

    # -- reading

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.bytes(size), "little", signed=signed)

    def bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - size : self.at]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 200)
        if end < 0:
            raise IndexError
        return self.bytes(end + 1 - self.at)[:-1].decode("ascii")

    def text(self, size: int) -> None:
        self.stack.append(self.bytes(self.number(size)).decode())

    # -- objects

    def push(self, value: object) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.below) == _DEEPEST:
            raise ValueError("a pickle that is nested too deeply")
        self.below.append(self.stack)
        self.stack = []

    def popped(self) -> list[Any]:
        """What lies above the last mark."""
        found, self.stack = self.stack, self.below.pop()
        return found

    def tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise IndexError
        found = tuple(self.stack[len(self.stack) - size :])
        del self.stack[len(self.stack) - size :]
        self.stack.append(found)

    def marked_tuple(self) -> None:
        found = tuple(self.popped())
        self.stack.append(found)

    def append(self, values: list[Any]) -> None:
        self.expect(self.stack[-1], list).extend(values)

    def set(self, values: list[Any]) -> None:
        table = self.expect(self.stack[-1], dict)
        if len(values) % 2:
            raise IndexError
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str and type(key) is not Call:
                raise ValueError(f"a key that is no name: {type(key).__name__}")
            table[key] = value

    def expect(self, value: Any, kind: type) -> Any:
        if type(value) is not kind:
            raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
        return value

    # -- names and calls

    def name(self, module: object, name: object) -> None:
        self.stack.append(self.known(self.expect(module, str), self.expect(name, str)))

    def stacked_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Mark:
            raise ValueError("a call of something that is no function")
        self.stack.append(Call(function, self.expect(arguments, tuple)))

    def build(self) -> None:
        state = self.stack.pop()
        call = self.expect(self.stack[-1], Call)
        if call.state is not None:
            raise ValueError("an object whose state is set twice")
        call.state = state

    def persistent(self) -> None:
        """What torch keeps outside of the pickle: the identifier of a storage."""
        call = Call(STORAGE, self.expect(self.stack.pop(), tuple))
        self.stack.append(call)

    def pop_value(self) -> list[Any]:
        return [self.stack.pop()]

    def pop_pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]


STORAGE = Mark("torch", "storage")
"""Called with a persistent identifier."""
_DEEPEST = 100
_STOP = ord(".")
_INSTRUCTIONS: Mapping[bytes, Callable[[_Machine], object]] = {
    b"\x80": lambda m: m.bytes(1),  # the protocol
    b"\x95": lambda m: m.bytes(8),  # the length of a frame
    b"(": _Machine.mark,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"\x8a": lambda m: m.push(m.number(min(m.number(1), 16), signed=True)),
    b"G": lambda m: m.push(struct.unpack(">d", m.bytes(8))[0]),
    b"\x8c": lambda m: m.text(1),
    b"X": lambda m: m.text(4),
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.tuple(1),
    b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3),
    b"t": _Machine.marked_tuple,
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.append(m.pop_value()),
    b"e": lambda m: m.append(m.popped()),
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set(m.pop_pair()),
    b"u": lambda m: m.set(m.popped()),
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": _Machine.stacked_name,
    b"R": _Machine.call,
    b"\x81": _Machine.call,
    b"b": _Machine.build,
    b"Q": _Machine.persistent,
    b"q": lambda m: m.remember(m.number(1)),
    b"r": lambda m: m.remember(m.number(4)),
    b"h": lambda m: m.push(m.memo[m.number(1)]),
    b"j": lambda m: m.push(m.memo[m.number(4)]),
    b"\x94": lambda m: m.remember(len(m.memo)),
}
_TABLE = {ord(code): step for code, step in _INSTRUCTIONS.items()}
