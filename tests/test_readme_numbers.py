"""The numbers in the README's table are those of the record that it names."""

import json
import re

from chapters import ROOT

from minivllm.course.performance_results import OTHERS, rate_of

RECORD = json.loads((ROOT / "figures" / "data" / "throughput_h200.json").read_text(encoding="utf-8"))
ROWS = {  # of the README's table: the load in the record, and as the others' figures name it
    "256 requests, mixed lengths, temperature 0.6": "yardstick",
    "one request, greedy": "decode, batch 1",
    "decode steps, 256 requests, context 144": "decode, batch 256, context 144",
    "decode steps, 256 requests, context 1,152": "decode, batch 256, context 1,152",
}


def test_the_measured_table_is_the_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:] for cells in re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.M)
    }
    others = [figures for engine, figures in OTHERS.items() if "eager" not in engine]
    for name, load in ROWS.items():
        figures = [rate_of(RECORD, load), *(other.get(load) for other in others)]
        assert rows[name] == tuple("–" if rate is None else f"{rate:,.0f}" for rate in figures)
    assert set(ROWS) <= set(rows) and RECORD["about"]["date"] in text
