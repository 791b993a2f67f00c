"""A plugin of pytest that sets up the emulation of AMX, and prints at the end the number of products on tiles."""

from __future__ import annotations

import pytest

from .pretend import pretend, products_of_tiles

pretend()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("numprocesses", None):  # each process counts its own
        terminalreporter.write_line(f"{products_of_tiles()} products of tiles")
