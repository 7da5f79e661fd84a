"""What Flower's server hears of an error of its database, by SQLite itself, and what it logs."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from flwr.supercore.error import ApiErrorCode, FlowerError
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError

from fedtta_flwr.control import control_api
from fedtta_flwr.deploy import Address, superlink_command
from fedtta_flwr.ports import free_port
from fedtta_flwr.runs import list_runs
from fedtta_flwr.superlink import say_unavailable


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A database of one row that waits for nobody."""
    engine = create_engine(f"sqlite:///{tmp_path / 'state.db'}", connect_args={"timeout": 0})
    event.listen(engine, "handle_error", say_unavailable)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (content BLOB UNIQUE)"))
        connection.execute(text("INSERT INTO t VALUES ('once')"))
    yield engine
    engine.dispose()


def is_unavailable(engine: Engine, statement: str) -> bool:
    with pytest.raises(FlowerError) as caught, engine.connect() as connection:
        connection.execute(text(statement))
    return caught.value.code == ApiErrorCode.LINKSTATE_NOT_INITIALIZED


def test_a_full_disk_makes_it_unavailable(database: Engine) -> None:
    event.listen(database, "begin", lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1"))
    assert is_unavailable(database, "INSERT INTO t VALUES (zeroblob(1000000))")


def test_another_writer_makes_it_unavailable(database: Engine) -> None:
    with database.connect() as other:
        other.execute(text("BEGIN IMMEDIATE"))
        assert is_unavailable(database, "INSERT INTO t VALUES ('twice')")


def test_a_folder_that_is_away_makes_it_unavailable(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'away' / 'state.db'}")
    event.listen(engine, "handle_error", say_unavailable)
    assert is_unavailable(engine, "SELECT 1")


def test_what_no_time_heals_stays_an_error(database: Engine) -> None:
    with pytest.raises(IntegrityError), database.begin() as connection:
        connection.execute(text("INSERT INTO t VALUES ('once')"))


def test_requests_are_no_lines_of_its_log(tmp_path: Path) -> None:
    fleet, control = (Address("127.0.0.1", free_port()) for _ in range(2))
    command = superlink_command(fleet=fleet, control=control, database=tmp_path / "state.db", certificates=None)
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        with control_api(str(control), None) as client:
            while server.poll() is None:
                try:
                    assert list_runs(client) == []
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
    finally:
        server.terminate()
        server.wait()
    assert "Starting the SuperLink" in log.read_text()
    assert "list-runs" not in log.read_text()
