"""`python -m labkit fetch`: a model into the cache, before the room is full."""

import argparse


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register `fetch`."""
    parser = commands.add_parser(
        "fetch",
        help="fetch, verify and convert a model into the cache",
        description="Fetch a model, check its SHA-256 and convert it. A model that is there already is only checked.",
    )
    parser.add_argument("name", nargs="?", help="a catalogue name or a Hub id (default: the course's own model)")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Fetch and say where it lies. A network that is missing is one sentence, by `fetch_model`'s own error."""
    from labkit.models import DEFAULT_MODEL, fetch_model

    name = args.name or DEFAULT_MODEL
    print(f"{name} is ready in {fetch_model(name)}")
    return 0
