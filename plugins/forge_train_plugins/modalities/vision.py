"""Images, whole or in tiles, and video clips as items among text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import ConfigError, Ge, Gt, Job, Le, Plugin, Problem, hookimpl, section
from forge_train_kit.data.plugin import item_values
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.modalities import Modality

from ._tiles.section import TileSection
from ._tiles.section import check as check_tiles
from ._vision.section import VisionSection, check, check_shared
from ._vision.vision_folder import implied

if TYPE_CHECKING:
    from forge_train import CheckpointEvent, Model


class _Vision(Plugin):
    """Encoders of images and clips, at work."""

    config: Any
    _name: ClassVar[str]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._once: list[Any] = []

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        """Workers that read data, and the options that the folder of an encoder decides."""
        own = {f"{cls._name}.{option}": value for option, value in implied(config.model).items()}
        return {**item_values("sft"), **own}

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        if self.config.once:
            from ._vision.once import attach

            self._once = attach(self.config, self._name, job, model)

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        for one in self._once if event.kind == "loaded" else ():
            one.leave()


class Image(_Vision):
    """Images, cut into patches that a vision transformer encodes (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    api = (1, 0)
    facts: ClassVar[Mapping[str, Any]] = {
        "hf.architectures": (
            "LlavaForConditionalGeneration",
            "PaliGemmaForConditionalGeneration",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        )
    }
    requires = ("fusion",)
    _name = "image"
    needs: ClassVar[Mapping[str, str]] = {"PIL": "pip install 'forge-train[images]'"}

    @section
    class Config(VisionSection):
        """Size, encoder and connector."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        yield from check(self.config, "image")

    @hookimpl
    def modalities(self, job: Job) -> list[Modality]:
        from ._vision.modality import Pictures

        return [Pictures(self.config)]

    @hookimpl
    def import_hf_around(self, config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
        from ._vision import llava, paligemma, qwen_vl

        return llava.read(config, beside) or paligemma.read(config, beside) or qwen_vl.read(config, beside)

    @hookimpl
    def export_hf_around(self, layout: HFModel, job: Job) -> HFModel:
        if self.config.model:
            raise ConfigError("image.model: a model with a borrowed encoder has no Hugging Face layout.")
        from ._vision import llava, paligemma, processor, qwen_vl_export
        from ._vision.modality import Pictures

        write = paligemma.write if paligemma.is_its(layout) else llava.write
        write = qwen_vl_export.write if self.config.positions == "rotary" else write
        whole = write(self.config, Pictures(self.config), layout, job)
        return replace(whole, described=partial(processor.written, self.config))


class Video(_Vision):
    """Video clips: frames at even distances, which an encoder like that of `image` sees one by one.

    Before the connector, sines of the number in the clip are added to each patch. With `encoded_by = "image"`, images
    and clips share one encoder, which projects `image.patch_frames` frames at a time and adds nothing (Qwen2-VL,
    arXiv:2409.12191); a plugin that gives `fusion` features their place tells it the order of frames.

    Files are those of FFmpeg's usual formats: MP4 and MOV, Matroska and WebM, AVI, MPEG, FLV, Ogg, ASF and GIF.
    """

    api = (1, 0)
    requires = ("fusion",)
    _name = "video"
    needs: ClassVar[Mapping[str, str]] = dict.fromkeys(("av", "PIL"), "pip install 'forge-train[video]'")

    @section
    class Config(VisionSection):
        frames: Annotated[int, Gt(0)] = 8
        """Frames of a clip; with `fps` at most so many. A clip of n seconds is cut into as many pieces of equal length,
        and the frame that is shown in the middle of each is taken."""
        fps: Annotated[float, Ge(0)] = 0.0
        """Frames to take of each second, rounded to a multiple of `temporal`; 0 takes `frames` of a clip of any
        length."""
        temporal: Annotated[int, Gt(0)] = 2
        """Frames, one after the other, whose features are averaged; or that an encoder of images projects at a time."""
        least_frames: Annotated[int, Ge(0)] = 0
        """Fewest frames of a clip with `fps`."""
        taken: Literal["middle", "first"] = "middle"
        """Take the frame in the middle of each piece, or the first one (as Qwen2-VL does, which also rounds the number
        of frames down)."""
        encoded_by: Literal["video", "image"] = "video"
        """Modality whose encoder encodes clips. With `image`, the options of the encoder and its connector are those of
        [image], and clips keep those of what is read."""
        positions_per_second: Annotated[float, Ge(0)] = 0.0
        """Positions along time for each second, where positions have three axes (tokens_per_second of Qwen2.5-VL,
        arXiv:2502.13923); 0 counts groups of frames."""
        max_seconds: Annotated[float, Gt(0)] = 3600.0
        """Longer clips are refused before they are decoded."""
        times: bool = False
        """Write the time before each group of `temporal` frames, as text: `<1.5 seconds>` is in the middle between its
        first and its last frame (as in Qwen3-VL). Each group then counts as an item of its own. With `cross_attention`,
        all times stand before the clip."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if self.config.least_frames > self.config.frames:
            yield Problem("video.least_frames", f"expected at most frames = {self.config.frames}.")
        if self.config.least_frames and not self.config.fps:
            yield Problem("video.least_frames", "has no effect without fps.")
        if self.config.positions_per_second and self.config.times:
            yield Problem("video.positions_per_second", "has no effect with times, which make an item of each group.")
        if self.config.encoded_by == "image":
            yield from check_shared(self.config, "video", "image")
        else:
            yield from self._check_own()
        if self.config.frames % self.config.temporal:
            yield Problem("video.frames", f"expected a multiple of temporal = {self.config.temporal}.")

    def _check_own(self) -> Iterator[Problem]:
        yield from check(self.config, "video")
        if self.config.patch_frames > 1:
            yield Problem("video.patch_frames", "expected 1: frames are projected one by one (see temporal).")
        if self.config.dim % 2:
            yield Problem("video.dim", "expected an even number.")
        if self.config.connector == "resampler" and self.config.times:
            yield Problem("video.times", "has no effect with a resampler, whose queries stand for a whole clip.")

    @hookimpl
    def modalities(self, job: Job) -> list[Modality]:
        from ._vision.modality import Clips

        return [Clips(self.config)]


class ImageTiles(Plugin):
    """Images in square tiles that a vision transformer sees together, as in Llama 3.2 Vision (arXiv:2407.21783).

    An image keeps its aspect: of all arrangements of at most so many tiles, it gets the one in which it is largest, or
    the smallest one that holds it. The rest is black.
    """

    api = (1, 0)
    facts: ClassVar[Mapping[str, Any]] = {"hf.architectures": ("MllamaForConditionalGeneration",)}
    requires = ("fusion",)
    needs: ClassVar[Mapping[str, str]] = {"PIL": "pip install 'forge-train[images]'"}

    @section
    class Config(TileSection):
        """Tiles, encoder and connector."""

    config: Config

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        return item_values("sft")

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        yield from check_tiles(self.config)

    @hookimpl
    def modalities(self, job: Job) -> list[Modality]:
        from ._tiles.modality import TiledPictures

        return [TiledPictures(self.config)]

    @hookimpl
    def import_hf_around(self, config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
        from ._tiles.mllama import read

        return read(config, beside)

    @hookimpl
    def export_hf_around(self, layout: HFModel, job: Job) -> HFModel:
        from ._tiles import processor
        from ._tiles.export import write
        from ._tiles.modality import TiledPictures

        whole = write(self.config, TiledPictures(self.config), layout, job)
        return replace(whole, described=partial(processor.written, self.config))


class HFImages(Plugin):
    """Images for a class of `transformers`, read by the processor that came with it.

    The processor is described by the files beside the tokenizer: it decides how an image becomes pixels, which tokens
    stand for it, and how many.
    """

    api = (1, 0)
    requires = ("hf", "tokenizer")
    needs: ClassVar[Mapping[str, str]] = {
        "transformers": "pip install 'forge-train[hf]'",
        "PIL": "pip install 'forge-train[images]'",
    }

    @section
    class Config:
        max_pixels: Annotated[int, Gt(0), Le(89_478_485)] = 50_000_000
        """Images with more pixels are refused before they are decoded. Pillow itself stops at 89,478,485."""
        max_bytes: Annotated[int, Gt(0)] = 100_000_000
        """Files with more bytes are refused before they are read."""

    config: Config

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        return item_values("sft")

    @hookimpl
    def modalities(self, job: Job) -> list[Modality]:
        from ._processed.modality import ProcessedPictures

        return [ProcessedPictures.of(self.config, job)]
