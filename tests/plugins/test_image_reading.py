"""Images are decoded as they look, and what can't be is refused in a sentence."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from forge_train import ConfigError
from forge_train_kit.modalities import Item, ItemSource
from forge_train_plugins.modalities._vision import reading
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.patches import cut, kept
from forge_train_plugins.modalities.vision import Image

pytestmark = pytest.mark.unit


def pictures(**options: Any) -> Pictures:
    return Pictures(Image.Config(**{"size": 16, "patch": 4, "merge": 1, **options}))


def source(path: Path, **more: Any) -> ItemSource:
    return ItemSource(str(path), "data.jsonl:3", **more)


def put_together(item: Item, patch: int, merge: int) -> np.ndarray:
    """The picture of an item, patch by patch."""
    _, rows, columns = item.grid
    shown = np.zeros((rows * patch, columns * patch, 3), np.uint8)
    across = columns // merge
    for number, values in enumerate(item.values):
        block, inner = divmod(number, merge * merge)
        row, column = block // across * merge + inner // merge, block % across * merge + inner % merge
        shown[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = values.reshape(patch, patch, 3)
    return shown


def seen(path: Path, **options: Any) -> np.ndarray:
    """What a model sees of a file of 16 × 16 pixels."""
    modality = pictures(**options)
    item = modality.read(source(path))
    assert item.grid == modality.measure(source(path))
    assert item.values.dtype == np.uint8
    assert item.values.shape == (np.prod(item.grid), modality.features)
    return put_together(item, modality.config.patch, modality.config.merge)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_blocks_of_patches_are_contiguous(tmp_path: Path, merge: int) -> None:
    picture = noise(16, 16, 3)
    Pillow.fromarray(picture).save(tmp_path / "a.png")
    assert (seen(tmp_path / "a.png", merge=merge) == picture).all()


def test_blocks_reach_over_frames() -> None:
    frames = np.arange(4)[:, None, None, None] * 100 + np.arange(16).reshape(4, 4)[None, :, :, None] + np.zeros(3, int)
    patches = cut(frames, 1, 2, temporal=2)[:, 0]
    assert patches[:8].tolist() == [0, 1, 4, 5, 100, 101, 104, 105]
    assert patches[8:16].tolist() == [2, 3, 6, 7, 102, 103, 106, 107]
    assert patches[32:40].tolist() == [200, 201, 204, 205, 300, 301, 304, 305]


def test_kinds_of_pixels_look_as_they_should(tmp_path: Path) -> None:
    grey = noise(16, 16)
    three = np.repeat(grey[..., None], 3, -1)
    for mode in ("L", "1", "P"):
        (given := Pillow.fromarray(grey).convert(mode)).save(tmp_path / f"{mode}.png")
        assert (seen(tmp_path / f"{mode}.png") == np.asarray(given.convert("RGB"))).all(), mode
    fine = grey.astype(np.uint16) * 257
    Pillow.fromarray(fine).save(tmp_path / "16.png")
    Pillow.fromarray(fine).save(tmp_path / "16.tif")
    (tmp_path / "16.pgm").write_bytes(b"P5 16 16 65535\n" + fine.astype(">u2").tobytes())
    for name in ("16.png", "16.tif", "16.pgm"):
        assert (seen(tmp_path / name) == three).all(), name
    Pillow.new("CMYK", (16, 16), (255, 0, 255, 0)).save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(seen(tmp_path / "cmyk.jpg").astype(int) - (0, 255, 0)).max() <= 3


def test_the_name_of_a_file_does_not_say_its_format(tmp_path: Path) -> None:
    picture = noise(16, 16, 3)
    Pillow.fromarray(picture).save(tmp_path / "a.jpg", format="PNG")
    assert (seen(tmp_path / "a.jpg") == picture).all()


def test_16_bits_of_colour_keep_their_range(tmp_path: Path) -> None:
    rows = np.zeros((16, 16, 3), ">u2")
    rows[:8] = (0xFFFF, 0x8080, 0)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0)
    whole = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + whole)
    shown = seen(tmp_path / "deep.png")
    assert shown[0, 0].tolist() == [255, 128, 0]
    assert shown[15, 15].tolist() == [0, 0, 0]


def test_transparency_lies_over_white(tmp_path: Path) -> None:
    colour = np.zeros((16, 16, 4), np.uint8)
    colour[:8, :, 3] = 255
    Pillow.fromarray(colour).save(tmp_path / "rgba.png")
    grey = Pillow.fromarray(np.where(np.arange(16)[:, None] < 8, 0, 99).astype(np.uint8) + np.zeros((16, 16), np.uint8))
    grey.save(tmp_path / "l.png", transparency=99)
    grey.convert("P").save(tmp_path / "p.gif", transparency=99)
    Pillow.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(tmp_path / "16.png", transparency=99 * 257)
    for name in ("rgba.png", "l.png", "p.gif", "16.png"):
        shown = seen(tmp_path / name)
        assert (shown[:8] == 0).all(), name
        assert (shown[8:] == 255).all(), name


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_stands_upright(tmp_path: Path, turn: int, ending: str) -> None:
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :8] = (255, 0, 0)
    upright[4:, 8:] = (0, 0, 255)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[turn]
    exif = Pillow.Exif()
    exif[0x0112] = turn
    more = {"lossless": True} if ending == "webp" else {"quality": 100, "subsampling": 0} if ending == "jpg" else {}
    Pillow.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"a.{ending}", exif=exif, **more)
    shown = seen(tmp_path / f"a.{ending}", fit="keep")
    assert shown.shape == upright.shape
    assert np.abs(shown.astype(int) - upright).max() <= 4


def test_sides_fit() -> None:
    assert kept(640, 480, 16, 0, 64 * 64) == (64, 48)
    assert kept(40, 20, 16, 0, 64 * 64) == (32, 16)
    assert kept(1, 1, 16, 0, 64 * 64) == (16, 16)
    assert kept(10_000, 1, 16, 0, 64 * 64) == (256, 16)
    assert kept(1, 10_000, 16, 0, 64 * 64) == (16, 256)
    for width in (1, 7, 63, 200, 3000):
        for height in (1, 30, 64, 999):
            sides = kept(width, height, 16, 0, 64 * 64)
            assert sides[0] * sides[1] <= 64 * 64
            assert not any(side % 16 or side < 16 for side in sides)


@pytest.mark.parametrize(("least", "most"), [(56 * 56, 28 * 28 * 60), (28 * 28 * 40, 28 * 28 * 50)])
def test_sides_are_those_of_qwen(least: int, most: int) -> None:
    for width in (5, 14, 28, 57, 100, 400, 3000):
        for height in (11, 28, 42, 64, 999, 1000):
            theirs = smart_resize(height, width, 28, least, most) if max(width / height, height / width) < 30 else None
            if theirs is not None:  # they exceed the most pixels of longer strips
                assert kept(width, height, 28, least, most) == theirs[::-1], (width, height)


def test_an_image_among_other_bytes(tmp_path: Path) -> None:
    picture = noise(16, 16, 3)
    Pillow.fromarray(picture).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "shard.tar").write_bytes(b"before" + data + b"after")
    item = pictures().read(source(tmp_path / "shard.tar", offset=6, size=len(data)))
    assert (put_together(item, 4, 1) == picture).all()
    with pytest.raises(ConfigError, match=r"has 5 bytes where 90 were expected"):
        pictures().read(source(tmp_path / "shard.tar", offset=6 + len(data), size=90))


def test_a_header_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pillow.fromarray(noise(512, 512, 3)).save(tmp_path / "a.png")
    place: list[int] = []
    upright = reading.upright
    monkeypatch.setattr(reading, "upright", lambda image: place.append(image.fp.tell()) or upright(image))
    assert pictures().measure(source(tmp_path / "a.png")) == (1, 4, 4)
    assert place[0] < 1000 < (tmp_path / "a.png").stat().st_size


def test_the_first_frame_of_a_photograph_counts(tmp_path: Path) -> None:
    frames = [Pillow.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "photo.mpo", save_all=True, append_images=frames[1:])
    assert np.abs(seen(tmp_path / "photo.mpo").astype(int) - (255, 0, 0)).max() <= 3


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    Pillow.fromarray(noise(64, 64, 3)).save(tmp_path / "big.png")
    data = (tmp_path / "big.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "head.png").write_bytes(data[:20])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("no picture")
    frames = [Pillow.fromarray(noise(16, 16, seed=seed)) for seed in range(3)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    Pillow.fromarray(noise(16, 16).astype(np.float32)).save(tmp_path / "float.tif")
    (tmp_path / "folder.png").mkdir()
    for name, options, says in (
        ("missing.png", {}, "there is no such file"),
        ("folder.png", {}, "can't be read (Is a directory)"),
        ("empty.png", {}, "is empty"),
        ("text.jpg", {}, "is not an image that Pillow can read"),
        ("cut.png", {}, "is damaged or cut short (image file is truncated"),
        ("head.png", {}, "is damaged or cut short"),
        ("moving.gif", {}, "has 3 frames, and an image must have one"),
        ("float.tif", {}, "32 bits and no known range"),
        ("big.png", {"max_pixels": 4000}, "64 × 64 pixels are more than max_pixels = 4,000"),
        ("big.png", {"max_bytes": 99}, "bytes are more than max_bytes = 99"),
    ):
        with pytest.raises(ConfigError) as caught:
            pictures(**options).read(source(tmp_path / name))
        message = str(caught.value)
        assert message.startswith(f"data.jsonl:3: {tmp_path / name}: "), message
        assert says in message, message
        assert "\n" not in message


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A header that claims more pixels than Pillow allows."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT")
    with pytest.raises(ConfigError, match=r"pixels than max_pixels = 50,000,000"):
        pictures().measure(source(tmp_path / "bomb.png"))


def test_goes_to_workers_without_tensors(tmp_path: Path) -> None:
    modality = pickle.loads(pickle.dumps(pictures(fit="keep", merge=2)))
    assert modality == pictures(fit="keep", merge=2)
    assert modality.positions((1, 4, 2)) == 2
    assert modality.public() == {"size": 16, "patch": 4, "merge": 2, "fit": "keep", "queries": 0}
    assert pictures(connector="resampler", queries=5).positions((1, 4, 2)) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 18}, "image.size: expected a multiple of patch · merge = 4."),
        ({"heads": 5}, "image.heads: expected a divisor of dim = 192."),
        ({"class_token": True, "fit": "keep"}, 'image.class_token: needs fit = "square" and positions = "learned".'),
        ({"class_token": True, "positions": "sines"}, "image.class_token: needs"),
        (
            {"dim": 6, "heads": 2, "positions": "rotary"},
            'image.dim: expected a multiple of 8 for positions = "rotary".',
        ),
        ({"dim": 6, "positions": "sines"}, 'image.dim: expected a multiple of 4 for positions = "sines".'),
        ({"connector": "resampler"}, 'image.queries: is for connector = "resampler", which needs at least one.'),
        ({"queries": 4}, "image.queries: is for"),
        ({"connector": "resampler", "queries": 4, "merge": 2}, "image.merge: a resampler takes patches one by one"),
        ({"window": 3, "merge": 2}, "image.window: expected a multiple of merge = 2"),
        ({"window": 4, "layers": 1, "full_layers": (0,)}, "image.window: has no effect where all blocks"),
        ({"window": 4, "class_token": True}, "image.window: has no effect where all blocks are in full_layers, and ex"),
        ({"full_layers": (0,)}, "image.full_layers: expected blocks from 0 to 5, and a window"),
        ({"connector_hidden": 8, "connector": "linear"}, "image.connector_hidden: is for connector"),
        ({"most_pixels": 64}, "image.least_pixels: and most_pixels are for fit"),
        ({"least_pixels": 300, "fit": "keep"}, "image.least_pixels: expected at most 256"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    plugin = Image(Image.Config(**{"size": 16, "patch": 4, "merge": 1, **options}))
    (problem,) = plugin.check_config()
    assert f"{problem.key}: {problem.message}".startswith(says)
