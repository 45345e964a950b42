"""Items beside text, such as images: found in records, prepared with their tokens, and read with their rows."""

from .extras import RowItems, item_axes, padded
from .fields import ItemFields
from .kept import Kept
from .marks import MarkingTokenizer
from .prompts import ItemPrompts, PromptItems, no_items, prompts_of
from .rows import ItemRows

__all__ = [
    "ItemFields",
    "ItemPrompts",
    "ItemRows",
    "Kept",
    "MarkingTokenizer",
    "PromptItems",
    "RowItems",
    "item_axes",
    "no_items",
    "padded",
    "prompts_of",
]
