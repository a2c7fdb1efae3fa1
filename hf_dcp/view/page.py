"""A scene as one HTML page: style, script and data are inside, nothing is fetched."""

from __future__ import annotations

import json
from importlib.resources import files

from hf_dcp.view.scene import Scene


def page(scene: Scene) -> str:
    """The page's text."""
    folder = files("hf_dcp.view")
    text = (folder / "page.html").read_text("utf-8")
    data = json.dumps(scene.to_dict(), separators=(",", ":")).replace("</", "<\\/")
    for mark, content in (
        ("/*STYLE*/", (folder / "page.css").read_text("utf-8")),
        ("/*SCRIPT*/", (folder / "page.js").read_text("utf-8")),
        ("/*SCENE*/", data),
    ):
        text = text.replace(mark, content, 1)
    return text
