"""How a sound is read: the logarithms of the mel bands of its frames. This file imports no torch."""

from __future__ import annotations

import io
import wave
from functools import cache
from pathlib import Path

import numpy as np

from forge_train import ConfigError
from forge_train_kit.modalities import Item

SILENCE = 1e-5
"""Added to the magnitude of a band before its logarithm."""
TYPES = {1: np.uint8, 2: np.dtype("<i2"), 4: np.dtype("<i4")}


class Sound:
    """A modality: an item is a file in WAV format, a patch the bands of a frame."""

    name, placeholder = "sound", "<sound>"

    def __init__(self, options):
        self.options, self.features = options, options.bands

    def public(self):
        """What prepared data depends on."""
        return {name: getattr(self.options, name) for name in ("rate", "frame", "bands", "longest")}

    def measure(self, source):
        with _opened(source) as file:
            return self._grid(source, file)

    def read(self, source):
        with _opened(source) as file:
            grid = self._grid(source, file)
            raw, width, channels = file.readframes(file.getnframes()), file.getsampwidth(), file.getnchannels()
        if len(raw) % (width * channels):
            raise ConfigError(f"{source}: the file ends within a sample.")
        samples = np.frombuffer(raw, TYPES[width]).astype(np.float32)
        samples = (samples - 128) / 128 if width == 1 else samples / 2 ** (8 * width - 1)
        samples = samples.reshape(-1, channels).mean(1)
        frame = self.options.frame
        frames = np.zeros((grid[0], frame), np.float32)
        frames.reshape(-1)[: len(samples)] = samples
        magnitudes = np.abs(np.fft.rfft(frames * np.hanning(frame), axis=1)) / frame
        bands = magnitudes @ _filters(self.options.rate, frame, self.options.bands)
        return Item((np.log10(bands + SILENCE) + 3).astype(np.float32), grid)

    def positions(self, grid):
        return grid[0]

    def encoder(self, dim):
        from forge_sounds.encoder import Encoder

        return Encoder(self.options, dim)

    def _grid(self, source, file):
        rate, count, options = file.getframerate(), file.getnframes(), self.options
        if rate != options.rate:
            raise ConfigError(f"{source}: it has {rate} samples per second, and sounds.rate is {options.rate}.")
        if file.getsampwidth() not in TYPES:
            raise ConfigError(f"{source}: samples of {file.getsampwidth()} bytes can't be read; 1, 2 and 4 can.")
        if not count:
            raise ConfigError(f"{source}: it has no samples.")
        if count > options.longest * rate:
            raise ConfigError(f"{source}: it takes {count / rate:.1f} s, and sounds.longest is {options.longest}.")
        return -(-count // options.frame), 1, 1


def _opened(source):
    try:
        data = source.data if source.path is None else Path(source.path).read_bytes()
        return wave.open(io.BytesIO(data))
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"{source}: {error}.") from error


@cache
def _filters(rate, frame, bands):
    """`[frequencies, bands]`: triangles that are equally wide in mel."""
    mels = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    frequencies = np.arange(frame // 2 + 1)[:, None] * rate / frame
    up = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.minimum(up, down).clip(0)
