"""The runs of a SuperLink: waited for, followed, listed and stopped."""

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from fedtta_flwr.control import moment, one_line
from fedtta_flwr.errors import FederationError, RunError

if TYPE_CHECKING:
    import httpx
    from flwr.supercore.control import ControlHttpClient

START_SECONDS = 60.0
#: all that Flower knows of a run whose ServerApp, or server, was killed
KILLED = ("Task failed with unknown error", "No heartbeat received from the task")
REACH_SECONDS = 60.0  # for which a SuperLink may be out of reach: a tunnel that is opened again


class Run(NamedTuple):
    """A run, as the SuperLink knows it.

    Attributes
    ----------
    run_id : int
        Flower's name for it.
    status : str
        pending, starting, running, finished:completed, finished:failed or finished:stopped.
    since : str
        When that began, UTC.
    details : str
        Why it failed.
    """

    run_id: int
    status: str
    since: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status.startswith("finished")


def await_start(client: "ControlHttpClient", run_id: int) -> None:
    """Wait until a run is taken up.

    Raises
    ------
    FederationError
        Nothing does so within a minute.
    """
    deadline = time.monotonic() + START_SECONDS
    while find_run(client, run_id).status == "pending":
        if time.monotonic() > deadline:
            raise FederationError(
                f"run {run_id} has been pending for {START_SECONDS:g} s, nothing starts its ServerApp: the server's "
                f"flower-superexec may have ended, see the log of `fedtta serve`; with --isolation process one must "
                f"be connected to the SuperLink"
            )
        time.sleep(0.2)


def follow(client: "ControlHttpClient", run_id: int) -> None:
    """Show a run's log until its end; where a connection was lost, it goes on once there is one again.

    Raises
    ------
    RunError
        The run does not complete (``flwr run`` itself would exit with 0).
    FederationError
        The SuperLink has been out of reach for a minute.
    """
    import httpx
    from flwr.proto.control_pb2 import StreamLogsRequest

    shown = 0.0  # up to when, by the SuperLink's clock
    while True:
        run = find_run(client, run_id)
        try:
            for part in client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=shown)):
                print(part.log_output, end="", flush=True)
                shown = part.latest_timestamp
            if run.finished:  # before its log was asked for: so that was all of it
                break
        except httpx.HTTPError as error:
            _check_passing(error)
            print(f"the SuperLink is out of reach ({one_line(error)}); trying again", file=sys.stderr, flush=True)
        time.sleep(0.5)
    if run.status != "finished:completed":
        cause = ": ".join(filter(None, (run.status, run.details)))
        if run.details.startswith(KILLED):
            cause += (
                "; its process, or the server, was ended: if checkpoint-every was set, `fedtta run --resume DIR` with "
                "the other options of this run goes on"
            )
        raise RunError(f"run {run_id} ended as {cause}")


def find_run(client: "ControlHttpClient", run_id: int) -> Run:
    """Return what becomes of a run; a SuperLink that is out of reach is asked again for a minute.

    Raises
    ------
    FederationError
        Nor does it answer then.
    """
    import httpx

    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            return list_runs(client, run_id)[0]
        except httpx.HTTPError as error:
            _check_passing(error)
            if time.monotonic() > deadline:
                raise FederationError(
                    f"the SuperLink has been out of reach for {REACH_SECONDS:g} s ({one_line(error)})"
                ) from None
            time.sleep(1)


def _check_passing(error: "httpx.HTTPError") -> None:
    """Raise what time will not heal: an answer other than that the server is unavailable."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        raise error


def list_runs(client: "ControlHttpClient", run_id: int | None = None) -> list[Run]:
    """Return all runs, or one, the oldest first."""
    from flwr.proto.control_pb2 import ListRunsRequest

    found = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict.values()
    return [
        Run(
            run_id=run.run_id,
            status=":".join(filter(None, (run.status.status, run.status.sub_status))),
            since=moment(run.finished_at or run.running_at or run.starting_at or run.pending_at),
            details=run.status.details,
        )
        for run in sorted(found, key=lambda run: run.pending_at)
    ]


def stop_run(client: "ControlHttpClient", run_id: int) -> None:
    """End a run.

    Raises
    ------
    FederationError
        It has ended already, or there is no such run.
    """
    from flwr.proto.control_pb2 import StopRunRequest

    if not client.StopRun(StopRunRequest(run_id=run_id)).success:
        raise FederationError(f"run {run_id}: the SuperLink does not stop it; `fedtta runs` shows what becomes of it")
