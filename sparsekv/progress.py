"""What a terminal shows while something takes more than a second. All of it goes to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class Steps:
    """Counts on the running line: the first `step` turns a spinner into a bar of `total`."""

    def __init__(self, progress: Progress, task: TaskID, total: int, description: str) -> None:
        self.progress, self.task, self.total, self.description = progress, task, total, description

    def step(self, count: int = 1) -> None:
        """`count` more are done."""
        self.progress.update(
            self.task, total=self.total, description=self.description, advance=count
        )


@contextmanager
def spinning(description: str) -> Iterator[None]:
    """A spinner and the seconds, for work that cannot say how far it is."""
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextmanager
def counting(before: str, during: str, total: int) -> Iterator[Steps]:
    """A spinner named `before` that becomes a bar named `during` with the first step."""
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn()
    shown = (*columns, MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True)) as progress:
        task = progress.add_task(before, total=None)
        yield Steps(progress, task, total, during)
        # Generation may end before `total`, at an end-of-text token.
        progress.update(task, total=max(progress.tasks[0].completed, 1))
