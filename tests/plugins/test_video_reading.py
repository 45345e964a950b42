"""Frames of clips that av encodes here: those shown at the right times, and files that can't be read refused."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from forge_train import ConfigError
from forge_train_kit.modalities import Item, ItemSource
from forge_train_plugins.modalities._vision import clips
from forge_train_plugins.modalities._vision.modality import Clips, times
from forge_train_plugins.modalities.vision import Video

pytestmark = pytest.mark.unit
CODECS = {"mp4": "mpeg4", "mkv": "libx264", "webm": "libvpx", "avi": "mpeg4"}


def write(path: Path, greys: list[int], fps: int = 10, *, width: int = 32, height: int = 32, sound: int = 0) -> Path:
    """A clip whose frames are of one grey each, with so many seconds of silence."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(CODECS[path.suffix[1:]], rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 4_000_000
        stream.codec_context.gop_size = 5
        silence: Any = container.add_stream("aac", rate=8000, layout="mono") if sound else None
        for grey in greys:
            picture = np.full((height, width, 3), grey, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
        for index in range(sound * 8):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, 1000 * index, Fraction(1, 8000)
            container.mux(silence.encode(frame))
        if sound:
            container.mux(silence.encode())
    return path


def clip(**options: Any) -> Clips:
    return Clips(Video.Config(**{"size": 32, "patch": 16, "merge": 1, "frames": 4, "temporal": 1, **options}))


def source(path: Path, **more: Any) -> ItemSource:
    return ItemSource(str(path), "data.jsonl:3", **more)


def greys(item: Item, temporal: int = 1) -> list[int]:
    """The grey of each frame."""
    frames, height, width = item.grid
    groups = item.values.reshape(frames // temporal, height * width, temporal, -1)
    assert np.ptp(groups, axis=(1, 3)).max() <= 3
    return [round(float(one)) for one in groups.mean((1, 3)).flatten()]


RAMP = [10 * number for number in range(24)]


@pytest.mark.parametrize("ending", CODECS)
def test_frames_are_those_in_the_middle_of_pieces(tmp_path: Path, ending: str) -> None:
    """24 frames at 10 a second, in 4 pieces of 0.6 s: at 0.3, 0.9, 1.5 and 2.1 s."""
    file = write(tmp_path / f"a.{ending}", RAMP)
    item = clip().read(source(file))
    assert item.grid == (4, 2, 2) == clip().measure(source(file))
    assert item.values.dtype == np.uint8
    for found, wanted in zip(greys(item), (30, 90, 150, 210), strict=True):
        assert abs(found - wanted) <= 5


def test_frames_by_the_second(tmp_path: Path) -> None:
    file = source(write(tmp_path / "a.mp4", RAMP))
    for fps, most, count in ((5, 16, 12), (5, 8, 8), (0.1, 8, 1)):
        assert clip(fps=fps, frames=most).measure(file) == (count, 2, 2)
    assert clip(fps=5, frames=16, temporal=4).measure(file) == (12, 2, 2)
    assert clip(fps=1, frames=16, temporal=4).measure(file) == (4, 2, 2)
    assert times(2.0, 4) == [0.25, 0.75, 1.25, 1.75]


def test_frames_that_are_averaged_are_neighbours(tmp_path: Path) -> None:
    item = clip(frames=4, temporal=2).read(source(write(tmp_path / "a.mp4", RAMP)))
    assert [abs(a - b) <= 5 for a, b in zip(greys(item, 2), (30, 90, 150, 210), strict=True)] == [True] * 4
    assert clip(frames=4, temporal=2, merge=2).positions((4, 2, 2)) == 2
    assert clip(connector="resampler", queries=7).positions((4, 2, 2)) == 7


def test_a_clip_of_few_frames_shows_them_longer(tmp_path: Path) -> None:
    item = clip(frames=4).read(source(write(tmp_path / "a.mp4", [40, 200])))
    assert [abs(a - b) <= 5 for a, b in zip(greys(item), (40, 40, 200, 200), strict=True)] == [True] * 4


@pytest.mark.parametrize("ending", CODECS)
def test_frames_far_apart_are_looked_for(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(write(tmp_path / f"a.{ending}", RAMP * 4))
    whole = clip(frames=6).read(file).values
    monkeypatch.setattr(clips, "_FAR", 0.2)
    looked: list[int] = []
    monkeypatch.setattr(
        clips.Clip, "time", lambda self, frame, time=clips.Clip.time: looked.append(1) or time(self, frame)
    )
    assert (clip(frames=6).read(file).values == whole).all()
    assert len(looked) < 80, "96 frames were not all decoded"


def test_keeps_the_aspect_and_stands_upright(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4", RAMP, width=32, height=16)
    assert clip(fit="keep").measure(source(file)) == (4, 1, 2)
    data = file.read_bytes()
    at = data.index(b"tkhd") + 4 + 40  # of the matrix: turned by a quarter
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    turned = b"".join(number.to_bytes(4, "big", signed=True) for number in quarter)
    (tmp_path / "b.mp4").write_bytes(data[:at] + turned + data[at + 36 :])
    assert clip(fit="keep").measure(source(tmp_path / "b.mp4")) == (4, 2, 1)
    assert clip(fit="keep").read(source(tmp_path / "b.mp4")).grid == (4, 2, 1)


def test_the_top_of_a_turned_clip_is_its_left(tmp_path: Path) -> None:
    """Turned clockwise by a quarter, the left of what is stored comes to the top."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, :16] = 255
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    data = (tmp_path / "a.mp4").read_bytes()
    at = data.index(b"tkhd") + 4 + 40
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    turned = b"".join(number.to_bytes(4, "big", signed=True) for number in quarter)
    (tmp_path / "b.mp4").write_bytes(data[:at] + turned + data[at + 36 :])
    shown = clip().read(source(tmp_path / "b.mp4")).values.reshape(4, 4, -1).mean(-1)
    assert (shown[:, :2] > 240).all()
    assert (shown[:, 2:] < 15).all()


@pytest.mark.parametrize(("ending", "codec"), [("mkv", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx")])
def test_frames_that_last_unequally_are_found_by_their_times(tmp_path: Path, ending: str, codec: str) -> None:
    """Frames are shown from 0, 0.1, 0.2, 2, 2.1 and 3.9 s on; of 4 s, those at 0.5, 1.5, 2.5 and 3.5 are taken."""
    file = tmp_path / f"a.{ending}"
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream(codec, rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate((0, 100, 200, 2000, 2100, 3900)):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = greys(clip().read(source(file)))
    assert [abs(a - b) <= 5 for a, b in zip(found, (80, 80, 160, 160), strict=True)] == [True] * 4, found


def test_pixels_that_are_wider_than_high_become_square(tmp_path: Path) -> None:
    """32 × 32 pixels, each twice as wide as high: the middle half of their columns is a square."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, 8:24] = 250
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    file = source(tmp_path / "a.mp4")
    assert clip(fit="keep", size=64).measure(file) == (4, 2, 4)
    assert clip(fit="keep", size=64).read(file).grid == (4, 2, 4)
    assert clip(fit="crop").read(file).values.mean() > 235
    assert clip(fit="square").read(file).values.mean() < 140


def test_the_picture_of_a_song_is_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        sound: Any = container.add_stream("aac", rate=8000, layout="mono")
        cover: Any = container.add_stream("mjpeg", rate=1)
        cover.width = cover.height = 32
        cover.pix_fmt, cover.disposition = "yuvj420p", av.stream.Disposition.attached_pic
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), 9, np.uint8), format="rgb24")))
        container.mux(cover.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(sound.encode(frame))
        container.mux(sound.encode())
    with pytest.raises(ConfigError, match=r"a\.mp4: has no video, or is damaged"):
        clip().measure(source(tmp_path / "a.mp4"))


def test_sound_may_last_longer(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4", RAMP, sound=4)
    assert abs(greys(clip().read(source(file)))[-1] - 210) <= 5


def test_a_clip_among_other_bytes(tmp_path: Path) -> None:
    data = write(tmp_path / "a.mp4", RAMP).read_bytes()
    (tmp_path / "shard.tar").write_bytes(b"before" + data + b"after")
    inside = clip().read(source(tmp_path / "shard.tar", offset=6, size=len(data)))
    assert (inside.values == clip().read(source(tmp_path / "a.mp4")).values).all()


def test_what_is_no_clip_is_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.mkv", RAMP * 2).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    moov = write(tmp_path / "a.mp4", RAMP).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(moov[: len(moov) // 2])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.txt").write_text("no clip, but FFmpeg would show it as a moving picture\n" * 50)
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:10,\n{tmp_path / 'a.mp4'}\n#EXT-X-ENDLIST\n")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(str(tmp_path / "none.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    for name, options, says in (
        ("missing.mp4", {}, "there is no such file"),
        ("empty.mp4", {}, "is empty"),
        ("text.txt", {}, "is not a video that FFmpeg can read"),
        ("list.m3u8", {}, "is not a video that FFmpeg can read"),
        ("cut.mp4", {}, "or is damaged"),
        ("cut.mkv", {}, "is cut short: it ends after"),
        ("sound.mp4", {}, "has no video, or is damaged"),
        ("none.avi", {}, "has no frames"),
        ("a.mkv", {"max_pixels": 1000}, "32 × 32 pixels a frame are more than max_pixels = 1,000"),
        ("a.mkv", {"max_bytes": 99}, "bytes are more than max_bytes = 99"),
        ("a.mkv", {"max_seconds": 2.0}, "4.8 s are more than max_seconds = 2.0"),
    ):
        with pytest.raises(ConfigError) as caught:
            clip(**options).read(source(tmp_path / name))
        message = str(caught.value)
        assert message.startswith(f"data.jsonl:3: {tmp_path / name}: "), message
        assert says in message, message
        assert "\n" not in message


def test_goes_to_workers_and_says_its_rule() -> None:
    modality = pickle.loads(pickle.dumps(clip(fps=2.0)))
    assert modality == clip(fps=2.0)
    assert modality.public().items() >= {"frames": 4, "fps": 2.0, "temporal": 1, "size": 32, "fit": "square"}.items()
    (problem,) = Video(Video.Config(frames=5, temporal=2)).check_config()
    assert (problem.key, problem.message) == ("video.frames", "expected a multiple of temporal = 2.")
    (problem,) = Video(Video.Config(heads=5)).check_config()
    assert problem.key == "video.heads"
    (problem,) = Video(Video.Config(dim=9, heads=3, connector="resampler", queries=2, merge=1)).check_config()
    assert (problem.key, problem.message) == ("video.dim", "expected an even number.")
