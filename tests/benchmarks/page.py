"""Time until a page is open, and of every interaction on it until the next frame is painted.

    python tests/benchmarks/page.py runs/demo --repeats 9

The page is opened in Chromium, at 1280 × 900. Every option of every choice, the end of each slider, and the first
boxes, buttons, folds, cells and tokens of each section are used REPEATS times. Wall time is the lowest and the median;
CPU time is that of the page's own thread (median), which depends less on other work on the machine. Each control's
slowest value is printed.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import launched

from sinkscope.html_page import PAGE

ANSWERS = 100  # milliseconds, the target
PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
# all controls: [section, control, value, kind of use, index among its kind]
INTERACTIONS = """() => {
    window.dispatchEvent(new Event("beforeprint"));  // draws all charts
    const found = [];
    for (const section of document.querySelectorAll("main section")) {
        const add = (...one) => found.push([section.id, ...one]);
        const some = (selector, how, most, name) =>
            [...section.querySelectorAll(selector)].slice(0, most).forEach((node, at) => add(how, name(node), how, at));
        some(".panels [role=gridcell]", "cell", 12, (node) => node.getAttribute("aria-label"));
        for (const control of section.querySelectorAll(".control")) {
            const part = control.querySelector("select, input"), label = control.querySelector("label").textContent;
            if (part.tagName !== "SELECT") add(label, part.type, part.type, label);
            else if (part.options.length > 1)
                [...part.options].forEach((option, at) => add(label, option.text, "select", [label, at]));
        }
        some(".several input", "box", 6, (node) => node.parentNode.textContent);
        some("button:enabled", "button", 12, (node) => node.textContent);
        some("details", "fold", 12, (node) => node.firstChild.textContent);
        some(".token", "token", 2, (node) => node.textContent);
    }
    return found;
}"""
# performs one use, or the step that has to come before it; → milliseconds until its frame is painted; null if the
# control has disappeared
USE = """async ([id, control, value, how, which, isBefore]) => {
    const painted = PAINTED;
    const section = document.getElementById(id);
    const nth = (selector) => section.querySelectorAll(selector)[which];
    const labelled = (label) => [...section.querySelectorAll(".control")]
        .find((one) => one.querySelector("label").textContent === label)?.querySelector("select, input");
    const set = (key, value, event) => (node) => { node[key] = value; node.dispatchEvent(new Event(event)); };
    const click = (node) => node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    const point = (node) => node.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
    const nothing = () => {};
    const [target, before, act] = {
        cell: () => [nth(".panels [role=gridcell]"), nothing, click],
        select: () => [labelled(which[0]), set("selectedIndex", which[1] ? 0 : 1, "change"),
            set("selectedIndex", which[1], "change")],
        range: () => [labelled(which), set("value", 0, "input"), (node) => set("value", node.max, "input")(node)],
        search: () => [labelled(which), set("value", "", "input"), set("value", "layer > 0", "input")],
        checkbox: () => [labelled(which), nothing, click],
        box: () => [nth(".several input"), nothing, click],
        button: () => [nth("button"), nothing, click],
        fold: () => [nth("details"), (node) => { node.open = false; }, (node) => { node.open = true; }],
        token: () => [nth(".token"), nothing, point],
    }[how]();
    if (!target || (how === "select" && target.options.length <= which[1])) return null;
    if (isBefore) {
        section.scrollIntoView();
        before(target);
        for (let frame = 0; frame < 4; frame++) await painted();
        return 0;
    }
    performance.mark("before");
    act(target);
    await painted();
    return performance.measure(`${id}: ${control}`, "before").duration;
}""".replace("PAINTED", PAINTED)


class Taken(NamedTuple):
    """Milliseconds of one interaction."""

    control: str
    value: str
    lowest: float
    median: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    with launched() as browser:
        for folder in given.folders:
            file = folder / PAGE
            print(f"\n{folder.name}: {file.stat().st_size / 1e6:.2f} MB, load {os.getloadavg()[0]:.1f}")
            print_opening(browser, file, given.repeats)
            print_interactions(browser, file, given.repeats)


def print_opening(browser: Any, file: Path, repeats: int) -> None:
    times = []
    for _ in range(repeats):
        with _opened(browser, file) as page:
            times.append(page.evaluate("performance.now()"))
    print(f"opening: lowest {min(times):.0f} ms, median {median(times):.0f} ms")


def print_interactions(browser: Any, file: Path, repeats: int) -> None:
    """Print the slowest value of each control, and how many interactions miss the target."""
    with _opened(browser, file) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        taken = list(_timed(page, session, page.evaluate(INTERACTIONS), repeats))
    slowest: dict[str, Taken] = {}
    for one in taken:
        slowest[one.control] = max(slowest.get(one.control, one), one, key=lambda other: other.median)
    above = ", ".join(
        f"{sum(getattr(one, kind) > ANSWERS for one in taken)} by {kind}" for kind in ("lowest", "median", "cpu")
    )
    print(f"{len(taken)} interactions, load {os.getloadavg()[0]:.1f}; above {ANSWERS} ms: {above}\n")
    print("| control | slowest value | lowest | median | CPU |\n| --- | --- | ---: | ---: | ---: |")
    for one in sorted(slowest.values(), key=lambda one: -one.median):
        print(f"| {one.control} | {one.value[:50]} | {one.lowest:.0f} | {one.median:.0f} | {one.cpu:.0f} |")


def _timed(page: Any, session: Any, interactions: list[Any], repeats: int) -> Iterator[Taken]:
    for interaction in interactions:
        walls, cpus = [], []
        for _ in range(repeats):
            if page.evaluate(USE, [*interaction, True]) is None:
                break
            before = _cpu(session)
            wall = page.evaluate(USE, [*interaction, False])
            if wall is None:
                break
            walls.append(wall)
            cpus.append(_cpu(session) - before)
        if walls:
            section, control, value, *_ = interaction
            yield Taken(f"{section}: {control}", value, min(walls), median(walls), median(cpus))


def _cpu(session: Any) -> float:
    """Return the milliseconds that the page's thread has worked since the page was opened."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(1000 * one["value"] for one in metrics if one["name"] == "TaskDuration")


@contextmanager
def _opened(browser: Any, file: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.absolute().as_uri())
    page.locator("body[data-ready]").wait_for()
    page.evaluate(PAINTED)
    yield page
    page.close()


if __name__ == "__main__":
    main()
