"""Under `--nbval` each chapter's exercises are solved in the kernel that nbval runs it in: see solved_cells.py."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("nbval", default=False):
        from tests.notebooks.solved_cells import SolvedCells

        config.pluginmanager.register(SolvedCells(), "labkit-solved-cells")
