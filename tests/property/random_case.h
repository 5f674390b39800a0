// Random attention cases over everything that the calls allow.
#pragma once

#include "support/problem.h"

namespace fiw::test {

/// Up to 8 requests of up to about 2,000 tokens, any legal heads, dims, types, layouts and options.
Case random_case(Op op, Rng& rng);
/// The same variety in problems so small that a thousand of them are quick.
Case small_random_case(Op op, Rng& rng);
Op random_op(Rng& rng);

}  // namespace fiw::test
