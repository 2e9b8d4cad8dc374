"""The page: what is on it, that it is safe with whatever names a file brings, and that it reads."""

import html.parser
import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import resources

import pytest
from programs import run_program
from sample_reports import HOSTILE, sample_report
from snaprt_replay.report import charts
from snaprt_replay.report.model import GraphNode, Headline, Neighborhood, Report
from snaprt_replay.report.page import page

VOID = {"meta", "br", "img", "link", "input"}
# What lays out text and draws; nothing that loads, runs, embeds or sends.
ALLOWED = re.compile(
    r"html|head|meta|title|style|body|a|header|p|nav|ul|li|main|h[123]|article|strong|d[ltd]|div"
    r"|span|section|table|caption|thead|tbody|tr|th|td|details|summary|figure|figcaption|code|pre"
    r"|mark|br|footer|svg|desc|rect|line|path|text|g|defs|marker"
)


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, the text, and whether all that opens is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements(page([sample_report()]))


def test_the_page_says_what_differs_where_it_starts_and_how_to_see_it_again(elements):
    for words in (
        "MISMATCH",
        "1 of 2 outputs differ",
        "All differences are within [3:32, 0:70].",
        "NaN on the actual side only",
        "loss goes wrong",
        "Error along the program",
        "snaprt replay loss",
        "differs",
    ):
        assert words in elements.text


def test_the_worst_output_comes_first(elements):
    assert elements.text.index("mismatch 1") < elements.text.index("same loss")


def test_the_page_loads_nothing_and_allows_its_own_style_alone():
    text = page([sample_report()])
    elements = Elements(text)
    (policy,) = (a["content"] for _, a in elements.found if "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    for tag, attributes in elements.found:
        assert ALLOWED.fullmatch(tag)
        for attribute, value in attributes.items():
            assert not attribute.startswith("on")
            assert attribute not in ("style", "src", "srcset", "action", "data")
            assert attribute != "href" or str(value).startswith("#")
    assert "</" not in resources.files("snaprt_replay.report").joinpath("page.css").read_text()


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:12]))
def test_a_hostile_name_is_shown_as_text_and_adds_no_element(name, elements):
    text = page([sample_report(name)])
    found = Elements(text)
    assert not found.open
    # A name may change how many rectangles are drawn side by side, never what kinds there are.
    assert Counter(tag for tag, _ in found.found) == Counter(tag for tag, _ in elements.found)
    assert [sorted(a) for _, a in found.found] == [sorted(a) for _, a in elements.found]
    assert "1337" not in text
    invisible = re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2066-\u2069\ufeff]", text
    )
    assert invisible is None
    assert len(text.encode()) < 400_000


def test_every_drawing_is_well_formed_and_named_for_who_cannot_see_it():
    text = page([sample_report("a & b < c")])
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) >= 5
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        hidden = root.get("aria-hidden") == "true"
        assert hidden or (root.get("role") == "img" and root.get("aria-labelledby"))


def test_headings_ids_and_tables_are_as_a_screen_reader_needs_them():
    reports = [sample_report(), sample_report("second")]
    for shown in (reports, reports[:1]):
        elements = Elements(page(shown))
        tags = [tag for tag, _ in elements.found]
        ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert tags.count("h1") == 1
        assert tags.count("main") == 1
        levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
        assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
        assert tags.count("caption") == tags.count("table")
        for _, attributes in elements.found:
            for reference in str(attributes.get("aria-labelledby") or "").split():
                assert reference in ids
            target = str(attributes.get("href") or "#")
            assert target == "#" or target[1:] in ids
        assert all(a.get("scope") in ("col", "row") for tag, a in elements.found if tag == "th")


def test_of_very_many_files_the_page_shows_those_alone_that_are_worth_a_look():
    fine = Report("fine.snap", Headline("ok", "MATCH", "identical"))
    elements = Elements(page([*[fine] * 60, sample_report()]))
    assert [tag for tag, _ in elements.found].count("article") == 1
    assert elements.text.count("fine.snap") == 60


def test_writing_a_page_does_not_import_jax():
    code = (
        "import sys; from snaprt_replay.report import page, saved, text;"
        "assert not {'jax', 'jaxlib', 'click', 'rich'} & set(sys.modules)\n"
        "import snaprt.cli.replay.report; assert 'jax' not in sys.modules"
    )
    run_program(code)


def test_instructions_that_do_not_fit_beside_each_other_take_several_rows() -> None:
    nodes = [GraphNode("first", "dot", "f32[4]", "", 0)]
    nodes += [GraphNode(f"reader{number}", "add", "f32[4]", "", 1) for number in range(7)]
    around = Neighborhood(tuple(nodes), tuple((0, number) for number in range(1, 8)))
    for most, rows in ((charts.WIDE, [1, 5, 2]), (charts.NARROW, [1, 2, 2, 2, 1])):
        tops = re.findall(r'<rect [^>]*?y="([0-9.]+)"', charts.neighborhood("id", around, most))
        assert sorted(Counter(map(float, tops)).items()) == [
            (10.0 + 84 * row, count) for row, count in enumerate(rows)
        ]
