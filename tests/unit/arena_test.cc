// The arena: slices never overlap, come back whole, and outlive the workspace that took them.
#include "core/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "fiw/error.h"

namespace fiw {
namespace {

/// Counts what the arena holds, and can run dry.
struct Pool {
  std::size_t held = 0;
  std::size_t limit = SIZE_MAX;
  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, Stream) {
    auto& pool = *static_cast<Pool*>(context);
    if (pool.held + bytes > pool.limit) return nullptr;
    pool.held += bytes;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  static void release(void* context, void* memory, std::size_t bytes, Stream) {
    static_cast<Pool*>(context)->held -= bytes;
    std::free(memory);
  }
  std::shared_ptr<Backend> backend() {
    return make_cpu_backend(1, {.allocate = &allocate, .free = &release, .context = this});
  }
};

TEST(Arena, SlicesNeverOverlapAndComeBack) {
  Pool pool;
  auto arena = std::make_shared<Arena>(pool.backend());
  std::mt19937 rng(3);
  std::map<std::uint8_t, ArenaSlice> live;
  for (int step = 0; step < 20000; ++step) {
    const auto tag = static_cast<std::uint8_t>(rng());
    if (auto it = live.find(tag); it != live.end()) {
      for (std::size_t i = 0; i < it->second.size(); ++i) ASSERT_EQ(it->second.data()[i], std::byte{tag});
      live.erase(it);
    } else {
      ArenaSlice slice = arena->take(rng() % 5000, nullptr);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(slice.data()) % 64, 0U);
      std::memset(slice.data(), tag, slice.size());
      live.emplace(tag, std::move(slice));
    }
  }
  live.clear();
  // Everything merged back: the whole first block can be taken at once without growing.
  const std::size_t capacity = arena->capacity();
  const ArenaSlice whole = arena->take(Arena::kMinBlock, nullptr);
  EXPECT_EQ(arena->capacity(), capacity);
}

TEST(Arena, OutOfMemoryNamesTheBytesAndKeepsTheRest) {
  Pool pool;
  pool.limit = Arena::kMinBlock;
  auto arena = std::make_shared<Arena>(pool.backend());
  ArenaSlice small = arena->take(100, nullptr);
  try {
    arena->take(2 * Arena::kMinBlock, nullptr);
    FAIL() << "took more than the pool has";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kOutOfMemory);
    EXPECT_EQ(error.bytes_required(), 2 * Arena::kMinBlock);
  }
  EXPECT_GE(arena->take(1000, nullptr).size(), 1000U);
}

TEST(Arena, GoesWithItsLastSlice) {
  Pool pool;
  auto arena = std::make_shared<Arena>(pool.backend());
  ArenaSlice slice = arena->take(1, nullptr);
  arena.reset();
  EXPECT_GT(pool.held, 0U);
  std::memset(slice.data(), 1, slice.size());
  slice = {};
  EXPECT_EQ(pool.held, 0U);
}

}  // namespace
}  // namespace fiw
