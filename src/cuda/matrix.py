#!/usr/bin/env python3
"""Checks that a document's table of kernels is what kernels.json says, or writes it there.

The table stands between the lines BEGIN and END, once in the document.
"""

import argparse
import json
import pathlib
import sys

BEGIN = "<!-- kernels of src/cuda/kernels.json -->"
END = "<!-- end of kernels -->"
FAMILIES = {"tile": "tensor-core tiles", "core": "CUDA cores, decode", "stream": "our decode and verify", "hopper": "FA3 (sm_90a)",
            "prefill": "our prefill (sm_90a)"}
TYPES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "fp8 e4m3", "e5m2": "fp8 e5m2", "same": "as the queries"}


def cell(names: list[str]) -> str:
    return ", ".join(names)


def head_dims(pairs: list[list[int]]) -> str:
    return cell([str(qk) if qk == vo else f"{qk}/{vo}" for qk, vo in pairs])


def matrix(manifest: dict) -> str:
    """One row for each rule of each kernel set."""
    lines = ["| kernel set | kernels | queries | KV | head_dim (K/V where they differ) |", "|---|---|---|---|---|"]
    for set_name, rules in manifest["sets"].items():
        for rule in rules:
            kernels = FAMILIES.get(rule["family"], rule["family"])
            queries = cell([TYPES[q] for q in rule["q"]])
            kv = cell([TYPES[kv] for kv in rule["kv"]])
            lines.append(f"| {set_name} | {kernels} | {queries} | {kv} | {head_dims(rule['head_dims'])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=pathlib.Path)
    parser.add_argument("document", type=pathlib.Path)
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    args = parser.parse_args()

    text = args.document.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        print(f"{args.document} does not hold the line '{BEGIN}' and then '{END}', once each", file=sys.stderr)
        return 1
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n\n{matrix(json.loads(args.manifest.read_text()))}\n\n{END}{after}"
    if args.write:
        args.document.write_text(wanted)
    elif text != wanted:
        print(f"{args.document}: its table of kernels is not what {args.manifest} says; --write makes it so",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
