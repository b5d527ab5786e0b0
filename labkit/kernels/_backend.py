"""What every op's choice of backend is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A backend's name and the reason why it is the one."""

    name: str
    reason: str


class BackendUnavailable(RuntimeError):
    """A backend asked for by name cannot run here; the message says why."""
