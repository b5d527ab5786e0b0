"""`python -m labkit doctor | fetch | run | report | gpu-check`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from labkit import __version__
from labkit.cli import doctor, fetch, gpu_check, report, run


def build_parser() -> argparse.ArgumentParser:
    """All subcommands, each added by its own file."""
    parser = argparse.ArgumentParser(
        prog="python -m labkit",
        description="The course on making LLM inference fast, from the command line.",
        epilog="`python -m labkit COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (doctor, fetch, run, report, gpu_check):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 something failed, 2 it could not be asked for like that."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without "µ" shows "?", in place of no table at all
            stream.reconfigure(errors="replace")
    try:
        return args.run(args)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers"):
            print(f"labkit: this Python has no {error.name}: {sys.executable}", file=sys.stderr)
            print("labkit: run it with .venv/bin/python, or `make setup` first", file=sys.stderr)
            return 2
        raise
    except BrokenPipeError:  # `| head` has read enough; nothing more may be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"labkit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("labkit: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
