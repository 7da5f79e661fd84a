"""TensorBoard: event files in the run directory."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtta_flwr.config import RunConfig

END = ".end"  # of the file that only says how the run ended; a resumed run takes it away


class TensorBoard:
    """Writes event files to RUN/tensorboard; ``tensorboard --logdir`` shows one or many runs.

    Every round is written at once. TensorBoard's own writer has a thread do it some time later: what a killed run has
    told would be lost, and what fails would fail there.

    Parameters
    ----------
    folder : Path
        The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._purge = False
        self._file: Any = None

    def begin(self, config: RunConfig) -> None:
        """Open a new file, with the run config for TensorBoard's table of hyper-parameters."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._folder.mkdir(exist_ok=True)
        for ended in self._folder.glob(f"*{END}"):  # of several ends, TensorBoard would believe the first
            ended.unlink()
        self._open()
        self._purge = bool(config.resume)
        self._write(summary=hparams_pb(config.to_flat(), trial_id=self._folder.parent.name))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write scalars; the first of a resumed run hide those of later rounds that it had before."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if self._purge:
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))
            self._purge = False
        self._scalars(step, numbers)

    def finish(self, step: int, numbers: Mapping[str, float], *, finished: bool) -> None:
        """Write the summary as scalars at the last round; and success or failure, beside the hyper-parameters."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.metadata import NULL_TENSOR, SESSION_END_INFO_TAG, create_summary_metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        self._scalars(step, numbers)
        status = STATUS_SUCCESS if finished else STATUS_FAILURE
        ended = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=time.time()))
        metadata = create_summary_metadata(ended)
        end = Summary.Value(tag=SESSION_END_INFO_TAG, metadata=metadata, tensor=NULL_TENSOR)
        self._file.close()
        self._open(END)
        self._write(summary=Summary(value=[end]))
        self._file.close()

    def _open(self, suffix: str = "") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Of several files, TensorBoard reads the one first whose name comes first.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self._file = RecordWriter((self._folder / name).open("wb"))
        self._write(file_version="brain.Event:2")

    def _scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()
