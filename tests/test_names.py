"""The names that `import mla_compile` offers, those that are imported only when asked for among them."""

import pytest

import mla_compile


def test_all_names_are_listed():
    assert set(mla_compile.__all__) <= set(dir(mla_compile))


@pytest.mark.parametrize("name", mla_compile.__all__)
def test_all_names_are_there(name):
    assert getattr(mla_compile, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="module 'mla_compile' has no attribute 'LatentCaches'"):
        mla_compile.LatentCaches  # noqa: B018
