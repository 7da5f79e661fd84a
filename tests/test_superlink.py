"""What Flower's server hears of an error of its database, by SQLite itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore.error import ApiErrorCode, FlowerError
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError

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
