"""The built book in a real browser: pages, requests, widths, themes, plots, search.

Screenshots of every page go to build/screenshots/.
"""

import functools
import http.server
import io
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import h3lib

ROOT = Path(h3lib.__file__).parents[1]
HTML = ROOT / "book" / "_build" / "html"
SHOTS = ROOT / "build" / "screenshots"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SETTLED = "() => !window.MathJax?.startup?.promise || MathJax.startup.promise.then(() => true)"
FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("default")]

WIDE_ELEMENTS = """() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push(`the page: ${
    document.documentElement.scrollWidth}`);
  for (const element of document.querySelectorAll('.bd-article table, .bd-article img')) {
    let box = element.getBoundingClientRect(), scrolls = false;
    if (!box.width) continue;
    for (let at = element; at && !at.matches('.bd-article'); at = at.parentElement) {
      const inside = at.getBoundingClientRect();
      if (['auto', 'scroll'].includes(getComputedStyle(at).overflowX) &&
          at.scrollWidth > at.clientWidth + 1) scrolls = true;
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)) box = inside;
    }
    if (box.right > width + 1 || box.left < -1) found.push(`${element.tagName} ${box.right}`);
    if (scrolls && width >= 1280) found.push(`${element.tagName} ${element.className} scrolls: ${
      element.innerText?.slice(0, 40)}`);
  }
  return found;
}"""

FAINT_TEXT = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const over = (c, under) => {
    const a = c.length > 3 ? c[3] : 1;
    return [0, 1, 2].map(i => c[i] * a + under[i] * (1 - a));
  };
  const background = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor);
      layers.push(c);
      if (c.length < 4 || c[3] === 1) break;
    }
    return layers.reverse().reduce((under, c) => over(c, under), [255, 255, 255]);
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.querySelector('.bd-article'), 4);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.getBoundingClientRect().width ||
        style.visibility === 'hidden' || element.closest('.headerlink, mjx-container, script'))
      continue;
    const under = background(element), text = over(parse(style.color), under);
    const [a, b] = [luminance(text), luminance(under)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.add(`${contrast.toFixed(2)} ${element.tagName}.${
      element.className} ${style.color} on ${under.map(Math.round)}: ${
      walker.currentNode.data.trim().slice(0, 30)}`);
  }
  return [...found];
}"""


def _chromium():
    return shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if not (HTML / "index.html").exists():
        pytest.skip("the book is not built: make book")
    api = pytest.importorskip("playwright.sync_api", reason="env/requirements-browser.txt")
    with api.sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] * (os.geteuid() == 0)
        started = playwright.chromium.launch(
            executable_path=_chromium(), args=[*FLAGS, *sandbox]
        )  # without a Chromium of the system, playwright's own
        yield started
        started.close()


@pytest.fixture(scope="module")
def site():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=HTML)
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def page(browser, site):
    """A page that keeps what went wrong in `page.wrong`; other hosts cannot be reached."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    opened = context.new_page()
    opened.wrong = []

    def guard(route):
        if route.request.url.startswith((site, "data:", "blob:")):
            route.continue_()
        else:
            opened.wrong.append(f"request to {route.request.url}")
            route.abort()

    context.route("**/*", guard)
    opened.on("console", lambda m: m.type == "error" and opened.wrong.append(m.text))
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("response", lambda r: r.status >= 400 and opened.wrong.append(f"{r.status} {r.url}"))
    yield opened
    context.close()


def _pages() -> list[str]:
    files = HTML.rglob("*.html")
    names = [str(path.relative_to(HTML)) for path in files if "_static" not in path.parts]
    return sorted(names) or ["not built"]


def _set_theme(page, theme):
    page.evaluate(
        "theme => { document.documentElement.dataset.theme = theme;"
        " document.documentElement.dataset.mode = theme; }",
        theme,
    )


