"""Items beside text, such as images: found in records, prepared with their tokens, and read with their rows."""

from .extras import RowItems, item_axes, padded
from .fields import ItemFields
from .kept import Kept
from .marks import MarkingTokenizer
from .rows import ItemRows

__all__ = ["ItemFields", "ItemRows", "Kept", "MarkingTokenizer", "RowItems", "item_axes", "padded"]
