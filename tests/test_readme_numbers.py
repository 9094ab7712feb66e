"""The numbers in the README's table are those of the record that it names."""

import json
import re

from chapters import ROOT

RECORD = json.loads((ROOT / "figures" / "data" / "throughput_h200.json").read_text(encoding="utf-8"))


def test_the_measured_table_is_the_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ours = re.findall(r"^\| (?:256|one|decode).*? \| ([\d,]+) \| [\d,]+ \|$", text, re.MULTILINE)
    best = RECORD["best"]
    runs = ["batch 1, prompt 128, output 512, greedy", "batch 256, context 144", "batch 256, context 1152"]
    measured = [RECORD["yardstick"]["tok_s"], *(best[name]["tok_s"] for name in runs)]
    assert ours == [f"{rate:,.0f}" for rate in measured]
