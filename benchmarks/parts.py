"""Training over shaped links with urgent pushes and late pulls in chunks, and in one piece.

Run `python -m benchmarks.parts` as root.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.record import markdown, record
from benchmarks.training import Found, measure_shaped, spent, step_ms
from benchmarks.workload import Case

RATES = (1000.0, 250.0, 100.0)  # Mbit/s
POLICY = "dispatch=esd sync={}"
SYNCS = {"one": "on-demand", "several": "pipelined"}
CASE = Case("embroute", cache=0.1, workers=4, batch=256, steps=60, warmup=20, hidden=(16,))
NOTE = (
    "DLRM over 26 tables, dim 32, MLPs (16), 4 workers x 256, each behind its own link; shard and "
    "coordinator on a host at 10 Gbit/s; all of them on two cores. The same plans with "
    "`sync=on-demand` and `sync=pipelined`: urgent pushes and late pulls in one part, and in up to "
    "eight. Medians over steps, in turns."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for mbit in RATES:
        found: dict[str, list[Found]] = {name: [] for name in SYNCS}
        for _ in range(given.rounds):
            for name, sync in SYNCS.items():
                case = replace(CASE, policy=POLICY.format(sync), mbit=mbit)
                found[name].append(measure_shaped(case, f"{mbit:g}mbit"))
                print(mbit, name, f"{step_ms(found[name]):.1f} ms", flush=True)
        base = step_ms(found["one"])
        for name, runs in found.items():
            moved = np.median([float(str(run[-1]["rows"])) for run in runs])
            cells = [
                f"{step_ms(runs):.1f}",
                f"{step_ms(runs) / base:.2f}",
                spent(runs, 2, "urgent"),
            ]
            rows.append([f"{mbit:g}", name, *cells, f"{moved:,.0f}"])
    headings = ["Mbit/s", "parts", "ms/step", "over one part", "worker urgent ms", "rows moved"]
    record("parts", "Pushes and pulls beside each other", f"{NOTE}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
