"""The page in Chromium: no errors or requests, every control works, numbers equal the tables, axe finds nothing."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from support.browser import USE_EVERY_CONTROL, launched, opened
from support.pages import KINDS, analysis

import sinkscope
from sinkscope.html_page import Contents
from sinkscope.html_page.compact import FAINTEST, STEPS
from sinkscope.models.loading import LoadedModel
from sinkscope.results.metrics import METRICS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_of_kind(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return the opened page of a kind of folder; each is opened once."""
    with ExitStack() as stack:
        pages: dict[str, Any] = {}

        def page_of_kind(kind: str) -> Any:
            if kind not in pages:
                pages[kind] = stack.enter_context(opened(browser, KINDS[kind](), tmp_path_factory.mktemp("page")))
            return pages[kind]

        yield page_of_kind


@pytest.fixture(scope="module")
def page(page_of_kind: Callable[[str], Any]) -> Any:
    return page_of_kind("analysis")


def test_numbers_have_the_formats_of_their_metrics(page: Any) -> None:
    forms = sorted({metric.form for metric in METRICS.values()})
    shown = page.evaluate("forms => forms.map((form) => S.formatter(form)(-2.75))", forms)
    assert [text.replace("−", "-") for text in shown] == [form.format(-2.75).replace("e+00", "e+0") for form in forms]


def test_a_map_shows_the_tables_numbers(page: Any) -> None:
    contents = analysis()
    table = contents.tables["attention"].query("position == 3").set_index(["layer", "head"])
    page.get_by_label("Metric").first.select_option(label="window mass")
    page.get_by_label("position", exact=True).first.select_option(label="3")
    for layer, head in ((0, 0), (2, 3), (3, 1)):
        cell = page.locator(f".panels [role=gridcell][data-row='{layer}'][data-column='{head}']")
        shown = re.fullmatch(rf"layer {layer}, head {head}: (\S+)", cell.get_attribute("aria-label"))
        assert float(shown[1]) == pytest.approx(table["window_mass"][layer, head], abs=6e-4)


def test_a_head_opens_by_keyboard_and_by_click(page: Any) -> None:
    contents = analysis()
    maps = contents.tables["attention_maps"]
    grid = page.locator(".panels [role=grid]")
    grid.locator("[tabindex='0']").focus()
    before = page.locator("#head-name").text_content()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    layer, _ = map(int, re.findall(r"\d+", page.locator("#head-name").text_content()))
    assert page.locator("#head-name").text_content() != before
    assert grid.locator("[aria-selected=true]").get_attribute("data-row") == str(layer)

    grid.locator("[data-row='0'][data-column='1']").click()
    assert page.locator("#head-name").text_content() == "Layer 0, head 1"
    weight = maps.query("layer == 0 and head == 1 and query == 5 and key == 2")["weight"].item()
    cell = page.locator(".head [role=gridcell][data-row='5'][data-column='2']")
    assert float(cell.get_attribute("aria-label").split(": ")[1].split()[0]) == pytest.approx(weight, abs=6e-4)


def labels_of_map(page: Any) -> dict[tuple[int, int], str]:
    """Return the label of each cell of the attention map that is shown, by query and key."""
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # draws what is out of sight, too
    cells = page.locator(".head [role=gridcell]")
    cells.first.wait_for(state="attached")
    labels = cells.evaluate_all(
        "all => all.map(({ dataset, ariaLabel }) => [+dataset.row, +dataset.column, ariaLabel])"
    )
    return {(query, key): label for query, key, label in labels}


def numbers_of(labels: dict[tuple[int, int], str]) -> dict[tuple[int, int], float]:
    return {at: float(label.split(": ")[1].split()[0]) for at, label in labels.items()}


ROUNDING = (1 / FAINTEST) ** (0.5 / STEPS) - 1 + 6e-4  # of the page's weights, and of numbers with four digits


def rounded(weights: np.ndarray, labels: dict[tuple[int, int], str]) -> dict[tuple[int, int], float]:
    return {at: float(weights[at]) if weights[at] > FAINTEST else 0.0 for at in labels}


def test_choices_open_the_map_of_any_head(page: Any) -> None:
    page.get_by_label("Layer", exact=True).select_option("2")
    page.get_by_label("Head", exact=True).select_option("3")
    assert page.locator("#head-name").text_content() == "Layer 2, head 3"
    kept = analysis().activations["attention"][2][0, 3].float().numpy()
    labels = labels_of_map(page)
    assert labels[5, 2].startswith("query 5, key 2: ")
    assert labels[5, 2].endswith(" (漢字 → ⏎)")
    assert sorted(labels) == [(query, key) for query in range(12) for key in range(query + 1)]
    assert numbers_of(labels) == pytest.approx(rounded(kept, labels), rel=ROUNDING, abs=FAINTEST)


