"""The plugin that brings sounds. This file imports neither torch nor numpy."""

from __future__ import annotations

from typing import Annotated

from forge_train import Gt, Plugin, Problem, hookimpl, section


class Sounds(Plugin):
    """Sounds: WAV files, as frames of a log-mel spectrogram that a small transformer encodes.

    Every frame takes a position of the sequence. Channels are averaged. Frames of one sound attend to each other.
    """

    api = (1, 0)
    requires = ("fusion",)

    @section
    class Config:
        rate: Annotated[int, Gt(0)] = 16000
        """Samples per second; a file with another rate is refused."""
        frame: Annotated[int, Gt(1)] = 640
        """Samples of a frame. Frames do not overlap, and the last one is filled up with silence."""
        bands: Annotated[int, Gt(0)] = 40
        """Mel bands of a frame."""
        longest: Annotated[float, Gt(0)] = 30.0
        """Seconds; a longer file is refused before its samples are read."""
        dim: Annotated[int, Gt(0)] = 128
        """Width of the encoder."""
        layers: Annotated[int, Gt(0)] = 2
        """Number of its blocks."""
        heads: Annotated[int, Gt(0)] = 4
        """Heads of its attention, a divisor of dim."""

    @hookimpl
    def check_config(self):
        if self.config.dim % self.config.heads:
            yield Problem("sounds.heads", f"{self.config.heads} heads do not divide sounds.dim = {self.config.dim}.")
        if self.config.dim % 2:
            yield Problem("sounds.dim", "must be even: half of the features of a time are sines, half cosines.")

    @hookimpl
    def modalities(self, job):
        from forge_sounds.sound import Sound

        return [Sound(self.config)]
