#!/usr/bin/env python3
"""Writes one translation unit for each kernel instantiation of the chosen set, and the registry over them.

kernels.json is the only list: what is built, what is supported, and which set would build what is missing.
"""

import argparse
import json
import pathlib

CPP_TYPES = {"bf16": "nv_bfloat16", "fp16": "half", "e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}
DTYPES = {"bf16": "kBFloat16", "fp16": "kFloat16", "e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}


def camel(name):
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def instances(manifest, set_name):
    """(family, q, kv, head_dim_qk, head_dim_vo, variant) of a set, in manifest order, each once."""
    found = {}
    for rule in manifest["sets"][set_name]:
        variants = rule.get("variants", manifest["variants"][rule["family"]])
        for q in rule["q"]:
            for kv in rule["kv"]:
                for qk, vo in rule["head_dims"]:
                    for variant in variants:
                        found[(rule["family"], q, q if kv == "same" else kv, qk, vo, variant)] = None
    return list(found)


def name_of(instance):
    family, q, kv, qk, vo, variant = instance
    return "_".join(str(part) for part in (family, q, kv, qk, vo, variant) if part != "")


def unit(instance):
    family, q, kv, qk, vo, variant = instance
    if family == "tile":
        header, row = "cuda/fa2/tile.cuh", "TileKernel"
        call = f"tile_kernels<{CPP_TYPES[q]}, {CPP_TYPES[kv]}, {qk}, {vo}, TileVariant::{camel(variant)}>()"
    elif family == "hopper":
        header, row = "cuda/fa3/hopper.cuh", "HopperKernel"
        call = f"hopper_kernels<{CPP_TYPES[q]}, {qk}, {vo}, HopperVariant::{camel(variant)}>()"
    elif family == "prefill":
        header, row = "cuda/prefill/prefill.cuh", "PrefillKernel"
        call = f"prefill_kernels<{CPP_TYPES[q]}, {qk}, PrefillVariant::{camel(variant)}>()"
    elif family == "stream":
        header, row = "cuda/stream/stream.cuh", "StreamKernel"
        call = f"stream_kernels<{CPP_TYPES[q]}, {CPP_TYPES[kv]}, {qk}>()"
    else:
        header, row = "cuda/decode/core.cuh", "CoreKernel"
        call = f"core_kernels<{CPP_TYPES[q]}, {CPP_TYPES[kv]}, {qk}>()"
    return (
        f"// Generated from kernels.json.\n#include \"{header}\"\n\nnamespace fiw::cuda {{\n\n"
        f"std::span<const {row}> {name_of(instance)}() {{ return {call}; }}\n\n}}  // namespace fiw::cuda\n"
    )


def registry(built, full):
    tiles = [i for i in built if i[0] == "tile"]
    cores = [i for i in built if i[0] == "core"]
    hoppers = [i for i in built if i[0] == "hopper"]
    prefills = [i for i in built if i[0] == "prefill"]
    streams = [i for i in built if i[0] == "stream"]
    lines = ["// Generated from kernels.json.", "#include <array>", "", '#include "cuda/registry.h"', "",
             "namespace fiw::cuda {", ""]
    lines += [f"std::span<const TileKernel> {name_of(i)}();" for i in tiles]
    lines += [f"std::span<const CoreKernel> {name_of(i)}();" for i in cores]
    lines += [f"std::span<const HopperKernel> {name_of(i)}();" for i in hoppers]
    lines += [f"std::span<const PrefillKernel> {name_of(i)}();" for i in prefills]
    lines += [f"std::span<const StreamKernel> {name_of(i)}();" for i in streams]
    lines += ["", "std::span<const TileEntry> tile_entries() noexcept {",
              f"  static constexpr std::array<TileEntry, {len(tiles)}> entries = {{{{"]
    lines += [f"      {{DType::{DTYPES[i[1]]}, DType::{DTYPES[i[2]]}, {i[3]}, {i[4]}, TileVariant::{camel(i[5])}, "
              f"&{name_of(i)}}}," for i in tiles]
    lines += ["  }};", "  return entries;", "}", "", "std::span<const CoreEntry> core_entries() noexcept {",
              f"  static constexpr std::array<CoreEntry, {len(cores)}> entries = {{{{"]
    lines += [f"      {{DType::{DTYPES[i[1]]}, DType::{DTYPES[i[2]]}, {i[3]}, &{name_of(i)}}}," for i in cores]
    lines += ["  }};", "  return entries;", "}", "", "std::span<const HopperEntry> hopper_entries() noexcept {",
              f"  static constexpr std::array<HopperEntry, {len(hoppers)}> entries = {{{{"]
    lines += [f"      {{DType::{DTYPES[i[1]]}, {i[3]}, {i[4]}, &{name_of(i)}}}," for i in hoppers]
    lines += ["  }};", "  return entries;", "}", "", "std::span<const PrefillEntry> prefill_entries() noexcept {",
              f"  static constexpr std::array<PrefillEntry, {len(prefills)}> entries = {{{{"]
    lines += [f"      {{DType::{DTYPES[i[1]]}, {i[3]}, &{name_of(i)}}}," for i in prefills]
    lines += ["  }};", "  return entries;", "}", "", "std::span<const StreamEntry> stream_entries() noexcept {",
              f"  static constexpr std::array<StreamEntry, {len(streams)}> entries = {{{{"]
    lines += [f"      {{DType::{DTYPES[i[1]]}, DType::{DTYPES[i[2]]}, {i[3]}, &{name_of(i)}}}," for i in streams]
    lines += ["  }};", "  return entries;", "}", "", "std::span<const Combination> full_combinations() noexcept {"]
    combinations = list(dict.fromkeys(i[1:5] for i in full if i[0] == "tile"))
    lines += [f"  static constexpr std::array<Combination, {len(combinations)}> combinations = {{{{"]
    lines += [f"      {{DType::{DTYPES[q]}, DType::{DTYPES[kv]}, {qk}, {vo}}}," for q, kv, qk, vo in combinations]
    lines += ["  }};", "  return combinations;", "}", "", "}  // namespace fiw::cuda", ""]
    return "\n".join(lines)


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=pathlib.Path)
    parser.add_argument("set")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--no-hopper", action="store_true", help="leave out what only sm_90a can run")
    args = parser.parse_args()

    manifest = json.loads(args.manifest.read_text())
    if args.set not in manifest["sets"]:
        parser.error(f"the kernel set is {args.set!r}, expected one of {', '.join(manifest['sets'])}")
    built = [i for i in instances(manifest, args.set) if not (args.no_hopper and i[0] in ("hopper", "prefill"))]
    args.out.mkdir(parents=True, exist_ok=True)
    units = []
    for instance in built:
        path = args.out / f"{name_of(instance)}.cu"
        write(path, unit(instance))
        units.append(path)
    for stale in set(args.out.glob("*.cu")) - set(units):
        stale.unlink()
    write(args.out / "registry.cc", registry(built, instances(manifest, "full")))
    print(";".join(str(path) for path in units))


if __name__ == "__main__":
    main()
