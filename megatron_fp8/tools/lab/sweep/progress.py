"""Show a sweep's progress and remaining time: a bar on a terminal, else a line for each run and one a minute."""

import sys
import time

_EVERY = 60.0  # seconds between lines


def duration(seconds: float) -> str:
    """Seconds in words, for example "2 h 05 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


class Progress:
    """Counts the steps of all runs together. Use it in a with statement."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._first: int | None = None  # steps made when this session began
        self._bar = _bar() if sys.stdout.isatty() else None

    def __enter__(self) -> "Progress":
        if self._bar:
            self._task = self._bar.add_task("")
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def update(self, done: int, total: int, counts: str) -> None:
        """Show `done` of `total` steps, which may grow; counts: the numbers of runs, in words."""
        now = time.monotonic()
        if self._first is None:
            self._first = done
        made, elapsed = done - self._first, now - self._began
        left = f"about {duration((total - done) / made * elapsed)} left" if made > 0 else "estimating the time"
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, description=f"{counts}; {left}")
        elif now - self._shown >= _EVERY:
            self._shown = now
            print(f"{counts}; {100 * done / total:.0f} % of the steps; {left}", flush=True)


def _bar():
    try:
        from rich import progress
    except ImportError:
        return None
    columns = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TextColumn("{task.description}"))
    return progress.Progress(*columns)
