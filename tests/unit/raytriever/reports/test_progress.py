"""Lines that tell how far long work has come."""

import sys
from io import StringIO

import pytest
from rich.console import Console

from raytriever.reports import progress
from raytriever.reports.log import log
from raytriever.reports.progress import ProgressLine, format_seconds


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0.0 s"),
    (4.24, "4.2 s"),
    (59.9, "59.9 s"),
    (59.97, "1 min 00 s"),
    (60, "1 min 00 s"),
    (185.4, "3 min 05 s"),
    (3599.6, "1 h 00 min"),
    (7800, "2 h 10 min"),
    (90_000, "25 h 00 min"),
])  # fmt: skip
def test_seconds_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


ONE_RATE = [(10.0 + second, 100) for second in range(41)]


@pytest.mark.parametrize(("steps", "options", "lines"), [
    (
        ONE_RATE,  # at 15, 30 and 45 s; the first result came at 10 s, 100 texts a second since, on average fewer
        {"total": 11_000, "start_at": 1_000},
        [
            "  embed: 1,600 of 11,000 texts, 40.0 texts/s, 3 min 55 s left, loss 1.5",
            "  embed: 3,100 of 11,000 texts, 70.0 texts/s, 1 min 53 s left, loss 1.5",
            "  embed: 4,600 of 11,000 texts, 80.0 texts/s, 1 min 20 s left, loss 1.5",
        ],
    ),
    ([(1, 5), (21, 40)], {}, ["  embed: 45 texts, 2.1 texts/s, loss 1.5"]),
    ([(16, 0), (32, 5)], {}, ["  embed: no texts yet, loss 1.5", "  embed: 5 texts, 0.2 texts/s, loss 1.5"]),
    ([(16, 0)], {"read": "corpus.jsonl"}, ["  embed: reading corpus.jsonl, loss 1.5"]),
    ([(16, 5), (16, 3)], {"total": 9}, ["  embed: 5 of 9 texts, 0.3 texts/s, 12.8 s left, loss 1.5"]),
    ([(1, 5), (14, 40)], {"total": 45}, []),
    ([(20, 10), (30, 20)], {"total": 100, "begun": 15}, [
        "  embed: 10 of 100 texts, 2.0 texts/s, 45.0 s left, loss 1.5",
    ]),
    ([(20, 10)], {"total": 100, "begun": 19.5}, ["  embed: 10 of 100 texts, loss 1.5"]),
], ids=[
    "now and then", "without a total", "what is not known yet", "what is read", "results at once", "short work",
    "after a start-up", "in the first second",
])  # fmt: skip
def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys, steps, options, lines):
    """When ``units`` are finished at each (second, units)."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressLine("embed", options.get("total"), "texts", options.get("read", "")) as line:
        now[0] = options.get("begun", 0.0)
        line.start_at(options.get("start_at", 0))
        for second, units in steps:
            now[0] = second
            line.advance(units, "loss 1.5")
    assert capsys.readouterr().err.splitlines() == lines


def test_what_is_said_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("[bold]kept[/bold] :warning: " + "x" * 300)
    assert capsys.readouterr() == ("", "[bold]kept[/bold] :warning: " + "x" * 300 + "\n")


def test_a_terminal_shows_rate_and_time_left(monkeypatch, capsys):
    now, written = [0.0], StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "console", Console(file=written, force_terminal=True, width=120))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressLine("embed", 100, "texts") as line:
        for now[0], done in ((1.0, 5), (21.0, 40)):
            line.advance(done, "loss 1.5")
    assert "2.1 texts/s loss 1.5" in written.getvalue()
    assert "25.7 s left" in written.getvalue()
    assert capsys.readouterr().err == ""
