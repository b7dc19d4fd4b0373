"""The table, as it is printed and as docs/performance.md holds it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.results import DIRECT, Results, Value
from bench.workloads import SHORT

BEGIN, END = "<!-- made by make bench: begin -->", "<!-- made by make bench: end -->"
NOTHING = "–"

Cell = Callable[[Results, str], Value | None]


def _number(workload: str, name: str, factor: float = 1.0) -> Cell:
    return lambda results, subject: _times(results.number(subject, workload, name), factor)


def _all(workload: str, factor: float = 1.0) -> Cell:
    return lambda results, subject: _times(results.all_processes(subject, workload), factor)


def _quantile(workload: str, name: str, share: float) -> Cell:
    return lambda results, subject: _times(results.quantile(subject, workload, name, share), 1e3)


def _added(workload: str, name: str, share: float) -> Cell:
    return lambda results, subject: (
        None if subject == DIRECT else _times(results.added(subject, workload, name, share), 1e3)
    )


def _paced(workload: str, streams: int) -> list[tuple[str, Cell, int]]:
    title = f"{streams} x 50/s: "
    return [
        (title + "deltas a second", _number(workload, "rate"), 0),
        (title + "share of the ideal rate", _number(workload, "ratio"), 3),
        (title + "CPU µs a delta", _all(workload), 0),
        (title + "gaps over 100 ms", _number(workload, "gaps"), 0),
        (title + "longest gap, ms", _number(workload, "gap_max", 1e3), 0),
        (title + "time to first token p50, ms", _quantile(workload, "ttft", 0.5), 1),
        (title + "time to first token p99, ms", _quantile(workload, "ttft", 0.99), 1),
    ]


# Title, how to get it, decimals.
ROWS: Sequence[tuple[str, Cell, int]] = [
    ("burst: deltas a second", _number("burst", "rate"), 0),
    ("burst: CPU µs a delta", _all("burst"), 1),
    *_paced("paced-50", 50),
    *_paced("paced-200", 200),
    ("light load: added time to first token p50, ms", _added("light", "ttft", 0.5), 1),
    ("light load: added time to first token p99, ms", _added("light", "ttft", 0.99), 1),
    ("light load: added time of a whole turn p50, ms", _added("light", "whole", 0.5), 1),
    ("light load: added time of a whole turn p99, ms", _added("light", "whole", 0.99), 1),
    ("short burst: added time of a whole turn p50, ms", _added("short", "whole", 0.5), 1),
    ("short burst: added time of a whole turn p99, ms", _added("short", "whole", 0.99), 1),
    ("short burst: CPU ms a turn", _all("short", SHORT.deltas / 1e3), 1),
    ("memory (PSS) an open stream, KiB", _all("memory"), 0),
    ("memory (PSS) of all processes when idle, MiB", _number("memory", "idle_mib"), 0),
]
PROCESSES = (
    ("burst, µs a delta", "burst"),
    ("50 x 50/s, µs a delta", "paced-50"),
    ("200 x 50/s, µs a delta", "paced-200"),
    ("short burst, µs a delta", "short"),
    ("memory (PSS), KiB an open stream", "memory"),
)


def render(results: Results, subjects: Mapping[str, str], ours: str, head: Mapping[str, str]) -> str:
    """All tables as Markdown. `subjects`: names and versions."""
    lines = [*(f"- {name}: {words}" for name, words in head.items())]
    lines += [f"- {name}: {versions}" for name, versions in subjects.items()]
    names = list(subjects)
    lines += [
        "",
        *_table(["", *names], [[title, *_cells(results, names, cell, places)] for title, cell, places in ROWS]),
    ]
    by_process = [(title, results.by_process(ours, workload)) for title, workload in PROCESSES]
    processes = list(dict.fromkeys(name for _, found in by_process for name in found))
    if processes:
        rows = [[title, *(f"{found.get(name, 0):.1f}" for name in processes)] for title, found in by_process if found]
        lines += ["", f"The processes of {ours}:", "", *_table(["", *processes], rows)]
    if results.shares:
        lines += ["", *_share_table(results, ours)]
    for (subject, workload), reasons in results.void.items():
        lines += ["", f"Void: {subject}, {workload}, in {len(reasons)} rounds: {' '.join(reasons[0].split())}"]
    return "\n".join(lines) + "\n"


def put_into(document: Path, report: str) -> None:
    """Replaces what stands between the marks. Raises ValueError when it has none."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no marks to write between")
    document.write_text(f"{before}{BEGIN}\n\n{report}\n{END}{after}")


def _share_table(results: Results, ours: str) -> list[str]:
    columns = list(results.shares)
    stages = list(dict.fromkeys(stage for found in results.shares.values() for stage in found))
    rows = [[stage, *(f"{results.shares[column].get(stage, 0):.0%}" for column in columns)] for stage in stages]
    return [f"Share of each stage of {ours} in its CPU:", "", *_table(["", *columns], rows)]


def _cells(results: Results, names: Sequence[str], cell: Cell, places: int) -> list[str]:
    return [_written(cell(results, name), places) for name in names]


def _written(found: Value | None, places: int) -> str:
    if found is None:
        return NOTHING
    middle, least, most = (f"{number:,.{places}f}" for number in (found.middle, found.least, found.most))
    return middle if least == middle == most else f"{middle} ({least} to {most})"


def _times(found: Value | None, factor: float) -> Value | None:
    return Value(found.middle * factor, found.least * factor, found.most * factor) if found else None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(head), line(marks), *map(line, rows)]
