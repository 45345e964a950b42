"""Chats and instructions: records to conversations, their rendering by a chat template, and the tokens to be learned.

template = open_template("", Path("hf"))
segments = render(template, conversation(record, "chats.jsonl, line 7"), learn="assistant")
ids, trained = tokenise(tokenizer, segments)
"""

from .beside import turn_end, write_beside
from .faithful import check_written
from .pairs import EmbeddingTexts, Preference, embedding_texts, preference, render_preference
from .records import SHAPES, Conversation, conversation
from .rename import check_names, renamed
from .render import Learn, Segments, render, tokenise, tokenise_ended
from .sources import BUILT_IN, open_template
from .template import Template

__all__ = [
    "BUILT_IN",
    "SHAPES",
    "Conversation",
    "EmbeddingTexts",
    "Learn",
    "Preference",
    "Segments",
    "Template",
    "check_names",
    "check_written",
    "conversation",
    "embedding_texts",
    "open_template",
    "preference",
    "renamed",
    "render",
    "render_preference",
    "tokenise",
    "tokenise_ended",
    "turn_end",
    "write_beside",
]
