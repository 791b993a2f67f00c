"""Parse the arguments that several subcommands take: counts, numbers of tokens and of bytes, files of figures."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
BYTE_UNITS = {
    "": 1,
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")},
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
}
LARGEST = 2**63 - 1
"""The greatest number that is taken: what 64 bits hold. Products of several of them fit into a float."""
FIGURES = (".png", ".svg", ".pdf")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive whole number, found {text}")
    return _small_enough(int(text), text)


def tokens(text: str) -> int:
    """Parse a number of tokens: `4096`, `128k` for 128 * 1024, `1m`."""
    return _number(text, TOKEN_UNITS, "tokens, such as 4096 or 128k")


def in_bytes(text: str) -> int:
    """Parse a number of bytes: `1000`, `80GiB` for 80 * 1024 ** 3, `80GB` for 80 * 1000 ** 3."""
    return _number(text, BYTE_UNITS, "bytes, such as 80GiB or 16GB")


def file(text: str) -> Path:
    """Parse the path of a file to write, in a folder that exists. The file is as it was, but could be opened."""
    path = Path(text)
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ArgumentTypeError(f"expected a file in a folder that exists, found {text!r}")
        _open_to_write(path)
    except OSError as error:
        raise ArgumentTypeError(f"expected a file that can be written, found {text!r}: {error.strerror}") from error
    return path


def folder(text: str) -> Path:
    """Parse the path of a folder to write, which is made if it is not there. Nothing is made yet, but could be."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"expected a folder, found the file {text!r}")
    whole = path.absolute()
    try:
        with TemporaryDirectory(dir=next(there for there in (whole, *whole.parents) if there.exists())):
            return path
    except OSError as error:
        raise ArgumentTypeError(f"expected a folder that can be written, found {text!r}: {error.strerror}") from error


def figure(text: str) -> Path:
    """Parse the path of a figure to write, whose suffix says its format."""
    path = file(text)
    if path.suffix.lower() not in FIGURES:
        raise ArgumentTypeError(f"expected a file that ends in {', '.join(FIGURES)}, found {text!r}")
    return path


def _open_to_write(path: Path) -> None:
    """Raise an OSError if a file cannot be opened. Pipes, whose reader would take that for the end, are not tried."""
    new = not os.path.lexists(path)
    if new or path.is_file():
        path.open("ab").close()
    if new:
        path.unlink(missing_ok=True)


def _number(text: str, units: dict[str, int], expected: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number = Fraction(found[1]) * units[found[2]] if found and found[2] in units else 0
    if number < 1:
        raise ArgumentTypeError(f"expected a number of {expected}, found {text!r}")
    return _small_enough(int(number), text)


def _small_enough(number: int, text: str) -> int:
    if number > LARGEST:
        raise ArgumentTypeError(f"expected at most {LARGEST:,}, found {text}")
    return number