@pytest.mark.real_model
def test_any_head_of_smollm_shows_plain_transformers_weights(smollm: LoadedModel, browser: Any, tmp_path) -> None:
    run = sinkscope.analyze(smollm, prompt="The quick brown fox jumps over the lazy dog", observables="attention")
    ids = run.activations.token_ids
    eager = np.stack([layer.weights for layer in reference.record(smollm.model, ids[0]).layers])
    assert eager.shape == (30, 9, 9, 9)
    with opened(browser, run.contents, tmp_path) as page:
        grid = page.locator(".panels [role=grid]")
        for layer, head in ((0, 0), (11, 3), (14, 8), (29, 7)):
            grid.locator(f"[data-row='{layer}'][data-column='{head}']").dispatch_event("click")
            labels = labels_of_map(page)
            assert page.locator("#head-name").text_content() == f"Layer {layer}, head {head}"
            assert len(labels) == 45
            assert labels[4, 1].endswith("( jumps →  quick)")
            expected = rounded(eager[layer, head], labels)
            assert numbers_of(labels) == pytest.approx(expected, rel=ROUNDING, abs=FAINTEST), (layer, head)
        every = page.evaluate("""d3.cross(d3.range(30), d3.range(9)).map(([layer, head]) => d3.range(9).map((query) =>
            d3.range(9).map((key) => key > query ? 0 : S.weights(layer, head)(query, key))))""")
        np.testing.assert_allclose(np.reshape(every, eager.shape), eager, rtol=ROUNDING, atol=FAINTEST)


def test_a_head_shows_the_gradients_of_the_key_value_head_that_it_reads(browser: Any, tmp_path: Path) -> None:
    contents = analysis()  # four heads share two key/value heads
    gradient = contents.tables["gradient"].query("layer == 1 and position == 0").set_index(["pathway", "head"])
    with opened(browser, contents, tmp_path) as page:
        page.evaluate("S.openHead(1, 3)")
        rows = page.locator(".head details tbody tr")
        texts = rows.evaluate_all("rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))")
        shown = {name: float(value) for name, value, _ in texts if name.startswith("grad norm")}
        places = {"query": ("query", 3), "key, key/value head 1": ("key", 1), "value, key/value head 1": ("value", 1)}
        expected = {f"grad norm, {name}": gradient["grad_norm"][place] for name, place in places.items()}
        assert shown == pytest.approx(expected, rel=1e-3)
        page.get_by_label("Metric").first.select_option(label="grad norm")
        page.get_by_label("pathway", exact=True).first.select_option(label="value")
        cells = page.locator(".panels [role=gridcell]")
        assert page.locator(".panels [aria-selected=true]").get_attribute("data-column") == "1"
        cells.and_(page.locator("[data-row='2'][data-column='1']")).click()
        assert page.locator("#head-name").text_content() == "Layer 2, head 2"  # the first head that reads it


def test_a_table_sorts_and_filters(page: Any) -> None:
    contents = analysis()
    table = contents.tables["attention"].query("head == 2")
    section = page.locator("#tables")
    section.get_by_label("Table", exact=True).select_option(label="attention (128 rows)")
    section.get_by_label("Filter").fill("head = 2")
    assert section.get_by_role("status").text_content() == "Rows 1 to 30 of 32 that match, of 128"
    column = section.get_by_role("button", name="window_mass")
    for click, ascending in ((1, True), (2, False)):
        column.click()
        shown = [float(text) for text in section.locator("tbody tr td:nth-child(7)").all_text_contents()]
        expected = table["window_mass"].sort_values(ascending=ascending).tolist()[:30]
        assert shown == pytest.approx(expected, rel=1e-3), click
    section.get_by_label("Filter").fill("")
    section.get_by_role("button", name="Next rows").click()
    assert section.get_by_role("status").text_content() == "Rows 31 to 60 of 128"


def test_effects_and_claims_show_the_tables_numbers(page_of_kind: Callable[[str], Any]) -> None:
    effects = KINDS["experiment"]()
    rows = effects.tables["effect"].query("layer == -1 and metric == 'sink_rate' and name == 'do-1'")
    page = page_of_kind("experiment")
    shown = page.locator("#effects tbody tr", has_text="do-1").locator("td").all_text_contents()
    assert shown[1:3] == [f"{rows.query('arm == @arm')['value'].item():.1%}" for arm in ("before", "after")]
    controls = rows.query("arm == 'control'")["value"]
    assert shown[3] == f"{controls.mean():.1%} ± {controls.std():.1%} ({len(controls)})"
    page = page_of_kind("claims")
    page.get_by_role("button", name="GS-2, two: fails").click()
    assert "0.8 [0.7, 0.9]" in page.locator("#claims .detail").text_content()


