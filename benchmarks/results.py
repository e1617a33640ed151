"""Puts results into ``benchmarks/RESULTS.md``: one section a benchmark and kind of GPU, replaced as a whole.

    python -m benchmarks.NAME --json name.json && python -m benchmarks.results name.json

A section holds what the JSON file says and nothing else: command, date, machine, versions and each claim's measured
value. Prose about a result belongs below its section's end mark, where it is kept.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")


def section(result: dict[str, Any]) -> str:
    """The Markdown of one result as ``benchmarks.harness.report`` wrote it, between its marks."""
    machine = result["machine"]
    versions = {"Python": machine["python"], **machine["versions"]}
    command = " ".join(shlex.quote(str(word)) for word in result["command"])
    lines = [
        mark(title(result), "begin"),
        f"## {title(result)}",
        "",
        f"- command: `{portable(command, result['benchmark'])}`",
        f"- finished: {result['finished']}",
        f"- machine: {', '.join([*machine.get('gpus', []), machine['cpu']])}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, load {machine['load_1min']} at the end, {machine['system']}",
        "- versions: " + ", ".join(f"{name} {number}" for name, number in versions.items() if number != "absent"),
        "",
        "| claim | measured | target | met |",
        "|---|---|---|---|",
    ]
    for claim in result["claims"]:
        met = "yes" if claim["met"] else "**no**"
        lines.append(f"| `{claim['name']}` | {claim['value']:.4g} | {claim['target']} | {met} |")
    return "\n".join([*lines, "", mark(title(result), "end")])


def title(result: dict[str, Any]) -> str:
    """The benchmark's name, and on GPUs which and how many."""
    gpus: list[str] = result["machine"].get("gpus", [])
    return result["benchmark"] + (f" on {len(gpus)} {gpus[0]}" if gpus else "")


def portable(command: str, benchmark: str) -> str:
    """The command as anybody would type it: ``python -m`` instead of this machine's paths, no ``--json``."""
    words = shlex.split(command)[2:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", "-m", f"benchmarks.{benchmark}", *words])


def mark(benchmark: str, which: str) -> str:
    return f"<!-- {which} {benchmark} -->"


def put(text: str, result: dict[str, Any]) -> str:
    """``text`` with the section of ``result`` replaced, or added at the end."""
    begin, end = (mark(title(result), which) for which in ("begin", "end"))
    if begin not in text:
        return f"{text.rstrip()}\n\n{section(result)}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + section(result) + after


def main() -> int:
    text = RESULTS.read_text(encoding="utf-8")
    for name in sys.argv[1:]:
        text = put(text, json.loads(Path(name).read_text(encoding="utf-8")))
    RESULTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
