"""The plugin of pytest that begins to pretend, and says at the end how many products there were on tiles."""

from __future__ import annotations

import pytest

from .pretend import pretend, products_of_tiles

pretend()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("numprocesses", None):  # each process counts its own
        terminalreporter.write_line(f"{products_of_tiles()} products of tiles")
