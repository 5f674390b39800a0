#include "support/random.h"

#include <array>
#include <cstdlib>
#include <string>

namespace fiw::test {

std::uint64_t choose_seed() {
  if (const char* seed = std::getenv("FIW_TEST_SEED")) return std::stoull(seed);
  return std::random_device{}();
}

float Rng::normal() {
  constexpr std::size_t kCount = 8192;
  static const std::array<float, kCount> kDeviates = [] {
    std::mt19937_64 engine;
    std::normal_distribution<float> normal;
    std::array<float, kCount> deviates{};
    for (float& deviate : deviates) deviate = normal(engine);
    return deviates;
  }();
  return kDeviates[engine_() % kCount];
}

}  // namespace fiw::test
