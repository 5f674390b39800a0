#!/bin/sh
# The shared library exports what fiw.h declares and nothing else, and the C test program uses all of it.
# Usage: symbols_test.sh LIBRARY HEADER TEST_PROGRAM
set -eu
library=$1 header=$2 program=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Names in nm's output: the last field, without a version suffix.
names() { awk 'NF { sub(/@.*/, "", $NF); print $NF }' | sort -u; }
declared() { sed -n 's/^FIW_API [^(]*[ *]\(fiw_[a-z0-9_]*\)(.*/\1/p' "$1" | sort -u; }
# Prints the lines in which two sorted lists differ; succeeds when there are none.
same() {
  if diff "$1" "$2" > "$work/difference"; then return 0; fi
  echo "$3 (<) and $4 (>) differ:"
  cat "$work/difference"
  return 1
}

# The checks must be able to fail: a C++ name, a missing function and an unused one are differences.
printf '%s\n' '0000 T fiw_run' '0000 T _ZN3fiw4ErrorE' | names > "$work/a"
printf '%s\n' 'FIW_API int fiw_run(void);' > "$work/h"
declared "$work/h" > "$work/b"
if same "$work/a" "$work/b" a b > /dev/null; then echo "the check does not see a foreign symbol"; exit 1; fi
if same "$work/b" /dev/null b none > /dev/null; then echo "the check does not see a missing function"; exit 1; fi
[ "$(cat "$work/b")" = fiw_run ] || { echo "the check does not read declarations"; exit 1; }

declared "$header" > "$work/declared"
nm -D --defined-only "$library" | names > "$work/exported"
nm -D --undefined-only "$program" | names | grep '^fiw_' > "$work/used"
status=0
same "$work/declared" "$work/exported" "declared in fiw.h" "exported by the library" || status=1
same "$work/declared" "$work/used" "declared in fiw.h" "used by the test program" || status=1
echo "$(wc -l < "$work/exported") functions exported"
exit $status
