"""Items beside text, such as images: found in records, prepared with their tokens, and read with their rows."""

from .extras import RowItems, item_axes, padded
from .fields import ItemFields, no_items, warn_of_none
from .kept import Kept
from .marks import MarkingTokenizer
from .prompts import ItemPrompts, PromptItems, in_folder, prompts_of
from .rows import ItemRows, Records, first_file, gathered, opened
from .weaver import Weaver

__all__ = [
    "ItemFields",
    "ItemPrompts",
    "ItemRows",
    "Kept",
    "MarkingTokenizer",
    "PromptItems",
    "Records",
    "RowItems",
    "Weaver",
    "first_file",
    "gathered",
    "in_folder",
    "item_axes",
    "no_items",
    "opened",
    "padded",
    "prompts_of",
    "warn_of_none",
]
