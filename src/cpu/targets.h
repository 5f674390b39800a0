// Which SIMD targets the kernels are built for; included before any Highway header.
#pragma once

// Vectors live in arrays and their width is a compile-time constant, which scalable vectors do not allow. SSSE3 adds
// nothing over the fallback but build time.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
