"""The Python standard library as training text: select its files, condense them, and encode them as tokens."""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SKIPPED_PARTS = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__phello__",
    # Tables rather than programs.
    "encodings",
    "pydoc_data",
    "entities.py",
}


def library_files(root: Path) -> list[Path]:
    """The standard library's own modules under `root`, in a fixed order."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if SKIPPED_PARTS.isdisjoint(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")
        and not path.relative_to(root).parts[0].startswith("config-")
    )


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every docstring node of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def condense(source: str) -> str:
    """Drop comments, keep only the first line of each docstring, and squeeze runs of blank lines to two."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            code = lines[row - 1][:column].rstrip()
            lines[row - 1] = code + "\n" if code else ""
    for node in docstrings(ast.parse(source)):
        opening, last = lines[node.lineno - 1], node.end_lineno or node.lineno
        summary = node.value.strip().partition("\n")[0].rstrip().replace("\\", "\\\\")
        lines[node.lineno - 1] = f'{opening[: node.col_offset]}"""{summary}"""\n' if summary else ""
        lines[node.lineno : last] = [""] * (last - node.lineno)
    kept: list[str] = []
    for line in "".join(lines).split("\n"):
        if line.strip() or kept[-2:] != ["", ""]:
            kept.append(line.rstrip())
    return "\n".join(kept).strip() + "\n"


def load_documents(root: Path) -> list[str]:
    """The condensed text of every module that is UTF-8, and that parses both before and after it is condensed."""
    documents = []
    for path in library_files(root):
        try:
            text = condense(path.read_text(encoding="utf-8"))
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
            continue
        if text.strip():
            documents.append(text)
    return documents


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every byte is in the vocabulary, so that decoding gives back exactly the text encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def cut(text: str, mean_length: int, rng: random.Random) -> Iterator[str]:
    """Cut `text` into pieces, half of which end with a line and half anywhere, even inside words."""
    start = 0
    while start < len(text):
        stop = start + 1 + int(rng.expovariate(1 / mean_length))
        if rng.random() < 0.5:
            stop = text.find("\n", stop) + 1 or len(text)
        yield text[start:stop]
        start = stop


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], mean_piece: int, seed: int) -> Tensor:
    """All documents as one stream of token ids, each document ended by the end-of-text token.

    A prompt may end where no token of the text would have ended (`"def "`: in the text, the space belongs to the
    name). Documents are therefore encoded in pieces, so that the model learns to go on from any character.
    """
    rng = random.Random(seed)
    pieces = [piece for document in documents for piece in (*cut(document, mean_piece, rng), END_OF_TEXT)]
    encodings = tokenizer.backend_tokenizer.encode_batch(pieces)
    return torch.tensor([token for encoding in encodings for token in encoding.ids])
