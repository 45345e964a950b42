"""Frames from video files, by PyAV."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from forge_train import ConfigError
from forge_train_kit.modalities import ItemSource

from . import reading

if TYPE_CHECKING:
    from ..vision import Video

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf"
"""Formats of one file. FFmpeg reads others too: text as a moving picture, and lists of addresses that it would open."""
_COVER = av.stream.Disposition.attached_pic
"""Mark of a picture in a file of sound."""
_ROUNDED = 0.001
"""Seconds to which Matroska rounds times."""
_FAR = 10.0
"""Seconds to the next frame from which on it is looked for from the key frame before it."""


@dataclass
class Clip:
    """An open file."""

    source: ItemSource
    container: av.container.InputContainer
    stream: av.VideoStream
    first: av.VideoFrame
    seconds: float
    """From the first frame to the end of the last, as the file says."""
    slack: float
    """Seconds that may be missing: sound may last longer than the pictures, where only both are measured."""
    size: tuple[int, int]
    """Width and height, upright."""

    def time(self, frame: av.VideoFrame) -> float:
        """Seconds from the first frame."""
        return float((frame.pts or 0) - (self.first.pts or 0)) * float(self.stream.time_base or 0)


@contextlib.contextmanager
def opened(source: ItemSource, config: Video.Config) -> Iterator[Clip]:
    """Open a clip within the limits, and decode its first frame.

    Raises:
        ConfigError: naming the file and the record; also for whatever fails to be decoded inside.
    """
    reading.length(source, config.max_bytes)
    inside = source.offset > 0 or source.size is not None
    file = reading.stream(source, config.max_bytes) if inside else source.path
    try:
        with av.open(file, mode="r", options={"format_whitelist": _FORMATS}) as container:
            stream = next((one for one in container.streams.video if not one.disposition & _COVER), None)
            if stream is None:
                raise ConfigError(f"{source}: has no video, or is damaged.")
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1  # threads of each clip keep memory
            if stream.width * stream.height > config.max_pixels:
                raise ConfigError(
                    f"{source}: {stream.width:,} × {stream.height:,} pixels a frame are more than max_pixels = "
                    f"{config.max_pixels:,}."
                )
            first = next(container.decode(stream), None)
            if first is None:
                raise ConfigError(f"{source}: has no frames.")
            seconds, slack = _length(container, stream)
            if seconds <= 0:
                raise ConfigError(f"{source}: does not say how long it is; write it again with FFmpeg.")
            if seconds > config.max_seconds:
                raise ConfigError(f"{source}: {seconds:,.1f} s are more than max_seconds = {config.max_seconds:,}.")
            size = _squared(first.width, first.height, stream)
            turned = round(first.rotation) % 180 == 90
            yield Clip(source, container, stream, first, seconds, slack, size[::-1] if turned else size)
    except (ConfigError, MemoryError):
        raise
    except av.error.InvalidDataError as error:
        raise ConfigError(f"{source}: is not a video that FFmpeg can read, or is damaged.") from error
    except av.error.FFmpegError as error:
        raise ConfigError(f"{source}: is not a video that FFmpeg can read ({error.strerror}).") from error


def taken(clip: Clip, times: Sequence[float], size: tuple[int, int], *, crop: bool = False) -> NDArray[np.uint8]:
    """The frames that are shown at these times, which increase: `[frames, height, width, 3]`, upright and resized.

    Raises:
        ConfigError: if the clip ends before.
    """
    container, stream, shown = clip.container, clip.stream, clip.first
    frames = container.decode(stream)
    ahead = next(frames, None)
    found = np.empty((len(times), size[1], size[0], 3), np.uint8)
    colours = VideoReformatter()  # each frame would prepare one of its own, in four times the time (av 18.1)
    seen: Any = None
    for index, time in enumerate(times):
        if ahead is not None and time - clip.time(ahead) > _FAR:
            container.seek(int(time / float(stream.time_base or 1)) + (clip.first.pts or 0), stream=stream)
            frames = container.decode(stream)
            shown = ahead = next(frames, ahead)
        while ahead is not None and clip.time(ahead) <= time + _ROUNDED:
            shown, ahead = ahead, next(frames, None)
        if ahead is None and time > (end := clip.time(shown) + _shown_for(stream)) + clip.slack:
            raise ConfigError(f"{clip.source}: is cut short: it ends after {end:.1f} of {clip.seconds:.1f} s.")
        if seen is not shown:
            seen, pixels = shown, _pixels(shown, stream, colours, size, crop=crop)
        found[index] = pixels
    return found


def _pixels(
    frame: av.VideoFrame, stream: av.VideoStream, colours: VideoReformatter, size: tuple[int, int], *, crop: bool
) -> NDArray[np.uint8]:
    image: Image.Image = colours.reformat(frame, format="rgb24").to_image()  # type: ignore[no-untyped-call]
    image = reading.resized(image, _squared(*image.size, stream), crop=False)
    image = image.rotate(round(frame.rotation), expand=True) if round(frame.rotation) % 360 else image
    return np.asarray(reading.resized(image, size, crop=crop))


def _squared(width: int, height: int, stream: av.VideoStream) -> tuple[int, int]:
    """Width and height in square pixels: those of a DVD are wider or narrower, as the file says."""
    return max(1, round(width * float(stream.sample_aspect_ratio or 1))), height


def _shown_for(stream: av.VideoStream) -> float:
    """Seconds of a frame."""
    return float(1 / rate) if (rate := stream.average_rate or stream.guessed_rate) else 0.0


def _length(container: av.container.InputContainer, stream: av.VideoStream) -> tuple[float, float]:
    """Seconds of the video, and how many of them may be missing."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base), _shown_for(stream)
    seconds = (container.duration or 0) / av.time_base
    return seconds, max(0.1 * seconds, _shown_for(stream))
