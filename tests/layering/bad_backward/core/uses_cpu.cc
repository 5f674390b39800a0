// A file that breaks the rule on purpose: core must not know a backend. Never compiled.
#include "cpu/stream.h"
