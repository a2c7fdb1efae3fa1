"""The page in a real browser: clicked, typed at, looked at in both themes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_dcp.cli.main import run
from tests.view.browser import browser

OPTIONS = "--lengths 3072,1536,200 --mask lambda:64,1024 --nodes 2 --devices-per-node 2 --heads 4 --kv-heads 1"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "plan.html"
    assert run(["view", *OPTIONS.split(), "--out", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def chrome(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def opened(chrome: Any, page: Path) -> Any:
    chrome.get(page.as_uri())
    return chrome


def find(driver: Any, name: str) -> Any:
    return driver.find_element("id", name)


def pixels(driver: Any) -> str:
    return driver.execute_script("return document.getElementById('tiles').toDataURL()")


def keep(driver: Any, name: str, tmp_path: Path) -> None:
    """A screenshot, in the folder of HF_DCP_SCREENSHOTS if it names one."""
    file = Path(os.environ.get("HF_DCP_SCREENSHOTS", tmp_path)) / name
    assert driver.save_screenshot(str(file))
    assert file.stat().st_size > 20_000


def test_nothing_is_fetched(opened: Any, page: Path) -> None:
    assert not re.findall(r"""(?:src|href)=|url\(|fetch\(|import\(|https?://""", page.read_text("utf-8"))
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert opened.get_log("browser") == []


def test_slider_shows_divisions_one_by_one(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from selenium.webdriver.common.keys import Keys

    assert run(["plan", *OPTIONS.split(), "--json"]) == 0
    most = len(json.loads(capsys.readouterr().out)["divisions"]["forward"]["compute_share"])
    assert most > 1
    step = find(opened, "step")
    assert find(opened, "step-text").text == f"{most} of {most}"
    seen = [pixels(opened)]
    for left in range(most - 1, -1, -1):
        step.send_keys(Keys.ARROW_LEFT)
        assert find(opened, "step-text").text == f"{left} of {most}"
        seen.append(pixels(opened))
    assert len(set(seen)) == len(seen)
    dim = opened.execute_script("return document.querySelectorAll('#timeline .attend.dim').length")
    assert dim == opened.execute_script("return document.querySelectorAll('#timeline .attend').length") > 0
    step.send_keys(Keys.END)
    assert pixels(opened) == seen[0]
    keep(opened, "view_light.png", tmp_path)


def test_another_sequence_and_pass(opened: Any) -> None:
    from selenium.webdriver.support.ui import Select

    before = pixels(opened)
    choice = Select(find(opened, "sequence"))
    assert [option.text for option in choice.options] == ["1: 3,072 tokens", "2: 1,536 tokens", "3: 200 tokens"]
    choice.select_by_index(2)
    assert pixels(opened) != before
    assert find(opened, "readout").text.startswith("200 tokens")
    forward = find(opened, "bytes").get_attribute("innerHTML")
    Select(find(opened, "pass")).select_by_value("backward")
    assert find(opened, "bytes").get_attribute("innerHTML") != forward
    assert find(opened, "bytes-text").text.startswith("backward")


def test_theme_by_click_and_by_keyboard(opened: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    def background() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    button, light, before = find(opened, "theme"), background(), pixels(opened)
    assert light == "rgb(255, 255, 255)"
    button.click()
    assert background() == "rgb(15, 19, 24)"
    assert button.get_attribute("aria-pressed") == "true"
    assert pixels(opened) != before
    keep(opened, "view_dark.png", tmp_path)
    button.send_keys(Keys.ENTER)
    assert background() == light
    assert pixels(opened) == before


def test_pointing_at_a_tile_names_it(opened: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = find(opened, "tiles")
    size = canvas.size
    # near the upper left corner of the matrix: the first tokens attend to themselves
    corner = (int(-size["width"] / 2 + size["width"] * 0.08), int(-size["height"] / 2 + size["height"] * 0.085))
    ActionChains(opened).move_to_element_with_offset(canvas, *corner).perform()
    assert re.match(
        r"queries 0 to \d+, keys 0 to \d+: computed by device \d \(node \d\) in division \d of forward, partly masked",
        find(opened, "readout").text,
    )
    # the upper right corner: nobody attends there
    ActionChains(opened).move_to_element_with_offset(canvas, int(size["width"] * 0.45), corner[1]).perform()
    assert find(opened, "readout").text.startswith("3,072 tokens")


def test_all_of_it_by_keyboard(opened: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    order = []
    for _ in range(6):
        ActionChains(opened).send_keys(Keys.TAB).perform()
        order.append(opened.switch_to.active_element.get_attribute("id"))
    assert order[:5] == ["theme", "sequence", "pass", "step", "tiles"]
    canvas = find(opened, "tiles")
    texts = []
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_UP):
        canvas.send_keys(key)
        texts.append(find(opened, "readout").text)
    assert all(text.startswith("queries") for text in texts)
    assert len(set(texts)) >= 3
    canvas.send_keys(Keys.ESCAPE)
    assert find(opened, "readout").text.startswith("3,072 tokens")


def test_a_narrow_screen_has_one_column(opened: Any) -> None:
    opened.set_window_size(700, 1200)
    try:
        widths = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1]
    finally:
        opened.set_window_size(1280, 1280)
