"""A record of a chat or an instruction data set to one shape: messages with roles, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import nearest

from .calls import calls_of, listed, plain, tools_of
from .flags import FLAGS, check_whole, take_weight, written
from .spelling import check_spelling

Message = dict[str, Any]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""The shapes that are read, and the fields that a record of each has."""

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's thoughts go by; templates read the first."""
_KEYS = ("role", "content", "tool_calls", "function_call", "tool_call_id", *REASONING, *FLAGS)
"""Keys of a message that mean something to all templates or to training."""
_LISTS = ("messages", "conversations", "tools", "history")
"""Fields that are lists; in CSV, an empty text is none."""
_UNREAD = {
    "functions": "name it tools",
    "chat_template_kwargs": "template_options sets options for all records",
    **{
        name: "enable a plugin that reads them beside text"
        for items in ("images", "videos", "audios")
        for name in (items, items.removesuffix("s"))
    },
}
"""Fields beside the messages that would change a rendering and are not read, and what to do."""
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"} | {r: r for r in ROLES}
SPEAKERS["observation"] = "tool"
"""Speakers in ShareGPT's `from`, and the role of each."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of plain JSON types, with at least one of the assistant.

    Args:
        messages: `role` (one of `ROLES`), `content` (a string; none with `tool_calls`), and what else the record has.
        tools: JSON schemas of the tools that the assistant may call.
        context: how many leading messages are never learned: the prompt of a prompt with its completion.
        where: the record's place, for messages: `chats.jsonl, line 7`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    context: int = 0
    where: str = "this record"

    @property
    def learned(self) -> list[int]:
        """The assistant's messages that are learned."""
        return [
            at
            for at, message in enumerate(self.messages)
            if message["role"] == "assistant" and at >= self.context and message.get("weight", 1)
        ]

    def by_turn(self) -> list[Conversation]:
        """The conversation up to each learned message of the assistant, of which only that is learned."""
        return [
            replace(self, messages=self.messages[: at + 1], context=at, where=f"{self.where}: messages[{at}]")
            for at in self.learned
        ]

    def weight(self, turn: int) -> float:
        """Weight of the tokens of a learned message."""
        return float(self.messages[turn].get("weight", 1))

    @property
    def silent(self) -> bool:
        """True if the assistant neither says nor thinks nor calls anything."""
        turns = [message for message in self.messages[self.context :] if message["role"] == "assistant"]
        said = (str(turn.get(name) or "") for turn in turns for name in ("content", *REASONING))
        return not any(turn.get("tool_calls") for turn in turns) and not any(map(str.strip, said))


def conversation(record: Mapping[str, Any], where: str = "this record", shape: str = "") -> Conversation:
    """A record as messages.

    - `messages`: `{"messages": [{"role", "content", "tool_calls"?, …}], "system"?, "tools"?}`. A `weight` of 0 on
      an assistant's message keeps it from being learned, and so does `train`, `training` or `loss_mask` of false or 0;
      another weight, such as 0.5, multiplies the loss of its tokens.
    - `sharegpt`: `{"conversations": [{"from", "value"}], "system"?, "tools"?}`.
    - `prompt`: `{"prompt", "completion", "system"?}`, both strings (what the user says, what the assistant answers) or
      both lists of messages; only the completion is learned.
    - `alpaca`: `{"instruction", "input"?, "output", "system"?, "history"?}`. The input follows the instruction after an
      empty line.

    Args:
        record: fields whose value is None count as absent, since tables have every column in every row.
        where: its place, for messages.
        shape: one of `SHAPES`; the empty string recognises it by its fields.

    Raises:
        ConfigError: the record has another shape, or two of them; a role or a content is not one; nobody or no
            assistant speaks; a field beside the messages means something and is not read.
    """
    fields = {
        name: value for name, value in record.items() if value is not None and (value != "" or name not in _LISTS)
    }
    shape = _shape(fields, [name for name, value in record.items() if value is None], where, shape)
    check_beside(fields, where)
    if shape == "alpaca":
        check_spelling(fields, ("input", "history"), where)
    context = 0
    if shape == "messages":
        found = messages_of(fields["messages"], f"{where}: messages")
    elif shape == "sharegpt":
        found = _sharegpt(fields["conversations"], f"{where}: conversations")
    elif shape == "prompt":
        if str(fields.get("label")).strip().lower() == "false":
            raise ConfigError(f"{where}: label is false: an answer that was judged bad would be learned; leave it out.")
        prompt = said(fields["prompt"], "user", f"{where}: prompt")
        found, context = [*prompt, *said(fields["completion"], "assistant", f"{where}: completion")], len(prompt)
    else:
        found = _alpaca(fields, where)
    if weighed := [at for at in range(context) if found[at].get("weight", 1) not in (0, 1)]:
        raise ConfigError(
            f"{where}: prompt[{weighed[0]}]: weight is {found[weighed[0]]['weight']!r}, but a prompt is not learned; "
            "expected 0 or 1, or leave it out."
        )
    messages = with_system(fields, found, where)
    context += len(messages) - len(found) if context else 0
    return checked(Conversation(tuple(messages), tools_of(fields.get("tools"), where), context, where))


