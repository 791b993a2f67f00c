"""The log says what was proved, in the words of the algebra, to whoever reads it."""

import logging

import torch

from tests.models import HIDDEN, Combined, L, R


def test_the_proof_of_each_attention_is_logged(caplog, without_codegen):
    with caplog.at_level(logging.DEBUG, logger="mla_compile.graph_log"), torch.no_grad():
        torch.compile(Combined().eval(), backend="mla")(
            torch.randn(2, 3, HIDDEN), (torch.randn(2, 9, L), torch.randn(2, 9, R))
        )
    (text,) = [record.getMessage() for record in caplog.records if "What was proved" in record.getMessage()]
    assert "latent[b, t, l]" in text
    assert "w_uk[n, p, l]" in text
    assert "score[b, s, n, t]" in text
    assert "causal: t <= s" in text
    assert "absorbed: " in text or "chunked: " in text