def _contrast_of_image(image) -> float:
    pixels = np.asarray(Image.open(io.BytesIO(image.screenshot())).convert("L")) / 255
    return float(pixels.max() - pixels.min())


@pytest.mark.parametrize("name", _pages())
def test_a_page(page, site, name):
    page.goto(f"{site}/{name}", wait_until="load")
    page.wait_for_function(SETTLED)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    wrong = page.wrong
    if page.locator(".bd-article").count():
        for size in (WIDE, NARROW):
            page.set_viewport_size(size)
            found = page.evaluate(WIDE_ELEMENTS)
            wrong += [f"{size['width']} px wide: {what}" for what in found]
            for theme in ("light", "dark"):
                _set_theme(page, theme)
                wrong += [f"{theme}: faint text {what}" for what in page.evaluate(FAINT_TEXT)]
                shot = f"{name.removesuffix('.html').replace('/', '-')}-{size['width']}-{theme}"
                page.screenshot(path=SHOTS / f"{shot}.png", full_page=True)
                if size is WIDE:
                    wrong += [f"{theme}: {what}" for what in _wrong_images(page)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def _wrong_images(page) -> list[str]:
    found = []
    for image in page.locator(".bd-article img").all():
        source = (image.get_attribute("src") or "")[-60:]
        if (image.get_attribute("alt") or "").strip(" .") in ("", source):
            found.append(f"no alternative text: {source}")
        if not image.evaluate("image => image.complete && image.naturalWidth > 0"):
            found.append(f"not loaded: {source}")
        elif image.is_visible() and (contrast := _contrast_of_image(image)) < 0.5:
            found.append(f"faint image ({contrast:.2f}): {source}")
    return found


@pytest.mark.parametrize("word, expected", [("rotary", "layouts"), ("papermill", "05_one_layout")])
def test_search_finds_words_of_prose_and_of_notebooks(page, site, word, expected):
    """From the search field of a page to the page that has the word."""
    page.goto(f"{site}/intro.html", wait_until="load")
    page.locator("button.search-button__button:visible").first.click()
    field = page.locator(".search-button__search-container input[type=search]").first
    field.fill(word)
    field.press("Enter")
    page.wait_for_selector("#search-results ul.search li a")
    page.wait_for_function("document.querySelector('#search-results .search-summary') !== null")
    links = [link.get_attribute("href") for link in page.locator("#search-results li a").all()]
    assert any(expected in link for link in links), links
    assert not page.wrong, page.wrong
    page.locator("#search-results li a").first.click()
    page.wait_for_selector(".bd-article")
    assert word in page.locator(".bd-article").inner_text().lower()


def test_the_theme_button_changes_the_theme(page, site):
    page.goto(f"{site}/intro.html", wait_until="load")
    seen = set()
    for _ in range(3):
        page.locator("button.theme-switch-button").first.click()
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}


def test_the_checks_see_what_is_wrong(page, site):
    """A faint word, a wide table, an image without words, a request that leaves, an error."""
    page.goto(f"{site}/intro.html", wait_until="load")
    page.set_viewport_size(NARROW)
    assert not page.evaluate(WIDE_ELEMENTS) and not page.evaluate(FAINT_TEXT)
    page.evaluate(
        "document.querySelector('.bd-article').insertAdjacentHTML('beforeend', `"
        "<p style='color: #aaa; background: #fff'>faint</p><img src='_images/none.svg'>"
        "<table style='width: 900px'><tr><td>wide</td></tr></table>`)"
    )
    assert any("faint" in what for what in page.evaluate(FAINT_TEXT))
    assert any("TABLE" in what for what in page.evaluate(WIDE_ELEMENTS))
    assert any("no alternative text" in what for what in _wrong_images(page))
    page.wrong.clear()
    page.evaluate("fetch('https://example.org/').catch(() => null)")
    page.evaluate("console.error('an error')")
    assert any("example.org" in what for what in page.wrong) and "an error" in page.wrong
