"""`mla-compile explain MODEL_DIR`: report what becomes of a checkpoint's attention, after a short run."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from .explaining import explain
from .parsing import positive
from .report import Report, merged
from .sample_run import load


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "explain",
        help="show which attentions of a model are rewritten, and why",
        description="Load a causal language model with transformers, rewrite it, run one prompt and one further token, "
        "and print the report. No code is generated.",
    )
    parser.add_argument("model", help="a model directory or name that AutoModelForCausalLM can load")
    parser.add_argument("--tokens", type=positive, default=16, help="tokens of the prompt (default: 16)")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if an attention stays unchanged."""
    report = explain_model(arguments.model, arguments.tokens, arguments.cache)
    print(report.to_json() if arguments.json else report)
    return 0 if report.sites and report.rewritten == len(report.sites) else 1


def explain_model(name: str, tokens: int, cache_kind: Literal["dynamic", "static"]) -> Report:
    """The merged reports of a prefill of `tokens` random tokens and of a decode step after it."""
    sample = load(name, tokens, "explain", cache_kind)
    with sample.compiling():
        return merged([explain(sample.model, ids, **sample.arguments) for ids in (sample.prefill, sample.decode)])
