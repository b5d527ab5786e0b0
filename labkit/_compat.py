"""The only place that branches on a library's version or works around one."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own start and stop lines, which torch 2.13 writes to file descriptor 2, off the screen."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def quiet_renderer() -> None:
    """Keep a message that plotly's renderer logs with a traceback and then ignores, of a line that it read half (seen
    with choreographer 1.4 on a busy machine), out of notebooks."""
    logging.getLogger("choreographer").setLevel(logging.CRITICAL)


def name_attention(name: str) -> None:
    """Let `transformers` take `name` for an attention function that is registered under it, "flash" in it or not.

    Up to 5.23 it takes every name with "flash" in it for a package or a kernel to be fetched, and fails where there is
    none. Calling it again changes nothing.
    """
    from transformers import modeling_utils

    fetch = getattr(modeling_utils, "lazy_import_flash_attention", None)
    known = getattr(fetch, "known_names", None)
    if known is not None:
        known.add(name)
    if fetch is None or known is not None:
        return

    @functools.wraps(fetch)
    def fetch_others(implementation: str | None, *args: object, **kwargs: object) -> object:
        return None if implementation in fetch_others.known_names else fetch(implementation, *args, **kwargs)

    fetch_others.known_names = {name}
    modeling_utils.lazy_import_flash_attention = fetch_others


def triton_spills_more() -> bool:
    """Whether Triton is one before 3.7, whose compiler keeps less of a large kernel in registers."""
    from importlib.metadata import version

    return tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 7)
