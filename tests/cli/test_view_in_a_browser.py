"""`rollflow view` as a browser shows it: Chromium, without a window."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from extras import needs
from held_envs import Held, await_that, let_go
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import OPTIONS, being_read, line_of

from rollflow import Graph, Rollout, Watch
from rollflow.stream import Outlet

webdriver = needs("selenium.webdriver")
Service = needs("selenium.webdriver.chrome.service").Service

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]

_SWITCHES = (
    "--headless",
    "--no-sandbox",  # containers run it as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in _SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator["Page"]:
    command = [sys.executable, "-m", "rollflow.cli.main", "view"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        browser.get_log("browser")  # what it said of pages before
        browser.get(url)
        yield Page(browser, url, process)
        process.send_signal(signal.SIGINT)
    browser.get("about:blank")


class Page:
    """The page as the browser has it."""

    def __init__(self, browser: webdriver.Chrome, url: str, view: subprocess.Popen[str]) -> None:
        self.url, self.view, self._browser = url, view, browser

    def value(self, script: str) -> Any:
        """Value of an expression of JavaScript."""
        return self._browser.execute_script(f"return {script}")

    def text(self) -> str:
        """All that it shows."""
        return " ".join([*self.texts("#state"), *self.texts("main")])

    def asked(self) -> list[str]:
        """Addresses of all that it has asked for."""
        found: list[str] = self.value("performance.getEntriesByType('resource').map(each => each.name)")
        return found

    def texts(self, selector: str) -> list[str]:
        """Texts of the elements that a selector finds."""
        found: list[str] = self.value(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
        return found

    def figure(self, name: str) -> str:
        """Value of a figure of the only run."""
        cells = self.texts("td")
        return cells[cells.index(name) + 1] if name in cells else ""

    def complaints(self) -> list[str]:
        """What the browser has to say of the page, such as a script that is refused."""
        return [each["message"] for each in self._browser.get_log("browser")]


def test_the_page_renews_itself_until_the_run_and_the_view_have_ended(page: Page) -> None:
    with Rollout([partial(NumberedEnv, 0), partial(NumberedEnv, 1)], module=NumberedModule(), seed=0) as rollout:
        for number, _ in zip(range(3), rollout.batches(), strict=False):
            await_that(lambda iterations=str(number + 1): page.figure("time/iterations") == iterations, page.text)
        assert page.texts("h2") == ["Rollout 1 lane × 2 slots"]
        assert page.texts("p.where")[0].startswith(f"pid {os.getpid()} ")
        assert page.texts("p.sentence")[0]
        await_that(lambda: len(page.texts(".plots .uplot")) >= 3, page.text)
        for shape in ("svg.picture", ".plots canvas"):
            assert page.value(f"document.querySelector('{shape}').getBoundingClientRect().height") > 100
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
    await_that(lambda: page.text().startswith("no run of this user"), page.text)
    page.view.send_signal(signal.SIGINT)
    await_that(lambda: page.text().startswith("rollflow view has ended"), page.text)


def test_a_run_that_stands_still_is_red_and_says_where(page: Page, tmp_path: Path) -> None:
    rollout = Rollout(
        partial(Held, 0, tmp_path, steps=[3]), module=NumberedModule(), **{**OPTIONS, "watch": Watch(stall_after=0.2)}
    )
    with being_read(rollout, lambda: let_go(tmp_path, 0)):
        await_that(lambda: page.texts("section.bad"), page.text)
        assert page.value("getComputedStyle(document.querySelector('section')).borderColor") == "rgb(200, 50, 60)"
        await_that(lambda: line_of(Held.step, "self._wait()") in page.text(), page.text)


def test_nothing_is_refused_or_comes_from_elsewhere_and_names_are_text(page: Page) -> None:
    class Idle:
        async def run(self, out: Outlet[int]) -> None:
            await anyio.sleep_forever()

    async def run() -> None:
        name = "<img src=x onerror=title='taken'>"
        graph = Graph(name)
        graph.add_node(name, Idle())
        graph.output("numbers", name)
        async with graph.run() as run:
            await anyio.to_thread.run_sync(partial(await_that, lambda: name in page.text(), page.text))
            await anyio.to_thread.run_sync(partial(await_that, lambda: len(page.asked()) > 2, page.asked))
            run.stop()

    anyio.run(run)
    assert page.value("document.title") == "rollflow: runs"
    assert set(page.asked()) == {f"{page.url}runs"}
    assert page.complaints() == []
