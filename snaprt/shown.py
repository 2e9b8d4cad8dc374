"""Text from files as it may be shown: names in a snapshot are hostile.

What a terminal or a browser would obey instead of showing (control characters, direction overrides,
invisible marks, lone surrogates) is spelt out, and what is endless is shortened. Escaping for HTML
or XML is the business of those who write them.
"""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections.abc import Sequence
from typing import Final

NAME_LENGTH: Final = 120
SENTENCE_LENGTH: Final = 2000

# Categories that have no shape of their own: control, format, surrogate, private, unassigned, and
# the two separators that begin a line.
_SHAPELESS: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str, keep: str = "") -> str:
    """Return text with every character that has no shape spelt out, ``\\x1b`` or ``\\u202e``.

    Args:
        text: The text.
        keep: Characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _spelt(character)
        if unicodedata.category(character) in _SHAPELESS and character not in keep
        else character
        for character in str(text)
    )


def lines(text: str) -> str:
    """Return a text of several lines as it may be shown."""
    return visible(text, keep="\n\t")


def _spelt(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def name(text: str, length: int = NAME_LENGTH) -> str:
    """Return a name as it may be shown, its middle left out where it is longer than ``length``."""
    # Cut first: spelling out may make each character ten times as long.
    if len(text) > length:
        half = (length - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return visible(text)


def array_type(dtype: str, shape: Sequence[int]) -> str:
    """Return an array's type as it may be shown: ``float32[3,2]``."""
    return f"{name(dtype)}[{','.join(map(str, shape))}]"


def cut(text: str, length: int) -> str:
    """Return text with its end left out where it is longer than ``length``."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def sentence(text: str) -> str:
    """Return a sentence, which may have names in it, as it may be shown."""
    return name(" ".join(text.splitlines()), SENTENCE_LENGTH)


def shell_word(text: str) -> str:
    """Return a word as a shell takes it, in visible characters alone."""
    if visible(text) == text:
        return shlex.quote(text)
    quoted = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in os.fsencode(text)
    )
    return f"$'{quoted}'"
