"""The bench: `make bench`."""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from bench import machine, report
from bench.results import Results
from bench.run import run
from bench.subjects.direct import Direct
from bench.subjects.ours import Ours
from bench.subjects.peers import AiSdk, PydanticAi
from bench.subjects.subject import Subject, process, python
from bench.workloads import WORKLOADS
from deploy.local.ports import free_port
from deploy.local.processes import StackError
from deploy.local.service_programs import ROOT

DOCUMENT = ROOT / "docs" / "performance.md"
ROUNDS, ROUNDS_MAX = 3, 20
INTERRUPTED = 130
NAMES = ("direct", "threadloom", "ai-sdk", "ai-sdk-7", "pydantic-ai")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; says what is wrong on stderr."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(asked)
    except StackError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped; nothing was written.", file=sys.stderr)
        return INTERRUPTED
    return 1


def _run(asked: argparse.Namespace) -> int:
    neighbours = machine.Neighbours()
    with tempfile.TemporaryDirectory(prefix="threadloom-bench-") as name:
        folder, port = Path(name), free_port()
        folder.chmod(0o755)  # Postgres may run as another user
        with process("provider", python("bench.provider", str(port)), folder, ROOT, {}, port) as provider:
            subjects = _subjects(asked.subjects, provider.pid)
            missing = [words for words in (subject.missing() for subject in subjects) if words]
            if missing:
                raise StackError("\n".join(missing))
            head = machine.description()
            versions = {subject.name: subject.versions() for subject in subjects}
            results = run(subjects, asked.workloads, asked.rounds, f"http://127.0.0.1:{port}", folder, _say)
    head |= {"rounds": str(asked.rounds), "other processes meanwhile": f"{neighbours.share():.0%} of all cores"}
    written = report.render(results, versions, Ours.name, head)
    print(f"\n{written}")
    if asked.json:
        asked.json.write_text(json.dumps(_plain(results, head, versions), indent=1))
    if asked.write:
        report.put_into(DOCUMENT, written)
        _say(f"Written into {DOCUMENT.relative_to(ROOT)}.")
    return 1 if results.void else 0


def _subjects(names: Sequence[str], provider_pid: int) -> list[Subject]:
    every: list[Subject] = [
        Direct(provider_pid),
        Ours(),
        AiSdk("ai-sdk", "ai-6", brings_node=False),
        AiSdk("ai-sdk-7", "ai-7", brings_node=True),
        PydanticAi(),
    ]
    return [subject for subject in every if subject.name in names]


def _plain(results: Results, head: dict[str, str], versions: dict[str, str]) -> dict[str, object]:
    figures = [
        {"subject": subject, "workload": workload, "rounds": [asdict(figures) for figures in found]}
        for (subject, workload), found in results.rounds.items()
    ]
    void = [{"subject": key[0], "workload": key[1], "reasons": reasons} for key, reasons in results.void.items()]
    return {"head": head, "subjects": versions, "figures": figures, "void": void, "shares": results.shares}


def _say(line: str) -> None:
    print(line, flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _some_of(known: Sequence[str], raw: str) -> list[str]:
    chosen = [word.strip() for word in raw.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in known]
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"known are {', '.join(known)}")
    return [name for name in known if name in chosen]


def _rounds(raw: str) -> int:
    if not raw.isascii() or not raw.isdigit() or not 1 <= int(raw) <= ROUNDS_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {ROUNDS_MAX}")
    return int(raw)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures Threadloom beside its peers.")
    parser.add_argument("--subjects", type=lambda raw: _some_of(NAMES, raw), default=list(NAMES), metavar="LIST")
    parser.add_argument(
        "--workloads", type=lambda raw: _some_of(list(WORKLOADS), raw), default=list(WORKLOADS), metavar="LIST"
    )
    parser.add_argument("--rounds", type=_rounds, default=ROUNDS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, for a program")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
