"""The viewer in a real browser, without a network: what is pointed at changes the map, and the map is the right one."""

import base64
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.viewer import view, view_answers, write_viewer
from regard.viewer.pages import Group
from regard.viewer.scenes import as_seen
from regard.vit import ViT, attention_rows
from regard.vit.config import ViTConfig
from regard.vit.errors import InputError
from regard.vit.maps import patch_rows
from regard.vit.preprocess import Preprocess

GRID = (36, 44)  # 1,584 patches, not square
SIZE = (GRID[0] * 8, GRID[1] * 8)


@pytest.fixture(scope="module")
def model() -> ViT:
    torch.manual_seed(0)
    prepare = Preprocess(size=SIZE)
    config = ViTConfig(
        image_size=SIZE, patch_size=8, dim=48, depth=2, heads=3, hidden_dim=48, registers=2, preprocess=prepare
    )
    vit = ViT(config).eval()
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.to_q.weight *= 3  # so that rows differ
    return vit


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (9, 11, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((SIZE[1], SIZE[0]), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def page(model: ViT, picture: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("viewer") / "view.html"
    return view(picture, model, path, [0, 1], [0, 2], title="</script><b>cat & dog</b>", model="a <ViT>")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="selenium, which drives the browser, is not installed")
    from selenium import webdriver

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "window-size=1300,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()


class Page:
    """A page as a person has it on the screen."""

    def __init__(self, browser: Any, path: Path):
        self.browser = browser
        browser.get_log("performance"), browser.get_log("browser")  # what was there before
        browser.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        browser.get(path.as_uri())
        self.settled("")

    def settled(self, before: str) -> str:
        """What is shown, once it is something else than before."""
        from selenium.webdriver.support.ui import WebDriverWait

        script = "return document.body.dataset.shown || ''"
        return WebDriverWait(self.browser, 20).until(
            lambda b: (now := b.execute_script(script)) and now != before and now
        )

    @property
    def shown(self) -> str:
        return self.browser.execute_script("return document.body.dataset.shown")

    def pixels(self) -> np.ndarray:
        script = """const c = document.getElementById('heat');
            return [c.width, c.height, Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)]"""
        width, height, data = self.browser.execute_script(script)
        return np.array(data).reshape(height, width, 4)

    def text(self, id: str) -> str:
        return self.browser.find_element("id", id).text

    def masses(self) -> dict[str, str]:
        rows = self.browser.find_elements("css selector", "#mass tr")
        return {r.find_element("tag name", "th").text: r.find_element("tag name", "td").text for r in rows}

    def choose(self, id: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        before = self.shown
        Select(self.browser.find_element("id", id)).select_by_value(value)
        self.settled(before)

    def point(self, row: int, column: int, *, pane: str = "ask", click: bool = False) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        before = self.shown
        element = self.browser.find_element("id", pane)
        box = element.size  # offsets count from the middle
        x = round((column + 0.5) / GRID[1] * box["width"] - box["width"] / 2)
        y = round((row + 0.5) / GRID[0] * box["height"] - box["height"] / 2)
        ActionChains(self.browser).move_to_element_with_offset(element, x, y).perform()
        if pane == "ask":
            self.settled(before)
        if click:
            element.click() if row < 0 else ActionChains(self.browser).click().perform()


def unpacked(path: Path) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="facts">(.*?)</script>', path.read_text())[1])


def expected(model: ViT, picture: Image.Image, layer: int, query: Any, heads: list[int]) -> np.ndarray:
    rows = attention_rows(model, picture, query, layer, heads)
    return rows.patches[0, 0, :, 0].mean(dim=0).numpy()


def test_it_opens_from_a_file_and_asks_for_nothing_else(browser, page):
    opened = Page(browser, page)
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert asked
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    assert [url for url in asked if url.startswith("file")] == [page.as_uri()]
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert opened.text("trouble") == ""


def test_the_page_names_no_address():
    from importlib import resources

    assert "//" not in re.sub(
        r"(?m)\s// .*$|^// .*$", "", resources.files("regard.viewer").joinpath("page.html").read_text()
    )


def test_pointing_at_a_patch_shows_where_it_looks(browser, page, model, picture):
    opened = Page(browser, page)
    opened.choose("layer", "1")
    opened.choose("head", "1")  # the second of the heads 0 and 2
    seen = []
    for row, column in ((3, 40), (30, 5)):
        opened.point(row, column)
        status = opened.text("status")
        assert f"patch ({row}, {column}): layer 1, head 2" in status
        pixels = opened.pixels()
        assert pixels.shape == (*GRID, 4)
        want = expected(model, picture, 1, (row, column), [2])
        # The page draws 255 levels of the square root of the share; opacity goes 0.35..0.9 with the share.
        share = (pixels[..., 3] / 255 - 0.35) / 0.55
        assert np.abs(share - want / want.max()).max() < 0.012
        assert f"peak {100 * want.max():.2g}" in status
        seen.append(pixels)
    assert not np.array_equal(seen[0], seen[1])


def test_the_mean_is_of_the_heads_in_the_page(browser, page, model, picture):
    opened = Page(browser, page)
    opened.point(10, 20)
    want = expected(model, picture, 0, (10, 20), [0, 2])
    share = (opened.pixels()[..., 3] / 255 - 0.35) / 0.55
    assert np.abs(share - want / want.max()).max() < 0.012
    assert "mean of heads 0, 2" in opened.text("status")


def test_the_class_token_and_registers_can_be_asked_and_the_masses_are_told(browser, page, model, picture):
    opened = Page(browser, page)
    buttons = browser.find_elements("css selector", "#queries button")
    assert [button.text for button in buttons] == ["class token", "register 0", "register 1"]
    opened.choose("head", "0")
    before = opened.shown
    buttons[2].click()
    opened.settled(before)
    assert "register 1: layer 0, head 0" in opened.text("status")
    rows = attention_rows(model, picture, "reg1", 0, 0)
    told = {name: float(value.split()[0]) / 100 for name, value in opened.masses().items()}
    assert list(told) == ["patches", "class token", "register 0", "register 1"]
    assert told["class token"] == pytest.approx(rows.cls.item(), rel=0.05)
    assert told["register 1"] == pytest.approx(rows.registers[..., 1].item(), rel=0.05)
    assert sum(told.values()) == pytest.approx(1, abs=0.01)


def test_what_a_sink_took_is_shown_and_not_renormalised_away(browser, picture, tmp_path):
    config = ViTConfig(image_size=(32, 48), patch_size=8, dim=48, depth=1, heads=3, sink=True)
    vit = ViT(dataclasses.replace(config, preprocess=Preprocess(size=(32, 48)))).eval()
    torch.nn.init.constant_(vit.blocks[0].attn.sink, 3.0)
    opened = Page(browser, view(picture, vit, tmp_path / "sink.html"))
    rows = attention_rows(vit, picture)
    assert 0.1 < rows.sink.mean() < 0.9
    told = {name: float(value.split()[0]) / 100 for name, value in opened.masses().items()}
    assert told["sink (on nothing)"] == pytest.approx(rows.sink.mean().item(), abs=0.001)
    assert sum(told.values()) == pytest.approx(1, abs=0.01)


def test_arrow_keys_move_the_question_and_enter_holds_it(browser, page):
    from selenium.webdriver.common.keys import Keys

    opened = Page(browser, page)
    opened.point(0, 1)
    pane = browser.find_element("id", "ask")
    for keys, where in ((Keys.ARROW_DOWN, (1, 1)), (Keys.ARROW_LEFT, (1, 0)), (Keys.ARROW_UP, (0, 0))):
        before = opened.shown
        pane.send_keys(keys)
        opened.settled(before)
        assert f"patch {where}" in opened.text("status")
    pane.send_keys(Keys.ARROW_LEFT)  # there is nothing further left
    assert "patch (0, 0)" in opened.text("status")
    pane.send_keys(Keys.ENTER)
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
    assert "held" in opened.text("status")
    assert pane.get_attribute("aria-label")
    named = browser.find_elements("css selector", "select, button")
    assert all(element.get_attribute("tabindex") in (None, "0") for element in named)


def test_the_scale_that_colours_end_at_is_told(browser, page, model, picture):
    opened = Page(browser, page)
    opened.choose("head", "0")
    opened.point(20, 20)
    want = expected(model, picture, 0, (20, 20), [0])
    assert opened.text("end").startswith(f"{100 * want.max():.2g}")
    opened.choose("scale", "percentile")
    assert opened.text("end").startswith(f"{100 * np.sort(want.flatten())[int(0.99 * (want.size - 1))]:.1g}"[:3])
    assert opened.text("end").endswith("and above")
    opened.choose("scale", "shared")
    largest = max(block.patches[0, 0, 0].max().item() for block in patch_rows(model, picture, 0))
    assert float(opened.text("end").split()[0]) / 100 == pytest.approx(largest, rel=0.1)


def test_a_hostile_name_is_only_text(browser, page):
    opened = Page(browser, page)
    assert opened.text("title") == "</script><b>cat & dog</b>"
    assert "a <ViT>" in opened.text("what")
    assert not browser.find_elements("css selector", "#title b")


def test_a_broken_file_is_told(browser, page, tmp_path):
    text = page.read_text()
    start = text.index('id="maps-0-0">') + 200
    broken = tmp_path / "broken.html"
    broken.write_text(text[:start] + "AAAA" * 50 + text[start + 200 :])
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(broken.as_uri())
    WebDriverWait(browser, 20).until(lambda b: "cannot be read" in b.find_element("id", "trouble").text)


def test_the_page_tells_which_layers_and_heads_it_holds(browser, page):
    opened = Page(browser, page)
    assert "layers 0, 1 of 2, heads 0, 2 of 3 heads" in opened.text("choice")
    assert "36 x 44 patches of 8 px" in opened.text("what")
    assert page.stat().st_size < 15e6


# without a browser ----------------------------------------------------------------------------------------------------


def test_a_page_too_large_to_mail_is_refused_with_what_would_fit(model, picture, tmp_path):
    path = tmp_path / "view.html"
    with pytest.raises(InputError, match=r"larger than 3 MB.*so [1-3] of them fit.*choose fewer layers or heads"):
        view(picture, model, path, "all", limit_mb=3)
    assert not list(tmp_path.iterdir())
    view(picture, model, path, -1, "mean", limit_mb=3)
    assert path.stat().st_size < 3e6
    assert unpacked(path)["heads"] == ["mean of all 3 heads"]


def test_a_wrong_ending_is_refused(model, picture, tmp_path):
    with pytest.raises(InputError, match=r"ending in \.html"):
        view(picture, model, tmp_path / "view.png")


def test_without_special_tokens_a_patch_in_the_middle_is_shown_first(picture, tmp_path):
    config = ViTConfig(image_size=(32, 48), patch_size=8, dim=48, depth=1, heads=3, class_token=False, pooling="mean")
    config = dataclasses.replace(config, preprocess=Preprocess(size=(32, 48)))
    facts = unpacked(view(picture, ViT(config), tmp_path / "v.html"))
    assert (facts["grid"], facts["first"], facts["groups"], facts["masses"]) == ([4, 6], 2 * 6 + 3, [], [])


def test_answers_of_another_model_or_without_words_are_refused(trained, picture, model, tmp_path):
    from regard.crossattn import ImageQA

    qa = ImageQA.from_pretrained(trained / "best" if (trained / "best").is_dir() else trained)
    with pytest.raises(InputError, match="no answered question"):
        view_answers(picture, qa.vit, [], tmp_path / "v.html")
    answers = qa.ask(qa.look(picture), ["is it red?"])
    with pytest.raises(InputError, match="another model"):
        view_answers(picture, model, answers, tmp_path / "v.html")
    with pytest.raises(InputError, match="without an image"):
        view_answers(picture, qa.vit, qa.ask(qa.look(None), ["is it red?"]), tmp_path / "v.html")
    assert not list(tmp_path.iterdir())


def test_rows_that_do_not_match_their_names_are_refused(model, picture, tmp_path):
    rows = attention_rows(model, picture, "cls")
    with pytest.raises(ValueError, match="1 rows for 2 queries"):
        write_viewer(tmp_path / "v.html", picture, [[rows]], groups=[Group("", ("a", "b"))], title="")


@pytest.mark.parametrize(
    ("changes", "policy", "want"),
    [
        (dict(size=(96, 64)), "resize", (50, 33)),  # squashed: the picture keeps its own shape
        (dict(size=(64, 64), fit="crop"), "resize", (34, 33)),  # cut at columns 8.4 and 41.9
        (dict(size=None), "resize", (50, 33)),
        (dict(size=None), "crop", (48, 32)),
        (dict(size=None), "pad", (56, 40)),
    ],
)
def test_the_picture_stands_in_the_frame_of_the_grid(changes, policy, want):
    config = ViTConfig(image_size=(64, 96), patch_size=8, dim=48, depth=1, heads=3, size_policy=policy)
    config = dataclasses.replace(config, preprocess=dataclasses.replace(config.preprocess, **changes))
    pixels = np.zeros((33, 50, 3), dtype=np.uint8)
    pixels[:8, 8:16] = 255
    seen = as_seen(Image.fromarray(pixels), ViT(config))
    assert seen.size == want
    if changes["size"] is None and policy != "resize":
        assert seen.getpixel((12, 4)) == (255, 255, 255)
        assert seen.getpixel((4, 4)) == (0, 0, 0)


def test_each_word_of_a_question_shows_where_it_looked(browser, trained, tmp_path):
    from regard.crossattn import ImageQA

    qa = ImageQA.from_pretrained(trained / "best" if (trained / "best").is_dir() else trained)
    picture = Image.effect_noise((90, 60), 80).convert("RGB")
    answers = qa.ask(qa.look(picture), ["what color is the <i>shape</i>?", "is it a circle?"])
    path = view_answers(picture, qa.vit, answers, tmp_path / "words.html")
    opened = Page(browser, path)
    buttons = browser.find_elements("css selector", "#queries button")
    assert [button.text for button in buttons] == [w for answer in answers for w in answer.attention.words]
    before, first = opened.shown, opened.pixels()
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).move_to_element(buttons[-2]).perform()
    opened.settled(before)
    assert not np.array_equal(first, opened.pixels())
    place = len(answers[1].attention.words) - 2
    want = answers[1].attention.map(place, 0).numpy()
    share = (opened.pixels()[..., 3] / 255 - 0.35) / 0.55
    assert np.abs(share - want / want.max()).max() < 0.012
    assert base64.b64decode(unpacked(path)["picture"].split(",")[1])[:2] == b"\xff\xd8"
