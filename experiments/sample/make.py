"""Cut the sample of lastlayer/data/sample from an index of the Debian archive.

python experiments/sample/make.py debian_bookworm.jsonl.xz debian.jsonl.xz

The input has one JSON object a package: name, source, short, long, tags (from `Packages` and `Translation-en`).
"""

import argparse
import collections
import hashlib
import json
import lzma
from pathlib import Path


def number(key: str) -> int:
    return int(hashlib.md5(key.encode()).hexdigest(), 16)


def part(source: str) -> str:
    if number(source) % 5 == 0:
        return "test"
    return "valid" if number("valid:" + source) % 10 == 0 else "train"


def choose(packages: list[dict], rows: int) -> list[dict]:
    sources = collections.defaultdict(list)
    for package in packages:
        if package["tags"]:
            sources[package["source"]].append(package)
    chosen: list[dict] = []
    for source in sorted(sources, key=lambda s: number("sample:" + s)):
        best = sorted(sources[source], key=lambda d: (-len(d["tags"]), number(d["name"])))[:2]
        chosen += [package for package in best if len(package["tags"]) >= 3]
        if len(chosen) >= rows:
            break
    return sorted(chosen, key=lambda d: d["name"])


def shorten(text: str, most: int = 300) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--support", type=int, default=10, help="training rows that a tag must have")
    arguments = parser.parse_args()
    with lzma.open(arguments.index, "rt", encoding="utf8") as file:
        chosen = choose([json.loads(line) for line in file], arguments.rows)
    counts = collections.Counter(t for d in chosen if part(d["source"]) == "train" for t in d["tags"])
    kept = {tag for tag, n in counts.items() if n >= arguments.support and not tag.endswith("TODO")}
    lines = []
    for package in chosen:
        row = {
            "id": package["name"],
            "text": f"{package['name']}: {package['short']}. {shorten(package['long'])}",
            "labels": [tag for tag in package["tags"] if tag in kept],
            "split": part(package["source"]),
            "group": package["source"],
        }
        if row["labels"]:
            lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    arguments.out.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(lines)} rows, {len(kept)} tags, {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
