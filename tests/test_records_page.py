"""Pictures, the page and exports: what others see of the records."""

import csv
import html
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
from records_helpers import (
    NEW,
    OLD,
    STEPS,
    add_logs,
    add_record,
    build_log,
    good_logs,
    table_row,
    tool,
)

from records.evidence import tracks
from records.folders import open_records
from records.logs import read_log
from records.plot import line_styles, plot_track

# ---- plot ------------------------------------------------------------------------------------------------------------


def test_plot_draws_every_record_with_its_spread_and_the_target(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    add_record(tmp_path, "1_A", good_logs((3.27, 3.28)))
    add_record(tmp_path, "2_B", good_logs((3.29, 3.27), milliseconds=100000))
    (entries,) = tracks(open_records([tmp_path], tmp_path), None).values()
    figure, axes = pyplot.subplots(1, 2)
    plot_track(axes, entries)
    for axis, ends in zip(axes, [(204.3465, 100.0015), (1390, 1390)], strict=True):
        a, a_training, b, b_training, target = axis.lines
        at, losses = a_training.get_xdata(), a_training.get_ydata()
        assert len(at) == 4 and at[-1] == pytest.approx(ends[0])
        assert losses[-1] == pytest.approx(3.275 + 0.02)  # of two runs, as build_log writes them
        assert a_training.get_color() == a.get_color() != b_training.get_color()
        assert [line.get_xdata()[-1] for line in (a, b)] == pytest.approx(ends)
        assert [line.get_ydata()[-1] for line in (a, b)] == pytest.approx([3.275, 3.28])
        assert set(target.get_ydata()) == {3.28}
        band = axis.collections[1].get_paths()[0].vertices
        edges = [y for x, y in band if x == pytest.approx(ends[1])]
        assert (min(edges), max(edges)) == pytest.approx((3.28 - 0.02 / math.sqrt(2), 3.28 + 0.02 / math.sqrt(2)))
        low, high = axis.get_ylim()
        assert low < 3.27 and 3.28 < high < 10
    pyplot.close(figure)


def test_plot_writes_a_picture_with_one_row_a_track(tmp_path):
    add_record(tmp_path, "1_A", good_logs())
    one = tool("plot", "A", "-o", tmp_path / "one.png", "--records", tmp_path)
    assert "1 track" in one.out
    lone = tmp_path / "laptop.txt"
    lone.write_text(build_log(1.03, target=1.04))
    assert "2 tracks" in tool("plot", "A", lone, "-o", tmp_path / "two.png", "--records", tmp_path).out
    heights = []
    for name in ("one.png", "two.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        heights.append(int.from_bytes(content[20:24], "big"))
    assert heights[1] == 2 * heights[0]
    assert "bad.xyz" in tool("plot", "A", "-o", tmp_path / "bad.xyz", "--records", tmp_path, code=2).err


def test_names_are_drawn_as_they_are(tmp_path):
    for name in ("1_A$x$", "2_$", "3_{\\bad$"):
        add_record(tmp_path, name, good_logs())
    add_record(tmp_path, "_hidden/4_B", good_logs())
    tool("plot", "-o", tmp_path / "all.png", "--records", tmp_path)
    figure, axes = pyplot_figure()
    (entries,) = tracks(open_records([tmp_path], tmp_path), None).values()
    plot_track(axes, entries)
    drawn = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert len(drawn) == 5 and any(r"1_A\$x\$ (5 runs)" in text for text in drawn)
    figure.canvas.draw()


def pyplot_figure():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, 2, figsize=(20, 5), layout="constrained")


def test_the_legend_covers_no_curve_and_no_colour_comes_twice(tmp_path):
    for number in range(30):
        add_record(tmp_path, f"{number:02}_Record", good_logs((3.27, 3.271), milliseconds=100000 + 1000 * number))
    figure, axes = pyplot_figure()
    (entries,) = tracks(open_records([tmp_path], tmp_path), None).values()
    plot_track(axes, entries)
    figure.canvas.draw()
    legend, plots = axes[1].get_legend().get_window_extent(), [axis.get_window_extent() for axis in axes]
    assert not any(legend.overlaps(plot) for plot in plots)
    assert legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
    for count in (5, 10, 11, 80):
        assert len({str(style["color"]) for style in line_styles(count)}) == count


def test_plot_without_names_draws_all_records_and_calls_lone_logs_by_their_seeds(tmp_path):
    add_record(tmp_path, "1_A", good_logs())
    done = tool("plot", "--records", tmp_path, cwd=tmp_path)
    assert done.out == "curves.png: 1 track, 1 record\n" and (tmp_path / "curves.png").exists()
    log = tmp_path / "1_A/0b8a5636-5fb3-4a7f-957a-fb69f74a9e31.txt"
    log.write_text(build_log(seed=77))
    assert re.search(r"^1_A/0b8a5636 seed 77 ", tool("list", log).out, re.MULTILINE)


OUTPUTS = [["plot", "-o", "{}.png"], ["page", "-o", "{}.html"], ["page", "-o", "{}.py"], ["page", "-o", "{}.txt"],
           ["export", "A", "--csv", "{}.csv"]]  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
def test_nobodys_work_is_overwritten(command, tmp_path):
    add_record(tmp_path, "1_A", good_logs())
    command = [word.format(tmp_path / "out") for word in command]
    (output,) = (word for word in command if word.startswith(str(tmp_path)))
    with open(output, "w") as file:
        file.write("my work of today\n")
    assert "is there already" in tool(*command, "--records", tmp_path, code=2).err
    with open(output) as file:
        assert file.read() == "my work of today\n"
    os.remove(output)
    for _ in range(2):  # what the tool itself wrote may be written again
        tool(*command, "--records", tmp_path)


# ---- page ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_records(tmp_path):
    home = tmp_path / "records"
    add_record(home, "2024-01-01_First", good_logs(source=OLD), script=OLD)
    add_record(home, "2024-02-01_Second", good_logs((3.2741, 3.2749), source=NEW, milliseconds=150000), script=NEW)
    evil = NEW + "# </script><script>alert(1)</script> <b>&amp;\n"
    hardware = "<img src=x onerror=alert(2)>"
    logs = good_logs((1.0351, 1.0339, 1.0342), source=evil, target=1.04, hardware=hardware)
    add_record(home, "2024-03-01_<i>Evil", logs, script=evil)
    return home


def test_the_page_has_the_table_the_curves_and_the_diffs_and_needs_no_network(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    text = (tmp_path / "records.html").read_text()
    listed = tool("list", "--records", three_records).out
    for name in ("2024-01-01_First", "2024-02-01_Second"):
        for cell in table_row(listed, name):
            assert f"{html.escape(cell)}</" in re.sub(r"</?span>(?!</label>)", "", text)
    assert text.count("<svg ") == 4  # two tracks, each over time and over steps
    assert text.count("<details ") == 2 and "2024-01-01_First → 2024-02-01_Second" in text
    assert "<em>30</em>" in text and "<em>15</em>" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:|#diff-|\./)|https?:|url\((?!#)|@import", text)


def test_nothing_from_logs_or_scripts_becomes_markup(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    text = (tmp_path / "records.html").read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<i>Evil" not in text and "&lt;i&gt;Evil" in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt; &lt;b&gt;&amp;amp;" in text
    names = [[line["name"] for line in track["lines"]] for track in page_curves(text)]
    assert names == [["2024-01-01_First", "2024-02-01_Second"], ["2024-03-01_<i>Evil"]]


def page_curves(text):
    return json.loads(re.search(r'<script type="application/json" id="curves">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_says_so_when_there_are_no_records_and_survives_nan(tmp_path):
    tool("page", "-o", tmp_path / "none.html", "--records", tmp_path)
    assert "No records yet" in (tmp_path / "none.html").read_text()
    logs = [log.replace("val_loss:3.2751", "val_loss:nan") for log in good_logs()]
    add_record(tmp_path / "records", "1_Diverged", [*logs, STEPS.replace("0ms step_avg", "nanms step_avg")])
    add_record(tmp_path / "records", "2_OnlyNan", [re.sub(r"(val_loss:)\S+", r"\1nan", STEPS)])
    tool("page", "-o", tmp_path / "nan.html", "--records", tmp_path / "records")
    assert "1_Diverged" in (tmp_path / "nan.html").read_text()


def test_rows_link_to_their_diff_and_their_logs(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    text = (tmp_path / "records.html").read_text()
    row = re.search(r"<tr><td[^>]*><label>(?:(?!</tr>).)*Second.*?</tr>", text)[0]
    (diff,) = re.findall(r"href='#(diff-\d+)'", row)
    assert re.search(rf"<details id='{diff}'><summary><b>2024-01-01_First → 2024-02-01_Second</b>", text)
    links = re.findall(r"href='\./([^']+)'", row)
    assert [tmp_path / link for link in links] == sorted((three_records / "2024-02-01_Second").glob("*.txt"))
    evil = re.search(r"href='\./(records/2024-03[^']+)'", text)[1]
    assert "<" not in evil and "%3Ci%3E" in evil


def test_the_page_shows_diffs_of_records_that_have_only_logs(tmp_path):
    add_record(tmp_path, "1_A/this_pr", good_logs(source=OLD), script=None)
    add_record(tmp_path, "2_B/this_pr", good_logs(source=NEW), script=None)
    done = tool("page", "-o", tmp_path / "x.html", "--records", tmp_path)
    assert "1 diff" in done.out and "<em>30</em>" in (tmp_path / "x.html").read_text()


# ---- The page in a real browser --------------------------------------------------------------------------------------


CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
PROBE = """<script>
const found = {errors: [], tips: []};
addEventListener("error", event => found.errors.push(event.message));
addEventListener("load", () => {
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    const at = {clientX: box.left + box.width * 0.97, clientY: box.top + 250};
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    const tip = svg.parentNode.querySelector(".tip"), place = tip.getBoundingClientRect();
    const inside = place.left >= 0 && place.right <= innerWidth && place.width > 50 && place.height < box.height;
    found.tips.push({text: tip.innerText, inside, dots: svg.querySelectorAll("circle").length});
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    if (!tip.hidden) found.errors.push("the tip stays");
  }
  const track = document.querySelector("section[data-track]"), figures = [...track.querySelectorAll("figure")];
  const drawn = figure => [...figure.querySelectorAll("polyline")].map(line => line.getAttribute("points"));
  const curves = () => figures.map(drawn);
  const labels = () => figures.map(figure => [...figure.querySelectorAll("text.x")].map(label => label.textContent));
  const names = () => [...track.querySelectorAll("tbody tr")].map(row => row.cells[0].innerText.trim());
  const change = (selector, event, set) => {
    const control = track.querySelector(selector);
    set(control);
    control.dispatchEvent(new Event(event));
  };
  found.curves = curves();
  found.overlaps = overlaps(track);
  change("[data-log=x]", "change", box => box.checked = true);
  found.logged = curves(); found.logLabels = labels();
  found.overlaps.push(...overlaps(track));
  change("[data-log=x]", "change", box => box.checked = false);
  change("[data-log=y]", "change", box => box.checked = true);
  found.loggedY = curves();
  change("[data-log=y]", "change", box => box.checked = false);
  change("[data-smooth]", "input", slider => slider.value = 0.9);
  found.smoothed = curves();
  change("[data-smooth]", "input", slider => slider.value = 0);
  found.back = curves();
  track.querySelector("[data-show=none]").click();
  found.hidden = curves();
  track.querySelector("[data-show=all]").click();
  found.sorted = {none: names()};
  for (const column of [3, 4]) {
    track.querySelectorAll("th button")[column].click();
    found.sorted[column] = names();
    track.querySelectorAll("th button")[column].click();
    found.sorted[-column] = names();
  }
  track.querySelector("th button").click();
  const link = document.querySelector("a[href^='#diff']");
  if (link) link.click();
  setTimeout(() => {
    const details = link && document.querySelector(link.getAttribute("href"));
    found.opened = Boolean(details && details.open);
    for (const details of document.querySelectorAll("details")) details.open = true;
    found.added = [...document.querySelectorAll(".add td:last-child")].map(cell => cell.textContent).slice(0, 200);
    found.color = details && getComputedStyle(document.querySelector(".diff .add td")).backgroundColor;
    found.requests = performance.getEntriesByType("resource").length;
    found.wide = document.documentElement.scrollWidth > innerWidth;
    document.body.dataset.found = JSON.stringify(found);
  }, 100);
});

// Pairs of labels and controls that lie on each other.
function overlaps(track) {
  const boxes = [...track.querySelectorAll("svg text, .controls > *, th button, figcaption, h2, .note")].map(element =>
    [element.tagName + " " + element.textContent.trim().slice(0, 30), element.getBoundingClientRect(), element]);
  const pairs = [];
  boxes.forEach(([name, a, one], i) => boxes.slice(i + 1).forEach(([other, b, two]) => {
    if (one.className.baseVal === "target" || two.className.baseVal === "target") return;
    if (one.closest("table") || two.closest("table")) {
      if (!(one.closest("table") && two.closest("table"))) return;  // the table scrolls in a window of its own
    }
    const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    if (!apart) pairs.push([name, other]);
  }));
  return pairs;
}
</script>"""


def browse(page, folder, width, *more):
    """Open a page with the probe in it; what the probe found."""
    (folder / "probed.html").write_text(page.read_text().replace("<title>", PROBE + "<title>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--window-size={width},900",
             "--hide-scrollbars", f"--user-data-dir={folder / f'profile{width}'}", "--virtual-time-budget=5000",
             *more, "--dump-dom"]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, f"file://{folder / 'probed.html'}"], capture_output=True, timeout=120)
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout.decode())[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_in_a_real_browser_curves_answer_the_pointer_and_diffs_open(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    found = browse(tmp_path / "records.html", tmp_path, 1200)
    assert found["errors"] == [] and found["requests"] == 0 and not found["wide"]
    time_tip, step_tip, evil_tip, _ = found["tips"]
    for tip in (time_tip, step_tip):
        assert tip["inside"] and tip["dots"] == 2
        assert "2024-01-01_First: 3.2758 ± 0.0009 at step 1390, 204.35 s" in tip["text"]
        assert "2024-02-01_Second: 3.2745 ± 0.0006 at step 1390, 150.00 s" in tip["text"]
    assert "2024-03-01_<i>Evil: 1.0344" in evil_tip["text"]
    assert "    softcap = 15" in found["added"] and "# </script><script>alert(1)</script> <b>&amp;" in found["added"]
    assert found["color"] == "rgb(226, 244, 228)" and found["opened"]
    assert found["sorted"]["3"] == found["sorted"]["4"] == ["2024-02-01_Second", "2024-01-01_First"]
    assert found["sorted"]["-4"] == ["2024-01-01_First", "2024-02-01_Second"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
@pytest.mark.parametrize("width", [1280, 400])
def test_eighty_records_are_usable_at_any_width(width, tmp_path):
    home = tmp_path / "records"
    for number in range(80):
        logs = good_logs((3.27 + number / 10000, 3.271), milliseconds=204345 - 1000 * number, source=f"x = {number}\n")
        add_record(home, f"2025-{1 + number // 28:02}-{1 + number % 28:02}_SomeRecordWithALongName{number}", logs, None)
    tool("page", "-o", tmp_path / "records.html", "--records", home)
    found = browse(tmp_path / "records.html", tmp_path, width)
    assert found["errors"] == [] and not found["wide"] and found["overlaps"] == []
    assert all(tip["inside"] and 1 <= tip["dots"] <= 6 and "the nearest of 80" in tip["text"] for tip in found["tips"])
    assert found["back"] == found["curves"] and found["hidden"] == [[], []]
    assert [len(lines) for lines in found["curves"]] == [160, 160]  # validation and training
    assert found["logged"] != found["curves"] != found["loggedY"] and "1000" in found["logLabels"][1]
    changed = [a != b for a, b in zip(found["smoothed"][0], found["curves"][0], strict=True)]
    assert changed == [True, False] * 80  # only the training loss is smoothed
    by_time = [int(re.search(r"\d+$", name)[0]) for name in found["sorted"]["4"]]
    assert by_time == list(range(79, -1, -1))
    by_loss = [int(re.search(r"\d+$", name)[0]) for name in found["sorted"]["3"]]
    assert by_loss == list(range(80))


# ---- export ----------------------------------------------------------------------------------------------------------


def two_trials():
    second = STEPS.replace("3.2785", "3.2801").replace("204345", "204999")
    return (STEPS + second).replace(" train_time", " train_loss:3.3000 train_time")


def test_export_to_csv_has_every_step_of_every_run(tmp_path):
    folder = add_record(tmp_path, "1_A", good_logs()[:2])
    (path,) = add_logs(tmp_path, [two_trials().replace("val_loss", "val_loss")])
    tool("export", folder, path, "--csv", tmp_path / "steps.csv")
    with open(tmp_path / "steps.csv") as file:
        rows = list(csv.DictReader(file))
    runs = {row["run"] for row in rows}
    assert len(runs) == 4 and sum(run.startswith("0000/") for run in runs) == 2
    for number, loss in ((0, 3.2751), (1, 3.2763)):
        mine = [row for row in rows if row["run"].endswith(f"1_A/{number:04}")]
        assert [int(row["step"]) for row in mine] == [0, 347, 695, 1042, 1390] and mine[0]["train_loss"] == ""
        last = mine[-1]
        assert (float(last["val_loss"]), float(last["train_loss"])) == (loss, pytest.approx(loss + 0.02))
        assert last["seed"] == str(number + 1) and float(last["seconds"]) == 204.346 + number / 1000


def events(path):
    """The records of an event file by its public format: length, checksum, protocol buffer, checksum."""
    from tensorboard.compat.proto.event_pb2 import Event

    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_export_to_tensorboard_writes_what_the_log_says(tmp_path):
    pytest.importorskip("tensorboard", reason="only --tensorboard needs it")
    (path,) = add_logs(tmp_path, [build_log()])
    done = tool("export", path, "--tensorboard", tmp_path / "board")
    assert "tensorboard --logdir" in done.out
    (file,) = (tmp_path / "board").rglob("*tfevents*")
    told = [(event.step, value.tag, value.simple_value) for event in events(file) for value in event.summary.value]
    validations = [
        (v.step, "loss/validation", pytest.approx(v.loss, rel=1e-6)) for v in read_log(path).runs[0].validations
    ]
    assert [entry for entry in told if entry[1] == "loss/validation"] == validations
    assert sum(tag == "loss/train" for _, tag, _ in told) == 4
    assert "is there already" in tool("export", path, "--tensorboard", tmp_path / "board", code=2).err


def test_export_says_when_tensorboard_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    (path,) = add_logs(tmp_path, [build_log()])
    assert "pip install tensorboard" in tool("export", path, "--tensorboard", tmp_path / "board", code=2).err
    assert not (tmp_path / "board").exists()
