// Fresh random inputs on every run, and the seed to get them again.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace fiw::cli {

/// A generator seeded from FIW_TEST_SEED, or anew; the seed is recorded with the test, and printed when it fails.
class SeededTest : public testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure()) std::printf("FIW_TEST_SEED=%llu repeats this\n", static_cast<unsigned long long>(seed_));
  }

  std::int32_t between(std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(random_);
  }

 private:
  static std::uint64_t make_seed() {
    const char* given = std::getenv("FIW_TEST_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  }

  std::uint64_t seed_ = make_seed();

 protected:
  std::mt19937_64 random_{seed_};
};

}  // namespace fiw::cli