def checked(found: Conversation) -> Conversation:
    """The same conversation, if the assistant says something in it that may be learned."""
    if not found.messages:
        raise ConfigError(f"{found.where}: the conversation is empty.")
    if not any(message["role"] == "assistant" for message in found.messages[found.context :]):
        roles = ", ".join(dict.fromkeys(message["role"] for message in found.messages))
        raise ConfigError(f"{found.where}: there is no turn of the assistant to learn; the roles are {roles}.")
    return found


def messages_of(entries: Any, where: str) -> list[Message]:
    """A list of messages, each checked.

    Raises:
        ConfigError: naming the message, counted from 0.
    """
    entries = listed(entries, where)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{where}: expected a list of messages, found {type(entries).__name__}.")
    if any(isinstance(entry, Mapping) and entry.get("role") is None and "from" in entry for entry in entries):
        return _sharegpt(entries, where)
    return [_message(entry, f"{where}[{at}]") for at, entry in enumerate(entries)]


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def said(value: Any, role: str, where: str) -> list[Message]:
    """Messages from a list of them, or from a string that `role` says."""
    if isinstance(value, str) and not value.lstrip().startswith('[{"'):
        return [{"role": role, "content": value}]
    return messages_of(value, where)


def _shape(fields: Mapping[str, Any], nulls: Sequence[str], where: str, shape: str) -> str:
    read = "; ".join(" + ".join(needs) for needs in SHAPES.values())
    if shape and shape not in SHAPES:
        raise ConfigError(
            f"no shape of records {shape!r}; expected one of {', '.join(SHAPES)}.{nearest(shape, SHAPES)}"
        )
    fits = [name for name, needs in SHAPES.items() if all(need in fields for need in needs) and shape in ("", name)]
    if not fits:
        tried = [needs for name, needs in SHAPES.items() if shape in ("", name)]
        for needs in sorted(tried, key=lambda needs: sum(need in fields for need in needs), reverse=True):
            lacking = [need for need in needs if need not in fields]
            if set(lacking) <= set(nulls):
                raise ConfigError(f"{where}: {lacking[0]} is null; a record of {' and '.join(needs)} needs a value.")
        check_spelling(fields, (need for needs in tried for need in needs), where)
        there = ", ".join(fields) or "none"
        raise ConfigError(f"{where}: its fields ({there}) are no conversation's. Shapes that are read: {read}.")
    if len(fits) > 1:
        raise ConfigError(f"{where}: its fields fit more than one shape of records: {', '.join(fits)}. Choose one.")
    return fits[0]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a message with role and content, found {type(entry).__name__}.")
    message = {str(key): plain(value) for key, value in entry.items() if value is not None}
    check_spelling(message, _KEYS, where)
    role = message.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where}: role is {role!r}; expected one of {', '.join(ROLES)}.{nearest(str(role), ROLES)}")
    if "function_call" in message and "tool_calls" not in message:  # OpenAI's former name
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if calls := calls_of(message.get("tool_calls", []), f"{where}: tool_calls"):
        message["tool_calls"] = calls
    else:
        message.pop("tool_calls", None)
    if (weight := take_weight(message, where)) != 1:
        message["weight"] = weight
    if "content" in message:
        message["content"] = _content(message["content"], where)
    elif not calls or role != "assistant":
        raise ConfigError(f"{where}: the message has no content.")
    return message


