"""The report: one page that needs nothing but itself, with what failed shown as failed."""

import base64
import json
import os
import re
from html.parser import HTMLParser

import pytest

from interp.case_studies.record import open_run
from interp.case_studies.report import read_claims, summarize, write_report
from interp.case_studies.run import run
from interp.case_studies.study import StudyError


class Page(HTMLParser):
    """Everything of a page that these tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.rows, self._open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "br", "rect", "line", "circle", "path"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.words.append(data)
        if any(tag in self._open for tag in ("td", "th")) and "title" not in self._open:
            self.rows[-1][-1] += data


@pytest.fixture
def finished(toy, tmp_path):
    return run(toy, out=tmp_path / "run", workers=1).run


def page_of(run):
    return Page((run.folder / "report.html").read_text())


def break_the_claim(toy, **changes):
    text = (toy / "claims.py").read_text()
    for old, new in {"Interval(0.3, 0.7)": "Interval(0.8, 0.9)", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    (toy / "claims.py").write_text(text)


def test_the_page_fetches_nothing_and_is_well_formed(finished):
    page = page_of(finished)
    assert page._open == []
    for tag, attributes in page.tags:
        assert tag != "script"
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#")), attributes
    assert "url(" not in (finished.folder / "report.html").read_text()


def test_the_page_puts_our_value_beside_the_papers_with_interval_and_verdict(finished):
    header, half, size = page_of(finished).rows
    assert header == ["Claim", "Verdict", "Paper", "Ours", "Expected"]
    assert half[0] == "Draws average one halfNobody, table 1"
    assert half[1:3] == ["reproduced", "0.5"]
    assert re.match(r"0\.4631 \[0\.\d+, 0\.\d+\]", half[3])
    assert half[4] == "0.3 to 0.7"
    assert size[1] == "not measured at this scale"


def test_pictures_are_embedded_with_alt_text_and_kept_as_files(finished):
    ((_, picture),) = [tag for tag in page_of(finished).tags if tag[0] == "img"]
    assert picture["alt"] == "Dots about 0.5."
    png = base64.b64decode(picture["src"].removeprefix("data:image/png;base64,"))
    assert png.startswith(b"\x89PNG")
    assert (finished.folder / "figures" / "means.png").read_bytes() == png


def test_everything_a_study_says_is_text_and_never_mark_up(finished):
    page = page_of(finished)
    assert "Draws <numbers>." in "".join(page.words)
    assert "numbers" not in [tag for tag, _ in page.tags]


def test_number_lines_say_in_words_what_they_show(finished):
    strips = [a for tag, a in page_of(finished).tags if tag == "svg" and a.get("role") == "img"]
    assert len(strips) == 1
    assert "expected 0.3 to 0.7, paper 0.5" in strips[0]["aria-label"]


def test_provenance_is_folded_away_but_there(finished):
    page = page_of(finished)
    assert [tag for tag, _ in page.tags].count("details") >= 4
    text = " ".join(page.words)
    for said in (finished.record["result_hash"], finished.record["source_hash"], "n_seeds"):
        assert said in text


def test_what_was_changed_of_a_scale_stands_beside_it(toy, tmp_path):
    options = {"seeds": 3, "overrides": {"label": "x"}}
    changed = run(toy, out=tmp_path / "run", workers=1, **options).run
    said = 'quick scale --seeds 3 --set label="x"'
    assert said in " ".join(page_of(changed).words)
    assert said in (changed.folder / "report.md").read_text()


def test_the_markdown_table_has_one_row_a_claim_and_survives_a_pipe(finished):
    lines = (finished.folder / "report.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 2
    assert r"There are eleven \| draws" in rows[3]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows)


def test_a_claim_that_fails_is_failed_in_page_table_and_file(toy, tmp_path):
    break_the_claim(toy)
    finished = run(toy, out=tmp_path / "run", workers=1).run
    assert page_of(finished).rows[1][1] == "not reproduced"
    assert "| not reproduced |" in (finished.folder / "report.md").read_text()
    assert read_claims(finished.folder)[0]["verdict"] == "not reproduced"
    assert "0 of 2 claims reproduced" in (finished.folder / "report.md").read_text()


def test_a_measure_that_raises_is_shown_with_its_reason_and_never_as_reproduced(toy, tmp_path):
    with (toy / "claims.py").open("a") as file:
        file.write("\ndef broken(results): return 1 / 0\n")
    break_the_claim(toy, **{"mean_of_draws, paper": "lambda r: broken(r), paper"})
    finished = run(toy, out=tmp_path / "run", workers=1).run
    row = page_of(finished).rows[1]
    assert row[1] == "not reproduced"
    assert "failed to measure" in row[3]
    assert "ZeroDivisionError: division by zero" in row[3]
    assert "def broken(results): return 1 / 0" in " ".join(page_of(finished).words)


def test_a_figure_that_cannot_be_drawn_is_told_and_takes_nothing_with_it(toy, tmp_path):
    with (toy / "figures.py").open("a") as file:
        file.write("\ndef broken(results): return 1 / 0\n")
        file.write("FIGURES.append(Figure('bad', 'Bad', 'c', 'a', broken))\n")
    outcome = run(toy, out=tmp_path / "run", workers=1)
    assert outcome.figure_errors == {"bad": "ZeroDivisionError: division by zero"}
    assert "could not be drawn" in " ".join(page_of(outcome.run).words)
    assert os.listdir(outcome.run.folder / "figures") == ["means.png"]


def test_a_report_is_drawn_again_from_disk_with_todays_claims(finished, toy, log):
    for name in ("report.html", "report.md", "claims.json"):
        (finished.folder / name).unlink()
    break_the_claim(toy)
    again = open_run(finished.folder)
    assert write_report(again) == {}
    assert read_claims(finished.folder)[0]["verdict"] == "not reproduced"
    assert log() == []


def test_claims_are_strict_json(finished):
    text = (finished.folder / "claims.json").read_text()
    claims = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert [claim["id"] for claim in claims] == ["half", "size"]


def test_claims_that_cannot_be_read_say_how_to_get_them_again(finished):
    (finished.folder / "claims.json").write_text("[")
    with pytest.raises(StudyError, match=r"'interp report .*' judges and draws the run again"):
        read_claims(finished.folder)


def test_a_run_whose_config_the_study_no_longer_knows_is_told_as_such(finished, toy):
    text = (toy / "config.py").read_text()
    (toy / "config.py").write_text(text.replace("label: str", "lable: str"))
    with pytest.raises(ValueError, match="made by another version of the study"):
        open_run(finished.folder)


def test_a_summary_counts_each_verdict():
    assert summarize(["reproduced", "reproduced"]) == "2 of 2 claims reproduced"
    mixed = ["not measured at this scale", "not reproduced", "reproduced", "not reproduced"]
    said = "1 of 4 claims reproduced, 2 not reproduced, 1 not measured at this scale"
    assert summarize(mixed) == said
