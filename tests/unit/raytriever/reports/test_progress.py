import pytest

from raytriever.reports import progress
from raytriever.reports.log import log
from raytriever.reports.progress import ProgressLine, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 00 s"),
        (60, "1 min 00 s"),
        (185.4, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_seconds_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def lines_of(
    steps: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **options: int
) -> list[str]:
    """What a log gets when ``units`` are finished at each (second, units)."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressLine("embed", options.get("total"), "texts") as line:
        line.start_at(options.get("start_at", 0))
        for second, units in steps:
            now[0] = second
            line.advance(units, "loss 1.5")
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(10.0 + second, 100) for second in range(41)]
    lines = lines_of(steps, monkeypatch, capsys, total=11_000, start_at=1_000)
    assert lines == [  # at 15, 30 and 45 s; the first result came at 10 s, 100 texts a second since
        "  embed: 1,600 of 11,000 texts, 100.0 texts/s, 1 min 34 s left, loss 1.5",
        "  embed: 3,100 of 11,000 texts, 100.0 texts/s, 1 min 19 s left, loss 1.5",
        "  embed: 4,600 of 11,000 texts, 100.0 texts/s, 1 min 04 s left, loss 1.5",
    ]


def test_without_a_total_there_is_no_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines_of([(1, 5), (21, 40)], monkeypatch, capsys) == ["  embed: 45 texts, 2.0 texts/s, loss 1.5"]


def test_what_is_not_known_yet_is_not_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of([(16, 0), (32, 5)], monkeypatch, capsys)
    assert lines == ["  embed: no texts yet, loss 1.5", "  embed: 5 texts, 0.3 texts/s, loss 1.5"]
    assert lines_of([(16, 5)], monkeypatch, capsys, total=9) == ["  embed: 5 of 9 texts, loss 1.5"]


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([(1, 5), (14, 40)], monkeypatch, capsys, total=45) == []


def test_what_is_said_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("[bold]kept[/bold] " + "x" * 300)
    assert capsys.readouterr() == ("", "[bold]kept[/bold] " + "x" * 300 + "\n")
