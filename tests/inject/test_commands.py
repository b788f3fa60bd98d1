"""`python -m gpuos_numba cache` and `audit` say what is there, and exit with 1 where it is not right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpuos_numba.__main__ import app
from gpuos_numba.inject.audit import AuditLog, Event
from gpuos_numba.inject.store import Store, file_name

RUN = CliRunner()
A = "a" * 64


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUOS_KEY_FILE", str(tmp_path / "signing.key"))
    monkeypatch.setenv("GPUOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUOS_AUDIT_FILE", str(tmp_path / "audit.jsonl"))
    monkeypatch.setenv("COLUMNS", "240")
    return tmp_path


def test_cache_list_verify_clear(places: Path) -> None:
    assert "0 entries" in RUN.invoke(app, ["cache", "list"]).output
    Store().put("cubin", A, b"payload")
    assert A in RUN.invoke(app, ["cache", "list"]).output
    rows = json.loads(RUN.invoke(app, ["cache", "list", "--json"]).stdout)
    assert rows["entries"][0]["key"] == A and rows["folder"] == str(places / "cache")
    good = RUN.invoke(app, ["cache", "verify"])
    assert good.exit_code == 0 and "1 entries" in good.output
    (places / "cache" / file_name("cubin", A)).write_bytes(b"")
    bad = RUN.invoke(app, ["cache", "verify"])
    assert bad.exit_code == 1 and "truncated" in bad.output
    cleared = RUN.invoke(app, ["cache", "clear"])
    assert cleared.exit_code == 0 and "1 files removed" in cleared.output
    assert RUN.invoke(app, ["cache", "verify"]).exit_code == 0


def test_an_open_key_file_is_a_problem(places: Path) -> None:
    Store().put("cubin", A, b"payload")
    (places / "signing.key").chmod(0o644)
    for command in (["cache", "verify"], ["cache", "list"], ["audit", "verify"], ["audit", "show"]):
        result = RUN.invoke(app, command)
        assert result.exit_code == 1 and "open to others" in result.output, command


def test_audit_show_and_verify(places: Path) -> None:
    assert RUN.invoke(app, ["audit", "verify"]).exit_code == 0
    for name in ("first", "second"):
        AuditLog().append(Event("inject", name))
    shown = RUN.invoke(app, ["audit", "show"])
    assert shown.exit_code == 0 and "first" in shown.output and "second" in shown.output
    last = json.loads(RUN.invoke(app, ["audit", "show", "--json", "--last", "1"]).stdout)
    assert [line["name"] for line in last] == ["second"]
    assert "2 lines" in RUN.invoke(app, ["audit", "verify"]).output
    log = places / "audit.jsonl"
    log.write_text(log.read_text().replace("second", "third") + "rubbish\n")
    bad = RUN.invoke(app, ["audit", "verify"])
    assert bad.exit_code == 1 and "line 2" in bad.output
    assert "rubbish" in RUN.invoke(app, ["audit", "show"]).output
