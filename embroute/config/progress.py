"""A progress bar on stderr: on a terminal only, gone at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

COUNTED = (MofNCompleteColumn(), TimeElapsedColumn())
PERCENT = (TaskProgressColumn(),)


@contextmanager
def progress_bar(
    activity: str, total: float | None, counted: bool
) -> Iterator[Callable[..., None]]:
    """A bar of counts, or of a share from 0 to 1. Its updates are those of `rich.Progress`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:.40}"),
        BarColumn(),
        *(COUNTED if counted else PERCENT),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(activity, total=total)

        def update(**changes: object) -> None:
            progress.update(task, **changes)  # type: ignore[arg-type]

        yield update
