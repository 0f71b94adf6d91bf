"""TensorBoard's file of the numbers that metrics.jsonl holds."""

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from giantjax.training.metrics import Record

FLUSH_SECONDS = 10


class EventFile:
    """One event file of one start of a run, written by the caller's thread.

    tensorboardX's SummaryWriter hands events to a thread through a queue; a full disk ends that thread, and the run
    then waits for room in the queue for ever.
    """

    def __init__(self, folder: Path, first: int):
        """Open a new file, in which TensorBoard reads that what older files say of steps after `first` is void."""
        folder.mkdir(parents=True, exist_ok=True)
        # The name holds the second; the suffix keeps apart two starts within one.
        self._file = EventsWriter(str(folder / "events"), f".after-{first}")
        self._file.write_event(Event(wall_time=time.time(), step=first + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flushed = time.monotonic()

    def append(self, record: Record) -> None:
        """Write one record, each number under its name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.items()]
        self._file.write_event(Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make sure that what was written survives a power failure."""
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
