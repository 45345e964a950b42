"""Chats and instructions: records to conversations, their rendering by a chat template, and the tokens to be learned.

template = open_template("", Path("hf"))
segments = render(template, conversation(record, "chats.jsonl, line 7"), learn="assistant")
ids, trained = tokenise(tokenizer, segments)
"""

from .beside import save_question, save_template, turn_end, write_beside
from .faithful import check_written
from .feedback import feedback
from .literal import LiteralEncoder, literal_spans
from .pairs import EmbeddingTexts, Preference, embedding_texts, preference, render_preference
from .records import SHAPES, Conversation, conversation
from .rename import check_names, check_used, renamed
from .render import Learn, Segments, render, tokenise, tokenise_ended
from .sources import BUILT_IN, advice, open_template
from .template import Template

__all__ = [
    "BUILT_IN",
    "SHAPES",
    "Conversation",
    "EmbeddingTexts",
    "Learn",
    "LiteralEncoder",
    "Preference",
    "Segments",
    "Template",
    "advice",
    "check_names",
    "check_used",
    "check_written",
    "conversation",
    "embedding_texts",
    "feedback",
    "literal_spans",
    "open_template",
    "preference",
    "renamed",
    "render",
    "render_preference",
    "save_question",
    "save_template",
    "tokenise",
    "tokenise_ended",
    "turn_end",
    "write_beside",
]