def _content(content: Any, where: str) -> str:
    """A string, or a list of text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where}: content: expected a string, found {type(content).__name__}.")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(f"{where}: content has a part of type {kind!r}; only text is read.")
        texts.append(part["text"])
    return "".join(texts)


def _sharegpt(entries: Any, where: str) -> list[Message]:
    entries = listed(entries, where)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{where}: expected a list of turns, found {type(entries).__name__}.")
    turns = []
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"from", "value"} <= entry.keys():
            there = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
            raise ConfigError(f"{where}[{at}]: expected from and value, found {there}.")
        speaker = entry["from"]
        rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
        if speaker == "function_call":
            turns.append({**rest, "role": "assistant", "tool_calls": _called(entry["value"], f"{where}[{at}]")})
            continue
        if speaker not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise ConfigError(f"{where}[{at}]: from is {speaker!r}; expected one of {known}.")
        turns.append({**rest, "role": SPEAKERS[speaker], "content": entry["value"]})
    return messages_of(turns, where)


def _called(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of ShareGPT's `function_call`: one, or a list of them, as an object or as JSON in a string."""
    text = value if isinstance(value, str) else None
    calls = calls_of(
        f"[{text}]" if text is not None and text.lstrip()[:1] != "[" else value if text else [value], where
    )
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def _alpaca(fields: Mapping[str, Any], where: str) -> list[Message]:
    for name in ("instruction", "input", "output"):
        if not isinstance(fields.get(name, ""), str):
            raise ConfigError(f"{where}: {name}: expected a string, found {type(fields[name]).__name__}.")
    history = listed(fields.get("history", []), f"{where}: history")
    if not isinstance(history, list) or not all(isinstance(turn, Sequence) and len(turn) == 2 for turn in history):
        raise ConfigError(f"{where}: history: expected pairs of an instruction and its output.")
    asked = "\n\n".join(part for part in (fields["instruction"], fields.get("input", "")) if part)
    pairs = [*history, (asked, fields["output"])]
    texts = [message for question, answer in pairs for message in (("user", question), ("assistant", answer))]
    return messages_of([{"role": role, "content": content} for role, content in texts], where)


def check_beside(fields: Mapping[str, Any], where: str) -> None:
    """Refuse what stands beside the messages, changes what is said or learned, and is not read."""
    for name, advice in _UNREAD.items():
        value = written(fields.get(name)) or []
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(part not in (None, "", [], {}) for part in parts):
            raise ConfigError(f"{where}: {name} is not read: {advice}, or leave it out.")
    check_whole(fields, where)
    check_spelling(fields, ("system", "tools"), where)


def with_system(fields: Mapping[str, Any], found: Sequence[Message], where: str) -> list[Message]:
    """Messages after the system's, which a field beside them may hold; an empty one is none.

    Raises:
        ConfigError: there is one beside the messages and one among them.
    """
    system = said(fields["system"], "system", f"{where}: system") if fields.get("system") else []
    if system and any(message["role"] == "system" for message in found):
        raise ConfigError(f"{where}: one system prompt is beside the messages and another among them; keep one.")
    return [*system, *found]
