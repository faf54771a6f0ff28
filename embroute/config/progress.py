"""A progress bar, gone at its end: on stderr if that is a terminal, or in a cell of a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic

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
REDRAW_S = 0.1


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
        with _cell_output(progress) if console.is_jupyter else nullcontext(_nothing) as redraw:

            def update(**changes: object) -> None:
                progress.update(task, **changes)  # type: ignore[arg-type]
                redraw()

            yield update


def _nothing() -> None:
    """A terminal is redrawn by rich."""


@contextmanager
def _cell_output(progress: Progress) -> Iterator[Callable[[], None]]:
    """The bar as output of a notebook's cell. rich itself would need ipywidgets for it."""
    from IPython.display import HTML, display

    handle, drawn_s = display(progress, display_id=True), monotonic()

    def redraw() -> None:
        nonlocal drawn_s
        if monotonic() - drawn_s >= REDRAW_S:
            handle.update(progress)
            drawn_s = monotonic()

    try:
        yield redraw
    finally:
        handle.update(HTML(""))
