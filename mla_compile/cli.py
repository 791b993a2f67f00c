"""`mla-compile`: each subcommand is defined beside the code that it runs and is registered by its `add_parser`."""

import argparse
import os
import sys
from collections.abc import Sequence

from mla_compile import explain_command as explain
from mla_compile.bench import command as bench
from mla_compile.cluster import command as layout
from mla_compile.errors import ConfigError
from mla_compile.inspect import command as inspect
from mla_compile.memory import command as memory
from mla_compile.version import __version__

COMMANDS = (explain, inspect, memory, layout, bench)
CLOSED_PIPE = 128 + 13
"""The exit status if what reads the output closes it, as `head` does: that of programs which SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status. Errors that a user can fix print one line, with status 2; a closed
    pipe is none."""
    parser = argparse.ArgumentParser(
        prog="mla-compile", description="Multi-head Latent Attention under torch.compile, measured and explained."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        print(end="", flush=True)  # here, where it can be caught that nobody reads it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the rest of it at exit
        return CLOSED_PIPE
    except (ImportError, OSError, ConfigError) as error:
        print(f"mla-compile: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
