"""The live page in a real browser: what stands on it is what the controller says."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from live_pool import MIB, Controller, Member, settle

sync_api = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TESTS: playwright is not installed")

MODELS = ["actor", "verifier"]
BROWSERS = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome"]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
PATIENCE_MS = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: that of playwright, the one that WINDLASS_CHROMIUM names, or one of this machine."""
    found = [os.environ.get("WINDLASS_CHROMIUM"), None, *map(shutil.which, BROWSERS)]
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        paths = [p or own for p in found[:2]] + [p for p in found[2:] if p]
        path = next((p for p in paths if pathlib.Path(p).exists()), None)
        if path is None:
            pytest.skip("NO BROWSER TESTS: neither playwright's Chromium nor one of this machine was found")
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def controller(tmp_path: pathlib.Path) -> Iterator[Controller]:
    # Members are heard of only when a test makes them speak.
    started = Controller(tmp_path, "--set=policy=actor,verifier", "--heartbeat=600", "--retry=600")
    yield started
    started.kill()


class Page:
    """A page and everything it complained about."""

    def __init__(
        self, browser: Any, controller: Controller, *, token: str | None = "", **context: Any
    ) -> None:
        self.context = browser.new_context(**{"viewport": DESK, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        token = controller.token if token == "" else token
        self.page.goto(f"{controller.url}/" + ("" if token is None else f"#token={token}"))

    def text(self, selector: str) -> str:
        return " ".join(str(self.page.locator(selector).first.inner_text()).split())

    def shows(self, selector: str, text: str) -> None:
        """Waits until it does."""
        sync_api.expect(self.page.locator(selector).first).to_contain_text(text, timeout=PATIENCE_MS)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture
def open_page(browser: Any, controller: Controller) -> Iterator[Callable[..., Page]]:
    opened: list[Page] = []

    def open_one(**options: Any) -> Page:
        opened.append(Page(browser, controller, **options))
        return opened[-1]

    yield open_one
    for page in opened:
        page.context.close()


def busy_pool(controller: Controller) -> list[Member]:
    """Three receivers: version 3 is served, version 4 on its way; one pulls, one has failed to load."""
    members = [Member(controller, f"gpu-{i}", MODELS, f"node-{i}") for i in range(3)]
    for version in range(1, 4):
        for model, ratio in zip(MODELS, (0.0123, 0.000456)):
            controller.notify(model, version, ratio if version > 1 else None)
        if version < 3:
            settle(members)
    for member in members:
        for task in member.poll():
            member.carry_out(task)
    for i, member in enumerate(members):
        for task in member.poll():
            if i == 2 and task["do"] == "load":
                member.fail(task, "the engine answered 500 to /update_weights")
            else:
                member.carry_out(task)
    engines = [
        {"engine": "vllm=http://127.0.0.1:8000", "condition": "serving", "version": 3},
        {
            "engine": "vllm=http://127.0.0.1:8001",
            "condition": "fenced",
            "version": 2,
            "error": "it answered 500",
        },
    ]
    controller.notify("actor", 4, 0.0123)
    for i, member in enumerate(members):
        pulling = {"stage": "pulling", "version": 4, "bytes": 5 * MIB, "of_bytes": 8 * MIB, "rate": 2.5e9}
        calm = {"stage": "idle", "version": 3}
        one = {"model_id": "actor", **(pulling if i == 0 else calm), "engines": engines if i == 0 else []}
        member.doing = [one, {"model_id": "verifier", "stage": "idle", "version": 3}]
        member.poll()
    return members


# What the page makes of numbers.
def ms(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:.1f} ms" if x < 10 else f"{x:.0f} ms" if x < 1000 else f"{x / 1e3:.2f} s"


def size(n: float) -> str:
    units = ["KiB", "MiB", "GiB"]
    if n < 1024:
        return f"{n:.0f} B"
    at = -1
    while n >= 1024 and at < len(units) - 1:
        n, at = n / 1024, at + 1
    return f"{n:.2f} {units[at]}"


def percent(x: float | None) -> str:
    return "–" if x is None else f"{x * 100:.{4 if 0 < x < 0.001 else 2}f} %"


def version(v: int | None) -> str:
    return "–" if v is None else f"v{v}"


def test_values_on_the_page_are_those_of_the_status(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    busy_pool(controller)
    page = open_page()
    page.shows("[data-receiver=gpu-0] [data-f=bytes]", "5.00 MiB of 8.00 MiB")
    status = controller.status()
    [policy] = status["sets"]
    assert policy["served"]["version"] == 3 and policy["live"] == 2, policy
    last = [s for s in policy["syncs"] if s["state"] == "served"][-1]

    assert page.text("[data-f=serving]") == f"Serving version {policy['served']['version']}"
    assert page.text("#now [data-f=blocked]").lower().rstrip(".") == policy["blocked"].lower()
    assert page.text("#now [data-f=live] dd").startswith(f"{policy['live']} of {policy['receivers']}")
    assert page.text("#now [data-f=latency] dd") == f"{ms(last['latency_ms'])} v{last['version']}, to served"
    assert page.text("#now [data-f=pause] dd").startswith(ms(last["pause_ms"]))
    assert page.text("#now [data-f=rate] dd").startswith(
        f"{size(sum(r['rate'] for r in status['receivers']))}/s"
    )
    ratios = sorted(t["delta_ratio"] for t in status["trainers"])
    assert page.text("#now [data-f=delta] dd").startswith(f"{percent(ratios[0])[:-2]}–{percent(ratios[1])}")

    for trainer in status["trainers"]:
        row = f"#models [data-model={trainer['model_id']}]"
        [served] = [i for i in policy["served"]["identities"] if i["model_id"] == trainer["model_id"]]
        assert page.text(f"{row} [data-f=served]") == version(served["version"])
        assert page.text(f"{row} [data-f=announced]") == version(trainer["version"])
        assert page.text(f"{row} [data-f=ahead]") == str(trainer["ahead"])
        assert page.text(f"{row} [data-f=delta]") == percent(trainer["delta_ratio"])
        assert page.text(f"{row} [data-f=unchanged]") == percent(trainer["delta_sparsity"])
        assert trainer["endpoint"].endswith(page.text(f"{row} [data-f=endpoint]"))

    for receiver in status["receivers"]:
        row = f"[data-receiver={receiver['receiver']}]"
        [place] = receiver["places"]
        busy = any(m["staging"] for m in receiver["models"])
        state = "live" if place["live"] else "catching up" if busy else "not live"
        assert page.text(f"{row} [data-f=state]") == state
        assert receiver["host"] in page.text(row)
        if not place["live"]:
            assert page.text(f"{row} [data-f=why]").startswith(place["why"])
        for held in receiver["models"]:
            part = f"{row} [data-model={held['model_id']}]"
            assert page.text(f"{part} [data-f=loaded]") == (
                version(held["loaded"]["version"]) if held["loaded"] else "none"
            )
            doing = held["doing"]
            about = "" if doing["stage"] == "idle" else f" {version(doing['version'])}"
            assert page.text(f"{part} [data-f=stage]") == f"{doing['stage']}{about}"
            if doing["rate"]:
                assert page.text(f"{part} [data-f=rate]") == f"{size(doing['rate'])}/s"
                assert (
                    page.text(f"{part} [data-f=bytes]")
                    == f"{size(doing['bytes'])} of {size(doing['of_bytes'])}"
                )
            for engine in doing["engines"]:
                said = page.text(f'{row} [data-engine="{engine["engine"]}"]')
                assert f"{engine['condition']} {version(engine['version'])}" in said
                assert engine.get("error", "") in said

    assert len(status["errors"]) >= 1 and page.text("[data-f=errors]").startswith(str(len(status["errors"])))
    for i, error in enumerate(status["errors"][:5]):
        assert page.text(f'[data-error="{i}"] [data-f=message]') == error["message"]
        if error["advice"]:
            assert page.text(f'[data-error="{i}"] [data-f=advice]') == error["advice"]
        assert error["who"] in page.text(f'[data-error="{i}"]')

    for sync in policy["syncs"]:
        row = f'#syncs [data-version="{sync["version"]}"]'
        assert page.text(f"{row} [data-f=latency]") == ms(sync["latency_ms"])
        assert page.text(f"{row} [data-f=paused]") == ms(sync["pause_ms"])
        assert page.text(f"{row} [data-f=wire]") == size(sync["bytes"])
        counts = [page.text(f"{row} [data-f={name}]") for name in ("staged", "loaded", "failed")]
        assert counts == [str(sync[name]) for name in ("staged", "loaded", "failed")]
    spans = sum(len(s["spans"]) for s in policy["syncs"][-3:])
    drawn = page.page.locator("#timeline rect.span:not(.version):not(.ghost)[data-tip]").count()
    assert drawn == spans
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["desk", "phone"])
def test_the_page_is_whole_at_two_sizes_in_light_and_dark(
    controller: Controller, open_page: Callable[..., Page], name: str, scheme: str
) -> None:
    busy_pool(controller)
    page = open_page(viewport=PHONE if name == "phone" else DESK, color_scheme=scheme)
    page.shows("[data-f=serving]", "Serving version 3")
    wide, room = page.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room, "something is wider than the screen"
    paper, ink = page.page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = [sum(map(int, re.findall(r"\d+", c)[:3])) / 765 for c in (paper, ink)]
    assert (light[0] > 0.9 and light[1] < 0.2) if scheme == "light" else (light[0] < 0.15 and light[1] > 0.8)
    # Text that is cut off by its own box tells nobody anything.
    cut = page.page.evaluate(
        """[...document.querySelectorAll("td, dd, dt, p, h2, li, button")]
           .filter((e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline")
           .map((e) => e.textContent)"""
    )
    assert cut == []
    for lane in ("Trainer", "Agent", "Wire", "Engine"):
        page.shows("#timeline svg", lane)
    folder = os.environ.get("WINDLASS_SCREENSHOTS")
    if folder:
        page.page.screenshot(path=f"{folder}/live-{name}-{scheme}.png", full_page=True)
    assert page.complaints == []


def test_the_page_follows_without_being_loaded_again(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    page = open_page()
    page.shows("#receivers", "No receiver has joined")
    page.shows("[data-f=serving]", "Serving nothing yet")
    member = Member(controller, "late", MODELS)
    page.shows("[data-receiver=late] [data-f=state]", "not live")
    for number in (1, 2):
        for model in MODELS:
            controller.notify(model, number)
        settle([member])
        page.shows("[data-f=serving]", f"Serving version {number}")
    page.shows("[data-receiver=late] [data-f=state]", "live")
    assert len([url for url in page.requests if url.endswith("/")]) == 1
    assert page.complaints == []


def test_an_empty_controller_says_what_to_do(tmp_path: pathlib.Path, browser: Any) -> None:
    controller = Controller(tmp_path)
    try:
        with Page(browser, controller) as page:
            page.shows("#main", "No version has been announced yet")
            page.shows("#main", f'controller="{controller.url}"')
            page.shows("#receivers pre", f"windlass receive --controller {controller.url}")
            page.shows("#errors", "Nothing has gone wrong")
            assert page.complaints == []
    finally:
        controller.kill()


def test_without_a_token_the_page_asks_for_one_and_never_puts_it_into_an_address(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    page = open_page(token=None)
    page.shows("#main", "requires its token")
    assert page.complaints == []
    page.page.fill("input[name=token]", "wrong")
    page.page.click("button[type=submit]")
    page.shows("[role=alert]", "not accepted")
    page.page.fill("input[name=token]", controller.token)
    page.page.click("button[type=submit]")
    page.shows("[data-f=serving]", "Serving nothing yet")
    assert page.page.locator("input[name=token]").count() == 0
    # One that came with the link is taken out of the address bar.
    linked = open_page()
    linked.shows("[data-f=serving]", "Serving nothing yet")
    assert controller.token not in linked.page.url
    linked.page.reload()
    linked.shows("[data-f=serving]", "Serving nothing yet")
    assert not [url for url in page.requests + linked.requests if controller.token in url.split("#")[0]]
    assert linked.complaints == []


def test_a_controller_that_goes_away_is_told_and_followed_when_it_is_back(
    tmp_path: pathlib.Path, browser: Any
) -> None:
    controller = Controller(tmp_path, "--set=policy=actor,verifier")
    page = Page(browser, controller)
    try:
        page.shows("[data-f=link]", "live")
        controller.kill()
        page.shows("#notice", "The controller cannot be reached")
        page.shows("[data-f=link]", "not connected")
        assert page.page.evaluate("document.body.classList.contains('stale')")
        controller = Controller(tmp_path, "--set=policy=actor,verifier", port=controller.port)
        page.shows("[data-f=link]", "live")
        assert page.page.locator("#notice").is_hidden()
    finally:
        page.context.close()
        controller.kill()


def test_what_others_say_never_becomes_markup(controller: Controller, open_page: Callable[..., Page]) -> None:
    evil = "<img src=x onerror=window.evil=1><script>window.evil=1</script>"
    member = Member(controller, "gpu-0", MODELS, evil)
    member.doing = [{"model_id": "actor", "stage": "<b>pulling", "version": 1, "engines": [
        {"engine": "<i>vllm", "condition": "serving", "version": None, "error": evil}
    ]}]  # fmt: skip
    page = open_page()
    for model in MODELS:
        controller.notify(model, 1)
    for task in member.poll():
        member.fail(task, evil)
    page.shows("[data-error='0'] [data-f=message]", evil)
    page.shows("[data-receiver=gpu-0]", evil[:20])
    page.shows("[data-receiver=gpu-0] [data-f=stage]", "<b>pulling")
    assert page.page.evaluate(
        "[window.evil, document.querySelectorAll('#main img, #main i, #main script, #receivers b').length]"
    ) == [None, 0]
    assert page.complaints == []


def test_the_result_of_an_eval_stands_with_its_version(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    member = Member(controller, "gpu-0", MODELS)
    page = open_page()
    controller.notify("verifier", 1)
    page.shows('#syncs [data-version="1"]', "v1")
    assert page.page.locator("#syncs [data-f=eval]").count() == 0
    words = {"model_id": "actor", "incarnation": 1, "version": 1, "eval": True, "timeout_ms": PATIENCE_MS}
    words["sender_endpoint"] = "http://127.0.0.1:7000"
    trainer = threading.Thread(target=controller.ask, args=("/notify_version", words))
    trainer.start()
    until = time.monotonic() + PATIENCE_MS / 1000
    task: dict[str, Any] = {"id": None}
    while task["id"] is None and time.monotonic() < until:
        settle([member])
        task = controller.ask("/take_eval", {"timeout_ms": 50})
    controller.ask("/eval_done", {"id": task["id"], "result": "<b>good</b>"})
    trainer.join()
    page.shows('#syncs [data-version="1"] [data-f=eval]', "<b>good</b>")
    assert page.complaints == []


def test_a_chosen_sync_shows_what_took_how_long(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    busy_pool(controller)
    page = open_page()
    page.page.click('#syncs [data-version="2"] button')
    page.shows("#timeline-title", "Sync of version 2")
    sync = next(s for s in controller.status()["sets"][0]["syncs"] if s["version"] == 2)
    bars = page.page.locator("#timeline rect.span:not(.version)[data-tip]")
    assert bars.count() == len(sync["spans"]) > 0
    span = sync["spans"][0]
    bars.first.hover()
    page.shows("#tip", f"{span['what']}, v2")
    page.shows("#tip", ms(span["to_ms"] - span["from_ms"]))
    page.page.click("[data-act=follow]")
    page.shows("#timeline-title", "Timeline of the last syncs")
    # The same by the keyboard alone.
    bars.first.focus()
    page.page.keyboard.press("Tab")
    assert page.page.locator("#tip").is_visible()
    assert page.complaints == []


def test_three_hundred_receivers_are_drawn_quickly_and_can_be_sifted(
    controller: Controller, open_page: Callable[..., Page]
) -> None:
    members = [Member(controller, f"gpu-{i:03}", MODELS) for i in range(300)]
    for model in MODELS:
        controller.notify(model, 1)
    settle(members)
    page = open_page()
    page.shows("[data-value=all]", "all 300")
    page.shows("[data-value=away]", "not live 0")
    assert page.page.locator("[data-receiver]").count() == 30
    page.page.click("[data-act=every]")
    assert page.page.locator("[data-receiver]").count() == 300
    begun = time.monotonic()
    took = page.page.evaluate(
        "(() => { const t = performance.now(); draw(); return performance.now() - t; })()"
    )
    assert took < 2000 and time.monotonic() - begun < 10, "four times a second is meant to be possible"
    page.page.click("[data-value=away]")
    page.shows("#receivers", "All are live")
    assert page.complaints == []
