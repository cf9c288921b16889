"""Lines as JSON: one object each, with where it arose, and nothing changed where nobody asks for it."""

import json
import logging
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.command_line import user_errors
from raytriever.errors import UserError
from raytriever.reports.log import configure_log, log, log_fields, log_to
from raytriever.reports.progress import ProgressLine

ROOT = Path(__file__).parents[4]


pytestmark = pytest.mark.usefixtures("json_log")


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_a_line_is_an_object_with_where_it_arose(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("before")
    with log_fields(run="tiny", stage="vectors"):
        log.info("  [bold]two\nlines[/bold] …")
        with log_fields(shard="00003"):
            log.info("of a shard")
        log.info("")  # a blank line is for eyes
        log.info("after it")
    log.info("at the end")
    lines = said(capsys)
    for line in lines:
        written = datetime.fromisoformat(time := line.pop("time"))
        assert written.utcoffset() == timedelta(0)
        assert written.isoformat(timespec="milliseconds") == time
    assert lines == [
        {"message": "before"},
        {"run": "tiny", "stage": "vectors", "message": "[bold]two\nlines[/bold] …"},
        {"run": "tiny", "stage": "vectors", "shard": "00003", "message": "of a shard"},
        {"run": "tiny", "stage": "vectors", "message": "after it"},
        {"message": "at the end"},
    ]


@given(st.text())
def test_any_message_is_one_line_of_ascii(message: str) -> None:
    line = log.handlers[0].format(log.makeRecord("raytriever", logging.INFO, "", 0, message, (), None))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == message.strip()


def test_a_submitted_job_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    described = {"runtime_env": {}, "metadata": {"job_submission_id": "quickstart", "job_name": "quickstart"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(described))
    log.info("in a job")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    log.info("in a job without a name")
    assert [line.get("job") for line in said(capsys)] == ["quickstart", None]


def test_a_users_mistake_is_an_object_that_says_where_it_arose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, user_errors(), log_fields(run="tuesday"), log_fields(stage="model"):
        raise UserError("no such batch")
    assert ended.value.code == 2
    log.info("next")
    mistake, following = said(capsys)
    assert (mistake["run"], mistake["stage"], mistake["message"]) == ("tuesday", "model", "raytriever: no such batch")
    assert "stage" not in following  # it is forgotten


def test_a_terminal_gets_no_bar_and_a_workers_record_is_the_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ProgressLine("embed", 10, "texts")._live is None
    taken: list[logging.LogRecord] = []
    with log_to(taken.append), log_fields(shard="3"):
        log.info("  as it is")
    assert [(record.getMessage(), vars(record)["fields"]) for record in taken] == [("  as it is", {"shard": "3"})]


def test_a_workers_record_has_the_drivers_fields_and_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[logging.LogRecord] = []
    with log_to(taken.append, level=logging.WARNING), log_fields(shard="3"):
        log.info("of another rank")
        log.warning("trying again")
    sent = json.loads(json.dumps([vars(record) for record in taken]))
    with log_fields(run="tiny", shard="?"):
        for attributes in sent:
            log.handle(logging.makeLogRecord(attributes))
    (line,) = said(capsys)
    assert (line["run"], line["shard"], line["message"]) == ("tiny", "3", "trying again")


@pytest.mark.parametrize("form", ["", "text"])
def test_text_is_what_it_is(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAYTRIEVER_LOG", form)
    configure_log()
    with log_fields(stage="vectors"):
        log.info("  vectors: …\n")
        log.info("")
    assert capsys.readouterr() == ("", "  vectors: …\n\n\n")


def test_another_form_is_refused() -> None:
    command = [sys.executable, "-m", "raytriever", "settings", "train"]
    environment = os.environ | {"RAYTRIEVER_LOG": "jsonl"}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert refused.returncode == 2
    assert refused.stderr.strip() == (
        "raytriever: RAYTRIEVER_LOG is 'jsonl'. It may be json (each line is a JSON object) or text, the default."
    )
