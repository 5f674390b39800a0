#!/bin/sh
# Checks that documents name only paths, links, identifiers and presets that exist, and that the C++ block of a README.md
# is examples/decode_step.cc.
# Usage: check_docs.sh ROOT [DOCUMENT...]   without documents: README.md, CONTRIBUTING.md and docs/*.md of ROOT
set -eu
root=$1
shift
cd "$root"
[ $# -gt 0 ] || set -- README.md CONTRIBUTING.md docs/*.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
complain() {
  echo "$1"
  status=1
}

cat CMakeLists.txt > "$work/sources"
find include src tools python cmake tests/support -type f -exec cat {} + >> "$work/sources"
# All words of the sources, so that looking one up is quick.
grep -ohE '[A-Za-z_][A-Za-z0-9_]*' "$work/sources" | sort -u > "$work/words"

for document in "$@"; do
  [ -f "$document" ] || { complain "$document does not exist"; continue; }

  # Paths from the root of the repository, wherever they stand in the text.
  grep -ohE '(^|[^A-Za-z0-9_/.-])(src|include|tests|tools|python|docs|cmake|scripts|data|examples|bench|\.ci)/[A-Za-z0-9_./-]+' \
    "$document" | grep -oE '(src|include|tests|tools|python|docs|cmake|scripts|data|examples|bench|\.ci)/.*' |
    sed 's/[./]*$//' | sort -u > "$work/paths" || true
  while read -r path; do
    [ -e "$path" ] || complain "$document: $path does not exist"
  done < "$work/paths"

  # Relative links.
  grep -ohE '\]\([^)]+\)' "$document" | sed 's/^](//; s/)$//; s/#.*//' | grep -vE '^(https?:|$)' | sort -u > "$work/links" ||
    true
  while read -r link; do
    [ -e "$(dirname "$document")/$link" ] || complain "$document: the link to $link does not exist"
  done < "$work/links"

  # Identifiers: code spans such as `Type::member`, `call()`, `fiw_name`, `kConstant`, `CamelCase`. Every word of such a
  # span is looked up.
  sed '/^```/,/^```/d' "$document" | grep -ohE '`[^` ]+`' | tr -d '`' |
    grep -E '::|\(\)$|^fiw_|^FIW_|^k[A-Z]|^[A-Z][a-z]+[A-Z]' | grep -vE '[/.*<]' | sort -u > "$work/spans" || true
  while read -r span; do
    for word in $(echo "$span" | grep -oE '[A-Za-z_][A-Za-z0-9_]*'); do
      grep -qxF "$word" "$work/words" || complain "$document: no source mentions $word of '$span'"
    done
  done < "$work/spans"

  # Presets.
  grep -ohE '(--preset|PRESET=|scripts/build) ?[a-z_]+' "$document" | sed -E 's/.*[ =]//' | sort -u > "$work/presets" || true
  while read -r preset; do
    grep -q "\"name\": \"$preset\"" CMakePresets.json || complain "$document: no such preset: $preset"
  done < "$work/presets"

  if [ "$(basename "$document")" = README.md ]; then
    sed -n '/^```cpp$/,/^```$/{/^```/d;p}' "$document" > "$work/example"
    diff "$work/example" examples/decode_step.cc || complain "$document: its C++ example differs from examples/decode_step.cc"
  fi
done
[ $status -eq 0 ] && echo "$# documents: every name exists"
exit $status
