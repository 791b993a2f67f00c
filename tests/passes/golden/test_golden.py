"""What the passes do to small graphs is kept in text files, so that a change to a pass is seen in their diff."""

import pytest
import torch

from tests.passes.golden.cases import CASES
from tests.passes.golden.texts import FOLDER, path_of, text_of

SAME_ON = ("2.13", "2.15")
"""Other versions of torch may trace the functions to other nodes. The files are written with the first of these."""


@pytest.mark.skipif(not torch.__version__.startswith(SAME_ON), reason=f"graphs of torch {' and '.join(SAME_ON)}")
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_file(name: str) -> None:
    assert text_of(CASES[name]) == path_of(name).read_text(), "python -m tests.passes.golden.texts writes it anew"


def test_no_file_is_left_of_a_case_that_is_gone() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {path_of(name).name for name in CASES}
