#!/bin/sh
# fiw.h compiles alone, without a warning, as C11, C17 and C++20, and so does the example in its introduction.
# Usage: header_test.sh CC CXX INCLUDE_DIR
set -eu
cc=$1 cxx=$2 include=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-Wall -Wextra -pedantic -Werror -fsyntax-only -I$include"

printf '#include <fiw/fiw.h>\n#include <fiw/fiw.h>\ntypedef fiw_error used;\n' > "$work/alone.c"
cp "$work/alone.c" "$work/alone.cc"
{
  printf '#include <fiw/fiw.h>\n'
  sed -n 's|^//     ||p' "$include/fiw/fiw.h"
} > "$work/example.c"
grep -q '^fiw_status decode_step' "$work/example.c"
# The compiler must be able to object.
{ cat "$work/example.c"; printf 'int broken(void) { fiw_error e = 1; }\n'; } > "$work/broken.c"

for standard in c11 c17; do
  "$cc" -std=$standard $flags "$work/alone.c"
  "$cc" -std=$standard $flags "$work/example.c"
done
"$cxx" -std=c++20 $flags "$work/alone.cc"
if "$cc" -std=c11 $flags "$work/broken.c" 2> /dev/null; then
  echo "the compiler accepts what is wrong"
  exit 1
fi
