"""`forge data inspect` on data with items: whole records, their items, and a page that shows them."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from forge_cli import forge
from forge_train_plugins.data.multimodal import Multimodal
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities.vision import Image
from items_data import Scan, job, write_records, write_scans

pytestmark = [pytest.mark.unit]


def prepared(folder: Path, records: list[dict[str, Any]], *modalities: Any) -> Path:
    file = write_records(folder / "data.jsonl", records)
    made = Multimodal(Multimodal.Config(path=str(file), cache=str(folder / "cache"), held_out=0.0))
    made.build_data(job(*modalities, sequence=64), "train")
    (found,) = (folder / "cache").iterdir()
    return found


def test_records_are_shown_whole_with_their_items(tmp_path: Path) -> None:
    names = write_scans(tmp_path, [3, 2, 4])
    given = [{"text": "a<scan>b<scan>", "scans": names[:2]}, {"text": "none"}, {"text": "<scan>c", "scans": names[2:]}]
    folder = prepared(tmp_path, given)
    found = forge("data", "inspect", folder, "--json").json
    assert (found["documents"], found["tokens"]) == (3, 8 + 5 + 6)
    assert found["facts"]["items"] == {"scan": 3}
    assert found["facts"]["train"]["documents"] == 3
    assert found["learned"] == 3 + 5 + 2
    first = found["samples"][0]
    assert [one["text"] for one in first["tokens"]][:4] == ["a", "[scan 1×1×3]", "b", "[scan 1×1×2]"]
    assert [(one["position"], one["positions"]) for one in first["items"]] == [(1, 3), (5, 2)]
    shown = forge("data", "inspect", folder).out
    assert "items       3 of 'scan'" in shown
    assert f"scan 1×1×4 at 0: {tmp_path / names[2]} ({tmp_path / 'data.jsonl'}, line 3)" in shown


def test_the_page_shows_what_a_browser_can(tmp_path: Path) -> None:
    Pillow.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    (name,) = write_scans(tmp_path, [2])
    record = {"text": "<image><image><image><scan>", "images": ["a.png", url, "gone.png"], "scan": name}
    (tmp_path / "gone.png").write_bytes(content)
    pictures = Pictures(Image.Config(size=8, patch=8, merge=1))
    folder = prepared(tmp_path, [record], pictures, Scan())
    (tmp_path / "gone.png").unlink()
    page = tmp_path / "page.html"
    ended = forge("data", "inspect", folder, "--html", page)
    assert ended.code == 0, ended.err
    figures = re.findall(r"<figure>(.*?)</figure>", page.read_text(encoding="utf-8"))
    assert len(figures) == 4
    encoded = base64.b64encode(content).decode()
    assert figures[0].startswith(f'<img src="data:image/png;base64,{encoded}"><figcaption>image 1×1×1 at 0<br>')
    assert figures[1].startswith(f'<img src="data:image/unknown;base64,{encoded}"><figcaption>image 1×1×1 at 1<br>')
    assert figures[2].startswith("not shown: No such file or directory<figcaption>image 1×1×1 at 2<br>")
    assert figures[3].startswith("not shown: no browser shows it<figcaption>scan 1×1×2 at 3<br>")
    assert "img-src data:" in page.read_text(encoding="utf-8")
