"""TensorBoard's event files, without tensorboard's own writer, whose thread can't report a full disk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from forge_train import Bins


class EventFile:
    """One event file in a folder, flushed with every event.

    Args:
        folder: of the run; it is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("ab", buffering=0))
        self._write(file_version="brain.Event:2")

    def add(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        found = [Summary.Value(tag=_tag(name), simple_value=value) for name, value in values.items()]
        found += [Summary.Value(tag=_tag(name), histo=_histogram(bins)) for name, bins in histograms.items()]
        self._write(step=step, summary=Summary(value=found))

    def text(self, name: str, text: str, step: int) -> None:
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        content = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, metadata=about, tensor=content)]))

    def hparams(self, config: Mapping[str, Any]) -> None:
        """Write the values for the HPARAMS page; a list becomes one text."""
        start = SessionStartInfo(start_time_secs=time.time())
        for key, value in config.items():
            if isinstance(value, bool):
                start.hparams[key].bool_value = value
            elif isinstance(value, (int, float)):
                start.hparams[key].number_value = value
            else:
                start.hparams[key].string_value = str(value)
        self._session(metadata.SESSION_START_INFO_TAG, session_start_info=start)

    def rewind(self, step: int) -> None:
        """Have tensorboard drop what other files of the run have from `step` + 1 on."""
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self, outcome: str) -> None:
        status = Status.STATUS_SUCCESS if outcome == "done" else Status.STATUS_FAILURE
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        self._session(metadata.SESSION_END_INFO_TAG, session_end_info=end)
        self._writer.close()

    def _session(self, tag: str, **info: Any) -> None:
        content = HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **info).SerializeToString()
        data = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content)
        about = SummaryMetadata(plugin_data=data)
        self._write(summary=Summary(value=[Summary.Value(tag=tag, metadata=about)]))

    def _write(self, **content: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())


def _tag(name: str) -> str:
    return name.replace(".", "/")


def _histogram(bins: Bins) -> HistogramProto:
    """Sums are computed from the middles of bins, since the values are unknown."""
    middles = [(low + high) / 2 for low, high in zip(bins.edges, bins.edges[1:], strict=False)]
    weighted = list(zip(middles, bins.counts, strict=True))
    return HistogramProto(
        min=bins.edges[0],
        max=bins.edges[-1],
        num=sum(bins.counts),
        sum=sum(value * count for value, count in weighted),
        sum_squares=sum(value**2 * count for value, count in weighted),
        bucket_limit=bins.edges[1:],
        bucket=bins.counts,
    )