def test_arms_have_the_maps_of_a_heads_layer_side_by_side(page_of_kind: Callable[[str], Any]) -> None:
    maps = KINDS["experiment"]().tables["arm_maps"].query("layer == 2 and query == 2 and key == 1")
    page = page_of_kind("experiment")
    page.locator(".panels [role=grid]").first.locator("[data-row='2'][data-column='3']").click()
    shown = page.locator(".head [role=gridcell][data-row='2'][data-column='1']")
    shown.nth(3).wait_for(state="attached")
    weights = [float(label.split(": ")[1]) for label in shown.evaluate_all("all => all.map((one) => one.ariaLabel)")]
    assert weights == pytest.approx(maps["weight"].tolist(), abs=6e-4)


def test_the_slider_reads_the_values_at_a_step(page_of_kind: Callable[[str], Any]) -> None:
    contents = KINDS["training"]()
    rows = contents.tables["training"].query("step == 20 and metric == 'loss' and condition == 'vga'")
    page = page_of_kind("training")
    page.get_by_label("Step", exact=True).fill("2")
    shown = page.locator("#training tbody tr", has_text="loss").last.locator("td").last.text_content()
    assert shown == " / ".join(f"{value:.3f}" for value in rows["value"])


@pytest.mark.slow
def test_a_page_begins_with_five_numbers_folds_what_experts_read_and_fits_into_a_narrow_window(
    browser: Any, tmp_path: Path
) -> None:
    contents = analysis(layers=30, heads=9, kv_heads=3, sequences=100, length=64)
    with opened(browser, contents, tmp_path) as page:
        page.reload()
        page.locator("body[data-ready]").wait_for()
        assert page.locator("section").first.get_attribute("id") == "glances"
        rate = contents.tables["summary"].query("layer == -1 and metric == 'sink_rate'")["value"].item()
        assert page.locator(".glances li").first.locator("strong").text_content() == f"{rate:.1%}"
        assert page.evaluate("document.documentElement.scrollHeight") <= 4 * 900
        assert page.locator("#tables select").first.is_hidden()
        page.get_by_role("link", name="Tables").click()
        page.locator("#tables select").first.wait_for(state="visible")
        page.set_viewport_size({"width": 390, "height": 844})
        page.reload()
        page.locator("body[data-ready]").wait_for()
        page.evaluate("document.querySelectorAll('details.fold').forEach((fold) => { fold.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_chart_is_saved_with_its_numbers(page: Any) -> None:
    details = page.locator(".panels figure").first.locator("details.numbers")
    details.locator("summary").click()
    for name in ("CSV", "SVG", "PNG"):
        with page.expect_download() as download:
            details.get_by_role("button", name=name).click()
        content = Path(download.value.path()).read_bytes()
        assert download.value.suggested_filename.endswith(f".{name.lower()}")
        assert content.startswith({"CSV": b'"layer', "SVG": b"<svg", "PNG": b"\x89PNG"}[name])
        assert b"var(--" not in content


def test_hostile_texts_do_nothing(browser: Any, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    contents = analysis(model=evil, condition=evil)
    tables = {name: table.replace({"<s>": evil, "org/Tiny-1M": evil}) for name, table in contents.tables.items()}
    hostile = tmp_path / "javascript:alert(3)<img src=x onerror=alert(4)>"
    hostile.mkdir()
    (hostile / "index.html").touch()
    facts = {"command": "compare", "runs": [{"label": evil, "folder": str(hostile)}], "config": {"model": evil}}
    with opened(browser, Contents(contents.manifest | {evil: evil} | facts, tables, folder=tmp_path), tmp_path) as page:
        assert page.locator("h1").text_content() == evil
        assert evil in page.locator(".token").first.text_content()
        link = page.locator("#run li a")
        assert (link.text_content(), link.evaluate("node => node.protocol")) == (evil, "file:")
        assert page.locator("img").count() == 0


def test_measurements_of_states_have_sections_with_charts(browser: Any, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "reports/residual-stream/smollm2-135m"
    with opened(browser, Contents.of_folder(folder), tmp_path) as page:
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        for section, charts in (("entropy", 1), ("sink-tokens", 1), ("residual-sinks", 3)):
            page.locator(f"#{section} .chart svg").nth(charts - 1).wait_for(state="attached")
            assert page.locator(f"#{section} ul.findings li").count() >= 1


# the last test, because it leaves every choice at its first value


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_control_works_and_axe_finds_nothing(kind: str, page_of_kind: Callable[[str], Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = page_of_kind(kind)
    assert page.evaluate(USE_EVERY_CONTROL) > 1
    page.wait_for_timeout(50)  # charts are drawn
    assert not page.locator("main svg:has(text:text-is('NaN'))").count()
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)
        violations = axe.Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]
        serious = [one for one in violations if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in serious] == []
