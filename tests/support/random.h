// Random inputs that a failure can be reproduced from: every test draws from one generator whose seed it prints.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <random>
#include <string>

namespace fiw::test {

/// How many of `full` random rounds a test does: a quarter where a sanitizer makes each take several times as long.
constexpr int rounds(int full) {
#ifdef FIW_SANITIZED
  return full / 4;
#else
  return full;
#endif
}

/// The FIW_TEST_SEED of the environment, else a fresh one.
std::uint64_t choose_seed();

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t next_seed() { return engine_(); }
  /// Uniform in lo..hi, both included.
  std::int32_t uniform(std::int32_t lo, std::int32_t hi) { return std::uniform_int_distribution(lo, hi)(engine_); }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  /// One of a few thousand normal deviates, which is much faster than a fresh one and as good for tests.
  float normal();
  /// One element of an array or vector.
  template <class Range>
  auto pick(const Range& choices) {
    return *(std::begin(choices) + uniform(0, static_cast<std::int32_t>(std::size(choices)) - 1));
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return *(choices.begin() + uniform(0, static_cast<std::int32_t>(choices.size()) - 1));
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

/// Mixed into a fixture: a generator, and its seed in every failure message.
class Seeded {
 protected:
  Seeded() : Seeded(choose_seed()) {}
  explicit Seeded(std::uint64_t seed)
      : rng_(seed), trace_("reproduce with", 0, "FIW_TEST_SEED=" + std::to_string(seed)) {}

  Rng rng_;

 private:
  testing::ScopedTrace trace_;
};

}  // namespace fiw::test
