"""The share of the keys that goes through a workspace at a time: heads are cut before tokens."""

from hypothesis import given
from hypothesis import strategies as st

from mla_compile.kernels.share import Share, in_even_groups, share_of
from tests.drawn import UNHURRIED


def test_sequences_that_fit_come_together():
    assert share_of(5, 16, 300, 1024) == Share(3, 16, 300)
    assert share_of(2, 16, 300, 1024) == Share(2, 16, 300)


def test_all_tokens_of_as_many_heads_as_fit():
    assert share_of(4, 128, 16384, 1024) == Share(1, 8, 16384)
    assert share_of(4, 16, 16384, 1024) == Share(1, 1, 16384)


def test_tokens_are_cut_where_a_head_does_not_fit_or_too_few_heads_do():
    assert share_of(1, 16, 100_000, 1024) == Share(1, 1, 16384)
    assert share_of(1, 16, 16384, 1024, fewest_heads=4) == Share(1, 4, 4096)
    assert share_of(1, 16, 16384, 1024, fewest_heads=99) == Share(1, 16, 1024)


@UNHURRIED
@given(*(st.integers(1, most) for most in (9, 200, 10**6, 10**5, 300)))
def test_a_share_is_within_its_bound(batch, heads, tokens, workspace_tokens, fewest):
    share = share_of(batch, heads, tokens, workspace_tokens, fewest)
    assert share.sequences * share.heads * share.tokens <= workspace_tokens * heads
    assert 1 <= share.sequences <= batch
    assert 1 <= share.heads <= heads
    assert 1 <= share.tokens <= tokens
    assert share.heads >= min(fewest, heads) * 0.5 or share.tokens == tokens


@UNHURRIED
@given(st.integers(1, 300), st.integers(1, 400))
def test_groups_are_even(heads, most):
    group = in_even_groups(heads, most)
    assert group <= most
    assert -(-heads // group) == -(-heads // min(most, heads))
