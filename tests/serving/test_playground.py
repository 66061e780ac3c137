"""The playground in a real browser, against a real server with the demo model.

Needs Chromium with its driver (Debian: ``apt-get install chromium chromium-driver``).
Set ``DLLM_SCREENSHOTS`` to a folder to keep the screenshots, for example to renew those
in ``docs/``.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_servers import KEY, MARKUP, WORD, blocks_server, keyed_server
from tests.support.server import scrape

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs the programs chromium and chromedriver"
    ),
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage"
).split()
PROMPT = "Tom=48. Ida=26. Max=31. Zoe=55. Ben=12. Eva=90. Give: Ida, Tom, Zoe, Eva"
SCHEMA = (
    '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": '
    '["age"]}'
)
ANSWER = "Ida=26, Tom=48, Zoe=55, Eva=90"


@pytest.fixture(scope="module")
def server(servers):
    return keyed_server(servers)


class Page:
    def __init__(self, driver, server) -> None:
        self.driver, self.server = driver, server

    def open(
        self,
        width: int = 1240,
        height: int = 900,
        scheme: str = "light",
        key: str | None = KEY,
    ) -> "Page":
        self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": features}
        )
        self.driver.get(self.server.url + "/playground")
        if key is not None:
            self.element("key").send_keys(key, Keys.ENTER)
            self.wait(lambda: self.text("model").startswith("demo"))
        return self

    def resize(self, width: int, height: int) -> None:
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def element(self, name: str):
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.element(name).text

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def js(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition, seconds: float = 30) -> None:
        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(
            lambda _: condition()
        )

    def move(self, name: str, value: float) -> None:
        """Set a slider, as dragging it does."""
        self.js(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}));",
            name,
            str(value),
        )

    def send(self, prompt: str) -> None:
        self.element("prompt").send_keys(prompt, Keys.ENTER)

    def ask(self, prompt: str) -> None:
        """Send, and wait until the answer is complete."""
        before = len(self.all(".turn small, .turn.error"))
        self.send(prompt)
        self.wait(lambda: len(self.all(".turn small, .turn.error")) > before)
        self.wait(lambda: not self.element("stop").is_enabled())

    def ask_for_all_steps(self, prompt: str) -> None:
        """Ask until no step is left out: a busy server does not send those that were
        overtaken.
        """
        for _ in range(20):
            self.ask(prompt)
            if float(self.element("step").get_attribute("max")) == self.figure(
                "forward_passes"
            ):
                return
            self.element("clear").click()
        raise AssertionError("the server always left out steps")

    def short(self) -> "Page":
        self.move("max_tokens", 32)
        self.move("block_length", 8)
        return self

    @property
    def answer(self) -> str:
        return self.all(".turn.model span")[
            -2 if self.all(".turn.model .running") else -1
        ].text

    @property
    def cells(self) -> str:
        """The text of those that are filled."""
        shown = "".join(cell.text for cell in self.all(".cell:not(.masked) span"))
        return shown.replace("␣", " ").replace("■", "").strip()

    @property
    def masked(self) -> int:
        return len(self.all(".cell.masked"))

    def figure(self, name: str) -> float:
        return float(self.all(f"[data-figure={name}]")[0].text.replace(",", ""))

    def errors(self) -> list[str]:
        """Complaints of the console, but for answers that are meant to be errors, and
        the absent icon.
        """
        entries = [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]
        return [
            e
            for e in entries
            if "status of 400" not in e
            and "status of 401" not in e
            and "favicon" not in e
        ]

    def keep(self, name: str, folder: Path) -> Path:
        height = self.js("return document.documentElement.scrollHeight")
        width = self.js("return window.innerWidth")
        self.resize(width, height)
        self.wait(lambda: self.js("return window.innerHeight") == height)
        self.js("document.activeElement.blur()")
        path = folder / f"playground-{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser(driver, server) -> Page:
    return Page(driver, server)


@pytest.fixture
def page(browser):
    """The page, freshly loaded; at the end of a test its console must hold no error."""
    yield browser.open()
    assert browser.errors() == []


def test_a_prompt_is_answered_and_its_steps_can_be_replayed(page):
    page.short().ask_for_all_steps(PROMPT)
    assert page.answer == ANSWER
    assert "20 tokens" in page.all(".turn.model small")[0].text
    assert len(page.all(".block")) == 4
    assert len(page.all(".cell")) == 32
    assert page.figure("forward_passes") == 24, (
        "the end token leaves the last block out"
    )
    assert page.figure("tokens_unmasked") == 24
    assert page.figure("tokens_per_forward") == 1.0
    assert all(
        page.figure(name) > 0 for name in ("rate", "pages_held", "tokens_retained")
    )
    slider = page.element("step")
    assert (slider.get_attribute("max"), slider.get_attribute("value")) == ("24", "24")
    for step in (1, 5, 12, 23, 24):
        page.move("step", step)
        page.wait(lambda step=step: page.masked == (32 - step if step < 24 else 0))
        assert len(page.all(".cell.unused")) == (0 if step < 24 else 8), (
            "behind the end of the answer"
        )
        assert ("not used" in page.all(".block")[3].text) == (step == 24)
        assert page.figure("forward_passes") == step
        assert len(page.all(".cell.new")) == 1
        assert (
            slider.get_attribute("aria-valuetext")
            == f"step {step} of 24, block {(step - 1) // 8 + 1}"
        )
    assert page.cells == ANSWER
    # By keyboard.
    slider.send_keys(Keys.ARROW_LEFT)
    page.wait(lambda: page.masked == 9)
    # Played from there to the end.
    page.element("play").click()
    assert page.text("play") == "Pause"
    page.wait(lambda: page.masked == 0)
    page.wait(lambda: page.text("play") == "Play")


def test_the_cache_is_drawn_where_the_engine_traces(page):
    assert page.text("cache-note") == "Shown after each generated answer."
    page.short().ask(PROMPT)
    page.wait(lambda: len(page.all("#maps canvas")) == 3)
    assert "34 of 68 positions outside the block, in 4 layers" in page.text("maps")
    assert not page.element("cache-note").is_displayed()
    used = page.js(
        "const c = document.querySelector('#maps canvas'), d = "
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new "
        "Set(); for (let i = 0; i < d.length; i += 4) seen.add(d.slice(i, i + "
        "3).join());return [...seen];"
    )
    assert {"15,124,140", "238,155,31", "230,233,236"} <= set(used), (
        "retained, the block, the rest"
    )


@pytest.fixture
def blocks_page(driver, servers):
    """The page of a server of a block diffusion model."""
    page = Page(driver, blocks_server(servers)).open(key=None)
    page.wait(lambda: page.text("model").startswith("blocks"))
    yield page
    assert page.errors() == []


def test_a_block_that_begins_in_the_prompt_is_shown_from_the_response_on(blocks_page):
    page = blocks_page
    page.move("max_tokens", 16)
    page.ask_for_all_steps("Tom lives in Oslo.")  # 10 tokens with the template
    sizes = page.js(
        "return [...document.querySelectorAll('.block')].map(box => "
        "box.querySelectorAll('.cell').length)"
    )
    assert sizes == [2, 4, 4, 4, 2]
    assert page.masked == 0
    page.move("step", 3)
    page.wait(lambda: "block 2" in page.text("where"))  # drawn with the next frame
    assert page.masked == 16 - 3


def test_a_decision_shows_the_probability_of_each_choice(blocks_page):
    page = blocks_page
    page.element("decide").send_keys(" Ida={Ida:07|48}, Tom={Tom:07|48}")
    page.send("Tom=48. Ida=07. Give: Ida, Tom")
    page.wait(lambda: len(page.all(".turn.model small")) == 2)
    assert re.fullmatch(
        r"Ida=(07|48), Tom=(07|48)", page.all(".turn.model span")[0].text
    )
    for shown, name in zip(page.all(".turn.model small"), ("Ida", "Tom"), strict=True):
        first, second = re.fullmatch(
            rf"{name}: \d\d ([\d.]+) %, \d\d ([\d.]+) %", shown.text
        ).groups()
        assert float(first) >= float(second)
        assert float(first) + float(second) == pytest.approx(100, abs=0.2)
    page.element("decide").clear()
    page.element("decide").send_keys("no field")
    page.send("Hello!")
    page.wait(lambda: page.all(".turn.error"))
    assert "fields" in page.all(".turn.error")[0].text


UNTIL_STOPPED = """
const real = window.fetch;
window.fetch = (to, {signal}) => new Promise((_, reject) => {
  window.fetch = real;
  signal.addEventListener("abort", () => reject(signal.reason));
});
"""
"""The next request takes until it is stopped."""


def test_a_decision_can_be_stopped_and_shows_its_own_figures(blocks_page):
    page = blocks_page
    page.move("max_tokens", 16)
    page.ask(PROMPT)
    assert page.figure("forward_passes") > 1
    page.element("decide").send_keys(" Ida={Ida:07|48}")
    page.element("match").send_keys("Ida=07")
    page.ask("Give: Ida")
    error = page.all(".turn.error")[0].text
    assert "Decide and The answer matches are two forms" in error
    page.element("match").clear()
    page.js(UNTIL_STOPPED)
    page.element("send").click()
    page.wait(lambda: page.element("stop").is_enabled())
    assert not page.element("send").is_enabled()
    assert page.all("[data-figure=forward_passes]")[0].text == "–"
    page.element("stop").send_keys(Keys.ESCAPE)
    page.wait(lambda: page.element("send").is_enabled())
    assert page.all(".turn.model small")[-1].text == "stopped"
    page.send("Give: Ida")
    page.wait(lambda: page.all(".turn.model small")[-1].text.startswith("Ida: "))
    assert page.figure("forward_passes") == 1
    assert not page.element("stop").is_enabled()


def test_questions_are_drawn_as_bars(page):
    page.js("document.getElementById('questions').open = true")
    page.element("facts").send_keys("Tom lives in Paris. Ida lives in Rome.")
    lines = (
        "Where does Ida live? [Paris | Rome]",
        "So? [no < yes]",
        "Ida lives in Rome.",
    )
    page.element("asked").send_keys("\n".join(lines))
    page.element("ask").click()
    page.wait(lambda: len(page.all("#answers .answer")) == 3)
    labels = [each.text for each in page.all("#answers .option span")]
    assert labels == ["Paris", "Rome", "no", "yes", "true", "false"]
    shares = [float(each.text[:-2]) for each in page.all("#answers output")]
    assert shares[1] > 99
    for first, second in zip(shares[::2], shares[1::2], strict=True):
        assert first + second == pytest.approx(100, abs=0.2)
    widths = [each.size["width"] for each in page.all("#answers .option i")]
    assert widths[1] > 10 * widths[0]
    assert "score" in page.all("#answers p")[1].text
    page.element("asked").send_keys("\n[a | a]")
    page.element("ask").click()
    page.wait(lambda: page.all("#answers .error"))
    assert "Each choice must be unique" in page.text("answers")
    page.js(UNTIL_STOPPED)
    page.element("ask").click()
    page.wait(lambda: not page.element("ask").is_enabled())
    assert not page.element("send").is_enabled()
    page.element("facts").send_keys(Keys.ESCAPE)
    page.wait(lambda: page.element("ask").is_enabled())
    assert page.text("answers") == "stopped"


def test_only_what_was_moved_is_sent(page):
    page.js(
        "const real = window.fetch; window.asked = [];"
        "window.fetch = (to, options) => { if (options.body) "
        "window.asked.push(JSON.parse(options.body)); return real(to, options); };"
    )
    slider = page.element("retention_ratio")
    assert (slider.get_attribute("max"), slider.get_attribute("value")) == (
        "0.5",
        "0.5",
    ), "the engine's own"
    page.element("remember").click()
    page.ask("Hello!")
    page.short()
    page.move("retention_ratio", 0.25)
    Select(page.element("rule")).select_by_value("threshold")
    page.ask("Hello!")
    assert page.figure("tokens_per_forward") > 1.5
    page.element("reset").click()
    page.move("temperature", 0.7)
    page.element("seed").send_keys("12")
    page.element("system").send_keys("Be brief.")
    page.element("template").send_keys("Hello[[2]]![[]].")
    page.ask("Hello!")
    page.element("reset").click()
    page.element("match").send_keys(SCHEMA)
    page.ask(
        "Hello!"
    )  # refused: this model's tokenizer writes other text than its tokens
    assert "structured_outputs" in page.all(".turn.error")[-1].text
    first, second, third, matching = page.js("return window.asked")
    assert first["vllm_xargs"] == {"stream_granularity": "step", "trace": True}
    assert not {"max_tokens", "temperature", "seed"} & first.keys()
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert second["max_tokens"] == 32
    moved = {"block_length": 8, "retention_ratio": 0.25, "threshold": 0.9}
    assert second["vllm_xargs"] == first["vllm_xargs"] | moved
    template = ["Hello", 2, "!", -1, "."]
    assert third["vllm_xargs"] == first["vllm_xargs"] | {"template": template}
    assert (third["temperature"], third["seed"]) == (0.7, 12)
    assert third["messages"][0] == {"role": "system", "content": "Be brief."}
    assert matching == first | {"structured_outputs": {"json": SCHEMA}}


def test_a_refusal_is_shown_in_words_and_the_next_request_works(page):
    page.move("max_tokens", 8)
    page.move("block_length", 128)
    page.ask(PROMPT)
    (error,) = page.all(".turn.error")
    assert "block_length=128 is out of range" in error.text
    assert "(400)" in error.text
    assert error.get_attribute("role") == "alert"
    assert page.element("prompt").get_attribute("value") == PROMPT, "to be sent again"
    page.element("reset").click()
    page.element("prompt").clear()
    page.short().ask(PROMPT)
    assert page.answer == ANSWER


def test_markup_in_prompts_and_in_what_the_server_sends_is_text(page):
    page.short().ask(f"Copy: {WORD} Rome")
    assert page.answer == f"{MARKUP} Rome"
    assert MARKUP.replace(" ", "␣") in "".join(
        cell.get_attribute("textContent") for cell in page.all(".cell span")
    )
    hostile = (
        "<img src=x onerror='window.ran=1'><script>window.ran=1</script><b>bold</b>"
    )
    page.ask(hostile)
    assert page.all(".turn.user span")[-1].text == hostile
    assert page.all("main img, main script, .turn b b") == []
    assert page.js("return window.ran ?? null") is None


def test_stop_ends_the_request_and_keeps_its_steps(page):
    page.move("max_tokens", 256)
    page.move("block_length", 128)  # no end before 128 steps
    # In the page itself: all steps take less than a second, and so may a click from
    # here.
    page.js(
        "new MutationObserver((_, observer) => {"
        "  if (document.querySelector('.cell.masked') && "
        "document.querySelector('[data-figure=forward_passes]')) {    "
        "observer.disconnect(); document.getElementById('stop').click();  }"
        "}).observe(document.body, {childList: true, subtree: true})"
    )
    page.send(PROMPT)
    page.wait(lambda: page.all(".turn.model small"))
    assert page.all(".turn.model small")[0].text == "stopped"
    assert not page.element("stop").is_enabled()
    assert page.element("send").is_enabled()
    assert page.js("return document.activeElement.id") == "prompt"
    steps = int(page.element("step").get_attribute("max"))
    assert steps < 128
    page.wait(lambda: scrape(page.server.url)["vllm:num_requests_running"] == 0)


def test_without_the_key_the_page_says_what_is_missing(browser):
    page = browser.open(key=None)
    page.wait(lambda: "API key" in page.text("model"))
    page.ask("Hello!")
    assert "API key" in page.all(".turn.error")[0].text
    page.element("key").send_keys(KEY, Keys.ENTER)
    page.wait(lambda: page.text("model").startswith("demo"))
    assert KEY not in page.js("return document.documentElement.outerHTML")
    assert page.js(
        "return [localStorage.length, sessionStorage.length, document.cookie]"
    ) == [0, 0, ""]


@pytest.mark.parametrize(
    ("name", "width", "scheme", "step"),
    [
        ("wide", 1240, "light", 12),
        ("narrow", 390, "light", 5),
        ("dark", 1240, "dark", 12),
    ],
)
def test_it_fits_its_screen(browser, tmp_path, name, width, scheme, step):
    page = browser.open(width=width, scheme=scheme)
    assert page.js("return document.documentElement.scrollWidth") <= width
    page.short().ask_for_all_steps(PROMPT)
    page.wait(lambda: page.all("#maps canvas"))
    page.move("step", step)
    page.wait(lambda: page.masked == 32 - step)
    assert page.js("return document.documentElement.scrollWidth") <= width
    wider = page.js(
        "return [...document.querySelectorAll('main *')].filter((e) => "
        "!e.closest('.unseen, .skip, .cell') && e.getBoundingClientRect().right > "
        "arguments[0] + 1).map((e) => e.tagName + '.' + e.className)",
        width,
    )
    assert wider == []
    kept = page.keep(name, Path(os.environ.get("DLLM_SCREENSHOTS") or tmp_path))
    assert 10_000 < kept.stat().st_size < 200_000
